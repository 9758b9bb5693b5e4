"""check: agrees with sound masks, and names the first pair of an unsound one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flexattn
from flexattn.errors import MaskFunctionError
from flexattn.frontend import check as module
from tests.frontend.mask_families import BATCH, HEADS, brute, families

pytestmark = pytest.mark.usefixtures("one_thread")
Q, K = 157, 201
MASKS = families(K)


@pytest.mark.parametrize("name", MASKS)
def test_sound_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", BATCH * HEADS * K * 50)  # several portions of rows
    report = flexattn.check(MASKS[name], BATCH, HEADS, Q, K, device="cpu", BLOCK_SIZE=(16, 32), raises=True)
    want = brute(MASKS[name], BATCH, HEADS, Q, K)
    assert report
    assert report[1:] == (want.numel(), int(want.sum()), 0, None, None)


def test_a_function_that_tells_tracing_from_running() -> None:
    def unsound(b, h, q_idx, kv_idx):
        limit = 140 if type(q_idx) is torch.Tensor else 141
        return (q_idx >= kv_idx) & (q_idx < limit)

    report = flexattn.check(unsound, None, 2, Q, K, device="cpu")
    assert not report
    assert (report.wrong, report.example, report.expected) == (2 * 141, (0, 0, 140, 0), False)
    assert str(report) == (
        f"unsound: tiles and function differ in 282 of {2 * Q * K:,} pairs; the first is "
        "(b, h, q_idx, kv_idx) = (0, 0, 140, 0), which the function drops"
    )
    with pytest.raises(MaskFunctionError, match=r"\(0, 0, 140, 0\)"):
        flexattn.check(unsound, None, 2, Q, K, device="cpu", raises=True)


def test_a_wrong_tile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map in which one partial tile counts as full."""

    class Wrong(flexattn.BlockMask):
        def tile_map(self, q_block, kv_block):
            tiles = super().tile_map(q_block, kv_block)
            return replace(tiles, full=tiles.partial, partial=tiles.full, _cache={})

    make = module.create_block_mask

    def create(*args):
        mask = make(*args)
        mask.__class__ = Wrong
        return mask

    monkeypatch.setattr(module, "create_block_mask", create)
    report = flexattn.check(lambda b, h, q, k: q >= k, None, None, Q, K, device="cpu", BLOCK_SIZE=16)
    assert (report.example, report.expected) == ((0, 0, 0, 1), False)


def test_nothing_to_compare() -> None:
    for sizes in ((None, None, 0, 5), (None, None, 5, 0), (0, 2, 5, 5)):
        assert flexattn.check(lambda b, h, q, k: q >= k, *sizes, device="cpu") == ("<lambda>", 0, 0, 0, None, None)
    assert flexattn.check(lambda b, h, q, k: True, 2, 3, 5, 7, device="cpu").kept == 210
