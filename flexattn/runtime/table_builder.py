"""Launches of the mask builder: a predicate mask and a tile size -> a span table on the device.

Reads a PredicateMask and its captured tensors; makes rows, further spans, and trees over captured tensors. The one idea: what a
table of one structure, length and tile size costs the host is decided once (`_Recipe`): kernels and the arguments that stay.
A new mask then takes three allocations, two launches and nothing that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import tree_type
from flexattn.codegen.spec import CaptureLayout, KernelSpec, any_wide, capture_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.expr import Expr
from flexattn.frontend.interval import may_wrap
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.runtime import kept, stats
from flexattn.runtime.compile import Starts, first_that_builds, flat_arguments
from flexattn.runtime.device import is_capturing, stream_of
from flexattn.runtime.validate import place_captures

_MOST_BYTES = 1 << 28  # of the spans of one table; a row's room takes 16 bytes for each span of a kind
_ORDER = TileConfig(64, 128, 4, 1)
_ROW = TileConfig(64, 64, 1, 1)  # a row's program works on vectors of 64 lanes; the tiles themselves are arguments
_LEAVES, _UPPER = TileConfig(64, 64, 4, 1), TileConfig(256, 4, 4, 1)
_ZEROS_AT_ONCE = 1024


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


def _most_room(lines: int) -> int:
    return max(1, _MOST_BYTES // (16 * max(lines, 1)))


# ---------------------------------------------------------------- one table
class _Kind(NamedTuple):
    """What decides a recipe, in a form that is quick to look up."""

    program: Program
    captures: tuple[CaptureLayout, ...]
    wide_numbers: tuple[bool, ...]
    sizes: tuple[int, int]  # groups that differ, (batch, heads)
    lengths: tuple[int, int]
    tile: tuple[int, int]
    is_transposed: bool
    room: int
    target: Target
    device: torch.device


class _Recipe(NamedTuple):
    """The two launches of a table, the shape of its rows, its further spans, and slots whose trees are read."""

    rows: Starts
    order: Starts
    shape: tuple[int, int, int]
    extra: int
    ranged: tuple[int, ...]
    valued: tuple[int, ...]


@lru_cache(maxsize=1024)
def _recipe(kind: _Kind) -> _Recipe:
    (batch, heads), (q_len, kv_len), tile = kind.sizes, kind.lengths, kind.tile
    own, other = (kv_len, q_len) if kind.is_transposed else (q_len, kv_len)
    own_tile, other_tile = tile[::-1] if kind.is_transposed else tile
    groups, lines = batch * heads, -(-own // own_tile)
    spec = KernelSpec(
        kernel="block_map", target=kind.target, config=_ROW, qk_dim=0, v_dim=0, layouts=(), mask=kind.program,
        captures=kind.captures, wide_numbers=kind.wide_numbers, wide_lengths=any_wide((batch, heads, q_len, kv_len)),
        is_transposed=kind.is_transposed,
    )  # fmt: skip
    order = KernelSpec(kernel="order", target=kind.target, config=_ORDER, qk_dim=0, v_dim=0, layouts=())
    _, rows_kernel = first_that_builds([spec], kind.device)
    _, order_kernel = first_that_builds([order], kind.device)
    numbers = {"heads": heads, "own_tile": own_tile, "other_tile": other_tile, "own_len": own, "other_len": other,
               "lines": lines, "room": kind.room, "trees": (0,)}  # fmt: skip
    chunks = -(-lines // _ORDER.BLOCK_M)
    return _Recipe(
        rows_kernel.fix(groups * lines, numbers, changing=("caps",)),
        order_kernel.fix(groups * chunks, {"lines": lines}),
        (groups, lines, 12),
        max(1, groups * lines * 2 * kind.room),
        spec.ranged,
        spec.valued,
    )


def build_table(
    predicate: PredicateMask,
    config: TileConfig,
    target: Target,
    *,
    transposed: bool,
    room: int,
    told: Tensor | None = None,
) -> Built:
    """Launches the builder.

    Args:
        predicate: a mask with a function, of at least one query and one key.
        config: the tiles.
        target: where it runs; the interpreter takes CPU tensors.
        transposed: rows are tiles of keys.
        room: spans of a kind that a row shall have room for; fewer where the table would be too large.
        told: int32 [1] that a kernel can write to, also in the host's memory: gets `needed` once the table is there.

    Returns:
        The table, the room its rows have and, on the device, how much they needed.
    """
    traced, device, (batch, heads), lengths = (
        predicate.traced,
        predicate.device,
        predicate.shared_sizes,
        predicate.lengths,
    )
    assert traced is not None
    program, numbers = traced.program, traced.binding.numbers
    captures, tile = place_captures(traced, device, "mask_mod"), (config.BLOCK_M, config.BLOCK_N)
    lines = -(-lengths[1] // tile[1]) if transposed else -(-lengths[0] // tile[0])
    room = min(room, _most_room(batch * heads * lines))
    layouts, wide = tuple(map(capture_layout, captures)), tuple(map(wide_number, numbers))
    kind = _Kind(program, layouts, wide, (batch, heads), lengths, tile, transposed, room, target, device)
    recipe = _recipe(kind)
    unsorted, rows = (torch.empty(recipe.shape, dtype=torch.int32, device=device) for _ in range(2))
    extra = torch.empty(recipe.extra, 2, dtype=torch.int32, device=device)
    needed = _zero(device)
    wild = _wild(predicate, captures) if may_wrap(program.body, numbers) else None
    arguments = {
        "ROWS": unsorted, "EXTRA": extra, "NEEDED": needed, "WILD": _zero(device, again=True) if wild is None else wild,
        "caps": flat_arguments(captures, numbers), "trees": _trees(predicate, captures, recipe, target),
    }  # fmt: skip
    recipe.rows(arguments, device=device)
    arguments = {"UNSORTED": unsorted, "ROWS": rows, "NEEDED": needed, "TOLD": needed if told is None else told}
    recipe.order(arguments, device=device)
    stats.record_device_table()
    return Built(DeviceTable(rows, extra, batch, heads), room, needed)


# ---------------------------------------------------------------- zeros
_LOCK = threading.Lock()
_ZEROS: dict[tuple[torch.device, int], Iterator[Tensor]] = {}
_STAYS: dict[tuple[torch.device, int], Tensor] = {}


def _zero(device: torch.device, *, again: bool = False) -> Tensor:
    """int32 [1] that is 0 on the current stream: one that nobody else has, or one that stays 0. Many are made at once, as a
    launch takes as long as all else that a table costs; a CUDA graph has its own, which it sets to 0 at every replay."""
    if is_capturing(device):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, stream_of(device))
    with _LOCK:
        if again and key in _STAYS:
            return _STAYS[key]
        found = next(_ZEROS.get(key, iter(())), None)
        if found is None:
            with torch.inference_mode(False):
                _ZEROS[key] = iter(torch.zeros(_ZEROS_AT_ONCE, dtype=torch.int32, device=device).split(1))
            found = next(_ZEROS[key])
        if again:
            _STAYS[key] = found
        return found


# ---------------------------------------------------------------- captured tensors over ranges
class Tree(NamedTuple):
    """What ranges of a captured tensor hold: (least, greatest), int32 or int64 [nodes, 2], and the values modulo 64 as a set of
    bits, int64 [nodes]."""

    ends: Tensor
    sets: Tensor


def _trees(predicate: PredicateMask, captures: tuple[Tensor, ...], recipe: _Recipe, target: Target) -> tuple[Any, ...]:
    """The trees that bounds read, in the order of the kernel's argument; each is made once a mask."""
    if not recipe.ranged and not recipe.valued:
        return (0,)
    made: dict[int, Tree] = {}
    for slot in {*recipe.ranged, *recipe.valued}:
        made[slot] = kept.once(predicate, ("tree", slot), lambda slot=slot: build_tree(captures[slot], target))  # type: ignore[misc]
    return (*(made[slot].ends for slot in recipe.ranged), *(made[slot].sets for slot in recipe.valued))


