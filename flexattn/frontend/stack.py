"""stack_masks: block masks side by side along heads or batch.

Reads masks that may differ in everything but their lengths; makes one. The one idea: the stack is a predicate too, which asks
h or b whose turn it is, so every group of the score matrix is decided as its own mask would decide it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flexattn.errors import MaskTypeError, OptionError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.predicate_mask import stacked
from flexattn.frontend.torch_lists import is_torchs

_AXES = {"batch": 0, "heads": 1}


def stack_masks(masks: Iterable[Any], *, dim: str) -> BlockMask:
    """Masks side by side, as one: a kind of mask for each head, or a mask for each request of a batch.

    Args:
        masks: of the same lengths; each brings as many heads (or batches) as its H (or B) says, and along the other
            dimension all have the same size or 1. List masks, and torch's, become predicates.
        dim: "heads" or "batch".

    Returns:
        A predicate mask whose `dim` is the sum of theirs; functions are not called again. Its program contains each different
        mask once, so stack some dozens at most: for hundreds of requests capture a tensor and index it with b.

    Raises:
        MaskTypeError: there is no mask, or something else among them.
        OptionError: another dim.
        ShapeError: lengths, or sizes along the other dimension, differ.
        DeviceError: the masks are on different devices.

    Example:
        >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 2, device="cpu")
        >>> stack_masks([causal, causal.transposed()], dim="heads").to_mask().int().tolist()
        [[[[1, 0], [1, 1]], [[1, 1], [0, 1]]]]
    """
    if not isinstance(dim, str) or dim not in _AXES:
        raise OptionError('dim must be "heads" or "batch"', given=repr(dim), hint='dim="heads"')
    several = isinstance(masks, Iterable) and not isinstance(masks, BlockMask)
    masks = [BlockMask.from_torch(m) if is_torchs(m) else m for m in masks] if several else [masks]
    if not several or not masks or not all(isinstance(m, BlockMask) for m in masks):
        given = ", ".join(type(m).__name__ for m in masks) or "none"
        given = given if several else f"one {given}"
        raise MaskTypeError(
            "stack_masks takes a list of block masks", given=given, hint="[create_block_mask(...), ...]"
        )
    found: list[BlockMask] = masks
    return found[0]._made(stacked([m._mask.as_predicate() for m in found], _AXES[dim]))
