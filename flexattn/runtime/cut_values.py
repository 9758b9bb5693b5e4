"""What a prefill over pages reads instead of the values whose piece a request's length cuts: one small launch in front of it.

Reads a PagedKV on the device alone, so that a CUDA graph may be replayed with other lengths and page numbers; makes a small tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.codegen.shared_memory import TileConfig, padded
from flexattn.codegen.spec import KernelSpec, tensor_layout
from flexattn.codegen.target import Target
from flexattn.runtime import device as devices
from flexattn.runtime.compile import Starts, first_that_builds, keep_ready
from flexattn.runtime.pages import PagedKV
from flexattn.runtime.plan import Plan


def cut_values(pages: PagedKV, plan: Plan, rows: int) -> Tensor:
    """Values of each request's last tokens, as many as its length has over a multiple of `rows`, or `rows` where it is one; 0 in the
    slots behind them. The caller has made the device current.

    Args:
        pages: of half or single types.
        plan: keeps launches that are ready.
        rows: a divisor of page_size, a power of two.
    Returns: [batch, kv_heads, rows, v_dim]; zeros of a request without a token.
    Raises: CompileError.
    """
    v = pages.v_pages
    out = torch.empty(pages.batch, v.shape[1], rows, v.shape[3], dtype=v.dtype, device=v.device)
    key = (v.device.index, out.shape, v.dtype, pages.page_size, v.stride(), v.data_ptr() % 16)
    known: dict[object, Starts] = plan.memo.setdefault("cut values", {})
    launch = known.get(key)
    if launch is None:
        _, kernel = first_that_builds([cut_spec(v, rows, devices.target_for(v.device))], v.device)
        sizes = {"v_strides": v.stride(), "kv_heads": v.shape[1]}
        launch = keep_ready(known, key, kernel.fix(pages.batch * v.shape[1], sizes))
    lists = {"PAGES": pages.page_indices, "PAGE_STARTS": pages.page_starts, "KV_LENGTHS": pages.kv_lengths}
    launch({"V": v, "V_CUT": out, **lists}, device=v.device)
    return out


def cut_spec(v: Tensor, rows: int, target: Target) -> KernelSpec:
    """Of the kernel, for pages of values v [pages, kv_heads, page_size, v_dim]."""
    layout, dim = tensor_layout(v, is_paged=True), v.shape[3]
    warps = max(1, min(4, rows * padded(dim) // 1024))
    return KernelSpec(
        "cut_values", target, TileConfig(16, rows, warps, 1), dim, dim, layouts=(layout,) * 4, page_size=v.shape[2]
    )


__all__ = ["cut_spec", "cut_values"]
