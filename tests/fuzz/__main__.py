"""Random problems on the kernels for Hopper, each compared with float64: the forward, or with --backward gradients too.

    python -m tests.fuzz --build                                       # without a GPU: kernels into build/fuzz_kernels
    python -m tests.fuzz --problems 10000 --processes 12 --out fuzz.json
    python -m tests.fuzz --backward ...                                # any of these: forward and backward
    python -m tests.fuzz --seed 4711                                   # one problem alone, with its figures
    python -m tests.fuzz --fresh 100                                   # without a GPU: random structures compile
    compute-sanitizer --tool memcheck python -m tests.fuzz --problems 12 --small

The exit status is 0 if every answer is right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.fuzz import ahead
from tests.fuzz.problems import CROWDED, is_crowded, make
from tests.fuzz.runner import (
    BREAKS,
    HANGS,
    Hang,
    Outcome,
    Way,
    limit_programs,
    outcomes_of,
    run_processes,
    share_of,
    too_many_builds,
    work,
)
from tests.fuzz.structures import STRUCTURES

_SHOWN = 40  # failures


def main() -> int:
    options = _options()
    if options.build:
        say = lambda line: print(line, flush=True)
        return ahead.build_all(options.kernels, options.processes, say, is_backward=options.backward)
    if options.fresh:
        return _fresh(options)
    torch.set_num_threads(1)
    seeds = [options.seed] if options.seed is not None else _seeds(options)
    index, count = map(int, options.worker.split("/")) if options.worker is not None else (0, 1)
    programs = options.programs
    if programs is None and (index % 2 == 1 or options.seed is not None and is_crowded(options.seed)):
        programs = CROWDED
    way = Way(options.device, options.kernel, options.small, programs, is_backward=options.backward)
    if programs is not None and options.device == "cuda":
        limit_programs(programs)
    if options.worker is not None:
        share = [s for s in share_of(seeds, index, count) if options.after is None or s > options.after]
        return work(share, way, ahead.use(options.kernels))
    tally = Tally(way, is_loud=options.seed is not None)
    start = time.monotonic()
    if options.processes == 1 or len(seeds) == 1:
        counts, kinds = ahead.use(options.kernels), set[tuple[Any, ...]]()
        for outcome in outcomes_of(seeds, way):
            tally.add(outcome)
            kinds.add(outcome.kind)
        if trouble := too_many_builds(kinds, way):
            tally.add(Outcome(-1, [], trouble))
        ends: list[dict[str, Any]] = [{"end": dict(counts)}]
    else:
        ends = run_processes(seeds, sys.argv[1:], options.processes, options.limit, tally.add)
    report = tally.report(time.monotonic() - start, ends)
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(_text(report))
    return 1 if report["failures"] or report["problems"] != len(seeds) else 0


def _fresh(options: argparse.Namespace) -> int:
    from tests.fuzz.fresh import check_fresh

    names = {seed: f"fresh {seed}" for seed in range(options.first, options.first + options.fresh)}
    say = lambda line: print(line, flush=True)
    return ahead.in_processes(check_fresh, names, options.kernels.with_name("fresh_kernels"), options.processes, say)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random problems against float64.")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--seed", type=int, help="this problem alone")
    parser.add_argument("--only", default="", help="structures whose name has this in it")
    parser.add_argument("--backward", action="store_true", help="gradients too, of smaller problems")
    parser.add_argument("--small", action="store_true", help="small problems in one process, compared on the CPU")
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--device", choices=("cuda", "cpu"), default=here)
    parser.add_argument("--kernel", choices=("hopper_forward", "forward"), default="hopper_forward")
    parser.add_argument("--programs", type=int, help="how many share all tiles; as a rule many and few, by the seed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all problems")
    parser.add_argument("--kernels", type=Path, default=ahead.FOLDER, help="folder of kernels built beforehand")
    parser.add_argument("--build", action="store_true", help="build those, and run nothing")
    parser.add_argument("--fresh", type=int, default=0, help="compile this many random structures, and run nothing")
    parser.add_argument("--out", type=Path, help="a file for the summary")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--after", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.processes = 1
    return options


def _seeds(options: argparse.Namespace) -> list[int]:
    """The first seeds of the structures that are asked for."""
    chosen = [n for n, s in enumerate(STRUCTURES) if options.only in s.name]
    if not chosen:
        sys.exit(f"no structure has {options.only!r} in its name; there are: {', '.join(s.name for s in STRUCTURES)}")
    rounds = range(
        options.first // len(STRUCTURES), options.first // len(STRUCTURES) + 1 + -(-options.problems // len(chosen))
    )
    seeds = [r * len(STRUCTURES) + n for r in rounds for n in chosen]
    return [s for s in seeds if s >= options.first][: options.problems]


class Tally:
    """What has come, and what was wrong with it."""

    def __init__(self, way: Way, *, is_loud: bool) -> None:
        self.way, self.is_loud = way, is_loud
        self.failures: list[str] = []
        self.by_structure: dict[str, dict[str, Any]] = {}
        self.count = 0
        self.worst = dict.fromkeys(way.checks, (0.0, -1))

    def add(self, outcome: Outcome) -> None:
        if outcome.seed >= 0:
            self.count += 1
            structure = STRUCTURES[outcome.seed % len(STRUCTURES)].name
            row = self.by_structure.setdefault(structure, {"problems": 0, **dict.fromkeys(self.way.checks, 0.0)})
            row["problems"] += 1
            for name, figure in zip(self.way.checks, outcome.figures):
                row[name] = max(row[name], figure)
                self.worst[name] = max(self.worst[name], (figure, outcome.seed))
        if outcome.is_right and not self.is_loud:
            return
        text = "all" if outcome.seed < 0 else self._problem(outcome.seed)
        text = f"{text}: {outcome}"
        if not outcome.is_right:
            self.failures.append(text)
        if len(self.failures) <= _SHOWN:
            print(("" if outcome.is_right else "WRONG ") + text, flush=True)

    def _problem(self, seed: int) -> str:
        return str(make(seed, torch.device("cpu"), is_small=self.way.is_small, is_backward=self.way.is_backward))

    def report(self, seconds: float, ends: list[dict[str, Any]]) -> dict[str, Any]:
        import triton

        built = {n: sum(e["end"].get(n, 0) for e in ends) for n in ("loaded", "compiled")}
        gpu = torch.cuda.get_device_name() if self.way.device == "cuda" else "none"
        return {
            "problems": self.count, "failures": len(self.failures), "seconds": round(seconds, 1), "structures": len(self.by_structure),
            "worst": {n: figure for n, (figure, _) in self.worst.items()},
            "worst seeds": {n: seed for n, (_, seed) in self.worst.items()},
            "kernel": self.way.kernel if self.way.device == "cuda" else "torch operations",
            "gradients": self.way.is_backward, "kernels": built, "device": gpu,
            "torch": torch.__version__, "triton": triton.__version__, "by structure": self.by_structure, "wrong": self.failures,
        }  # fmt: skip


def _text(report: dict[str, Any]) -> str:
    worst = ", ".join(f"{name} {figure:.3g}" for name, figure in report["worst"].items())
    kernels = ", ".join(f"{count} {how}" for how, count in report["kernels"].items())
    kernel = f"{report['kernel']}{', gradients' if report['gradients'] else ''}"
    return (
        f"{report['problems']} problems over {report['structures']} structures in {report['seconds']} s on {report['device']} "
        f"({kernel}; kernels: {kernels}): {report['failures']} wrong; worst errors, of what is allowed: {worst}"
    )


if __name__ == "__main__":
    try:
        status = main()
    except Hang as hang:
        print(f"WRONG: {hang}")
        status = HANGS
    if status in (HANGS, BREAKS):  # a device that does not answer would not let this process end in the usual way
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)
