"""Masks that repeat along the diagonal: deciding one period of rows and of columns, and repeating it.

Reads a traced mask and a grid of tiles; makes the runs of full and of partial tiles. The one idea: if moving a query and a key
together by some distance changes no comparison (every function of q_idx - kv_idx, chunks, windows of an image in raster
order), row r + period of the tile map is row r moved along the diagonal, whatever the length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flexattn.frontend import algebra
from flexattn.frontend.expr import DEP_KV, DEP_Q, Expr, fold, topological
from flexattn.frontend.interval import Tables
from flexattn.frontend.program import Binding, Traced
from flexattn.frontend.spans import Grid, LineRuns, Runs, Spans, lines_of, picked, turned
from flexattn.frontend.tile_search import Found, TileSearch

LEAST_TILES = 1 << 14  # below it the usual search is as fast
MOST_TOKENS = 1 << 30  # a period is looked at where indices are up to twice as large
MOST_TILES = 1 << 19  # of one period of one group, from the first diagonal to the last
SHARE = 8  # of all tiles a period is at most one in so many
_SAME = ("lt", "le", "eq", "ne")
_DIVIDES = ("floordiv", "mod", "rshift")


def repeated_search(traced: Traced, grid: Grid, device: torch.device) -> Found | None:
    """Decides the tiles of a mask that repeats; None where it does not, or the usual search is faster."""
    rows, cols = grid.q_len // grid.q_block, grid.kv_len // grid.kv_block  # that no length cuts
    if grid.groups * rows * cols < LEAST_TILES or grid.q_len + grid.kv_len >= MOST_TOKENS:
        return None
    if Tables(traced.binding).may_wrap(traced.program.body):
        return None
    step = period(traced, math.lcm(grid.q_block, grid.kv_block))
    tiles = 0 if step is None else (rows + cols) * (step // grid.q_block + step // grid.kv_block)
    if step is None or step >= grid.q_len or tiles > MOST_TILES or SHARE * tiles > rows * cols:
        return None
    return _Repeated(traced, grid, device, step).run()


def period(traced: Traced, unit: int) -> int | None:
    """The least distance tried, a multiple of `unit`, by which queries and keys may move together; None if there is none."""
    body, binding = traced.program.body, traced.binding
    for step in (unit, math.lcm(unit, *divisors(body, binding, DEP_Q | DEP_KV))):
        if moved(body, binding, step) == 0:
            return step
    return None


def divisors(body: Expr, binding: Binding, of: int) -> list[int]:
    """What an expression divides the indices `of` by (bits as in `Expr.deps`), where that is one number."""
    nodes = (n for n in topological([body]) if n.op in _DIVIDES and n.deps & of)
    return [by for by in (_divisor(n, binding) for n in nodes) if by]


def moved(body: Expr, binding: Binding, step: int, of: int = DEP_Q | DEP_KV) -> int | None:
    """By how much an expression grows when the indices `of` all grow by `step`; None where that is not one number."""

    def visit(node: Expr, args: list[int | None]) -> int | None:
        if node.op == "var":
            return step if node.deps & of else 0
        known = [a for a in args if a is not None]
        if len(known) < len(args):
            return None
        if not any(known):
            return 0
        if node.op in _DIVIDES:
            divisor = _divisor(node, binding)
            exact = divisor != 0 and known[0] % divisor == 0
            return (0 if node.op == "mod" else known[0] // divisor) if exact else None
        return _grown(node, known, binding)

    return fold([body], visit)[0]


def _grown(node: Expr, args: list[int], binding: Binding) -> int | None:
    """The growth of an integer operation, some argument of which grows."""
    if node.op in _SAME:
        return 0 if args[0] == args[1] else None
    if node.dtype != torch.int64:
        return None
    if node.op in ("add", "sub"):
        return args[0] + args[1] if node.op == "add" else args[0] - args[1]
    if node.op == "neg":
        return -args[0]
    if node.op == "mul":
        factors = [_whole(a, binding) for a in node.args]
        return next((f * grown for f, grown in zip(factors, reversed(args), strict=True) if f is not None), None)
    if node.op in ("minimum", "maximum") and args[0] == args[1]:
        return args[0]
    if node.op == "where" and args[0] == 0 and args[1] == args[2]:
        return args[1]
    return None


def _divisor(node: Expr, binding: Binding) -> int:
    """What a node divides by, 0 where that is not one number."""
    by = _whole(node.args[1], binding) or 0
    if node.op == "rshift":
        return 1 << by if 0 < by < 32 else 0
    return by


def _whole(node: Expr, binding: Binding) -> int | None:
    """The value of an integer that is the same everywhere."""
    if node.dtype != torch.int64 or node.op not in ("const", "num"):
        return None
    return int(node.attr if node.op == "const" else binding.numbers[node.attr])


class _Repeated:
    """One search; `step` is the period in tokens, a multiple of both sides of a tile."""

    def __init__(self, traced: Traced, grid: Grid, device: torch.device, step: int) -> None:
        self.traced, self.grid, self.device, self.step = traced, grid, device, step
        lines, cells = (grid.rows, grid.rows), (grid.cols, grid.cols)  # ends that a length cuts are decided apart
        self.by_row, self.by_col = (LineRuns(grid.groups, *x, device) for x in ((lines, cells), (cells, lines)))
        self.evaluated = False

    def run(self) -> Found:
        grid, step = self.grid, self.step
        q_len, kv_len = (n // block * block for n, block in ((grid.q_len, grid.q_block), (grid.kv_len, grid.kv_block)))
        q_far, kv_far = (-(-n // step) * step for n in (q_len, kv_len))  # as far as a period may move back
        *rows, how = self._search((q_far, 0), (step, q_far + kv_len))
        if step == grid.q_block == grid.kv_block:  # one row of tiles, which read backwards is one column
            columns = [_mirrored(x, (q_far + kv_far) // step) for x in rows]
        else:
            lines, cells = (kv_far + q_len) // grid.q_block, step // grid.kv_block
            *below, _ = self._search((0, kv_far), (kv_far + q_len, step))
            columns = [turned(x, grid.groups, lines, cells) for x in below]
        shapes = (q_len // grid.q_block, grid.q_block), (kv_len // grid.kv_block, grid.kv_block)
        for name, row, column in zip(("full", "partial"), rows, columns, strict=True):
            self._repeat(self.by_row, name, row, q_far, *shapes)
            self._repeat(self.by_col, name, column, kv_far, *shapes[::-1])
        if q_len < grid.q_len:
            self._append((q_len, 0), (grid.q_len - q_len, grid.kv_len))
        if kv_len < grid.kv_len:
            self._append((0, kv_len), (q_len, grid.kv_len - kv_len))
        full, partial = self.by_row.spans()
        return Found(full, partial, *self.by_col.spans(), self._decided(full, partial, how))

    def _search(self, begin: tuple[int, int], lengths: tuple[int, int]) -> tuple[Spans, Spans, dict[str, object]]:
        """The rows of a part of the mask, which may lie outside the sequence: a period is the same everywhere."""
        traced = algebra.shifted(self.traced, *begin)
        grid = Grid(self.grid.batch, self.grid.heads, *lengths, self.grid.q_block, self.grid.kv_block)
        full, partial, how = TileSearch(traced, grid, self.device).rows()
        self.evaluated |= any(count for name, count in how.items() if name.endswith("by_evaluation"))
        return full, partial, how

    def _repeat(
        self, lines: LineRuns, name: str, pattern: Spans, far: int, own: tuple[int, int], other: tuple[int, int]
    ) -> None:
        """Moves the runs of one period along the diagonal, through all its lines; own and other are (tiles, their size)."""
        height, width = self.step // own[1], self.step // other[1]
        at = lines_of(pattern)
        group, first = at // height, at % height
        for times in _counted(-(-own[0] // height), max(len(at), 1), self.device):
            line = first + times * height
            move = times * width - far // other[1]
            start, stop = ((x + move).clamp(0, other[0]) for x in (pattern.start, pattern.stop))
            there = (line < own[0]) & (start < stop)
            key = (group * lines.lines + line) * lines.width
            runs: Runs = getattr(lines, name)
            runs.add(picked(key + start, there), picked(key + stop, there))

    def _append(self, begin: tuple[int, int], lengths: tuple[int, int]) -> None:
        """The last row or column, which a length cuts."""
        *found, _ = self._search(begin, lengths)
        corner = (begin[0] // self.grid.q_block, begin[1] // self.grid.kv_block)
        sides = -(-lengths[0] // self.grid.q_block), -(-lengths[1] // self.grid.kv_block)
        for lines, (top, left) in ((self.by_row, corner), (self.by_col, corner[::-1])):
            for name, by_row in zip(("full", "partial"), found, strict=True):
                spans = by_row if lines is self.by_row else turned(by_row, self.grid.groups, *sides)
                here, at = (len(spans.indptr) - 1) // self.grid.groups, lines_of(spans)
                key = (at // here * lines.lines + at % here + top) * lines.width + left
                runs: Runs = getattr(lines, name)
                runs.add(key + spans.start, key + spans.stop)

    def _decided(self, full: Spans, partial: Spans, period: dict[str, object]) -> dict[str, object]:
        """As `TileSearch` counts; `levels` are those of one period's rows."""
        way = "repeated_by_evaluation" if self.evaluated else "by_repetition"
        total, kept = self.grid.groups * self.grid.rows * self.grid.cols, (full.tiles(), partial.tiles())
        counts: dict[str, object] = {"tiles": total, f"empty_{way}": total - sum(kept)}
        return counts | {f"full_{way}": kept[0], f"partial_{way}": kept[1], "levels": period["levels"]}


def _mirrored(pattern: Spans, last: int) -> Spans:
    """The runs of tiles 0 .. last counted from the other end."""
    return Spans(pattern.indptr, last + 1 - pattern.stop, last + 1 - pattern.start)


def _counted(many: int, runs: int, device: torch.device) -> Iterator[Tensor]:
    """0, 1, ... below `many` as columns, so many at once that memory stays small."""
    at_once = max(1, (1 << 14) // runs)
    for begin in range(0, many, at_once):
        yield torch.arange(begin, min(begin + at_once, many), device=device)[:, None]


__all__ = ["divisors", "moved", "period", "repeated_search"]
