"""Span tables made on the device: a predicate mask and a tile size -> launches of the mask builder.

Reads a BlockMask; makes the table that an attention kernel walks, by row or by column. The one idea: nothing waits for the
device. A row that has more spans than it has room for is kept as one partial span, which is right but slow; the device says
how many it has, and once that has arrived by itself, the next table of such a mask is larger.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import tree_type
from flexattn.codegen.spec import KernelSpec, any_wide, capture_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.expr import Expr, topological
from flexattn.frontend.interval import may_wrap
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.runtime import device as devices
from flexattn.runtime import kept, settings, stats
from flexattn.runtime.compile import first_that_builds, flat_arguments
from flexattn.runtime.validate import place_captures

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask

_MOST_PAIRS = 1 << 33  # evaluated one by one: some 0.1 s
_MOST_BYTES = 1 << 28  # of the spans of one table; a row's room takes 16 bytes for each span of a kind
_ORDER = TileConfig(64, 128, 4, 1)
_ROW = TileConfig(64, 64, 1, 1)  # a row's program works on vectors of 64 lanes; the tiles themselves are arguments


class DeviceTable(NamedTuple):
    """A span table, `rows` [batch * heads, lines, 12] and `extra` [n, 2], int32; batch and heads are 1 where all share it."""

    rows: Tensor
    extra: Tensor
    batch: int
    heads: int


class Built(NamedTuple):
    """What the builder made.

    Attributes:
        table: right in any case.
        room: spans of a kind that fit in a row.
        needed: int32 [1] on the device: the most spans of a kind in a row that did not fit; 0 if all rows did.
    """

    table: DeviceTable
    room: int
    needed: Tensor

    @property
    def is_largest(self) -> bool:
        """Whether rows may have no more room."""
        return self.room >= _most_room(self.table.rows[..., 0].numel())


def device_table(mask: BlockMask, config: TileConfig, *, transposed: bool) -> DeviceTable:
    """The table of a block mask in tiles of one configuration.

    Args:
        mask: on the device of the call.
        config: BLOCK_M by BLOCK_N are the tiles.
        transposed: rows are tiles of keys.

    Returns:
        The table; made by the device for a function on a GPU, by the tile map for lists, on a CPU, and for long masks of
        floats, which only its bounds follow.

    Raises:
        StaleMaskError: a captured tensor has been written to since the mask was made.
    """
    predicate = mask.predicate
    if predicate is None or not _is_for_device(predicate):
        tiles = mask.tile_map(config.BLOCK_M, config.BLOCK_N)
        rows, extra = tiles.table(transposed)
        return DeviceTable(rows, extra, tiles.batch, tiles.heads)
    predicate.check_current()
    with devices.current(predicate.device):
        return _table_on_device(predicate, config, transposed)


def _is_for_device(predicate: PredicateMask) -> bool:
    """Whether the builder takes a mask. Where it would evaluate very many pairs, as its bounds do not follow floats, the tile
    map, whose bounds do, is faster though it asks the host; a CUDA graph cannot ask it."""
    if predicate.traced is None or predicate.device.type != "cuda" or 0 in predicate.lengths:
        return False
    return count_pairs(predicate) <= _MOST_PAIRS or not has_floats(predicate) or devices.is_capturing(predicate.device)


def count_pairs(predicate: PredicateMask) -> int:
    """Pairs of all groups that have a table of their own."""
    return math.prod((*predicate.shared_sizes, *predicate.lengths))


def has_floats(predicate: PredicateMask) -> bool:
    """Whether a mask computes with floats somewhere."""
    assert predicate.traced is not None
    return any(n.dtype.is_floating_point for n in topological([predicate.traced.program.body]))


def _table_on_device(predicate: PredicateMask, config: TileConfig, transposed: bool) -> DeviceTable:
    """The table that is kept, or where its rows turned out to need more room a larger one."""
    assert predicate.traced is not None
    program, key = predicate.traced.program, (config.BLOCK_M, config.BLOCK_N, transposed)
    entry: _Entry | None = kept.find(predicate, key)
    if entry is None or entry.is_outgrown():
        room = _room_of(program, key, predicate.device)
        if entry is not None and entry.report is not None:
            room.reports.append(entry.report)
        entry = _built(predicate, config, transposed, room)
        while torch.are_deterministic_algorithms_enabled() and entry.is_outgrown():  # waits for the device
            entry = _built(predicate, config, transposed, room)
        kept.keep(predicate, key, entry)
    return entry.built.table


def _built(predicate: PredicateMask, config: TileConfig, transposed: bool, room: _Room) -> _Entry:
    device = predicate.device
    target, spans = devices.target_for(device), room.spans()
    built = build_table(predicate, config, target, transposed=transposed, room=spans)
    if room.needed > built.room:
        _say_too_many(room.needed, built.room)
    report = None if devices.is_capturing(device) else _Report(built.needed)
    if report is not None:
        room.reports.append(report)
    return _Entry(built, report)


# ---------------------------------------------------------------- room for spans
_LOCK = threading.Lock()
_SLOTS: list[Tensor] = []  # pinned int32 [1] that nobody uses: to get one from the driver takes as long as a table


def _slot() -> Tensor:
    with _LOCK, torch.inference_mode(False):  # whoever writes to it next
        if not _SLOTS:
            _SLOTS.extend(torch.zeros(256, dtype=torch.int32, pin_memory=True).split(1))
        return _SLOTS.pop()


class _Report:
    """How many spans the rows that did not fit have: 0 until the device has said so, and where all fit."""

    def __init__(self, needed: Tensor) -> None:
        self._device, self._slot = needed.device, _slot()
        self._slot.copy_(needed, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(needed.device))
        self._spans: int | None = None

    def spans(self) -> int:
        """As far as is known; a deterministic run waits until it is."""
        if self._spans is None and not devices.is_capturing(self._device):  # a capture may not ask
            if torch.are_deterministic_algorithms_enabled():
                self._arrived.synchronize()
            if self._arrived.query():
                with _LOCK:
                    if self._spans is None:
                        self._spans = int(self._slot)
                        _SLOTS.append(self._slot)
        return self._spans or 0


class _Entry(NamedTuple):
    """A table that is kept, and what the device says of it; None while a CUDA graph is captured."""

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
        self.reports: deque[_Report] = deque(maxlen=8)
        self.usual, self.needed = usual, 0

    def spans(self) -> int:
        """In powers of two, never less than before."""
        self.needed = max(self.needed, *(r.spans() for r in tuple(self.reports)), 0)
        return max(self.usual, 1 << (self.needed - 1).bit_length() if self.needed else 0)


_ROOMS: dict[Hashable, _Room] = {}


def _room_of(program: Program, key: Hashable, device: torch.device) -> _Room:
    with _LOCK:
        room = _ROOMS.get((program, key, device))
        if room is None:
            room = _ROOMS[program, key, device] = _Room(usual_spans(program))
        return room


def usual_spans(program: Program) -> int:
    """How many spans of a kind a row has room for at first: comparisons cut a row in few places, remainders in many."""
    ops = {n.op for n in topological([program.body])}
    return 32 if ops & {"mod", "floordiv", "rshift", "lshift"} else 8 if "load" in ops else 4


def _most_room(lines: int) -> int:
    return max(1, _MOST_BYTES // (16 * max(lines, 1)))


def _say_too_many(spans: int, room: int) -> None:
    settings.warn_once(
        f"span table {room}",
        f"flexattn: a row of a mask has {spans} runs of tiles and its table room for {room}; such rows are treated as one "
        "run from their first tile to their last, which is right but slower. Larger tiles make fewer runs",
        settings.FlexPerformanceWarning,
    )


# ---------------------------------------------------------------- launches
def build_table(predicate: PredicateMask, config: TileConfig, target: Target, *, transposed: bool, room: int) -> Built:
    """Launches the builder.

    Args:
        predicate: a mask with a function, of at least one query and one key.
        config: the tiles.
        target: where it runs; the interpreter takes CPU tensors.
        transposed: rows are tiles of keys.
        room: spans of a kind that a row shall have room for; fewer where the table would be too large.

    Returns:
        The table, the room its rows have and, on the device, how much they needed.
    """
    traced, device = predicate.traced, predicate.device
    assert traced is not None
    program, numbers = traced.program, traced.binding.numbers
    captures = place_captures(traced, device, "mask_mod")
    (batch, heads), (q_len, kv_len) = predicate.shared_sizes, predicate.lengths
    own, other = (kv_len, q_len) if transposed else (q_len, kv_len)
    own_tile, other_tile = (config.BLOCK_N, config.BLOCK_M) if transposed else (config.BLOCK_M, config.BLOCK_N)
    groups, lines = batch * heads, -(-own // own_tile)
    room = min(room, _most_room(groups * lines))
    spec = KernelSpec(
        kernel="block_map", target=target, config=_ROW, qk_dim=0, v_dim=0, layouts=(), mask=program,
        captures=tuple(capture_layout(c) for c in captures), wide_numbers=tuple(wide_number(n) for n in numbers),
        wide_lengths=any_wide((batch, heads, q_len, kv_len)), is_transposed=transposed,
    )  # fmt: skip
    _, kernel = first_that_builds([spec], device)
    unsorted, rows = (torch.empty(groups, lines, 12, dtype=torch.int32, device=device) for _ in range(2))
    extra = torch.empty(max(1, groups * lines * 2 * room), 2, dtype=torch.int32, device=device)
    counts = torch.zeros(2, dtype=torch.int32, device=device)  # of spans; the other one stays 0
    wild = _wild(predicate, captures)
    made = {slot: _tree(predicate, slot, captures[slot], target) for slot in {*spec.ranged, *spec.valued}}
    trees = (*(made[slot].ends for slot in spec.ranged), *(made[slot].sets for slot in spec.valued))
    arguments = {
        "ROWS": unsorted, "EXTRA": extra, "NEEDED": counts[:1], "WILD": counts[1:] if wild is None else wild,
        "caps": flat_arguments(captures, numbers), "trees": trees or (0,), "heads": heads, "own_tile": own_tile,
        "other_tile": other_tile, "own_len": own, "other_len": other, "lines": lines, "room": room,
    }  # fmt: skip
    kernel(groups * lines, arguments, device=device)
    _order(unsorted, rows, target)
    stats.record_device_table()
    return Built(DeviceTable(rows, extra, batch, heads), room, counts[:1])


def _order(unsorted: Tensor, rows: Tensor, target: Target) -> None:
    """The rows of each group in falling order of cost."""
    groups, lines, _ = rows.shape
    spec = KernelSpec(kernel="order", target=target, config=_ORDER, qk_dim=0, v_dim=0, layouts=())
    _, kernel = first_that_builds([spec], rows.device)
    programs = groups * -(-lines // _ORDER.BLOCK_M)
    kernel(programs, {"UNSORTED": unsorted, "ROWS": rows, "lines": lines}, device=rows.device)


class Tree(NamedTuple):
    """What ranges of a captured tensor hold: (least, greatest), int32 or int64 [nodes, 2], and the values modulo 64 as a set of
    bits, int64 [nodes]."""

    ends: Tensor
    sets: Tensor


def _tree(predicate: PredicateMask, slot: int, capture: Tensor, target: Target) -> Tree:
    """The tree over a captured tensor, made once a mask."""
    return kept.once(predicate, ("tree", slot), lambda: build_tree(capture, target))


def build_tree(tensor: Tensor, target: Target) -> Tree:
    """A tree with a node for every 64 elements, for every 4 of those and so on.

    Each level has place for a quarter of the nodes of the one below it, the lowest for a power of 4, so that a kernel finds
    levels by arithmetic; what lies between is not written."""
    data = tensor.detach().contiguous().reshape(-1)
    data = data.view(torch.uint8) if data.dtype == torch.bool else data
    layout, length, width = capture_layout(data), data.numel(), 1
    while width * 64 < length:
        width *= 4
    dtype = torch.int64 if tree_type(layout) == "*i64" else torch.int32
    nodes = (width * 4 - 1) // 3
    tree = Tree(
        torch.empty(nodes, 2, dtype=dtype, device=data.device),
        torch.empty(nodes, dtype=torch.int64, device=data.device),
    )
    arguments = {"TREE": tree.ends, "SETS": tree.sets, "length": length}
    spec = KernelSpec("ranges", target, TileConfig(64, 64, 4, 1), 0, 0, layouts=(), captures=(layout,))
    _, kernel = first_that_builds([spec], data.device)
    programs = max(1, -(-length // 4096))
    kernel(programs, {"DATA": data, **arguments}, device=data.device)
    if programs > 1:
        spec = KernelSpec("ranges_above", target, TileConfig(256, 4, 4, 1), 0, 0, layouts=(), captures=(layout,))
        _, kernel = first_that_builds([spec], data.device)
        kernel(1, arguments, device=data.device)
    return tree


# ---------------------------------------------------------------- integers that wrap around
def _wild(predicate: PredicateMask, captures: tuple[Tensor, ...]) -> Tensor | None:
    """int32 [1] on the device: not 0 where integers of the mask may wrap around, so that bounds say nothing; None where
    they cannot, whatever is captured."""
    assert predicate.traced is not None
    program, binding = predicate.traced
    if not may_wrap(program.body, binding.numbers):
        return None
    bits = _safe_bits(program.body, binding.numbers, len(captures))
    return kept.once(predicate, "wild", lambda: _any_larger(captures, bits, predicate.device))


@lru_cache(maxsize=4096)
def _safe_bits(body: Expr, numbers: tuple[int | float, ...], captures: int) -> int:
    """The most bits that captured 64-bit integers may have without a wrap; 0 if 31 are too many."""
    fitting = (n for n in range(62, 30, -1) if not may_wrap(body, numbers, (1 << n,) * captures))
    return next(fitting, 0)


def _any_larger(captures: tuple[Tensor, ...], bits: int, device: torch.device) -> Tensor:
    if not bits:
        return torch.ones(1, dtype=torch.int32, device=device)
    larger = torch.zeros(1, dtype=torch.int32, device=device)
    for tensor in captures:
        if tensor.dtype == torch.int64 and tensor.numel():
            least, greatest = torch.aminmax(tensor.detach())
            larger += (least < -(1 << bits)) | (greatest > 1 << bits)
    return larger


__all__ = ["Built", "DeviceTable", "build_table", "build_tree", "device_table", "usual_spans"]
