"""Span tables made on the device, kept with their mask, and given more room where they turn out to need it.

Reads a BlockMask; makes the tables that attention kernels walk, by row or by column. The one idea: nothing waits for the
device. A row that has more spans than it has room for is kept as one partial span, which is right but slow; the device says
how many it has, and once that has arrived by itself, the next tables of such a mask are larger.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import MOST_TABLES
from flexattn.frontend.expr import topological
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.frontend.tile_map import TileMap
from flexattn.runtime import device as devices
from flexattn.runtime import kept, settings
from flexattn.runtime.device import Queue
from flexattn.runtime.table_builder import Built, Cut, DeviceTable, build_tables

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask

_MOST_PAIRS = 1 << 33  # evaluated one by one: some 0.1 s


def device_tables(mask: BlockMask, cuts: Sequence[Cut]) -> list[DeviceTable]:
    """The tables of a block mask.

    Args:
        mask: on the device of the call.
        cuts: tile sizes and directions.

    Returns:
        A table for each cut; made by the device for a function on a GPU, by the tile map for lists, on a CPU, and for long
        masks of floats, which only its bounds follow.

    Raises:
        StaleMaskError: a captured tensor has been written to since the mask was made.
    """
    predicate = mask.predicate
    if predicate is None or not _is_for_device(predicate):
        return [_table_of_map(mask.tile_map(cut.q_tile, cut.kv_tile), cut.by_column) for cut in cuts]
    predicate.check_current()
    with devices.current(predicate.device):
        return _tables_on_device(predicate, cuts)


def _table_of_map(tiles: TileMap, by_column: bool) -> DeviceTable:
    return DeviceTable(*tiles.table(by_column), tiles.batch, tiles.heads)


def _is_for_device(predicate: PredicateMask) -> bool:
    """Whether the builder takes a mask. Where it would evaluate very many pairs, as its bounds do not follow floats, the tile
    map, whose bounds do, is faster though it asks the host; a CUDA graph cannot ask it."""
    if predicate.traced is None or predicate.device.type != "cuda" or 0 in predicate.lengths:
        return False
    if not has_floats(predicate.traced.program) or count_pairs(predicate) <= _MOST_PAIRS:
        return True
    return devices.is_capturing(predicate.device)


def count_pairs(predicate: PredicateMask) -> int:
    """Pairs of all groups that have a table of their own."""
    return math.prod((*predicate.shared_sizes, *predicate.lengths))


@lru_cache(maxsize=1024)
def has_floats(program: Program) -> bool:
    """Whether a mask computes with floats somewhere."""
    return any(n.dtype.is_floating_point for n in topological([program.body]))


def _tables_on_device(predicate: PredicateMask, cuts: Sequence[Cut]) -> list[DeviceTable]:
    """The tables that are kept, and together those that are not, or whose rows turned out to need more room."""
    assert predicate.traced is not None
    queue = devices.queue_of(predicate.device)
    entries: dict[Cut, _Entry | None] = {cut: kept.find(predicate, cut, queue) for cut in cuts}
    missing = [cut for cut, entry in entries.items() if entry is None or entry.is_outgrown()]
    if missing:
        room = _room_of(predicate.traced.program, predicate.device)
        if len(missing) < len(entries) or predicate.tables:
            room.reports.extend(e.report for e in entries.values() if e is not None and e.report is not None)
        for first in range(0, len(missing), MOST_TABLES):
            entries |= _built(predicate, tuple(missing[first : first + MOST_TABLES]), room, queue)
    return [entry.table for entry in entries.values() if entry is not None]


def _built(predicate: PredicateMask, cuts: tuple[Cut, ...], room: _Room, queue: Queue) -> dict[Cut, _Entry]:
    report = None if queue.is_capturing else _Report()
    told = None if report is None else report.told
    target = devices.target_for(queue.device)
    built = build_tables(predicate, cuts, target, room=room.spans(), told=told, queue=queue)
    if room.needed > built.room:
        _say_too_many(room.needed, built.room)
    if report is not None:
        room.reports.append(report)
    found = {cut: _Entry(table, built, report) for cut, table in zip(cuts, built.tables)}
    if settings.is_deterministic() and found[cuts[0]].is_outgrown():  # waits for the device
        return _built(predicate, cuts, room, queue)
    kept.keep(predicate, {**built.aside, **found}, queue)
    return found


# ---------------------------------------------------------------- room for spans
_LOCK = threading.Lock()
_PLACES_AT_ONCE = 256
_UNKNOWN = -1  # what a place holds before a kernel has written to it


class _Place(NamedTuple):
    """A number that a kernel writes and the host reads: pinned int32 [1], and the same as a NumPy array, which is read faster."""

    tensor: Tensor
    value: Any


_FREE: list[_Place] = []
_LEFT: deque[_Place] = deque()  # nobody will read them


def _place() -> _Place:
    """One that holds _UNKNOWN."""
    try:
        place = _FREE.pop()
    except IndexError:
        place = _more_places()
    place.value[0] = _UNKNOWN
    return place


def _more_places() -> _Place:
    """Fills _FREE. To get memory from the driver takes as long as a table, so none is given back, and a place is used again only
    after it has been written to: a kernel may write long after nobody asks any more."""
    with _LOCK:
        left = [_LEFT.popleft() for _ in range(len(_LEFT))]
        found = [place for place in left if place.value[0] != _UNKNOWN]
        _LEFT.extend(place for place in left if place.value[0] == _UNKNOWN)
        if len(found) <= _PLACES_AT_ONCE // 4:  # else the next ones would be looked for at every call
            with torch.inference_mode(False):  # whoever writes to it next
                made = torch.zeros(_PLACES_AT_ONCE, dtype=torch.int32, pin_memory=True).split(1)
            found += [_Place(x, x.numpy()) for x in made]
        _FREE.extend(found[1:])
        return found[0]


class _Report:
    """How many spans the rows that did not fit have: 0 until the device has said so, and where all fit. The last kernel that makes
    tables writes it to the host's memory, so that nothing has to be copied and nobody waits."""

    def __init__(self) -> None:
        self._place, self._spans = _place(), _UNKNOWN

    @property
    def told(self) -> Tensor:
        """int32 [1], where the kernel writes to."""
        return self._place.tensor

    @property
    def is_known(self) -> bool:
        """Whether `spans` will say nothing new."""
        return self._spans != _UNKNOWN

    def spans(self) -> int:
        """As far as is known; a deterministic run waits until it is."""
        if self._spans == _UNKNOWN:
            self._spans = int(self._place.value[0])
            if self._spans == _UNKNOWN and settings.is_deterministic():
                if not torch.cuda.is_current_stream_capturing():
                    torch.cuda.synchronize()
                self._spans = int(self._place.value[0])
        return max(self._spans, 0)

    def __del__(self, left: deque[_Place] = _LEFT) -> None:
        left.append(self._place)


