"""Compiling beforehand: cases in processes of their own, several at a time, so that the one that times finds kernels on disk.

The idea: the caches on disk are those of torch, Triton and flexattn, in folders that all processes of a machine share, so a process
needs to do no more than what will be timed, once. Nothing is timed while one of them runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.results import ROOT

_SHARE = 2 / 3  # of a run's budget: what is compiled shall also be timed
_AFTER_KILL = 3.0  # seconds in which inductor's compile workers notice that their parent is gone


def seconds_of(budget: float | None) -> float | None:
    """How long compiling may take in a run of so many seconds."""
    return None if budget is None else _SHARE * budget


def run_all(
    cases: Sequence[Sequence[str]], workers: int, *, seconds: float | None = None, threads: int = 1
) -> list[str | None]:
    """Runs `python -m benchmarks` for each case in a process of its own, `workers` at a time.

    Args:
        cases: arguments of each.
        workers: how many run together.
        seconds: after which those that run are killed, and no further one starts; None for no limit.
        threads: that torch's compiler may use in each of them.

    Returns:
        Of each case why it did not end well, or None.
    """
    variables = {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TORCHINDUCTOR_AUTOTUNE_LOCAL_CACHE": "0",  # a choice made while others keep the device busy is not kept
    }
    begin = time.monotonic()
    late = f"it had not ended after {seconds or 0:.0f} s and was stopped"

    def run(arguments: Sequence[str]) -> str | None:
        left = None if seconds is None else seconds - (time.monotonic() - begin)
        if left is not None and left <= 0:
            return f"it was not begun within {seconds:.0f} s"
        command = [sys.executable, "-m", "benchmarks", *arguments]
        with tempfile.TemporaryFile() as said:
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=said, timeout=left, check=False
                )
            except subprocess.TimeoutExpired:
                return late
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        return f"exit status {ended.returncode}: {(lines or ['it said nothing'])[-1]}" if ended.returncode else None

    with ThreadPoolExecutor(max(1, workers)) as pool:
        reasons = list(pool.map(run, cases))
    if late in reasons:
        time.sleep(_AFTER_KILL)
    return reasons


__all__ = ["run_all", "seconds_of"]
