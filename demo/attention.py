"""The two functions of the demo, as plain Python: which keys a query sees, and how their scores are bent.

They only use operators, indexing and torch functions, so the same text runs on a dense grid of indices (that is how the
oracle uses it) and on flexattn's tracer, which compiles it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Mod = Callable[..., Tensor]


def causal_documents(document: Tensor) -> Mod:
    """A query sees the keys before it that belong to the same document. document: int [length]."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (document[q_idx] == document[kv_idx])

    return mask_mod


def soft_cap_and_alibi(cap: float, slope: Tensor) -> Mod:
    """Scores softly limited to (-cap, cap), less a penalty for distance whose slope each head may learn: float [heads].

    Source: soft-cap as in Gemma 2 (2024), section 2; ALiBi is Press, Smith, Lewis (2022), section 3.
    """

    def score_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap) - slope[h] * (q_idx - kv_idx)

    return score_mod


def alibi_slopes(heads: int) -> Tensor:
    """Slopes to start from, 2, 1/2, 1/8, ... (ALiBi's own are flatter: words, not characters): float32 [heads]."""
    return 2.0 * torch.exp2(-2.0 * torch.arange(heads))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, score_mod: Mod | None = None) -> Tensor:
    """The same attention by its formula, with the whole score matrix in memory: what one writes without a compiler.

    Args:
        q, k, v: [batch, heads, length, dim]; mask: bool [length, length], True = keep.

    Returns: [batch, heads, length, dim] in q's dtype; the softmax is computed in float32.
    """
    heads, length = q.shape[1], q.shape[2]
    score = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    if score_mod is not None:
        index = torch.arange(length, device=q.device)
        h = torch.arange(heads, device=q.device).view(heads, 1, 1)
        score = score_mod(score, torch.zeros_like(h), h, index.view(-1, 1), index)
    return torch.softmax(score.masked_fill(~mask, -math.inf), dim=-1).to(v.dtype) @ v
