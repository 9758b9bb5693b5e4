"""Caches in pages: where pages lie, how large they are and what lies in unwritten slots changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

import flexattn
from flexattn import PagedKV, flex_attention, paged_attention
from tests.cases.bounds import assert_each_within
from tests.helpers import causal, exact, on_devices, window
from tests.paged import Paged, assert_nothing_without_keys, make_paged, query_of


def alibi(score, b, h, q_idx, kv_idx):
    """A slope over logical positions."""
    return score - 0.1 * (q_idx - kv_idx)


def check(paged: Paged, q: torch.Tensor, out: torch.Tensor, mask=causal, score=alibi) -> None:
    """Each request against the oracle on its own dense keys."""
    assert_nothing_without_keys(paged, out)
    for b, qkv, own_mask, own_score in paged.placed(q, mask, score):
        assert_each_within(f"request {b}", out[b : b + 1], exact(qkv, own_mask, own_score).out)


# ---------------------------------------------------------------- C39: decode from a prefill mask
@on_devices
@pytest.mark.parametrize("mask_heads", [None, 4])
def test_c39_a_prefill_mask_read_from_an_offset(device, mask_heads) -> None:
    """One query at p, by q_offset of a mask made for the whole prefill, is row p of full attention; as a number and as a tensor."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 512, 32, device=device) for _ in range(3))
    near = lambda b, h, i, j: (i >= j) & (i - j < 200)
    mask = flexattn.create_block_mask(near, None, mask_heads, 512, 512, device=device)
    want = exact([q, k, v], near).out
    for p in (0, 1, 127, 128, 129, 300, 511):
        for offset in (p, torch.tensor([p, p], device=device)):
            out = flex_attention(q[:, :, p : p + 1], k, v, block_mask=mask, q_offset=offset)
            assert_each_within(f"row {p}", out, want[:, :, p : p + 1])


# ---------------------------------------------------------------- C41: a static cache
@on_devices
@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_c41_a_static_cache_by_its_lengths(device, q_len, fresh_stats) -> None:
    """What lies behind kv_lengths is NaN and changes nothing; lengths are written in place, and nothing is built again."""
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    torch.manual_seed(1)
    q, k = torch.randn(3, 4, q_len, 32, device=device), torch.randn(3, 2, 2048, 32, device=device)
    v = torch.randn(3, 2, 2048, 24, device=device)
    builds = None
    for now in ((100, 2048, 71), (101, 2047, 70), (2048, 128, 129)):
        lengths.copy_(torch.tensor(now))
        behind = (torch.arange(2048, device=device)[None, :] >= lengths[:, None])[:, None, :, None]
        keys, values = (x.masked_fill(behind, math.nan) for x in (k, v))
        out = flex_attention(
            q, keys, values, alibi, mask_mod=causal, enable_gqa=True, q_offset=lengths - q_len, kv_lengths=lengths
        )
        check(Paged(None, k, v, now), q, out)  # type: ignore[arg-type]
        total = flexattn.stats().builds.total()
        assert builds in (None, total)
        builds = total


# ---------------------------------------------------------------- C43: slots of a cache, one freed and its pages used again
@on_devices
@pytest.mark.parametrize("q_len", [1, 20])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_c43_slots_and_pages(device, q_len, layout) -> None:
    for order in range(2):
        paged = make_paged((37, 100, 64), 16, spare=49, layout=layout, order=order, device=device)
        q = query_of(paged, 4, q_len)
        check(paged, q, paged_attention(q, paged.pages, alibi, mask_mod=causal))


# ---------------------------------------------------------------- C04, C44, C68: any page size and length
@on_devices
@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 512, 672])
def test_c44_page_sizes(device, page_size) -> None:
    """Lengths below a tile, of whole pages and not, of no key; unwritten slots hold NaN and the table's rest names no page."""
    lengths = (1, 15, 16, 17, 0, 64, 1000)
    paged = make_paged(lengths, page_size, device=device)
    for q_len in (1, 4):
        q = query_of(paged, 4, q_len)
        some = [b for b, n in enumerate(lengths) if n >= q_len or n == 0]
        out = paged_attention(q, paged.pages, alibi, mask_mod=causal)
        for b in some:
            one = Paged(paged.pages, paged.k[b : b + 1], paged.v[b : b + 1], lengths[b : b + 1])
            check(one, q[b : b + 1], out[b : b + 1])
    elsewhere = make_paged(lengths, page_size, device=device, order=1)
    assert torch.equal(out, paged_attention(q, elsewhere.pages, alibi, mask_mod=causal))


@on_devices
def test_c44_the_plan_is_as_large_as_the_pages_used(device) -> None:
    """A pool of a million pages, of which two are used: a call allocates nothing that grows with the pool."""
    pool = torch.zeros(1_000_000, 1, 1, 8, device=device, dtype=torch.float16)
    pool[999_999] = 1.0
    table = torch.tensor([[999_999, 0]], dtype=torch.int32, device=device)
    pages = PagedKV.from_table(pool, pool, table, torch.tensor([1], dtype=torch.int32, device=device))
    q = torch.ones(1, 1, 1, 8, device=device, dtype=torch.float16)
    if device == "cpu":
        from torch.utils._python_dispatch import TorchDispatchMode

        class Largest(TorchDispatchMode):
            most = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                for x in result if isinstance(result, (tuple, list)) else [result]:
                    is_new = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != pool.data_ptr()
                    self.most = max(self.most, x.numel() if is_new else 0)
                return result

        with Largest() as seen:
            out = paged_attention(q, pages)
        assert 0 < seen.most < 1000
    else:
        paged_attention(q, pages)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = paged_attention(q, pages)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert (out == 1).all()


# ---------------------------------------------------------------- C46: offsets of more than 32 bits
@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 100])
def test_c46_a_pool_of_more_than_2_to_the_31_elements(q_len) -> None:
    count, value = 131_080, 0.625
    pool = torch.empty(2, count, 8, 16, 128, dtype=torch.bfloat16, device="cuda")
    for last in (count - 1, 0):
        pool[:, last] = value
        pages = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[last]], [16])]
        q = torch.randn(1, 8, q_len, 128, dtype=torch.bfloat16, device="cuda")
        out = paged_attention(q, PagedKV.from_table(pool[0], pool[1], *pages), q_offset=0)
        assert (out == value).all()


# ---------------------------------------------------------------- masks over a paged cache
@on_devices
def test_a_block_mask_of_the_whole_cache(device) -> None:
    """A mask made once for all positions serves every step."""
    paged = make_paged((40, 129, 7), 16, max_length=160, device=device)
    mask = flexattn.create_block_mask(window(30), None, None, 160, 160, device=device)
    for q_len in (1, 5):
        q = query_of(paged, 6, q_len)
        check(paged, q, paged_attention(q, paged.pages, alibi, mask), window(30))
        both = paged_attention(q, paged.pages, block_mask=mask, mask_mod=lambda b, h, i, j: (j % 2) == (i % 2))
        check(paged, q, both, lambda b, h, i, j: window(30)(b, h, i, j) & ((j % 2) == (i % 2)), lambda s, *_: s)
