"""Pairs what is compared: candidates alternate in one process, round after round, and the ratio of each round counts.

The idea: a card's power state moves any single figure by ten per cent, but hardly the ratio of two neighbours in time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Run = Callable[[], Any]
_CYCLES = 2_000_000_000  # of a GPU's clock in a second, about
_LONGEST_HOLD = 0.2  # seconds: a call that compiled something must not stop the device for many times as long


class Paired(NamedTuple):
    """Median milliseconds a call, and the median over rounds of this candidate's time divided by the base's."""

    ms: float
    ratio: float | None


def synchronize(device: torch.device) -> None:
    """Waits for the device; nothing to wait for on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Run, calls: int, device: torch.device) -> float:
    """Milliseconds a call of `calls` calls in a row: device time by events on a GPU, wall clock without one.

    The device is kept busy until all launches are queued, or a short kernel's figure would be its host's."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begin) / calls * 1e3
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    run()  # so that caches hold this candidate's own data
    host = time.perf_counter() - begin
    torch.cuda._sleep(int(_CYCLES * min(2 * calls * host + 1e-4, _LONGEST_HOLD)))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def host_milliseconds(run: Run, calls: int, device: torch.device) -> float:
    """Milliseconds the host spends on a call: launches only, the wait for the device stays outside."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - begin
    synchronize(device)
    return elapsed / calls * 1e3


def wall_milliseconds(run: Run, calls: int, device: torch.device) -> float:
    """Milliseconds a call until its result is there."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
        synchronize(device)
    return (time.perf_counter() - begin) / calls * 1e3


def alternate(
    candidates: Mapping[str, Run],
    *,
    rounds: int,
    calls: int,
    device: torch.device,
    measure: Callable[[Run, int, torch.device], float] = milliseconds,
    warm: int = 2,
) -> dict[str, list[float]]:
    """Milliseconds of each candidate in each round.

    Args:
        candidates: Name -> what to run.
        rounds: Rounds; in each, every candidate runs `calls` times in a row.
        measure: milliseconds, host_milliseconds or wall_milliseconds.
        warm: Calls of each candidate before the first round.
    """
    for run in candidates.values():
        for _ in range(warm):
            run()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            times[name].append(measure(run, calls, device))
    return times


def summarise(times: Mapping[str, list[float]], base: str) -> dict[str, Paired]:
    """Medians, and the median ratio to `base`, round by round; no ratio where `base` did not run."""
    reference = times.get(base)
    return {
        name: Paired(
            statistics.median(found),
            statistics.median(a / b for a, b in zip(found, reference)) if reference else None,
        )
        for name, found in times.items()
    }
