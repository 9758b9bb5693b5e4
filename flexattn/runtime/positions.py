"""Where the queries and keys of a call stand: `q_offset` and `kv_lengths` become part of its mods.

Reads what a caller gave; makes mods that see logical positions. The idea: an offset and a length are an argument or a captured
tensor of the mods, like any other. So every kernel, the mask builder and the gradients know them already, they may live on the
device, and another value builds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, DeviceError, DTypeError, OptionError, ShapeError

_INTEGERS = (torch.int32, torch.int64)


class Positions(NamedTuple):
    """What query row 0 of a call is, and how many keys there are.

    Attributes:
        offset: added to q_idx, the same for all (int) or by batch (int tensor [batch]).
        at_end: the last query stands at the last key instead: q_len, and `lengths` are those of the keys.
        lengths: int tensor [batch]; None where all keys count.
    """

    offset: int | Tensor = 0
    at_end: int | None = None
    lengths: Tensor | None = None

    def score(self, score_mod: Callable[..., Any]) -> Callable[..., Any]:
        """A score_mod that sees logical query positions."""
        return score_mod if not self._moves else functools.partial(_placed_score, score_mod, *self)

    def mask(self, mask_mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
        """A mask_mod that sees logical query positions and drops keys behind their length; None where nothing is dropped."""
        if self.lengths is None and (mask_mod is None or not self._moves):
            return mask_mod
        return functools.partial(_placed_mask, mask_mod, *self)

    @property
    def _moves(self) -> bool:
        return self.at_end is not None or isinstance(self.offset, Tensor) or self.offset != 0


def _query(offset: Any, at_end: Any, lengths: Any, b: Any, q_idx: Any) -> Any:
    """The logical position of a query row."""
    if at_end is not None:
        return q_idx + (_of(lengths, b) - at_end)
    return q_idx + _of(offset, b)


def _of(value: Any, b: Any) -> Any:
    """A number of batch entry b."""
    return value[b] if isinstance(value, Tensor) else value


def _placed_score(
    score_mod: Any, offset: Any, at_end: Any, lengths: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    return score_mod(score, b, h, _query(offset, at_end, lengths, b, q_idx), kv_idx)


def _placed_mask(mask_mod: Any, offset: Any, at_end: Any, lengths: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    inside = True if lengths is None else kv_idx < _of(lengths, b)
    if mask_mod is None:
        return inside
    return mask_mod(b, h, _query(offset, at_end, lengths, b, q_idx), kv_idx) & inside


# ---------------------------------------------------------------- what a caller gives
def positions(q_offset: Any, kv_lengths: Any, query: Tensor) -> Positions | None:
    """Checks `q_offset` and `kv_lengths` of a call; None where neither is given.

    Args:
        q_offset: int, or int32 or int64 tensor [batch] or [1] on query's device (a single one may be on the CPU).
        kv_lengths: int32 or int64 tensor [batch] or [1] on query's device.
        query: [batch, q_heads, q_len, qk_dim].
    Raises: CallError, ShapeError, DTypeError, DeviceError, OptionError.
    """
    if q_offset is None and kv_lengths is None:
        return None
    offset: int | Tensor = 0
    if isinstance(q_offset, Tensor):
        offset = by_batch("q_offset", q_offset, query)
    elif isinstance(q_offset, int) and not isinstance(q_offset, bool):
        offset = int(q_offset)
        if offset < 0:
            hint = "the logical position of the first query; a key/value cache is read from position 0 on"
            raise OptionError("q_offset must be at least 0", given=offset, hint=hint)
    elif q_offset is not None:
        hint = "an int, or an int tensor [batch]"
        raise CallError("q_offset must be an int or a tensor", given=type(q_offset).__name__, hint=hint)
    if kv_lengths is None:
        return Positions(offset)
    if not isinstance(kv_lengths, Tensor):
        hint = "torch.tensor(kv_lengths, dtype=torch.int32, device=query.device); key[:, :, :n] for a single length"
        raise CallError("kv_lengths must be a tensor", given=type(kv_lengths).__name__, hint=hint)
    return Positions(offset, None, by_batch("kv_lengths", kv_lengths, query))


def by_batch(name: str, x: Tensor, query: Tensor) -> Tensor:
    """Checks an integer for each batch entry, and returns it as a tensor [batch].

    Args:
        name: of the argument.
        x: int32 or int64, [batch], [1] or of no dimension.
        query: [batch, ...].
    Raises: DTypeError, ShapeError, DeviceError.
    """
    if x.dtype not in _INTEGERS:
        raise DTypeError(f"{name} must be int32 or int64", given=x.dtype, hint=f"{name}.to(torch.int32)")
    if x.dim() > 1 or x.dim() == 1 and x.shape[0] not in (1, query.shape[0]):
        given, hint = f"{tuple(x.shape)} for a batch of {query.shape[0]}", "one number a batch entry, or one for all"
        raise ShapeError(f"{name} must have shape [batch] or [1]", given=given, hint=hint)
    if x.device != query.device and (x.numel() != 1 or x.device.type != "cpu"):
        hint = f"{name}.to({str(query.device)!r})"
        raise DeviceError(f"{name} must be on query's device", given=f"{x.device} and {query.device}", hint=hint)
    return x.to(query.device).reshape(-1).expand(query.shape[0])


# ---------------------------------------------------------------- keys that nobody may see
def without_rest(x: Tensor, lengths: Tensor) -> Tensor:
    """Rows of x [batch or 1, heads, length, dim] behind a length as zeros: what is there may hold anything, and 0 times NaN is NaN.

    Differentiable; a copy."""
    rows = torch.arange(x.shape[2], device=x.device)
    return torch.where((rows < lengths[:, None])[:, None, :, None], x, 0.0)


__all__ = ["Positions", "by_batch", "positions", "without_rest"]
