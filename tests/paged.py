"""Keys and values in pages for tests: shuffled pages whose unwritten slots are NaN, beside the dense tensors they hold.

Reads lengths and sizes; makes a PagedKV and dense keys and values, of which everything behind a length is NaN too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import PagedKV
from flexattn.runtime.reference import oracle
from tests.helpers import dense


class Paged(NamedTuple):
    """pages, and what they hold: k [batch, kv_heads, max_length, qk_dim], v with v_dim; `lengths` on the host."""

    pages: PagedKV
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]

    def request(self, b: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, [1, kv_heads, length, dim]."""
        n = self.lengths[b]
        return self.k[b : b + 1, :, :n], self.v[b : b + 1, :, :n]

    def placed(self, q: Tensor, mask: Any, score: Any) -> Iterator[tuple[int, list[Tensor], Any, Any]]:
        """Of each request with keys: its number, its own q, k, v, and the mods (or None) as they see its last positions in them."""
        for b, length in enumerate(self.lengths):
            offset = length - q.shape[2]
            own_mask = mask and (lambda _, h, i, j, b=b, offset=offset: mask(b, h, i + offset, j))
            own_score = score and (lambda s, _, h, i, j, b=b, offset=offset: score(s, b, h, i + offset, j))
            if length:
                yield b, [q[b : b + 1], *self.request(b)], own_mask, own_score


def assert_nothing_without_keys(paged: Paged, out: Tensor, lse: Tensor | None = None) -> None:
    """A request without a key has out 0 and lse -inf."""
    for b, length in enumerate(paged.lengths):
        if length == 0:
            assert (out[b] == 0).all() and (lse is None or torch.isneginf(lse[b]).all())


def narrowed(paged: Paged, dtype: torch.dtype, **scales: Tensor) -> Paged:
    """The same pages in 8 bits, and the float32 numbers that they hold then; `scales` are k_scale and v_scale of a PagedKV."""
    given = paged.pages
    pools = [x.to(dtype) for x in (given.k_pages, given.v_pages)]
    if given.k_pages.data_ptr() == given.v_pages.data_ptr():
        pools[1] = pools[0][..., : pools[1].shape[3]]
    factors = [scales[n][:, None, None] if n in scales else 1.0 for n in ("k_scale", "v_scale")]
    held = [x.to(dtype).float() * factor for x, factor in zip((paged.k, paged.v), factors)]
    return Paged(replace(given, k_pages=pools[0], v_pages=pools[1], **scales), *held, paged.lengths)


def assert_right(paged: Paged, q: Tensor, results: tuple[Tensor, Tensor], mask: Any = None, score: Any = None) -> None:
    """out and lse of each request against the oracle over its own keys; errors are of all requests together."""
    out, lse = results
    ours, fair = [], []
    assert_nothing_without_keys(paged, out, lse)
    for b, qkv, placed_mask, placed_score in paged.placed(q, mask, score):
        right, right_lse = oracle(*qkv, placed_mask, placed_score)
        empty = torch.isneginf(right_lse)
        assert torch.equal(torch.isneginf(lse[b : b + 1]), empty) and (out[b : b + 1][empty] == 0).all()
        torch.testing.assert_close(lse[b : b + 1].double()[~empty], right_lse[~empty], rtol=0, atol=3e-3)
        ours.append((out[b : b + 1].double() - right).abs().mean())
        others = dense([x.detach().clone().requires_grad_() for x in qkv], placed_mask, placed_score)
        fair.append(max((x.out.double() - right).abs().mean() for x in others))
    is_single = out.dtype == torch.float32
    error, allowed = torch.stack(ours).mean().item(), torch.stack(fair).mean().item()
    assert error <= (2 if is_single else 1.1) * allowed + (1e-7 if is_single else 1e-9), (error, allowed)


def masks(device: torch.device) -> dict[str, Any]:
    """Of logical positions below 2100."""
    ids = (torch.arange(2100, device=device) // 37).int()
    return {
        "none": None,
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < 300),
        "documents": lambda b, h, i, j: ids[i] == ids[j],
        "remainder": lambda b, h, i, j: (i + j + h) % 3 != 1,
    }


def scores(device: torch.device) -> dict[str, Any]:
    """Of up to 8 query heads."""
    slopes, cap = torch.rand(8, device=device), 5.0
    return {
        "soft-cap": lambda s, b, h, i, j: cap * torch.tanh(s / cap),
        "ALiBi": lambda s, b, h, i, j: s + slopes[h] * (j - i) * 0.01,
    }


def make_paged(
    lengths: tuple[int, ...],
    page_size: int,
    *,
    kv_heads: int = 2,
    dims: tuple[int, int] = (32, 24),
    max_length: int | None = None,
    spare: int = 3,
    layout: str = "HND",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    order: int = 0,
    v_in_k: bool = False,
) -> Paged:
    """Random keys and values in pages.

    Args:
        lengths: of the requests.
        page_size: tokens of a page.
        max_length: columns of the table times page_size, at least; None: the longest request.
        spare: pages of the pool that nobody has.
        layout: 'HND' or 'NHD', of the pool in memory.
        seed: of what the tokens are.
        order: of the pages in the pool; another number puts the same tokens elsewhere.
        v_in_k: values are the first dims of keys, in the same memory.
    """
    torch.manual_seed(seed)
    width = max(1, -(-max(*lengths, max_length or 0, 0) // page_size))
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts) + spare
    places = torch.randperm(total, generator=torch.Generator().manual_seed(order)).tolist()
    table = torch.full((len(lengths), width), total + 1_000_000, dtype=torch.int32)  # what nobody may read
    dense, pools = [], []
    for dim in dims[: 1 if v_in_k else 2]:
        x = torch.randn(len(lengths), kv_heads, width * page_size, dim).to(dtype)
        pool = torch.full((total, kv_heads, page_size, dim), math.nan).to(dtype)
        at = iter(places)
        for b, n in enumerate(lengths):
            x[b, :, n:] = math.nan
            for i in range(counts[b]):
                page = table[b, i] = next(at)
                pool[page] = x[b, :, i * page_size : (i + 1) * page_size]
        dense.append(x.to(device))
        pools.append(pool.transpose(1, 2).contiguous().to(device) if layout == "NHD" else pool.to(device))
    if v_in_k:
        dense, pools = ([x[0], x[0][..., : dims[1]]] for x in (dense, pools))
    on_device: Any = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages = PagedKV.from_table(pools[0], pools[1], table.to(device), on_device, layout=layout)
    return Paged(pages, dense[0], dense[1], lengths)


def query_of(paged: Paged, q_heads: int, q_len: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """A random query [batch, q_heads, q_len, qk_dim] for such pages."""
    torch.manual_seed(q_len)
    return torch.randn(len(paged.lengths), q_heads, q_len, paged.k.shape[3]).to(paged.k.device, dtype or paged.k.dtype)
