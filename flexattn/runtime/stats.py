"""Counters that prove what was traced, planned, built and launched, with the reasons.

The rest of the runtime calls the `record_*` functions, each one dictionary update; tile maps report themselves. A number, a
length, a batch size or a captured tensor that changes must leave `builds` as it was: that is what the counters are there to show.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import groupby

from flexattn.frontend import tile_map

_EVENTS_KEPT = 256


@dataclass
class Stats:
    """What happened since the last `reset_stats()`; `print(flexattn.stats())` shows it.

    Attributes:
        traces: mods traced, by kind ('score', 'mask').
        plans: plans made, by backend; a plan is made once per structure, never for numbers or lengths.
        builds: kernels compiled, by name; one that is found in memory or on disk is not.
        disk_hits: kernels that were found on disk, compiled by another process or an earlier one, by name.
        launches: kernels started, by name, those that make masks on a GPU too; the torch-ops path counts one per direction.
        mask_builds: masks cut into tiles, by how: tile maps 'proved' (bounds and witnesses alone) or 'partly evaluated', and
            'device' for each table that a GPU made by itself (of one direction, in tiles of one size); nobody waits for that,
            so how it was decided is not counted.
        tunings: times autotuning timed a kernel's tiles, by kernel; a winner that was remembered or stored is not timed.
        events: the last plans, builds and tunings in order, each with its reason.

    Example:
        >>> print(Stats(traces=Counter(score=2, mask=1)))
        flexattn.stats()
          traces            3  mask 1, score 2
          plans             0
          builds            0
          disk hits         0
          launches          0
          mask builds       0
          tunings           0
    """

    traces: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    builds: Counter[str] = field(default_factory=Counter)
    disk_hits: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    mask_builds: Counter[str] = field(default_factory=Counter)
    tunings: Counter[str] = field(default_factory=Counter)
    events: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["flexattn.stats()"]
        for name in _COUNTERS:
            counter: Counter[str] = getattr(self, name)
            parts = ", ".join(f"{key} {count}" for key, count in sorted(counter.items()))
            lines.append(f"  {name.replace('_', ' '):<12} {sum(counter.values()):>6}{'  ' + parts if parts else ''}")
        for event, same in groupby(self.events):
            times = sum(1 for _ in same)
            lines.append(f"  - {event}" + (f" ({times} times)" if times > 1 else ""))
        return "\n".join(lines)

    __repr__ = __str__


_COUNTERS = ("traces", "plans", "builds", "disk_hits", "launches", "mask_builds", "tunings")
_NOW = Stats()
_EVENTS: deque[str] = deque(maxlen=_EVENTS_KEPT)
_LOCK = threading.Lock()


def stats() -> Stats:
    """The counters so far, as a copy that does not change any more.

    Returns: Stats.
    Example:
        >>> flexattn.reset_stats()
        >>> x = torch.ones(1, 1, 4, 8)
        >>> for window in (2, 3):
        ...     out = flexattn.flex_attention(x, x, x, mask_mod=flexattn.mods.sliding_window(window))
        >>> flexattn.stats().traces["mask"]
        2
    """
    with _LOCK:
        return Stats(**{name: Counter(getattr(_NOW, name)) for name in _COUNTERS}, events=tuple(_EVENTS))


def reset_stats() -> None:
    """Sets every counter to zero; kernels, plans and masks that exist stay.

    Example:
        >>> flexattn.reset_stats()
        >>> flexattn.stats().traces.total()
        0
    """
    with _LOCK:
        for name in _COUNTERS:
            getattr(_NOW, name).clear()
        _EVENTS.clear()


def record_trace(kind: str) -> None:
    """Counts one trace of a 'score' or a 'mask' function."""
    with _LOCK:
        _NOW.traces[kind] += 1


def record_plan(backend: str, reason: str) -> None:
    """Counts a plan that was not in the cache."""
    with _LOCK:
        _NOW.plans[backend] += 1
        _EVENTS.append(f"plan {backend}: {reason}")


def record_build(kernel: str, reason: str) -> None:
    """Counts a kernel that was compiled (not one that was found in memory or on disk)."""
    with _LOCK:
        _NOW.builds[kernel] += 1
        _EVENTS.append(f"build {kernel}: {reason}")


def record_disk_hit(kernel: str, reason: str) -> None:
    """Counts a kernel that was found on disk."""
    with _LOCK:
        _NOW.disk_hits[kernel] += 1
        _EVENTS.append(f"from disk {kernel}: {reason}")


def record_launch(kernel: str) -> None:
    """Counts a kernel launch, or one direction of the torch-ops path."""
    with _LOCK:
        _NOW.launches[kernel] += 1


def record_tuning(kernel: str, result: str) -> None:
    """Counts one kernel whose tiles were timed."""
    with _LOCK:
        _NOW.tunings[kernel] += 1
        _EVENTS.append(f"tuned {kernel}: {result}")


def record_stored_tuning(kernel: str, result: str) -> None:
    """Notes a winner that was read from disk: an event, but no tuning."""
    with _LOCK:
        _EVENTS.append(f"stored tiles {kernel}: {result}")


def record_mask_build(built: tile_map.TileMap) -> None:
    """Counts a tile map that was decided: by formula, bounds and witnesses alone, or with some pairs evaluated."""
    evaluated = any(count for name, count in built.decided.items() if name.endswith("by_evaluation"))
    with _LOCK:
        _NOW.mask_builds["partly evaluated" if evaluated else "proved"] += 1


def record_device_tables(count: int) -> None:
    """Counts span tables that the device makes."""
    with _LOCK:
        _NOW.mask_builds["device"] += count


tile_map.ON_BUILD.append(record_mask_build)