def build_tree(tensor: Tensor, target: Target) -> Tree:
    """A tree with a node for every 64 elements, for every 4 of those and so on.

    Each level has place for a quarter of the nodes of the one below it, the lowest for a power of 4, so that a kernel finds
    levels by arithmetic; what lies between is not written."""
    data = tensor.detach().contiguous().reshape(-1)
    data = data.view(torch.uint8) if data.dtype == torch.bool else data
    layout, device = capture_layout(data), data.device
    nodes, starts = _tree_recipe(layout, data.numel(), target, device)
    dtype = torch.int64 if tree_type(layout) == "*i64" else torch.int32
    ends, sets = (
        torch.empty(shape, dtype=kind, device=device) for shape, kind in (((nodes, 2), dtype), (nodes, torch.int64))
    )
    arguments = {"DATA": data, "TREE": ends, "SETS": sets}
    for start in starts:
        start(arguments, device=device)
    return Tree(ends, sets)


@lru_cache(maxsize=1024)
def _tree_recipe(layout: CaptureLayout, length: int, target: Target, device: torch.device) -> tuple[int, list[Starts]]:
    """Nodes of a tree, and the launches that fill it: one for the lower levels, one for those above where there are any."""
    width = 1
    while width * 64 < length:
        width *= 4
    programs = max(1, -(-length // 4096))
    steps = [("ranges", _LEAVES, programs)] + ([("ranges_above", _UPPER, 1)] if programs > 1 else [])
    starts = []
    for name, config, grid in steps:
        _, kernel = first_that_builds([KernelSpec(name, target, config, 0, 0, layouts=(), captures=(layout,))], device)
        starts.append(kernel.fix(grid, {"length": length}))
    return (width * 4 - 1) // 3, starts


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


__all__ = ["Built", "DeviceTable", "Tree", "build_table", "build_tree"]
