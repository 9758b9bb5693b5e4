"""Masks without captured tensors are values: made once, and found again, with their tables, by what they are made of."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from flexattn.frontend.block_mask import BlockMask
from flexattn.runtime.device import is_capturing, stream_of

_MASKS: OrderedDict[Hashable, BlockMask] = OrderedDict()
_MASKS_KEPT = 64
_LOCK = threading.Lock()


def value_mask(key: Hashable, device: torch.device, make: Callable[[], BlockMask]) -> BlockMask:
    """The mask that is kept under a key for the device's current stream, or made and kept; what a CUDA graph's capture makes belongs
    to that graph and is not kept.

    Args:
        key: all that the mask is made of, numbers as `exactly` says them.
        device: where its tables will be.
        make: makes it.
    """
    if is_capturing(device):
        return make()
    whole_key = (key, device, stream_of(device))
    with _LOCK:
        mask = _MASKS.pop(whole_key, None)
        if mask is None:
            with torch.inference_mode(False):  # tables made under inference_mode could not serve a later training step
                mask = make()
        _MASKS[whole_key] = mask  # the newest is last
        if len(_MASKS) > _MASKS_KEPT:
            _MASKS.popitem(last=False)
    return mask


def exactly(numbers: tuple[int | float, ...]) -> tuple[str, ...]:
    """Numbers as a key that tells 1 from 1.0 and 0.0 from -0.0."""
    return tuple(repr(x) for x in numbers)


__all__ = ["exactly", "value_mask"]
