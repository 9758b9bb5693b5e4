"""Masks and score mods that people use, each a function to call with its settings: plain Python, to read and to copy.

Every maker returns a mask_mod(b, h, q_idx, kv_idx) or a score_mod(score, b, h, q_idx, kv_idx) that pickles. The one idea: a
setting is an argument of the kernel, so another window or another cap builds nothing anew. Masks combine by `and_masks` and `or_masks`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import OptionError, ShapeError

Mod = Callable[..., Any]


def _is_one(x: Any) -> bool:
    """Whether a setting is a number, or a tensor or array of one element."""
    return isinstance(x, numbers.Real) or math.prod(getattr(x, "shape", (0,))) == 1


def _shown(x: Any) -> str:
    """A setting in an error: a number as it is, anything else by its type."""
    return str(x) if _is_one(x) else f"a {type(x).__name__}"


# ----------------------------------------------------------------------------------------------------------- masks
def causal(offset: int = 0) -> Mod:
    """A query sees itself and what came before: `kv_idx <= q_idx + offset`.

    Args:
        offset: position of query 0 among the keys: 0 to count both from the start, kv_len - q_len to end them together.

    Example:
        >>> mask = causal(offset=2)
        >>> bool(mask(0, 0, 1, 3)), bool(mask(0, 0, 1, 4))
        (True, False)

    Source: Vaswani et al., Attention Is All You Need, 2017, section 3.2.3.
    """
    return partial(_causal, offset)


def _causal(offset: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx + offset


def sliding_window(window: int, *, offset: int = 0) -> Mod:
    """A query sees the last `window` positions, its own included: `0 <= q_idx + offset - kv_idx < window`.

    Args:
        window: how many keys a query sees, at least 1.
        offset: position of query 0 among the keys.

    Raises:
        OptionError: the window is below 1.

    Example:
        >>> [bool(sliding_window(2)(0, 0, 5, k)) for k in (3, 4, 5, 6)]
        [False, True, True, False]

    Source: Beltagy et al., Longformer, 2020, section 3.1; Jiang et al., Mistral 7B, 2023, section 2.
    """
    if not _is_one(window) or window < 1:
        raise OptionError(
            "window must be a number of at least 1",
            given=_shown(window),
            hint="1, which keeps the query's own position",
        )
    return partial(_sliding_window, window, offset)


def _sliding_window(window: int, offset: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = q_idx + offset - kv_idx
    return (distance >= 0) & (distance < window)


def dilated(window: int, dilation: int) -> Mod:
    """Every `dilation`-th of the positions within `window` on both sides: `|d| <= window and d % dilation == 0`, d = q_idx - kv_idx.

    Args:
        window: farthest distance.
        dilation: step between seen positions, at least 1.

    Raises:
        OptionError: the dilation is below 1 or the window negative.

    Example:
        >>> [bool(dilated(4, 2)(0, 0, torch.tensor(8), k)) for k in (3, 4, 5, 6)]
        [False, True, False, True]

    Source: Beltagy et al., Longformer, 2020, section 3.1.
    """
    if dilation < 1 or window < 0:
        raise OptionError(
            "dilation must be at least 1 and window not negative",
            given=f"window {window} and dilation {dilation}",
            hint="dilation=1 for a window without gaps",
        )
    return partial(_dilated, window, dilation)


def _dilated(window: int, dilation: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    distance = q_idx - kv_idx
    return (distance <= window) & (distance >= -window) & (distance % dilation == 0)


def prefix_lm(length: int | Tensor) -> Mod:
    """All of a prefix, and causally what follows: `kv_idx < length or kv_idx <= q_idx`.

    Args:
        length: tokens of the prefix; a number, or an integer tensor [batch].

    Example:
        >>> [bool(prefix_lm(2)(0, 0, 0, k)) for k in (0, 1, 2)]
        [True, True, False]

    Source: Raffel et al., Exploring the Limits of Transfer Learning (T5), 2020, section 3.2.1.
    """
    if isinstance(length, Tensor) and length.dim():
        return partial(_prefix_lm_per_batch, length)
    return partial(_prefix_lm, length)


def _prefix_lm(length: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < length) | (kv_idx <= q_idx)


def _prefix_lm_per_batch(lengths: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx < lengths[b]) | (kv_idx <= q_idx)


def document(ids: Tensor, kv_ids: Tensor | None = None) -> Mod:
    """Packed documents that do not see each other: `ids[q_idx] == kv_ids[kv_idx]`.

    Args:
        ids: document of each token, integers [q_len], or [batch, q_len].
        kv_ids: the same for the keys; by default `ids`.

    Raises:
        ShapeError: ids are not one- or two-dimensional, or both have not the same number of dimensions.

    Example:
        >>> mask = document(torch.tensor([0, 0, 1]))
        >>> bool(mask(0, 0, 1, 0)), bool(mask(0, 0, 2, 1))
        (True, False)

    Source: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021, section 3.2.
    """
    kv_ids = ids if kv_ids is None else kv_ids
    if ids.dim() not in (1, 2) or kv_ids.dim() != ids.dim():
        raise ShapeError(
            "document ids must be [length] or [batch, length]",
            given=f"ids {tuple(ids.shape)} and kv_ids {tuple(kv_ids.shape)}",
            hint="ids of as many dimensions for queries and for keys",
        )
    return partial(_document if ids.dim() == 1 else _document_per_batch, ids, kv_ids)


def _document(ids: Tensor, kv_ids: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ids[q_idx] == kv_ids[kv_idx]


def _document_per_batch(ids: Tensor, kv_ids: Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ids[b, q_idx] == kv_ids[b, kv_idx]


# ------------------------------------------------------------------------------------------------------- score mods
def alibi(heads: int) -> Mod:
    """Scores fall with the distance, each head at its own rate: `score - 2**(-8 (h + 1) / heads) * (q_idx - kv_idx)`.

    Args:
        heads: query heads; the paper's rates are for powers of two, other counts use the same formula.

    Raises:
        OptionError: heads is below 1.

    Example:
        >>> float(alibi(8)(torch.tensor(1.0), 0, torch.tensor(0), torch.tensor(6), torch.tensor(4)))
        0.0

    Source: Press et al., Train Short, Test Long (ALiBi), 2022, section 3.
    """
    if not _is_one(heads) or heads < 1:
        raise OptionError("heads must be a number of at least 1", given=_shown(heads), hint="the number of query heads")
    return partial(_alibi, -8.0 / heads)


def _alibi(rate: float, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.exp2((h + 1) * rate) * (kv_idx - q_idx)


def softcap(cap: float) -> Mod:
    """Scores bounded smoothly: `cap * tanh(score / cap)`.

    Args:
        cap: the bound, positive.

    Raises:
        OptionError: the cap is not positive.

    Example:
        >>> round(float(softcap(20.0)(torch.tensor(40.0), 0, 0, 0, 0)), 3)
        19.281

    Source: Gemma Team, Gemma 2, 2024, section 2 (after Bello et al., 2016).
    """
    if not _is_one(cap) or not cap > 0:
        raise OptionError(
            "cap must be a positive number", given=_shown(cap), hint="20 to 50; without a cap, no score_mod at all"
        )
    return partial(_softcap, float(cap))


def _softcap(cap: float, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return cap * torch.tanh(score / cap)


def relative_bias(table: Tensor) -> Mod:
    """A learned number for each head and distance: `score + table[h, clamp(q_idx - kv_idx, -reach, reach) + reach]`.

    Args:
        table: floats [heads, 2 * reach + 1], from the farthest key ahead to the farthest behind; distances past `reach`
            share the ends. It may require gradients.

    Raises:
        ShapeError: the table is not two-dimensional with an odd number of columns.

    Example:
        >>> table = torch.arange(5.0)[None]  # reach 2
        >>> float(relative_bias(table)(torch.tensor(0.0), 0, 0, torch.tensor(9), torch.tensor(0)))
        4.0

    Source: Shaw et al., Self-Attention with Relative Position Representations, 2018, section 3.2; T5, 2020, section 2.1.
    """
    if table.dim() != 2 or table.shape[1] % 2 == 0:
        raise ShapeError(
            "the table must be [heads, 2 * reach + 1]",
            given=tuple(table.shape),
            hint="an odd width: distances from -reach to reach",
        )
    return partial(_relative_bias, table, table.shape[1] // 2)


def _relative_bias(table: Tensor, reach: int, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + table[h, torch.clamp(q_idx - kv_idx, -reach, reach) + reach]
