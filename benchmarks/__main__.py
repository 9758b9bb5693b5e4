"""Command line of the benchmarks.

    python -m benchmarks gpu --what forward backward memory --shapes d128 d64 --peers flexattn torch_flex --out FILE
    python -m benchmarks cpu --out benchmarks/results/cpu.json
    python -m benchmarks sweep --kernels forward dq dkdv --shapes d64 --variants causal --out FILE
    python -m benchmarks merge FILE ... --into benchmarks/results/h200.json
    python -m benchmarks report [--check]

Rows are printed and saved one by one, so a run that is cut off loses nothing; pieces merge. The exit status is 1 where one of
flexattn's own rows is an error; what a peer cannot do is a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import attention, calls, cpu, decode, masks, problems, report, results, sweep
from benchmarks.peers import PEERS
from benchmarks.results import OURS, Recorder, environment
from benchmarks.session import Session
from benchmarks.warm import seconds_of

WHAT = ("forward", "backward", "memory", "decode", "masks", "host", "first_call", "ceilings")
DEFAULT_SHAPES = ("d128", "d128_4k", "d64")
DEFAULT_DECODE_SHAPES = ("8k", "128k", "16x8k", "64x4k", "4x64k")
DEFAULT_PEERS = (OURS, "torch_flex")


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    gpu = commands.add_parser("gpu", help="kernels beside their peers")
    gpu.add_argument("--what", nargs="+", choices=WHAT, default=["forward", "backward"])
    gpu.add_argument("--shapes", nargs="+", choices=tuple(problems.SHAPES), default=list(DEFAULT_SHAPES))
    gpu.add_argument("--variants", nargs="+", choices=problems.VARIANTS, default=list(problems.VARIANTS))
    gpu.add_argument("--decode-shapes", nargs="+", choices=tuple(problems.DECODE_SHAPES))
    gpu.add_argument("--decode-variants", nargs="+", choices=problems.DECODE_VARIANTS, default=["none", "causal"])
    gpu.add_argument("--mask-lengths", nargs="+", type=int, default=list(masks.LENGTHS))
    gpu.add_argument("--mask-variants", nargs="+", choices=masks.VARIANTS, default=list(masks.VARIANTS))
    gpu.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(DEFAULT_PEERS))
    gpu.add_argument(
        "--warm", type=int, default=0, help="compile attention and torch's mask builder in this many processes first"
    )
    gpu.add_argument("--budget", type=float, help="seconds after which no new case starts; --warm may take two thirds")
    _measuring(gpu, rounds=10, calls=4)
    on_cpu = commands.add_parser("cpu", help="the path without a GPU beside torch's")
    on_cpu.add_argument("--lengths", nargs="+", type=int, default=list(cpu.LENGTHS))
    on_cpu.add_argument("--variants", nargs="+", choices=cpu.VARIANTS, default=list(cpu.VARIANTS))
    on_cpu.add_argument("--quick", action="store_true", help="only causal and window at 4096")
    _measuring(on_cpu, rounds=7, calls=1)
    swept = commands.add_parser("sweep", help="tiles of one kernel")
    swept.add_argument("--kernels", nargs="+", choices=sweep.KERNELS, default=list(sweep.KERNELS))
    swept.add_argument("--shapes", nargs="+", choices=tuple(problems.SHAPES), default=["d128"])
    swept.add_argument("--variants", nargs="+", choices=problems.VARIANTS, default=["causal"])
    swept.add_argument("--tiles", nargs="+", type=int, default=[32, 64, 128])
    swept.add_argument("--warps", nargs="+", type=int, default=[4, 8])
    swept.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3, 4])
    swept.add_argument("--workers", type=int, default=14, help="processes that compile beforehand; 0 for none")
    swept.add_argument("--top", type=int, default=6)
    _measuring(swept, rounds=3, calls=3)
    merge = commands.add_parser("merge", help="rows of several files into one")
    merge.add_argument("files", nargs="+", type=Path)
    merge.add_argument("--into", type=Path, required=True)
    made = commands.add_parser("report", help="the README's section and the pictures, from benchmarks/results")
    made.add_argument("--check", action="store_true", help="change nothing; say whether they are up to date")
    first = commands.add_parser("first-call", help="used by gpu --what first_call: one process")
    first.add_argument("peer", choices=tuple(PEERS))
    first.add_argument("shape", choices=tuple(problems.SHAPES))
    first.add_argument("variants", nargs="+", choices=problems.VARIANTS)
    tiles = commands.add_parser("compile-tiles", help="used by sweep: one process")
    for name in ("kernel", "variant", "sizes", "configs"):
        tiles.add_argument(name)
    builder = commands.add_parser("compile-mask", help="used by gpu --what masks --warm: one process")
    builder.add_argument("variant", choices=masks.VARIANTS)
    builder.add_argument("length", type=int)
    for command in (first, tiles, builder):
        command.add_argument("--device", default="cuda")
    return top


def _measuring(command: argparse.ArgumentParser, *, rounds: int, calls: int) -> None:
    command.add_argument("--device", choices=("cuda", "cpu"), default="cpu" if command.prog.endswith("cpu") else "cuda")
    command.add_argument("--rounds", type=int, default=rounds)
    command.add_argument("--calls", type=int, default=calls, help="launches in a row in each round")
    command.add_argument("--out", type=Path, help="file of results to add to; nothing is saved without it")
    command.add_argument("--commit", help="of the code that is measured, where this is no git checkout")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    given = parser().parse_args(arguments)
    if getattr(given, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --shapes tiny goes through the same code", file=sys.stderr)
        return 2
    return {
        "gpu": run_gpu, "cpu": run_cpu, "sweep": run_sweep, "merge": run_merge, "report": run_report,
        "first-call": run_first_call, "compile-tiles": run_compile_tiles,
        "compile-mask": run_compile_mask,
    }[given.command](given)  # fmt: skip


def _session(given: argparse.Namespace, peers: Sequence[str]) -> Session:
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    recorder = Recorder(given.out, environment(device, given.commit))
    budget = getattr(given, "budget", None)
    deadline = None if budget is None else time.monotonic() + budget
    session = Session(device, dtype, recorder, list(peers), given.rounds, given.calls, deadline)
    session.say(", ".join(f"{key} {value}" for key, value in recorder.environment.items()))
    return session


def _finish(session: Session) -> int:
    """Says how it went; 1 if a row of flexattn's own is an error."""
    session.say(
        f"{len(session.recorder.added)} rows" + (f" in {session.recorder.path}" if session.recorder.path else "")
    )
    for row in session.recorder.bad:
        print(f"ERROR {results.line(row)}", flush=True)
    return 1 if session.recorder.bad else 0


