"""The shipped masks and score mods against their formulas, written out with loops over pairs."""

from __future__ import annotations

import pickle

import pytest
import torch

import flexattn.mods as mods
from flexattn.errors import OptionError, ShapeError
from flexattn.frontend.create import create_block_mask, create_mask
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.trace import mod_kind, trace

Q_LEN, KV_LEN, BATCH, HEADS = 13, 19, 2, 3
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 5, 5, 5])
PER_BATCH = torch.stack((IDS, IDS // 2))
LENGTHS = torch.tensor([4, 9])

MASKS = {
    "causal": (mods.causal(), lambda b, h, q, k: k <= q),
    "causal with offset": (mods.causal(offset=6), lambda b, h, q, k: k <= q + 6),
    "window": (mods.sliding_window(3), lambda b, h, q, k: q - 3 < k <= q),
    "window with offset": (mods.sliding_window(5, offset=6), lambda b, h, q, k: q + 6 - 5 < k <= q + 6),
    "dilated": (mods.dilated(6, 3), lambda b, h, q, k: abs(q - k) in (0, 3, 6)),
    "prefix": (mods.prefix_lm(4), lambda b, h, q, k: k < 4 or k <= q),
    "prefix per batch": (mods.prefix_lm(LENGTHS), lambda b, h, q, k: k < (4, 9)[b] or k <= q),
    "document": (mods.document(IDS), lambda b, h, q, k: IDS[q].item() == IDS[k].item()),
    "document per batch": (
        mods.document(PER_BATCH),
        lambda b, h, q, k: PER_BATCH[b, q].item() == PER_BATCH[b, k].item(),
    ),
    "document with key ids": (
        mods.document(IDS, IDS.flip(0)),
        lambda b, h, q, k: IDS[q].item() == IDS[KV_LEN - 1 - k].item(),
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_equals_its_formula(name: str) -> None:
    mask_mod, rule = MASKS[name]
    want = [
        [[[rule(b, h, q, k) for k in range(KV_LEN)] for q in range(Q_LEN)] for h in range(HEADS)] for b in range(BATCH)
    ]
    assert mod_kind(mask_mod) == "mask"
    assert torch.equal(create_mask(mask_mod, BATCH, HEADS, Q_LEN, KV_LEN, "cpu"), torch.tensor(want))


TABLE = torch.randn(HEADS, 7, generator=torch.Generator().manual_seed(0))
SCORES = {
    "alibi": (mods.alibi(HEADS), lambda s, b, h, q, k: s - 2.0 ** (-8 * (h + 1) / HEADS) * (q - k)),
    "softcap": (
        mods.softcap(2.5),
        lambda s, b, h, q, k: 2.5 * torch.tanh(torch.tensor(s, dtype=torch.float64) / 2.5).item(),
    ),
    "relative bias": (mods.relative_bias(TABLE), lambda s, b, h, q, k: s + TABLE[h, max(-3, min(3, q - k)) + 3].item()),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mod_equals_its_formula(name: str) -> None:
    score_mod, rule = SCORES[name]
    traced = trace(score_mod, "score")
    points = [(-3.0, 0, 0, 0, 0), (1.5, 1, 2, 12, 3), (40.0, 1, 1, 2, 18), (0.25, 0, 2, 5, 4)]
    for s, b, h, q, k in points:
        index = {n: torch.tensor(x) for n, x in zip(("b", "h", "q_idx", "kv_idx"), (b, h, q, k), strict=True)}
        got = evaluate(*traced, **index, score=torch.tensor(s))
        torch.testing.assert_close(float(got), rule(s, b, h, q, k), rtol=1e-6, atol=1e-6)


def test_settings_are_arguments() -> None:
    pairs = [
        (mods.sliding_window(16), mods.sliding_window(4096)),
        (mods.causal(0), mods.causal(1)),
        (mods.dilated(8, 1), mods.dilated(16, 4)),
        (mods.prefix_lm(1), mods.prefix_lm(2**31)),
    ]
    for a, b in pairs:
        assert trace(a, "mask").program == trace(b, "mask").program
    assert trace(mods.softcap(20.0), "score").program == trace(mods.softcap(1.0), "score").program
    assert trace(mods.alibi(8), "score").program == trace(mods.alibi(16), "score").program


@pytest.mark.parametrize("name", MASKS)
def test_masks_pickle(name: str) -> None:
    mask = create_block_mask(MASKS[name][0], BATCH, HEADS, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE=4)
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(again.to_mask(), mask.to_mask())


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: mods.sliding_window(0), OptionError),
        (lambda: mods.dilated(4, 0), OptionError),
        (lambda: mods.dilated(-1, 2), OptionError),
        (lambda: mods.alibi(0), OptionError),
        (lambda: mods.softcap(0.0), OptionError),
        (lambda: mods.document(torch.zeros(2, 3, 4)), ShapeError),
        (lambda: mods.document(IDS, PER_BATCH), ShapeError),
        (lambda: mods.relative_bias(torch.zeros(3, 4)), ShapeError),
    ],
)
def test_bad_settings_are_refused(make, error) -> None:
    with pytest.raises(error):
        make()
