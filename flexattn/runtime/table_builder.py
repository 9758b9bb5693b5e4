"""Launches of the mask builder: a predicate mask and tile sizes -> span tables on the device.

Reads a PredicateMask and its captured tensors; makes rows, further spans, and trees over captured tensors. The one idea: what the
tables of one structure, length and tile sizes cost the host is decided once (`_Recipe`): kernels and the arguments that stay. A
new mask then takes two allocations and two launches for all of its tables, and nothing that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import MOST_TABLES, tree_type
from flexattn.codegen.spec import CaptureLayout, KernelSpec, any_wide, capture_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.expr import Expr
from flexattn.frontend.interval import may_wrap
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.frontend.zones import hold_for, most_spans
from flexattn.runtime import kept, stats
from flexattn.runtime.compile import Starts, first_that_builds, flat_arguments
from flexattn.runtime.device import is_capturing, stream_of
from flexattn.runtime.validate import place_captures

_MOST_BYTES = 1 << 28  # of the spans of tables made together; a row's room takes 16 bytes for each span of a kind
_ROW_INTS = 12
_NO_PROGRAM = (1 << 31) - 1  # where a table begins that there is not
_ORDER = TileConfig(64, 64, 4, 1)
_ROW = TileConfig(64, 64, 1, 1)  # a row's program works on vectors of 64 lanes; the tiles themselves are arguments
_FILL = TileConfig(64, 64, 2, 1)
_RANGES = TileConfig(64, 64, 4, 1)
_ZEROS_AT_ONCE = 1024


class Cut(NamedTuple):
    """How a table cuts the pairs into tiles, and whether its rows are tiles of keys."""

    q_tile: int
    kv_tile: int
    by_column: bool


class DeviceTable(NamedTuple):
    """A span table, `rows` [batch * heads, lines, 12] and `extra` [n, 2], int32; batch and heads are 1 where all share it.
    Tables that were made together share `extra`."""

    rows: Tensor
    extra: Tensor
    batch: int
    heads: int


class Built(NamedTuple):
    """What the builder made.

    Attributes:
        tables: one for each cut, right in any case.
        room: spans of a kind that fit in a row.
        needed: int32 [1] on the device: the most spans of a kind in a row that did not fit; 0 if all rows did.
    """

    tables: tuple[DeviceTable, ...]
    room: int
    needed: Tensor

    @property
    def is_largest(self) -> bool:
        """Whether rows may have no more room."""
        return self.room >= _most_room(sum(table.rows[..., 0].numel() for table in self.tables))


def _most_room(rows: int) -> int:
    return max(1, _MOST_BYTES // (16 * max(rows, 1)))


# ---------------------------------------------------------------- tables
class _Kind(NamedTuple):
    """What decides a recipe, in a form that is quick to look up."""

    program: Program
    captures: tuple[CaptureLayout, ...]
    wide_numbers: tuple[bool, ...]
    sizes: tuple[int, int]  # groups that differ, (batch, heads)
    lengths: tuple[int, int]
    cuts: tuple[Cut, ...]
    room: int
    by_formula: bool
    target: Target
    device: torch.device


class _Recipe(NamedTuple):
    """The two launches, where each table's rows begin and how many lines it has, and slots whose trees are read."""

    rows: Starts
    order: Starts
    room: int
    total: int
    places: tuple[tuple[int, int], ...]
    ranged: tuple[int, ...]
    valued: tuple[int, ...]


