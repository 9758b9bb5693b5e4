"""The masks of attention-gym and Transformers, from their definitions, in the style in which users of those libraries write them.

`LIBRARY` maps a name to a `Canvas`: lengths, and a maker that puts what the mask captures on a device. The one idea: every mask
comes out of a factory, so that closures, captured tensors of every rank and masks called by masks are all met here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor

from flexattn import and_masks, or_masks

Mask = Callable[..., Any]
BATCH, HEADS = 2, 4


class Canvas(NamedTuple):
    """A mask and the lengths for which its tables and coordinates are made."""

    make: Callable[[torch.device], Mask]
    q_len: int
    kv_len: int


LIBRARY: dict[str, Canvas] = {}


def canvas(name: str, q_len: int, kv_len: int | None = None) -> Callable[[Callable[[torch.device], Mask]], Any]:
    def register(make: Callable[[torch.device], Mask]) -> Callable[[torch.device], Mask]:
        LIBRARY[name] = Canvas(make, q_len, q_len if kv_len is None else kv_len)
        return make

    return register


def draw(device: torch.device, low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def cut_into(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """(document of each token [sum], offsets [n + 1]) of documents packed one after another."""
    sizes = torch.tensor(lengths)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    return ids.to(device), torch.cat((sizes.new_zeros(1), sizes.cumsum(0))).to(device)


# ------------------------------------------------------------------------------------------------ one dimension
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def noop(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx.new_ones((), dtype=torch.bool)


def window_inclusive(size: int) -> Mask:
    """attention-gym's: `size` keys back, and the token itself."""

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx <= size

    window.__name__ = f"window_{size}"
    return and_masks(window, causal)


