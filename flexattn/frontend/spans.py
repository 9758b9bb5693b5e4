"""Runs of tiles: the one format in which tile maps are kept, built and handed to kernels.

Reads rectangles and single tiles as they are decided; makes joined runs per line, tables for kernels and sums for pictures. The
one idea: a run is two numbers, line * width + start and line * width + stop; runs are disjoint, so starts and stops sort apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

RUNS_AT_ONCE = 1 << 14  # that wait to be joined


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


def _sorted(keys: Tensor) -> Tensor:
    """Sorted values; NumPy's vectorised sort is several times faster than torch's on a CPU."""
    return torch.from_numpy(np.sort(keys.numpy())) if keys.device.type == "cpu" else torch.sort(keys).values


# On a CPU NumPy counts, finds, picks and takes several times faster than torch.
def how_many(chosen: Tensor) -> int:
    """How many are chosen."""
    return int(np.count_nonzero(chosen.numpy()) if chosen.device.type == "cpu" else chosen.sum())


def spots(chosen: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Indices of the chosen cells [a, c, n], as ((a, c), n); in order."""
    flat = (
        torch.from_numpy(np.flatnonzero(chosen.numpy()))
        if chosen.device.type == "cpu"
        else chosen.flatten().nonzero()[:, 0]
    )
    cell, at = _split(flat, max(chosen.shape[2], 1))
    return _split(cell, max(chosen.shape[1], 1)), at


def picked(values: Tensor, chosen: Tensor) -> Tensor:
    """values[chosen], in order."""
    if values.device.type != "cpu":
        return values[chosen]
    return torch.from_numpy(
        values.numpy().reshape(-1).take(np.flatnonzero(chosen.numpy()))
    )  # faster than by truth values


def taken(values: Tensor, at: Tensor) -> Tensor:
    """values[..., at]."""
    return torch.from_numpy(values.numpy().take(at.numpy(), -1)) if values.device.type == "cpu" else values[..., at]


def _counts(number: Tensor, size: int) -> Tensor:
    """How often each number from 0 to size - 1 occurs."""
    if number.device.type == "cpu":
        return torch.from_numpy(np.bincount(number.numpy(), minlength=size))
    return torch.bincount(number, minlength=size)


