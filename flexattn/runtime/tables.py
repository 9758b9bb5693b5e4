"""The span table of a call: of its block mask, or, where there is none, the one that keeps every pair.

Reads a Problem and a tile size; the table is an argument of every attention kernel. The idea: with a table always there, a
kernel has one way to walk, and the compiler needs fewer registers than for a loop whose ends follow from the lengths.
"""

from __future__ import annotations

import functools
from typing import cast

import torch

from flexattn.codegen.tile_config import TileConfig
from flexattn.runtime.block_map import DeviceTable, device_table
from flexattn.runtime.device import is_capturing, stream_of
from flexattn.runtime.plan import Problem


def table_of(problem: Problem, config: TileConfig, *, transposed: bool) -> DeviceTable:
    """The table a kernel walks.

    Args:
        problem: the call.
        config: BLOCK_M by BLOCK_N are the tiles.
        transposed: rows are tiles of keys.
    """
    made = problem.tables.get((config.BLOCK_M, config.BLOCK_N, transposed))
    if made is not None:
        return cast(DeviceTable, made)
    if problem.block_mask is not None:
        return device_table(problem.block_mask, config, transposed=transposed)
    device = problem.q.device
    own, other = (problem.q.shape[2], config.BLOCK_M), (problem.k.shape[2], config.BLOCK_N)
    sizes = (*other, *own) if transposed else (*own, *other)
    if is_capturing(device):  # what a graph's capture makes belongs to that graph
        return full_table.__wrapped__(*sizes, device)
    return full_table(*sizes, device, stream_of(device))


def prepare_table(problem: Problem, config: TileConfig, *, transposed: bool) -> None:
    """Makes the table that `table_of` will find; arguments as of `table_of`. It is kept with the mask where that may be used
    again, and otherwise (a CUDA graph's capture, tensors of inference mode) with the call."""
    key = (config.BLOCK_M, config.BLOCK_N, transposed)
    table = table_of(problem, config, transposed=transposed)
    predicate = None if problem.block_mask is None else problem.block_mask.predicate
    if predicate is None or key not in predicate.tables:
        problem.tables[key] = table


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


__all__ = ["full_table", "prepare_table", "table_of"]
