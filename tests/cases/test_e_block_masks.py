"""Block masks: two views of one mask at any block size, statistics in range, decoding from a mask over the whole sequence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import BlockMask, create_block_mask, create_mask, flex_attention
from flexattn.frontend import display
from tests.cases.bounds import assert_each_within
from tests.helpers import check, exact, kept_pairs, make_qkv, on_devices, run

# ---------------------------------------------------------------- C49: views and statistics
BLOCK_SIZES = [(8, 8), (64, 128), (128, 64), (16, 256)]


def _mods(kv_len: int, device: str):
    ids = torch.arange(kv_len, device=device) // 11
    return {
        "causal": lambda b, h, i, j: i >= j,
        "documents": lambda b, h, i, j: (ids[i] == ids[j]) & (i + 3 >= j),
        "by batch and head": lambda b, h, i, j: (i + b * 5 >= j) & (j % (h + 2) != 1),
        "nothing": lambda b, h, i, j: i < 0,
    }


def _blocks_of(dense: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Per block whether any pair, and whether every pair, is kept: bool [batch, heads, rows, cols] each."""
    q_len, kv_len = dense.shape[2:]
    rows, cols = -(-q_len // block[0]), -(-kv_len // block[1])
    shape = (*dense.shape[:2], rows, block[0], cols, block[1])
    padding = (0, cols * block[1] - kv_len, 0, rows * block[0] - q_len)
    kept = torch.nn.functional.pad(dense.int(), padding).view(shape).sum((3, 5))
    inside = torch.nn.functional.pad(torch.ones_like(dense).int(), padding).view(shape).sum((3, 5))
    return kept > 0, (kept == inside) & (inside == block[0] * block[1])


@on_devices
@pytest.mark.parametrize("lengths", [(13, 21), (500, 1500)])
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_c49_token_view_and_block_view(device, block, lengths) -> None:
    index = torch.meshgrid(*(torch.arange(n, device=device) for n in (2, 3, *lengths)), indexing="ij")
    for name, mask_mod in _mods(lengths[1], device).items():
        wanted = mask_mod(*index)
        mask = create_block_mask(mask_mod, 2, 3, *lengths, device=device, BLOCK_SIZE=block)
        assert mask.shape == (2, 3, *lengths)
        assert torch.equal(create_mask(mask_mod, 2, 3, *lengths, device=device), wanted), name
        assert torch.equal(mask.to_mask(), wanted), name
        visited, full = _blocks_of(wanted, block)
        assert torch.equal(mask.to_dense().bool(), visited), name  # one entry a block, as torch's
        assert mask.density() == pytest.approx(wanted.double().mean().item(), abs=1e-12)
        assert mask.sparsity() == pytest.approx(100 * (1 - visited.double().mean().item()), abs=1e-9)
        assert torch.equal(mask.full_kv_num_blocks, full.sum(-1).int()), name
        assert torch.equal(mask.kv_num_blocks, (visited & ~full).sum(-1).int()), name
    assert "blocks and not tokens" in BlockMask.to_dense.__doc__
    assert "kept pairs" in BlockMask.to_mask.__doc__


@on_devices
@pytest.mark.parametrize("lengths", [(13, 21), (500, 1500)])
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_c49_attention_at_any_block_size(device, block, lengths) -> None:
    mask_mod = _mods(lengths[1], device)["by batch and head"]
    mask = create_block_mask(mask_mod, 2, 3, *lengths, device=device, BLOCK_SIZE=block)
    qkv = make_qkv(2, (3, 3), lengths, (16, 24), device=device)
    expected = check(qkv, mask_mod)
    result = run(qkv, block_mask=mask)
    names = ("out", "lse", "dq", "dk", "dv")
    for name, got, want in zip(
        names, (result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)
    ):
        assert torch.equal(got, want), name
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    listed = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=lengths)
    assert listed.is_list
    result, expected = run(qkv, block_mask=listed), exact(qkv, mask_mod)
    for name, got, want in zip(
        names, (result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)
    ):
        assert_each_within(name, got, want)


