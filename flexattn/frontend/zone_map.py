"""Tiles of a mask that is a union of zones, by formula: no tile is looked at.

Reads a traced mask and a grid of tiles; makes the runs of full and of partial tiles, by row and by column. The one idea: in a row
of tiles each zone is one run, so its tiles change only where a run begins or ends; all rows walk from one such place to their
next together. The mask builder on a GPU does the same (codegen/skeletons/block_map.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import Expr
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid, LineRuns, Spans
from flexattn.frontend.tile_search import Found
from flexattn.frontend.zones import FAR, Zone, hold_for, zones

LINES_AT_ONCE = 1 << 13  # of all groups together: what bounds the memory of a build
Numbers = list[list[Any]]  # of each zone its six ends, int64 [groups, 1]


class Run(NamedTuple):
    """The tiles from `start` on that a zone touches in each line, 0 where it touches none: unsigned [groups, lines]."""

    start: Any
    many: Any


def zone_map(traced: Traced, grid: Grid, device: torch.device) -> Found | None:
    """Decides every tile of a mask that has zones; None if it has none, or if its integers might wrap around."""
    found = zones(traced.program)
    if found is None or not hold_for(traced.program, traced.binding.numbers):
        return None
    kept, dropped = (_numbers(traced, part, grid, device) for part in (found.kept, found.dropped))
    rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
    by_row, by_col = (LineRuns(grid.groups, *x, torch.device("cpu")) for x in ((rows, cols), (cols, rows)))
    own, other = (grid.q_block, grid.q_len), (grid.kv_block, grid.kv_len)
    if grid.groups and grid.rows and grid.cols:
        _add(by_row, kept, dropped, own, other)
        _add(by_col, [_turned(e) for e in kept], [_turned(e) for e in dropped], other, own)
    decided = how_decided(by_row)  # before `spans` cuts what the lengths cut
    full, partial, full_t, partial_t = (
        Spans(*(x.to(device) for x in part)) for part in (*by_row.spans(), *by_col.spans())
    )
    return Found(full, partial, full_t, partial_t, decided)


def _numbers(traced: Traced, part: tuple[Zone, ...], grid: Grid, device: torch.device) -> Numbers:
    group = torch.arange(grid.groups, device=device)[:, None]
    b, h, zero = group // max(grid.heads, 1), group % max(grid.heads, 1), torch.zeros_like(group)

    def value(e: Expr) -> Any:
        if e.op == "const":
            return np.full((grid.groups, 1), max(-FAR, min(e.attr, FAR)))
        found = evaluate(traced.program, traced.binding, b=b, h=h, q_idx=zero, kv_idx=zero, body=e)
        return found.clamp(-FAR, FAR).expand(grid.groups, 1).cpu().numpy()

    return [[value(e) for e in zone] for zone in part]


def _turned(ends: list[Any]) -> list[Any]:
    """The ends of a zone with queries and keys in each other's place."""
    q_least, q_most, kv_least, kv_most, apart_least, apart_most = ends
    return [kv_least, kv_most, q_least, q_most, -apart_most, -apart_least]


def _add(runs: LineRuns, kept: Numbers, dropped: Numbers, own: tuple[int, int], other: tuple[int, int]) -> None:
    """The runs of one direction, for tiles of (own, other) = (tile, length) along its lines and across them."""
    add_lines(
        runs, own, lambda low, high: [[_run_of(ends, low, high, other) for ends in part] for part in (kept, dropped)]
    )


def add_lines(runs: LineRuns, own: tuple[int, int], runs_of: Callable[[Any, Any], list[list[Run]]]) -> None:
    """The runs of all lines: `runs_of` the first and the last tokens of some [lines] gives those of what is kept and dropped."""
    group, at_once = np.arange(runs.groups)[:, None], max(1, LINES_AT_ONCE // runs.groups)
    for first in range(0, runs.lines, at_once):
        line = np.arange(first, min(first + at_once, runs.lines))
        base = (group * runs.lines + line) * runs.width
        base = base.astype(np.int32 if runs.dtype == torch.int32 else np.int64)
        keeps, drops = runs_of(line * own[0], np.minimum(line * own[0] + (own[0] - 1), own[1] - 1))
        for at, stop, has_kept, has_dropped in _walk(keeps, drops, base.shape, runs.cells):
            for found, kind in ((has_kept & ~has_dropped, runs.full), (has_kept & has_dropped, runs.partial)):
                origin = base[found]
                kind.add(*(torch.from_numpy(origin + x[found].astype(base.dtype)) for x in (at, stop)))


def _run_of(ends: list[Any], low: Any, high: Any, other: tuple[int, int]) -> Run:
    """The tiles that a zone touches in the lines of tokens low to high, `other` = (tile, length) across them.

    Of a system of bounds on two whole numbers and their difference, what the one may be is exactly one run."""
    own_least, own_most, other_least, other_most, near, far = ends
    own_least, own_most = np.maximum(own_least, low), np.minimum(own_most, high)
    least = np.maximum(np.maximum(other_least, 0), own_least + near)
    most = np.minimum(np.minimum(other_most, other[1] - 1), own_most + far)
    return tiles_between(least, most, (own_least <= own_most) & (near <= far), other[0])


def tiles_between(least: Any, most: Any, some: Any, tile: int) -> Run:
    """The tiles with a token from least to most, of lines that have `some`."""
    some, first = some & (least <= most), least // tile
    return Run(*((x * some).astype(np.uint32) for x in (first, most // tile + 1 - first)))


def _walk(
    kept: list[Run], dropped: list[Run], shape: tuple[int, int], cells: int
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """(at, stop, some pair is kept, some is dropped) of stretches of tiles in which no run begins or ends, line by line together."""
    at = np.zeros(shape, np.uint32)
    places = [place for start, many in (*kept, *dropped) for place in (start, start + many)]
    while (live := at < cells).any():
        states = []
        for part in (kept, dropped):
            state = np.zeros(shape, np.bool_)
            for start, many in part:
                state |= at - start < many  # what lies before the start is beyond every length
            states.append(state & live)
        ahead = np.uint32(cells - 1) - at
        for place in places:
            np.minimum(ahead, place - at - 1, out=ahead)  # so is a place that is not ahead
        stop = at + (ahead + 1) * live
        yield at, stop, states[0], states[1]
        at = stop


def how_decided(by_row: LineRuns) -> dict[str, object]:
    """Tiles of each kind before those that a length cuts become partial, as a search counts them."""
    tiles = by_row.groups * by_row.lines * by_row.cells
    full, partial = (int((stop - start).sum()) for start, stop in (by_row.full.joined(), by_row.partial.joined()))
    return {
        "tiles": tiles, "empty_by_formula": tiles - full - partial, "full_by_formula": full, "partial_by_formula": partial,
    }  # fmt: skip


__all__ = ["Run", "add_lines", "how_decided", "tiles_between", "zone_map"]
