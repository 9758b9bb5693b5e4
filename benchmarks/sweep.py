"""Times tile configurations of one kernel through kernel_options, which is how a caller fixes them too.

The idea: every configuration is first compiled by small calls in parallel processes, which leave the kernels in Triton's
cache on disk; the timing process then only loads them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import flexattn
from benchmarks import check, timing
from benchmarks.peers import PEERS, said
from benchmarks.problems import Problem, Shape, make_variant
from benchmarks.results import OURS, ROOT, Row
from benchmarks.session import Session

KERNELS = ("forward", "dq", "dkdv")
Config = tuple[int, int, int, int]  # BLOCK_M, BLOCK_N, warps, stages
# Operations a kept pair, for an element of q's and k's head dimension and one of v's: what the kernel computes.
_FLOPS = {"forward": (2, 2), "dq": (4, 2), "dkdv": (4, 4)}


def configurations(kernel: str, tiles: Sequence[int], warps: Sequence[int], stages: Sequence[int]) -> list[Config]:
    """Everything to try; what does not fit is refused by the library and recorded so."""
    found = itertools.product(tiles, tiles, warps, stages)
    return [c for c in found if c[0] * c[1] >= 32 * 64 and c[0] * c[1] <= 128 * 256]


def options(kernel: str, config: Config) -> dict[str, int]:
    """kernel_options that fix one kernel's tiles; the other backward kernel, which is not run, gets tiles that always fit."""
    prefix, suffix, other = {"forward": ("fwd_", "", ""), "dkdv": ("bwd_", "1", "2"), "dq": ("bwd_", "2", "1")}[kernel]
    m, n, warps, stages = config
    names = (f"{prefix}BLOCK_M{suffix}", f"{prefix}BLOCK_N{suffix}", f"{prefix}num_warps", f"{prefix}num_stages")
    found = dict(zip(names, (m, n, warps, stages)))
    return {**found, **{f"bwd_BLOCK_{side}{other}": 32 for side in "MN"}} if other else found


class Kernel:
    """One kernel of one problem, runnable with any configuration."""

    def __init__(self, kernel: str, problem: Problem) -> None:
        self.kernel, self.problem = kernel, problem
        variant, length = problem.variant, problem.shape.length
        self.tensors = [x.requires_grad_() for x in problem.tensors()]
        self.grad = torch.randn_like(self.tensors[0][..., : problem.shape.value_dim])
        self.arguments: dict[str, Any] = {"score_mod": variant.score_mod}
        if variant.mask_mod is not None:
            self.arguments["block_mask"] = flexattn.create_block_mask(
                variant.mask_mod, None, None, length, length, device=problem.device
            )

    def prepare(self, config: Config) -> Callable[[], Sequence[Tensor]]:
        """What to time: the forward; or, after a forward, the gradients that need this kernel (and the delta pre-pass)."""
        arguments: dict[str, Any] = {**self.arguments, "kernel_options": options(self.kernel, config)}
        call: Callable[[], Any] = lambda: flexattn.flex_attention(*self.tensors, **arguments)
        if self.kernel == "forward":
            return lambda: (call(),)
        wanted = self.tensors[:1] if self.kernel == "dq" else self.tensors[1:]
        out = call()
        return lambda: torch.autograd.grad(out, wanted, self.grad, retain_graph=True)

    def check(self, results: Sequence[Tensor], exact: check.Exact) -> float:
        """The largest error of what the kernel computes; raises WrongResult."""
        parts = {"forward": [0], "dq": [1], "dkdv": [2, 3]}[self.kernel]
        worst = 0.0
        for part, result in zip(parts, results):
            for (b, h), whole in zip(exact.heads, exact.whole):
                error = check.difference(result[b, h], whole[part])
                if not error <= 2e-2:
                    raise check.WrongResult(f"result {part} of the {self.kernel} kernel is {error:.2g} from float64")
                worst = max(worst, error)
        return worst


def run(
    session: Session, shapes: Sequence[str], variants: Sequence[str], kernels: Sequence[str],
    configs: Callable[[str], list[Config]], sizes: dict[str, Shape], workers: int, top: int,
) -> None:  # fmt: skip
    """All of them; the best ones of each are printed last."""
    for shape, name, kernel in itertools.product(shapes, variants, kernels):
        chosen = configs(kernel)
        if workers:
            compile_all(sizes[shape], name, kernel, chosen, workers, session.device.type)
            session.say(f"compiled {len(chosen)} configurations of {kernel}, {shape} {name}")
        problem = Problem(sizes[shape], make_variant(name, sizes[shape], session.device), session.device, session.dtype)
        one = Kernel(kernel, problem)
        exact = check.exact(problem, [x.detach() for x in one.tensors], one.grad)
        rows = list(_rows(session, one, chosen, exact))
        best = sorted((r for r in rows if r["status"] == "ok"), key=lambda r: r["ms"])[:top]
        session.say(f"best of {kernel}, {shape} {name}:")
        for row in best:
            print(f"    {row['config']}  {row['ms']:.4g} ms  {row['tflops']:.4g} TFLOP/s", flush=True)


def _rows(session: Session, kernel: Kernel, configs: Sequence[Config], exact: check.Exact) -> Iterator[Row]:
    where = (kernel.problem.shape, kernel.problem.variant.name)
    shape = kernel.problem.shape
    of_keys, of_values = _FLOPS[kernel.kernel]
    a_pair = of_keys * shape.dim + of_values * shape.value_dim
    flops = a_pair * shape.batch * shape.heads * kernel.problem.variant.kept
    for config in configs:
        row: Row = {"config": list(config)}
        try:
            call = kernel.prepare(config)
            row["error"] = {kernel.kernel: kernel.check(call(), exact)}
            call()
            times = [timing.milliseconds(call, session.calls, session.device) for _ in range(session.rounds)]
            ms = statistics.median(times)
            row |= {"status": "ok", "ms": ms, "tflops": flops / ms / 1e9, "rounds": session.rounds}
        except check.WrongResult as error:
            row |= {"status": "wrong", "reason": str(error)}
        except Exception as error:  # a configuration that does not fit or does not build is a result of the sweep
            row |= {"status": "failed", "reason": said(error)}
            session.require_device()
        session.record(f"sweep_{kernel.kernel}", where, PEERS[OURS], **row)
        yield row


# ---------------------------------------------------------------- compiling beforehand
def compile_all(shape: Shape, variant: str, kernel: str, configs: Sequence[Config], workers: int, device: str) -> None:
    """Fills the cache on disk: each process builds its share with calls on a few heads of the same length class."""
    small = Shape(1, 2, min(shape.length, 1024), shape.dim, v_dim=shape.v_dim)
    shares = [configs[i::workers] for i in range(workers)]
    command = [sys.executable, "-m", "benchmarks", "compile-tiles", kernel, variant]
    processes = [
        subprocess.Popen([*command, json.dumps(list(small)), json.dumps(share), "--device", device], cwd=ROOT)
        for share in shares
        if share
    ]
    for process in processes:
        process.wait()


def compile_child(kernel: str, variant: str, shape: Shape, configs: Sequence[Config], device: torch.device) -> int:
    """What one of these processes does; a configuration that does not build is left to the timing process to report."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = Kernel(kernel, Problem(shape, make_variant(variant, shape, device), device, dtype))
    for config in configs:
        try:
            one.prepare(config)()
        except Exception as error:
            print(f"{kernel} {config}: {said(error)}", file=sys.stderr)
    return 0
