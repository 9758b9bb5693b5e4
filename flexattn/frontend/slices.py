"""Which batches, heads and rows of blocks a slice of a mask takes.

Reads what stands between the brackets of `mask[...]`; makes a `Slice`: positions, and the way back from a position in the
slice to one in the mask. The one idea: a run of positions is an offset, anything else is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, CaptureIndexError, ShapeError


class Pick(NamedTuple):
    """Which positions of an axis a slice takes: `start + x`, or `table[x]` where there is a table."""

    start: int = 0
    table: Tensor | None = None

    def of(self, index: Any) -> Any:
        """The original index of `index`, for tensors and traced values."""
        if self.table is not None:
            return self.table[index]
        return index + self.start if self.start else index


class RowPick(NamedTuple):
    """The same for query rows: whole blocks of so many, or single rows (block 1) where a block cut by the length is not last."""

    pick: Pick
    block: int

    def of(self, index: Any) -> Any:
        if self.pick.table is None:
            return index + self.pick.start * self.block if self.pick.start else index
        if self.block == 1:
            return self.pick.table[index]
        return self.pick.table[index // self.block] * self.block + index % self.block


class Slice(NamedTuple):
    """What `mask[...]` takes: the positions along batch, heads and rows of blocks, and the way back along each."""

    at: tuple[Sequence[int], ...]
    b: Pick
    h: Pick
    q: RowPick
    q_len: int

    def cut(self, blocks: Tensor | None) -> Tensor | None:
        """The same part of one of torch's lists."""
        for dim, wanted in enumerate(self.at):
            if blocks is not None:
                blocks = blocks.index_select(dim, torch.tensor(list(wanted), device=blocks.device).long())
        return blocks


def read_slice(
    index: Sequence[Any], axes: tuple[int, ...], *, block: int, q_len: int, device: torch.device | str
) -> Slice:
    """What `mask[index]` takes of axes (batch, heads, rows of blocks), for rows of `block` queries, `q_len` of them in all.

    Raises:
        CaptureIndexError: a position is out of range, or there are too many indices.
        CallError: something that is no index.
    """
    wanted = _filled(index, len(axes))
    at = tuple(_positions(i, n) for i, n in zip(wanted, axes, strict=True))
    rows, length = _rows(at[2], block, q_len, device)
    b, h = (_pick(x, device) for x in at[:2])
    return Slice(at, b, h, rows, length)


def _filled(index: Sequence[Any], axes: int) -> list[Any]:
    """An index for every axis; `...` stands for those that are not named."""
    dots = [n for n, i in enumerate(index) if i is Ellipsis]
    named = len(index) - len(dots)
    if named > axes or len(dots) > 1:
        given = f"{named}" if len(dots) < 2 else "... more than once"
        hint = "block_mask[b, h, rows] or block_mask[..., rows]"
        raise ShapeError(f"a BlockMask [B, H, rows] takes up to {axes} indices", given=given, hint=hint)
    at = dots[0] if dots else len(index)
    rest = [slice(None)] * (axes - named)
    return [*index[:at], *rest, *index[at + 1 :]]


def _positions(index: Any, size: int) -> Sequence[int]:
    """The positions that an index takes of an axis of `size`."""
    if isinstance(index, slice):
        return range(*index.indices(size))
    if hasattr(index, "tolist"):  # of torch or NumPy
        index = index.tolist()
    wanted = index if isinstance(index, (list, tuple, range)) else [index]
    if wanted and all(isinstance(i, bool) for i in wanted) and wanted is index:
        if len(wanted) != size:
            given, hint = f"{len(wanted)} for an axis of {size}", "a truth value for each position"
            raise CaptureIndexError("a mask of positions must be as long as its axis", given=given, hint=hint)
        wanted = [n for n, taken in enumerate(wanted) if taken]
    for i in wanted:
        if isinstance(i, bool) or not isinstance(i, int):
            hint = "an integer, a slice, or integers or truth values along one axis"
            raise CallError("a BlockMask takes no such index", given=repr(index), hint=hint)
        if not -size <= i < size:
            given, hint = f"{i} for an axis of {size}", f"-{size} to {size - 1}; its rows are blocks, not positions"
            raise CaptureIndexError("index out of range for a BlockMask", given=given, hint=hint)
    wanted = [i % size for i in wanted]
    run = range(wanted[0], wanted[0] + len(wanted)) if wanted else range(0)
    return run if wanted == list(run) else wanted


def _pick(positions: Sequence[int], device: torch.device | str) -> Pick:
    if isinstance(positions, range) and (positions.step == 1 or len(positions) < 2):
        return Pick(positions[0] if len(positions) else 0)
    return Pick(0, torch.tensor(list(positions), dtype=torch.int64, device=device))


def _rows(blocks: Sequence[int], block: int, q_len: int, device: torch.device | str) -> tuple[RowPick, int]:
    """The picked rows, and how many they are. A block that the length cuts brings the rows it has, wherever it stands."""
    if isinstance(blocks, range) and blocks.step == 1:
        length = min(blocks.stop * block, q_len) - min(blocks.start * block, q_len) if len(blocks) else 0
        return RowPick(_pick(blocks, device), block), length
    heights = [max(0, min(block, q_len - n * block)) for n in blocks]
    cut = next((n for n, height in enumerate(heights) if height < block), len(heights))
    if not any(heights[cut + 1 :]):
        return RowPick(_pick(blocks, device), block), sum(heights)
    rows = [torch.arange(n * block, n * block + height) for n, height in zip(blocks, heights, strict=True)]
    return RowPick(Pick(0, torch.cat(rows).to(device)), 1), sum(heights)
