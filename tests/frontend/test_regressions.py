"""Inputs that once went wrong or failed without a clear message."""

import pytest
import torch

from flexattn import BlockMask, create_block_mask
from flexattn.errors import CaptureIndexError, DTypeError, OptionError


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


def test_lists_that_hold_no_integers():
    ones = torch.ones(1, 1, 1, dtype=torch.int32)
    with pytest.raises(DTypeError, match="kv_num_blocks must hold integers"):
        BlockMask.from_kv_blocks(ones.float(), torch.zeros(1, 1, 1, 1, dtype=torch.int32))


def test_reads_out_of_range_name_the_masks_line():
    short = torch.zeros(10)
    with pytest.raises(CaptureIndexError, match=r"test_regressions\.py:"):
        create_block_mask(lambda b, h, q_idx, kv_idx: short[q_idx] != 1, 1, 1, 20, 20, "cpu").kv_indices  # noqa: B018
