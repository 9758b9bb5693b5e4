"""Rows of masks, found alone, against every pair."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from flexattn.errors import CaptureIndexError, StaleMaskError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.spans import Spans, cover
from tests.frontend.mask_families import BATCH, HEADS, brute, families

pytestmark = pytest.mark.usefixtures("one_thread")
Q, K = 301, 330
MASKS = families(K)


def check(spans: Spans, want: torch.Tensor) -> None:
    """Every pair of the row, and that runs are in order and apart."""
    batch, heads, kv_len = want.shape
    assert all(x.dtype == torch.int32 for x in spans)
    assert torch.equal(cover(spans, kv_len).reshape(want.shape), want)
    assert bool((spans.start < spans.stop).all())
    for line in range(batch * heads):
        at = slice(int(spans.indptr[line]), int(spans.indptr[line + 1]))
        assert bool((spans.start[at][1:] > spans.stop[at][:-1]).all())


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_every_mask(name: str) -> None:
    mask = create_block_mask(MASKS[name], BATCH, HEADS, Q, K, "cpu")
    want = brute(MASKS[name], BATCH, HEADS, Q, K)
    for position in (0, 1, 63, 64, 127, 165, 299, -1):
        check(mask.row(position), want[:, :, position])


@pytest.mark.parametrize("heads", [None, 4])
def test_c39_rows_of_a_prefill_mask(heads: int | None) -> None:
    window = torch.tensor([200, 30, 1, 512]) if heads else torch.tensor([200])
    rule = lambda b, h, q, k: (q >= k) & (q - k < window[h])
    mask = create_block_mask(rule, None, heads, 512, 512, "cpu")
    for p in (0, 1, 127, 128, 129, 300, 511):
        start = (p + 1 - window).clamp(min=0)
        assert mask.row(p).start.tolist() == start.tolist()
        assert mask.row(p).stop.tolist() == [p + 1] * (heads or 1)


def test_row_of_block_lists_and_of_no_mask() -> None:
    theirs = torch_flex.create_block_mask(MASKS["documents per batch"], BATCH, HEADS, Q, K, "cpu", BLOCK_SIZE=(64, 32))
    want = brute(MASKS["documents per batch"], BATCH, HEADS, Q, K)
    check(BlockMask.from_torch(theirs).row(200), want[:, :, 200])
    everything = lambda b, h, q, k: True
    check(create_block_mask(everything, 2, 3, 5, 7, "cpu").row(4), torch.ones(2, 3, 7, dtype=torch.bool))
    assert create_block_mask(everything, 2, 3, 5, 0, "cpu").row(4).indptr.tolist() == [0] * 7
    assert create_block_mask(MASKS["causal"], 2, 3, 5, 0, "cpu").row(4).indptr.tolist() == [0] * 7


def test_long_rows() -> None:
    """At a million keys the row is found without looking at them; the runs are known."""
    n = 1 << 20
    ids = torch.arange(n) // 30_011
    sink = create_block_mask(lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 1024)), None, None, n, n, "cpu")
    documents = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, n, n, "cpu")
    for p in (0, 3, 1027, 30_010, 30_011, 524_288, n - 1):
        near = [[0, p + 1]] if p < 1028 else [[0, 4], [p - 1023, p + 1]]
        assert torch.stack(sink.row(p)[1:], 1).tolist() == near
        assert torch.stack(documents.row(p)[1:], 1).tolist() == [[p // 30_011 * 30_011, p + 1]]


def test_rows_that_cannot_be_found() -> None:
    ids = torch.arange(64) // 20
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 64, 70, "cpu")
    for position in (64, -65):
        with pytest.raises(CaptureIndexError, match="position out of range"):
            mask.row(position)
    assert mask.row(30).stop.tolist() == [40]
    with pytest.raises(CaptureIndexError, match="out of range"):
        mask.row(5)  # a read past the tensor gives 0, its document
    ids.add_(1)
    with pytest.raises(StaleMaskError):
        mask.row(30)
