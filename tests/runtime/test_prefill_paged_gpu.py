"""The forward kernel for Hopper over pages: against the oracle, in CUDA graphs, and that it makes the bits of dense keys."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, PagedKV, flex_attention, paged_attention
from flexattn.runtime.reference import oracle
from tests.paged import Paged, assert_right, make_paged, masks, query_of, scores
from tests.runtime.test_hopper_gpu import finished

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
    pytest.mark.usefixtures("fresh_memory_is_nan"),
]
GPU = torch.device("cuda", 0)
PAGE_SIZES = [8, 16, 48, 64, 128, 256, 672]
ASKED = {"warp_specialized": True}
LENGTHS = (1, 127, 128, 0, 129, 643, 1000)


def paged_of(lengths: tuple[int, ...], page_size: int, **more: Any) -> Paged:
    given = {"dims": (128, 128), "dtype": torch.bfloat16, "device": GPU, **more}
    return make_paged(lengths, page_size, **given)


def prefill(q: Tensor, pages: PagedKV, mask: Any = None, score: Any = None, **given: Any) -> tuple[Tensor, Tensor]:
    """out and lse of the kernel that reads pages: nothing is gathered, and no other kernel attends."""
    before, given = flexattn.stats().launches, {"return_aux": AuxRequest(lse=True), "kernel_options": ASKED, **given}
    with patch.object(PagedKV, "gathered", None):
        out, aux = finished(lambda: paged_attention(q, pages, score, mask_mod=mask, **given))
    launches = flexattn.stats().launches
    assert launches["hopper_forward"] == before["hopper_forward"] + 1
    return out, aux.lse


def check(paged: Paged, q: Tensor, mask: Any = None, score: Any = None) -> None:
    assert_right(paged, q, prefill(q, paged.pages, mask, score), mask, score)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_any_size(page_size: int, dtype: torch.dtype) -> None:
    paged = paged_of(LENGTHS, page_size, dtype=dtype)
    check(paged, query_of(paged, 8, 129))
    check(paged, query_of(paged, 8, 200), masks(GPU)["causal"])


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "remainder"])
def test_masks(name: str, page_size: int, layout: str) -> None:
    paged = paged_of((1300, 700, 0, 2048), page_size, layout=layout)
    check(paged, query_of(paged, 8, 333), masks(GPU)[name])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", ["soft-cap", "ALiBi"])
def test_scores(name: str, page_size: int) -> None:
    paged = paged_of((1300, 700), page_size)
    check(paged, query_of(paged, 8, 515), masks(GPU)["causal"], scores(GPU)[name])


@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("q_len", [129, 191, 1025, 2047])
def test_queries_and_groups_of_any_number(q_len: int, group: int) -> None:
    paged = paged_of((2099, 64, 130), 16)
    check(paged, query_of(paged, 2 * group, q_len), masks(GPU)["causal"])


@pytest.mark.parametrize("page_size", [8, 48, 64])
@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (96, 80), (192, 128), (256, 256)])
def test_head_dims(dims: tuple[int, int], page_size: int) -> None:
    paged = paged_of((999, 31, 2000), page_size, dims=dims)
    check(paged, query_of(paged, 8, 300), masks(GPU)["causal"])
    check(paged, query_of(paged, 8, 65), masks(GPU)["remainder"])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)])
def test_many_keys(dims: tuple[int, int]) -> None:
    """Three warpgroups of narrow heads, and spans of many full tiles."""
    paged = paged_of((20000, 9001), 16, dims=dims)
    check(paged, query_of(paged, 4, 400), masks(GPU)["causal"])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_where_pages_lie_changes_no_bit(page_size: int) -> None:
    """Nor that keys lie in pages: dense ones of zeros behind the length give the same."""
    results = []
    for order in range(3):
        paged = paged_of((9000, 413), page_size, order=order, spare=5 * order)
        q = query_of(paged, 8, 300)
        results.append(prefill(q, paged.pages, masks(GPU)["causal"]))
    k, v = paged.pages.gathered(torch.bfloat16)
    lengths = paged.pages.kv_lengths
    out, aux = flex_attention(
        q, k, v, mask_mod=masks(GPU)["causal"], q_offset=lengths - 300, kv_lengths=lengths, enable_gqa=True,
        kernel_options=ASKED, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    for other in (*results[1:], (out, aux.lse)):
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_stacked_pools(layout: str) -> None:
    paged = paged_of((1000, 300), 32)
    pools = [x if layout == "HND" else x.transpose(1, 2) for x in (paged.pages.k_pages, paged.pages.v_pages)]
    stacked = torch.stack(pools, 1)
    table = paged.pages.page_indices.reshape(2, -1)
    pages = PagedKV.from_table(stacked[:, 0], stacked[:, 1], table, paged.pages.kv_lengths, layout=layout)
    q = query_of(paged, 8, 257)
    assert all(map(torch.equal, prefill(q, pages, masks(GPU)["causal"]), prefill(q, paged.pages, masks(GPU)["causal"])))


def test_an_offset_of_ones_own() -> None:
    paged = paged_of((1500, 700), 16)
    q, offset = query_of(paged, 8, 300), torch.tensor([1000, 17], device=GPU)
    out, lse = prefill(q, paged.pages, lambda b, h, i, j: i >= j, q_offset=offset)
    for b, n in enumerate((1000, 17)):
        right, right_lse = oracle(q[b : b + 1], *paged.request(b), lambda _, h, i, j, n=n: i + n >= j)
        torch.testing.assert_close(out[b : b + 1].double(), right, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse[b : b + 1].double(), right_lse, atol=3e-3, rtol=0)


def test_a_graph_follows_lengths_and_page_numbers() -> None:
    paged = paged_of((4096, 2000), 16)
    pages, q = paged.pages, query_of(paged, 8, 200)
    causal = lambda b, h, i, j: i >= j
    call = lambda: paged_attention(q, pages, mask_mod=causal, kernel_options=ASKED, return_aux=AuxRequest(lse=True))
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, aux = call()
    for lengths in ((4096, 2000), (1, 17), (0, 1999), (2222, 64)):
        pages.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        torch.full((1 << 20,), math.nan, device=GPU)  # memory that the graph does not own
        for _ in range(3):
            finished(graph.replay)
        assert_right(paged._replace(lengths=lengths), q, (out, aux.lse), causal)


@pytest.mark.parametrize(
    "page_size, dtype", [(1, torch.bfloat16), (5, torch.bfloat16), (12, torch.float16), (16, torch.float32)]
)
def test_what_it_cannot_read_is_gathered(page_size: int, dtype: torch.dtype) -> None:
    paged = paged_of((700, 130), page_size, dtype=dtype)
    q = query_of(paged, 8, 150)
    out, aux = paged_attention(q, paged.pages, mask_mod=masks(GPU)["causal"], return_aux=AuxRequest(lse=True))
    assert_right(paged, q, (out, aux.lse), masks(GPU)["causal"])
