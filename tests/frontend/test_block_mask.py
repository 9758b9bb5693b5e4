"""BlockMask against torch's on every list, and its own promises: two kinds, snapshots, slices, algebra, moving around."""

from __future__ import annotations

import copy
import doctest
import functools
import importlib
import inspect
import pickle
import warnings

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
import torch.utils._pytree as pytree

from flexattn import flex_attention, stack_masks
from flexattn.errors import (
    CaptureIndexError,
    DeviceError,
    MaskFunctionError,
    MaskTypeError,
    OptionError,
    ShapeError,
    StaleMaskError,
    TraceError,
)
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask, create_mask
from flexattn.frontend.mask_functions import and_masks, noop_mask, not_mask, or_masks
from flexattn.frontend.trace import trace
from tests.frontend.mask_families import BATCH, HEADS, brute, brute_tiles, families

pytestmark = pytest.mark.usefixtures("one_thread")
N = 330
MASKS = families(N)
LISTS = [f"{full}{side}_{part}" for side in ("kv", "q") for full in ("", "full_") for part in ("num_blocks", "indices")]
since_torch_2_13 = pytest.mark.skipif(
    "separate_full_blocks" not in inspect.signature(torch_flex.create_block_mask).parameters,
    reason="torch's own BlockMask has this from 2.13 on",
)
NO_BRANCHES = set(MASKS) - {"window per head", "documents per batch"}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def by_document(ids, b, h, q_idx, kv_idx):
    return ids[q_idx] == ids[kv_idx]


def same_lists(ours: BlockMask, theirs) -> None:
    for name in LISTS:
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype == torch.int32
            assert a.shape == b.shape, name
            assert a.is_contiguous()
            assert torch.equal(a, b), name


def kept_by(mask: BlockMask) -> torch.Tensor:
    """All pairs that a mask's tile map and program keep: what a kernel would do."""
    tile_map = mask.tile_map(*mask.BLOCK_SIZE)
    batch, heads, q_len, kv_len = mask.shape
    tiles = tile_map.dense().expand(batch, heads, -1, -1)
    tiles = tiles.repeat_interleave(mask.BLOCK_SIZE[0], 2).repeat_interleave(mask.BLOCK_SIZE[1], 3)[
        :, :, :q_len, :kv_len
    ]
    traced = mask.traced
    inner = torch.ones((), dtype=torch.bool)
    if traced is not None:
        from flexattn.frontend.evaluate import evaluate

        index = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(mask.shape)]
        inner = evaluate(*traced, **dict(zip(("b", "h", "q_idx", "kv_idx"), index, strict=True)))
    return (tiles == 2) | ((tiles == 1) & inner)


# ----------------------------------------------------------------------------------------------- against torch's own
@pytest.mark.parametrize("name", MASKS)
def test_lists_equal_torchs(name: str) -> None:
    for q_len, kv_len, block in ((N, N, 128), (300, 177, (64, 32)), (1, N, (128, 16))):
        theirs = torch_flex.create_block_mask(MASKS[name], BATCH, HEADS, q_len, kv_len, "cpu", BLOCK_SIZE=block)
        ours = create_block_mask(MASKS[name], BATCH, HEADS, q_len, kv_len, "cpu", BLOCK_SIZE=block)
        same_lists(ours, theirs)
        assert ours.shape == theirs.shape
        assert ours.numel() == theirs.numel()
        assert torch.equal(ours.to_dense(), theirs.to_dense())
        assert ours.to_string() == theirs.to_string()
        assert torch.equal(kept_by(ours), brute(MASKS[name], BATCH, HEADS, q_len, kv_len))
        again = BlockMask.from_torch(theirs)
        assert again.is_list
        same_lists(again, theirs)
        assert torch.equal(kept_by(again), kept_by(ours))
        tiles = brute_tiles(kept_by(ours), *ours.BLOCK_SIZE)
        assert torch.equal(again.tile_map(*ours.BLOCK_SIZE).dense().expand_as(tiles), tiles)


@pytest.mark.parametrize("name", ["causal", "documents per batch", "window per head", "dilated", "none", "all"])
def test_created_mask_equals_torchs(name: str) -> None:
    want = torch_flex.create_mask(MASKS[name], BATCH, HEADS, 100, 90, "cpu")
    assert torch.equal(create_mask(MASKS[name], BATCH, HEADS, 100, 90, "cpu"), want)
    score = lambda s, b, h, q, k: torch.where(MASKS[name](b, h, q, k), s, -float("inf"))
    assert torch.equal(create_mask(score, BATCH, HEADS, 100, 90, "cpu"), want)


@since_torch_2_13
def test_full_blocks_among_the_partial_ones() -> None:
    theirs = torch_flex.create_block_mask(causal, 1, 2, 500, 700, "cpu", separate_full_blocks=False)
    ours = create_block_mask(causal, 1, 2, 500, 700, "cpu", separate_full_blocks=False)
    same_lists(ours, theirs)
    assert "full_kv_indices=None" in repr(ours)


@since_torch_2_13
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_write_order_equals_torchs(descending: bool, separate: bool) -> None:
    make = functools.partial(dict, separate_full_blocks=separate, compute_dq_write_order=True, dq_kv_order=descending)
    theirs = torch_flex.create_block_mask(MASKS["sink and window"], 2, 1, 300, N, "cpu", BLOCK_SIZE=(32, 64), **make())
    ours = create_block_mask(MASKS["sink and window"], 2, 1, 300, N, "cpu", BLOCK_SIZE=(32, 64), **make())
    assert ours.dq_kv_order is theirs.dq_kv_order is None
    assert ours.dq_kv_order_spt == theirs.dq_kv_order_spt == descending
    for side in ("", "full_"):
        name = "dq_write_order" + ("_full" if side else "")
        a, b = getattr(ours, name), getattr(theirs, name)
        counts = getattr(theirs, f"{side}q_num_blocks")
        assert (a is None) == (b is None)
        if a is not None:
            listed = torch.arange(a.shape[-1]) < counts[..., None]
            assert torch.equal(a[listed], b[listed])


