"""Times the kernels on one GPU: reads nothing, writes one JSON file; against torch's own flex_attention, or over tiles.

The idea: clocks drift by several per cent, so the two sides alternate in one process and the ratio of each round counts.

    python -m benchmarks.bench_kernels compare out.json [--shapes d128] [--variants none causal] [--rounds 10]
    python -m benchmarks.bench_kernels sweep out.json --kernels forward dq dkdv [--shapes d128] [--variants causal]

`compare` checks outputs and gradients against torch first. `sweep` compiles every configuration in parallel, then times it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flexattn
from flexattn.codegen.emit import emit
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.tile_config import TileConfig, TileProblem, is_legal
from flexattn.runtime import attention, launch
from flexattn.runtime.device import target_for

SHAPES = {"d128": (1, 16, 16384, 128), "d64": (1, 32, 16384, 64)}  # batch, heads, length, head dim
WINDOW, CAP, DOCUMENTS = 1024, 30.0, 12


# ---------------------------------------------------------------- variants
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


def variant(name: str, heads: int, length: int) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, int]:
    """(score_mod, mask_mod, kept pairs of one head)."""
    triangle = length * (length + 1) // 2
    if name == "none":
        return None, None, length * length
    if name == "causal":
        return None, causal, triangle
    if name == "window":
        return None, window, sum(min(i + 1, WINDOW) for i in range(length))
    if name == "softcap":
        return softcap, causal, triangle
    if name == "alibi":
        slopes = torch.exp2(-8.0 * (torch.arange(heads, device="cuda") + 1) / heads)
        return (lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)), causal, triangle
    ends = torch.linspace(0, length, DOCUMENTS + 1).long()
    ends[1:-1] += torch.randint(-300, 300, (DOCUMENTS - 1,), generator=torch.Generator().manual_seed(0))
    sizes = ends.diff()
    ids = torch.repeat_interleave(torch.arange(DOCUMENTS), sizes).int().cuda()
    kept = sum(int(n) * (int(n) + 1) // 2 for n in sizes)
    return None, (lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)), kept


VARIANTS = ("none", "causal", "window", "softcap", "alibi", "documents")


def inputs(shape: tuple[int, int, int, int]) -> list[torch.Tensor]:
    batch, heads, length, dim = shape
    torch.manual_seed(0)
    return [
        torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


# ---------------------------------------------------------------- timing
def milliseconds(run: Callable[[], Any], calls: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def alternate(sides: dict[str, Callable[[], Any]], rounds: int, calls: int) -> dict[str, list[float]]:
    """Milliseconds of each side in each round."""
    for run in sides.values():
        milliseconds(run, 2)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            times[name].append(milliseconds(run, calls))
    return times


def backward_of(out: torch.Tensor, tensors: list[torch.Tensor], grad: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(out, tensors, grad, retain_graph=True)


# ---------------------------------------------------------------- against torch
def compare_one(shape: tuple[int, int, int, int], name: str, rounds: int, theirs: Callable[..., Any]) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import create_block_mask as torch_block_mask

    batch, heads, length, dim = shape
    tensors = inputs(shape)
    score, mask, kept = variant(name, heads, length)
    started = time.perf_counter()
    our_mask = flexattn.create_block_mask(mask, None, None, length, length, device="cuda") if mask else None
    torch.cuda.synchronize()
    mask_ms = 1e3 * (time.perf_counter() - started)
    their_mask = torch_block_mask(mask, None, None, length, length, device="cuda", _compile=True) if mask else None
    ours = lambda: flexattn.flex_attention(*tensors, score_mod=score, block_mask=our_mask)
    others = lambda: theirs(*tensors, score_mod=score, block_mask=their_mask)
    started = time.perf_counter()
    out = ours()
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    out2 = others()
    grads2 = torch.autograd.grad(out2, tensors, grad, retain_graph=True)
    differences = {n: difference(a, b) for n, a, b in zip(("out", "dq", "dk", "dv"), (out, *grads), (out2, *grads2))}
    if max(differences.values()) > 0.02:
        raise SystemExit(f"{name} {shape}: results differ from torch: {differences}")
    row: dict[str, Any] = {
        "shape": shape,
        "variant": name,
        "difference": differences,
        "first_call_s": first,
        "mask_build_ms": mask_ms,
    }
    with torch.no_grad():
        forward = alternate({"ours": ours, "torch": others}, rounds, 4)
    backward = alternate(
        {"ours": backward_of(out, tensors, grad), "torch": backward_of(out2, tensors, grad)}, rounds, 4
    )
    flops = 4 * batch * heads * kept * dim
    for direction, times, work in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        row[direction] = {
            side: {"ms": statistics.median(t), "tflops": work / statistics.median(t) / 1e9} for side, t in times.items()
        }
        row[direction]["speedup"] = statistics.median(b / a for a, b in zip(times["ours"], times["torch"]))
    return row


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference by the norm of the second; NaN never passes a comparison."""
    error = ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20)).item()
    return error if error == error else float("inf")


