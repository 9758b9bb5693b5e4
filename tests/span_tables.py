"""A kernel's span table as a dense map: reads DeviceTable or SpanTable, checks its form on the way.

Nothing here knows how a table was made; what holds for all of them is asserted, so that a test only compares maps.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.tile_map import TileMap

ROW_INTS = 12


def dense_of(table: Any, *, lines: int, cells: int) -> Tensor:
    """0 empty, 1 partial, 2 full: int8 [groups, lines, cells], after checking the table's form.

    Args:
        table: has `rows` [groups, lines, 12] and `extra` [n, 2], int32.
        lines, cells: tiles along the rows of the table and across them.
    """
    rows, extra = table.rows.cpu(), table.extra.cpu()
    assert rows.dtype == extra.dtype == torch.int32
    assert rows.shape[1:] == (lines, ROW_INTS) and extra.shape[1:] == (2,)
    assert table.rows.is_contiguous() and table.extra.is_contiguous()
    map_ = torch.zeros(rows.shape[0], lines, cells, dtype=torch.int8)
    for group, group_rows in enumerate(rows.tolist()):
        assert sorted(row[0] for row in group_rows) == list(range(lines)), "every line once"
        costs = [row[1] + row[2] for row in group_rows]
        assert costs == sorted(costs, reverse=True), "the dearest line first"
        for row in group_rows:
            for kind, value in ((0, 2), (1, 1)):
                spans = spans_of(row, extra, kind)
                check_spans(spans, cells, row)
                assert sum(stop - start for start, stop in spans) == row[1 + kind], f"the count of tiles in {row}"
                for start, stop in spans:
                    assert not map_[group, row[0], start:stop].any(), f"full and partial overlap in {row}"
                    map_[group, row[0], start:stop] = value
    return map_


def spans_of(row: list[int], extra: Tensor, kind: int) -> list[tuple[int, int]]:
    """(start, stop) of the full (0) or the partial (1) spans of a row."""
    count, more = row[3 + kind], row[9 + kind]
    if not count:
        return []
    assert count == 1 or 0 <= more <= more + count - 1 <= len(extra), f"spans outside the table in {row}"
    return [(row[5 + 2 * kind], row[6 + 2 * kind]), *map(tuple, extra[more : more + count - 1].tolist())]


def check_spans(spans: list[tuple[int, int]], cells: int, row: list[int]) -> None:
    """In order, inside, not empty, and none touching the next."""
    for start, stop in spans:
        assert 0 <= start < stop <= cells, f"span {start}..{stop} of {cells} in {row}"
    for before, after in pairwise(spans):
        assert before[1] < after[0], f"spans {before} and {after} touch or are out of order in {row}"


def expected_of(tiles: TileMap, *, transposed: bool) -> Tensor:
    """The same map from a tile map."""
    found = tiles.dense().cpu().flatten(0, 1)
    return found.transpose(1, 2) if transposed else found


def check_table(table: Any, tiles: TileMap, *, transposed: bool) -> None:
    """A table says what a tile map says."""
    lines, cells = (tiles.cols, tiles.rows) if transposed else (tiles.rows, tiles.cols)
    found, wanted = dense_of(table, lines=lines, cells=cells), expected_of(tiles, transposed=transposed)
    assert found.shape == wanted.shape
    wrong = (found != wanted).nonzero()
    assert not len(wrong), f"{len(wrong)} tiles differ, the first (group, line, cell) {wrong[0].tolist()}"
