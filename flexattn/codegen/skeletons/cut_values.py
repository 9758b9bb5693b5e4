"""The kernel in front of a prefill over pages: copies the values whose piece a request's length cuts, with zeros behind it.

The idea: copies by the hardware bring whole pieces, what lies in slots behind a length may be NaN, and a probability of 0 makes zeros
of numbers only. One piece a request is little to copy; where it begins, the device knows.
"""

import triton
import triton.language as tl


@triton.jit
def cut_values(V, PAGES, PAGE_STARTS, KV_LENGTHS, V_CUT, v_strides, kv_heads, V_DIM: tl.constexpr, V_PAD: tl.constexpr,
               BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """BLOCK_N values of one head, a divisor of PAGE_SIZE: those before the length are the request's last; grid: requests * heads.

    V [pages, heads, PAGE_SIZE, V_DIM] -> V_CUT [requests, heads, BLOCK_N, V_DIM], contiguous."""
    request = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    length = tl.load(KV_LENGTHS + request)
    first = tl.maximum(length - 1, 0) // BLOCK_N * BLOCK_N
    page = tl.load(PAGES + tl.load(PAGE_STARTS + request) + first // PAGE_SIZE, mask=length > 0, other=0)
    rows = tl.arange(0, BLOCK_N)[:, None]
    dims = tl.arange(0, V_PAD)[None, :]
    start = V + page.to(tl.int64) * v_strides[0] + head.to(tl.int64) * v_strides[1]
    start += (first % PAGE_SIZE).to(tl.int64) * v_strides[2]
    inside = dims < V_DIM
    values = tl.load(start + (rows * v_strides[2] + dims), mask=inside & (first + rows < length), other=0.0)
    target = V_CUT + tl.program_id(0).to(tl.int64) * (BLOCK_N * V_DIM)
    tl.store(target + (rows * V_DIM + dims), values, mask=inside)
