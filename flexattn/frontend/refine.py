"""A mask over rectangles and points, and the search inside tiles that bounds and witnesses leave open.

Reads a traced mask and cells (rectangles of tokens); makes what is kept and dropped there, exactly. The one idea: cut a cell
into a few parts and bound each, until what is open is so small that its pairs are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import topological
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid, chunks, spots

FAN = 4  # an undecided rectangle is split into FAN x FAN
SINGLE = 8  # rectangles of at most SINGLE x SINGLE pairs are evaluated pair by pair
POINTS_AT_ONCE = 1 << 14  # bounds the memory of evaluation


class Predicate:
    """The mask over rectangles and over points of n groups; b and h follow from the group. The n are the last axis."""

    def __init__(self, traced: Traced, grid: Grid) -> None:
        self.program, self.binding = traced
        self.tables, self.heads = Tables(self.binding), grid.heads
        self.compares_reads = any(
            n.op in ("eq", "ne") and all(a.op == "load" and a.args for a in n.args)
            for n in topological([self.program.body])
        )

    def _indices(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """b and h; a division takes as long as a comparison of all points."""
        if self.heads == 1:
            return group, torch.zeros_like(group)
        return group // self.heads, group % self.heads

    def bounds(
        self, group: Tensor, q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], *, sets: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(certainly kept everywhere, perhaps kept somewhere) for q [a, 1, n] x kv [1, c, n], closed at both ends."""
        b, h = self._indices(group)
        must, may = bounds(self.program, self.tables, b=(b, b), h=(h, h), q_idx=q, kv_idx=kv, sets=sets)
        shape = (q[0].shape[0], kv[0].shape[1], len(group))
        return must.to(group.device).expand(shape), may.to(group.device).expand(shape)

    def at(self, group: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The mask at the points q [a, 1, n] x kv [1, c, n]."""
        b, h = self._indices(group)
        kept = evaluate(self.program, self.binding, b=b, h=h, q_idx=q, kv_idx=kv)
        return kept.to(group.device).expand(q.shape[0], kv.shape[1], len(group))


def any_of(kept: Tensor) -> Tensor:
    """Which of n have a kept point [a, c, n]. (NumPy's reduction over the first axes is many times faster than torch's.)"""
    if kept.device.type == "cpu":
        return torch.from_numpy(np.bitwise_or.reduce(kept.numpy().reshape(-1, kept.shape[2]), 0))
    return kept.flatten(0, 1).any(0)


# Cells are rectangles of tokens, int64 [6, n]: owner, group, q begin, q end, kv begin, kv end (half-open, never empty).
def cells_of(tiles: Tensor, grid: Grid) -> Tensor:
    group, row, col = tiles
    q, kv = row * grid.q_block, col * grid.kv_block
    q_end, kv_end = (q + grid.q_block).clamp(max=grid.q_len), (kv + grid.kv_block).clamp(max=grid.kv_len)
    return torch.stack((torch.arange(tiles.shape[1], device=tiles.device), group, q, q_end, kv, kv_end))


class _Parts(NamedTuple):
    """The parts of n cells: which pairs or quarters are real, kept, and dropped, all [a, c, n]; their pairs; what is open."""

    kept: Tensor
    dropped: Tensor
    pairs: Tensor
    open: Tensor


def _cut(begin: Tensor, end: Tensor, parts: int, single: bool) -> tuple[Tensor, Tensor]:
    """First and one past the last token [parts, n] of every part: single tokens, or equal shares; a part may be empty."""
    n = torch.arange(parts, device=begin.device)[:, None]
    if single:
        first = torch.minimum(begin + n, end)
        return first, torch.minimum(first + 1, end)
    return begin + (end - begin) * n // parts, begin + (end - begin) * (n + 1) // parts


def _split(mask: Predicate, cells: Tensor, sides: tuple[int, int]) -> _Parts:
    """Cut cells, at most `sides` tokens large, into smaller ones and bound them, or into pairs and evaluate them."""
    owner, group, q, q_end, kv, kv_end = cells
    single = max(sides) <= SINGLE
    parts = [n if single else min(FAN, -(-n // SINGLE)) for n in sides]
    (q0, q1), (k0, k1) = _cut(q, q_end, parts[0], single), _cut(kv, kv_end, parts[1], single)
    pairs = (q1 - q0)[:, None] * (k1 - k0)
    real = pairs > 0
    q_lo, kv_lo = torch.minimum(q0, q_end - 1)[:, None], torch.minimum(k0, kv_end - 1)[None]
    if single:
        kept = mask.at(group, q_lo, kv_lo)
        return _Parts(kept & real, ~kept & real, pairs, cells[:, :0])
    q_hi, kv_hi = torch.maximum(q1[:, None] - 1, q_lo), torch.maximum(k1[None] - 1, kv_lo)
    must, may = mask.bounds(group, (q_lo, q_hi), (kv_lo, kv_hi))
    (up, left), at = spots(may & ~must & real)
    rest = torch.stack((owner[at], group[at], q0[up, at], q1[up, at], k0[left, at], k1[left, at]))
    return _Parts(must & real, ~may & real, pairs, rest)


def walk(mask: Predicate, cells: Tensor, done: Tensor | None = None) -> Iterator[tuple[Tensor, _Parts]]:
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
            stack += chunks(cells, limit)
            continue
        parts = _split(mask, cells, (q_side, kv_side))
        yield cells[0], parts
        stack.append(parts.open)


def search(mask: Predicate, cells: Tensor, some: Tensor, hole: Tensor) -> tuple[Tensor, Tensor]:
    """Finish (some, hole) of the cells' owners; an owner that has both is not looked at any more."""
    some, hole, done = some.clone(), hole.clone(), some & hole
    for owner, parts in walk(mask, cells, done):
        some[owner[any_of(parts.kept)]] = True
        hole[owner[any_of(parts.dropped)]] = True
        torch.logical_and(some, hole, out=done)
    return some, hole
