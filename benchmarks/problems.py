"""What is computed: shapes, variants and their tensors; every variant knows exactly which pairs it keeps.

The idea: each mask here keeps one run of keys a query, so two vectors, the first and the last kept key, say everything that
is needed to count work and blocks exactly without looking at a pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mod = Callable[..., Any]
WINDOW, CAP, DOCUMENTS = 1024, 30.0, 12


class Shape(NamedTuple):
    """Sizes of one problem; kv_heads, kv_len and v_dim equal those of the queries unless given."""

    batch: int
    heads: int
    length: int
    dim: int
    kv_heads: int = 0
    kv_len: int = 0
    v_dim: int = 0
    shares: bool = False  # values are the first v_dim columns of keys, in the same memory

    @property
    def value_dim(self) -> int:
        return self.v_dim or self.dim

    @property
    def keys(self) -> int:
        return self.kv_len or self.length

    @property
    def key_columns(self) -> int:
        """Numbers that are kept for a key and its value."""
        return self.dim + (0 if self.shares else self.value_dim)

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.kv_heads else str(self.heads)
        length = f"{self.length}/{self.kv_len}" if self.kv_len else str(self.length)
        dims = f"{self.dim}/{self.v_dim}" if self.v_dim else str(self.dim)
        return f"{self.batch}x{heads}x{length}x{dims}"


SHAPES = {
    "d128": Shape(1, 16, 16384, 128),
    "d128_4k": Shape(4, 16, 4096, 128),
    "d64": Shape(1, 32, 16384, 64),
    "d256": Shape(1, 8, 16384, 256),
    "d192": Shape(1, 16, 16384, 192, v_dim=128),
    "chunk": Shape(1, 32, 2048, 128, 8, 32768),  # of a prompt, behind which its last keys stand
    "tiny": Shape(2, 2, 200, 16),
    "tiny_chunk": Shape(2, 4, 70, 16, 2, 160),
    "tiny_values": Shape(2, 2, 200, 16, v_dim=8),
}
DECODE_SHAPES = {
    "1k": Shape(1, 32, 1, 128, 8, 1024),
    "8k": Shape(1, 32, 1, 128, 8, 8192),
    "128k": Shape(1, 32, 1, 128, 8, 131072),
    "16x8k": Shape(16, 32, 1, 128, 8, 8192),
    "64x4k": Shape(64, 32, 1, 128, 8, 4096),
    "4x64k": Shape(4, 32, 1, 128, 4, 65536),
    "mla": Shape(16, 16, 1, 576, 1, 8192, 512, shares=True),
    "mla_128": Shape(16, 128, 1, 576, 1, 8192, 512, shares=True),
    "tiny": Shape(2, 4, 1, 16, 2, 160),
    "tiny_mla": Shape(2, 4, 1, 24, 1, 160, 16, shares=True),
}
DECODE_VARIANTS = ("none", "causal", "softcap", "alibi", "window", "near")
VARIANTS = ("none", "causal", "window", "documents", "softcap", "alibi")
TITLES = {
    "none": "none",
    "causal": "causal",
    "window": f"causal, window {WINDOW}",
    "documents": f"causal, {DOCUMENTS} documents",
    "softcap": f"causal, soft-cap {CAP:g}",
    "alibi": "causal, ALiBi",
}


@dataclass(frozen=True)
class Variant:
    """Two functions, and what they mean to a peer that has no functions.

    Attributes:
        name: Key of the result rows.
        score_mod, mask_mod: As flex_attention takes them, or None.
        first, last: First and last kept key of each query, int64 [q_len] on the CPU; last < first keeps none.
        causal: The mask lets a query see keys up to itself only.
        window: Keys a query sees at most, or None.
        soft_cap: Scores are cap * tanh(score / cap), or None.
        alibi: One slope a head [heads], or None.
        starts: First query of each document and the length [documents + 1], on the CPU, or None.
    """

    name: str
    score_mod: Mod | None
    mask_mod: Mod | None
    first: Tensor
    last: Tensor
    causal: bool = False
    window: int | None = None
    soft_cap: float | None = None
    alibi: Tensor | None = None
    starts: Tensor | None = None

    @property
    def kept(self) -> int:
        """Kept pairs of one batch entry and head, exactly."""
        return int((self.last - self.first + 1).clamp_min(0).sum())


@dataclass(frozen=True)
class Problem:
    """One shape, one variant, and where."""

    shape: Shape
    variant: Variant
    device: torch.device
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        """Of the forward: two products, of 2 * dim and 2 * v_dim operations a kept pair."""
        both = self.shape.dim + self.shape.value_dim
        return 2 * self.shape.batch * self.shape.heads * self.variant.kept * both

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value, standard normal, [batch, heads, length, dim or v_dim]."""
        s = self.shape
        generator = torch.Generator(self.device).manual_seed(seed)
        sizes = [
            (s.batch, s.heads, s.length, s.dim),
            *((s.batch, s.key_heads, s.keys, d) for d in (s.dim, s.value_dim)),
        ]
        made = [torch.randn(n, device=self.device, dtype=self.dtype, generator=generator) for n in sizes]
        return made[0], made[1], made[1][..., : s.value_dim] if s.shares else made[2]


