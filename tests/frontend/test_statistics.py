"""A mask's numbers: exact where they say so, brackets that hold the truth where not, at any length."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from flexattn import mods, stack_masks
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.display import svg
from flexattn.frontend.statistics import MaskStatistics, statistics
from tests.frontend.library_masks import BATCH, HEADS, LIBRARY
from tests.helpers import on_devices

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(0, 5, (700,), generator=torch.Generator().manual_seed(3))
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "by head": lambda b, h, q, k: (q - k < 50 * (h + 1)) & (q >= k),
    "by batch": lambda b, h, q, k: q + 100 * b >= k,
    "ids": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "hash": lambda b, h, q, k: (q * 7919 + k * 104729) % 97 < 5,
    "every other": lambda b, h, q, k: (q - k) % 2 == 0,
    "nothing": lambda b, h, q, k: q < 0,
    "everything": lambda b, h, q, k: q >= 0,
}


def blocks_of(dense: torch.Tensor, block: tuple[int, int]) -> dict[str, int]:
    """Empty, partial and full blocks, counted from every pair; cut blocks are not full."""
    found = {"empty": 0, "partial": 0, "full": 0}
    for matrix in dense.flatten(0, 1):
        for rows in matrix.split(block[0]):
            for cell in rows.split(block[1], 1):
                whole = tuple(cell.shape) == block and bool(cell.all())
                found["full" if whole else "partial" if cell.any() else "empty"] += 1
    return found


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (100, 7)])
def test_numbers_against_every_pair(name: str, block: tuple[int, int]) -> None:
    mask = create_block_mask(MASKS[name], 2, 3, 500, 700, "cpu", BLOCK_SIZE=block)
    dense, found = mask.to_mask(), mask.statistics()
    assert found.blocks == blocks_of(dense, block)
    assert found.is_exact
    assert found.kept_pairs[0] == int(dense.sum())
    assert found.density[0] == mask.density() == pytest.approx(dense.double().mean().item(), abs=1e-15)
    assert found.flops_saved == pytest.approx(mask.sparsity() / 100)
    for kind, ways in found.decided.items():
        assert sum(ways.values()) == found.blocks[kind], kind
    full = found.blocks["full"] * block[0] * block[1]
    lanes = found.blocks["partial"] * block[0] * block[1]
    assert found.wasted_lanes[0] == found.wasted_lanes[1]
    assert found.wasted_lanes[0] == pytest.approx(1 - (int(dense.sum()) - full) / lanes if lanes else 0)
    assert found.flops(64) == found.flops(32, 96) == 4 * 64 * (lanes + full)


@pytest.mark.parametrize("name", MASKS)
def test_a_bracket_holds_the_truth(name: str) -> None:
    mask = create_block_mask(MASKS[name], 2, 3, 500, 700, "cpu", BLOCK_SIZE=64)
    tiles = mask.tile_map(64, 64)
    found = statistics(tiles, sizes=(2, 3), formula=None, most_counted=0)
    kept = int(mask.to_mask().sum())
    assert found.kept_pairs[0] <= kept <= found.kept_pairs[1]
    assert found.source == "bracket" or not found.blocks["partial"]
    assert 0 <= found.wasted_lanes[0] <= found.wasted_lanes[1] <= 1
    if found.blocks["partial"]:
        assert "in the bracket [" in str(found)
        assert "exact" not in str(found)
    assert statistics(tiles, sizes=(2, 3), formula=None).kept_pairs == (kept, kept)  # a bracket is not remembered


@pytest.mark.parametrize("name", LIBRARY)
def test_library_masks(name: str) -> None:
    make, q_len, kv_len = LIBRARY[name]
    mask = create_block_mask(make(torch.device("cpu")), BATCH, HEADS, q_len, kv_len, "cpu")
    found = mask.statistics()
    kept = int(mask.to_mask().sum())
    assert found.kept_pairs == (kept, kept)
    assert found.source == ("formula" if found.closed_form and found.blocks["partial"] else "count")


def test_a_list_mask() -> None:
    rule = MASKS["ids"]
    mask = create_block_mask(rule, 2, 3, 512, 640, "cpu", BLOCK_SIZE=64)
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    listed = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=64, mask_mod=rule, seq_lengths=(512, 640))
    found, want = listed.statistics(), mask.statistics()
    assert (found.blocks, found.kept_pairs, found.closed_form) == (want.blocks, want.kept_pairs, None)
    assert set(found.decided["partial"]) == {"list"}
    bracket = statistics(listed.tile_map(64, 64), sizes=(2, 3), formula=None, most_counted=0)
    assert bracket.kept_pairs[0] <= want.kept_pairs[0] <= bracket.kept_pairs[1]


def test_sizes_of_zero() -> None:
    for sizes in ((None, None, 0, 0), (None, None, 0, 9), (0, 2, 9, 9)):
        found = create_block_mask(mods.causal(), *sizes, device="cpu").statistics()
        assert found.kept_pairs == (0, 0)
        assert found.density == found.wasted_lanes == (0, 0)
        assert found.flops_saved == 0
        assert "density 0.00% of pairs" in str(found)


def test_how_blocks_were_decided() -> None:
    found = create_block_mask(mods.causal(), 4, 2, 1000, 1000, "cpu").statistics()
    known = {"empty": {"formula": 28}, "partial": {"formula": 8, "a ragged end": 7}, "full": {"formula": 21}}
    eight = {kind: {way: 8 * n for way, n in ways.items()} for kind, ways in known.items()}  # 4 x 2 share them
    assert found.decided == eight
    one = torch.zeros(1000)  # causal once more, but with a table of floats, which no formula follows
    found = create_block_mask(
        lambda b, h, q, k: (q >= k) & (one[q] == one[k]), None, None, 1000, 1000, "cpu"
    ).statistics()
    proved = {"empty": {"proof": 28}, "partial": {"witnesses": 8, "a ragged end": 7}, "full": {"proof": 21}}
    assert found.decided == proved
    hashed = create_block_mask(
        lambda b, h, q, k: (q * 7919 + k * 104729) % 9973 < 3, None, None, 256, 256, "cpu"
    ).statistics()
    assert "evaluation" in hashed.decided["empty"] | hashed.decided["partial"]


def test_it_is_frozen_and_prints() -> None:
    found = create_block_mask(mods.sliding_window(100), None, None, 1000, 1000, "cpu").statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.block = (1, 1)
    assert isinstance(found, MaskStatistics)
    assert str(found).splitlines()[-1] == "keys of a query: q_idx - 99 <= kv_idx <= q_idx"
    assert found.latex == r"q_{idx} - 99 \leq kv_{idx} \leq q_{idx}"


def test_a_million_tokens_without_dense_work() -> None:
    n, wide = 1 << 20, 1024
    grid = lambda b, h, q, k: ((q // wide - k // wide).abs() <= 6) & ((q % wide - k % wide).abs() <= 6)
    begin = time.perf_counter()
    exact = create_block_mask(mods.sliding_window(4096), 2, 8, n, n, "cpu").statistics()
    shown = str(create_block_mask(grid, None, None, n, n, "cpu"))
    spent = time.perf_counter() - begin
    assert exact.kept_pairs == (16 * (4096 * n - 4095 * 4096 // 2),) * 2
    assert exact.source == "formula"
    rows = torch.arange(wide)
    near = (torch.minimum(rows + 6, torch.tensor(wide - 1)) - (rows - 6).clamp(min=0) + 1).sum().item()
    low, high = (int(x.replace(",", "")) for x in shown.split(" of pairs: ")[1].split(" kept")[0].split(" to "))
    assert low <= near * near <= high  # 4.8e9 pairs of partial blocks are not counted
    assert spent < 20


@on_devices
def test_numbers_and_pictures_on_a_device(device: str) -> None:
    """Wherever the mask lives, what is shown of it is the same."""
    ids = torch.arange(3000) // 431
    rules = {
        "ids": lambda t: lambda b, h, q, k: (t[q] == t[k]) & (q >= k),
        "formula": lambda t: lambda b, h, q, k: (k >= t[q] * 431) & (k <= q) | (k < 4 * h),
    }
    for name, rule in rules.items():
        here = create_block_mask(rule(ids), None, 2, 3000, 3000, "cpu", BLOCK_SIZE=(64, 128))
        there = create_block_mask(rule(ids.to(device)), None, 2, 3000, 3000, device, BLOCK_SIZE=(64, 128))
        found = there.statistics()
        assert (found.kept_pairs, found.blocks, found.closed_form) == (
            here.statistics().kept_pairs,
            here.statistics().blocks,
            here.statistics().closed_form,
        ), name
        assert (found.source == "formula") == (name == "formula")
        bracket = statistics(there.tile_map(64, 128), sizes=(1, 2), formula=None, most_counted=0)
        assert bracket.kept_pairs[0] <= found.kept_pairs[0] <= bracket.kept_pairs[1]
        assert svg(there).split("<text")[0] == svg(here).split("<text")[0]  # the cells
        window = (400, 500, 380, 900)
        assert torch.equal(there.window(*window, head=1).kept, here.window(*window, head=1).kept)
        blocks = (there.kv_num_blocks, there.kv_indices, there.full_kv_num_blocks, there.full_kv_indices)
        listed = BlockMask.from_kv_blocks(
            *blocks, BLOCK_SIZE=(64, 128), mask_mod=there.mask_mod, seq_lengths=(3000, 3000)
        )
        assert torch.equal(listed.window(*window, head=1).kept, here.window(*window, head=1).kept)


def test_nothing_that_takes_long_is_counted_unless_asked_for() -> None:
    ids = torch.randint(0, 1000, (8192,), generator=torch.Generator().manual_seed(1))
    mask = create_block_mask(lambda b, h, q, k: ids[q] + ids[k] > 1500, None, None, 8192, 8192, "cpu")
    for shown in (str(mask), mask._repr_html_(), svg(mask)):
        assert "density in the bracket [" in shown
        assert "statistics() counts the pairs" in shown
    assert "pairs" not in mask.tile_map(128, 128)._cache
    asked = mask.statistics(most_counted=10**8)
    assert asked.is_exact
    assert asked.kept_pairs[0] == int((ids[:, None] + ids > 1500).sum())
    assert f"{asked.kept_pairs[0]:,} of 67,108,864 kept, exact, counted" in str(mask)  # what is known is shown


def test_density_says_where_it_would_count_for_minutes() -> None:
    table = torch.rand(64, 16384, generator=torch.Generator().manual_seed(2)) > 0.5
    mask = create_block_mask(lambda b, h, q, k: table[h, k] & (q >= k), None, 64, 16384, 16384, "cpu")
    with pytest.raises(NotImplementedError, match=r"would take long to count; got .*Try: statistics\(\).density"):
        mask.density()
    assert not mask.statistics().is_exact


def test_each_mask_of_a_stack_is_counted_by_its_own_formula() -> None:
    parts = [mods.sliding_window(20 + 7 * n) for n in range(40)] + [
        mods.causal(),
        lambda b, h, q, k: h == q % 3,
        mods.causal(),
    ]
    made = [create_block_mask(p, None, None, 300, 410, "cpu", 32) for p in parts]
    for masks in (made[:41] + made[42:], [made[3], ~made[3], made[0]]):
        for dim in ("heads", "batch"):
            stack = stack_masks(masks, dim=dim)
            assert stack._closed_form() is None or len(masks) == 3
            found = stack.statistics(most_counted=10**5)
            assert (found.source, found.kept_pairs[0]) == ("formula", int(stack.to_mask().sum()))
    few = stack_masks(made[:9], dim="heads")  # has one formula of nine runs, of which each head needs one
    assert few._closed_form() is not None
    found = few.statistics(most_counted=9 * 300)
    assert (found.source, found.kept_pairs[0]) == ("formula", int(few.to_mask().sum()))
    odd = stack_masks(made, dim="heads")
    assert odd.statistics().kept_pairs[0] == int(odd.to_mask().sum())
