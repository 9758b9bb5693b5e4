"""PagedKV and paged_attention: forms that other servers use, data types, and the error of each thing that does not fit."""

from __future__ import annotations

import math

import pytest
import torch

import flexattn
from flexattn import AuxRequest, PagedKV, flex_attention, paged_attention
from flexattn.errors import CallError, DeviceError, DTypeError, OptionError, ShapeError, UnsupportedError
from tests.helpers import assert_explains, causal, on_devices
from tests.paged import make_paged, query_of


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---------------------------------------------------------------- forms
@on_devices
def test_csr_and_table_are_the_same(device) -> None:
    """FlashInfer's (indptr, indices, last_page_len), over a stacked NHD pool, against the table; a request without a page too."""
    paged = make_paged((37, 0, 64, 5), 16, device=device, dims=(24, 24))
    table, counts = paged.pages.page_indices.reshape(4, -1), [3, 0, 4, 1]
    indices = torch.cat([table[b, :n] for b, n in enumerate(counts)])
    stacked = torch.stack([paged.pages.k_pages, paged.pages.v_pages], 1).transpose(2, 3).contiguous()
    last = ints(5, 0, 16, 5, device=device)
    csr = PagedKV.from_csr(
        stacked[:, 0], stacked[:, 1], ints(0, 3, 3, 7, 8, device=device), indices, last, layout="NHD", max_length=64
    )
    assert csr.k_pages.untyped_storage().data_ptr() == stacked.untyped_storage().data_ptr()
    assert csr.kv_lengths.tolist() == [37, 0, 64, 5]
    q = query_of(paged, 4, 3)
    assert torch.equal(*(paged_attention(q, pages, mask_mod=causal) for pages in (paged.pages, csr)))


def test_csr_without_a_length_allows_for_all_pages() -> None:
    pool = torch.ones(4, 1, 16, 8)
    pages = PagedKV.from_csr(pool, pool, ints(0, 2, 3), ints(2, 0, 1), ints(4, 16))
    assert pages.max_length == 48
    assert (paged_attention(torch.ones(2, 1, 1, 8), pages) == 1).all()


@on_devices
def test_what_is_written_in_place_is_seen(device) -> None:
    """Table and lengths of a view are the caller's own."""
    pool = torch.arange(4.0, device=device)[:, None, None, None].expand(4, 1, 16, 8).contiguous()
    table, lengths = ints(1, 2, device=device).reshape(1, 2), ints(16, device=device)
    pages, q = PagedKV.from_table(pool, pool, table, lengths), torch.zeros(1, 1, 1, 8, device=device)
    assert (paged_attention(q, pages) == 1).all()
    table.copy_(ints(3, 0, device=device))
    assert (paged_attention(q, pages) == 3).all()
    lengths.fill_(32)
    assert (paged_attention(q, pages) == 1.5).all()


@on_devices
def test_lse_and_an_offset_of_ones_own(device) -> None:
    paged = make_paged((40, 23), 8, device=device)
    q, offset = query_of(paged, 2, 3), torch.tensor([10, 4], device=device)
    out, aux = paged_attention(
        q, paged.pages, mask_mod=causal, q_offset=offset, return_aux=AuxRequest(lse=True, max_scores=True)
    )
    for b in range(2):
        k, v = paged.request(b)
        want, extra = flex_attention(
            q[b : b + 1],
            k,
            v,
            mask_mod=causal,
            q_offset=int(offset[b]),
            return_aux=AuxRequest(lse=True, max_scores=True),
        )
        torch.testing.assert_close(out[b : b + 1], want)
        torch.testing.assert_close(aux.lse[b : b + 1], extra.lse)
        torch.testing.assert_close(aux.max_scores[b : b + 1], extra.max_scores)


@on_devices
@pytest.mark.parametrize("q_len", [1, 70])
def test_eight_bit_pages_with_scales_by_head(device, q_len) -> None:
    """K and V of e4m3, scales of their own that differ by head: as the dense call over what they stand for."""
    torch.manual_seed(0)
    k, v = (torch.randn(6, 2, 16, 32, device=device) * 3 for _ in range(2))
    k_scale, v_scale = torch.tensor([0.5, 2.0], device=device), torch.tensor([0.25, 3.0], device=device)
    narrow = [(x / s[:, None, None]).to(torch.float8_e4m3fn) for x, s in ((k, k_scale), (v, v_scale))]
    table = ints(3, 0, 5, 1, 2, 4, device=device).reshape(1, 6)
    pages = PagedKV.from_table(*narrow, table, ints(90, device=device), k_scale=k_scale, v_scale=v_scale)
    wide = [(x.float() * s[:, None, None])[table[0]].transpose(0, 1).reshape(1, 2, 96, 32)[:, :, :90]
            for x, s in zip(narrow, (k_scale, v_scale))]  # fmt: skip
    q = torch.randn(1, 6, q_len, 32, device=device, dtype=torch.bfloat16)
    out = paged_attention(q, pages, mask_mod=causal)
    want = flex_attention(q.float(), *wide, mask_mod=causal, q_offset=90 - q_len, enable_gqa=True)
    fair = flex_attention(q, *(x.bfloat16() for x in wide), mask_mod=causal, q_offset=90 - q_len, enable_gqa=True)
    error, allowed = ((x.float() - want).abs().mean().item() for x in (out, fair))
    assert error <= 1.1 * allowed, (error, allowed)