class _Entry(NamedTuple):
    """A table that is kept, what it was made with, and what the device says of those; None while a CUDA graph is captured."""

    table: DeviceTable
    built: Built
    report: _Report | None

    def is_outgrown(self) -> bool:
        """Whether rows are known not to fit, though they could."""
        if self.report is None or self.report.spans() <= self.built.room:
            return False
        if self.built.is_largest:  # also where no later table is made
            _say_too_many(self.report.spans(), self.built.room)
        return not self.built.is_largest


class _Room:
    """How much room the tables of one structure get: what the tables made lately turned out to need."""

    def __init__(self, usual: int) -> None:
        self.reports: deque[_Report] = deque(maxlen=8)  # the first of them has not arrived
        self.usual, self.needed = usual, 0

    def spans(self) -> int:
        """In powers of two, never less than before. Reports come in about the order in which they were asked for."""
        with _LOCK:
            while self.reports:
                self.needed = max(self.needed, self.reports[0].spans())
                if not self.reports[0].is_known:
                    break
                self.reports.popleft()
        return max(self.usual, 1 << (self.needed - 1).bit_length() if self.needed else 0)


_ROOMS: dict[Hashable, _Room] = {}


def _room_of(program: Program, device: torch.device) -> _Room:
    room = _ROOMS.get((program, device))
    return room or _ROOMS.setdefault((program, device), _Room(usual_spans(program)))


def usual_spans(program: Program) -> int:
    """How many spans of a kind a row has room for at first: comparisons cut a row in few places, remainders in many."""
    ops = {n.op for n in topological([program.body])}
    return 32 if ops & {"mod", "floordiv", "rshift", "lshift"} else 8 if "load" in ops else 4


def _say_too_many(spans: int, room: int) -> None:
    settings.warn_once(
        f"span table {room}",
        f"flexattn: a row of a mask has {spans} runs of tiles and its table room for {room}; such rows are treated as one "
        "run from their first tile to their last, which is right but slower. Larger tiles make fewer runs",
        settings.FlexPerformanceWarning,
    )


__all__ = ["Cut", "DeviceTable", "device_tables", "usual_spans"]