@lru_cache(maxsize=1024)
def _recipe(kind: _Kind) -> _Recipe:
    (batch, heads), (q_len, kv_len) = kind.sizes, kind.lengths
    groups = batch * heads
    lines = [-(-kv_len // c.kv_tile) if c.by_column else -(-q_len // c.q_tile) for c in kind.cuts]
    total = groups * sum(lines)
    most = _most_room(total)
    by_formula = kind.by_formula and most_spans(kind.program) <= most  # a formula has no way out for a row without room
    spec = KernelSpec(
        kernel="fill" if by_formula else "block_map", target=kind.target, config=_FILL if by_formula else _ROW,
        qk_dim=0, v_dim=0, layouts=(), mask=kind.program, captures=kind.captures, wide_numbers=kind.wide_numbers,
        wide_lengths=any_wide((batch, heads, q_len, kv_len)),
    )  # fmt: skip
    order = KernelSpec(kernel="order", target=kind.target, config=_ORDER, qk_dim=0, v_dim=0, layouts=())
    room = most_spans(kind.program) if by_formula else min(kind.room, most)
    numbers = {"heads": heads, "q_len": q_len, "kv_len": kv_len, "rows": total, "room": room, "trees": (0,)}

    def launch(spec: KernelSpec, rows_at_once: int) -> Starts:
        programs, tables = _tables_argument(kind.cuts, lines, groups, rows_at_once)
        kernel = first_that_builds([spec], kind.device)[1]
        return kernel.fix(programs, {**numbers, "tables": tables}, changing=("caps",))

    places = tuple((groups * sum(lines[:n]), lines[n]) for n in range(len(lines)))
    ranged, valued = ((), ()) if by_formula else (spec.ranged, spec.valued)
    rows = launch(spec, _FILL.BLOCK_M if by_formula else 1)
    return _Recipe(rows, launch(order, _ORDER.BLOCK_M), room, total, places, ranged, valued)


def _tables_argument(cuts: tuple[Cut, ...], lines: list[int], groups: int, at_once: int) -> tuple[int, tuple[int, ...]]:
    """How many programs make `at_once` rows each, and where each table begins; those that there are not begin after all."""
    flat: list[int] = []
    programs = rows = 0
    for cut, count in zip(cuts, lines):
        flat += (cut.q_tile, cut.kv_tile, int(cut.by_column), programs, rows)
        programs, rows = programs + groups * -(-count // at_once), rows + groups * count
    missing = (1, 1, 0, _NO_PROGRAM, 0) * (MOST_TABLES - len(cuts))
    return programs, (*flat, *missing)


def build_tables(
    predicate: PredicateMask,
    cuts: tuple[Cut, ...],
    target: Target,
    *,
    room: int,
    told: Tensor | None = None,
) -> Built:
    """Launches the builder.

    Args:
        predicate: a mask with a function, of at least one query and one key.
        cuts: of the tables, at most MOST_TABLES.
        target: where it runs; the interpreter takes CPU tensors.
        room: spans of a kind that a row shall have room for; fewer where the tables would be too large.
        told: int32 [1] that a kernel can write to, also in the host's memory: gets `needed` once the tables are there.

    Returns:
        The tables, the room their rows have and, on the device, how much they needed.
    """
    traced, device, (batch, heads) = predicate.traced, predicate.device, predicate.shared_sizes
    assert traced is not None
    program, numbers = traced.program, traced.binding.numbers
    captures = place_captures(traced, device, "mask_mod")
    layouts, wide = tuple(map(capture_layout, captures)), tuple(map(wide_number, numbers))
    formula = hold_for(program, numbers)
    recipe = _recipe(
        _Kind(program, layouts, wide, (batch, heads), predicate.lengths, cuts, room, formula, target, device)
    )
    zero = _Zeros(device)
    total, made = recipe.total, recipe.total * _ROW_INTS
    unsorted = torch.empty(made + total, dtype=torch.int32, device=device)  # rows, then what each of them costs
    buffer = torch.empty(made + 4 * total * recipe.room, dtype=torch.int32, device=device)
    extra, needed = buffer.as_strided((2 * total * recipe.room, 2), (2, 1), made), zero.fresh()
    wild = _wild(predicate, captures) if not formula and may_wrap(program.body, numbers) else zero.lasting()
    arguments = {
        "ROWS": unsorted, "EXTRA": extra, "NEEDED": needed, "WILD": wild, "caps": flat_arguments(captures, numbers),
        "trees": _trees(predicate, captures, recipe, target, zero),
    }  # fmt: skip
    recipe.rows(arguments, device=device)
    arguments = {"UNSORTED": unsorted, "ROWS": buffer, "NEEDED": needed, "TOLD": needed if told is None else told}
    recipe.order(arguments, device=device)
    stats.record_device_tables(len(cuts))
    shape = lambda lines: ((batch * heads, lines, _ROW_INTS), (lines * _ROW_INTS, _ROW_INTS, 1))
    rows = [buffer.as_strided(*shape(lines), start * _ROW_INTS) for start, lines in recipe.places]
    return Built(tuple(DeviceTable(r, extra, batch, heads) for r in rows), recipe.room, needed)


# ---------------------------------------------------------------- zeros
_LOCK = threading.Lock()
_ZEROS: dict[tuple[torch.device, int], Iterator[Tensor]] = {}
_STAYS: dict[tuple[torch.device, int], Tensor] = {}


class _Zeros:
    """Where int32 [1] that are 0 on the current stream come from. Many are made at once, as a launch takes as long as all else
    that tables cost; a CUDA graph has its own, which it sets to 0 at every replay."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._key = device, (device, stream_of(device))
        self._is_capturing = is_capturing(device)

    def fresh(self) -> Tensor:
        """One that nobody else has."""
        if self._is_capturing:
            return torch.zeros(1, dtype=torch.int32, device=self._device)
        with _LOCK:
            found = next(_ZEROS.get(self._key, iter(())), None)
            if found is None:
                with torch.inference_mode(False):
                    zeros = torch.zeros(_ZEROS_AT_ONCE, dtype=torch.int32, device=self._device)
                _ZEROS[self._key] = iter(zeros.split(1))
                found = next(_ZEROS[self._key])
            return found

    def lasting(self) -> Tensor:
        """One that stays 0."""
        stays = None if self._is_capturing else _STAYS.get(self._key)
        if stays is None:
            stays = self.fresh()
            if not self._is_capturing:
                _STAYS[self._key] = stays
        return stays


# ---------------------------------------------------------------- captured tensors over ranges
class Tree(NamedTuple):
    """What ranges of a captured tensor hold: (least, greatest), int32 or int64 [nodes, 2], and the values modulo 64 as a set of
    bits, int64 [nodes]."""

    ends: Tensor
    sets: Tensor


def _trees(
    predicate: PredicateMask, captures: tuple[Tensor, ...], recipe: _Recipe, target: Target, zero: _Zeros
) -> tuple[Any, ...]:
    """The trees that bounds read, in the order of the kernel's argument; each is made once a mask."""
    if not recipe.ranged and not recipe.valued:
        return (0,)
    made: dict[int, Tree] = {}
    for slot in {*recipe.ranged, *recipe.valued}:
        make = lambda slot=slot: build_tree(captures[slot], target, zero.fresh())
        made[slot] = kept.once(predicate, ("tree", slot), make)
    return (*(made[slot].ends for slot in recipe.ranged), *(made[slot].sets for slot in recipe.valued))


def build_tree(tensor: Tensor, target: Target, done: Tensor) -> Tree:
    """A tree with a node for every 64 elements, for every 4 of those and so on.

    Each level has place for a quarter of the nodes of the one below it, the lowest for a power of 4, so that a kernel finds
    levels by arithmetic; what lies between is not written. `done` is int32 [1], 0 and nobody else's."""
    data = tensor.detach().contiguous().reshape(-1)
    data = data.view(torch.uint8) if data.dtype == torch.bool else data
    layout, device = capture_layout(data), data.device
    nodes, start = _tree_recipe(layout, data.numel(), target, device)
    dtype = torch.int64 if tree_type(layout) == "*i64" else torch.int32
    ends, sets = (
        torch.empty(shape, dtype=kind, device=device) for shape, kind in (((nodes, 2), dtype), (nodes, torch.int64))
    )
    start({"DATA": data, "TREE": ends, "SETS": sets, "DONE": done}, device=device)
    return Tree(ends, sets)


@lru_cache(maxsize=1024)
def _tree_recipe(layout: CaptureLayout, length: int, target: Target, device: torch.device) -> tuple[int, Starts]:
    """Nodes of a tree, and the launch that fills it."""
    width = 1
    while width * 64 < length:
        width *= 4
    programs = max(1, -(-length // 4096))
    _, kernel = first_that_builds([KernelSpec("ranges", target, _RANGES, 0, 0, layouts=(), captures=(layout,))], device)
    return (width * 4 - 1) // 3, kernel.fix(programs, {"length": length, "programs": programs})


# ---------------------------------------------------------------- integers that wrap around
def _wild(predicate: PredicateMask, captures: tuple[Tensor, ...]) -> Tensor:
    """int32 [1] on the device: not 0 where integers of the mask may wrap around, so that bounds say nothing."""
    assert predicate.traced is not None
    program, binding = predicate.traced
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


__all__ = ["Built", "Cut", "DeviceTable", "Tree", "build_tables", "build_tree"]
