"""Random mask functions against every pair in plain torch, through everything that a mask can become.

FLEXATTN_FUZZ_SECONDS (10) says for how long, FLEXATTN_FUZZ_SEED (0) where to begin; each seed is one function and its sizes, and a
failure prints it. FLEXATTN_FUZZ_SEEDS=7,19 runs just those.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest
import torch
from torch import Tensor

from flexattn import BlockMask, create_block_mask, create_mask
from flexattn.errors import CaptureIndexError
from flexattn.frontend import interval, periodic, refine, tile_search
from tests.frontend.mask_families import brute_tiles
from tests.frontend.mask_fuzz import Predicate, Sizes, predicate
from tests.frontend.test_block_mask import kept_by, lists_of
from tests.frontend.test_tile_map import check

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS = [1, 2, 3, 5, 8, 16, 16, 24, 32, 64, 128]


def budget(name: str, default: str) -> str:
    return os.environ.get(f"FLEXATTN_FUZZ_{name}") or default


def draw_sizes(rng: random.Random) -> Sizes:
    longest = rng.choice([20, 70, 70, 140, 140, 260])
    return Sizes(rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, longest), rng.randint(1, longest))


def draw_blocks(rng: random.Random, sizes: Sizes) -> tuple[int, int]:
    """Any two sizes with at most a few thousand blocks."""
    while True:
        q_block, kv_block = rng.choices(BLOCKS, k=2)
        if (sizes.q_len // q_block + 1) * (sizes.kv_len // kv_block + 1) <= 4000:
            return q_block, kv_block


def shrink_limits(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Sometimes few boxes a level, small chunks and coarse tables: what else only long sequences reach."""
    if rng.random() < 0.5:
        patch.setattr(tile_search, "TOP_BOXES", rng.choice([1, 4, 64]))
        patch.setattr(tile_search, "BOXES_AT_ONCE", rng.choice([64, 1 << 14]))
        patch.setattr(refine, "POINTS_AT_ONCE", rng.choice([512, 1 << 16]))
        patch.setattr(interval, "_GROUPS", rng.choice([2, 8, 64]))
        patch.setattr(periodic, "LEAST_TILES", 1)
        patch.setattr(periodic, "SHARE", rng.choice([0, 1]))


def check_slices(rng: random.Random, mask: BlockMask, kept: Tensor) -> None:
    """Some batches, heads and rows of blocks."""
    batch, heads, q_len, _ = mask.shape
    rows, block = -(-q_len // mask.BLOCK_SIZE[0]), mask.BLOCK_SIZE[0]
    b, h = rng.randrange(batch), rng.choices(range(heads), k=rng.randint(1, 3))
    first = rng.randrange(rows)
    last = rng.randint(first + 1, rows)
    part = mask[b, h, first:last]
    assert torch.equal(kept_by(part), kept[b : b + 1][:, h][:, :, first * block : last * block])


def check_lists(rng: random.Random, mask: Predicate, kept: Tensor, sizes: Sizes) -> None:
    """Random blocks, some of them full, and the function in the partial ones."""
    block = tuple(rng.choice([8, 16, 32, 48]) for _ in range(2))
    rows, cols = -(-sizes.q_len // block[0]), -(-sizes.kv_len // block[1])
    state = torch.randint(0, 3, (*sizes[:2], rows, cols))
    lists = (*lists_of(state == 1), *lists_of(state == 2))
    lengths = (sizes.q_len, sizes.kv_len)
    listed = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=mask.function(), seq_lengths=lengths)
    spread = state.repeat_interleave(block[0], 2).repeat_interleave(block[1], 3)[:, :, : lengths[0], : lengths[1]]
    want = (spread == 2) | ((spread == 1) & kept)
    assert torch.equal(kept_by(listed), want)
    assert torch.equal(listed.to_mask(), want)
    tiles = listed.as_predicate().tile_map(*draw_blocks(rng, sizes))
    check(tiles, want)


def run_seed(seed: int) -> str:
    """One random function; returns what became of it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = draw_sizes(rng)
    made = predicate(rng, sizes)
    kept, misread = made.brute(sizes)
    mask_mod, block = made.function(), draw_blocks(rng, sizes)
    with pytest.MonkeyPatch.context() as patch:
        shrink_limits(rng, patch)
        try:
            mask = create_block_mask(mask_mod, *sizes, "cpu", BLOCK_SIZE=block)
            tiles = mask.tile_map(*block)
        except CaptureIndexError:
            assert bool((misread & kept).any()), "no kept pair reads out of range"
            return "misread"
        if (misread & kept).any():  # simplification may have removed such a read, and then the value is as right as any
            assert torch.equal(tiles.dense().expand(*sizes[:2], -1, -1), brute_tiles(kept, *block))
            return "misread, not needed"
        check(tiles, kept)
        assert torch.equal(mask.to_mask(), kept)
        assert torch.equal(create_mask(mask_mod, *sizes, "cpu"), kept)
        check(mask.tile_map(*(other := draw_blocks(rng, sizes))), kept)
        assert torch.equal(mask.to_dense(), (brute_tiles(kept, *block) > 0).int())
        if not misread.any():  # dropped pairs may read out of range, those of the complement may not
            check((~mask).tile_map(*other), ~kept)
        check_slices(rng, mask, kept)
        if rng.random() < 0.3:
            check_lists(rng, made, kept, sizes)
    return "all" if kept.all() else "none" if not kept.any() else "some"


def explain(seed: int) -> str:
    rng = random.Random(seed)
    sizes = draw_sizes(rng)
    return f"seed {seed}, {sizes}:\n{predicate(rng, sizes)}"


def test_random_masks() -> None:
    chosen = [int(x) for x in budget("SEEDS", "").split(",") if x]
    first = seed = int(budget("SEED", "0"))
    end, seen = time.monotonic() + float(budget("SECONDS", "10")), Counter[str]()
    while chosen or seed == first or time.monotonic() < end:
        now = chosen.pop() if chosen else seed
        try:
            seen[run_seed(now)] += 1
        except Exception as error:
            raise AssertionError(explain(now)) from error
        if budget("SEEDS", "") and not chosen:
            return
        seed += 1
    print(f"seeds {first}..{seed - 1}: {dict(seen)}")
    assert seen["some"] > sum(seen.values()) // 4
