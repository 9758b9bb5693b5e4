"""Tiles of a mask that is a union of zones, by formula: no tile is looked at.

Reads a traced mask and a grid of tiles; makes the runs of full and of partial tiles, by row and by column. The one idea: in a row
of tiles each zone is one run, so its tiles change only where a run begins or ends; all rows walk from one such place to their
next together. The mask builder on a GPU does the same (codegen/skeletons/block_map.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import Expr
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid, LineRuns
from flexattn.frontend.tile_search import Found
from flexattn.frontend.zones import FAR, Zone, hold_for, zones

LINES_AT_ONCE = 1 << 13  # of all groups together: what bounds the memory of a build
Numbers = list[list[Tensor]]  # of each zone its six ends, int64 [groups, 1]
Run = tuple[Tensor, Tensor]  # tiles [start, stop) of each line, [groups, lines]


def zone_map(traced: Traced, grid: Grid, device: torch.device) -> Found | None:
    """Decides every tile of a mask that has zones; None if it has none, or if its integers might wrap around."""
    found = zones(traced.program)
    if found is None or not hold_for(traced.program, traced.binding.numbers):
        return None
    kept, dropped = (_numbers(traced, part, grid, device) for part in (found.kept, found.dropped))
    rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
    by_row, by_col = LineRuns(grid.groups, rows, cols, device), LineRuns(grid.groups, cols, rows, device)
    own, other = (grid.q_block, grid.q_len), (grid.kv_block, grid.kv_len)
    if grid.groups and grid.rows and grid.cols:
        _add(by_row, kept, dropped, own, other)
        _add(by_col, [_turned(e) for e in kept], [_turned(e) for e in dropped], other, own)
    decided = _decided(by_row)  # before `spans` cuts what the lengths cut
    return Found(*by_row.spans(), *by_col.spans(), decided)


def _numbers(traced: Traced, part: tuple[Zone, ...], grid: Grid, device: torch.device) -> Numbers:
    group = torch.arange(grid.groups, device=device)[:, None]
    b, h, zero = group // max(grid.heads, 1), group % max(grid.heads, 1), torch.zeros_like(group)

    def value(e: Expr) -> Tensor:
        found = evaluate(traced.program, traced.binding, b=b, h=h, q_idx=zero, kv_idx=zero, body=e)
        return found.to(device).clamp(-FAR, FAR).expand(grid.groups, 1)

    return [[value(e) for e in zone] for zone in part]


def _turned(ends: list[Tensor]) -> list[Tensor]:
    """The ends of a zone with queries and keys in each other's place."""
    q_least, q_most, kv_least, kv_most, apart_least, apart_most = ends
    return [kv_least, kv_most, q_least, q_most, -apart_most, -apart_least]


def _add(runs: LineRuns, kept: Numbers, dropped: Numbers, own: tuple[int, int], other: tuple[int, int]) -> None:
    """The runs of one direction, for tiles of (own, other) = (tile, length) along its lines and across them."""
    group, at_once = torch.arange(runs.groups, device=runs.device)[:, None], max(1, LINES_AT_ONCE // runs.groups)
    for first in range(0, runs.lines, at_once):
        line = torch.arange(first, min(first + at_once, runs.lines), device=runs.device)
        low, high = line * own[0], (line * own[0] + (own[0] - 1)).clamp(max=own[1] - 1)
        base = (group * runs.lines + line) * runs.width
        keeps, drops = ([_run_of(ends, low, high, other) for ends in part] for part in (kept, dropped))
        for at, stop, has_kept, has_dropped in _walk(keeps, drops, torch.zeros_like(base), runs.cells):
            for found, kind in ((has_kept & ~has_dropped, runs.full), (has_kept & has_dropped, runs.partial)):
                kind.add((base + at)[found], (base + stop)[found])


def _run_of(ends: list[Tensor], low: Tensor, high: Tensor, other: tuple[int, int]) -> Run:
    """The tiles [start, stop) that a zone touches in each line, [groups, lines]; (0, 0) where none.

    Of a system of bounds on two whole numbers and their difference, what the one may be is exactly one run."""
    own_least, own_most, other_least, other_most, near, far = ends
    own_least, own_most = torch.maximum(own_least, low), torch.minimum(own_most, high)
    least = torch.maximum(other_least.clamp(min=0), own_least + near)
    most = torch.minimum(other_most.clamp(max=other[1] - 1), own_most + far)
    some = (own_least <= own_most) & (near <= far) & (least <= most)
    return least // other[0] * some, (most // other[0] + 1) * some


def _walk(
    kept: list[Run], dropped: list[Run], at: Tensor, cells: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(at, stop, some pair is kept, some is dropped) of stretches of tiles in which no run begins or ends, line by line together."""
    while bool((at < cells).any()):
        stop, states = torch.full_like(at, cells), []
        for part in (kept, dropped):
            state = torch.zeros_like(at, dtype=torch.bool)
            for begin, end in part:
                state |= (begin <= at) & (at < end)
                for place in (begin, end):
                    stop = torch.where(place > at, torch.minimum(stop, place), stop)
            states.append(state & (at < cells))
        yield at, stop, states[0], states[1]
        at = stop


def _decided(by_row: LineRuns) -> dict[str, object]:
    """Tiles of each kind before those that a length cuts become partial, as a search counts them."""
    tiles = by_row.groups * by_row.lines * by_row.cells
    full, partial = (int((stop - start).sum()) for start, stop in (by_row.full.joined(), by_row.partial.joined()))
    return {
        "tiles": tiles, "empty_by_formula": tiles - full - partial, "full_by_formula": full, "partial_by_formula": partial,
    }  # fmt: skip


__all__ = ["zone_map"]
