"""Block lists, the way torch stores a block mask, to runs of tiles and back.

Reads (count, indices) pairs per row of blocks and makes a `TileMap` of blocks, or the reverse. The one idea: a list is a view.
What the project computes with is runs; lists are written when somebody asks for them, and read once when somebody brings them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import ShapeError
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid, LineRuns, Spans, cover, lines_of
from flexattn.frontend.tile_map import TileMap

CELLS_AT_ONCE = 1 << 24  # of a dense map, while lists are written


def write_lists(
    spans: Spans, *, groups: tuple[int, int], lines: int, cells: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Spans as torch's lists.

    Args:
        spans: runs of groups[0] * groups[1] * lines lines.
        groups: (batch, heads) of the spans.
        lines, cells: blocks along the rows and along the runs.
        shape: (batch, heads) of the lists; a group of size 1 is repeated.

    Returns:
        counts int32 [B, H, lines] and indices int32 [B, H, lines, cells]: the kept blocks in order, then the others in order.
    """
    total = groups[0] * groups[1] * lines
    counts = torch.zeros(total, dtype=torch.int32, device=spans.start.device)
    indices = torch.zeros(total, cells, dtype=torch.int32, device=spans.start.device)
    step = max(1, CELLS_AT_ONCE // max(cells, 1))
    for at in range(0, total, step):
        kept = cover(_some_lines(spans, at, min(at + step, total)), cells)
        counts[at : at + step] = kept.sum(1)
        indices[at : at + step] = torch.sort(kept.to(torch.int8), dim=1, descending=True, stable=True).indices
    counts, indices = counts.view(*groups, lines), indices.view(*groups, lines, cells)
    return counts.expand(*shape, -1).contiguous(), indices.expand(*shape, -1, -1).contiguous()


def _some_lines(spans: Spans, begin: int, end: int) -> Spans:
    first, last = int(spans.indptr[begin]), int(spans.indptr[end])
    return Spans(spans.indptr[begin : end + 1] - first, spans.start[first:last], spans.stop[first:last])


def read_lists(
    counts: Tensor,
    indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    *,
    block: tuple[int, int],
    cols: int,
) -> TileMap:
    """torch's lists as a tile map whose tiles are whole blocks; entries at or past `cols` are left out.

    A block that is listed as full and as partial is full; one listed twice counts once.

    Raises:
        ShapeError: the tensors are not [B, H, rows] and [B, H, rows, n], or a count exceeds n.
    """
    counts, indices = _four(counts, 3), _four(indices, 4)
    batch, heads, rows = _check(counts, indices, "kv")
    partial = _keys(counts, indices, cols)
    full = partial[:0]
    if full_counts is not None and full_indices is not None:
        full_counts, full_indices = _four(full_counts, 3), _four(full_indices, 4)
        if _check(full_counts, full_indices, "full_kv") != (batch, heads, rows):
            raise ShapeError(
                "full_kv_num_blocks must have kv_num_blocks' shape",
                given=f"{tuple(full_counts.shape)} for {tuple(counts.shape)}",
                hint="counts of 0 in rows without a full block",
            )
        full = _keys(full_counts, full_indices, cols)
        partial = partial[~torch.isin(partial, full)]
    grid = Grid(batch, heads, rows * block[0], cols * block[1], *block)
    by_row = LineRuns(grid.groups, (rows, rows), (cols, cols), counts.device)
    by_col = LineRuns(grid.groups, (cols, cols), (rows, rows), counts.device)
    for name, keys in (("full", full), ("partial", partial)):
        line, col = keys // max(cols, 1), keys % max(cols, 1)
        group, row = line // max(rows, 1), line % max(rows, 1)
        by_row.add_tiles(getattr(by_row, name), group, row, col)
        by_col.add_tiles(getattr(by_col, name), group, col, row)
    return TileMap(grid, *by_row.spans(), *by_col.spans(), {}, None)


def _four(tensor: Tensor, dims: int) -> Tensor:
    """Leading dimensions of size 1 until there are `dims`: torch allows lists without batch and heads."""
    while tensor.dim() < dims:
        tensor = tensor[None]
    return tensor


def _check(counts: Tensor, indices: Tensor, name: str) -> tuple[int, int, int]:
    if counts.dim() != 3 or indices.dim() != 4 or counts.shape != indices.shape[:3]:
        raise ShapeError(
            f"{name}_num_blocks must be [B, H, rows] and {name}_indices [B, H, rows, n]",
            given=f"{tuple(counts.shape)} and {tuple(indices.shape)}",
            hint="one count and one row of indices for each row of blocks",
        )
    if counts.numel() and int(counts.max()) > indices.shape[3]:
        raise ShapeError(
            f"{name}_num_blocks may not exceed the width of {name}_indices",
            given=f"{int(counts.max())} > {indices.shape[3]}",
            hint="as many indices a row as its count says",
        )
    batch, heads, rows = counts.shape
    return batch, heads, rows


def _keys(counts: Tensor, indices: Tensor, cols: int) -> Tensor:
    """The listed blocks as sorted numbers line * cols + block."""
    listed = torch.arange(indices.shape[3], device=counts.device) < counts[..., None]
    listed = (listed & (indices >= 0) & (indices < cols)).flatten(0, 2)
    line = listed.nonzero()[:, 0]
    keys: Tensor = torch.unique(line * cols + indices.flatten(0, 2)[listed].long())
    return keys


def retile(blocks: TileMap, *, q_len: int, kv_len: int, q_tile: int, kv_tile: int, mask: Traced | None) -> TileMap:
    """Blocks as tiles that divide them, cropped to the lengths; a tile that a length cuts is partial.

    Without a mask a partial block is as good as a full one.
    """
    grid = Grid(blocks.batch, blocks.heads, q_len, kv_len, q_tile, kv_tile)
    return _copied(blocks, grid, {"full": "full", "partial": "full" if mask is None else "partial"}, mask)


def crop_blocks(blocks: TileMap, rows: int, cols: int) -> TileMap:
    """The first rows and columns of blocks."""
    grid = Grid(
        blocks.batch, blocks.heads, rows * blocks.q_block, cols * blocks.kv_block, blocks.q_block, blocks.kv_block
    )
    return _copied(blocks, grid, {"full": "full", "partial": "partial"}, None)


def merge(blocks: TileMap) -> TileMap:
    """All visited blocks as partial ones."""
    return _copied(blocks, blocks.grid, {"full": "partial", "partial": "partial"}, blocks.traced)


def _copied(blocks: TileMap, grid: Grid, kinds: dict[str, str], mask: Traced | None) -> TileMap:
    """Runs of each kind as runs of kinds[kind], on a grid that is finer, smaller or both."""
    device, scale = blocks.full.start.device, (blocks.q_block // grid.q_block, blocks.kv_block // grid.kv_block)
    rows, cols = (grid.rows, grid.q_len // grid.q_block), (grid.cols, grid.kv_len // grid.kv_block)
    by_row, by_col = LineRuns(grid.groups, rows, cols, device), LineRuns(grid.groups, cols, rows, device)
    for old, new in kinds.items():
        by_row.add_spans(getattr(by_row, new), getattr(blocks, old), blocks.rows, scale)
        by_col.add_spans(getattr(by_col, new), getattr(blocks, old + "_t"), blocks.cols, scale[::-1])
    decided: dict[str, object] = {"tiles": grid.groups * grid.rows * grid.cols, "listed": True}
    return TileMap(grid, *by_row.spans(), *by_col.spans(), decided, mask)


def write_order(visited: Tensor, rows: Tensor, *, descending: bool) -> Tensor:
    """When each listed (kv block, q block) pair may add to dQ: its rank among the kv blocks of that row of q blocks.

    Args:
        visited: int32 [B, H, q blocks, kv blocks], 1 where a block is visited.
        rows: int32 [B, H, kv blocks, q blocks], q_indices or full_q_indices.
        descending: rank from the last kv block on.

    Returns:
        int32 of the shape of `rows`.
    """
    after = visited.cumsum(-1)
    rank = after[..., -1:] - after if descending else after - visited
    return rank.transpose(-1, -2).gather(-1, rows.long()).to(torch.int32)


def cuts_full_block(blocks: TileMap, *, q_len: int, kv_len: int) -> bool:
    """Whether a length ends inside a block that is listed as full."""
    full = blocks.full
    row = lines_of(full) % max(blocks.rows, 1)
    begin, cell = q_len // blocks.q_block, kv_len // blocks.kv_block
    cut = torch.zeros_like(row, dtype=torch.bool)
    if q_len % blocks.q_block:
        cut |= (row == begin) & (full.start * blocks.kv_block < kv_len)
    if kv_len % blocks.kv_block:
        cut |= (row * blocks.q_block < q_len) & (full.start <= cell) & (cell < full.stop)
    return bool(cut.any())
