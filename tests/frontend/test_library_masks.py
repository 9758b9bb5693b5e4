"""Every mask of attention-gym and Transformers: its blocks are torch's, however it reaches attention.

torch counts the kept pairs of each block after padding the mask with dropped pairs up to whole blocks. So a block that a length
cuts is never full, not even where every pair of it that exists is kept: it is listed as partial, or not at all if nothing in it
is kept (`test_what_torch_does_with_cut_blocks` holds torch to that). Ours are the same sets, row by row and column by column.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

import flexattn
from flexattn import BlockMask, create_block_mask
from flexattn.frontend import tile_map
from flexattn.frontend.tile_map import Spans, TileMap
from flexattn.runtime import cpu_rows, value_masks
from tests.frontend.library_masks import BATCH, HEADS, LIBRARY
from tests.frontend.mask_families import brute_tiles
from tests.frontend.test_tile_map import check_spans

pytestmark = pytest.mark.usefixtures("one_thread")
ON_GPU = [  # one of each structure: the others differ in numbers and tables
    "causal", "window, size keys", "dilated", "global and sliding", "block diffusion", "documents, local window",
    "shared prefix", "draft tree", "neighbourhood, wide canvas", "sliding tiles, 3-D", "video, one kind per head",
    "images seen by text", "packed sequences with window and padding", "chunked, left padding", "length per batch and head",
]  # fmt: skip


def on_devices(*gpu: str) -> pytest.MarkDecorator:
    """Every mask on the CPU, and some on a GPU."""
    cuda = [pytest.param(name, "cuda", marks=pytest.mark.gpu, id=f"{name}-cuda") for name in gpu]
    return pytest.mark.parametrize(("name", "device"), [*((name, "cpu") for name in LIBRARY), *cuda])


def shapes(q_len: int, kv_len: int) -> list[tuple[int, int, int | tuple[int, int]]]:
    """Lengths and block sizes: whole, cut on both sides, unequal both ways, larger than a sequence, and of no power of two."""
    return [
        (q_len, kv_len, 128),
        (q_len, kv_len, (16, 64)),
        (q_len - q_len // 5, kv_len - kv_len // 7, (64, 16)),
        (q_len // 64 * 64 or q_len, kv_len // 32 * 32, (64, 32)),
        (q_len - q_len // 3, kv_len, (40, 1000)),
    ]


def sets(counts: Tensor, indices: Tensor) -> list[set[int]]:
    """The blocks that each row of torch's lists names."""
    counts, indices = counts.flatten().tolist(), indices.flatten(0, -2).tolist()
    listed = [row[:n] for n, row in zip(counts, indices, strict=True)]
    assert all(len(set(row)) == len(row) for row in listed)
    return [set(row) for row in listed]


def same_blocks(ours: BlockMask, theirs: torch_flex.BlockMask) -> None:
    for side in ("kv", "full_kv", "q", "full_q"):
        names = f"{side}_num_blocks", f"{side}_indices"
        a, b = ([getattr(mask, name) for name in names] for mask in (ours, theirs))
        assert [x.shape for x in a] == [x.shape for x in b], side
        assert sets(*a) == sets(*b), side