@since_torch_2_13
def test_as_tuple_has_torchs_order() -> None:
    ours, theirs = (m(causal, 1, 1, 256, 256, "cpu") for m in (create_block_mask, torch_flex.create_block_mask))
    for flatten in (True, False):
        a, b = ours.as_tuple(flatten), theirs.as_tuple(flatten)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_text_of_a_mask() -> None:
    ours, theirs = (m(causal, 2, 3, 512, 512, "cpu") for m in (create_block_mask, torch_flex.create_block_mask))
    assert str(ours).splitlines()[0] == str(theirs).splitlines()[0].rstrip()
    assert repr(ours) == repr(theirs)
    assert ours.to_string(grid_size=2, limit=1) == theirs.to_string(grid_size=2, limit=1)
    assert ours.to_string(grid_size=(3, 2), limit=9) == theirs.to_string(grid_size=(3, 2), limit=9)
    assert ours[0, 0].to_string(-1).count("█") == 2 * 10
    assert ours.sparsity() == theirs.sparsity() == 37.5


# ------------------------------------------------------------------------------------------------------- list masks
def lists_of(tiles: torch.Tensor, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    counts = tiles.sum(-1).to(torch.int32)
    indices = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, indices[..., :width].contiguous()


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(96, 160), (90, 150)])
def test_from_kv_blocks_means_full_or_partial_and_mask(narrow: bool, q_len: int, kv_len: int) -> None:
    """Also where a length cuts a full block in which the mask function, if it counted, would drop pairs."""
    g = torch.Generator().manual_seed(0)
    state = torch.randint(0, 3, (2, 3, 3, 5), generator=g)
    width = int((state > 0).sum(-1).max()) if narrow else None
    lists = (*lists_of(state == 1, width), *lists_of(state == 2, width))
    rule = lambda b, h, q, k: (q * 3 + k + h) % 4 != 0
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=32, mask_mod=rule, seq_lengths=(q_len, kv_len))
    spread = state.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :q_len, :kv_len]
    want = (spread == 2) | ((spread == 1) & brute(rule, 2, 3, q_len, kv_len))
    assert torch.equal(kept_by(mask), want)
    assert torch.equal(mask.to_mask(), want)
    for q_tile, kv_tile in ((16, 32), (32, 16), (8, 8)):
        assert mask.legal_tile(q_tile, kv_tile)
        tiles = mask.tile_map(q_tile, kv_tile)
        assert tiles.kept_pairs() == int(want.sum())
        spread_tiles = tiles.dense().repeat_interleave(q_tile, 2).repeat_interleave(kv_tile, 3)[:, :, :q_len, :kv_len]
        assert bool(want[spread_tiles == 2].all())
        assert not bool(want[spread_tiles == 0].any())
    predicate = mask.as_predicate()
    assert not predicate.is_list
    tiles = brute_tiles(want, 20, 24)
    assert torch.equal(predicate.tile_map(20, 24).dense(), tiles)


def test_a_block_listed_twice_counts_once() -> None:
    """One that is listed as full and as partial is full."""
    both = torch.tensor([[[[1, 1, 0], [1, 0, 1], [0, 1, 1]]]])
    full = torch.tensor([[[[1, 0, 0], [0, 0, 1], [1, 0, 1]]]])
    mask = BlockMask.from_kv_blocks(*lists_of(both == 1), *lists_of(full == 1), BLOCK_SIZE=16, mask_mod=causal)
    tiles = torch.where(full == 1, 2, both).to(torch.int8)
    spread = tiles.repeat_interleave(16, 2).repeat_interleave(16, 3)
    want = (spread == 2) | ((spread == 1) & brute(causal, 1, 1, 48, 48))
    assert torch.equal(mask.tile_map(16, 16).dense(), tiles)
    assert mask.tile_map(16, 16).kept_pairs() == int(want.sum())
    assert torch.equal(mask.to_mask(), want)
    twice = torch.tensor([[[[0, 0, 2], [1, 1, 1], [2, 2, 0]]]], dtype=torch.int32)
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, twice, BLOCK_SIZE=16)
    assert mask.tile_map(16, 16).dense().tolist() == [[[[2, 0, 2], [0, 2, 0], [2, 0, 2]]]]
    assert mask.tile_map(16, 16).full.tiles() == mask.tile_map(16, 16).full_t.tiles() == 5


@pytest.mark.parametrize("block", [16, 40])
def test_what_a_function_reads_in_full_blocks_does_not_count(block: int) -> None:
    """Document ids that end where the partial blocks do: full blocks lie past their end, whole or cut, tiled or as a predicate."""
    ids = torch.arange(2 * block) // 7
    lists = (*lists_of(torch.tensor([[[[1, 1, 0], [0, 1, 0], [0, 0, 0]]]]) == 1),)
    lists += lists_of(torch.tensor([[[[0, 0, 1], [0, 0, 0], [1, 0, 1]]]]) == 1)
    length = 3 * block - 5
    rule = functools.partial(by_document, ids)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=rule, seq_lengths=(length, length))
    want = torch.zeros(length, length, dtype=torch.bool)
    inner = ids[:, None] == ids
    want[: 2 * block, : 2 * block] = inner
    want[block : 2 * block, :block] = False
    want[:block, 2 * block :] = want[2 * block :, :block] = want[2 * block :, 2 * block :] = True
    for made in (mask.to_mask(), kept_by(mask), kept_by(mask.as_predicate())):
        assert torch.equal(made[0, 0], want)
    assert mask.as_predicate().tile_map(32, 24).kept_pairs() == int(want.sum())
    late = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=lambda b, h, q, k: ids[q + 1] >= 0)
    with pytest.raises(CaptureIndexError):  # a pair of a partial block
        late.to_mask()


def test_list_mask_without_a_function_keeps_partial_blocks_whole() -> None:
    state = torch.tensor([[[[1, 0, 1], [0, 1, 1]]]])
    mask = BlockMask.from_kv_blocks(*lists_of(state == 1), BLOCK_SIZE=16)
    assert mask.seq_lengths == (32, 48)
    assert mask.traced is None
    assert torch.equal(mask.tile_map(16, 16).dense(), (2 * state).to(torch.int8))
    assert mask.tile_map(8, 16).full.tiles() == 8
    cut = BlockMask.from_kv_blocks(*lists_of(state == 1), BLOCK_SIZE=16, seq_lengths=(30, 48))
    assert cut.tile_map(16, 16).dense().tolist() == [[[[2, 0, 2], [0, 1, 1]]]]
    assert cut.tile_map(16, 16).kept_pairs() == 2 * 16 * 16 + 2 * 14 * 16


