"""Deciding the tiles of a mask coarse to fine: bounds of large rectangles first, witnesses and subdivision in single tiles.

Reads a traced mask and a grid of tiles; makes the runs of full and of partial tiles, by row and by column. The one idea a
reader needs for the shapes: the boxes of a level are the last axis of every tensor, so that each operation runs over
thousands of neighbours in memory instead of over the four children of one box.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.frontend.program import Traced
from flexattn.frontend.refine import FAN, POINTS_AT_ONCE, Predicate, any_of, cells_of, search
from flexattn.frontend.spans import Grid, LineRuns, Spans, chunks, how_many, picked, spots, taken, turned

TOP_BOXES = 1024  # rectangles of the first level, at most
BOXES_AT_ONCE = 1 << 14  # together with the next one: what bounds the memory of a build


class Found(NamedTuple):
    """The runs of a grid's tiles by row and by column, and how they were decided (see `TileMap.decided`)."""

    full: Spans
    partial: Spans
    full_t: Spans
    partial_t: Spans
    decided: dict[str, object]


class TileSearch:
    """One search. Rectangles and tiles are int64 tensors [3, n]: group, row and column, counted in their own size."""

    def __init__(self, traced: Traced | None, grid: Grid, device: torch.device) -> None:
        self.grid, self.device = grid, device
        self.mask = Predicate(traced, grid) if traced is not None else None
        rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
        self.by_row = LineRuns(grid.groups, rows, cols, device)
        self.levels: dict[int, list[int]] = {}
        self.witnessed = self.evaluated_empty = self.evaluated_full = self.evaluated_partial = 0

    def run(self) -> Found:
        """Decides every tile."""
        full, partial, decided = self.rows()
        full_t, partial_t = (turned(x, self.grid.groups, self.grid.rows, self.grid.cols) for x in (full, partial))
        return Found(full, partial, full_t, partial_t, decided)

    def rows(self) -> tuple[Spans, Spans, dict[str, object]]:
        """Decides every tile: the full and the partial runs by row alone, and how they were decided."""
        if self.grid.groups and self.grid.rows and self.grid.cols:
            self._start()
        full, partial = self.by_row.spans()
        return full, partial, self._decided()

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
                self._descend(torch.cat(waiting, 1), scale // FAN, self._fan(scale // FAN))
                waiting = []
        rest = torch.cat(waiting, 1) if waiting else boxes[:, :0]
        if rest.shape[1]:
            self._descend(rest, scale // FAN, self._fan(scale // FAN))

    def _fan(self, scale: int) -> tuple[int, int]:
        """Into how many rectangles so large one is split, down and across: not where one holds the whole side."""
        down, across = (FAN if n > scale else 1 for n in (self.grid.rows, self.grid.cols))
        return down, across

    def _level(self, boxes: Tensor, scale: int, fan: tuple[int, int]) -> Tensor:
        """Test the children of each rectangle; emit the full ones, return the undecided ones."""
        group, row, col = boxes
        q, in_q = self._children(row, fan[0], scale * self.grid.q_block, self.grid.q_len)
        kv, in_kv = self._children(col, fan[1], scale * self.grid.kv_block, self.grid.kv_len)
        inside = in_q[:, None] & in_kv
        if self.mask is None:
            full, open_ = inside, torch.zeros_like(inside)
        else:
            must, may = self.mask.bounds(group, (q[0][:, None], q[1][:, None]), (kv[0][None], kv[1][None]))
            full, open_ = must & inside, may & ~must & inside
        self.by_row.add_boxes(boxes, full, scale)
        (up, left), at = spots(open_)
        counts = self.levels.setdefault(scale, [0, 0, 0])
        for n, count in enumerate((how_many(inside), how_many(full), len(at))):
            counts[n] += count
        group, row, col = taken(boxes, at)
        return torch.stack((group, row * fan[0] + up, col * fan[1] + left))

    def _children(self, parent: Tensor, fan: int, size: int, limit: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """First and last token [fan, n] of each child, and which children begin inside the sequence."""
        first = (parent * fan + torch.arange(fan, device=self.device)[:, None]) * size
        return (first.clamp(max=limit - 1), (first + (size - 1)).clamp(max=limit - 1)), first < limit

    def _settle(self, tiles: Tensor) -> None:
        """Decide single tiles exactly and emit them."""
        for part in chunks(tiles, BOXES_AT_ONCE):
            some, hole = self._decide(part)
            for found, name in ((some & ~hole, "full"), (some & hole, "partial")):
                group, row, col = (picked(x, found) for x in part)
                self.by_row.add_tiles(getattr(self.by_row, name), group, row, col)

    def _decide(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """(has a kept pair, has a dropped pair): by witnesses, value sets, and where they do not tell, by subdivision."""
        assert self.mask is not None
        some = torch.zeros(tiles.shape[1], dtype=torch.bool, device=self.device)
        hole, todo = some.clone(), torch.arange(tiles.shape[1], device=self.device)
        for at_q, at_kv in _probe_points(self.grid.q_block, self.grid.kv_block, self.device):
            if not len(todo):
                break
            if len(at_q) > 2 and self.mask.compares_reads:  # before more is looked at than corners
                todo = self._without_unequal(tiles, todo, hole)
            for part in chunks(todo, max(1, POINTS_AT_ONCE // (len(at_q) * len(at_kv)))):
                group, row, col = taken(tiles, part)
                q = (row * self.grid.q_block + at_q[:, None]).clamp(max=self.grid.q_len - 1)
                kv = (col * self.grid.kv_block + at_kv[:, None]).clamp(max=self.grid.kv_len - 1)
                kept = self.mask.at(group, q[:, None], kv[None])
                some[part] |= any_of(kept)
                hole[part] |= any_of(~kept)
            before = len(todo)
            todo = picked(todo, ~taken(some & hole, todo))
            self.witnessed += before - len(todo)
        for part in chunks(todo, 512):
            cells = cells_of(tiles[:, part], self.grid)
            some[part], hole[part] = search(self.mask, cells, some[part], hole[part])
        if len(todo):
            self._count_evaluated(some[todo], hole[todo])
        return some, hole

    def _without_unequal(self, tiles: Tensor, todo: Tensor, hole: Tensor) -> Tensor:
        """`todo` without the tiles proved empty because two captured tensors have no value in common there (unsorted
        document ids); they have a hole."""
        assert self.mask is not None
        _, group, q, q_end, kv, kv_end = cells_of(taken(tiles, todo), self.grid)
        q, q_last, kv, kv_last = (x[None, None] for x in (q, q_end - 1, kv, kv_end - 1))
        _, may = self.mask.bounds(group, (q, q_last), (kv, kv_last), sets=True)
        hole[picked(todo, ~may.flatten())] = True
        return picked(todo, may.flatten())

    def _count_evaluated(self, some: Tensor, hole: Tensor) -> None:
        self.evaluated_empty += how_many(~some)
        self.evaluated_full += how_many(some & ~hole)
        self.evaluated_partial += how_many(some & hole)

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
    """Where witnesses are looked for: the corners of a tile, 4 x 4 points, two whole rows, two whole columns."""
    few, every, ends = [], [], []
    for size in (q_block, kv_block):
        few.append(torch.tensor(sorted({0, min(1, size - 1), max(size // 2 - 1, 0), size - 1}), device=device))
        every.append(torch.arange(size, device=device))
        ends.append(torch.tensor(sorted({0, size - 1}), device=device))
    return [(ends[0], ends[1]), (few[0], few[1]), (ends[0], every[1]), (every[0], ends[1])]
