"""The span table of a call: of its block mask, or, where there is none, the one that keeps every pair.

Reads a Problem and a tile size; the table is an argument of every attention kernel. The idea: with a table always there, a
kernel has one way to walk, and the compiler needs fewer registers than for a loop whose ends follow from the lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from flexattn.runtime.block_map import Cut, DeviceTable, device_tables
from flexattn.runtime.device import is_capturing, stream_of
from flexattn.runtime.plan import Problem

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask


def table_of(problem: Problem, cut: Cut) -> DeviceTable:
    """The table a kernel walks.

    Args:
        problem: the call.
        cut: the kernel's tiles, and whether it walks a column of them.
    """
    made = problem.tables.get(cut)
    if made is not None:
        return cast(DeviceTable, made)
    if problem.block_mask is not None:
        return device_tables(problem.block_mask, (cut,))[0]
    device = problem.q.device
    own, other = (problem.q.shape[2], cut.q_tile), (problem.kv_len, cut.kv_tile)
    sizes = (*other, *own) if cut.by_column else (*own, *other)
    if is_capturing(device):  # what a graph's capture makes belongs to that graph
        return full_table.__wrapped__(*sizes, device)
    return full_table(*sizes, device, stream_of(device))


def prepare_tables(problem: Problem, mask: BlockMask, cuts: Sequence[Cut]) -> None:
    """Makes the tables of a call's mask that `table_of` will find, all together. They are kept with the mask where that may be
    used again, and otherwise (a CUDA graph's capture, tensors of inference mode) with the call."""
    tables = device_tables(mask, cuts)
    if mask.predicate is None or not mask.predicate.tables.keys() >= set(cuts):
        problem.tables.update(zip(cuts, tables))


@functools.lru_cache(maxsize=256)
def full_table(
    own_len: int, own_tile: int, other_len: int, other_tile: int, device: torch.device, stream: int = 0
) -> DeviceTable:
    """The table that keeps every pair: one full span a row, and tiles that a length cuts are partial.

    Args:
        own_len, own_tile: of the rows, in tokens.
        other_len, other_tile: of what they walk, in tokens.
        device: where it lives.
        stream: the one it is made on; another stream makes its own.

    Example:
        >>> full_table(100, 64, 130, 64, torch.device("cpu")).rows[0, :, :9].tolist()
        [[0, 2, 1, 1, 1, 0, 2, 2, 3], [1, 0, 3, 0, 1, 0, 0, 0, 3]]
    """
    lines, cols, whole = -(-own_len // own_tile), -(-other_len // other_tile), other_len // other_tile
    rows = torch.zeros(1, lines, 12, dtype=torch.int32, device=device)
    rows[0, :, 0] = torch.arange(lines, dtype=torch.int32, device=device)
    uncut = own_len // own_tile
    for part, full in ((rows[0, :uncut], whole), (rows[0, uncut:], 0)):
        for field, value in (
            (1, full),
            (2, cols - full),
            (3, full > 0),
            (4, cols > full),
            (6, full),
            (7, full),
            (8, cols),
        ):
            part[:, field] = int(value)
    return DeviceTable(rows, rows.new_zeros(1, 2), 1, 1)


__all__ = ["Cut", "full_table", "prepare_tables", "table_of"]
