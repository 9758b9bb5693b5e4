"""Tiles of a mask that is a union of ordered zones (packed documents), by formula: no tile is looked at.

Reads a traced mask and a grid of tiles; makes the runs of full and of partial tiles, by row and by column. The one idea: where the
ends of the keys' runs never fall, and each query's run goes on where the one before it ended, the keys of a row of tiles are
one run, from where that of its first query begins to where that of its last one ends.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import DEP_KV, DEP_Q, Expr, topological
from flexattn.frontend.interval import Tables
from flexattn.frontend.ordered_zones import INDICES, Condition, OrderedZone, ordered_zones
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid, LineRuns, turned
from flexattn.frontend.tile_search import Found
from flexattn.frontend.zone_map import Run, add_lines, how_decided, tiles_between
from flexattn.frontend.zones import FAR

POINTS_AT_ONCE = 1 << 14
_LEFT: Literal["left"] = "left"
_RIGHT: Literal["right"] = "right"


def ordered_map(traced: Traced, grid: Grid, device: torch.device) -> Found | None:
    """Decides every tile of a mask that has ordered zones; None if it has none, if a captured tensor is not sorted or on another
    device than the CPU, or if the keys of a row of tiles might be more than one run."""
    found = ordered_zones(traced.program)
    on_host = device.type == "cpu" and all(t.device.type == "cpu" for t in traced.binding.captures)
    if found is None or not on_host or not grid.groups or not grid.rows or not grid.cols:
        return None
    sides = _Sides(traced, grid)
    if not sides.rise([c for zone in (*found.kept, *found.dropped) for c in zone.conditions]):
        return None
    kept, dropped = ([_Ends(zone, sides) for zone in part] for part in found)
    if not all(ends.go_on() for ends in (*kept, *dropped)):
        return None
    rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
    by_row = LineRuns(grid.groups, rows, cols, device)
    add_lines(
        by_row, (grid.q_block, grid.q_len), lambda low, high: [[e.run(low, high) for e in x] for x in (kept, dropped)]
    )
    decided = how_decided(by_row)  # before `spans` cuts what the lengths cut
    full, partial = by_row.spans()
    full_t, partial_t = (turned(x, grid.groups, grid.rows, grid.cols) for x in (full, partial))
    return Found(full, partial, full_t, partial_t, decided)


class _Sides:
    """Expressions of one index over all groups: what they are, and where they reach a value. Arrays are int64 [groups or 1, n]."""

    def __init__(self, traced: Traced, grid: Grid) -> None:
        self.traced, self.grid, self.tables = traced, grid, Tables(traced.binding)
        self.known: dict[Expr, list[Any]] = {}
        group = torch.arange(grid.groups)[:, None]
        self.b, self.h, self.zero = group // grid.heads, group % grid.heads, torch.zeros(1, 1, dtype=torch.int64)

    def rise(self, conditions: list[Condition]) -> bool:
        """Whether no side falls anywhere within the lengths, and no integer wraps around."""
        sides = list(dict.fromkeys(e for c in conditions for e in (c.query, c.key)))
        known = [self.traced.program.body, *sides, *(c.offset for c in conditions if c.offset is not None)]
        if any(self.tables.may_wrap(e) for e in known):
            return False
        numbers = self.traced.binding.numbers
        for node in topological(sides):
            if (
                node.op == "floordiv"
                and node.deps & INDICES
                and node.args[1].op == "num"
                and numbers[node.args[1].attr] <= 0
            ):
                return False
            if node.op == "load" and node.deps & INDICES and not self._is_in_order(node):
                return False
        return True

    def _is_in_order(self, node: Expr) -> bool:
        """Whether the elements that are read are there, and do not fall."""
        table = self.tables[node.attr[0]]
        length = self.grid.q_len if node.deps & DEP_Q else self.grid.kv_len
        ends = np.array([[0, length - 1]])
        for size, index in zip(table.shape, node.args, strict=True):
            at = self.value(index, ends)
            if at.min() < 0 or at.max() >= size:
                return False
        return table.is_sorted

    def value(self, e: Expr, index: Any) -> Any:
        """An expression of at most one index, there."""
        if e.op == "const":
            return np.full((1, 1), e.attr)
        if e.op == "var" and e.deps & INDICES:
            return index
        if _is_read(e):
            rows = self._rows(e)
            if len(rows) == 1:
                return rows[0].take(index).astype(np.int64)
            return np.stack([row.take(index[n % len(index)]) for n, row in enumerate(rows)]).astype(np.int64)
        at = torch.from_numpy(index)
        q, kv = (at if e.deps & index_of else self.zero for index_of in (DEP_Q, DEP_KV))
        return np.atleast_2d(evaluate(*self.traced, b=self.b, h=self.h, q_idx=q, kv_idx=kv, body=e).numpy())

    def _rows(self, e: Expr) -> list[Any]:
        """The elements of a captured tensor that may be read, of each group or of all."""
        if e not in self.known:
            table, origin = self.tables[e.attr[0]], np.zeros((1, 1), np.int64)
            for size, index in zip(table.shape[:-1], e.args[:-1], strict=True):
                origin = origin * size + self.value(index, np.zeros((1, 1), np.int64))
            data, width = table.data.numpy(), table.shape[-1]
            self.known[e] = [data[at * width : (at + 1) * width] for at in origin[:, 0].tolist()]
        return self.known[e]

    def first(self, e: Expr, length: int, least: Any, strict: bool) -> Any:
        """The first index below a length from which on an expression is at least, or more than, `least`; the length if none is."""
        if e.op == "var":
            return np.clip(np.clip(least, -1, length) + strict, 0, length)
        if _is_read(e):
            return self._found(e, length, least, strict)
        low, high = np.zeros_like(least), np.full_like(least, length)
        low, high = (np.broadcast_to(x, np.broadcast_shapes(x.shape, (self.grid.groups, 1))) for x in (low, high))
        for _ in range(length.bit_length()):
            middle = (low + high) >> 1
            value = self.value(e, np.minimum(middle, length - 1))
            below = ((value <= least) if strict else (value < least)) & (middle < length)
            low, high = np.where(below, middle + 1, low), np.where(below, high, middle)
        return low

    def _found(self, e: Expr, length: int, least: Any, strict: bool) -> Any:
        """`first` of a captured tensor."""
        rows = [row[:length] for row in self._rows(e)]
        kind, side = np.iinfo(rows[0].dtype), _RIGHT if strict else _LEFT
        sought = np.clip(least, kind.min, kind.max).astype(rows[0].dtype)  # a wider type would copy all elements
        many = max(len(rows), len(sought))
        found = np.stack([rows[n % len(rows)].searchsorted(sought[n % len(sought)], side) for n in range(many)])
        if least.min() < kind.min or least.max() > kind.max:
            found = np.where(least > kind.max, length, np.where(least < kind.min, 0, found))
        return found


def _is_read(e: Expr) -> bool:
    """Whether an expression is a captured tensor at q_idx or kv_idx itself."""
    return e.op == "load" and bool(e.deps & INDICES) and e.args[-1].op == "var"


class _Ends:
    """A zone of each group: the queries and the keys that it is within, and where its keys begin and end in rows of tiles."""

    def __init__(self, zone: OrderedZone, sides: _Sides) -> None:
        self.sides, grid = sides, sides.grid
        nowhere = np.zeros((1, 1), np.int64)
        self.q_least, self.q_most, self.kv_least, self.kv_most = (
            nowhere,
            nowhere + grid.q_len - 1,
            nowhere,
            nowhere + grid.kv_len - 1,
        )
        self.there, self.both = np.ones((1, 1), np.bool_), [c for c in zone.conditions if _has_both(c)]
        for holds in zone.where:
            self.there = self.there & sides.value(holds, nowhere)
        for c in zone.conditions:
            if c not in self.both:
                self._narrow(c, nowhere)

    def _narrow(self, c: Condition, nowhere: Any) -> None:
        """A condition on queries alone, or on keys alone."""
        of_keys, grid = bool(c.key.deps & DEP_KV), self.sides.grid
        e, limit, length = (c.key, c.query, grid.kv_len) if of_keys else (c.query, c.key, grid.q_len)
        is_least = c.is_lower == of_keys
        first = self.sides.first(e, length, self.sides.value(limit, nowhere), c.is_strict == is_least)
        if of_keys and is_least:
            self.kv_least = np.maximum(self.kv_least, first)
        elif of_keys:
            self.kv_most = np.minimum(self.kv_most, first - 1)
        elif is_least:
            self.q_least = np.maximum(self.q_least, first)
        else:
            self.q_most = np.minimum(self.q_most, first - 1)

    def go_on(self) -> bool:
        """Whether each query's keys begin where those of the query before it end, or sooner, so that no key is left out.

        So it is where keys are bounded on one side only. Else it is shown by a diagonal kv_idx = q_idx + s on which all
        conditions hold: the keys of a query begin there or before, and those of the query before it end one key before it, or
        later. (Beyond the keys a condition is thought to go on so that it holds, or as it ends.)"""
        if len({c.is_lower for c in self.both}) < 2:
            return True
        least, most = np.full((1, 1), -FAR), np.full((1, 1), FAR)
        for c in self.both:
            if c.offset is not None:
                offset = self.sides.value(c.offset, np.zeros((1, 1), np.int64))
                least, most = (np.maximum(least, offset), most) if c.is_lower else (least, np.minimum(most, offset))
        apart = np.clip(0, least, most)
        return bool((least <= most).all()) and all(self._holds_at(c, apart) for c in self.both if c.offset is None)

    def _holds_at(self, c: Condition, apart: Any) -> bool:
        """Whether a condition holds for all queries, `apart` from their keys."""
        grid, at_once = self.sides.grid, max(1, POINTS_AT_ONCE // self.sides.grid.groups)
        for first in range(0, grid.q_len, at_once):
            query = np.arange(first, min(first + at_once, grid.q_len))[None]
            key = query + apart
            low, high = self.sides.value(c.query, query), self.sides.value(c.key, np.clip(key, 0, grid.kv_len - 1))
            low, high = (low, high) if c.is_lower else (high, low)
            holds = (low < high) if c.is_strict else (low <= high)
            if not (holds | (key >= grid.kv_len if c.is_lower else key < 0)).all():
                return False
        return True

    def run(self, low: Any, high: Any) -> Run:
        """The tiles that the zone touches in the rows of the queries low to high [lines]."""
        low, high, grid = np.maximum(low, self.q_least), np.minimum(high, self.q_most), self.sides.grid
        least, most, some = self.kv_least, self.kv_most, self.there & (low <= high)
        low, high = np.minimum(low, grid.q_len - 1), np.maximum(high, 0)
        for c in self.both:
            value = self.sides.value(c.query, low if c.is_lower else high)
            first = self.sides.first(c.key, grid.kv_len, value, c.is_strict == c.is_lower)
            least, most = (np.maximum(least, first), most) if c.is_lower else (least, np.minimum(most, first - 1))
        return tiles_between(least, most, some, grid.kv_block)


def _has_both(c: Condition) -> bool:
    return bool(c.query.deps & DEP_Q and c.key.deps & DEP_KV)


__all__ = ["ordered_map"]
