"""Runs problems and judges them: in this process, or in several that one process watches.

Reads seeds; makes outcomes. The ideas: launches of a group of problems go out together, each with an event behind it, and nothing
that waits for the device happens before those have come, so that a kernel that hangs is named after a time limit; a structure
belongs to two processes, which then load its kernels once: in one of them its programs are as many as the device likes, in the other
few, so that each of them works on many tiles.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexattn
from flexattn.runtime import device as devices
from tests.fuzz import gradients
from tests.fuzz.gradients import judge_gradients
from tests.fuzz.judge import CHECKS, judge
from tests.fuzz.problems import Problem, is_crowded, make
from tests.fuzz.structures import STRUCTURES

GROUP = 8  # problems between two looks at the device
HANGS_AFTER = 30.0  # seconds for a group
_SLOWER = 20  # is a kernel that a tool looks at
_SILENT = 180.0  # seconds; a process that builds kernels says nothing for a while
_RESTARTS = 3
_GRADIENTS = ("hopper_backward", "hopper_query_gradient", "hopper_key_gradients", "dq", "dkdv")  # kernels
HANGS, BREAKS = 3, 4  # exit statuses of a process that cannot go on


@dataclass(frozen=True)
class Way:
    """How problems are run.

    Attributes:
        device: 'cuda' or 'cpu'.
        kernel: which forward kernel must run on a GPU: 'hopper_forward' or 'forward'.
        is_small: small problems, whose right answers are computed on the CPU (for tools that slow a GPU down).
        programs: how many share all tiles; None for as many as the device has processors.
        corrupt: what happens to out and lse before they are judged; for tests of the judge.
        is_backward: problems ask for gradients, which are judged too.
    """

    device: str
    kernel: str = "hopper_forward"
    is_small: bool = False
    programs: int | None = None
    corrupt: Callable[[Problem, Tensor, Tensor], None] | None = None
    is_backward: bool = False

    @property
    def checks(self) -> tuple[str, ...]:
        """What an outcome's figures are of."""
        return (*CHECKS, *gradients.CHECKS) if self.is_backward else CHECKS

    @property
    def options(self) -> dict[str, Any]:
        return {"warp_specialized": self.kernel == "hopper_forward"} if self.device == "cuda" else {}


@dataclass
class Outcome:
    """One problem: figures of CHECKS (more than 1 is wrong), or why there are none."""

    seed: int
    figures: list[float]
    trouble: str = ""
    kind: tuple[Any, ...] = ()  # of the problem

    @property
    def is_right(self) -> bool:
        return not self.trouble and bool(self.figures) and max(self.figures) <= 1.0

    def __str__(self) -> str:
        checks = (*CHECKS, *gradients.CHECKS)
        figures = ", ".join(f"{name} {figure:.3g}" for name, figure in zip(checks, self.figures))
        return self.trouble or figures


class Hang(Exception):
    """A kernel does not end."""

    def __init__(self, seed: int) -> None:
        super().__init__(f"the kernel of seed {seed} does not end")
        self.seed = seed


# ---------------------------------------------------------------- in this process
def run_group(seeds: Sequence[int], way: Way) -> list[Outcome]:
    """Outcomes of a few problems.

    Raises:
        Hang: one of them does not end; this process cannot go on.
    """
    device = torch.device(way.device, 0) if way.device == "cuda" else torch.device(way.device)
    problems = [make(seed, device, is_small=way.is_small, is_backward=way.is_backward) for seed in seeds]
    launched = [_launch(problem, way) for problem in problems]
    patience = HANGS_AFTER * (_SLOWER if way.is_small else 1)
    _wait([(p.seed, event) for p, (_, event, _) in zip(problems, launched) if event is not None], patience)
    outcomes = [Outcome(p.seed, [], trouble, p.kind) for p, (_, _, trouble) in zip(problems, launched)]
    figures = []
    for problem, (results, _, trouble) in zip(problems, launched):
        if not trouble:
            if way.corrupt is not None:
                way.corrupt(problem, results[0], results[1])
            figures.append(_figures(problem.to(torch.device("cpu")) if way.is_small else problem, results, way))
    if figures:
        rows = iter(torch.stack(figures).tolist())
        for outcome in outcomes:
            outcome.figures = [] if outcome.trouble else next(rows)
    return outcomes


