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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError, OptionError
from flexattn.frontend.expr import DEP_B, DEP_H, const, make, topological
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.program import Program, Traced

FAN = 4  # an undecided rectangle is split into FAN x FAN
TOP_BOXES = 1024  # rectangles of the first level, at most
BOXES_AT_ONCE = 1 << 14  # together with the next one: what bounds the memory of a build
POINTS_AT_ONCE = 1 << 16
ON_BUILD: list[Callable[[TileMap], None]] = []  # told of every map that was decided here; counters listen
SINGLE = 8  # rectangles of at most SINGLE x SINGLE pairs are evaluated pair by pair


class Spans(NamedTuple):
    """Half-open runs of tiles per line (a row of q tiles, or a column of kv tiles), joined and in order.

    Line `(b * heads + h) * lines + index` holds the runs `indptr[line] : indptr[line + 1]`; all three are int32.
    """

    indptr: Tensor
    start: Tensor
    stop: Tensor

    def tiles(self) -> int:
        """How many tiles the runs cover."""
        return int((self.stop - self.start).sum(dtype=torch.int64))


class SpanTable(NamedTuple):
    """What a kernel reads: one fixed row of 12 int32 per line, dearest line first, and the runs that do not fit.

    rows [batch * heads, lines, 12]: 0 line index, 1 full tiles, 2 partial tiles, 3 full runs, 4 partial runs, 5:7 first
    full run, 7:9 first partial run, 9 offset in `extra` of the further full runs, 10 of the further partial ones, 11 unused.
    extra [at least 1, 2]: (start, stop). Unused entries are 0.
    """

    rows: Tensor
    extra: Tensor


