"""Inputs that once went wrong or failed without a clear message."""

import numpy as np
import pytest
import torch

from flexattn import BlockMask, create_block_mask, create_mask
from flexattn.errors import CaptureIndexError, DTypeError, OptionError
from tests.frontend.mask_families import brute_tiles


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.mark.parametrize("block", ["a", 0, (64, 0), (64,), 64.0, (1, 2, 3)])
def test_block_sizes_that_are_none(block):
    with pytest.raises(OptionError, match="BLOCK_SIZE must be a positive integer or a pair"):
        create_block_mask(causal, 1, 1, 20, 20, "cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize("sizes", [(1, 1, 20.5, 20), (1, 1, -1, 20), (1.0, 1, 20, 20)])
def test_sizes_that_are_none(sizes):
    with pytest.raises(OptionError, match="integers of at least 0"):
        create_block_mask(causal, *sizes, "cpu")


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_sizes_are_integers_of_any_kind(kind):
    mask = create_block_mask(causal, kind(2), None, kind(20), kind(30), "cpu", BLOCK_SIZE=(kind(16), kind(8)))
    assert (mask.shape, mask.BLOCK_SIZE) == ((2, 1, 20, 30), (16, 8))
    assert {type(n) for n in (*mask.shape, *mask.BLOCK_SIZE)} == {int}
    assert torch.equal(create_mask(causal, kind(2), None, kind(20), kind(30), "cpu"), mask.to_mask())
    assert create_block_mask(causal, 1, 1, 20, 20, "cpu", BLOCK_SIZE=kind(16)).BLOCK_SIZE == (16, 16)


def test_lists_that_hold_no_integers():
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    with pytest.raises(DTypeError, match="kv_num_blocks must hold integers"):
        BlockMask.from_kv_blocks(ones.float(), torch.zeros(1, 1, 1, 1, dtype=torch.int32))


def test_reads_out_of_range_name_the_masks_line():
    short = torch.zeros(10)
    with pytest.raises(CaptureIndexError, match=r"test_regressions\.py:"):
        create_block_mask(lambda b, h, q_idx, kv_idx: short[q_idx] != 1, 1, 1, 20, 20, "cpu").kv_indices  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 2])
def test_dropped_pairs_may_read_out_of_range(dtype, rank):
    """Such a read is False, 0 or NaN, of the tensor's own type: a complement of it is a truth value still."""
    short = (torch.arange(10) % 3).to(dtype)
    short = short if rank == 1 else short.repeat(3, 1)
    read = (lambda i: short[i]) if rank == 1 else lambda i: short[i, i]
    size = 10 if rank == 1 else 3
    for inside in (
        lambda q, k: ~(read(k).to(torch.bool)),
        lambda q, k: torch.where(read(k) > 0, q >= k, q == k),
        lambda q, k: (read(q) == read(k)) ^ (read(k - size) != 0),
    ):
        mask_mod = lambda b, h, q, k: (k < size) & (q < size) & inside(q, k)
        mask = create_block_mask(mask_mod, 1, 1, 40, 70, "cpu", BLOCK_SIZE=8)
        kept = mask.to_mask()
        assert kept.dtype == torch.bool
        want = torch.zeros(40, 70, dtype=torch.bool)
        rows = torch.arange(size)
        want[:size, :size] = mask_mod(0, 0, rows[:, None], rows[None])
        assert torch.equal(kept[0, 0], want)
        tiles = brute_tiles(want, 8, 8)
        assert torch.equal(mask.tile_map(8, 8).dense()[0, 0], tiles)
        assert mask.tile_map(16, 32).kept_pairs() == int(want.sum())
