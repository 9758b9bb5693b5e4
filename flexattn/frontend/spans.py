"""Runs of tiles: the one format in which tile maps are kept, built and handed to kernels.

Reads rectangles and single tiles as they are decided; makes joined runs per line, tables for kernels and sums for pictures. The
one idea: a run is two numbers, line * width + start and line * width + stop; runs are disjoint, so starts and stops sort apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

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
    return torch.from_numpy(values.numpy()[chosen.numpy()]) if values.device.type == "cpu" else values[chosen]


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

    def add_boxes(self, boxes: Tensor, inside: Tensor, scale: int) -> None:
        """Children `inside` [f, f, n] of the n parents (group, line, cell), each `scale` lines high and cells wide."""
        if not how_many(inside):
            return
        group, line, cell = boxes
        up, left = (torch.arange(n, device=self.device)[:, None] * scale for n in inside.shape[:2])
        top, begin = line * (inside.shape[0] * scale) + up, cell * (inside.shape[1] * scale) + left
        key = (((group * self.lines + top) * self.width)[:, None] + begin).to(self.dtype)
        first, last = inside.clone(), inside.clone()
        first[:, 1:] &= ~inside[:, :-1]
        last[:, :-1] &= ~inside[:, 1:]
        starts, stops = picked(key, first), picked(key, last) + scale
        if self.cells % scale:  # the last children may reach behind the last cell
            stops -= picked((begin + (scale - self.cells)).clamp(min=0).to(self.dtype).expand(key.shape), last)
        if scale > 1:
            lines = torch.arange(scale, dtype=self.dtype, device=self.device)
            starts, stops = (x[:, None] + lines * self.width for x in (starts, stops))
            if self.lines % scale:
                behind = top[:, None].expand(key.shape)
                starts, stops = (
                    x[picked(behind, e)[:, None] + lines < self.lines] for x, e in ((starts, first), (stops, last))
                )
        self.full.add(starts.flatten(), stops.flatten())

    def add_spans(self, runs: Runs, spans: Spans, lines: int, scale: tuple[int, int]) -> None:
        """Spans of a coarser grid with `lines` lines a group: a line is scale[0] lines here, a cell scale[1] cells."""
        at = lines_of(spans)
        base = (at % max(lines, 1) * scale[0])[:, None] + torch.arange(scale[0], device=self.device)
        key = ((at // max(lines, 1) * self.lines)[:, None] + base) * self.width
        start, stop = ((x.long() * scale[1]).clamp(max=self.cells)[:, None] for x in (spans.start, spans.stop))
        real = (base < self.lines) & (start < stop)
        runs.add((key + start)[real], (key + stop)[real])

    def add_tiles(self, runs: Runs, group: Tensor, line: Tensor, cell: Tensor) -> None:
        start = (group * self.lines + line) * self.width + cell
        runs.add(start, start + 1)

    def spans(self) -> tuple[Spans, Spans]:
        """(full, partial), after the full runs on a cut line or cell have become partial."""
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
        line, start = _split(start, self.width)
        count = _counts(line, self.groups * self.lines)
        indptr = torch.cat((count.new_zeros(1), count.cumsum(0)))
        return Spans(*(x.to(torch.int32) for x in (indptr, start, stop - line * self.width)))


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
    index = torch.arange(lines, dtype=torch.int32, device=full.indptr.device).expand(groups, lines)
    offset, by_kind = 0, []
    for spans in (full, partial):
        columns, rest = _columns(spans, offset)
        by_kind.append((columns, rest))
        offset += len(rest)
    columns = [index.flatten(), *(c for pair in zip(*(c for c, _ in by_kind), strict=True) for c in pair)]
    rows, cost = torch.empty(groups * lines, 12, dtype=torch.int32, device=index.device), columns[1] + columns[2]
    # the dearest first, then in order: one number says both, and its remainder which line it was
    key = _sorted(((1 << 31) - cost.view(groups, lines).long()) * lines + index)
    order = (_split(key, max(lines, 1))[1] + torch.arange(groups, device=index.device)[:, None] * lines).flatten()
    starts, stops = columns[5:7], columns[7:9]
    columns[5:9] = [starts[0], stops[0], starts[1], stops[1]]
    for at, column in enumerate(columns):
        rows[:, at] = taken(column, order)
    rows[:, 11] = 0
    extra = torch.cat([rest for _, rest in by_kind]) if offset else rows.new_zeros(1, 2)
    return SpanTable(rows.view(groups, lines, 12), extra)


def _columns(spans: Spans, offset: int) -> tuple[list[Tensor], Tensor]:
    """Of each line, int32: tiles, runs, start and stop of the first run, where its further runs begin; and those, [n, 2]."""
    first, runs = spans.indptr[:-1], spans.indptr.diff()
    ends = torch.cat((runs.new_zeros(1), (spans.stop - spans.start).cumsum(0, dtype=torch.int32)))  # may wrap around:
    tiles = taken(ends, spans.indptr[1:]) - taken(ends, first)  # what a line has is right all the same
    has, more = runs > 0, (runs - 1).clamp(min=0)
    at = first.clamp(max=max(len(spans.start) - 1, 0))
    start, stop = (taken(x, at) * has if len(x) else torch.zeros_like(runs) for x in (spans.start, spans.stop))
    begin = (more.cumsum(0, dtype=torch.int32) - more + offset) * (more > 0)
    rest = torch.ones_like(spans.start, dtype=torch.bool)
    rest[picked(first, has).long()] = False
    further = torch.stack((picked(spans.start, rest), picked(spans.stop, rest)), 1)
    return [tiles, runs, start, stop, begin], further
