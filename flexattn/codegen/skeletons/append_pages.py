"""The kernel that writes new tokens of keys and values into pages; reads them, where the requests end, and their page table.

The idea: a token's place is counted from the end of its request, so that a launch needs no number that the host would have to know:
lengths and page numbers may change between replays of a CUDA graph.
"""

import triton
import triton.language as tl


@triton.jit
def _stored(x, INVERSE, head, scales, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """A tile in the pages' type: times the inverse of its scale, and cut to what 8 bits hold."""
    x = x.to(tl.float32) * tl.load(INVERSE + tl.where(scales > 1, head, 0))
    if LIMIT is not None:
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))  # a NaN stays one
    return x.to(dtype)


@triton.jit
def _write(NEW, PAGES, new_strides, page_strides, request, place, head, page, row, inside, INVERSE, scales, DIM: tl.constexpr,
           PAD: tl.constexpr, LIMIT: tl.constexpr):
    """Rows of one head from a [batch, heads, tokens, dim] tensor to pages of [pages, heads, rows, dim]."""
    dims = tl.arange(0, PAD)
    mask = inside[:, None] & (dims < DIM)[None, :]
    source = NEW + request.to(tl.int64) * new_strides[0] + head.to(tl.int64) * new_strides[1] + place.to(tl.int64) * new_strides[2]
    x = tl.load(source[:, None] + dims[None, :], mask=mask, other=0.0)
    target = PAGES + page.to(tl.int64) * page_strides[0] + head.to(tl.int64) * page_strides[1] + row.to(tl.int64) * page_strides[2]
    tl.store(target[:, None] + dims[None, :], _stored(x, INVERSE, head, scales, LIMIT, PAGES.dtype.element_ty), mask=mask)


@triton.jit
def append_pages(K, V, K_PAGES, V_PAGES, SLOTS, ENDS, TABLE, LENGTHS, K_INVERSE, V_INVERSE, k_strides, v_strides, k_page_strides,
                 v_page_strides, kv_heads, tokens, tokens_each, requests, page_size, width, k_scales, v_scales,
                 QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
                 LIMIT: tl.constexpr):
    """BLOCK_M tokens of one head; grid: blocks of tokens * heads.

    Request r has the tokens ENDS[r - 1] .. ENDS[r] - 1 of all, the last ones of slot SLOTS[r]; token t lies at place
    t % tokens_each of entry t // tokens_each of K and V. A token in front of its slot's first one is not written."""
    head = tl.program_id(0) % kv_heads
    token = tl.program_id(0) // kv_heads * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = token < tokens
    request = token * 0
    after = request + requests
    while tl.max(after - request, 0) > 0:  # the first request that ends behind the token
        middle = (request + after) // 2
        is_before = tl.load(ENDS + middle, mask=middle < requests, other=tokens) <= token
        is_open = request < after
        request, after = tl.where(is_open & is_before, middle + 1, request), tl.where(is_open & (is_before == 0), middle, after)
    inside = inside & (request < requests)
    slot = tl.load(SLOTS + request, mask=inside, other=0)
    position = tl.load(LENGTHS + slot, mask=inside, other=0) - (tl.load(ENDS + request, mask=inside, other=0) - token)
    inside = inside & (position >= 0)
    page = tl.load(TABLE + slot.to(tl.int64) * width + position // page_size, mask=inside, other=0)
    row = position % page_size
    entry = token // tokens_each
    place = token % tokens_each
    _write(K, K_PAGES, k_strides, k_page_strides, entry, place, head, page, row, inside, K_INVERSE, k_scales, QK_DIM, QK_PAD, LIMIT)
    if V_DIM > 0:
        _write(V, V_PAGES, v_strides, v_page_strides, entry, place, head, page, row, inside, V_INVERSE, v_scales, V_DIM, V_PAD, LIMIT)
