"""The kept keys of one query, as runs: what a step of decoding reads, without a table of all rows.

Reads a traced mask, sizes and a position; makes runs of tokens. The one idea: bounds over some sqrt(kv_len) stretches of keys
leave few stretches open, and only in those is the mask evaluated key by key. Where many stay open because keys in no order
must have the query's value (unsorted documents), the keys of each value are listed once; where the mask repeats from stretch to
stretch (dilations, windows of an image), one of those that are alike is evaluated for all.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch

from flexattn.frontend.box_bounds import box_bounds
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import DEP_KV, Expr, const, make, var
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.periodic import divisors, moved
from flexattn.frontend.program import Program, Traced
from flexattn.frontend.refine import POINTS_AT_ONCE
from flexattn.frontend.row_tape import Tape, has_steps
from flexattn.frontend.simplify import simplify
from flexattn.frontend.spans import Grid, Spans
from flexattn.frontend.tile_map import misread, raise_misread

LEAST_STRETCH = 64
FEW = 32  # stretches that are evaluated rather than looked up
MOST_CONDITIONS = 16  # by which stretches are told apart
Edges = tuple[Any, Any]  # starts and stops of runs, arrays of whole numbers


class _Piece(NamedTuple):
    """Runs in order, and once more at each of the `origins` [n, 1]; whether some may touch the next."""

    starts: Any
    stops: Any
    may_touch: bool
    origins: Any = None

    def ends(self) -> tuple[int, int]:
        """The first start and the last stop."""
        first, last = (0, 0) if self.origins is None else (int(self.origins[0, 0]), int(self.origins[-1, 0]))
        return first + int(self.starts[0]), last + int(self.stops[-1])

    def many(self) -> int:
        return len(self.starts) * (1 if self.origins is None else len(self.origins))

    def write(self, edges: Any, is_stop: bool) -> None:
        """The starts, or the stops, into an array [many]."""
        mine = self.stops if is_stop else self.starts
        if self.origins is None:
            edges[:] = mine
        else:
            np.add(self.origins.astype(edges.dtype), mine.astype(edges.dtype), out=edges.reshape(-1, len(mine)))


class RowFinder:
    """Finds rows of a mask; what it knows of captured tensors serves all of them.

    Args:
        traced: the mask.
        grid: its groups and lengths; tiles do not matter.
        device: where the mask is evaluated; runs are put together by the host.
        tables: ranges of the captured tensors.
    """

    def __init__(self, traced: Traced, grid: Grid, device: torch.device, tables: Tables) -> None:
        self.traced, self.grid, self.device, self.tables = traced, grid, device, tables
        self.lost = misread(traced, grid) if device.type == "cpu" else None
        self.stretch = _stretch(traced, grid.kv_len)
        group = torch.arange(grid.groups, device=device)[:, None]
        self.b, self.h = group // max(grid.heads, 1), group % max(grid.heads, 1)
        self.first = torch.arange(0, grid.kv_len, self.stretch, device=device)
        self.last = (self.first + (self.stretch - 1)).clamp(max=grid.kv_len - 1)
        on_host = device.type == "cpu" and all(t.device.type == "cpu" for t in traced.binding.captures)
        ends = box_bounds(traced.program, of_rows=True)[:2]
        has_tapes = on_host and has_steps([traced.program.body, *ends]) and not tables.may_wrap(traced.program.body)
        self.tapes = _Tapes(self) if has_tapes and grid.groups and grid.kv_len else None

    @torch.no_grad()
    def find(self, position: int) -> Spans:
        """The kept keys of a query, a line for each group.

        Raises:
            CaptureIndexError: for a kept key a captured tensor is read out of range.
        """
        if self.lost is not None and len(self._runs(self.lost, position)[0]):
            raise_misread(self.traced, self.grid)
        start, stop = self._runs(self.traced, position)
        indptr = np.array([0, len(start)])
        if self.grid.groups != 1:
            width = self.grid.kv_len + 1
            indptr = np.searchsorted(start, (np.arange(self.grid.groups + 1) * width).astype(start.dtype))
            start, stop = start % width, stop % width
        found = (torch.from_numpy(x.astype(np.int32, copy=False)) for x in (indptr, start, stop))
        return Spans(*(x.to(self.device) for x in found))

    def _runs(self, traced: Traced, position: int) -> Edges:
        """(starts, stops), each group * (kv_len + 1) + token, in order, none touching the next."""
        groups, kv_len, stretch = self.grid.groups, self.grid.kv_len, self.stretch
        if not groups or not kv_len:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        tapes = self.tapes if traced is self.traced else None
        must, may, *ends = tapes.bounds(position) if tapes else self._bounds(traced, position)
        undecided = np.flatnonzero(may > must)
        if tapes and len(undecided) > FEW and tapes.equality and (listed := tapes.equality.runs(position)):
            return listed
        found = []
        if must.any():
            group, start, stop = _edges(must)
            origin = group * (kv_len + 1)
            found.append(_Piece(origin + start * stretch, origin + np.minimum(stop * stretch, kv_len), False))
        at_once = max(1, POINTS_AT_ONCE // stretch)
        if tapes and tapes.repeats and len(undecided) > 2:
            copies, undecided = self._copied(position, undecided, tapes.kinds(ends, undecided))
            found += copies
        for at in range(0, len(undecided), at_once):
            found.append(_Piece(*self._evaluated(traced, position, undecided[at : at + at_once]), True))
        return _joined(found, np.int32 if groups * (kv_len + 1) < 1 << 31 else np.int64)

    def _bounds(self, traced: Traced, position: int) -> tuple[Any, Any]:
        """(must, may) of each stretch [groups, stretches], by a pass over the op table."""
        q = torch.full((1, 1), position, device=self.device)
        index: dict[str, Any] = {"b": (self.b, self.b), "h": (self.h, self.h), "q_idx": (q, q)}
        index["kv_idx"], shape = (self.first, self.last), (self.grid.groups, len(self.first))
        must, may = (x.expand(shape).cpu().numpy() for x in bounds(traced.program, self.tables, **index))
        return must, may

    def _evaluated(self, traced: Traced, position: int, undecided: Any) -> Edges:
        """Runs in stretches, counted through all groups, key by key."""
        kv_len, many = self.grid.kv_len, len(self.first)
        group, begin = np.divmod(undecided, many)
        begin *= self.stretch
        keys = np.minimum(begin[:, None] + np.arange(self.stretch), kv_len - 1)
        if self.tapes and traced is self.traced:
            kept = self.tapes.kept(position, group, keys)
        else:
            kept = self._kept(traced, position, group, keys)
        line, start, stop = _edges(kept)
        origin = (group * (kv_len + 1) + begin)[line]
        end = (group * (kv_len + 1) + kv_len)[line]  # past it the last key was evaluated again
        return np.minimum(origin + start, end), np.minimum(origin + stop, end)

    def _copied(self, position: int, undecided: Any, kind: Any) -> tuple[list[_Piece], Any]:
        """Runs of the stretches that are alike, one of each kind evaluated; and the others."""
        kinds, ones = np.unique(kind, return_index=True)
        if len(kinds) > FEW:
            return [], undecided
        found, stretch = [], self.stretch
        for one, at in zip(kinds.tolist(), ones.tolist(), strict=True):
            if one >= 0:
                starts, stops = self._evaluated(self.traced, position, undecided[at : at + 1])
                group, begin = np.divmod(undecided[kind == one], len(self.first))
                origin = group * (self.grid.kv_len + 1) + begin * stretch
                if len(starts):
                    starts, stops = starts - origin[0], stops - origin[0]
                    found.append(_Piece(starts, stops, starts[0] == 0 and stops[-1] == stretch, origin[:, None]))
        return found, undecided[kind < 0]

    def _kept(self, traced: Traced, position: int, group: Any, keys: Any) -> Any:
        """The mask at keys [n, stretch] of n groups, by a pass over the op table."""
        q = torch.full((1, 1), position, device=self.device)
        at = torch.from_numpy(group).to(self.device)
        b, h = (x[at] if self.grid.groups > 1 else x for x in (self.b, self.h))
        kept = evaluate(*traced, b=b, h=h, q_idx=q, kv_idx=torch.from_numpy(keys).to(self.device)).to(self.device)
        return kept.expand(keys.shape).cpu().numpy()


class _Tapes:
    """A mask of whole numbers as steps of NumPy: bounds of every stretch of a row, and the mask at points.

    Stretches are alike (`kinds`) where all comparisons that do not repeat from stretch to stretch are decided, the same way."""

    def __init__(self, finder: RowFinder) -> None:
        program, grid = finder.traced.program, finder.grid
        found = box_bounds(program, of_rows=True)
        self.shape = (grid.groups, len(finder.first))
        self.b, self.h = finder.b.numpy(), finder.h.numpy()
        known = {"b": self.b, "h": self.h, "kv_lo": finder.first.numpy(), "kv_hi": finder.last.numpy()}
        ends = _other_ends(finder)
        self.repeats, self.is_cut = ends is not None, grid.kv_len % finder.stretch != 0
        self.box = Tape([found.must, found.may, *(ends or ())], finder.tables, known)  # which share most of their steps
        self.point = Tape([program.body], finder.tables, {})
        parts = _equality(program.body) if grid.groups == 1 else None
        self.equality = _Equality(*parts, finder) if parts else None

    def bounds(self, position: int) -> list[Any]:
        """must and may of each stretch [groups, stretches]; and where stretches may be alike, of each comparison that differs."""
        return [_shaped(x, self.shape) for x in self.box(q_idx=np.array(position))]

    def kinds(self, ends: list[Any], stretches: Any) -> Any:
        """A number for each stretch, counted through all groups, the same for those that are alike; -1 where nothing is known."""
        group, at = np.divmod(stretches, self.shape[1])
        kind, is_open = group << len(ends) // 2, (at == self.shape[1] - 1) & self.is_cut
        for n in range(len(ends) // 2):
            must, may = (x[group, at] for x in ends[2 * n : 2 * n + 2])
            kind += np.left_shift(must, n, dtype=np.int64)
            is_open |= may & ~must
        return np.where(is_open, -1, kind)

    def kept(self, position: int, group: Any, keys: Any) -> Any:
        """The mask at keys [n, stretch] of n groups."""
        found = self.point(b=self.b[group], h=self.h[group], q_idx=np.array(position), kv_idx=keys)[0]
        return _shaped(found, keys.shape)


def _other_ends(finder: RowFinder) -> list[Expr] | None:
    """Whether each comparison that does not repeat from stretch to stretch must hold over one, and whether it may; None for
    a mask with none that repeats, or with many that do not."""
    program, binding = finder.traced
    conditions: list[Expr] = []
    todo = [program.body]
    while todo:
        node = todo.pop()
        if node.op in ("and", "or", "xor", "not", "where") and node.dtype == torch.bool:
            todo += node.args
        elif node not in conditions:
            conditions.append(node)
    other = [e for e in conditions if moved(e, binding, finder.stretch, DEP_KV) != 0]
    if len(other) == len(conditions) or len(other) > MOST_CONDITIONS:
        return None
    parts = (Program("mask", e, program.captures, program.numbers) for e in other)
    ends = [end for part in parts for end in box_bounds(part, of_rows=True)[:2]]
    return ends if has_steps(ends) else None


class _Equality:
    """A mask that keeps only keys at which a captured tensor has the row's value: those keys are listed, by value.

    Args:
        read: the captured tensor at kv_idx.
        value: what it must equal, without kv_idx.
        rest: what else must hold.
        finder: of the rows.
    """

    def __init__(self, read: Expr, value: Expr, rest: Expr, finder: RowFinder) -> None:
        self.table, self.kv_len = finder.tables[read.attr[0]], finder.grid.kv_len
        where = {"b": np.int64(0), "h": np.int64(0)}
        self.value, self.rest = Tape([value], finder.tables, where), Tape([rest], finder.tables, where)
        self.asked = 0

    def runs(self, position: int) -> Edges | None:
        """The row; None for the first one, for which the list would have to be made."""
        self.asked += 1
        if self.asked == 1 or len(self.table.data) < self.kv_len:
            return None
        q = np.array(position)
        keys = self.table.positions(int(self.value(q_idx=q)[0]), self.kv_len)
        kept = self.rest(q_idx=q, kv_idx=keys)[0]
        keys = keys[kept] if np.ndim(kept) else keys if kept else keys[:0]
        gap = np.flatnonzero(keys[1:] != keys[:-1] + 1)
        start = keys[np.concatenate(([0], gap + 1))[: len(keys)]]
        return start.astype(np.int64), keys[np.concatenate((gap, [-1]))[: len(keys)]].astype(np.int64) + 1


def _equality(body: Expr) -> tuple[Expr, Expr, Expr] | None:
    """(read of a captured tensor at kv_idx, what it equals, all other conditions) of a conjunction with such a part."""
    parts, todo = [], [body]
    while todo:
        node = todo.pop()
        if node.op == "and" and node.dtype == torch.bool:
            todo += node.args
        else:
            parts.append(node)
    for at, part in enumerate(parts):
        for read, value in (
            (part.args, part.args[::-1]) if part.op == "eq" and part.args[0].dtype == torch.int64 else ()
        ):
            if read.op == "load" and read.args == (var("kv_idx"),) and not value.deps & DEP_KV:
                rest = const(True, torch.bool)
                for other in parts[:at] + parts[at + 1 :]:
                    rest = make("and", rest, other)
                return read, value, simplify(rest)
    return None


def _shaped(values: Any, shape: tuple[int, int]) -> Any:
    """Values over a shape; that they have its size is seen sooner than they are broadcast."""
    return values.reshape(shape) if values.size == shape[0] * shape[1] else np.broadcast_to(values, shape)


def _stretch(traced: Traced, kv_len: int) -> int:
    """About the square root of a length, and a multiple of what keys are divided by, so that a mask may repeat."""
    least = max(LEAST_STRETCH, 1 << (kv_len.bit_length() // 2))
    unit = math.lcm(*divisors(traced.program.body, traced.binding, DEP_KV))
    return -(-least // unit) * unit if unit <= least else least


def _edges(kept: Any) -> tuple[Any, Any, Any]:
    """(line, start, stop) of the runs of kept cells in the lines of a bool array."""
    lines, cells = kept.shape
    padded = np.zeros((lines, cells + 2), np.bool_)
    padded[:, 1:-1] = kept
    at = np.flatnonzero(padded[:, 1:] != padded[:, :-1])
    line, cell = np.divmod(at, cells + 1)
    return line[::2], cell[::2], cell[1::2]


def _joined(found: list[_Piece], dtype: Any) -> Edges:
    """Disjoint runs in order; those that touch are one."""
    found = [piece for piece in found if len(piece.starts)]
    if all(piece.origins is None for piece in found):
        edges = [(piece.starts, piece.stops) for piece in found] or [(np.zeros(0, dtype), np.zeros(0, dtype))]
        start, stop = (np.concatenate(x) if len(x) > 1 else x[0] for x in zip(*edges, strict=True))
        if (start[1:] < start[:-1]).any():
            start, stop = np.sort(start), np.sort(stop)
        return _without_touching(start, stop)
    pieces = sorted(((*piece.ends(), piece) for piece in found), key=lambda known: known[0])
    ends = list(itertools.accumulate((piece.many() for _, _, piece in pieces), initial=0))
    start, stop = np.empty(ends[-1], dtype), np.empty(ends[-1], dtype)
    for (_, _, piece), at, to in zip(pieces, ends[:-1], ends[1:], strict=True):
        piece.write(start[at:to], False)
        piece.write(stop[at:to], True)
    apart = [following[0] - before[1] for before, following in itertools.pairwise(pieces)]
    if min(apart, default=1) < 0:
        start.sort()
        stop.sort()
    elif min(apart, default=1) > 0 and not any(piece.may_touch for _, _, piece in pieces):
        return start, stop
    return _without_touching(start, stop)


def _without_touching(start: Any, stop: Any) -> Edges:
    """Runs in order, those that touch as one."""
    gap = start[1:] != stop[:-1]
    if gap.all():
        return start, stop
    return start[np.concatenate(([True], gap))[: len(start)]], stop[np.concatenate((gap, [True]))[: len(stop)]]


def whole_row(kv_len: int, device: torch.device) -> Spans:
    """The row of a mask that keeps every key, one line."""
    stop = torch.full((min(kv_len, 1),), kv_len, dtype=torch.int32, device=device)
    return Spans(torch.tensor([0, len(stop)], dtype=torch.int32, device=device), torch.zeros_like(stop), stop)


def repeated(spans: Spans, have: tuple[int, int], want: tuple[int, int]) -> Spans:
    """Lines for (batch, heads) of `want`, from those of `have`, where 1 stands for all."""
    device = spans.indptr.device
    batch, heads = (torch.arange(n, device=device) * (m > 1) for n, m in zip(want, have, strict=True))
    line = (batch[:, None] * have[1] + heads).flatten()
    counts = spans.indptr.diff()[line]
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    owner = torch.repeat_interleave(torch.arange(len(line), device=device), counts)
    at = torch.arange(len(owner), device=device) - indptr[owner] + spans.indptr[line[owner]]
    return Spans(indptr, spans.start[at], spans.stop[at])
