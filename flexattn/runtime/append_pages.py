"""New tokens of keys and values into pages: by a kernel on a GPU, by torch elsewhere, the same numbers bit for bit.

Reads the new tokens and where they go; writes pages in place. The idea: a token's place is counted back from the end of its request,
which the device knows, so that nothing waits for the device and a CUDA graph may be replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.shared_memory import TileConfig, padded
from flexattn.codegen.spec import KernelSpec, TensorLayout
from flexattn.codegen.target import Target
from flexattn.runtime import device as devices
from flexattn.runtime.compile import first_that_builds

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}  # fmt: skip
_FIRST_OF_8_BITS = 90  # compute capability for which every Triton can round to them
_TILE = 4096  # numbers a program writes at once


class Side(NamedTuple):
    """Keys, or values.

    Attributes:
        new: [batch, kv_heads, tokens, dim], last stride 1.
        pages: [num_pages, kv_heads, page_size, dim], last stride 1.
        inverse: float32 [1] or [kv_heads], what new ones are multiplied with.
    """

    new: Tensor
    pages: Tensor
    inverse: Tensor


class Where(NamedTuple):
    """Where the tokens go: request r's are those before ends[r] that no request before it has, the last ones of slot slots[r].

    Attributes:
        slots, ends: int32 [requests].
        table: int32 [max_requests, width].
        lengths: int32 [max_requests].
    """

    slots: Tensor
    ends: Tensor
    table: Tensor
    lengths: Tensor


def append_pages(k: Side, v: Side | None, where: Where) -> None:
    """Writes new keys and values into their pages, in the pages' type; those in front of a request's first token are dropped.

    Args:
        k, v: v is None where values lie within keys.
        where: the requests.
    """
    if _has_kernel(k.pages.device, k.pages.dtype):
        by_kernel(k, v, where)
    else:
        by_torch(k, v, where)


def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it runs on a device: numbers of 8 bits are for later GPUs."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return dtype.itemsize > 1 or devices.target_for(device).arch >= _FIRST_OF_8_BITS


def by_torch(k: Side, v: Side | None, where: Where) -> None:
    """As `append_pages`, in torch's operations. Waits for the device."""
    slots, ends, table, lengths = where
    batch, _, each, _ = k.new.shape
    token = torch.arange(batch * each, dtype=torch.int32, device=ends.device)
    request = torch.searchsorted(ends, token, right=True)
    token, request = (x[request < len(ends)] for x in (token, request))
    slot = slots[request].long()
    position = lengths[slot] - (ends[request] - token)
    slot, token, position = (x[position >= 0] for x in (slot, token, position))
    size = k.pages.shape[2]
    page = table[slot, position // size].long()
    for side in (k,) if v is None else (k, v):
        new = side.new[token // each, :, token % each]
        side_pages = side.pages.view(torch.uint8) if side.pages.dtype.itemsize == 1 else side.pages
        side_pages[page, :, position % size] = _stored(new, side).view(side_pages.dtype)


def _stored(new: Tensor, side: Side) -> Tensor:
    """[tokens, kv_heads, dim] in the pages' type: times the inverse of the scale, and cut to what 8 bits hold."""
    dtype = side.pages.dtype
    x = new.float() * side.inverse[:, None]
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def by_kernel(k: Side, v: Side | None, where: Where) -> None:
    """As `append_pages`, in one launch; in Triton's interpreter for CPU tensors."""
    device, (batch, heads, each, _) = k.pages.device, k.new.shape
    values = k if v is None else v
    with devices.current(device):
        spec, kernel = first_that_builds([append_spec(k, v, devices.target_for(device))], device)
        arguments = {
            "K": k.new, "V": values.new, "K_PAGES": k.pages, "V_PAGES": values.pages, "SLOTS": where.slots, "ENDS": where.ends,
            "TABLE": where.table, "LENGTHS": where.lengths, "K_INVERSE": k.inverse, "V_INVERSE": values.inverse,
            "k_strides": k.new.stride(), "v_strides": values.new.stride(), "k_page_strides": k.pages.stride(),
            "v_page_strides": values.pages.stride(), "kv_heads": heads, "tokens": batch * each, "tokens_each": each,
            "requests": where.slots.shape[0], "page_size": k.pages.shape[2], "width": where.table.shape[1],
            "k_scales": k.inverse.shape[0], "v_scales": values.inverse.shape[0],
        }  # fmt: skip
        kernel(-(-batch * each // spec.config.BLOCK_M) * heads, arguments, device=device)


def append_spec(k: Side, v: Side | None, target: Target) -> KernelSpec:
    """Of the kernel; a v_dim of 0 says that it writes no values."""
    values = k if v is None else v
    layouts = tuple(_layout(x) for x in (k.new, values.new, k.pages, values.pages))
    dims = k.new.shape[3], 0 if v is None else v.new.shape[3]
    return KernelSpec("append_pages", target, append_tiles(*dims), *dims, layouts=layouts)


def append_tiles(qk_dim: int, v_dim: int) -> TileConfig:
    """As many tokens a program as fill its registers."""
    return TileConfig(max(1, min(64, _TILE // padded(max(qk_dim, v_dim)))), 16, 4, 1)


def _layout(x: Tensor) -> TensorLayout:
    starts = (x.data_ptr(), *(s * x.dtype.itemsize for s in x.stride()[:3]))
    return TensorLayout(TYPES[x.dtype], all(n % 16 == 0 for n in starts), True)


__all__ = ["TYPES", "Side", "Where", "append_pages", "append_spec", "append_tiles", "by_kernel", "by_torch"]
