"""The masks that people use, small enough to check against every pair, and the brute force to check with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Mask = Callable[..., Any]
BATCH, HEADS = 2, 3


def brute(mask_mod: Mask, batch: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """Every pair by calling the function itself on broadcasting index tensors: bool [batch, heads, q_len, kv_len]."""
    sizes = (batch, heads, q_len, kv_len)
    index = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(sizes)]
    return torch.as_tensor(mask_mod(*index)).to(torch.bool).expand(sizes)


def brute_tiles(kept: Tensor, q_block: int, kv_block: int) -> Tensor:
    """0 empty, 1 partial, 2 full for each tile of kept pairs; a tile cut by a length cannot be full."""
    *lead, q_len, kv_len = kept.shape
    rows, cols = -(-q_len // q_block), -(-kv_len // kv_block)
    padded = kept.new_zeros(*lead, rows * q_block, cols * kv_block)
    padded[..., :q_len, :kv_len] = kept
    count = padded.view(*lead, rows, q_block, cols, kv_block).sum((-3, -1))
    return (count > 0).to(torch.int8) + (count == q_block * kv_block).to(torch.int8)


def _documents(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(document of each token, first token of its document)."""
    cuts = torch.sort(torch.randint(1, n, (9,), generator=generator)).values
    ids = torch.bucketize(torch.arange(n), cuts, right=True).to(torch.int32)
    return ids, torch.cat([torch.zeros(1, dtype=torch.long), cuts])[ids.long()]


def _ancestors(n: int, generator: torch.Generator) -> Tensor:
    """Which tokens of a random tree lie above which, themselves included."""
    above = torch.eye(n, dtype=torch.bool)
    for x in range(1, n):
        above[x] |= above[int(torch.randint(0, x, (1,), generator=generator))]
    return above


def _interleave(x: Any) -> Any:
    """Every second bit of a Morton code, as a coordinate below 32."""
    return (x & 1) | ((x >> 1) & 2) | ((x >> 2) & 4) | ((x >> 3) & 8) | ((x >> 4) & 16)


