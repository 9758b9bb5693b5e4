"""Which tiles of the score matrix are empty, partial or full, and where: the part of attention that can be skipped.

Reads a traced mask, lengths and a tile size; makes a `TileMap`: for every row of tiles, and for every column, the runs of
full tiles and the runs of partial tiles.

The one idea: nothing of size q_len x kv_len is looked at. Bounds of the mask over a rectangle prove it empty or full at
once; only undecided rectangles are split. In a single tile one kept and one dropped pair (*witnesses*) prove PARTIAL as
soundly. What then is still open is split further, down to pairs, so that the answer is exact for every mask.
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
from flexattn.frontend.program import Program, Traced
from flexattn.frontend.refine import FAN, POINTS_AT_ONCE, Predicate, cells_of, search, walk
from flexattn.frontend.spans import Grid, LineRuns, Spans, SpanTable, chunks, cover, lines_of, span_table

__all__ = ["Grid", "SpanTable", "Spans", "TileMap", "build_tile_map"]

TOP_BOXES = 1024  # rectangles of the first level, at most
BOXES_AT_ONCE = 1 << 14  # together with the next one: what bounds the memory of a build
ON_BUILD: list[Callable[[TileMap], None]] = []  # told of every map that was decided here; counters listen


@dataclass(frozen=True, eq=False)
class TileMap:
    """The tiles to visit, and among them those that need no mask.

    `full` and `partial` have one line per row of q tiles and hold runs of kv tiles; `full_t` and `partial_t` are the same
    by column. `batch` and `heads` are 1 where the mask does not depend on them. A tile that a length cuts is partial.
    `decided` counts how the tiles were settled: empty and full by interval, partial by witness, and by evaluation.
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
        tile_map = _Builder(traced_mask, grid, device).run()
    for listener in ON_BUILD:
        listener(tile_map)
    return tile_map


def _check_reads(traced: Traced, grid: Grid) -> None:
    """A kept pair for which a captured tensor is read out of range is the user's error; a dropped one is not."""
    lost = misread(traced, grid)
    if lost is not None:
        found = _Builder(lost, grid, torch.device("cpu")).run()
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
    raise CaptureIndexError(
        f"mask_mod {program.name} keeps a pair for which it reads a captured tensor out of range",
        given=f"captured shapes {[tuple(t.shape) for t in binding.captures]} for {grid.q_len} queries and {grid.kv_len} keys",
        hint="captured tensors as long as the sequence, or a condition that drops such pairs",
        where=str(program.where) if program.where else None,
    )


