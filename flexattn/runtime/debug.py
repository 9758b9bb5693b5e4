"""What FLEXATTN_DEBUG=1 adds to a call that runs in kernels: captured reads out of range become errors.

Reads a Problem; evaluates its mods in torch over all pairs, a bounded number at a time. A kernel answers such a read with NaN
or 0 because it cannot raise; here the user learns which function did it. Slow on purpose, and off unless asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError
from flexattn.frontend.evaluate import evaluate
from flexattn.runtime.plan import Problem

_PAIRS_AT_ONCE = 1 << 22
Index = tuple[Tensor, Tensor, Tensor, Tensor]


def check_reads(problem: Problem) -> None:
    """Evaluates both mods everywhere and raises if a kept pair reads a captured tensor out of range.

    Args:
        problem: one call, on any device.
    Raises: CaptureIndexError naming the function.
    """
    if not any(t is not None and t.binding.captures for t in (problem.score, problem.mask)):
        return
    for index in _tiles(problem):
        keep = _visited(problem, index)
        if problem.mask is not None:
            keep = keep & _checked(problem, "mask_mod", index, keep=None)
        if problem.score is not None:
            _checked(problem, "score_mod", index, keep=keep)


def _tiles(problem: Problem) -> Iterator[Index]:
    """(b, h, q_idx, kv_idx) index tensors that broadcast, covering every pair."""
    batch, heads, q_len, _ = problem.q.shape
    device, kv_len = problem.q.device, problem.k.shape[2]
    rows = max(1, _PAIRS_AT_ONCE // max(heads * kv_len, 1))
    h = torch.arange(heads, device=device)[:, None, None]
    kv_idx = torch.arange(kv_len, device=device)
    for b in range(batch):
        for start in range(0, q_len, rows):
            q_idx = torch.arange(start, min(start + rows, q_len), device=device)[:, None]
            yield torch.full((1, 1, 1), b, device=device), h, q_idx, kv_idx


def _visited(problem: Problem, index: Index) -> Tensor:
    """True at pairs whose tile the block mask visits."""
    if problem.block_mask is None:
        return torch.ones((), dtype=torch.bool, device=problem.q.device)
    b, h, q_idx, kv_idx = index
    tiles = problem.block_mask.tile_map(*problem.block_mask.BLOCK_SIZE)
    b, h = b * (tiles.batch > 1), h * (tiles.heads > 1)
    return tiles.dense()[b, h, q_idx // tiles.q_block, kv_idx // tiles.kv_block] > 0


def _checked(problem: Problem, name: str, index: Index, *, keep: Tensor | None) -> Tensor:
    """The mod's value; an out-of-range read at a pair it keeps (or `keep` says) is an error."""
    traced = problem.mask if name == "mask_mod" else problem.score
    assert traced is not None
    b, h, q_idx, kv_idx = index
    outside: list[Tensor] = []
    score = torch.zeros((), dtype=torch.float32, device=q_idx.device)
    value = evaluate(
        *traced, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=None if keep is None else score, out_of_range=outside
    )
    for bad in outside:
        if bool((bad & (value if keep is None else keep)).any()):
            raise CaptureIndexError(
                f"{name} {traced.program.name} reads a captured tensor out of range at a pair that is kept",
                given="a tensor shorter than the indices it is read at",
                hint="a longer tensor, or a mask_mod that drops those pairs",
            )
    return value