def families(n: int, seed: int = 0) -> dict[str, Mask]:
    """Name -> mask for sequences of up to n tokens: attention-gym's, Transformers', torch's tests', and awkward ones."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    ids, first = _documents(n, g)
    ids_b = torch.stack([_documents(n, g)[0] for _ in range(BATCH)])
    shuffled, rolled = ids[torch.randperm(n, generator=g)], ids.roll(n // 3)
    rare, dense = draw(0, 150, n) == 0, draw(0, 10, BATCH, n, n) == 0
    prefix, left, length = draw(0, n, BATCH), draw(0, n // 2, BATCH), draw(1, n, BATCH)
    head_windows, chosen = draw(1, n, HEADS), draw(0, 2, n // 16 + 1, n // 16 + 1).bool()
    tree, enter = _ancestors(64, g), draw(0, n, n)
    steps = draw(0, 60, n // 40 + 1, n).sort(-1).values
    leave, image = enter + draw(0, n // 4, n), ids.long()
    window, side, frame, half, offset = (
        max(2, n // 6),
        max(7, int(n**0.5)),
        max(3, n // 7),
        n // 2,
        torch.tensor(n // 5),
    )
    starts, ends = draw(0, n // 2, 10), draw(n // 3, n, 10)

    def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
        noised_q, noised_k, bq, bk = q < half, k < half, q % half // 16, k % half // 16
        same = noised_q & noised_k & (bq == bk)
        return same | (noised_q & ~noised_k & (bq > bk)) | (~noised_q & ~noised_k & (bq >= bk))

    def natten(b: Any, h: Any, q: Any, k: Any) -> Any:
        row, col = torch.clamp(q // side, 3, side - 4), torch.clamp(q % side, 3, side - 4)
        return (torch.abs(row - k // side) <= 3) & (torch.abs(col - k % side) <= 3)

    def morton(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((_interleave(q) - _interleave(k)).abs() <= 2) & ((_interleave(q >> 1) - _interleave(k >> 1)).abs() <= 2)

    def tiled(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // 16 // 4 - k // 16 // 4).abs() <= 1) & ((q // 16 % 4 - k // 16 % 4).abs() <= 1)

    return {
        "causal": lambda b, h, q, k: q >= k,
        "causal from the end": lambda b, h, q, k: q + 37 >= k,
        "causal, offset in a tensor": lambda b, h, q, k: q + offset >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < window),
        "window, end included": lambda b, h, q, k: (q - k >= 0) & (q - k <= window),
        "window both ways": lambda b, h, q, k: (q - k).abs() <= window,
        "dilated": lambda b, h, q, k: ((q - k).abs() <= window) & ((q - k) % 3 == 0),
        "global and sliding": lambda b, h, q, k: rare[q] | rare[k] | ((q - k).abs() < window),
        "prefix": lambda b, h, q, k: (k < n // 3) | (q >= k),
        "prefix per batch": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "sink and window": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < window)),
        "block diffusion": block_diffusion,
        "documents": lambda b, h, q, k: ids[q] == ids[k],
        "documents, causal": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        "documents per batch": lambda b, h, q, k: (ids_b[b, q] == ids_b[b, k]) & (q >= k),
        "documents, shuffled": lambda b, h, q, k: shuffled[q] == shuffled[k],
        "documents, rolled": lambda b, h, q, k: (rolled[q] == rolled[k]) & (q >= k),
        "documents, local positions": lambda b, h, q, k: (
            (ids[q] == ids[k]) & (q - first[q] >= k - first[k]) & (k - first[k] < 100)
        ),
        "packed by start": lambda b, h, q, k: (first[q] <= k) & (k <= q),
        "shared prefix": lambda b, h, q, k: (q >= k) & ((k < n // 8) | (ids[q] == ids[k])),
        "draft tree": lambda b, h, q, k: (k < n - 64) | tree[q % 64, torch.clamp(k - (n - 64), 0, 63)],
        "draft training": lambda b, h, q, k: (k < n // 4) | ((q // 8 == k // 8) & (q >= k)),
        "tree by intervals": lambda b, h, q, k: (enter[k] <= enter[q]) & (enter[q] < leave[k]),
        "chunked": lambda b, h, q, k: (q // window == k // window) & (k <= q),
        "neighbourhood": natten,
        "neighbourhood, Morton order": morton,
        "tile window": tiled,
        "video, spatial": lambda b, h, q, k: (k < frame) | (q < 5) | ((q - k).abs() < window),
        "video, temporal": lambda b, h, q, k: ((q % frame - k % frame).abs() < 9) | (k < 7),
        "sorted rows": lambda b, h, q, k: (steps[q // 40, k] > 45) | (steps[k // 40, q] < 3),
        "chosen blocks": lambda b, h, q, k: chosen[q // 16, k // 16],
        "folded batch": lambda b, h, q, k: (q // 99 == k // 99) & (q % 99 >= k % 99),
        "images seen by text": lambda b, h, q, k: (starts[image[k]] <= q) & (q < ends[image[k]]),
        "padding": lambda b, h, q, k: (q < length[b]) & (k < length[b]),
        "left padding, chunked": lambda b, h, q, k: (
            (k >= left[b]) & (q >= k) & ((q - left[b]) // 50 == (k - left[b]) // 50)
        ),
        "window per head": lambda b, h, q, k: (q >= k) & (q - k < head_windows[h]),
        "one kind per head": lambda b, h, q, k: torch.where(h == 1, k >= q, q >= k),
        "dense": lambda b, h, q, k: dense[b, q, k] | (q == k),
        "relative table": lambda b, h, q, k: rare[(q - k).abs()],
        "floor division": lambda b, h, q, k: ((q - k) // 4 == -1) | ((q - k) % 4 == 3) | (q == k),
        "last residue": lambda b, h, q, k: (q + k) % 16 == 15,
        "negative modulus": lambda b, h, q, k: (q - k) % -160 <= -159,
        "divisor of both signs": lambda b, h, q, k: (q - n // 2) // torch.where(k // 99 % 2 == 0, 3, -2) > 5,
        "divisor through zero": lambda b, h, q, k: (q - 9) // torch.where(k == half, 1, k - half) > 20,
        "remainder through zero": lambda b, h, q, k: q % torch.where(k == half, 3, k - half) > 90,
        "wrapping index": lambda b, h, q, k: ids[q - 5] == ids[k - 5],
        "min and max": lambda b, h, q, k: torch.minimum(q, k) * 2 > torch.maximum(q, k) - 9,
        "xor and not": lambda b, h, q, k: ~((q > k) ^ (k < n // 4)) | (q - k == 200),
        "last token of blocks": lambda b, h, q, k: (k % 128 == 127) | (q // 32 == k // 32),
        "full by union only": lambda b, h, q, k: (q >= k) | (q <= k),
        "sine": lambda b, h, q, k: torch.sin(q * 0.1) > torch.cos(k * 0.07),
        "all": lambda b, h, q, k: q >= 0,
        "none": lambda b, h, q, k: q < 0,
    }