@dataclass(frozen=True)
class Grid:
    """A score matrix cut into tiles, once for each of the batch * heads groups that differ."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_block: int
    kv_block: int

    @property
    def groups(self) -> int:
        return self.batch * self.heads

    @property
    def rows(self) -> int:
        return -(-self.q_len // self.q_block)

    @property
    def cols(self) -> int:
        return -(-self.kv_len // self.kv_block)


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
            self._cache["table", transposed] = span_table(*spans, groups=self.grid.groups, lines=self.cols if transposed else self.rows)
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
        raise OptionError("tile sizes must be positive and lengths not negative", given=sizes)
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
    tile_map = _Builder(traced_mask, grid, device).run()
    for listener in ON_BUILD:
        listener(tile_map)
    return tile_map


def _check_reads(traced: Traced, grid: Grid) -> None:
    """A kept pair for which a captured tensor is read out of range is the user's error; a dropped one is not.

    Nearly always one look at the whole index range rules it out; else `mask & out of range` is decided like any mask.
    """
    program, binding = traced
    loads = [n for n in topological([program.body]) if n.op == "load" and n.args]
    if not loads or not grid.groups * grid.q_len * grid.kv_len:
        return
    outside = const(False, torch.bool)
    for node in loads:
        for size, index in zip(binding.captures[node.attr[0]].shape, node.args, strict=True):  # type: ignore[index]
            outside = make("or", outside, make("or", make("lt", index, -size), make("ge", index, size)))
    sizes = {"b": grid.batch, "h": grid.heads, "q_idx": grid.q_len, "kv_idx": grid.kv_len}
    box = {n: (torch.zeros(1, dtype=torch.int64), torch.tensor([size - 1])) for n, size in sizes.items()}
    misread = Program("mask", outside, program.captures, program.numbers)
    if not bounds(misread, Tables(binding), **box)[1].any():
        return
    misread = Program("mask", make("and", program.body, outside), program.captures, program.numbers, name=program.name)
    found = _Builder(Traced(misread, binding), grid, torch.device("cpu")).run()
    if len(found.full.start) or len(found.partial.start):
        raise CaptureIndexError(
            f"mask_mod {program.name} keeps a pair for which it reads a captured tensor out of range",
            given=f"captured shapes {[tuple(t.shape) for t in binding.captures]} for {grid.q_len} queries and {grid.kv_len} keys",
            hint="captured tensors as long as the sequence, or a condition that drops such pairs",
        )


# ---------------------------------------------------------------------------------------------------- runs and spans
def _sorted(keys: Tensor) -> Tensor:
    """Sorted values; NumPy's vectorised sort is several times faster than torch's on a CPU."""
    return torch.from_numpy(np.sort(keys.numpy())) if keys.device.type == "cpu" else torch.sort(keys).values


class Runs:
    """A growing set of disjoint runs. A run is two numbers: line * width + start, and line * width + stop.

    Runs that touch are joined whenever the set has doubled, so memory follows the answer and not the number of tiles.
    Being disjoint, starts and stops can be sorted apart: the n-th stop still belongs to the n-th start.
    """

    def __init__(self, device: torch.device) -> None:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self.parts, self.size, self.limit = [(empty, empty)], 0, 1 << 16

    def add(self, starts: Tensor, stops: Tensor) -> None:
        self.parts.append((starts, stops))
        self.size += len(starts)
        if self.size > self.limit:
            starts, stops = self.joined()
            self.parts, self.size = [(starts, stops)], len(starts)
            self.limit = max(self.limit, 2 * self.size)

    def joined(self) -> tuple[Tensor, Tensor]:
        starts, stops = (_sorted(torch.cat(part)) for part in zip(*self.parts, strict=True))
        if not len(starts):
            return starts, stops
        gap = starts[1:] != stops[:-1]
        one = gap.new_ones(1)
        return starts[torch.cat((one, gap))], stops[torch.cat((gap, one))]


class LineRuns:
    """Collects the runs of one direction; `full_lines` and `full_cells` are those that no length cuts."""

    def __init__(self, groups: int, lines: tuple[int, int], cells: tuple[int, int], device: torch.device) -> None:
        self.groups, self.device = groups, device
        (self.lines, self.full_lines), (self.cells, self.full_cells) = lines, cells
        self.width = self.cells + 1
        self.full, self.partial = Runs(device), Runs(device)

    def add_boxes(self, boxes: Tensor, inside: Tensor, scale: int) -> None:
        """Children `inside` [n, f, f] of the n parents (group, line, cell), each `scale` lines high and cells wide."""
        group, line, cell = boxes
        off = torch.zeros_like(inside[..., :1])
        first = inside & ~torch.cat((off, inside[..., :-1]), -1)
        last = inside & ~torch.cat((inside[..., 1:], off), -1)
        at, up, begin = first.nonzero(as_tuple=True)
        end = last.nonzero(as_tuple=True)[2] + 1
        base = ((line[at] * inside.shape[1] + up) * scale)[:, None] + torch.arange(scale, device=self.device)
        left = cell[at] * inside.shape[2]
        key = ((group[at] * self.lines)[:, None] + base) * self.width
        start, stop = key + ((left + begin) * scale)[:, None], key + ((left + end) * scale).clamp(max=self.cells)[:, None]
        real = base < self.lines
        self.full.add(start[real], stop[real])

    def add_spans(self, runs: Runs, spans: Spans, lines: int, scale: tuple[int, int]) -> None:
        """Spans of a coarser grid with `lines` lines a group: a line is scale[0] lines here, a cell scale[1] cells."""
        at = lines_of(spans)
        base = (at % max(lines, 1) * scale[0])[:, None] + torch.arange(scale[0], device=self.device)
        key = ((at // max(lines, 1) * self.lines)[:, None] + base) * self.width
        start, stop = ((x.long() * scale[1]).clamp(max=self.cells)[:, None] for x in (spans.start, spans.stop))
        real = (base < self.lines) & (start < stop)
        runs.add((key + start)[real], (key + stop)[real])

    def add_tiles(self, runs: Runs, boxes: Tensor) -> None:
        group, line, cell = boxes
        start = (group * self.lines + line) * self.width + cell
        runs.add(start, start + 1)

    def spans(self) -> tuple[Spans, Spans]:
        """(full, partial), after the full runs on a cut line or cell have become partial."""
        start, stop = self.full.joined()
        cut_line = start // self.width % max(self.lines, 1) >= self.full_lines
        cut_cell = ~cut_line & (stop % self.width > self.full_cells)
        self.partial.add(start[cut_line], stop[cut_line])
        self.partial.add(stop[cut_cell] - 1, stop[cut_cell])
        stop = stop - cut_cell.to(stop.dtype)
        keep = ~cut_line & (stop > start)
        return self._csr(start[keep], stop[keep]), self._csr(*self.partial.joined())

    def _csr(self, start: Tensor, stop: Tensor) -> Spans:
        count = torch.bincount(start // self.width, minlength=self.groups * self.lines)
        indptr = torch.cat((count.new_zeros(1), count.cumsum(0)))
        return Spans(*(x.to(torch.int32) for x in (indptr, start % self.width, stop % self.width)))


def lines_of(spans: Spans) -> Tensor:
    """The line of each run, int64. (A running count: torch's repeat_interleave wakes every thread for a handful of lines.)"""
    begins = torch.zeros(len(spans.start) + 1, dtype=torch.int64, device=spans.start.device)
    inner = spans.indptr[1:-1]
    begins.index_add_(0, inner, torch.ones_like(inner, dtype=torch.int64))
    return begins.cumsum(0)[:-1]


def cover(spans: Spans, cells: int) -> Tensor:
    """Which cells the runs of each line cover: bool `[lines, cells]`."""
    lines = len(spans.indptr) - 1
    line = lines_of(spans)
    edge = torch.zeros(lines * (cells + 1), dtype=torch.int32, device=spans.start.device)
    one = torch.ones_like(spans.start)
    edge.index_add_(0, line * (cells + 1) + spans.start, one)
    edge.index_add_(0, line * (cells + 1) + spans.stop, -one)
    return edge.view(lines, cells + 1).cumsum(1)[:, :cells] > 0


def coverage(spans: Spans, *, group: int, lines: int, cells: int, line_step: int, cell_step: int) -> Tensor:
    """How many tiles of each line_step x cell_step section one group's runs cover: float64 `[sections, sections]`.

    Works on the runs, so that a picture of a million tokens costs no dense map.
    """
    device = spans.start.device
    indptr = spans.indptr[group * lines : (group + 1) * lines + 1].long()
    first, last = int(indptr[0]), int(indptr[-1])
    line = lines_of(Spans(indptr - first, spans.start[first:last], spans.stop[first:last]))
    edges = (torch.arange(-(-cells // cell_step) + 1, device=device) * cell_step).clamp(max=cells)
    out = torch.zeros(-(-lines // line_step), len(edges) - 1, dtype=torch.float64, device=device)
    chunk = max(1, (1 << 20) // len(edges))
    for at in range(first, last, chunk):
        start, stop = (x[at : min(at + chunk, last), None].long() for x in (spans.start, spans.stop))
        below = torch.minimum((edges - start).clamp(min=0), stop - start)  # covered tiles left of each edge
        out.index_add_(0, line[at - first : at - first + len(start)] // line_step, below.diff(dim=1).double())
    return out


def span_table(full: Spans, partial: Spans, *, groups: int, lines: int) -> SpanTable:
    """Pack spans for a kernel; see `SpanTable`."""
    shape = (groups, lines)
    index = torch.arange(lines, device=full.indptr.device).expand(shape).reshape(-1)
    rows = torch.zeros(groups * lines, 12, dtype=torch.int32, device=full.indptr.device)
    rows[:, 0] = index
    offset, extras = 0, []
    for at, spans in enumerate((full, partial)):
        runs, first = spans.indptr.diff().long(), spans.indptr[:-1].long()
        ends = torch.cat((first.new_zeros(1), (spans.stop - spans.start).cumsum(0)))
        rows[:, 1 + at], rows[:, 3 + at] = ends[spans.indptr[1:].long()] - ends[first], runs
        some, more = (runs > 0).nonzero()[:, 0], (runs - 1).clamp(min=0)
        rows[some, 5 + 2 * at], rows[some, 6 + 2 * at] = spans.start[first[some]], spans.stop[first[some]]
        rows[:, 9 + at] = torch.where(more > 0, more.cumsum(0) - more + offset, 0)
        rest = torch.ones_like(spans.start, dtype=torch.bool)
        rest[first[some]] = False
        extras.append(torch.stack((spans.start[rest], spans.stop[rest]), 1))
        offset += len(extras[-1])
    extra = torch.cat(extras) if offset else rows.new_zeros(1, 2)
    rows = rows.view(groups, lines, 12)
    order = torch.sort(rows[..., 1] + rows[..., 2], dim=1, descending=True, stable=True).indices
    return SpanTable(rows.gather(1, order[..., None].expand_as(rows)).contiguous(), extra.contiguous())


# ------------------------------------------------------------------------------------------------- coarse to fine
class _Predicate:
    """The mask over rectangles and over points; b and h follow from the group."""

    def __init__(self, traced: Traced, grid: Grid) -> None:
        self.program, self.binding = traced
        self.tables, self.heads = Tables(self.binding), grid.heads
        self.compares_reads = any(
            n.op in ("eq", "ne") and all(a.op == "load" and a.args for a in n.args) for n in topological([self.program.body])
        )

    def bounds(
        self, group: Tensor, q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], *, sets: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(certainly kept everywhere, perhaps kept somewhere) for q [n, a, 1] x kv [n, 1, c], closed at both ends."""
        group = group[:, None, None]
        b, h = group // self.heads, group % self.heads
        must, may = bounds(self.program, self.tables, b=(b, b), h=(h, h), q_idx=q, kv_idx=kv, sets=sets)
        shape = (len(group), q[0].shape[1], kv[0].shape[2])
        return must.to(group.device).expand(shape), may.to(group.device).expand(shape)

    def at(self, group: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The mask at the points q [n, a, 1] x kv [n, 1, c]."""
        group = group[:, None, None]
        b, h = group // self.heads, group % self.heads
        kept = evaluate(self.program, self.binding, b=b, h=h, q_idx=q, kv_idx=kv)
        return kept.to(group.device).expand(len(group), q.shape[1], kv.shape[2])


class _Builder:
    """One build. Rectangles and tiles are int64 tensors [3, n]: group, row and column, counted in their own size."""

    def __init__(self, traced: Traced | None, grid: Grid, device: torch.device) -> None:
        self.traced, self.grid, self.device = traced, grid, device
        self.mask = _Predicate(traced, grid) if traced is not None else None
        rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
        self.by_row, self.by_col = LineRuns(grid.groups, rows, cols, device), LineRuns(grid.groups, cols, rows, device)
        self.levels: dict[int, list[int]] = {}
        self.witnessed = self.evaluated_empty = self.evaluated_full = self.evaluated_partial = 0
        self.probes = self._probe_points()

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
        cells = lambda s: grid.groups * -(-grid.rows // s) * -(-grid.cols // s)  # noqa: E731
        while cells(scale) > max(TOP_BOXES, 16 * grid.groups) and scale < max(grid.rows, grid.cols):
            scale *= FAN
        group = torch.arange(grid.groups, device=self.device)
        boxes = torch.stack((group, torch.zeros_like(group), torch.zeros_like(group)))
        self._descend(boxes, scale, (-(-grid.rows // scale), -(-grid.cols // scale)))

    def _descend(self, boxes: Tensor, scale: int, fan: tuple[int, int]) -> None:
        """Depth first over chunks, so that the undecided set never grows past one chunk a level."""
        if scale == 0:
            return self._settle(boxes)
        waiting: list[Tensor] = []
        for part in boxes.split(max(1, BOXES_AT_ONCE // (fan[0] * fan[1])), dim=1):
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
        for part in tiles.split(BOXES_AT_ONCE, dim=1):
            some, hole = self._decide(part)
            for found, name in ((some & ~hole, "full"), (some & hole, "partial")):
                for lines, order in ((self.by_row, [0, 1, 2]), (self.by_col, [0, 2, 1])):
                    lines.add_tiles(getattr(lines, name), part[order][:, found])

    def _decide(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """(has a kept pair, has a dropped pair): by witnesses, and where they do not tell, by subdivision."""
        assert self.mask is not None
        some = torch.zeros(tiles.shape[1], dtype=torch.bool, device=self.device)
        hole, todo = some.clone(), torch.arange(tiles.shape[1], device=self.device)
        for at_q, at_kv in self.probes:
            for part in todo.split(max(1, POINTS_AT_ONCE // (len(at_q) * len(at_kv)))):
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
        for part in todo.split(512):
            cells = _cells(tiles[:, part], self.grid)
            some[part], hole[part] = _search(self.mask, cells, some[part], hole[part])
        self._count_evaluated(some[todo], hole[todo])
        return some, hole

    def _unequal(self, tiles: Tensor) -> Tensor:
        """Tiles proved empty because two captured tensors have no value in common there (unsorted document ids)."""
        assert self.mask is not None
        _, group, q, q_end, kv, kv_end = _cells(tiles, self.grid)[:, :, None, None]
        _, may = self.mask.bounds(group[:, 0, 0], (q, q_end - 1), (kv, kv_end - 1), sets=True)
        return ~may.flatten()

    def _probe_points(self) -> list[tuple[Tensor, Tensor]]:
        """Where witnesses are looked for: 4 x 4 points, then two whole rows, then two whole columns of the tile."""
        few, every, ends = [], [], []
        for size in (self.grid.q_block, self.grid.kv_block):
            few.append(torch.tensor(sorted({0, min(1, size - 1), max(size // 2 - 1, 0), size - 1}), device=self.device))
            every.append(torch.arange(size, device=self.device))
            ends.append(torch.tensor(sorted({0, size - 1}), device=self.device))
        return [(few[0], few[1]), (ends[0], every[1]), (every[0], ends[1])]

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


# ------------------------------------------------------------------------------------------------- inside a tile
# Cells are rectangles of tokens, int64 [6, n]: owner, group, q begin, q end, kv begin, kv end (half-open, never empty).
def _cells(tiles: Tensor, grid: Grid) -> Tensor:
    group, row, col = tiles
    q, kv = row * grid.q_block, col * grid.kv_block
    q_end, kv_end = (q + grid.q_block).clamp(max=grid.q_len), (kv + grid.kv_block).clamp(max=grid.kv_len)
    return torch.stack((torch.arange(tiles.shape[1], device=tiles.device), group, q, q_end, kv, kv_end))


class _Parts(NamedTuple):
    """The parts of n cells: which pairs or quarters are real, kept, and dropped, all [n, a, c]; their pairs; what is open."""

    kept: Tensor
    dropped: Tensor
    pairs: Tensor
    open: Tensor


def _cut(begin: Tensor, end: Tensor, parts: int, single: bool) -> tuple[Tensor, Tensor]:
    """First and one past the last token [n, parts] of every part: single tokens, or equal shares; a part may be empty."""
    n = torch.arange(parts, device=begin.device)
    begin, end = begin[:, None], end[:, None]
    if single:
        first = torch.minimum(begin + n, end)
        return first, torch.minimum(first + 1, end)
    return begin + (end - begin) * n // parts, begin + (end - begin) * (n + 1) // parts


def _split(mask: _Predicate, cells: Tensor, sides: tuple[int, int]) -> _Parts:
    """Cut cells, at most `sides` tokens large, into smaller ones and bound them, or into pairs and evaluate them."""
    owner, group, q, q_end, kv, kv_end = cells
    single = max(sides) <= SINGLE
    parts = [n if single else min(FAN, -(-n // SINGLE)) for n in sides]
    (q0, q1), (k0, k1) = _cut(q, q_end, parts[0], single), _cut(kv, kv_end, parts[1], single)
    pairs = (q1 - q0)[:, :, None] * (k1 - k0)[:, None, :]
    real = pairs > 0
    q_lo, kv_lo = torch.minimum(q0, q_end[:, None] - 1)[:, :, None], torch.minimum(k0, kv_end[:, None] - 1)[:, None, :]
    if single:
        kept = mask.at(group, q_lo, kv_lo)
        return _Parts(kept & real, ~kept & real, pairs, cells[:, :0])
    q_hi, kv_hi = torch.maximum(q1[:, :, None] - 1, q_lo), torch.maximum(k1[:, None, :] - 1, kv_lo)
    must, may = mask.bounds(group, (q_lo, q_hi), (kv_lo, kv_hi))
    at, up, left = (may & ~must & real).nonzero(as_tuple=True)
    rest = torch.stack((owner[at], group[at], q0[at, up], q1[at, up], k0[at, left], k1[at, left]))
    return _Parts(must & real, ~may & real, pairs, rest)


def _walk(mask: _Predicate, cells: Tensor, done: Tensor | None = None) -> Iterator[tuple[Tensor, _Parts]]:
    """Split cells until nothing is open; cells whose owner is `done` (a live tensor) are left out."""
    stack = [cells]
    while stack:
        cells = stack.pop()
        if done is not None:
            cells = cells[:, ~done[cells[0]]]
        if not cells.shape[1]:
            continue
        q_side, kv_side = (cells[3:6:2] - cells[2:6:2]).amax(1).tolist()
        limit = POINTS_AT_ONCE // (SINGLE * SINGLE)
        if cells.shape[1] > limit:
            stack += cells.split(limit, dim=1)
            continue
        parts = _split(mask, cells, (q_side, kv_side))
        yield cells[0], parts
        stack.append(parts.open)


def _search(mask: _Predicate, cells: Tensor, some: Tensor, hole: Tensor) -> tuple[Tensor, Tensor]:
    """Finish (some, hole) of the cells' owners; an owner that has both is not looked at any more."""
    some, hole, done = some.clone(), hole.clone(), some & hole
    for owner, parts in _walk(mask, cells, done):
        some[owner[parts.kept.flatten(1).any(1)]] = True
        hole[owner[parts.dropped.flatten(1).any(1)]] = True
        torch.logical_and(some, hole, out=done)
    return some, hole


def count_pairs(tile_map: TileMap) -> int:
    """Kept pairs: full tiles by multiplication, partial ones by subdivision."""
    grid, spans = tile_map.grid, tile_map.partial
    total = tile_map.full.tiles() * grid.q_block * grid.kv_block
    mask = _Predicate(tile_map.traced, grid) if tile_map.traced is not None else None
    for tiles in _tiles_of(spans, grid):
        cells = _cells(tiles, grid)
        if mask is None:
            total += int(((cells[3] - cells[2]) * (cells[5] - cells[4])).sum())
            continue
        for _, parts in _walk(mask, cells):
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