def test_tiles_of_a_list_mask_divide_its_blocks() -> None:
    mask = BlockMask.from_torch(torch_flex.create_block_mask(causal, 1, 1, 256, 256, "cpu", BLOCK_SIZE=(64, 128)))
    assert mask.legal_tile(64, 128)
    assert mask.legal_tile(32, 64)
    assert not mask.legal_tile(128, 64)
    assert not mask.legal_tile(64, 48)
    with pytest.raises(ShapeError, match="must be divisible by BLOCK_M and BLOCK_N"):
        mask.tile_map(128, 128)


def test_odd_blocks_run_as_a_predicate() -> None:
    """No kernel tile divides 40 or 100."""
    for block in (40, (100, 64)):
        theirs = torch_flex.create_block_mask(MASKS["documents, causal"], 1, 1, 300, N, "cpu", BLOCK_SIZE=block)
        mask = BlockMask.from_torch(theirs)
        assert mask.legal_tile(128, 64)
        tiles = brute_tiles(brute(MASKS["documents, causal"], 1, 1, 300, N), 128, 64)
        assert torch.equal(mask.tile_map(128, 64).dense(), tiles)
        assert "cap0" in str(mask.traced.program)


def test_lists_are_followed() -> None:
    """A list mask sees writes to its lists and to what its function captures, as torch's does."""
    shift = torch.tensor(0)
    state = torch.tensor([[[[1, 0], [1, 1]]]])
    counts, indices = lists_of(state == 1)
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q + shift >= k)
    assert mask.tile_map(16, 16).kept_pairs() == 32 * 33 // 2
    shift += 5
    assert mask.tile_map(16, 16).kept_pairs() == int(kept_by(mask).sum()) > 32 * 33 // 2
    counts[0, 0, 1] = 0
    assert mask.tile_map(16, 16).dense().tolist() == [[[[1, 0], [0, 0]]]]
    same = mask.tile_map(16, 16)
    assert mask.tile_map(16, 16) is same


def test_transposed_lists_can_be_left_out() -> None:
    lists = lists_of(torch.tensor([[[[1, 0], [1, 1]]]]) == 1)
    with_q = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)
    without = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, compute_q_blocks=False)
    theirs = torch_flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)
    assert torch.equal(with_q.q_indices, theirs.q_indices)
    assert torch.equal(with_q.q_num_blocks, theirs.q_num_blocks)
    assert without.q_indices is without.q_num_blocks is None
    assert without[0].q_indices is None
    assert without.crop(16, 16).q_indices is None


def test_lists_without_batch_and_heads() -> None:
    mask = BlockMask.from_kv_blocks(
        *(x[0, 0] for x in lists_of(torch.tensor([[[[1, 0], [1, 1]]]]) == 1)), BLOCK_SIZE=16
    )
    assert mask.shape == (32, 32)
    assert mask.tile_map(16, 16).dense().tolist() == [[[[2, 0], [2, 2]]]]
    assert mask.to_dense().tolist() == [[1, 0], [1, 1]]
    assert mask.q_num_blocks.tolist() == [2, 1]


def test_lists_without_batch_cannot_be_sliced() -> None:
    """torch raises a ValueError too: an index names batch, head and row."""
    counts, indices = lists_of(torch.tensor([[[[1, 0], [1, 1]]]]) == 1)
    for leading in (0, (0, 0)):
        for make in (BlockMask.from_kv_blocks, torch_flex.BlockMask.from_kv_blocks):
            mask = make(counts[leading], indices[leading], BLOCK_SIZE=16)
            for index in (0, slice(0, 1), (slice(None), slice(None), slice(0, 1))):
                with pytest.raises(ValueError):
                    mask[index]


@pytest.mark.parametrize("tokens", [16, 40])
def test_lists_with_heads_and_no_batch(tokens: int) -> None:
    """Also where they run as a predicate: no tile divides 40."""
    state = torch.tensor([[[[1, 0], [1, 1]], [[0, 1], [1, 0]]]])
    mask = BlockMask.from_kv_blocks(*(x[0] for x in lists_of(state == 1)), BLOCK_SIZE=tokens)
    assert mask.shape == (2, 2 * tokens, 2 * tokens)
    assert torch.equal(mask.tile_map(tokens, tokens).dense(), (2 * state).to(torch.int8))
    assert mask.q_num_blocks.tolist() == [[2, 1], [1, 1]]


def test_torchs_sign_of_no_mask() -> None:
    """One kept block of 2**30 tokens and lengths of 1."""
    x = torch.zeros(1, 1, 300, 8)
    assert BlockMask.from_torch(torch_flex._create_empty_block_mask(x, x)).says_no_mask
    one, zero = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    make = functools.partial(BlockMask.from_kv_blocks, BLOCK_SIZE=1 << 30, seq_lengths=(1, 1))
    assert make(one, zero).says_no_mask
    assert not make(one - 1, zero).says_no_mask
    assert not make(one, zero, mask_mod=causal).says_no_mask
    assert not make(one, zero, seq_lengths=(1, 2)).says_no_mask
    assert not create_block_mask(noop_mask, None, None, 1, 1, "cpu").says_no_mask


def test_lists_that_do_not_fit_are_refused() -> None:
    counts, indices = lists_of(torch.ones(1, 1, 2, 2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="must have at least 2 dimensions"):
        BlockMask.from_kv_blocks(counts[0, 0], indices[0, 0, 0], BLOCK_SIZE=16, seq_lengths=(32, 32))
    with pytest.raises(AssertionError, match="must be both provided or omitted"):
        BlockMask.from_kv_blocks(counts, indices, counts, None, BLOCK_SIZE=16)
    with pytest.raises(ShapeError, match="may not exceed"):
        BlockMask.from_kv_blocks(counts + 1, indices, BLOCK_SIZE=16).tile_map(16, 16)
    with pytest.raises(ShapeError, match="reach past the block lists"):
        BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=16, seq_lengths=(48, 32)).tile_map(16, 16)
    with pytest.raises(ShapeError, match="must be"):
        BlockMask.from_kv_blocks(counts[:, :, :1], indices, BLOCK_SIZE=16).tile_map(16, 16)
    with pytest.raises(ValueError, match="dq_write_order_full requires"):
        BlockMask.from_kv_blocks(counts, indices, dq_write_order_full=counts)
    with pytest.raises(ValueError, match="dq_kv_order must be"):
        BlockMask.from_kv_blocks(counts, indices, dq_kv_order=3)


