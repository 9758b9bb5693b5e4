"""Launches of the mask builder: a predicate mask and tile sizes -> span tables on the device.

Reads a PredicateMask and its captured tensors; makes rows, further spans, and trees over captured tensors. The one idea: what the
tables of one structure, length and tile sizes cost the host is decided once (`_Recipe`): kernels and the arguments that stay. A
new mask then takes two allocations and two launches for all of its tables, a third launch for a tree, and nothing that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import MOST_TABLES, tree_type
from flexattn.codegen.spec import KernelSpec, any_wide, capture_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.expr import Expr
from flexattn.frontend.interval import may_wrap
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.frontend.zones import hold_for, most_spans
from flexattn.runtime import kept, stats
from flexattn.runtime.compile import Starts, first_that_builds, flat_arguments, keep_ready
from flexattn.runtime.device import Queue, queue_of
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
        aside: what else was made on the way and serves other tables of the mask, by the key it is kept under.
    """

    tables: tuple[DeviceTable, ...]
    room: int
    needed: Tensor
    aside: dict[Hashable, Any]

    @property
    def is_largest(self) -> bool:
        """Whether rows may have no more room."""
        return self.room >= _most_room(sum(table.rows[..., 0].numel() for table in self.tables))


def _most_room(rows: int) -> int:
    return max(1, _MOST_BYTES // (16 * max(rows, 1)))


# ---------------------------------------------------------------- tables
class _Manner(NamedTuple):
    """What the numbers of a mask decide: which of them are wide, whether there is a formula, and whether integers may wrap."""

    wide_numbers: tuple[bool, ...]
    by_formula: bool
    may_wrap: bool


@lru_cache(maxsize=4096)
def _manner(program: Program, numbers: tuple[int | float, ...]) -> _Manner:
    formula = hold_for(program, numbers)
    return _Manner(tuple(map(wide_number, numbers)), formula, not formula and may_wrap(program.body, numbers))


class _Kind(NamedTuple):
    """What decides a recipe, in a form that is quick to look up."""

    program: Program
    manner: _Manner
    captures: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], ...]  # (data type, shape, strides)
    sizes: tuple[int, int]  # groups that differ, (batch, heads)
    lengths: tuple[int, int]
    cuts: tuple[Cut, ...]
    room: int
    device: torch.device


View = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, first element


class _Recipe(NamedTuple):
    """The two launches, what each table is of the buffer that holds them all, and trees that are read.

    Attributes:
        rows, order: the launches.
        room: spans of a kind that a row has room for.
        unsorted: integers of the rows before they are put in order, with what each of them costs.
        kept: integers of the rows and of all further spans.
        tables: where the rows of each table are.
        extra: where the further spans are.
        trees: of the captured tensors whose ranges are read.
        ranged, valued: the captures whose extremes and whose sets of values are read, as the kernel takes them.
    """

    rows: Starts
    order: Starts
    room: int
    unsorted: int
    kept: int
    tables: tuple[View, ...]
    extra: View
    trees: tuple[tuple[int, _TreeRecipe], ...]
    ranged: tuple[int, ...]
    valued: tuple[int, ...]


_READY: dict[_Kind, _Recipe] = {}