def compare(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from torch.nn.attention.flex_attention import flex_attention

    theirs = torch.compile(flex_attention)
    rows = []
    for shape, name in itertools.product(arguments.shapes, arguments.variants):
        torch._dynamo.reset()
        row = compare_one(SHAPES[shape], name, arguments.rounds, theirs)
        for direction in ("forward", "backward"):
            ours, torchs = (round(row[direction][side]["tflops"]) for side in ("ours", "torch"))
            print(
                f"{shape} {name} {direction}: {ours} and torch {torchs} TFLOP/s, {row[direction]['speedup']:.3f}x",
                flush=True,
            )
        print(
            "   ",
            {k: f"{v:.1e}" for k, v in row["difference"].items()},
            f"mask {row['mask_build_ms']:.1f} ms",
            flush=True,
        )
        rows.append(row)
        save(arguments.out, rows)
    return rows


# ---------------------------------------------------------------- over tiles
def configurations(kernel: str, dim: int) -> list[TileConfig]:
    """Tiles worth trying; those that cannot fit are dropped before they are compiled."""
    wide, narrow = ((64, 128), (32, 64, 128)) if kernel != "dkdv" else ((32, 64, 128), (64, 128))
    grid = itertools.product(wide, narrow, (4, 8), (1, 2, 3, 4))
    problem = TileProblem(kernel, target_for(torch.device("cuda", torch.cuda.current_device())), 2, dim, dim, False, 0)
    return [c for c in (TileConfig(*g) for g in grid) if is_legal(c, problem)]


def sweep_one(shape: tuple[int, int, int, int], name: str, kernel: str, workers: int) -> list[dict[str, Any]]:
    batch, heads, length, dim = shape
    q, k, v = (x.detach() for x in inputs(shape))
    score, mask, kept = variant(name, heads, length)
    block_mask = flexattn.create_block_mask(mask, None, None, length, length, device="cuda") if mask else None
    problem, plan = attention.prepare((q, k, v), score, (block_mask, None))
    out, lse, _ = launch.forward(problem, plan)
    grad = torch.randn_like(out)
    common = launch.run_delta(problem, plan, out, lse, grad, None)
    needs = (False,) * len(problem.captures)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: launch.forward(problem, plan),
        "dq": lambda: launch.run_dq(problem, plan, common, True, needs),
        "dkdv": lambda: launch.run_dkdv(problem, plan, common, True, True),
    }
    reference = flat(runs[kernel]())
    chosen = next(c for key, c in plan.memo.items() if key[0] == kernel)
    configs = configurations(kernel, dim)
    compile_all([dataclasses.replace(chosen.spec, config=c) for c in configs], workers)
    flops = {"forward": 4, "dq": 6, "dkdv": 8}[kernel] * batch * heads * kept * dim  # what the kernel really computes
    rows = []
    for config in configs:
        launch.legal_tiles = lambda *_, config=config: (config,)  # type: ignore[assignment]
        row: dict[str, Any] = {"shape": shape, "variant": name, "kernel": kernel, "config": dataclasses.astuple(config)}
        try:
            row["difference"] = max(difference(a, b) for a, b in zip(flat(runs[kernel]()), reference))
            row["ms"] = statistics.median(milliseconds(runs[kernel], 3) for _ in range(3))
            compiled = next(
                c for key, c in plan.memo.items() if key[0] == kernel and c.config == config
            ).kernel.compiled
            row |= {"tflops": flops / row["ms"] / 1e9, "registers": compiled.n_regs, "spills": compiled.n_spills}
            row["shared"] = compiled.metadata.shared
        except Exception as error:  # a configuration that does not build is a result of the sweep
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    launch.legal_tiles = _LEGAL
    return sorted(rows, key=lambda r: r.get("ms", 1e9))


_LEGAL = launch.legal_tiles


def flat(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results.float()]
    return [t for r in results for t in flat(r)] if isinstance(results, tuple) else []


def compile_only(spec: KernelSpec) -> None:
    from flexattn.runtime.compile import build

    build(emit(spec))


def compile_all(specs: list[KernelSpec], workers: int) -> None:
    """Fills Triton's cache on disk; the timed process then only loads."""
    import multiprocessing

    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        concurrent.futures.wait([pool.submit(compile_only, spec) for spec in specs], timeout=400)


def sweep(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for shape, name, kernel in itertools.product(arguments.shapes, arguments.variants, arguments.kernels):
        found = sweep_one(SHAPES[shape], name, kernel, arguments.workers)
        rows += found
        save(arguments.out, rows)
        print(f"{shape} {name} {kernel}", flush=True)
        for row in found[: arguments.top]:
            numbers = {k: round(x, 4) for k, x in row.items() if isinstance(x, (int, float))}
            print("   ", row["config"], numbers, row.get("error", ""), flush=True)
    return rows


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    import triton

    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("compare", "sweep"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--kernels", nargs="+", choices=("forward", "dq", "dkdv"), default=["forward", "dq", "dkdv"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--top", type=int, default=6)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels needs a CUDA device")
    {"compare": compare, "sweep": sweep}[arguments.mode](arguments)


if __name__ == "__main__":
    main()