def _figures(problem: Problem, results: tuple[Any, ...], way: Way) -> Tensor:
    """Of a problem's (out, lse, maxima), behind which are gradients if it asks for some."""
    found = judge(problem, *results[:3])
    if not way.is_backward:
        return found
    return torch.cat([found, judge_gradients(problem, *results[:2], results[3:], is_rounded=way.device == "cuda")])


def _launch(problem: Problem, way: Way) -> tuple[Any, torch.cuda.Event | None, str]:
    """(results, an event behind them, what went wrong)."""
    before = flexattn.stats().launches.copy()
    try:
        with problem.manner():
            results = problem.call(**way.options)
            if way.is_backward:
                results = (*(x if x is None else x.detach() for x in results), *problem.differentiate(*results[:2]))
    except Exception as error:
        if isinstance(error, torch.AcceleratorError):  # the device answers nothing any more
            raise
        return None, None, f"{type(error).__name__}: {error}"
    if way.device != "cuda":
        return results, None, ""
    event = torch.cuda.Event()
    event.record()
    launches = flexattn.stats().launches
    expected = {way.kernel: 1, **({"hopper_backward": int(problem.is_fused)} if way.is_backward else {})}
    ran = {kernel: launches[kernel] - before[kernel] for kernel in expected}
    wrong = [f"{kernel} ran {count} times" for kernel, count in ran.items() if count != expected[kernel]]
    return results, event, ", ".join(wrong)


def _wait(events: list[tuple[int, torch.cuda.Event]], patience: float) -> None:
    until = time.monotonic() + patience
    for seed, event in events:
        while not event.query():
            if time.monotonic() > until:
                raise Hang(seed)
            time.sleep(0.0005)


def outcomes_of(
    seeds: Sequence[int], way: Way, announce: Callable[[list[int]], None] | None = None
) -> Iterator[Outcome]:
    """Outcomes of many problems, group by group."""
    for first in range(0, len(seeds), GROUP):
        group = list(seeds[first : first + GROUP])
        if announce is not None:
            announce(group)
        yield from run_group(group, way)


def too_many_builds(kinds: Set[tuple[Any, ...]], way: Way) -> str:
    """Whether more kernels were built than these problems are of kinds: a number or a length was compiled in."""
    seen, forward = flexattn.stats(), {kind[:3] for kind in kinds}
    builds = seen.builds + seen.disk_hits
    allowed = {way.kernel: len(forward), **(dict.fromkeys(_GRADIENTS, len(kinds)) if way.is_backward else {})}
    wrong = [
        f"{builds[n]} {n} kernels were built for {most} kinds of problems"
        for n, most in allowed.items()
        if builds[n] > most
    ]
    return ", ".join(wrong)


# ---------------------------------------------------------------- one of several processes
def share_of(seeds: Sequence[int], index: int, count: int) -> list[int]:
    """The seeds of one of `count` processes: crowded problems (if there are several processes) in odd ones, a structure in one
    process of each kind."""
    if count == 1:
        return list(seeds)
    alike = range(index % 2, count, 2)
    place, kinds = alike.index(index), len(alike)
    return [s for s in seeds if is_crowded(s) == bool(index % 2) and s % len(STRUCTURES) % kinds == place]


def limit_programs(count: int) -> None:
    """From now on kernels are told of a device with this many processors."""
    real = devices.target_for
    devices.target_for = lambda device: dataclasses.replace(real(device), processors=count)  # type: ignore[assignment]


