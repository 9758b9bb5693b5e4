"""Zones against the mask itself, pair by pair."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flexattn import create_mask
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Grid
from flexattn.frontend.tile_search import TileSearch
from flexattn.frontend.trace import trace
from flexattn.frontend.zone_map import zone_map
from flexattn.frontend.zones import FAR, MOST_ZONES, Zone, hold_for, most_spans, zones
from tests.frontend.zoned_masks import LENGTHS, ZONED

BATCH, HEADS, Q_LEN, KV_LEN = 2, 2, 83, 97


def inside(zone: Zone, traced: Traced, b: int, h: int) -> Tensor:
    """The pairs of a zone, bool [Q_LEN, KV_LEN]."""
    at = {"b": torch.tensor(b), "h": torch.tensor(h), "q_idx": torch.tensor(0), "kv_idx": torch.tensor(0)}
    ends = [int(evaluate(*traced, **at, body=e).clamp(-FAR, FAR)) for e in zone]
    i, j = torch.arange(Q_LEN)[:, None], torch.arange(KV_LEN)
    kept = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool)
    for least, value, most in ((ends[0], i, ends[1]), (ends[2], j, ends[3]), (ends[4], j - i, ends[5])):
        kept &= (least <= value) & (value <= most)
    return kept


@pytest.mark.parametrize("name", ZONED)
def test_zones_are_the_mask_and_its_complement(name: str) -> None:
    traced = trace(ZONED[name], "mask")
    found = zones(traced.program)
    assert found is not None
    wanted = create_mask(ZONED[name], BATCH, HEADS, Q_LEN, KV_LEN, device="cpu")
    for b, h in itertools.product(range(BATCH), range(HEADS)):
        for part, right in ((found.kept, wanted[b, h]), (found.dropped, ~wanted[b, h])):
            union = torch.zeros(Q_LEN, KV_LEN, dtype=torch.bool)
            for zone in part:
                union |= inside(zone, traced, b, h)
            assert torch.equal(union, right), (name, b, h)
    assert len(found.kept) + len(found.dropped) < most_spans(traced.program) <= MOST_ZONES + 1


@pytest.mark.parametrize("name", ZONED)
def test_tiles_by_formula_are_those_of_a_search(name: str) -> None:
    traced, cpu = trace(ZONED[name], "mask"), torch.device("cpu")
    for lengths, tile in (
        ((83, 97), (16, 32)),
        ((1, 70), (16, 64)),
        ((130, 33), (7, 5)),
        ((64, 64), (32, 32)),
        ((50, 0), (8, 8)),
    ):
        grid = Grid(BATCH, HEADS, *lengths, *tile)
        found, wanted = zone_map(traced, grid, cpu), TileSearch(traced, grid, cpu).run()
        assert found is not None
        for part in ("full", "partial", "full_t", "partial_t"):
            for a, b in zip(getattr(found, part), getattr(wanted, part), strict=True):
                assert torch.equal(a, b), (part, lengths, tile)
        assert sum(n for way, n in found.decided.items() if way != "tiles") == found.decided["tiles"]


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, i, j: (i - j) % 4 == 0,
        lambda b, h, i, j: LENGTHS[i] >= j,
        lambda b, h, i, j: 2 * i >= j,
        lambda b, h, i, j: i // 8 == j // 8,
        lambda b, h, i, j: i * 0.5 >= j,
        lambda b, h, i, j: i * j > 5,
    ],
    ids=["remainder", "table of queries", "other slope", "chunks", "floats", "product"],
)
def test_other_masks_have_none(mask) -> None:
    assert zones(trace(mask, "mask").program) is None


def test_where_integers_may_wrap_around_zones_say_nothing() -> None:
    for mask, holds in (
        (lambda b, h, i, j: i + LENGTHS[b] >= j, False),  # 64 bits, and a sum of them
        (lambda b, h, i, j: LENGTHS[b] >= j, True),
        (lambda b, h, i, j: i + 2**50 >= j, True),
        (lambda b, h, i, j: i + (2**63 - 1) >= j, False),
    ):
        traced = trace(mask, "mask")
        assert hold_for(traced.program, traced.binding.numbers) == holds