def block_states(mask: torch_flex.BlockMask) -> Tensor:
    """0 empty, 1 partial, 2 full for each block of torch's lists: int8 [B, H, rows, cols]."""
    shape = mask.kv_indices.shape
    state = torch.zeros(shape, dtype=torch.int8).flatten(0, -2)
    for value, counts, indices in (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row, blocks in enumerate(sets(counts, indices)):
            state[row, sorted(blocks)] = value
    return state.view(shape)


def check_directions(tiles: TileMap, want: Tensor) -> None:
    """Both directions of spans say what `want`, 0, 1 or 2 for each tile, says."""
    groups = tiles.batch * tiles.heads
    for kind, value in (("full", 2), ("partial", 1)):
        for transposed in (False, True):
            spans = Spans(*(x.cpu() for x in getattr(tiles, kind + ("_t" if transposed else ""))))
            lines, cells = (tiles.cols, tiles.rows) if transposed else (tiles.rows, tiles.cols)
            check_spans(spans, groups * lines, cells)
            found = tile_map.cover(spans, cells).view(tiles.batch, tiles.heads, lines, cells)
            found = found.transpose(-1, -2) if transposed else found
            assert torch.equal(found.expand_as(want), want.cpu() == value), (kind, transposed)


def theirs_and_ours(name: str, device: str, q_len: int, kv_len: int, block: int | tuple[int, int]):
    mask_mod = LIBRARY[name].make(torch.device(device))
    args = (mask_mod, BATCH, HEADS, q_len, kv_len, device)
    return torch_flex.create_block_mask(*args, BLOCK_SIZE=block), create_block_mask(*args, BLOCK_SIZE=block)


@on_devices(*ON_GPU)
def test_blocks_are_torchs(name: str, device: str) -> None:
    all_shapes = shapes(LIBRARY[name].q_len, LIBRARY[name].kv_len)
    for q_len, kv_len, block in all_shapes if device == "cpu" else all_shapes[1:3]:
        theirs, ours = theirs_and_ours(name, device, q_len, kv_len, block)
        same_blocks(ours, theirs)
        assert ours.kv_num_blocks.device.type == device
        kept = torch_flex.create_mask(LIBRARY[name].make(torch.device(device)), BATCH, HEADS, q_len, kv_len, device)
        assert torch.equal(ours.to_mask(), kept)
        tiles = ours.tile_map(*ours.BLOCK_SIZE)
        assert tiles.kept_pairs() * (BATCH * HEADS // tiles.grid.groups) == int(kept.sum())
        check_directions(tiles, brute_tiles(kept, *ours.BLOCK_SIZE))


@pytest.mark.parametrize("name", LIBRARY)
def test_torchs_lists_run_as_their_function(name: str) -> None:
    """A mask made by torch and one put together from its lists: no kept pair is lost, whatever the tile.

    A tile of a partial block is partial unless the block map says more; proving it empty or full would be allowed.
    """
    space = LIBRARY[name]
    for q_len, kv_len, block in shapes(space.q_len, space.kv_len)[1:3]:
        theirs, ours = theirs_and_ours(name, "cpu", q_len, kv_len, block)
        kept = ours.to_mask()
        lists = [getattr(theirs, n) for n in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")]
        settings = {"BLOCK_SIZE": block, "mask_mod": theirs.mask_mod, "seq_lengths": (q_len, kv_len)}
        for mask in (BlockMask.from_torch(theirs), BlockMask.from_kv_blocks(*lists, **settings)):
            assert mask.is_list
            same_blocks(mask, theirs)
            assert torch.equal(mask.to_mask(), kept)
            check_directions(mask.tile_map(*mask.BLOCK_SIZE), block_states(theirs))
            tiles = mask.tile_map(16, 16).dense().expand(BATCH, HEADS, -1, -1)
            exact = brute_tiles(kept, 16, 16)
            assert bool((tiles[exact > 0] > 0).all())
            assert bool((exact[tiles == 2] == 2).all())
            other = mask.as_predicate().tile_map(24, 20)
            check_directions(other, brute_tiles(kept, 24, 20))


@on_devices("documents, local window", "sliding tiles, 3-D", "video, one kind per head", "chunked, left padding")
def test_mask_in_the_call(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`flex_attention(..., mask_mod=)`: the tiles that the call visits, and its result against softmax over torch's dense mask."""
    built: list[TileMap] = []
    monkeypatch.setattr(tile_map, "ON_BUILD", [*tile_map.ON_BUILD, built.append])
    monkeypatch.setattr(cpu_rows, "ONE_TILE", 0)  # short sequences too go by tiles
    value_masks._MASKS.clear()  # which keep the maps of earlier calls
    space = LIBRARY[name]
    mask_mod = space.make(torch.device(device))
    kept = torch_flex.create_mask(mask_mod, BATCH, HEADS, space.q_len, space.kv_len, device)
    q, k = (torch.randn(BATCH, HEADS, n, 16, device=device) for n in (space.q_len, space.kv_len))
    out = flexattn.flex_attention(q, k, k, mask_mod=mask_mod)
    scores = (q.double() @ k.double().mT / math.sqrt(16)).masked_fill(~kept, -math.inf)
    want = torch.softmax(scores, -1).nan_to_num(0.0) @ k.double()
    assert (out - want).abs().max() < 1e-5
    assert built or device != "cpu"  # a GPU may decide its tiles by itself
    for tiles in built:
        check_directions(tiles, brute_tiles(kept, tiles.q_block, tiles.kv_block))


@pytest.mark.parametrize("make", [torch_flex.create_block_mask, create_block_mask], ids=["torch", "flexattn"])
def test_what_torch_does_with_cut_blocks(make) -> None:
    """Queries 0..99 and keys 0..149 in blocks of 64 x 32 with nothing masked: row 1 and column 4 are cut and listed as partial."""
    mask = make(torch_flex.noop_mask, 1, 1, 100, 150, "cpu", BLOCK_SIZE=(64, 32))
    assert sets(mask.full_kv_num_blocks, mask.full_kv_indices) == [{0, 1, 2, 3}, set()]
    assert sets(mask.kv_num_blocks, mask.kv_indices) == [{4}, {0, 1, 2, 3, 4}]
    assert sets(mask.full_q_num_blocks, mask.full_q_indices) == [{0}] * 4 + [set()]
    assert sets(mask.q_num_blocks, mask.q_indices) == [{1}] * 4 + [{0, 1}]
    beyond = make(lambda b, h, q_idx, kv_idx: kv_idx >= 150, 1, 1, 100, 150, "cpu", BLOCK_SIZE=(64, 32))
    assert not beyond.kv_num_blocks.any()  # what the function says past the length does not count
    assert not beyond.full_kv_num_blocks.any()


def test_tiles_chosen_as_lists() -> None:
    """Video sparse attention the other way: top-k tiles per head and row as full blocks, on a canvas that cuts the last one."""
    scores = torch.randn(BATCH, HEADS, 10, 10)
    chosen = torch.topk(scores, 3, dim=-1).indices.to(torch.int32)
    counts = torch.full((BATCH, HEADS, 10), 3, dtype=torch.int32)
    none = torch.zeros_like(counts)
    args = {"BLOCK_SIZE": 32, "seq_lengths": (310, 301)}
    wide = torch.nn.functional.pad(chosen, (0, 7))  # torch transposes only lists as wide as the mask
    theirs = torch_flex.BlockMask.from_kv_blocks(none, wide, counts, wide, **args)
    ours = BlockMask.from_kv_blocks(none, chosen, counts, chosen, **args)
    kept = torch.zeros(BATCH, HEADS, 10, 10, dtype=torch.bool).scatter_(3, chosen.long(), True)
    kept = kept.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :310, :301]
    assert torch.equal(ours.to_mask(), kept)
    assert sets(ours.full_kv_num_blocks, ours.full_kv_indices) == sets(
        theirs.full_kv_num_blocks, theirs.full_kv_indices
    )
    assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)
    for tiles in (ours.tile_map(32, 32), ours.tile_map(16, 32)):
        check_directions(tiles, brute_tiles(kept, tiles.q_block, tiles.kv_block))


def test_every_mask_of_the_checklist_is_here() -> None:
    """What attention-gym and Transformers ship, by the words of their names."""
    wanted = (
        "causal window dilated global prefix diffusion documents packed shared draft neighbourhood tiled Morton tiles spatial temporal "
        "images folded chosen padding left chunked blocks offset head batch noop"
    )
    names = " ".join(LIBRARY)
    assert [word for word in wanted.split() if word not in names] == []
    assert len(LIBRARY) >= 60