# ---------------------------------------------------------------- masks and scores
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query."""
    return q_idx >= kv_idx


def window_mask(width: int) -> Mod:
    """The last `width` keys up to the query."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width)


def document_mask(ids: Tensor) -> Mod:
    """Causal within documents; `ids` names each position's document."""
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def soft_cap(cap: float) -> Mod:
    """Scores within (-cap, cap)."""
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def alibi(slopes: Tensor) -> Mod:
    """A penalty that grows with the distance, by a slope a head."""
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def document_starts(length: int, documents: int = DOCUMENTS) -> Tensor:
    """Where documents of uneven length start, and the length: int64 [documents + 1]; the same shares at every length."""
    cuts = torch.rand(documents - 1, generator=torch.Generator().manual_seed(0)).sort().values
    return torch.cat([torch.tensor([0]), (cuts * length).long(), torch.tensor([length])])


def document_ids(starts: Tensor) -> Tensor:
    """The document of each position, int32 [length]."""
    return torch.repeat_interleave(torch.arange(len(starts) - 1, dtype=torch.int32), starts.diff())


def make_variant(name: str, shape: Shape, device: torch.device) -> Variant:
    """One of VARIANTS at a length; a window is never longer than a quarter of it. Where there are more keys than queries, of `none` and
    `causal` only, the last query stands at the last key."""
    position = torch.arange(shape.length)
    if name == "none":
        return Variant(name, None, None, torch.zeros_like(position), torch.full_like(position, shape.keys - 1))
    start, offset = torch.zeros_like(position), shape.keys - shape.length
    if name == "causal" and offset:
        seen = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
        return Variant(name, None, seen, start, position + offset, causal=True)
    if offset:
        raise ValueError(f"variant {name!r} is for as many keys as queries, not {shape}")
    if name == "window":
        width = min(WINDOW, max(1, shape.length // 4))
        first = (position - width + 1).clamp_min(0)
        return Variant(name, None, window_mask(width), first, position, causal=True, window=width)
    if name == "documents":
        starts = document_starts(shape.length)
        ids = document_ids(starts)
        mask = document_mask(ids.to(device))
        return Variant(name, None, mask, starts[ids.long()], position, causal=True, starts=starts)
    if name == "softcap":
        return Variant(name, soft_cap(CAP), causal, start, position, causal=True, soft_cap=CAP)
    if name == "alibi":
        slopes = torch.exp2(-8.0 * (torch.arange(shape.heads, device=device) + 1) / shape.heads)
        return Variant(name, alibi(slopes), causal, start, position, causal=True, alibi=slopes)
    if name != "causal":
        raise ValueError(f"no variant {name!r}; there are {', '.join(VARIANTS)}")
    return Variant(name, None, causal, start, position, causal=True)


def decode_variant(name: str, shape: Shape, device: torch.device | None = None) -> Variant:
    """One of DECODE_VARIANTS: the query is the last position. All but `near`, the last WINDOW keys, keep every key, but a kernel has
    to find that out; `window` is as long as the cache."""
    first, last = torch.zeros(shape.length, dtype=torch.int64), torch.full((shape.length,), shape.keys - 1)
    if name == "none":
        return Variant(name, None, None, first, last)
    offset = shape.keys - shape.length
    seen = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
    if name == "softcap":
        return Variant(name, soft_cap(CAP), seen, first, last, causal=True, soft_cap=CAP)
    if name == "alibi":
        slopes = torch.exp2(-8.0 * (torch.arange(shape.heads, device=device) + 1) / shape.heads)
        score = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx - offset)
        return Variant(name, score, seen, first, last, causal=True, alibi=slopes)
    if name in ("window", "near"):
        width = shape.keys if name == "window" else WINDOW
        near = lambda b, h, q_idx, kv_idx: (q_idx + offset >= kv_idx) & (q_idx + offset - kv_idx < width)
        first = (last - width + 1).clamp_min(0)
        return Variant(name, None, near, first, last, causal=True, window=width)
    if name != "causal":
        raise ValueError(f"no variant {name!r}; there are {', '.join(DECODE_VARIANTS)}")
    return Variant(name, None, seen, first, last, causal=True)


def count_blocks(variant: Variant, block: int) -> tuple[int, int]:
    """(blocks that keep a pair, blocks that keep all of theirs), by formula.

    Both ends of the kept run must not fall from a query to the next, and the length be a multiple of `block`.
    """
    first, last = variant.first.reshape(-1, block), variant.last.reshape(-1, block)
    kept = last[:, -1] // block - first[:, 0] // block + 1
    full = (last[:, 0] + 1) // block - -(-first[:, -1] // block)
    return int(kept.sum()), int(full.clamp_min(0).sum())