def window_exclusive(size: int) -> Mask:
    """Transformers' overlay: `size` keys, the token itself among them."""

    def overlay(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx > q_idx - size

    return and_masks(overlay, causal)


def window_both_ways(size: int) -> Mask:
    def overlay(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.abs(q_idx - kv_idx) <= size

    return overlay


def dilated(size: int, step: int) -> Mask:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        near = (distance <= size) & (distance >= -size)
        return near & (distance % step == 0)

    return mask_mod


def global_and_sliding(size: int, is_global: Tensor) -> Mask:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = torch.abs(q_idx - kv_idx) <= size
        return torch.logical_or(near, torch.logical_or(is_global[q_idx], is_global[kv_idx]))

    return mask_mod


def prefix_lm(length: int) -> Mask:
    def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < length

    return or_masks(prefix, causal)


def block_diffusion(tokens: int, block: int) -> Mask:
    """Noised tokens and then the same number of clean ones, in blocks (BD3-LM)."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        clean_q, clean_kv = q_idx >= tokens, kv_idx >= tokens
        block_q = torch.where(clean_q, (q_idx - tokens) // block, q_idx // block)
        block_kv = torch.where(clean_kv, (kv_idx - tokens) // block, kv_idx // block)
        same_block = (block_q == block_kv) & (clean_q == clean_kv)
        clean_past = (block_q > block_kv) & clean_kv & ~clean_q
        clean_causal = (block_q >= block_kv) & clean_kv & clean_q
        return same_block | clean_past | clean_causal

    return mask_mod


canvas("causal", 300, 340)(lambda device: causal)
canvas("noop", 300, 340)(lambda device: noop)
canvas("torch's noop", 90, 130)(lambda device: torch_flex.noop_mask)
canvas("window, size + 1 keys", 333)(lambda device: window_inclusive(70))
canvas("window, size keys", 333)(lambda device: window_exclusive(70))
canvas("window of one key", 150)(lambda device: window_exclusive(1))
canvas("window longer than the sequence", 150)(lambda device: window_inclusive(1 << 40))
canvas("window both ways", 200, 333)(lambda device: window_both_ways(41))
canvas("dilated", 333)(lambda device: dilated(100, 4))
canvas("dilated by one", 200, 150)(lambda device: dilated(64, 1))
canvas("global and sliding", 301)(lambda device: global_and_sliding(20, draw(device, 0, 90, 301) == 0))
canvas("prefix", 300, 340)(lambda device: prefix_lm(111))
canvas("block diffusion", 320)(lambda device: block_diffusion(160, 16))
canvas("block diffusion, ragged", 302)(lambda device: block_diffusion(151, 12))
canvas("causal or torch's window", 200)(lambda device: torch_flex.or_masks(causal, window_both_ways(9)))
canvas("nothing and causal", 60)(lambda device: and_masks(causal, or_masks()))


# ------------------------------------------------------------------------------------------------ packed documents
LENGTHS = [7, 93, 1, 64, 128, 20]  # 313 tokens


def document_mask(inner: Mask, ids: Tensor, offsets: Tensor) -> Mask:
    """Another mask inside each document, on positions counted from the document's first token."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = ids[q_idx] == ids[kv_idx]
        q_local = q_idx - offsets[ids[q_idx]]
        kv_local = kv_idx - offsets[ids[kv_idx]]
        return same & inner(b, h, q_local, kv_local)

    return mask_mod


def _documents(inner: Mask) -> Callable[[torch.device], Mask]:
    return lambda device: document_mask(inner, *cut_into(LENGTHS, device))


canvas("documents, local causal", 313)(_documents(causal))
canvas("documents, local window", 313)(_documents(window_inclusive(30)))
canvas("documents, local prefix", 313)(_documents(prefix_lm(11)))
canvas("documents, local dilated", 313)(_documents(dilated(40, 3)))


@canvas("packed causal documents", 313)
def packed_causal(device: torch.device) -> Mask:
    ids, offsets = cut_into(LENGTHS, device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx >= offsets[ids[q_idx]])

    return mask_mod


@canvas("documents of other keys", 313, 200)
def cross_documents(device: torch.device) -> Mask:
    """Queries and keys packed apart: documents of other lengths on both sides."""
    q_ids, kv_ids = cut_into(LENGTHS, device)[0].to(torch.int32), cut_into([50, 1, 40, 60, 9, 40], device)[0]
    return lambda b, h, q_idx, kv_idx: q_ids[q_idx] == kv_ids[kv_idx]


@canvas("shared prefix", 313)
def shared_prefix(device: torch.device) -> Mask:
    """Documents 2 to 5 continue one of the first two; each token sees its own past and all of what it continues."""
    ids, offsets = cut_into(LENGTHS, device)
    prefix_of = torch.tensor([0, 1, 0, 1, 1, 0], device=device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        own = (ids[q_idx] == ids[kv_idx]) & (kv_idx <= q_idx)
        prefix = prefix_of[ids[q_idx]]
        shared = (kv_idx >= offsets[prefix]) & (kv_idx < offsets[prefix + 1]) & (prefix != ids[q_idx])
        return own | shared

    return mask_mod


@canvas("jagged offsets", 313)
def jagged(device: torch.device) -> Mask:
    """The document of a token is counted on the spot: how many offsets lie at or before it."""
    offsets = cut_into(LENGTHS, device)[1]

    def document(token: Any) -> Any:
        return sum((token >= offsets[n]).to(torch.int32) for n in range(1, 6))

    return lambda b, h, q_idx, kv_idx: (document(q_idx) == document(kv_idx)) & (q_idx >= kv_idx)


# ------------------------------------------------------------------------------------------------ drafts
def _tree(nodes: int, device: torch.device) -> Tensor:
    above = torch.eye(nodes, dtype=torch.bool)
    parents = draw(torch.device("cpu"), 0, 1 << 20, nodes)
    for node in range(1, nodes):
        above[node] |= above[int(parents[node]) % node]
    return above.to(device)


@canvas("draft tree", 61, 261)
def draft_tree(device: torch.device) -> Mask:
    """Verification of 61 drafted tokens after 200 cached ones: the cache, and a token's ancestors in the tree."""
    prefix, ancestor = 200, _tree(61, device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        node = torch.clamp(kv_idx - prefix, min=0)
        return (kv_idx < prefix) | ancestor[q_idx, node]

    return mask_mod


@canvas("draft tree, index that wraps", 61, 110)
def draft_tree_wrapping(device: torch.device) -> Mask:
    """The same with the cache no longer than the tree, so that an index of -50 still means something."""
    ancestor = _tree(61, device)
    return lambda b, h, q_idx, kv_idx: (kv_idx < 50) | ancestor[q_idx][kv_idx - 50]


@canvas("draft training", 280)
def draft_training(device: torch.device) -> Mask:
    prefix, block = 120, 9

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = (q_idx - prefix) // block == (kv_idx - prefix) // block  # negative in the prefix: division floors
        return (kv_idx < prefix) | (same & (kv_idx <= q_idx))

    return mask_mod


# ------------------------------------------------------------------------------------------------ two and three dimensions
def neighbourhood(height: int, width: int, kernel: tuple[int, int], place: Callable[[Any], tuple[Any, Any]]) -> Mask:
    """The kernel around each pixel, moved inwards at the borders; `place` gives the (row, column) of a token."""
    up, left = kernel[0] // 2, kernel[1] // 2

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_row, q_col), (kv_row, kv_col) = place(q_idx), place(kv_idx)
        row, col = q_row.clamp(up, height - 1 - up), q_col.clamp(left, width - 1 - left)
        return ((row - kv_row).abs() <= up) & ((col - kv_col).abs() <= left)

    return mask_mod


def raster(width: int) -> Callable[[Any], tuple[Any, Any]]:
    return lambda token: (token // width, token % width)


def tiled(width: int, tile: tuple[int, int]) -> Callable[[Any], tuple[Any, Any]]:
    """Tokens ordered tile by tile."""
    area, across = tile[0] * tile[1], width // tile[1]

    def place(token: Any) -> tuple[Any, Any]:
        number, inside = token // area, token % area
        return number // across * tile[0] + inside // tile[1], number % across * tile[1] + inside % tile[1]

    return place


def morton(token: Any) -> tuple[Any, Any]:
    """Tokens along a Z-curve: even bits are the column, odd bits the row."""
    row, col = 0, 0
    for bit in range(4):
        col = col | ((token >> bit) & (1 << bit))
        row = row | ((token >> (bit + 1)) & (1 << bit))
    return row, col


canvas("neighbourhood, wide canvas", 12 * 27)(lambda device: neighbourhood(12, 27, (5, 7), raster(27)))
canvas("neighbourhood, tall canvas", 31 * 9)(lambda device: neighbourhood(31, 9, (7, 3), raster(9)))
canvas("neighbourhood, tiled", 16 * 20)(lambda device: neighbourhood(16, 20, (5, 7), tiled(20, (4, 5))))
canvas("neighbourhood, Morton order", 256)(lambda device: neighbourhood(16, 16, (7, 5), morton))


def sliding_tiles(shape: tuple[int, ...], tile: tuple[int, ...], kernel: tuple[int, ...], text: int) -> Mask:
    """Sliding tile attention: a window of whole tiles on a canvas of tiles in order, and text tokens behind the image."""
    grid = [n // t for n, t in zip(shape, tile, strict=True)]
    area = 1
    for t in tile:
        area *= t
    image = area
    for n in grid:
        image *= n

    def tile_of(token: Any) -> list[Any]:
        number, place = token // area, []
        for n in reversed(grid):
            place.insert(0, number % n)
            number = number // n
        return place

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        inside = (q_idx < image) & (kv_idx < image)
        for q_tile, kv_tile, n, k in zip(tile_of(q_idx), tile_of(kv_idx), grid, kernel, strict=True):
            inside = inside & (torch.abs(torch.clamp(q_tile, k // 2, n - 1 - k // 2) - kv_tile) <= k // 2)
        to_text = (q_idx < image) & (kv_idx >= image) & (kv_idx < image + text)
        from_text = (q_idx >= image) & (kv_idx < image + text)
        return inside | to_text | from_text

    return mask_mod


canvas("sliding tiles, 2-D", 300)(lambda device: sliding_tiles((16, 16), (4, 4), (3, 3), 30))
canvas("sliding tiles, 2-D, not square", 330)(lambda device: sliding_tiles((12, 24), (4, 8), (1, 3), 25))
canvas("sliding tiles, 3-D", 400)(lambda device: sliding_tiles((6, 8, 8), (2, 4, 2), (3, 1, 3), 9))
canvas("video, spatial head", 330)(
    lambda device: lambda b, h, q, kv: (q < 18) | (kv < 18) | (kv < 60) | (torch.abs(q - kv) < 66)
)


@canvas("video, temporal head", 330)
def temporal_head(device: torch.device) -> Mask:
    """The same places in all frames; the text in front makes differences negative, so the remainder must be floored."""
    text, frame, near = 18, 52, 6

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_text = (q_idx < text) | (kv_idx < text)
        place = torch.abs((q_idx - text) % frame - (kv_idx - text) % frame)
        return is_text | (place < near)

    return mask_mod


@canvas("video, one kind per head", 330)
def heads_of_both_kinds(device: torch.device) -> Mask:
    """Some heads look at their own frame, the others at the same place in all frames; a bool table says which."""
    is_temporal = torch.tensor([True, False, False, True], device=device)
    temporal = temporal_head(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        spatial = (q_idx - 18) // 52 == (kv_idx - 18) // 52
        return torch.where(is_temporal[h], temporal(b, h, q_idx, kv_idx), spatial)

    return mask_mod


@canvas("images seen by text", 280, 90)
def interleaved_images(device: torch.device) -> Mask:
    """Flamingo: each image's tokens are seen by a range of queries."""
    image_of = torch.arange(90, device=device) // 15
    intervals = torch.tensor([[0, 40], [40, 41], [41, 41], [60, 200], [100, 280], [279, 280]], device=device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        image = image_of[kv_idx]
        return (q_idx >= intervals[image][0]) & (q_idx < intervals[image, 1])

    return mask_mod


@canvas("batch folded into the sequence", 4 * 75)
def folded_batch(device: torch.device) -> Mask:
    lengths = torch.tensor([75, 3, 60, 0], device=device)

    def inner(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx <= q_idx) & (kv_idx < lengths[b])

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        same = q_idx // 75 == kv_idx // 75
        return same & inner(q_idx // 75, h, q_idx % 75, kv_idx % 75)

    return mask_mod


@canvas("chosen tiles of unequal sizes", 300)
def chosen_tiles(device: torch.device) -> Mask:
    """Video sparse attention as a function: which tiles a tile of queries chose, per head, and how full each tile is."""
    chosen, sizes = draw(device, 0, 3, HEADS, 10, 10) == 0, draw(device, 1, 31, 10)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_tile, kv_tile = q_idx // 30, kv_idx // 30
        return chosen[h, q_tile, kv_tile] & (q_idx % 30 < sizes[q_tile]) & (kv_idx % 30 < sizes[kv_tile])

    return mask_mod


@canvas("modular", 210, 190)
def modular(device: torch.device) -> Mask:
    table = draw(device, 0, 2, 7, 5).bool()
    return lambda b, h, q_idx, kv_idx: table[q_idx % 7, kv_idx % 5] & (kv_idx % 3 == q_idx % 3)


# ------------------------------------------------------------------------------------------------ Transformers
def with_offsets(mask_function: Mask, q_offset: Any, kv_offset: Any) -> Mask:
    """A mask for a part of the sequence, as with a cache."""

    def inner_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    return inner_mask


def padding_mask(attention_mask: Tensor) -> Mask:
    def inner_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return attention_mask[b, kv_idx]

    return inner_mask


def packed_mask(sequence_ids: Tensor) -> Mask:
    def inner_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return sequence_ids[b, q_idx] == sequence_ids[b, kv_idx]

    return inner_mask


def chunked(size: int, left_padding: Tensor | None = None) -> Mask:
    def overlay(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if left_padding is None:
            return kv_idx // size == q_idx // size
        return (kv_idx - left_padding[b]) // size == (q_idx - left_padding[b]) // size

    return and_masks(overlay, causal)


def blockwise(ids: Tensor) -> Mask:
    """Bidirectional inside a block of ids at least 0 (image tokens), over any mask."""

    def overlay(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_block, kv_block = ids[b, q_idx], ids[b, kv_idx]
        return (q_block == kv_block) & (q_block >= 0)

    return overlay


def _padding(device: torch.device, n: int, *, left: bool) -> Tensor:
    """int64 [BATCH, n] of ones and, at one end of all but the first sequence, zeros."""
    real = torch.tensor([n, n - 77], device=device)[:, None]
    place = torch.arange(n, device=device)
    return (place >= n - real if left else place < real).long()


@canvas("padding", 300)
def right_padding(device: torch.device) -> Mask:
    return and_masks(causal, padding_mask(_padding(device, 300, left=False).bool()))


@canvas("padding of queries and keys", 300)
def padding_both(device: torch.device) -> Mask:
    mask = _padding(device, 300, left=False)
    return lambda b, h, q_idx, kv_idx: (mask[b, q_idx] == 1) & (mask[b, kv_idx] != 0)


@canvas("left padding", 300)
def left_padding(device: torch.device) -> Mask:
    return and_masks(causal, padding_mask(_padding(device, 300, left=True) > 0))


@canvas("padding as bytes", 300)
def padding_of_bytes(device: torch.device) -> Mask:
    mask = _padding(device, 300, left=False).to(torch.uint8)
    return lambda b, h, q_idx, kv_idx: (mask[b, kv_idx] > 0) & (q_idx >= kv_idx)


@canvas("packed sequences", 313)
def packed_sequences(device: torch.device) -> Mask:
    ids = torch.stack([cut_into(lengths, device)[0] for lengths in (LENGTHS, [100, 200, 13])])
    return and_masks(causal, packed_mask(ids.to(torch.int32)))


@canvas("packed sequences with window and padding", 313)
def packed_window(device: torch.device) -> Mask:
    ids = torch.stack([cut_into(lengths, device)[0] for lengths in (LENGTHS, [100, 200, 13])])
    padding = padding_mask(_padding(device, 313, left=False).bool())
    return torch_flex.and_masks(window_exclusive(50), packed_mask(ids), padding)


canvas("chunked", 300)(lambda device: chunked(64))
canvas("chunked, longer keys", 130, 300)(lambda device: with_offsets(chunked(96), 170, 0))
canvas("chunked, left padding", 300)(lambda device: chunked(64, torch.tensor([0, 77], device=device)))


@canvas("image blocks over causal", 313)
def image_blocks(device: torch.device) -> Mask:
    ids = torch.stack([cut_into(lengths, device)[0] for lengths in (LENGTHS, [100, 200, 13])])
    return or_masks(causal, blockwise(torch.where(ids % 2 == 0, -1, ids)))


@canvas("image blocks over a window", 313)
def image_blocks_window(device: torch.device) -> Mask:
    ids = torch.stack([cut_into(lengths, device)[0] for lengths in (LENGTHS, [100, 200, 13])])
    return or_masks(window_exclusive(40), blockwise(torch.where(ids % 2 == 0, -1, ids)))


canvas("offset, number", 17, 300)(lambda device: with_offsets(causal, 283, 0))
canvas("offset, tensor", 17, 300)(lambda device: with_offsets(causal, torch.tensor(140, device=device), 0))
canvas("offsets of both, sliding", 100, 150)(lambda device: with_offsets(window_exclusive(60), 200, 150))
canvas("one query", 1, 300)(lambda device: with_offsets(window_exclusive(60), 299, 0))


@canvas("offset per sequence", 20, 300)
def offset_per_sequence(device: torch.device) -> Mask:
    positions = torch.tensor([30, 280], device=device)
    return lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + positions[b]


@canvas("window per head", 300)
def window_per_head(device: torch.device) -> Mask:
    sizes = torch.tensor([1, 40, 170, 1 << 30], device=device)
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < sizes[h])


@canvas("length per batch and head", 200, 260)
def length_per_batch_and_head(device: torch.device) -> Mask:
    lengths = draw(device, 0, 260, BATCH, HEADS)
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b, h]


def _only_of(heads: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(h < heads, q_idx >= kv_idx, (h % 2 == 0) & (b == 1))


canvas("partial function of head and batch", 150, 170)(lambda device: partial(_only_of, 2))


class PrefixOf:
    """A callable object whose settings are attributes."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < self.lengths[b]) | (q_idx >= kv_idx)


canvas("prefix per sequence, callable object", 200)(lambda device: PrefixOf(torch.tensor([130, 0], device=device)))
