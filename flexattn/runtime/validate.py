"""Every check of a flex_attention call, before anything is traced, planned or launched.

Reads the arguments, raises or returns them normalised. One rule per function, each raising our error class that also is
the builtin class torch raises in that situation, with torch's distinctive words, what was given and what to try.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.errors import CallError, DeviceError, DTypeError, OptionError, ShapeError, UnsupportedError
from flexattn.frontend.evaluate import is_autocasting
from flexattn.runtime.positions import Positions, positions

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask
    from flexattn.frontend.program import Traced
    from flexattn.runtime.pages import PagedKV

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)  # of paged keys and values, which are read as query's


class InputDeviceError(DeviceError, ValueError):
    """Query, key and value are on different devices, or on one that computes nothing (torch raises ValueError here)."""


def validate(query: Any, key: Any, value: Any, *, enable_gqa: bool, scale: Any) -> tuple[Tensor, Tensor, Tensor, float]:
    """Checks query, key, value and scale, and applies autocast.

    Args:
        query: [batch, q_heads, q_len, qk_dim], float16, bfloat16, float32 or float64.
        key: [batch or 1, kv_heads, kv_len, qk_dim], same dtype and device.
        value: [batch or 1, kv_heads, kv_len, v_dim], same dtype and device.
        enable_gqa: q_heads may be a multiple of kv_heads.
        scale: any real number, None for 1 / sqrt(qk_dim).
    Returns: the three tensors (in autocast's dtype where it is on) and the scale.
    Raises: CallError, UnsupportedError, InputDeviceError, DTypeError, ShapeError, OptionError.
    """
    _check_tensors(query, key, value)
    given = query, key, value
    query, key, value = _autocast(*given)
    _check_dtypes((query, key, value), given)
    _check_dims(query, key, value)
    _check_heads(query.shape[1], key.shape[1], enable_gqa=enable_gqa)
    return query, key, value, _check_scale(scale, query.shape[-1])


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise CallError(f"{name} must be a torch.Tensor", given=type(x).__name__, hint=f"torch.as_tensor({name})")
        if x.is_nested:
            raise UnsupportedError(
                "flex_attention does not support NestedTensor inputs",
                given=name,
                hint="a dense tensor and a document mask",
            )
        if x.layout != torch.strided:
            raise UnsupportedError(f"{name} must be a dense tensor", given=x.layout, hint=f"{name}.to_dense()")
    if query.device != key.device or query.device != value.device:
        raise InputDeviceError(
            "Expected query, key, and value to have the same device type",
            given=_each(named, lambda x: x.device),
            hint="moving them to one device",
        )
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise UnsupportedError(
            "NYI: query, key, and value must be 4D tensors",
            given=_each(named, lambda x: tuple(x.shape)),
            hint="[batch, heads, length, dim], adding dimensions with x[None]",
        )


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, what torch does: floats other than float64 become autocast's dtype, by a step that autograd records.

    Gradients thus come back in the dtypes that were given; captured tensors keep their own.
    """
    kind = query.device.type
    if not is_autocasting(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    cast = lambda x: x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
    return cast(query), cast(key), cast(value)


def _check_dtypes(tensors: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    """`tensors` are what runs, `given` what the caller passed, which is what an error speaks of."""
    query, key, value = tensors
    if query.dtype == key.dtype == value.dtype and query.dtype in DTYPES:
        return
    dtypes = _each(dict(zip(("query", "key", "value"), given)), lambda x: x.dtype)
    if query.dtype == key.dtype == value.dtype:
        what = "query, key and value must be float16, bfloat16, float32 or float64"
        raise DTypeError(what, given=dtypes, hint="query.float(), key.float(), value.float(), or a half type")
    what = "Expected query, key, and value to have the same dtype"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        what += " (Backward pass with mixed query, key, and value dtype is not supported)"
    hint = "casting them to one dtype, or torch.autocast"
    if is_autocasting(query.device.type):
        hint = "casting them to one dtype: autocast leaves float64 and integers as they are"
    raise DTypeError(what, given=dtypes, hint=hint)


def _check_dims(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            "Expect query and key/value to have the same embedding dimension",
            given=f"E={query.shape[-1]} and E={key.shape[-1]} (query {tuple(query.shape)}, key {tuple(key.shape)})",
            hint="[batch, heads, length, dim] for both, with one dim; only value's may differ",
        )
    if query.shape[-1] < 1 or value.shape[-1] < 1:
        raise ShapeError(
            "the embedding dimension of query, key and value must be at least 1",
            given=f"E={query.shape[-1]} and Ev={value.shape[-1]}",
            hint="heads of any size but 0; a length or batch of 0 is fine",
        )
    if key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            "Expect key and value to have the same batch size, heads and length",
            given=f"key {tuple(key.shape)} and value {tuple(value.shape)}",
            hint="[batch, kv_heads, kv_len, dim] for both; only the last dimension may differ",
        )
    if key.shape[0] not in (1, query.shape[0]):
        raise ShapeError(
            "Expect query and key/value to have the same batch size",
            given=f"Bq={query.shape[0]} and Bkv={key.shape[0]}",
            hint="a key/value batch of 1, which broadcasts, or of query's size",
        )


def _check_heads(q_heads: int, kv_heads: int, *, enable_gqa: bool) -> None:
    given = f"Hq={q_heads} and Hkv={kv_heads}"
    if q_heads != kv_heads and not enable_gqa:
        raise ShapeError(
            "Expect query and key/value to have the same number of heads",
            given=given,
            hint="one key/value head per query head; if heads come in groups, Try setting enable_gqa=True for GQA",
        )
    if q_heads and (kv_heads == 0 or q_heads % kv_heads):
        raise ShapeError(
            "Expect number of query heads to be a multiple of kv heads for GQA",
            given=given,
            hint="a number of key/value heads that divides query's",
        )


def _check_scale(scale: Any, qk_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(qk_dim)
    if isinstance(scale, Tensor):
        raise CallError(
            "scale must be a number",
            given="a tensor",
            hint="scale.item(), or score_mod with `score * scale` to learn it",
        )
    if not isinstance(scale, numbers.Real):
        raise CallError("scale must be a number", given=type(scale).__name__, hint="a float, or None for 1/sqrt(dim)")
    if not math.isfinite(scale):
        raise OptionError("scale must be finite", given=scale, hint="None for 1/sqrt(dim)")
    return float(scale)


def validate_paged(query: Any, pages: PagedKV, *, scale: Any) -> tuple[Tensor, float]:
    """Checks query and scale of a call whose keys are in pages, and applies autocast.

    Args:
        query: [batch, q_heads, q_len, qk_dim], of the pages' dtype, or float16, bfloat16 or float32 for pages of 8 bits.
        pages: keys and values; checked when they were made.
        scale: any real number, None for 1 / sqrt(qk_dim).
    Returns: query (in autocast's dtype where it is on) and the scale.
    Raises: CallError, UnsupportedError, InputDeviceError, DTypeError, ShapeError, OptionError.
    """
    _check_tensors(query, pages.k_pages, pages.v_pages)
    query = _autocast(query, query, query)[0]
    if query.dtype not in DTYPES or query.dtype != pages.k_pages.dtype and pages.k_pages.dtype not in NARROW:
        raise DTypeError(
            "query must have the data type of the pages",
            given=f"query: {query.dtype}, pages: {pages.k_pages.dtype}",
            hint=f"query.to({pages.k_pages.dtype})",
        )
    if query.shape[0] != pages.batch or query.shape[3] != pages.k_pages.shape[3]:
        raise ShapeError(
            "query must have one entry a request and the pages' embedding dimension",
            given=f"query {tuple(query.shape)}, {pages.batch} requests, pages of E={pages.k_pages.shape[3]}",
            hint="[batch, q_heads, q_len, qk_dim]",
        )
    _check_heads(query.shape[1], pages.k_pages.shape[1], enable_gqa=True)
    return query, _check_scale(scale, query.shape[-1])


def paged_positions(q_offset: Any, pages: PagedKV, query: Tensor) -> Positions:
    """Where queries stand over paged keys: the last one at the last key, or where `q_offset` says."""
    given = positions(q_offset, pages.kv_lengths, query)
    assert given is not None
    return given if q_offset is not None else given._replace(at_end=query.shape[2])


def check_placed_mask(mask: BlockMask, query: Tensor, kv_len: int, where: Positions) -> None:
    """Checks a BlockMask whose rows are read from an offset on: it has a function, and is made for all positions that are known.

    Raises:
        ShapeError: it is made for fewer positions.
        DeviceError: it is somewhere else.
        UnsupportedError: it is made of lists of blocks.
    """
    if mask.predicate is None:
        raise UnsupportedError(
            "a block_mask made of lists of blocks cannot be read from q_offset on, or by kv_lengths",
            given="a list mask",
            hint="create_block_mask from a mask_mod, or mask_mod= in the call",
        )
    q_len, made = query.shape[2], tuple(mask.seq_lengths)
    last = q_len if isinstance(where.offset, Tensor) or where.at_end is not None else where.offset + q_len
    if made[0] < last or made[1] < kv_len:
        raise ShapeError(
            f"block_mask was created for q_len={made[0]} and kv_len={made[1]}, smaller than what it is used for",
            given=f"queries up to position {last} and kv_len={kv_len}",
            hint="create_block_mask for all positions of the cache, or mask_mod= in the call",
        )
    _check_groups(mask, query)


def check_mask(mask: BlockMask, query: Tensor, kv_len: int) -> None:
    """Checks that a BlockMask fits a call.

    Args:
        mask: shape [1 or batch, 1 or q_heads, q_len, kv_len].
        query: as validated.
        kv_len: of key.
    Raises:
        ShapeError: a length, batch or head count does not fit.
        DeviceError: the mask is somewhere else.
    """
    _check_lengths(tuple(mask.shape), tuple(mask.seq_lengths), (query.shape[2], kv_len))
    _check_groups(mask, query)


def _check_groups(mask: BlockMask, query: Tensor) -> None:
    """Batch, heads and device of a mask."""
    mask_batch, mask_heads, *_ = mask.shape
    batch, q_heads, *_ = query.shape
    for name, size, wanted in (("batch", mask_batch, batch), ("heads", mask_heads, q_heads)):
        if size not in (1, wanted):
            raise ShapeError(
                f"block_mask's {name} must be 1 or query's {name}",
                given=f"block_mask.shape={tuple(mask.shape)} and query {tuple(query.shape)}",
                hint=f"create_block_mask with {name[0].upper()}={wanted}, or None to broadcast",
            )
    if torch.device(mask.device) != query.device:
        raise DeviceError(
            "Expect q/k/v and block_mask to be on the same device",
            given=f"{query.device} and {mask.device}",
            hint=f"block_mask.to({str(query.device)!r})",
        )


def _check_lengths(shape: tuple[int, ...], made: tuple[int, ...], given: tuple[int, int]) -> None:
    if made == given:
        return
    smaller = given[0] > made[0] or given[1] > made[1]
    what = f"block_mask was created for block_mask.shape={shape} but got q_len={given[0]} and kv_len={given[1]}"
    if smaller:
        raise ShapeError(
            f"{what}. As the block mask was created for a smaller length than you're using it for, it says nothing about "
            f"the rest",
            hint="create_block_mask with these lengths, or mask_mod= in the call",
        )
    raise ShapeError(
        f"{what}. As the block mask was created for a larger length than you're using it for, which part is meant is open",
        hint="create_block_mask with these lengths, mask_mod= in the call, or block_mask.crop(q_len, kv_len) for the "
        "upper left corner",
    )


def place_captures(traced: Traced, device: torch.device, name: str) -> tuple[Tensor, ...]:
    """The captured tensors on the device of query: 0-d CPU tensors follow, anything else elsewhere is an error.

    Args:
        traced: of a score_mod or mask_mod.
        device: of query.
        name: 'score_mod' or 'mask_mod', for the message.
    Returns: the captures in slot order; a moved one keeps its autograd graph.
    Raises: DeviceError.
    """
    placed = []
    for slot, capture in enumerate(traced.binding.captures):
        if capture.device != device:
            if capture.dim() or capture.device.type != "cpu":
                raise DeviceError(
                    f"tensors captured by {name} must be on query's device",
                    given=f"{traced.program.capture_name(slot)} of shape {tuple(capture.shape)} on {capture.device}, query "
                    f"on {device}",
                    hint=f"moving it with .to({str(device)!r})",
                )
            capture = capture.to(device, non_blocking=True)
        placed.append(capture)
    return tuple(placed)


def _each(named: dict[str, Any], of: Any) -> str:
    return ", ".join(f"{name}: {of(x)}" for name, x in named.items())
