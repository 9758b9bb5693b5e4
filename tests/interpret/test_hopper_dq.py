"""The post-pass of the fused backward finds each element of dq where the kernel for Hopper has put it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from flexattn.codegen.skeletons import hopper_backward


def _in_register_order(tile: torch.Tensor) -> torch.Tensor:
    """A tile of dq [queries, dims] as both warpgroups add it: each thread's four numbers, thread by thread, then the next four."""
    rows, dims = tile.shape
    part = dims // 2 if rows == 64 else dims
    parts = [tile[:, :part], tile[:, part:]] if rows == 64 else [tile[:64], tile[64:]]
    eights = [p.view(4, 2, 8, part // 8, 4, 2) for p in parts]  # warp, half, row, eight of columns, lane of a row, odd
    return torch.stack([p.permute(3, 0, 2, 4, 1, 5).reshape(-1) for p in eights])


@pytest.mark.parametrize("rows, dims", [(64, 128), (128, 64), (64, 64)])
@pytest.mark.parametrize("used", [1.0, 0.75])
def test_order_of_sums(rows: int, dims: int, used: float) -> None:
    batch, heads, q_len, dim = 2, 3, 300, int(dims * used)
    lines = 384 // rows
    right = torch.randn(batch, heads, lines * rows, dims)
    tiles = right.view(batch * heads * lines, rows, dims)
    sums = torch.stack([_in_register_order(t) for t in tiles])
    dq = torch.full((batch, q_len, heads, dim), torch.nan).transpose(1, 2)
    args = (sums, dq, dq.stride(), 0.5, heads, q_len, batch * heads, lines, dim, dims, rows)
    hopper_backward.hopper_dq_results[(batch * heads * lines,)](*args)
    assert torch.equal(dq, 0.5 * right[:, :, :q_len, :dim])
