"""Rows of masks, found alone, against every pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from flexattn.errors import CaptureIndexError, StaleMaskError
from flexattn.frontend import row, row_tape
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.ops import OPS
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


@pytest.mark.parametrize("name", MASKS)
def test_rows_of_every_mask_by_a_pass_over_the_op_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for masks of floats, and on a GPU."""
    monkeypatch.setattr(row, "has_steps", lambda roots: False)
    mask = create_block_mask(MASKS[name], BATCH, HEADS, Q, K, "cpu")
    want = brute(MASKS[name], BATCH, HEADS, Q, K)
    for position in (0, 64, 165, -1):
        check(mask.row(position), want[:, :, position])


UNSORTED = torch.randint(-3, 20, (5000,), generator=torch.Generator().manual_seed(3))
BY_VALUE = {
    "documents": lambda b, h, q, k: UNSORTED[q] == UNSORTED[k],
    "documents, causal": lambda b, h, q, k: (q >= k) & (UNSORTED[k] == UNSORTED[q]) & (q - k < 3000),
    "small integers": lambda b, h, q, k: UNSORTED.to(torch.int8)[k] == UNSORTED[q] * 7,
    "another condition is false": lambda b, h, q, k: (UNSORTED[k] == 5) & (q > 100),
    "a shorter tensor": lambda b, h, q, k: (k < 4000) & (UNSORTED[:4000][k] == UNSORTED[q]),
    "not a conjunction": lambda b, h, q, k: (UNSORTED[k] == UNSORTED[q]) | (k == 7),
}


@pytest.mark.parametrize("name", BY_VALUE)
def test_rows_of_keys_listed_by_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More stretches than a few stay open; the second such row makes the list."""
    monkeypatch.setattr(row, "FEW", 3)
    mask = create_block_mask(BY_VALUE[name], None, None, 5000, 4500, "cpu")
    for position in (4999, 0, 100, 101, 2500, 4999):
        want = torch.zeros(1, 1, 4500, dtype=torch.bool)
        keys = torch.arange(4000 if name == "a shorter tensor" else 4500)
        want[0, 0, : len(keys)] = BY_VALUE[name](torch.tensor(0), torch.tensor(0), torch.tensor(position), keys)
        check(mask.row(position), want)


def test_a_list_by_value_does_not_outlive_its_tensor() -> None:
    ids = UNSORTED.clone()
    mask = lambda: create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 5000, 5000, "cpu")
    kept = mask()
    for _ in range(3):
        kept.row(7)
    ids[7] = 1000
    with pytest.raises(StaleMaskError):
        kept.row(7)
    assert mask().row(7).start.tolist() == [7]


def test_steps_are_what_torch_computes() -> None:
    """Every step of a tape, on corners and on random numbers."""
    a = torch.tensor([-(1 << 40), -65, -64, -7, -1, 0, 1, 2, 3, 63, 64, 65, 1 << 40])
    a, b = a[:, None], a[None]
    for name, step in row_tape.STEPS.items():
        operands = {1: (a,), 2: (a, b), 3: (a > b, a, b)}[OPS[name].arity]
        want = OPS[name].eval(*operands)
        assert torch.equal(torch.from_numpy(np.array(step(*(x.numpy() for x in operands)))), want), name


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


ALIKE = {
    "dilated": lambda b, h, q, k: (q >= k) & ((q - k) % 4 == 0),
    "dilated by three": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    "by head, to an end by batch": lambda b, h, q, k: (k % 5 == h) & (k < 600 + 100 * b),
    "rows of an image": lambda b, h, q, k: ((q // 64 - k // 64).abs() <= 5) & ((q % 64 - k % 64).abs() <= 3),
    "other at either side": lambda b, h, q, k: torch.where(k > 300, k % 2 == 0, q % 3 == k % 6) ^ ~(k < 700),
    "nearly all": lambda b, h, q, k: (k % 7 != 3) | (k == 500),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rows_that_repeat_from_stretch_to_stretch(name: str) -> None:
    """One stretch of each kind is evaluated, and the others are its copies."""
    length = 1001  # some 16 stretches, the last of which is cut
    mask = create_block_mask(ALIKE[name], BATCH, HEADS, length, length, "cpu")
    want, copied = brute(ALIKE[name], BATCH, HEADS, length, length), 0
    for position in (0, 1, 63, 64, 500, 999, 1000):
        check(mask.row(position), want[:, :, position])
        finder = mask._mask._finder
        must, may, *ends = finder.tapes.bounds(position)
        undecided = np.flatnonzero(may & ~must)
        kind = finder.tapes.kinds(ends, undecided)
        copied += len(undecided) - len(finder._copied(position, undecided, kind)[1])
    assert copied > 7


def test_copies_between_one_another_are_put_in_order() -> None:
    """Kinds that alternate, or whose last run touches the first one of the next stretch."""
    for rule in (
        lambda b, h, q, k: ((q - k) % 4 == 0) & ((k // 64) % 2 == 0) | ((k - q) % 3 == 1) & ((k // 64) % 3 == 1),
        lambda b, h, q, k: ((k % 64 < 9) | (k % 64 > 50)) & (k <= q),
        lambda b, h, q, k: ((k % 64 > 50) & ((k // 64) % 2 == 0)) | ((k % 64 < 9) & ((k // 64) % 2 == 1)),
    ):
        for length in (1024, 1001):
            mask, want = create_block_mask(rule, None, None, length, length, "cpu"), brute(rule, 1, 1, length, length)
            for position in (0, 64, 200, 777, 1000):
                check(mask.row(position), want[:, :, position])