# ------------------------------------------------------------------------------------------------- coarse to fine
class _Builder:
    """One build. Rectangles and tiles are int64 tensors [3, n]: group, row and column, counted in their own size."""

    def __init__(self, traced: Traced | None, grid: Grid, device: torch.device) -> None:
        self.traced, self.grid, self.device = traced, grid, device
        self.mask = Predicate(traced, grid) if traced is not None else None
        rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
        self.by_row, self.by_col = LineRuns(grid.groups, rows, cols, device), LineRuns(grid.groups, cols, rows, device)
        self.levels: dict[int, list[int]] = {}
        self.witnessed = self.evaluated_empty = self.evaluated_full = self.evaluated_partial = 0

    def run(self) -> TileMap:
        grid = self.grid
        if grid.groups and grid.rows and grid.cols:
            self._start()
        full, partial = self.by_row.spans()
        full_t, partial_t = self.by_col.spans()
        return TileMap(grid, full, partial, full_t, partial_t, self._decided(), self.traced)

    def _start(self) -> None:
        """The first level: few rectangles, as large as they must be for that."""
        grid, scale = self.grid, 1

        def boxes_at(size: int) -> int:
            return grid.groups * -(-grid.rows // size) * -(-grid.cols // size)

        while boxes_at(scale) > max(TOP_BOXES, 16 * grid.groups) and scale < max(grid.rows, grid.cols):
            scale *= FAN
        group = torch.arange(grid.groups, device=self.device)
        boxes = torch.stack((group, torch.zeros_like(group), torch.zeros_like(group)))
        self._descend(boxes, scale, (-(-grid.rows // scale), -(-grid.cols // scale)))

    def _descend(self, boxes: Tensor, scale: int, fan: tuple[int, int]) -> None:
        """Depth first over chunks, so that the undecided set never grows past one chunk a level."""
        if scale == 0:
            self._settle(boxes)
            return
        waiting: list[Tensor] = []
        for part in chunks(boxes, max(1, BOXES_AT_ONCE // (fan[0] * fan[1]))):
            waiting.append(self._level(part, scale, fan))
            if sum(x.shape[1] for x in waiting) >= BOXES_AT_ONCE:
                self._descend(torch.cat(waiting, 1), scale // FAN, (FAN, FAN))
                waiting = []
        rest = torch.cat(waiting, 1) if waiting else boxes[:, :0]
        if rest.shape[1]:
            self._descend(rest, scale // FAN, (FAN, FAN))

    def _level(self, boxes: Tensor, scale: int, fan: tuple[int, int]) -> Tensor:
        """Test the children of each rectangle; emit the full ones, return the undecided ones."""
        group, row, col = boxes
        q, in_q = self._children(row, fan[0], scale * self.grid.q_block, self.grid.q_len)
        kv, in_kv = self._children(col, fan[1], scale * self.grid.kv_block, self.grid.kv_len)
        inside = in_q[:, :, None] & in_kv[:, None, :]
        if self.mask is None:
            full, open_ = inside, torch.zeros_like(inside)
        else:
            q, kv = (q[0][:, :, None], q[1][:, :, None]), (kv[0][:, None, :], kv[1][:, None, :])
            must, may = self.mask.bounds(group, q, kv)
            full, open_ = must & inside, may & ~must & inside
        self.by_row.add_boxes(boxes, full, scale)
        self.by_col.add_boxes(boxes[[0, 2, 1]], full.transpose(1, 2), scale)
        at, up, left = open_.nonzero(as_tuple=True)
        counts = self.levels.setdefault(scale, [0, 0, 0])
        for n, count in enumerate((int(inside.sum()), int(full.sum()), len(at))):
            counts[n] += count
        return torch.stack((group[at], row[at] * fan[0] + up, col[at] * fan[1] + left))

    def _children(self, parent: Tensor, fan: int, size: int, limit: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """First and last token [n, fan] of each child, and which children begin inside the sequence."""
        first = (parent[:, None] * fan + torch.arange(fan, device=self.device)) * size
        return (first.clamp(max=limit - 1), (first + (size - 1)).clamp(max=limit - 1)), first < limit

    def _settle(self, tiles: Tensor) -> None:
        """Decide single tiles exactly and emit them."""
        for part in chunks(tiles, BOXES_AT_ONCE):
            some, hole = self._decide(part)
            for found, name in ((some & ~hole, "full"), (some & hole, "partial")):
                at = found.nonzero()[:, 0]
                if len(at):
                    group, row, col = part[:, at]
                    self.by_row.add_tiles(getattr(self.by_row, name), group, row, col)
                    self.by_col.add_tiles(getattr(self.by_col, name), group, col, row)

    def _decide(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """(has a kept pair, has a dropped pair): by witnesses, and where they do not tell, by subdivision."""
        assert self.mask is not None
        some = torch.zeros(tiles.shape[1], dtype=torch.bool, device=self.device)
        hole, todo = some.clone(), torch.arange(tiles.shape[1], device=self.device)
        for at_q, at_kv in _probe_points(self.grid.q_block, self.grid.kv_block, self.device):
            if not len(todo):
                break
            for part in chunks(todo, max(1, POINTS_AT_ONCE // (len(at_q) * len(at_kv)))):
                group, row, col = tiles[:, part]
                q = (row[:, None] * self.grid.q_block + at_q).clamp(max=self.grid.q_len - 1)
                kv = (col[:, None] * self.grid.kv_block + at_kv).clamp(max=self.grid.kv_len - 1)
                kept = self.mask.at(group, q[:, :, None], kv[:, None, :]).flatten(1)
                some[part] |= kept.any(1)
                hole[part] |= ~kept.all(1)
            todo = todo[~(some & hole)[todo]]
        self.witnessed += tiles.shape[1] - len(todo)
        if len(todo) and self.mask.compares_reads:
            hole[todo] |= (unequal := self._unequal(tiles[:, todo]))
            todo = todo[~unequal]
        for part in chunks(todo, 512):
            cells = cells_of(tiles[:, part], self.grid)
            some[part], hole[part] = search(self.mask, cells, some[part], hole[part])
        if len(todo):
            self._count_evaluated(some[todo], hole[todo])
        return some, hole

    def _unequal(self, tiles: Tensor) -> Tensor:
        """Tiles proved empty because two captured tensors have no value in common there (unsorted document ids)."""
        assert self.mask is not None
        _, group, q, q_end, kv, kv_end = cells_of(tiles, self.grid)[:, :, None, None]
        _, may = self.mask.bounds(group[:, 0, 0], (q, q_end - 1), (kv, kv_end - 1), sets=True)
        return ~may.flatten()

    def _count_evaluated(self, some: Tensor, hole: Tensor) -> None:
        self.evaluated_empty += int((~some).sum())
        self.evaluated_full += int((some & ~hole).sum())
        self.evaluated_partial += int((some & hole).sum())

    def _decided(self) -> dict[str, object]:
        """Tiles by the way they were settled, and (tested, full, undecided) rectangles per level, coarsest first."""
        total = self.grid.groups * self.grid.rows * self.grid.cols
        evaluated = self.evaluated_empty + self.evaluated_full + self.evaluated_partial
        open_ = self.witnessed + evaluated
        starts, stops = self.by_row.full.joined()
        kept = int((stops - starts).sum()) - self.evaluated_full
        levels = [(scale, *self.levels[scale]) for scale in sorted(self.levels, reverse=True)]
        return {
            "tiles": total,
            "empty_by_interval": total - open_ - kept,
            "full_by_interval": kept,
            "partial_by_witness": self.witnessed,
            "empty_by_evaluation": self.evaluated_empty,
            "full_by_evaluation": self.evaluated_full,
            "partial_by_evaluation": self.evaluated_partial,
            "levels": levels,
        }


@lru_cache(maxsize=64)
def _probe_points(q_block: int, kv_block: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Where witnesses are looked for: 4 x 4 points, then two whole rows, then two whole columns of the tile."""
    few, every, ends = [], [], []
    for size in (q_block, kv_block):
        few.append(torch.tensor(sorted({0, min(1, size - 1), max(size // 2 - 1, 0), size - 1}), device=device))
        every.append(torch.arange(size, device=device))
        ends.append(torch.tensor(sorted({0, size - 1}), device=device))
    return [(few[0], few[1]), (ends[0], every[1]), (every[0], ends[1])]


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
