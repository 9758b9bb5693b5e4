"""Which tiles of the score matrix are empty, partial or full, and where: the part of attention that can be skipped.

Reads a traced mask, lengths and a tile size; makes a `TileMap`: for every row of tiles, and for every column, the runs of
full tiles and the runs of partial tiles.

The one idea: nothing of size q_len x kv_len is looked at. The tiles of a mask that is a union of bounds on q_idx, kv_idx and
their difference follow by formula (zone_map.py), and so do those of packed documents, where ids are sorted (ordered_map.py).
Else bounds of the mask over a rectangle prove it empty or full at once; only undecided rectangles are split (tile_search.py),
and of a mask that repeats along the diagonal one period is decided (periodic.py). In a single tile one kept and one dropped
pair (*witnesses*) prove PARTIAL as soundly. What then is still open is split further, down to pairs, so that the answer is
exact for every mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError, OptionError
from flexattn.frontend.eager import eager_only
from flexattn.frontend.expr import DEP_B, DEP_H, const, make, topological
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.periodic import repeated_search
from flexattn.frontend.program import Program, Traced
from flexattn.frontend.refine import Predicate, cells_of, walk
from flexattn.frontend.spans import Grid, Spans, SpanTable, cover, lines_of, span_table
from flexattn.frontend.tile_search import BOXES_AT_ONCE, Found, TileSearch

__all__ = ["Grid", "SpanTable", "Spans", "TileMap", "build_tile_map"]

ON_BUILD: list[Callable[[TileMap], None]] = []  # told of every map that was decided here; counters listen


@dataclass(frozen=True, eq=False)
class TileMap:
    """The tiles to visit, and among them those that need no mask.

    `full` and `partial` have one line per row of q tiles and hold runs of kv tiles; `full_t` and `partial_t` are the same
    by column. `batch` and `heads` are 1 where the mask does not depend on them. A tile that a length cuts is partial.
    `decided` counts how the tiles were settled: by formula; or empty and full by interval, partial by witness, and by evaluation.
    """

    grid: Grid
    full: Spans
    partial: Spans
    full_t: Spans
    partial_t: Spans
    decided: dict[str, object]
    traced: Traced | None
    _cache: dict[object, object] = field(default_factory=dict, repr=False)

    @property
    def batch(self) -> int:
        return self.grid.batch

    @property
    def heads(self) -> int:
        return self.grid.heads

    @property
    def q_len(self) -> int:
        return self.grid.q_len

    @property
    def kv_len(self) -> int:
        return self.grid.kv_len

    @property
    def q_block(self) -> int:
        return self.grid.q_block

    @property
    def kv_block(self) -> int:
        return self.grid.kv_block

    @property
    def rows(self) -> int:
        return self.grid.rows

    @property
    def cols(self) -> int:
        return self.grid.cols

    def table(self, transposed: bool = False) -> SpanTable:
        """The kernel's table of the rows, or of the columns; made once."""
        if ("table", transposed) not in self._cache:
            spans = (self.full_t, self.partial_t) if transposed else (self.full, self.partial)
            self._cache["table", transposed] = span_table(
                *spans, groups=self.grid.groups, lines=self.cols if transposed else self.rows
            )
        table = self._cache["table", transposed]
        assert isinstance(table, SpanTable)
        return table

    def dense(self) -> Tensor:
        """0 empty, 1 partial, 2 full for every tile: int8 `[batch, heads, rows, cols]`. For pictures and tests."""
        shape = (self.batch, self.heads, self.rows, self.cols)
        full, partial = (cover(s, self.cols).reshape(shape) for s in (self.full, self.partial))
        return full.to(torch.int8) * 2 + partial.to(torch.int8)

    def kept_pairs(self) -> int:
        """How many (q, kv) pairs of the batch * heads groups the mask keeps, exactly; counted on first use."""
        if "pairs" not in self._cache:
            self._cache["pairs"] = count_pairs(self)
        pairs = self._cache["pairs"]
        assert isinstance(pairs, int)
        return pairs

    def density(self) -> float:
        """The kept share of all pairs, between 0 and 1; 0 where there is no pair."""
        pairs = self.grid.groups * self.q_len * self.kv_len
        return self.kept_pairs() / pairs if pairs else 0.0


@eager_only
def build_tile_map(
    traced_mask: Traced | None,
    *,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    q_block: int,
    kv_block: int,
    device: torch.device | str,
) -> TileMap:
    """Decide every tile of a mask, exactly.

    Args:
        traced_mask: a program of kind "mask" and its captures; None keeps everything.
        batch, heads: sizes of b and h; the map has only one where the mask does not depend on them.
        q_len, kv_len: lengths in tokens, 0 included.
        q_block, kv_block: the tile, in tokens, any size from 1.
        device: where the spans live and where the work is done.

    Returns:
        A `TileMap` whose contents equal what evaluating every pair would give.

    Raises:
        OptionError: a tile size below 1 or a negative length.

    Source: interval branch and bound over the mask's index rectangle (R. E. Moore, Interval Analysis, 1966).
    """
    if min(q_block, kv_block) < 1 or min(batch, heads, q_len, kv_len) < 0:
        sizes = f"batch={batch}, heads={heads}, q_len={q_len}, kv_len={kv_len}, tile=({q_block}, {kv_block})"
        hint = "a tile of at least (1, 1), and 0 for what is empty"
        raise OptionError("tile sizes must be positive and lengths not negative", given=sizes, hint=hint)
    deps = traced_mask.program.body.deps if traced_mask is not None else 0
    grid = Grid(
        batch=batch if deps & DEP_B else min(batch, 1),
        heads=heads if deps & DEP_H else min(heads, 1),
        q_len=q_len,
        kv_len=kv_len,
        q_block=q_block,
        kv_block=kv_block,
    )
    device = torch.device(device)
    if traced_mask is not None and device.type == "cpu":
        _check_reads(traced_mask, grid)
    with torch.no_grad():
        found = _found(traced_mask, grid, device)
    tile_map = TileMap(grid, *found, traced_mask)
    for listener in ON_BUILD:
        listener(tile_map)
    return tile_map