def _recipe(kind: _Kind, captures: tuple[Tensor, ...], target: Target) -> _Recipe:
    (batch, heads), (q_len, kv_len) = kind.sizes, kind.lengths
    groups = batch * heads
    lines = [-(-kv_len // c.kv_tile) if c.by_column else -(-q_len // c.q_tile) for c in kind.cuts]
    total = groups * sum(lines)
    most = _most_room(total)
    by_formula = (
        kind.manner.by_formula and most_spans(kind.program) <= most
    )  # a formula has no way out for a row without room
    spec = KernelSpec(
        kernel="fill" if by_formula else "block_map", target=target, config=_FILL if by_formula else _ROW,
        qk_dim=0, v_dim=0, layouts=(), mask=kind.program, captures=tuple(map(capture_layout, captures)),
        wide_numbers=kind.manner.wide_numbers,
        wide_lengths=any_wide((batch, heads, q_len, kv_len)),
    )  # fmt: skip
    order = KernelSpec(kernel="order", target=target, config=_ORDER, qk_dim=0, v_dim=0, layouts=())
    room = most_spans(kind.program) if by_formula else min(kind.room, most)
    numbers = {"heads": heads, "q_len": q_len, "kv_len": kv_len, "rows": total, "room": room, "trees": (0,)}

    def launch(spec: KernelSpec, rows_at_once: int) -> Starts:
        programs, tables = _tables_argument(kind.cuts, lines, groups, rows_at_once)
        kernel = first_that_builds([spec], kind.device)[1]
        return kernel.fix(programs, {**numbers, "tables": tables}, changing=("caps",))

    strides = lambda count: (count * _ROW_INTS, _ROW_INTS, 1)
    starts = [groups * sum(lines[:n]) * _ROW_INTS for n in range(len(lines))]
    tables = tuple(((groups, n, _ROW_INTS), strides(n), start) for n, start in zip(lines, starts))
    made = total * _ROW_INTS
    ranged, valued = ((), ()) if by_formula else (spec.ranged, spec.valued)
    return _Recipe(
        rows=launch(spec, _FILL.BLOCK_M if by_formula else 1), order=launch(order, _ORDER.BLOCK_M), room=room,
        unsorted=made + total, kept=made + 4 * total * room,
        tables=tables, extra=((2 * total * room, 2), (2, 1), made),
        trees=tuple((slot, _tree_recipe(captures[slot], target)) for slot in sorted({*ranged, *valued})),
        ranged=ranged, valued=valued,
    )  # fmt: skip


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
    queue: Queue | None = None,
) -> Built:
    """Launches the builder.

    Args:
        predicate: a mask with a function, of at least one query and one key.
        cuts: of the tables, at most MOST_TABLES.
        target: where it runs; the interpreter takes CPU tensors.
        room: spans of a kind that a row shall have room for; fewer where the tables would be too large.
        told: int32 [1] that a kernel can write to, also in the host's memory: gets `needed` once the tables are there.
        queue: the current stream of the mask's device, where that is known.

    Returns:
        The tables, the room their rows have and, on the device, how much they needed.
    """
    traced, device, sizes = predicate.traced, predicate.device, predicate.shared_sizes
    assert traced is not None
    program, (_, numbers) = traced
    captures, manner = place_captures(traced, device, "mask_mod"), _manner(program, numbers)
    facts = tuple([(c.dtype, c.shape, c.stride()) for c in captures])
    kind = _Kind(program, manner, facts, sizes, predicate.lengths, cuts, room, device)
    recipe = _READY.get(kind) or keep_ready(_READY, kind, _recipe(kind, captures, target))
    queue = queue or queue_of(device)
    zeros = _zeros_of(queue)
    aside: dict[Hashable, Any] = {}
    unsorted = torch.empty(recipe.unsorted, dtype=torch.int32, device=device)
    buffer = torch.empty(recipe.kept, dtype=torch.int32, device=device)
    extra, needed = buffer.as_strided(*recipe.extra), zeros.fresh()
    arguments = {
        "ROWS": unsorted, "EXTRA": extra, "NEEDED": needed, "caps": flat_arguments(captures, numbers),
        "WILD": _wild(predicate, captures, queue, aside) if manner.may_wrap else zeros.lasting,
        "trees": _trees(predicate, captures, recipe, zeros, queue, aside) if recipe.trees else (0,),
    }  # fmt: skip
    recipe.rows(arguments, device=device)
    arguments = {"UNSORTED": unsorted, "ROWS": buffer, "NEEDED": needed, "TOLD": needed if told is None else told}
    recipe.order(arguments, device=device)
    stats.record_device_tables(len(cuts))
    tables = tuple([DeviceTable(buffer.as_strided(*view), extra, *sizes) for view in recipe.tables])
    return Built(tables, recipe.room, needed, aside)


# ---------------------------------------------------------------- zeros
_LOCK = threading.Lock()
_ZEROS_OF: dict[tuple[torch.device, int], _Zeros] = {}


class _Zeros:
    """Where int32 [1] that are 0 on the current stream come from. Many are made at once, as a launch takes as long as all else
    that tables cost.

    Attributes:
        lasting: one that stays 0.
    """

    def __init__(self, device: torch.device, at_once: int = _ZEROS_AT_ONCE) -> None:
        self._device, self._at_once = device, at_once
        self._left: list[Tensor] = []
        self.lasting = self.fresh()

    def fresh(self) -> Tensor:
        """One that nobody else has."""
        try:
            return self._left.pop()
        except IndexError:
            with torch.inference_mode(False):
                first, *others = torch.zeros(self._at_once, dtype=torch.int32, device=self._device).split(1)
            self._left.extend(others)
            return first


def _zeros_of(queue: Queue) -> _Zeros:
    """Those of a stream; a CUDA graph has its own, which it sets to 0 at every replay."""
    if queue.is_capturing:
        return _Zeros(queue.device, at_once=16)
    key = (queue.device, queue.stream)
    found = _ZEROS_OF.get(key)
    if found is None:
        with _LOCK:
            found = _ZEROS_OF.setdefault(key, _ZEROS_OF.get(key) or _Zeros(queue.device))
    return found


# ---------------------------------------------------------------- captured tensors over ranges
class Tree(NamedTuple):
    """What ranges of a captured tensor hold: (least, greatest), int32 or int64 [nodes, 2], and the values modulo 64 as a set of
    bits, int64 [nodes]."""

    ends: Tensor
    sets: Tensor


class _TreeRecipe(NamedTuple):
    """Nodes of a tree, the data type of its ends, and the launch that fills it."""

    nodes: int
    dtype: torch.dtype
    start: Starts


def _trees(
    predicate: PredicateMask, captures: tuple[Tensor, ...], recipe: _Recipe, zeros: _Zeros, queue: Queue,
    aside: dict[Hashable, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The trees that bounds read, in the order of the kernel's argument; each is made once a mask."""
    trees: dict[int, Tree] = {}
    for slot, how in recipe.trees:
        found = kept.find(predicate, ("tree", slot), queue)
        if found is None:
            found = aside["tree", slot] = _build_tree(captures[slot], how, zeros.fresh())
        trees[slot] = found
    return (*[trees[slot].ends for slot in recipe.ranged], *[trees[slot].sets for slot in recipe.valued])


def build_tree(tensor: Tensor, target: Target) -> Tree:
    """A tree with a node for every 64 elements, for every 4 of those and so on.

    Each level has place for a quarter of the nodes of the one below it, the lowest for a power of 4, so that a kernel finds
    levels by arithmetic; what lies between is not written."""
    return _build_tree(tensor, _tree_recipe(tensor, target), _zeros_of(queue_of(tensor.device)).fresh())


def _build_tree(tensor: Tensor, how: _TreeRecipe, done: Tensor) -> Tree:
    """`done` is int32 [1], 0 and nobody else's."""
    device = tensor.device
    data = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    ends = torch.empty((how.nodes, 2), dtype=how.dtype, device=device)
    sets = torch.empty(how.nodes, dtype=torch.int64, device=device)
    how.start({"DATA": _as_numbers(data), "TREE": ends, "SETS": sets, "DONE": done}, device=device)
    return Tree(ends, sets)


def _as_numbers(data: Tensor) -> Tensor:
    return data.view(torch.uint8) if data.dtype == torch.bool else data


def _tree_recipe(tensor: Tensor, target: Target) -> _TreeRecipe:
    length, device, width = tensor.numel(), tensor.device, 1
    while width * 64 < length:
        width *= 4
    programs = max(1, -(-length // 4096))
    number = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
    layout = capture_layout(torch.empty(length, dtype=number, device="meta"))
    _, kernel = first_that_builds([KernelSpec("ranges", target, _RANGES, 0, 0, layouts=(), captures=(layout,))], device)
    dtype = torch.int64 if tree_type(layout) == "*i64" else torch.int32
    return _TreeRecipe((width * 4 - 1) // 3, dtype, kernel.fix(programs, {"length": length, "programs": programs}))


# ---------------------------------------------------------------- integers that wrap around
def _wild(predicate: PredicateMask, captures: tuple[Tensor, ...], queue: Queue, aside: dict[Hashable, Any]) -> Tensor:
    """int32 [1] on the device: not 0 where integers of the mask may wrap around, so that bounds say nothing."""
    found: Tensor | None = kept.find(predicate, "wild", queue)
    if found is None:
        assert predicate.traced is not None
        program, binding = predicate.traced
        bits = _safe_bits(program.body, binding.numbers, len(captures))
        found = aside["wild"] = _any_larger(captures, bits, predicate.device)
    return found


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