def work(seeds: Sequence[int], way: Way, counts: dict[str, int]) -> int:
    """Runs problems and says so in lines of JSON; returns the exit status."""
    say = lambda **what: print(json.dumps(what), flush=True)
    kinds: set[tuple[Any, ...]] = set()
    try:
        for outcome in outcomes_of(seeds, way, lambda group: say(begun=group)):
            kinds.add(outcome.kind)
            say(seed=outcome.seed, figures=outcome.figures, trouble=outcome.trouble)
    except Hang as hang:
        say(seed=hang.seed, figures=[], trouble=str(hang))
        return HANGS
    except Exception as error:
        say(broken=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return BREAKS
    if trouble := too_many_builds(kinds, way):
        say(seed=-1, figures=[], trouble=trouble)
    say(end=dict(counts), builds=dict(flexattn.stats().builds + flexattn.stats().disk_hits))
    return 0


class Worker:
    """A process with a share of the seeds; a new one goes on behind the group that it could not finish."""

    def __init__(self, seeds: list[int], arguments: list[str], index: int, count: int, lines: queue.Queue[Any]) -> None:
        self.seeds, self.arguments, self.place, self.lines = seeds, arguments, f"{index}/{count}", lines
        self.missing, self.begun, self.is_done, self.restarts = set(seeds), list[int](), False, 0
        self.why = ""
        self.start()

    def start(self) -> None:
        first = ["--after", str(self.begun[-1])] if self.begun else []
        command = [sys.executable, "-m", "tests.fuzz", *self.arguments, "--worker", self.place, *first]
        self.heard = time.monotonic()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put((self, line))
        self.lines.put((self, None))

    def stop(self, why: str) -> None:
        self.why = self.why or why
        self.process.kill()

    def ended(self) -> list[Outcome]:
        """What is to be said of a process that has ended before it was done; starts the next one."""
        self.process.wait()
        lost = [s for s in self.begun if s in self.missing]
        self.missing -= set(lost)
        why = self.why or f"its process ended with status {self.process.returncode}"
        self.why = ""
        found = [Outcome(s, [], f"no answer ({why}), one of {self.begun}") for s in lost]
        if self.begun and self.restarts < _RESTARTS and self.missing:
            self.restarts += 1
            self.start()
            return found
        self.is_done = True
        return found + [Outcome(s, [], f"not run ({why})") for s in sorted(self.missing)]


def run_processes(
    seeds: Sequence[int], arguments: list[str], count: int, limit: float, tell: Callable[[Outcome], None]
) -> list[dict[str, Any]]:
    """Runs problems in `count` processes, at most for `limit` seconds; returns what each said at its end."""
    lines: queue.Queue[Any] = queue.Queue()
    shares = [(n, share) for n in range(count) if (share := share_of(seeds, n, count))]
    workers = [Worker(share, arguments, n, count, lines) for n, share in shares]
    ends: list[dict[str, Any]] = []
    until, is_late = time.monotonic() + limit, False
    while not all(w.is_done for w in workers):
        try:
            worker, line = lines.get(timeout=1.0)
            if line is None:
                for outcome in [] if worker.is_done else worker.ended():
                    tell(outcome)
            else:
                _hear(worker, json.loads(line), ends, tell)
        except queue.Empty:
            pass
        now = time.monotonic()
        if now > until and not is_late:
            is_late = True
        for worker in workers:
            if not worker.is_done and (is_late or now - worker.heard > _SILENT):
                worker.restarts = _RESTARTS if is_late else worker.restarts
                worker.stop(f"the limit of {limit:.0f} s" if is_late else f"silent for {_SILENT:.0f} s")
    return ends


def _hear(worker: Worker, what: dict[str, Any], ends: list[dict[str, Any]], tell: Callable[[Outcome], None]) -> None:
    worker.heard = time.monotonic()
    if "begun" in what:
        worker.begun = what["begun"]
    elif "broken" in what:
        worker.why = what["broken"]
    elif "end" in what:
        worker.is_done = True
        ends.append(what)
    else:
        worker.missing.discard(what["seed"])
        tell(Outcome(**what))