def test_explain_tells_of_pages() -> None:
    paged = make_paged((40, 23), 8)
    text = flexattn.explain(query_of(paged, 2, 3), paged.pages, mask_mod=causal)
    assert "pages  of 8 tokens for 2 requests of at most 40" in text and "kv_idx < cap0[b]" in text


# ---------------------------------------------------------------- errors
def test_wrong_pages() -> None:
    pool, table, lengths = torch.ones(4, 2, 16, 8), ints(0, 1).reshape(1, 2), ints(20)
    right = {"k_pages": pool, "v_pages": pool, "page_table": table, "kv_lengths": lengths}
    cases = [
        ({"k_pages": [1]}, CallError, "k_pages must be a torch.Tensor"),
        ({"k_pages": pool[0]}, ShapeError, "must be 4-D"),
        ({"v_pages": pool[:3]}, ShapeError, "same pages, heads and page size"),
        ({"k_pages": pool[:, :, :0], "v_pages": pool[:, :, :0]}, ShapeError, "pages must hold something"),
        ({"v_pages": pool.half()}, DTypeError, "one data type and device"),
        ({"k_pages": pool.transpose(2, 3), "v_pages": pool.transpose(2, 3)}, ShapeError, "must have stride 1"),
        ({"k_pages": pool.clone().requires_grad_()}, UnsupportedError, "has no gradient"),
        ({"page_table": table[0]}, ShapeError, "page_table must be [batch, pages]"),
        ({"page_table": table.long()}, DTypeError, "page_indices must be int32"),
        ({"kv_lengths": lengths.long()}, DTypeError, "kv_lengths must be int32"),
        ({"kv_lengths": ints(1, 2)}, ShapeError, "one entry a request"),
        ({"kv_lengths": 20}, CallError, "kv_lengths must be a torch.Tensor"),
        ({"page_table": table.to("meta")}, DeviceError, "must be where the pages are"),
        ({"k_scale": torch.ones(3)}, ShapeError, "k_scale must be float32, [1] or [kv_heads]"),
        ({"v_scale": torch.ones(2, dtype=torch.float64)}, ShapeError, "v_scale must be float32"),
        ({"layout": "HDN"}, OptionError, "layout must be 'HND' or 'NHD'"),
    ]
    for change, error, words in cases:
        with pytest.raises(error) as raised:
            PagedKV.from_table(**{**right, **change})
        assert_explains(raised.value, words)
    with pytest.raises(ShapeError, match="one entry a request, and one more"):
        PagedKV.from_csr(pool, pool, ints(0, 2), ints(0, 1), ints(3, 4))
    with pytest.raises(OptionError, match="max_length must be an int of at least 0"):
        PagedKV.from_csr(pool, pool, ints(0, 2), ints(0, 1), ints(3), max_length=-1)


def test_wrong_calls() -> None:
    paged = make_paged((40, 23), 8)
    q = query_of(paged, 4, 3)
    cases = [
        (q, paged.k, CallError, "pages must be a PagedKV"),
        (q[:1], paged.pages, ShapeError, "one entry a request"),
        (q[..., :16], paged.pages, ShapeError, "the pages' embedding dimension"),
        (q.half(), paged.pages, DTypeError, "query must have the data type of the pages"),
        (q[:, :3], paged.pages, ShapeError, "multiple of kv heads"),
        (q[0], paged.pages, UnsupportedError, "must be 4D tensors"),
        (3, paged.pages, CallError, "query must be a torch.Tensor"),
    ]
    for query, pages, error, words in cases:
        with pytest.raises(error) as raised:
            paged_attention(query, pages)
        assert_explains(raised.value, words)


def test_a_gradient_reaches_query() -> None:
    """Pages have none; query's is that of the dense call."""
    paged = make_paged((40,), 8)
    q = query_of(paged, 4, 5).requires_grad_()
    again = q.detach().clone().requires_grad_()
    paged_attention(q, paged.pages, mask_mod=causal).sin().sum().backward()
    flex_attention(again, *paged.request(0), mask_mod=causal, q_offset=35, enable_gqa=True).sin().sum().backward()
    torch.testing.assert_close(q.grad, again.grad)
    assert math.isfinite(q.grad.sum().item()) and q.grad.abs().max() > 0
