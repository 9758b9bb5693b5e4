"""Mask functions out of mask functions: and, or, xor, not, a slice's view, shifts, stacks, the same with other tensors.

Reads Python callables; makes Python callables. The one idea: they are functools.partial of functions of this module, so that
they pickle wherever their parts do.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import MaskFunctionError
from flexattn.frontend.slices import Pick, RowPick, Slice

MaskMod = Callable[..., Any]


def sliced_function(mask_mod: MaskMod, part: Slice) -> MaskMod:
    """`mask_mod` seen from a slice: position 0 is the slice's first batch, head and row."""
    return functools.partial(_sliced_mask, mask_mod, part.b, part.h, part.q)


def _sliced_mask(
    mask_mod: MaskMod, b: Pick, h: Pick, q: RowPick, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any
) -> Any:
    return mask_mod(b.of(b_idx), h.of(h_idx), q.of(q_idx), kv_idx)


def shifted_function(mask_mod: MaskMod, q: int, kv: int) -> MaskMod:
    """`mask_mod` seen from query `q` and key `kv`."""
    return functools.partial(_shifted_mask, mask_mod, q, kv)


def _shifted_mask(mask_mod: MaskMod, q: int, kv: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return mask_mod(b, h, q_idx + q, kv_idx + kv)


def transposed_function(mask_mod: MaskMod) -> MaskMod:
    """`mask_mod` with queries and keys in each other's place."""
    return functools.partial(_transposed_mask, mask_mod)


def _transposed_mask(mask_mod: MaskMod, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return mask_mod(b, h, kv_idx, q_idx)


def stacked_function(parts: tuple[tuple[MaskMod, int, int], ...], axis: int) -> MaskMod:
    """Mask functions side by side along batch (axis 0) or heads (1): each with the positions from its start to its stop."""
    return functools.partial(_stacked_mask, parts, axis)


def _stacked_mask(
    parts: tuple[tuple[MaskMod, int, int], ...], axis: int, b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    index = (b, h)[axis]
    kept: Any = truth(b, False)
    for mask_mod, start, stop in reversed(parts):
        own = torch.clamp(index - start, 0, stop - start - 1)
        here = mask_mod(*((b, own) if axis else (own, h)), q_idx, kv_idx)
        kept = torch.where(index < stop, here, kept)
    return kept


def truth(like: Any, value: bool) -> Any:
    """A constant truth value: a tensor among tensors, as torch's masks return it, a Python bool while a mask is traced."""
    return like.new_full((), value, dtype=torch.bool) if issubclass(type(like), Tensor) else value


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keeps every pair."""
    return truth(b, True)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask that keeps what all of `mask_mods` keep; none given keeps everything.

    Raises:
        MaskFunctionError: an argument is not callable.

    Example:
        >>> mask = and_masks(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 4)
        >>> bool(mask(*map(torch.tensor, (0, 0, 7, 3))))
        False
    """
    return functools.partial(_and_mask, _callables(mask_mods))


def _and_mask(mask_mods: tuple[MaskMod, ...], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = truth(b, True)
    for mask_mod in mask_mods:
        kept = kept & mask_mod(b, h, q_idx, kv_idx)
    return kept


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask that keeps what at least one of `mask_mods` keeps; none given keeps nothing.

    Raises:
        MaskFunctionError: an argument is not callable.
    """
    return functools.partial(_or_mask, _callables(mask_mods))


def _or_mask(mask_mods: tuple[MaskMod, ...], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = truth(b, False)
    for mask_mod in mask_mods:
        kept = kept | mask_mod(b, h, q_idx, kv_idx)
    return kept


def xor_masks(first: MaskMod, second: MaskMod) -> MaskMod:
    """The mask that keeps what exactly one of two masks keeps."""
    return functools.partial(_xor_mask, *_callables((first, second)))


def _xor_mask(first: MaskMod, second: MaskMod, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return first(b, h, q_idx, kv_idx) ^ second(b, h, q_idx, kv_idx)


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """The mask that keeps what `mask_mod` drops."""
    return functools.partial(_not_mask, *_callables((mask_mod,)))


def _not_mask(mask_mod: MaskMod, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = mask_mod(b, h, q_idx, kv_idx)
    return ~kept if getattr(kept, "dtype", None) == torch.bool else kept == 0


def _callables(mask_mods: tuple[MaskMod, ...]) -> tuple[MaskMod, ...]:
    if not all(callable(m) for m in mask_mods):
        names = ", ".join(type(m).__name__ for m in mask_mods)
        raise MaskFunctionError("All inputs should be callable mask_mods", given=names, hint="and_masks(first, second)")
    return mask_mods


def with_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """A function (or partial, or container) with the tensors in its closure and defaults replaced, functions inside it too.

    Callable objects and modules are returned as they are: what they hold is theirs.
    """
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, functools.partial):
        args = with_tensors(value.args, replace)
        words = {k: with_tensors(v, replace) for k, v in value.keywords.items()}
        func = with_tensors(value.func, replace)
        same = func is value.func and args is value.args and all(words[k] is v for k, v in value.keywords.items())
        if same:
            return value
        return functools.partial(func, *args, **words)
    if type(value) in (tuple, list, Pick, RowPick):
        new = [with_tensors(v, replace) for v in value]
        if all(a is b for a, b in zip(value, new, strict=True)):
            return value
        return type(value)(*new) if isinstance(value, (Pick, RowPick)) else type(value)(new)
    if isinstance(value, types.FunctionType):
        return _function_with(value, replace)
    return value


def _function_with(fn: types.FunctionType, replace: Callable[[Tensor], Any]) -> types.FunctionType:
    try:
        cells = [c.cell_contents for c in fn.__closure__ or ()]
    except ValueError:  # a cell that is not assigned yet
        return fn
    new = [c if c is fn else with_tensors(c, replace) for c in cells]
    old_defaults = fn.__defaults__ or ()
    defaults = tuple(with_tensors(d, replace) for d in old_defaults)
    if all(a is b for a, b in zip((*cells, *old_defaults), (*new, *defaults), strict=True)):
        return fn
    closure = tuple(types.CellType(c) for c in new)
    out = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults or None, closure)
    out.__kwdefaults__, out.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    out.__dict__.update(fn.__dict__)
    return out
