"""A block mask as a node of torch's pytrees: its tensors are the leaves, all else is the context.

Reads a mask; makes leaves and a context, and a mask again out of other leaves. The one idea: two contexts are equal if their
masks differ in nothing but tensors, so that what was compiled for one serves the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from flexattn.frontend.list_mask import KvLists, ListMask
from flexattn.frontend.mask_functions import with_tensors
from flexattn.frontend.program import Binding, Traced
from flexattn.frontend.torch_lists import KV_LISTS, LIST_NAMES

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask


def register(kind: type[BlockMask]) -> None:
    """Makes the class known to torch's pytrees."""
    pytree.register_pytree_node(
        kind,
        _flatten,
        _unflatten,
        flatten_with_keys_fn=_flatten_with_keys,
        serialized_type_name="flexattn.BlockMask",
    )


class _Context:
    """What a mask is apart from its tensors."""

    def __init__(self, mask: BlockMask, names: tuple[str, ...], inner: Traced | None) -> None:
        self.mask, self.names, self.inner = mask, names, inner
        program = (inner.program, inner.binding.numbers) if inner is not None else None
        style = (mask.is_list, mask._style, mask.dq_kv_order_spt, names)
        self.key = (style, mask._mask.sizes, mask.seq_lengths, mask.BLOCK_SIZE, program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _flatten(mask: BlockMask) -> tuple[list[Any], _Context]:
    """The leaves are the lists of a list mask, or a marker of a predicate mask's device; then the captured tensors."""
    is_list = isinstance(mask._mask, ListMask)
    inner = mask._mask.inner if isinstance(mask._mask, ListMask) else mask._mask.traced
    captures = inner.binding.captures if inner is not None else ()
    lists = {n: x for n in LIST_NAMES if (x := mask._list(n)) is not None} if is_list else {}
    head = list(lists.values()) or [torch.empty(0, device=mask.device)]
    return [*head, *captures], _Context(mask, tuple(lists), inner)


def _flatten_with_keys(mask: BlockMask) -> tuple[list[tuple[Any, Any]], _Context]:
    leaves, context = _flatten(mask)
    names = context.names or ("device",)
    names = (*names, *(f"capture_{n}" for n in range(len(leaves) - len(names))))
    return [(pytree.GetAttrKey(n), x) for n, x in zip(names, leaves, strict=True)], context


def _unflatten(leaves: Iterable[Any], context: _Context) -> BlockMask:
    """The context's mask with other leaves, which need not be tensors."""
    leaves, old, count = list(leaves), context.mask, max(len(context.names), 1)
    lists, captures = dict(zip(context.names, leaves, strict=False)), tuple(leaves[count:])
    before = context.inner.binding.captures if context.inner is not None else ()
    swap = {id(a): b for a, b in zip(before, captures, strict=True) if isinstance(b, Tensor)}
    function = with_tensors(old.mask_mod, lambda t: swap.get(id(t), t))
    if isinstance(old._mask, ListMask):
        source = KvLists([lists.get(n) for n in KV_LISTS])
        new = old._like(old._mask.changed(source=source, function=function))
        new._lists = dict.fromkeys(LIST_NAMES) | lists
    else:
        device = leaves[0].device if isinstance(leaves[0], Tensor) else old.device
        traced = context.inner and context.inner._replace(binding=Binding(captures, context.inner.binding.numbers))
        new = old._like(old._mask.changed(traced=traced, function=function, device=device))
    new.dq_kv_order = old.dq_kv_order
    return new
