"""All (query, key) pairs of a call in torch, a bounded number at a time: for checks and for the strict path, not for speed.

Reads a Problem; makes index tensors of parts of the score matrix and says which pairs of a part are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.program import Traced
from flexattn.runtime.plan import Problem

_AT_ONCE = 1 << 22


class Part(NamedTuple):
    """One batch entry and the queries [start, stop); index tensors broadcast to [1, q_heads, stop - start, kv_len]."""

    batch: int
    start: int
    stop: int
    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor

    def evaluate(self, traced: Traced, outside: list[Tensor] | None = None, **given: Any) -> Tensor:
        """A mod, or another expression over its captures, at the part's pairs; see `frontend.evaluate`."""
        index: dict[str, Any] = {"b": self.b, "h": self.h, "q_idx": self.q_idx, "kv_idx": self.kv_idx}
        return evaluate(traced.program, traced.binding, **index, out_of_range=outside, **given)


def parts(problem: Problem) -> Iterator[Part]:
    """Parts that together hold every pair, each of at most about four million pairs."""
    batch, heads, q_len, _ = problem.q.shape
    device, kv_len = problem.q.device, problem.kv_len
    rows = max(1, _AT_ONCE // max(heads * kv_len, 1))
    h = torch.arange(heads, device=device)[:, None, None]
    kv_idx = torch.arange(kv_len, device=device)
    for b in range(batch):
        for start in range(0, q_len, rows):
            stop = min(start + rows, q_len)
            q_idx = torch.arange(start, stop, device=device)[:, None]
            yield Part(b, start, stop, torch.full((1, 1, 1, 1), b, device=device), h, q_idx, kv_idx)


def kept(problem: Problem, part: Part, outside: list[Tensor] | None = None) -> Tensor:
    """Which pairs attention keeps: those of a full tile, and those of a partial tile that the mask keeps.

    Args:
        problem, part: of one call.
        outside: receives where the mask read a captured tensor out of range, see `evaluate`.
    Returns: bool, broadcasts to [1, q_heads, rows, kv_len].
    """
    if problem.block_mask is None:
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=problem.q.device)
    tiles = problem.block_mask.tile_map(*problem.block_mask.BLOCK_SIZE)
    b, h = part.b * (tiles.batch > 1), part.h * (tiles.heads > 1)
    kinds = tiles.dense()[b, h, part.q_idx // tiles.q_block, part.kv_idx // tiles.kv_block]
    if problem.mask is None:
        return kinds > 0
    mask = part.evaluate(problem.mask, outside).to(kinds.device)
    return (kinds == 2) | ((kinds == 1) & mask)
