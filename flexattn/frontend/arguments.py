"""Arguments of masks that are easily of the wrong kind: integers, pairs of lengths, devices, mask functions.

Reads what a user passed; makes what it should be, or an error that says what to pass. The one idea: one place for each kind, so
that every method says the same of the same mistake.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from flexattn.errors import CallError, DeviceError, MaskTypeError


def integer(value: Any, name: str, *, hint: str) -> int:
    """An argument that Python takes as an index, such as NumPy's integers; no truth value and no float.

    Raises:
        CallError: it is something else.
    """
    if isinstance(value, torch.SymInt):
        symbol: Any = value
        return symbol  # type: ignore[no-any-return]
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise CallError(f"{name} must be an integer", given=repr(value), hint=hint)


def lengths_of(value: Any) -> tuple[int, int]:
    """(q_len, kv_len).

    Raises:
        CallError: it is no pair of integers.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise CallError("lengths must be a pair of integers", given=repr(value), hint="(q_len, kv_len)")
    q_len, kv_len = (integer(n, "a length", hint="(q_len, kv_len)") for n in value)
    return q_len, kv_len


def device_of(wanted: Any, *, hint: str = 'device="cpu", or a build of torch for it') -> torch.device:
    """A device with its index, so that devices compare as their tensors do.

    Raises:
        DeviceError: there is no such device here.
    """
    try:
        device = torch.device(wanted)
        if device.type in ("cpu", "meta"):
            return device
        return _probed(device) if device.index is not None else torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError):
        raise DeviceError("the mask's device is not here", given=repr(wanted), hint=hint) from None


@functools.lru_cache(maxsize=64)
def _probed(device: torch.device) -> torch.device:
    return torch.empty(0, device=device).device


def mask_function(mask_mod: Any) -> Any:
    """A mask function.

    Raises:
        MaskTypeError: it cannot be called.
    """
    if not callable(mask_mod):
        is_mask = hasattr(mask_mod, "mask_mod")
        hint = "block_mask.mask_mod, or & for masks" if is_mask else "lambda b, h, q_idx, kv_idx: q_idx >= kv_idx"
        given = type(mask_mod).__name__
        raise MaskTypeError("a mask function must be callable: mask_mod(b, h, q_idx, kv_idx)", given=given, hint=hint)
    return mask_mod


__all__ = ["device_of", "integer", "lengths_of", "mask_function"]