def run_gpu(given: argparse.Namespace) -> int:
    """The measurements asked for, in a fixed order."""
    names = list(dict.fromkeys([OURS, *given.peers]))
    shapes = [problems.SHAPES[n] for n in given.shapes]
    decode_names = given.decode_shapes or (["tiny"] if given.device == "cpu" else list(DEFAULT_DECODE_SHAPES))
    wanted = [w for w in given.what if w in attention.WHAT]
    session = _session(given, names)
    if given.warm and wanted:
        options = ["--peers", *names, "--device", given.device]
        failed = attention.warm(options, given.shapes, given.variants, given.warm, seconds_of(given.budget))
        count = len(given.shapes) * len(given.variants)
        session.say(f"compiled {count} cases in {given.warm} processes at a time, {failed} did not end well")
    if "ceilings" in given.what:
        calls.ceilings(session)
    if wanted:
        attention.run(session, shapes, given.variants, wanted)
    if "decode" in given.what:
        decode.run(session, [problems.DECODE_SHAPES[n] for n in decode_names], given.decode_variants)
    if "host" in given.what:
        calls.host(session)
    if "masks" in given.what:
        warmed = masks.run_warm(session, given.mask_lengths, given.mask_variants, given.warm, seconds_of(given.budget))
        masks.run(session, given.mask_lengths, given.mask_variants, warmed)
    if "first_call" in given.what:
        calls.first(session, given.shapes[0], shapes[0])
    return _finish(session)


def run_cpu(given: argparse.Namespace) -> int:
    """The CPU lines and the promises about them."""
    lengths, variants = ((4096,), ("causal", "window")) if given.quick else (given.lengths, given.variants)
    session = _session(given, cpu.PEERS)
    missed = cpu.run(session, lengths, variants)
    print("\n".join(["missed:", *missed]) if missed else "every promise kept")
    return max(_finish(session), 1 if missed else 0)


def run_sweep(given: argparse.Namespace) -> int:
    """All configurations of the kernels asked for."""
    session = _session(given, [OURS])
    configs = lambda kernel: sweep.configurations(kernel, given.tiles, given.warps, given.stages)
    sweep.run(session, given.shapes, given.variants, given.kernels, configs, problems.SHAPES, given.workers, given.top)
    session.say(f"{len(session.recorder.added)} rows")
    return 0


def run_merge(given: argparse.Namespace) -> int:
    """Files into one; the later file wins."""
    rows = results.load(given.into)
    for file in given.files:
        found = results.load(file)
        print(f"{file}: {len(found)} rows")
        rows = results.merge(rows, found)
    results.save(given.into, rows)
    print(f"{given.into}: {len(rows)} rows")
    return 0


def run_report(given: argparse.Namespace) -> int:
    """README and pictures; with --check only the exit status."""
    stale = report.stale()
    if given.check:
        print("\n".join(stale) if stale else "up to date")
        return 1 if stale else 0
    for path in report.write():
        print(f"wrote {path.relative_to(results.ROOT)}")
    return 0


def run_first_call(given: argparse.Namespace) -> int:
    """One process of the cold first calls."""
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return calls.first_call_child(given.peer, problems.SHAPES[given.shape], given.variants, device, dtype)


def run_compile_tiles(given: argparse.Namespace) -> int:
    """One process that fills the cache for a sweep."""
    configs = [tuple(c) for c in json.loads(given.configs)]
    shape = problems.Shape(*json.loads(given.sizes))
    return sweep.compile_child(given.kernel, given.variant, shape, configs, torch.device(given.device))


def run_compile_mask(given: argparse.Namespace) -> int:
    """One process that compiles torch's mask builder."""
    masks.compile_child(given.variant, given.length, torch.device(given.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