def test_assigning_makes_a_list_mask() -> None:
    """As in torch: the blocks stay, the new function counts in the partial ones."""
    for make in (create_block_mask, torch_flex.create_block_mask):
        mask = make(causal, 1, 1, 200, 200, "cpu", BLOCK_SIZE=64)
        blocks = mask.to_dense()
        mask.mask_mod = lambda b, h, q, k: q == k
        mask = mask if isinstance(mask, BlockMask) else BlockMask.from_torch(mask)
        assert mask.is_list
        assert torch.equal(mask.to_dense(), blocks)
        kept = kept_by(mask)[0, 0]
        q, k = torch.arange(200)[:, None], torch.arange(200)
        want = torch.where(((q // 64 > k // 64) & (q // 64 < 3)), True, q == k)
        assert torch.equal(kept, want)


def test_assigning_a_list() -> None:
    mask = create_block_mask(causal, 1, 1, 256, 256, "cpu")
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    assert mask.is_list
    assert mask.to_dense().tolist() == [[[[1, 0], [0, 1]]]]
    assert int(kept_by(mask).sum()) == 2 * 128 * 129 // 2


def test_assigning_a_block_size_keeps_the_lists() -> None:
    """As in torch: the blocks that the lists name mean other tokens."""
    for make in (create_block_mask, torch_flex.create_block_mask):
        mask = make(causal, 1, 1, 64, 64, "cpu", BLOCK_SIZE=16)
        mask.BLOCK_SIZE = (32, 32)
        mask.seq_lengths = (128, 128)
        mask = mask if isinstance(mask, BlockMask) else BlockMask.from_torch(mask)
        assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
        assert torch.equal(kept_by(mask), brute(causal, 1, 1, 128, 128))


# -------------------------------------------------------------------------------------------------------- snapshots
def test_a_changed_capture_is_noticed() -> None:
    ids = torch.arange(64) // 16
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    first = mask.tile_map(16, 16)
    assert mask.tile_map(16, 16) is first
    ids[20] = 0
    for ask in (
        lambda: mask.tile_map(16, 16),
        lambda: mask.tile_map(32, 32),
        lambda: mask.kv_indices,
        lambda: mask[0],
        lambda: ~mask,
    ):
        with pytest.raises(StaleMaskError, match="has changed since the BlockMask was created"):
            ask()
    with pytest.raises(RuntimeError):
        mask.tile_map(16, 16)


def test_tensors_of_inference_mode_are_read_each_time() -> None:
    with torch.inference_mode():
        ids = torch.arange(64) // 16
        mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 64, 64, "cpu", BLOCK_SIZE=16)
        assert mask.tile_map(16, 16).kept_pairs() == 4 * 256
        assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == 4
        ids.zero_()
        assert mask.tile_map(16, 16).kept_pairs() == 64 * 64
        assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == 16


def test_numbers_are_settled_at_creation() -> None:
    """A loop variable that a lambda reads late does not change masks made before, nor those made of them."""
    masks = []
    for window in (4, 8, 16):
        masks.append(
            create_block_mask(lambda b, h, q, k: (q - k).abs() < window, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
        )
    want = [brute(lambda b, h, q, k, w=w: (q - k).abs() < w, 1, 1, 64, 64) for w in (4, 8, 16)]
    for mask, kept in zip(masks, want, strict=True):
        assert torch.equal(kept_by(mask), kept)
        assert torch.equal((~mask).to_mask(), ~kept)
        assert torch.equal(mask[:, :, 1:3].to_mask(), kept[:, :, 16:48])
    assert torch.equal((masks[2] & ~masks[0]).to_mask(), want[2] & ~want[0])


# ----------------------------------------------------------------------------------------------------------- slices
INDICES = [
    0,
    -1,
    (1, 2),
    (slice(None), slice(1, 3)),
    (slice(0, 1), -1, 2),
    (slice(None), slice(None), slice(1, 3)),
    (slice(None), slice(None), -1),
    (slice(None), slice(None), slice(0, 0)),
    (slice(None), slice(None), slice(None, None, 2)),
    (slice(None), slice(None), torch.tensor([3, 0], dtype=torch.int32)),
    (slice(None), slice(None), torch.tensor([0, 2, 1])),
    (slice(None), torch.tensor([True, False, True])),
    ([1, 0], [2, 2, 0], [1]),
    (Ellipsis, slice(1, None)),
    (0, Ellipsis, [False, True, False, True]),
    (slice(None), slice(None), slice(None, None, -1)),
    (slice(None), slice(None), [3, 3, 0]),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", ["sink and window", "documents per batch", "window per head", "dense", "all"])
@pytest.mark.parametrize("kind", ["predicate", "list"])
def test_slices_are_rows_of_the_mask(index, name: str, kind: str) -> None:
    """Blocks of 80 over 300 rows: the last block of rows is cut."""
    mask = create_block_mask(MASKS[name], BATCH, HEADS, 300, N, "cpu", BLOCK_SIZE=(80, 48))
    kept = brute(MASKS[name], BATCH, HEADS, 300, N)
    if kind == "list":
        mask = BlockMask.from_torch(
            torch_flex.create_block_mask(MASKS[name], BATCH, HEADS, 300, N, "cpu", BLOCK_SIZE=(80, 48))
        )
    part = mask[index]
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [i for i in index if not isinstance(i, torch.Tensor)]:
        place = index.index(Ellipsis)
        index[place : place + 1] = [slice(None)] * (4 - len(index))
    index += [slice(None)] * (3 - len(index))
    at = []
    for i, n in zip(index, (BATCH, HEADS, 4), strict=True):
        at.append(_taken(i, n))
    rows = torch.tensor([r for n in at[2] for r in range(n * 80, min(n * 80 + 80, 300))], dtype=torch.long)
    want = kept[at[0]][:, at[1]][:, :, rows]
    moved_up = any(n == 3 for n in at[2][:-1])
    assert part.is_list == (kind == "list" and not moved_up)
    assert part.shape == want.shape
    assert torch.equal(kept_by(part), want)
    assert torch.equal(part.to_mask(), want)
    if kind == "predicate" and want.numel():  # the function it shows says the same
        index4 = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(want.shape)]
        assert torch.equal(torch.as_tensor(part.mask_mod(*index4)).expand(want.shape), want)


def _taken(index, size: int) -> list[int]:
    if isinstance(index, int):
        return [range(size)[index]]
    if isinstance(index, slice):
        return list(range(size)[index])
    values = torch.as_tensor(index)
    return (
        [n for n in range(size) if values[n]]
        if values.dtype == torch.bool
        else [range(size)[n] for n in values.tolist()]
    )


def test_blocks_of_a_slice_fit_a_query_put_together_alike() -> None:
    query = torch.randn(1, 2, 300, 16)
    mask = create_block_mask(causal, None, None, 300, 300, "cpu")
    whole = flex_attention(query, query, query, block_mask=mask)
    picked = [query[:, :, 256:], query[:, :, :128]]
    some = mask[:, :, [2, 0]]
    assert some.shape == (1, 1, 172, 300)
    out = flex_attention(torch.cat(picked, 2), query, query, block_mask=some)
    torch.testing.assert_close(out, torch.cat((whole[:, :, 256:], whole[:, :, :128]), 2))
    assert mask[:, :, ::-1].shape == (1, 1, 300, 300)


def test_slicing_keeps_torchs_lists() -> None:
    ours, theirs = (
        m(MASKS["sink and window"], 2, 3, 384, 384, "cpu", BLOCK_SIZE=64)
        for m in (create_block_mask, torch_flex.create_block_mask)
    )
    for index in ((0,), (slice(0, 1), slice(1, 3)), (0, 1, 2), (slice(None), slice(None), slice(2, 5))):
        a, b = ours[index], theirs[index]
        for name in LISTS[:4]:
            assert torch.equal(getattr(a, name), getattr(b, name)), (index, name)


def test_bad_slices_are_refused() -> None:
    mask = create_block_mask(causal, 2, 3, 256, 256, "cpu")
    with pytest.raises(IndexError, match="out of range"):
        mask[2]
    with pytest.raises(IndexError):
        mask[0, 0, -3]
    with pytest.raises(ShapeError, match="up to 3 indices"):
        mask[0, 0, 0, 0]
    with pytest.raises(ShapeError, match="up to 3 indices"):
        mask[..., 0, ...]
    for index in (None, "a", 1.5, True, [[0]], {0}, [0, None]):
        with pytest.raises(TypeError, match="takes no such index"):
            mask[index]
    with pytest.raises(IndexError, match="as long as its axis"):
        mask[:, torch.tensor([True, False])]


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("p", [0, 1, 127, 128, 129, 300, 511])
def test_decoding_from_a_prefill_mask(heads, p: int) -> None:
    """C39: one query at position p against the whole cache, by torch's idiom and by ours."""
    window = torch.tensor([200, 30, 1, 512]) if heads else torch.tensor([200])
    rule = lambda b, h, q, k: (q >= k) & (q - k < window[h])
    mask = create_block_mask(rule, None, heads, 512, 512, "cpu")
    want = brute(rule, 1, heads or 1, 512, 512)[:, :, p : p + 1]
    for block in (p // 128, slice(p // 128, p // 128 + 1)):
        row = mask[:, :, block]
        row.mask_mod = lambda b, h, q_idx, kv_idx: mask.mask_mod(b, h, q_idx + p, kv_idx)
        row.seq_lengths = (1, 512)
        assert row.shape == (1, heads or 1, 1, 512)
        assert torch.equal(kept_by(row), want)
        assert row.tile_map(64, 128).kept_pairs() == int(want.sum())
    assert torch.equal(mask[:, :, p // 128].to_mask()[:, :, p % 128 : p % 128 + 1], want)


def test_full_block_cut_by_an_assigned_length_ignores_the_function() -> None:
    mask = create_block_mask(causal, 1, 1, 512, 512, "cpu")
    row = mask[:, :, 2]
    row.mask_mod = lambda b, h, q, k: k < 0
    row.seq_lengths = (1, 512)
    kept = torch.zeros(1, 1, 1, 512, dtype=torch.bool)
    kept[..., :256] = True
    assert torch.equal(kept_by(row), kept)


# ---------------------------------------------------------------------------------------------- crop, expand, algebra
@pytest.mark.parametrize("kind", ["predicate", "list", "list of a predicate"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, N), (256, 100), (1, 17), (0, 0), (64, 320)])
def test_crop_is_the_upper_left_corner(kind: str, q_len: int, kv_len: int) -> None:
    make = torch_flex.create_block_mask if kind == "list" else create_block_mask
    mask = make(MASKS["documents per batch"], BATCH, HEADS, 300, N, "cpu", BLOCK_SIZE=(64, 32))
    if kind == "list":
        mask = BlockMask.from_torch(mask)
    if kind == "list of a predicate":
        mask.mask_mod = MASKS["documents per batch"]
    want = brute(MASKS["documents per batch"], BATCH, HEADS, q_len, kv_len)
    for small in (mask.crop(q_len, kv_len), mask._adjust(q_len, kv_len)):
        assert small.shape == (BATCH, HEADS, q_len, kv_len)
        assert torch.equal(kept_by(small), want)
        assert small.kv_indices.shape == (BATCH, HEADS, -(-q_len // 64), -(-kv_len // 32))
    with pytest.raises(ShapeError, match="can only be cropped"):
        mask.crop(301, N)


def test_expand_decides_each_batch_that_the_function_tells_apart() -> None:
    lengths = torch.tensor([3, 40])
    mask = create_block_mask(lambda b, h, q, k: k < lengths[b], None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    wide = mask.expand(2, 5)
    assert torch.equal(kept_by(wide), brute(lambda b, h, q, k: k < lengths[b], 2, 5, 64, 64))
    assert mask.expand(2, 5) is wide
    same = create_block_mask(causal, None, None, 64, 64, "cpu")
    assert same.expand(1, 1) is same
    assert same.expand(2, 5).tile_map(16, 16) is same.tile_map(16, 16)  # made once for both
    lengths[0] = 4
    for ask in (lambda: mask.expand(2, 1), lambda: wide.tile_map(16, 16)):
        with pytest.raises(StaleMaskError):
            ask()
    with pytest.raises(ShapeError, match="must be 1 or equal"):
        wide.expand(3, 5)


@pytest.mark.parametrize("kind", ["predicate", "list", "lists without heads"])
def test_an_expanded_mask_says_the_shape_it_was_expanded_to(kind) -> None:
    mask = create_block_mask(causal, None, None, 70, 70, "cpu", BLOCK_SIZE=16)
    if kind == "list":
        mask.kv_indices = mask.kv_indices.clone()
    if kind == "lists without heads":
        lists = (getattr(mask, n)[0, 0] for n in LISTS[:4])
        mask = BlockMask.from_kv_blocks(*lists, 16, causal, (70, 70))
    want = mask.to_mask().reshape(1, 1, 70, 70).expand(2, 3, 70, 70)
    wide = mask.expand(2, 3)
    assert mask.expand(2, 3) is wide and wide.is_list == (kind != "predicate")
    assert wide.shape == (2, 3, 70, 70)
    assert wide.kv_num_blocks.shape == (2, 3, 5) and wide.q_indices.shape == (2, 3, 5, 5)
    assert torch.equal(wide.to_mask(), want)
    assert torch.equal(wide[1, 2].to_mask(), want[:1, :1])
    assert wide.density() == mask.density()
    assert stack_masks([wide] * 2, dim="heads").shape == (2, 6, 70, 70)
    q = torch.randn(2, 3, 70, 16)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=wide), flex_attention(q, q, q, mask_mod=causal))
    if kind != "predicate":  # a list that is assigned is the mask from then on
        mask.kv_num_blocks = torch.zeros_like(mask.kv_num_blocks)
        assert mask.expand(2, 3).kv_num_blocks.sum() == 0


@pytest.mark.parametrize("debug", [False, True])
def test_a_stale_mask_answers_nothing(debug, monkeypatch) -> None:
    """One block, used before: no further table is needed, and still each answer would be of neither mask."""
    if debug:
        monkeypatch.setenv("FLEXATTN_DEBUG", "1")
    ids = torch.arange(64) // 16
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 64, 64, "cpu")
    q = torch.randn(1, 2, 64, 16)
    asks = (
        lambda: flex_attention(q, q, q, block_mask=mask),
        lambda: flex_attention(q[:, :1], q[:, :1], q[:, :1], block_mask=mask),
        mask.to_mask, mask.to_dense, mask.density, mask.statistics, mask.sparsity, mask._repr_html_, mask.transposed,
        lambda: str(mask), lambda: repr(mask), lambda: mask & mask, lambda: ~mask, lambda: mask[0], lambda: mask.row(3),
        lambda: mask.kv_num_blocks, lambda: mask.q_indices, lambda: mask.expand(1, 2), lambda: mask.crop(8, 8),
        lambda: mask.to("cpu"), lambda: mask.window(0, 2, 0, 2), lambda: mask.as_predicate().to_mask(),
        lambda: mask.appended(), lambda: mask.shifted(q=1), lambda: stack_masks([mask], dim="heads"),
        lambda: copy.deepcopy(mask), lambda: pickle.dumps(mask),
    )  # fmt: skip
    for ask in asks[:-1]:
        ask()
    ids.data.copy_(torch.arange(64) // 8) if debug else ids.copy_(torch.arange(64) // 8)
    for ask in asks:
        with pytest.raises(StaleMaskError, match="has changed since the BlockMask was created"):
            ask()


def test_algebra() -> None:
    a = create_block_mask(MASKS["window"], 1, HEADS, 300, N, "cpu", BLOCK_SIZE=(64, 32))
    b = create_block_mask(MASKS["documents per batch"], BATCH, 1, 300, N, "cpu")
    x, y = (brute(MASKS[n], BATCH, HEADS, 300, N) for n in ("window", "documents per batch"))
    listed = BlockMask.from_torch(torch_flex.create_block_mask(MASKS["documents per batch"], BATCH, 1, 300, N, "cpu"))
    for mask, want in ((a & b, x & y), (a | b, x | y), ((~b) & a, ~y & x), (a & listed, x & y), (listed | a, x | y)):
        assert torch.equal(kept_by(mask), want)
        assert torch.equal(mask.to_mask(), want)
        assert mask.shape == (BATCH, HEADS, 300, N)
        assert torch.equal(create_mask(mask.mask_mod, BATCH, HEADS, 300, N, "cpu"), want) or listed is not None
    assert torch.equal((~listed).to_mask(), ~brute(MASKS["documents per batch"], BATCH, 1, 300, N))
    everything = create_block_mask(noop_mask, None, None, 64, 64, "cpu")
    assert (~everything).tile_map(64, 64).kept_pairs() == 0
    assert (everything | ~everything).traced is None
    with pytest.raises(ShapeError, match="different sizes"):
        a & create_block_mask(causal, None, None, 299, N, "cpu")
    with pytest.raises(MaskTypeError, match="masks combine with masks"):
        a & causal


@pytest.mark.parametrize("kind", ["predicate", "list"])
def test_combine_keeps_what_both_keep(kind: str) -> None:
    make = (
        create_block_mask
        if kind == "predicate"
        else lambda *a, **k: BlockMask.from_torch(torch_flex.create_block_mask(*a, **k))
    )
    for name in ("all", "sink and window", "documents per batch"):
        mask = make(MASKS[name], BATCH, 1, 300, N, "cpu", BLOCK_SIZE=(64, 32))
        both = mask.combine(MASKS["left padding, chunked"])
        want = brute(MASKS[name], BATCH, 1, 300, N) & brute(MASKS["left padding, chunked"], BATCH, 1, 300, N)
        assert torch.equal(kept_by(both), want)
        assert both.legal_tile(192, 128)
    assert mask.combine(noop_mask).tile_map(64, 32).kept_pairs() == mask.tile_map(64, 32).kept_pairs()


def test_and_or_not_masks() -> None:
    x, y = MASKS["window"], MASKS["prefix"]
    for ours, theirs in (
        (and_masks(x, y), torch_flex.and_masks(x, y)),
        (or_masks(x, y), torch_flex.or_masks(x, y)),
        (and_masks(), torch_flex.and_masks()),
        (or_masks(), torch_flex.or_masks()),
        (noop_mask, torch_flex.noop_mask),
        (and_masks(not_mask(x), y), torch_flex.and_masks(lambda *a: ~x(*a), y)),
    ):
        want = torch_flex.create_mask(theirs, 1, 2, 100, 100, "cpu")
        assert torch.equal(create_mask(ours, 1, 2, 100, 100, "cpu"), want)
        assert torch.equal(torch_flex.create_mask(ours, 1, 2, 100, 100, "cpu"), want)
    for make in (and_masks, or_masks):
        with pytest.raises(RuntimeError, match="All inputs should be callable mask_mods"):
            make(x, torch.zeros(3))


# ----------------------------------------------------------------------------------------------- making, and errors
def test_whole_mask_needs_no_program() -> None:
    for mask_mod in (
        noop_mask,
        torch_flex.noop_mask,
        lambda b, h, q, k: True,
        lambda b, h, q, k: q.new_ones((), dtype=torch.bool),
    ):
        mask = create_block_mask(mask_mod, 2, 2, 256, 200, "cpu")
        assert mask.traced is None
        assert mask.tile_map(128, 128).dense().tolist() == [[[[2, 1], [2, 1]]]]


@pytest.mark.parametrize("value", [True, False, 1, 0, torch.tensor([True]), torch.tensor(0)])
def test_constant_results(value) -> None:
    mask = create_block_mask(lambda b, h, q, k: value, None, None, 40, 40, "cpu")
    assert mask.density() == float(bool(value))


def test_result_of_shape_one() -> None:
    """C54: a one-element tensor is a scalar."""
    offset = torch.tensor([7])
    mask = create_block_mask(lambda b, h, q, k: q + offset >= k, None, None, 40, 60, "cpu", BLOCK_SIZE=16)
    assert torch.equal(kept_by(mask), brute(lambda b, h, q, k: q + 7 >= k, 1, 1, 40, 60))


def test_counts_of_lower_right_causal() -> None:
    """C40: one program for all lengths."""
    programs = set()
    for q_len, kv_len, pairs in ((5, 9, 35), (7, 130, 889), (128, 128, 8256), (1, 4096, 4096)):
        mask = create_block_mask(lambda b, h, q, k: q + (kv_len - q_len) >= k, None, None, q_len, kv_len, "cpu")
        assert mask.tile_map(128, 128).kept_pairs() == pairs
        programs.add(mask.traced.program)
    assert len(programs) == 1


def test_floor_semantics() -> None:
    """C05: 17,531 pairs; C's truncation would give 9,455."""
    mask = create_block_mask(
        lambda b, h, i, j: ((i - j) // 4 == -1) | ((i - j) % 4 == 3) | (i == j), None, None, 257, 257, "cpu"
    )
    assert mask.tile_map(64, 128).kept_pairs() == 17531


def test_what_is_no_mask_function() -> None:
    with pytest.raises(AssertionError, match="requires a mask_mod function"):
        create_block_mask(lambda s, b, h, q, k: s, None, None, 8, 8, "cpu")
    with pytest.raises(AssertionError):
        create_block_mask(lambda b, h, q: q > h, None, None, 8, 8, "cpu")
    with pytest.raises(AssertionError, match=r"mask.dtype must be torch.bool"):
        create_block_mask(lambda b, h, q, k: q * 1.5, None, None, 8, 8, "cpu")

    def branches(b, h, q_idx, kv_idx):
        return q_idx > 3 if q_idx > kv_idx else kv_idx > 3

    with pytest.raises(TraceError, match=r"test_block_mask.py:\d+.*torch.where"):
        create_block_mask(branches, None, None, 8, 8, "cpu")
    with pytest.raises(OptionError, match="BLOCK_SIZE must be a positive"):
        create_block_mask(causal, None, None, 8, 8, "cpu", BLOCK_SIZE=0)
    with pytest.raises(OptionError, match="integers of at least 0"):
        create_block_mask(causal, None, None, -8, 8, "cpu")


def test_callables_of_every_kind() -> None:
    ids = torch.arange(64) // 24

    class Document:
        def __call__(self, b, h, q_idx, kv_idx):
            return ids[q_idx] == ids[kv_idx]

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ids", ids)

        def forward(self, b, h, q_idx, kv_idx):
            return self.ids[q_idx] == self.ids[kv_idx]

    want = brute(functools.partial(by_document, ids), 1, 1, 64, 64)
    for mask_mod in (functools.partial(by_document, ids), Document(), Module()):
        assert torch.equal(create_block_mask(mask_mod, None, None, 64, 64, "cpu").to_mask(), want)


def test_sliced_torch_mask_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match="Cannot use mask_mod from a sliced BlockMask"):
        BlockMask.from_torch(torch_flex.create_block_mask(causal, 1, 1, 256, 256, "cpu")[:, :, 0])
    with pytest.raises(MaskFunctionError):
        BlockMask.from_torch(torch_flex.create_block_mask(causal, 1, 1, 256, 256, "cpu")[:, :, 0])


def test_device_follows_captures() -> None:
    ids = torch.zeros(64, dtype=torch.int32)
    assert create_block_mask(functools.partial(by_document, ids), None, None, 64, 64).device == torch.device("cpu")
    wanted = torch.accelerator.current_accelerator() or torch.device("cpu")
    assert create_block_mask(causal, None, None, 64, 64).device.type == wanted.type
    with pytest.raises(DeviceError, match="must be on the mask's device"):
        create_block_mask(functools.partial(by_document, ids), None, None, 64, 64, "meta")


def test_capture_too_short() -> None:
    ids = torch.zeros(60, dtype=torch.int32)
    mask = create_block_mask(functools.partial(by_document, ids), None, None, 64, 64, "cpu")
    with pytest.raises(CaptureIndexError):
        mask.tile_map(16, 16)
    with pytest.raises(IndexError):
        create_mask(functools.partial(by_document, ids), None, None, 64, 64, "cpu")


# ---------------------------------------------------------------------------------------------------- moving around
@pytest.mark.parametrize("kind", ["predicate", "list", "slice", "algebra"])
@pytest.mark.parametrize("way", ["pickle", "deepcopy", "to", "pytree"])
def test_copies_are_equal_and_apart(kind: str, way: str) -> None:
    ids = torch.arange(96) // 20
    mask = create_block_mask(functools.partial(by_document, ids), 2, 3, 96, 80, "cpu", BLOCK_SIZE=(16, 32))
    if kind == "list":
        mask.mask_mod = functools.partial(by_document, ids)
    if kind == "slice":
        mask = mask[:, :, 1:4]
    if kind == "algebra":
        mask = mask & create_block_mask(causal, 2, 3, 96, 80, "cpu")
    want = kept_by(mask)
    if way == "pickle":
        other = pickle.loads(pickle.dumps(mask))
    elif way == "deepcopy":
        other = copy.deepcopy(mask)
    elif way == "to":
        other = mask.to("cpu")
    else:
        leaves, spec = pytree.tree_flatten(mask)
        other = pytree.tree_unflatten([x.clone() for x in leaves], spec)
    assert other is not mask
    assert other.shape == mask.shape
    assert other.BLOCK_SIZE == mask.BLOCK_SIZE
    assert torch.equal(kept_by(other), want)
    same_lists(other, mask)
    assert torch.equal(
        create_mask(other.mask_mod, *other.shape, device="cpu"), create_mask(mask.mask_mod, *mask.shape, device="cpu")
    )
    if way != "to":
        ids.zero_()
        assert torch.equal(kept_by(other), want)


def test_to_moves_captures_too() -> None:
    ids = torch.arange(96) // 20
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 96, 96, "cpu").to("meta")
    assert mask.device.type == "meta"
    assert mask.traced.binding.captures[0].device.type == "meta"
    assert mask.mask_mod.__closure__[0].cell_contents.device.type == "meta"
    lists = BlockMask.from_torch(torch_flex.create_block_mask(causal, 1, 1, 96, 96, "cpu")).to("meta")
    assert lists.kv_indices.device.type == lists.device.type == "meta"


def test_pytree_specs_compare_by_structure() -> None:
    def make(window):
        ids = torch.arange(64) // window
        return create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < window), None, None, 64, 64, "cpu")

    a, b, c = (pytree.tree_flatten(make(w))[1] for w in (8, 8, 16))
    assert a == b
    assert a != c
    leaves, spec = pytree.tree_flatten(make(8))
    assert [x.shape for x in leaves] == [(0,), (64,)]
    assert pytree.tree_unflatten([None] * 2, spec).shape == (1, 1, 64, 64)
    keyed, _ = pytree.tree_flatten_with_path(create_block_mask(causal, 1, 1, 64, 64, "cpu"))
    assert [str(path[0]) for path, _ in keyed] == [".device"]


@pytest.mark.parametrize("how", ["_compile", "compile maker", "compile a caller"])
def test_compiled_makers(how: str) -> None:
    ids = torch.arange(96) // 20

    def caller(x, window):
        mask = create_block_mask(
            lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < window), None, None, 96, 96, "cpu", BLOCK_SIZE=16
        )
        return x + 1, mask

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for window in (7, 30):
            rule = lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < window)
            if how == "_compile":
                mask = create_block_mask(rule, None, None, 96, 96, "cpu", BLOCK_SIZE=16, _compile=True)
            elif how == "compile maker":
                mask = torch.compile(create_block_mask, backend="eager")(rule, None, None, 96, 96, "cpu", 16)
            else:
                mask = torch.compile(caller, backend="eager")(torch.zeros(2), window)[1]
            assert torch.equal(kept_by(mask), brute(rule, 1, 1, 96, 96))


@pytest.mark.parametrize("name", ["block_mask", "create", "mask_functions", "symbolic", "display"])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"flexattn.frontend.{name}")
    found = doctest.testmod(module, extraglobs={"trace": trace, "create_block_mask": create_block_mask, "torch": torch})
    assert found.failed == 0
    assert found.attempted > 0