@on_devices
@pytest.mark.parametrize("block", [*BLOCK_SIZES, (100, 100), (1, 128)])
def test_c49_statistics_of_packed_documents(device, block) -> None:
    """Documents of 7, 13, 25, 25 and 30 tokens, causal: 1234 of 10,000 pairs."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([7, 13, 25, 25, 30])).to(device)
    mask = create_block_mask(
        lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 100, 100, device=device, BLOCK_SIZE=block
    )
    assert int(mask.to_mask().sum()) == 1234
    assert mask.density() == 0.1234
    shown = display.text(mask)
    assert "density 12.34% of pairs" in shown
    assert f"blocks of {block[0]} x {block[1]} tokens" in shown
    stats = mask.statistics()
    assert stats.is_exact and stats.kept_pairs == (1234, 1234) and stats.density == (0.1234, 0.1234)
    assert 0 <= mask.sparsity() <= 100
    for text in (shown, str(mask), repr(mask)):
        percentages = [float(x) for x in re.findall(r"(-?[\d.]+)%", text)]
        assert percentages and all(0 <= x <= 100 for x in percentages), text


@on_devices
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 13, 1), (1, 1, 1, 2000), (3, 2, 300, 77)])
def test_c49_percentages_stay_in_range(device, sizes) -> None:
    for mask_mod in (lambda b, h, i, j: i >= j, lambda b, h, i, j: i >= 0, lambda b, h, i, j: j < 0):
        mask = create_block_mask(mask_mod, *sizes, device=device)
        assert 0 <= mask.density() <= 1
        assert 0 <= mask.sparsity() <= 100
        for part in (mask[:1], mask[:, :, :1], mask.crop(1, 1)):
            assert 0 <= part.sparsity() <= 100
            assert 0 <= part.density() <= 1


# ---------------------------------------------------------------- C39, C40: masks over time
@on_devices
@pytest.mark.parametrize("mask_heads", [None, 4])
def test_c39_decode_from_a_prefill_mask(device, mask_heads) -> None:
    mask = lambda b, h, i, j: (i >= j) & (i - j < 200)
    q, k, v = make_qkv(2, (4, 2), (512, 512), (32, 32), device=device, requires_grad=False)
    full = flex_attention(q, k, v, mask_mod=mask, enable_gqa=True)
    block_mask = create_block_mask(mask, None, mask_heads, 512, 512, device=device, BLOCK_SIZE=(1, 128))
    for p in (0, 1, 127, 128, 129, 300, 511):
        for index in (p, slice(p, p + 1)):
            row = flex_attention(q[:, :, p : p + 1], k, v, block_mask=block_mask[:, :, index], enable_gqa=True)
            assert (row - full[:, :, p : p + 1]).abs().max() < 2e-6
    blocks = create_block_mask(mask, None, mask_heads, 512, 512, device=device)
    part = flex_attention(q[:, :, 128:384], k, v, block_mask=blocks[:, :, 1:3], enable_gqa=True)
    assert (part - full[:, :, 128:384]).abs().max() < 2e-6


def lower_right(q_len: int, kv_len: int):
    return lambda b, h, i, j: i + (kv_len - q_len) >= j


@on_devices
def test_c40_lower_right_causal_with_captured_lengths(device, fresh_stats) -> None:
    flex_attention(*make_qkv(1, (1, 1), (3, 4), (4, 4), device=device, requires_grad=False), mask_mod=lower_right(3, 4))
    for n, m in ((2, 300), (64, 70)):  # one call of each size class
        kept_pairs(lower_right(n, m), n, m, device)
    before = flexattn.stats()
    pairs = [kept_pairs(lower_right(n, m), n, m, device) for n, m in ((5, 9), (7, 130), (128, 128), (1, 4096))]
    assert pairs == [35, 889, 8256, 4096]
    assert flexattn.stats().builds.total() == before.builds.total()
    assert flexattn.stats().plans.total() == before.plans.total()
