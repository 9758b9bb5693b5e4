"""Which batches, heads and rows of blocks a slice of a mask takes.

Reads what stands between the brackets of `mask[...]`; makes a `Slice`: positions, and the way back from a position in the
slice to one in the mask. The one idea: a run of positions is an offset, anything else is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError


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
    """The same for query rows, taken by whole blocks; `limit` drops rows of a ragged block that is not the last one."""

    pick: Pick
    block: int
    limit: int | None = None

    def of(self, index: Any) -> Any:
        if self.pick.table is None:
            return index + self.pick.start * self.block if self.pick.start else index
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
    """What `mask[index]` takes of axes (batch, heads, rows of blocks), for rows of `block` queries, `q_len` of them in all."""
    wanted = (*index, *(slice(None),) * 3)[:3]
    at = tuple(_positions(i, n) for i, n in zip(wanted, axes, strict=True))
    length, limit = _picked_length(at[2], block, q_len)
    b, h, rows = (_pick(x, device) for x in at)
    return Slice(at, b, h, RowPick(rows, block, limit), length)


def _positions(index: Any, size: int) -> Sequence[int]:
    """The positions that an index takes of an axis of `size`."""
    if isinstance(index, slice):
        return range(*index.indices(size))
    if isinstance(index, Tensor):
        index = index.nonzero()[:, 0] if index.dtype == torch.bool else index
        index = index.tolist()
    wanted = [index] if isinstance(index, int) else list(index)
    for i in wanted:
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


def _picked_length(rows: Sequence[int], block: int, q_len: int) -> tuple[int, int | None]:
    """(tokens in the picked rows of blocks, limit on original positions if a ragged block is not the last one)."""
    short = -q_len % block
    ragged = q_len // block if short else -1
    length = len(rows) * block
    if len(rows) and rows[-1] == ragged:
        length -= short
    return length, q_len if ragged in rows[:-1] else None