def _split(number: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(number // size, number % size), of numbers that are not negative."""
    whole = torch.from_numpy(number.numpy() // size) if number.device.type == "cpu" else number // size
    return whole, number - whole * size


def chunks(x: Tensor, size: int) -> Iterator[Tensor]:
    """Pieces of the last dimension, at most `size` long."""
    for at in range(0, x.shape[-1], size):
        yield x[..., at : at + size]


class Runs:
    """A growing set of disjoint runs. A run is two numbers: line * width + start, and line * width + stop.

    Runs that touch are joined whenever the set has doubled, so memory follows the answer and not the number of tiles.
    Being disjoint, starts and stops can be sorted apart: the n-th stop still belongs to the n-th start.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        empty = torch.zeros(0, dtype=dtype, device=device)
        self.done: tuple[Tensor, Tensor] = (empty, empty)  # joined and in order
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.dtype, self.size, self.limit = dtype, 0, RUNS_AT_ONCE

    def add(self, starts: Tensor, stops: Tensor) -> None:
        if not len(starts):
            return
        self.waiting.append((starts.to(self.dtype), stops.to(self.dtype)))
        self.size += len(starts)
        if self.size > self.limit:
            self.size = len(self.joined()[0])
            self.limit = max(self.limit, 2 * self.size)

    def joined(self) -> tuple[Tensor, Tensor]:
        """All runs, in order, none touching the next."""
        if self.waiting:
            parts = [self.done, *self.waiting]
            starts, stops = (_sorted(torch.cat([p[side] for p in parts])) for side in (0, 1))
            gap = torch.ones(len(starts) + 1, dtype=torch.bool, device=starts.device)
            torch.ne(starts[1:], stops[:-1], out=gap[1:-1])
            self.done, self.waiting = (picked(starts, gap[:-1]), picked(stops, gap[1:])), []
        return self.done


class LineRuns:
    """Collects the runs of one direction; `full_lines` and `full_cells` are those that no length cuts."""

    def __init__(self, groups: int, lines: tuple[int, int], cells: tuple[int, int], device: torch.device) -> None:
        self.groups, self.device = groups, device
        (self.lines, self.full_lines), (self.cells, self.full_cells) = lines, cells
        self.width = self.cells + 1
        # int32, nearly always, is half the memory and sorted in half the time
        self.dtype = torch.int32 if groups * self.lines * self.width < 1 << 31 else torch.int64
        self.full, self.partial = Runs(device, self.dtype), Runs(device, self.dtype)
        self.coarser: dict[
            int, LineRuns
        ] = {}  # full runs of boxes so many lines high and cells wide, till all are known

    def add_boxes(self, boxes: Tensor, inside: Tensor, scale: int) -> None:
        """Children `inside` [f, f, n] of the n parents (group, line, cell), each `scale` lines high and cells wide."""
        if not how_many(inside):
            return
        if scale > 1:
            if scale not in self.coarser:
                lines, cells = (-(-n // scale) for n in (self.lines, self.cells))
                self.coarser[scale] = LineRuns(self.groups, (lines, lines), (cells, cells), self.device)
            self.coarser[scale].add_boxes(boxes, inside, 1)
            return
        group, line, cell = boxes.to(self.dtype)
        up, left = (torch.arange(n, dtype=self.dtype, device=self.device)[:, None] for n in inside.shape[:2])
        top, begin = group * self.lines + line * inside.shape[0] + up, cell * inside.shape[1] + left
        key = (top * self.width)[:, None] + begin
        first, last = inside.clone(), inside.clone()
        first[:, 1:] &= ~inside[:, :-1]
        last[:, :-1] &= ~inside[:, 1:]
        self.full.add(picked(key, first), picked(key, last) + 1)

    def add_spans(self, runs: Runs, spans: Spans, lines: int, scale: tuple[int, int]) -> None:
        """Spans of a coarser grid with `lines` lines a group: a line is scale[0] lines here, a cell scale[1] cells."""
        self._spread(runs, lines_of(spans), spans.start, spans.stop, lines, scale)

    def _spread(self, runs: Runs, at: Tensor, start: Tensor, stop: Tensor, lines: int, scale: tuple[int, int]) -> None:
        group, line = _split(at.to(self.dtype), max(lines, 1))
        base = line * scale[0] + torch.arange(scale[0], dtype=self.dtype, device=self.device)[:, None]
        key = (group * self.lines + base) * self.width
        start, stop = ((x.to(self.dtype) * scale[1]).clamp(max=self.cells) for x in (start, stop))
        real = (base < self.lines) & (start < stop)
        runs.add(picked(key + start, real), picked(key + stop, real))

    def _collect(self) -> None:
        """Full runs of boxes, coarse ones first, become runs of smaller boxes and at last of tiles."""
        for scale in sorted(self.coarser, reverse=True):
            boxes = self.coarser.pop(scale)
            finer = max(self.coarser, default=1)
            into, times = self.coarser.get(finer, self), scale // finer
            starts, stops = boxes.full.joined()
            line, start = _split(starts, boxes.width)
            into._spread(into.full, line, start, stops - line * boxes.width, boxes.lines, (times, times))

    def add_tiles(self, runs: Runs, group: Tensor, line: Tensor, cell: Tensor) -> None:
        start = (group * self.lines + line) * self.width + cell
        runs.add(start, start + 1)

    def spans(self) -> tuple[Spans, Spans]:
        """(full, partial), after the full runs on a cut line or cell have become partial."""
        self._collect()
        start, stop = self.full.joined()
        if (self.lines, self.cells) == (self.full_lines, self.full_cells):
            return self._csr(start, stop), self._csr(*self.partial.joined())
        cut_line = start // self.width % max(self.lines, 1) >= self.full_lines
        cut_cell = ~cut_line & (stop % self.width > self.full_cells)
        self.partial.add(start[cut_line], stop[cut_line])
        self.partial.add(stop[cut_cell] - 1, stop[cut_cell])
        stop = stop - cut_cell.to(stop.dtype)
        keep = ~cut_line & (stop > start)
        return self._csr(start[keep], stop[keep]), self._csr(*self.partial.joined())

    def _csr(self, start: Tensor, stop: Tensor) -> Spans:
        return _spans(start, stop, self.groups * self.lines, self.width)


def _spans(start: Tensor, stop: Tensor, lines: int, width: int) -> Spans:
    """Spans of joined runs in order, each line * width + cell."""
    line, start = _split(start, width)
    count = _counts(line, lines)
    indptr = torch.cat((count.new_zeros(1), count.cumsum(0)))
    return Spans(*(x.to(torch.int32) for x in (indptr, start, stop - line * width)))


def turned(spans: Spans, groups: int, lines: int, cells: int) -> Spans:
    """The same tiles by cell instead of by line: `groups * cells` lines of runs.

    In a cell's column a run begins or ends at a line that differs there from the line above, and where two lines differ is bounded by
    the ends of runs that only one of them has: so this takes as long as there are ends, not tiles."""
    size = groups * max((lines + 1) * (cells + 1), 1)
    dtype, width = torch.int32 if size < 1 << 31 else torch.int64, cells + 1
    line = lines_of(spans)
    above = ((line + line // max(lines, 1)) * width).to(
        dtype
    )  # a line more in each group, for what ends behind the last one
    ends = torch.cat([above + x for x in spans[1:]])
    ends = _sorted(torch.cat((ends, ends + width)))
    differ = torch.ones(len(ends) + 1, dtype=torch.bool, device=ends.device)
    torch.ne(ends[1:], ends[:-1], out=differ[1:-1])
    ends = picked(ends, differ[1:] & differ[:-1])
    first, many = ends[::2], ends[1::2] - ends[::2]
    group, line = _split(_split(first, width)[0], lines + 1)
    change = group * (cells * (lines + 1)) + (first - (group * (lines + 1) + line) * width) * (lines + 1) + line
    change = _sorted(_counted_on(change, many, lines + 1))
    return _spans(change[::2], change[1::2], groups * cells, lines + 1)


def _counted_on(start: Tensor, many: Tensor, step: int) -> Tensor:
    """start, start + step, start + 2 * step, ... of each, as many as asked for."""
    begin = many.cumsum(0, dtype=torch.int64) - many
    rest = start - begin.to(start.dtype) * step
    if start.device.type == "cpu":
        repeated = torch.from_numpy(np.repeat(rest.numpy(), many.numpy()))
    else:
        repeated = torch.repeat_interleave(rest, many)
    return repeated + torch.arange(len(repeated), dtype=start.dtype, device=start.device) * step


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
    """Pack spans for a kernel; see `SpanTable`. The host does it, in NumPy, which is several times faster there than torch."""
    device, index = full.indptr.device, np.arange(lines, dtype=np.int32)
    many, further = _columns(full, 0)
    some, others = _columns(partial, len(further))
    # the dearest first, then in order: one number says both, and its remainder which line it was
    cost = (many.tiles + some.tiles).reshape(groups, lines).astype(np.int64)
    key = np.sort(((1 << 31) - cost) * lines + index, axis=1)
    order = (key - key // max(lines, 1) * lines + np.arange(groups)[:, None] * lines).flatten()
    rows = np.zeros((groups * lines, 12), np.int32)
    first = (many.start, many.stop, some.start, some.stop)
    columns = (many.tiles, some.tiles, many.runs, some.runs, *first, many.further, some.further)
    for at, column in enumerate((np.tile(index, groups), *columns)):
        rows[:, at] = column.take(order)
    extra = np.concatenate((further, others)) if len(further) + len(others) else np.zeros((1, 2), np.int32)
    return SpanTable(*(torch.from_numpy(x).to(device) for x in (rows.reshape(groups, lines, 12), extra)))


class _Columns(NamedTuple):
    """Of each line, int32: tiles, runs, the first run, and where the further runs begin."""

    tiles: Any
    runs: Any
    start: Any
    stop: Any
    further: Any


def _columns(spans: Spans, offset: int) -> tuple[_Columns, Any]:
    """The columns of one kind, and the further runs of all lines [n, 2], which begin at `offset`."""
    indptr, start, stop = (x.cpu().numpy() for x in spans)
    first, runs = indptr[:-1].astype(np.intp), np.diff(indptr)
    ends = np.zeros(len(start) + 1, np.int32)
    np.cumsum(stop - start, dtype=np.int32, out=ends[1:])  # may wrap around: what one line has is right all the same
    has, more = runs > 0, np.maximum(runs - 1, 0)
    at = np.minimum(first, len(start) - 1)
    starts, stops = (x.take(at) * has if len(x) else np.zeros_like(runs) for x in (start, stop))
    begin = (np.cumsum(more, dtype=np.int32) - more + np.int32(offset)) * (more > 0)
    rest = np.ones(len(start), np.bool_)
    rest[first[has]] = False
    others = np.flatnonzero(rest)
    return _Columns(np.diff(ends.take(indptr)), runs, starts, stops, begin), np.stack(
        (start.take(others), stop.take(others)), 1
    )