def _found(traced: Traced | None, grid: Grid, device: torch.device) -> Found:
    """By formula, by one period, or by search."""
    # not before a mask is built: imports are counted in milliseconds
    from flexattn.frontend.ordered_map import ordered_map
    from flexattn.frontend.zone_map import zone_map

    if traced is not None:
        ways = (zone_map, ordered_map, repeated_search)
        found = next((found for way in ways if (found := way(traced, grid, device)) is not None), None)
        if found is not None:
            return found
    return TileSearch(traced, grid, device).run()


def _check_reads(traced: Traced, grid: Grid) -> None:
    """A kept pair for which a captured tensor is read out of range is the user's error; a dropped one is not."""
    lost = misread(traced, grid)
    if lost is not None:
        found = TileSearch(lost, grid, torch.device("cpu")).run()
        if len(found.full.start) or len(found.partial.start):
            raise_misread(traced, grid)


def misread(traced: Traced, grid: Grid) -> Traced | None:
    """The mask of kept pairs for which a captured tensor is read out of range; None if there can be none.

    Nearly always one look at the whole index range rules it out; else it can be decided like any mask.
    """
    program, binding = traced
    lost = _lost(program, tuple(t.shape for t in binding.captures))
    if lost is None or not grid.groups * grid.q_len * grid.kv_len:
        return None
    sizes = {"b": grid.batch, "h": grid.heads, "q_idx": grid.q_len, "kv_idx": grid.kv_len}
    box = {
        n: (torch.zeros(1, dtype=torch.int64, device="cpu"), torch.tensor([size - 1], device="cpu"))
        for n, size in sizes.items()
    }
    _, may = bounds(lost, Tables(binding), b=box["b"], h=box["h"], q_idx=box["q_idx"], kv_idx=box["kv_idx"])
    if not may.any():
        return None
    both = make("and", program.body, lost.body)
    return Traced(Program("mask", both, program.captures, program.numbers, name=program.name), binding)


@lru_cache(maxsize=1024)
def _lost(program: Program, shapes: tuple[torch.Size, ...]) -> Program | None:
    """Pairs, kept or not, for which a captured tensor of these shapes is read out of range; None if none is indexed."""
    outside, loads = const(False, torch.bool), [n for n in topological([program.body]) if n.op == "load" and n.args]
    for node in loads:
        for size, index in zip(shapes[node.attr[0]], node.args, strict=True):
            outside = make("or", outside, make("or", make("lt", index, -size), make("ge", index, size)))
    return Program("mask", outside, program.captures, program.numbers) if loads else None


def raise_misread(traced: Traced, grid: Grid) -> NoReturn:
    """Says that a kept pair reads a captured tensor out of range."""
    program, binding = traced
    shapes = ", ".join(f"{program.capture_name(n)} of shape {tuple(t.shape)}" for n, t in enumerate(binding.captures))
    raise CaptureIndexError(
        f"mask_mod {program.name} keeps a pair for which it reads a captured tensor out of range",
        given=f"{shapes} for {grid.q_len} queries and {grid.kv_len} keys",
        hint="captured tensors as long as the sequence, or a condition that drops such pairs",
        where=str(program.where) if program.where else None,
    )


@torch.no_grad()
def count_pairs(tile_map: TileMap) -> int:
    """Kept pairs: full tiles by multiplication, partial ones by subdivision."""
    grid, spans = tile_map.grid, tile_map.partial
    total = tile_map.full.tiles() * grid.q_block * grid.kv_block
    mask = Predicate(tile_map.traced, grid) if tile_map.traced is not None else None
    for tiles in _tiles_of(spans, grid):
        cells = cells_of(tiles, grid)
        if mask is None:
            total += int(((cells[3] - cells[2]) * (cells[5] - cells[4])).sum())
            continue
        for _, parts in walk(mask, cells):
            total += int((parts.pairs * parts.kept).sum())
    return total


def _tiles_of(spans: Spans, grid: Grid) -> Iterator[Tensor]:
    """The tiles of spans by row, as [3, n] of group, row, column, a bounded number at a time."""
    device = spans.start.device
    line = lines_of(spans)
    ends = (spans.stop - spans.start).cumsum(0, dtype=torch.int64)
    for begin in range(0, int(ends[-1]) if len(ends) else 0, BOXES_AT_ONCE):
        number = torch.arange(begin, min(begin + BOXES_AT_ONCE, int(ends[-1])), device=device)
        run = torch.searchsorted(ends, number, right=True)
        col = spans.stop[run].long() - (ends[run] - number)
        yield torch.stack((line[run] // grid.rows, line[run] % grid.rows, col))