def test_a_device_nobody_asked_for_follows_the_inputs(monkeypatch) -> None:
    """As a mask on cuda:0 does for inputs on cuda:1; here the accelerator is one that computes nothing."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    width, cpu = torch.tensor(9), torch.device("cpu")
    near = lambda b, h, q, k: (q - k).abs() < width
    plain, scalar = (create_block_mask(m, None, None, 64, 64) for m in (causal, near))
    for mask in (
        plain,
        plain[:, :, 0],
        plain.crop(20, 30),
        ~plain,
        plain & scalar,
        scalar,
        pickle.loads(pickle.dumps(plain)),
    ):
        assert mask.device.type == "meta"
        moved = mask.following(cpu)
        assert moved.device == cpu
        assert moved is mask.following(cpu)  # with the tables it has made
        assert moved.following(cpu) is moved
        assert torch.equal(kept_by(moved), create_mask(mask.mask_mod, *mask.shape, device="cpu"))
    placed = create_block_mask(causal, None, None, 64, 64, "cpu")
    assert (plain & placed).device == (placed | plain).device == cpu
    for mask in (placed, plain.to("cpu"), create_block_mask(causal, None, None, 64, 64, "meta"), plain & placed):
        assert mask.following(torch.device("cpu" if mask.device.type == "meta" else "meta")) is mask
    table = torch.zeros(64, dtype=torch.int32, device="cpu")
    follows_table = create_block_mask(functools.partial(by_document, table), None, None, 64, 64)
    assert follows_table.device == cpu
    assert follows_table.following(torch.device("meta")) is follows_table
    with pytest.raises(DeviceError, match="masks on different devices"):
        placed & create_block_mask(causal, None, None, 64, 64, "meta")
