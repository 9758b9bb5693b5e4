"""stack_masks: block masks side by side along heads or batch.

Reads masks that may differ in everything but their lengths; makes one. The one idea: the stack is a predicate too, which asks
h or b whose turn it is, so every group of the score matrix is decided as its own mask would decide it.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexattn.errors import MaskTypeError, OptionError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.predicate_mask import stacked

_AXES = {"batch": 0, "heads": 1}


def stack_masks(masks: Sequence[BlockMask], *, dim: str) -> BlockMask:
    """Masks side by side, as one: a kind of mask for each head, or a mask for each request of a batch.

    Args:
        masks: of the same lengths; each brings as many heads (or batches) as its H (or B) says, and along the other
            dimension all have the same size or 1. List masks become predicates.
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
    if dim not in _AXES:
        raise OptionError('dim must be "heads" or "batch"', given=repr(dim), hint='dim="heads"')
    if not masks or not all(isinstance(m, BlockMask) for m in masks):
        given = ", ".join(type(m).__name__ for m in masks) or "none"
        raise MaskTypeError("stack_masks takes one BlockMask or more", given=given, hint="create_block_mask")
    return masks[0]._made(stacked([m._mask.as_predicate() for m in masks], _AXES[dim]))
