"""The decode kernel over pages on a GPU: against the oracle, in CUDA graphs, past 32 bits, and that where pages lie changes no bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, PagedKV, paged_attention
from flexattn.runtime.reference import oracle
from tests.paged import Paged, assert_nothing_without_keys, assert_right, make_paged, masks, narrowed, query_of, scores

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_memory_is_nan")]
GPU = torch.device("cuda", 0)
PAGE_SIZES = [1, 8, 16, 24, 64, 512, 672]
LENGTHS = (1, 15, 16, 0, 17, 64, 1000)


def paged_of(lengths: tuple[int, ...], page_size: int, **more: Any) -> Paged:
    given = {"dims": (128, 128), "dtype": torch.bfloat16, "device": GPU, **more}
    return make_paged(lengths, page_size, **given)


def decode(q: Tensor, pages: PagedKV, mask: Any = None, score: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    before = flexattn.stats().launches["decode"]
    options = {"BACKEND": "TRITON_DECODE"} | options
    out, aux = paged_attention(q, pages, score, mask_mod=mask, kernel_options=options, return_aux=AuxRequest(lse=True))
    assert flexattn.stats().launches["decode"] == before + 1
    return out, aux.lse


def check(paged: Paged, q: Tensor, mask: Any = None, score: Any = None, **options: Any) -> None:
    assert_right(paged, q, decode(q, paged.pages, mask, score, **options), mask, score)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_any_size(page_size: int, dtype: torch.dtype) -> None:
    paged = paged_of(LENGTHS, page_size, dtype=dtype)
    check(paged, query_of(paged, 8, 1))
    check(paged, query_of(paged, 8, 4), masks(GPU)["causal"], SPLIT_KV=3)
    check(paged, query_of(paged, 8, 1), SPLIT_KV=1)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "remainder"])
def test_masks(name: str, page_size: int, layout: str) -> None:
    paged = paged_of((1300, 700, 0, 2048), page_size, layout=layout)
    check(paged, query_of(paged, 8, 3), masks(GPU)[name])


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", ["soft-cap", "ALiBi"])
def test_scores(name: str, page_size: int) -> None:
    paged = paged_of((1300, 700), page_size)
    check(paged, query_of(paged, 8, 2), masks(GPU)["causal"], scores(GPU)[name])


@pytest.mark.parametrize("group", [1, 5, 6, 7, 12, 64])
@pytest.mark.parametrize("q_len", [1, 4, 17, 64])
def test_queries_and_groups_of_any_number(q_len: int, group: int) -> None:
    paged = paged_of((1111, 64, 130), 16)
    check(paged, query_of(paged, 2 * group, q_len), masks(GPU)["causal"])


@pytest.mark.parametrize("dims", [(64, 64), (64, 96), (80, 40), (96, 96), (128, 64), (256, 256), (512, 512)])
def test_head_dims(dims: tuple[int, int]) -> None:
    paged = paged_of((999, 31), 16, dims=dims)
    check(paged, query_of(paged, 8, 2), masks(GPU)["causal"])


@pytest.mark.parametrize("page_size", [16, 24, 64])
@pytest.mark.parametrize("v_in_k", [True, False])
@pytest.mark.parametrize("group", [16, 20, 128])
def test_latent_attention(group: int, v_in_k: bool, page_size: int) -> None:
    paged = paged_of((3000, 0, 777), page_size, kv_heads=1, dims=(576, 512), v_in_k=v_in_k)
    check(paged, query_of(paged, group, 1))
    check(paged, query_of(paged, group, 2), masks(GPU)["causal"], scores(GPU)["soft-cap"], SPLIT_KV=5)
    check(paged, query_of(paged, group, 1), SPLIT_KV=1)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 512])
def test_where_pages_lie_changes_no_bit(page_size: int) -> None:
    results = []
    for order in range(3):
        paged = paged_of((9000, 413), page_size, order=order, spare=5 * order)
        results.append(decode(query_of(paged, 8, 3), paged.pages, masks(GPU)["window"]))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_splits_cost_no_accuracy() -> None:
    paged = paged_of((20000,), 16)
    q = query_of(paged, 8, 1)
    right, _ = oracle(q, *paged.request(0))
    error = lambda n: (decode(q, paged.pages, SPLIT_KV=n)[0].double() - right).abs().mean().item()
    whole = error(1)
    assert all(error(splits) <= 1.05 * whole for splits in (2, 7, 33, 200))


def test_offsets_past_32_bits() -> None:
    """A pool of 5 GiB whose pages are 2^21 elements apart, of which the last ones are used; one whose rows are 2^23 apart."""
    pool = torch.empty(1281 << 21, dtype=torch.bfloat16, device=GPU)
    for shape, strides in (
        ((1280, 2, 16, 64), (1 << 21, 2048, 128, 1)),
        ((3, 2, 100, 64), (1 << 7, 1 << 11, 8 << 20, 1)),
    ):
        k, v = (pool.as_strided(shape, strides, offset) for offset in (0, 64))
        for x in (k, v):
            x.copy_(torch.randn(shape))
        used = torch.tensor([shape[0] - 1, 0, shape[0] - 2], dtype=torch.int32, device=GPU)[None]
        n = 3 * shape[2] - 5
        pages = PagedKV.from_table(k, v, used, torch.tensor([n], dtype=torch.int32, device=GPU))
        q = torch.randn(1, 8, 1, 64, device=GPU, dtype=torch.bfloat16)
        held = [x[used[0].long()].transpose(0, 1).flatten(1, 2)[None, :, :n] for x in (k, v)]
        torch.testing.assert_close(decode(q, pages)[0].double(), oracle(q, *held)[0], atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    "dims, v_in_k", [((128, 128), False), ((64, 96), False), ((576, 512), True), ((576, 512), False)]
)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_of_eight_bits(dtype: torch.dtype, kv_dtype: torch.dtype, dims: tuple[int, int], v_in_k: bool) -> None:
    """Read as they are; queries and probabilities alone are rounded."""
    kv_heads = 1 if v_in_k else 2
    wide = paged_of(LENGTHS, 16, dims=dims, v_in_k=v_in_k, kv_heads=kv_heads)
    scales = {"k_scale": torch.tensor([0.7, 1.3][:kv_heads], device=GPU), "v_scale": torch.tensor([2.5], device=GPU)}
    paged = narrowed(wide, kv_dtype, **scales)
    for q_len, group, mask in ((1, 4, None), (3, 7, masks(GPU)["causal"]), (1, 64, None)):
        q = query_of(paged, kv_heads * group, q_len, dtype=dtype)
        out, lse = decode(q, paged.pages, mask)
        assert_nothing_without_keys(paged, out, lse)
        for b, qkv, placed_mask, _ in paged.placed(q, mask, None):
            right, right_lse = oracle(*qkv, placed_mask)
            empty = torch.isneginf(right_lse)
            torch.testing.assert_close(out[b : b + 1].double(), right, atol=2e-2, rtol=1e-2)
            torch.testing.assert_close(
                lse[b : b + 1].double()[~empty], right_lse.double()[~empty], atol=3e-3, rtol=1e-3
            )


def test_a_graph_follows_lengths_and_page_numbers() -> None:
    paged = paged_of((4096, 2000), 16)
    pages, q = paged.pages, query_of(paged, 8, 1)
    decode(q, pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode(q, pages)
    for lengths in ((4096, 2000), (1, 17), (0, 1999), (2222, 64)):
        pages.kv_lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        torch.full((1 << 20,), math.nan, device=GPU)  # memory that the graph does not own
        for _ in range(3):
            graph.replay()
        for b, n in enumerate(lengths):
            right, right_lse = oracle(q[b : b + 1], paged.k[b : b + 1, :, :n], paged.v[b : b + 1, :, :n])
            torch.testing.assert_close(out[b : b + 1].double(), right, atol=2e-2, rtol=0)
            torch.testing.assert_close(lse[b : b + 1].double(), right_lse, atol=2e-3, rtol=0)


def test_two_graphs_that_run_at_once() -> None:
    """Captured on one stream, replayed on two: each has parts of its own."""
    paged = paged_of((30000,), 16)
    queries = [query_of(paged, 8, n) for n in (1, 2)]
    wanted = [decode(q, paged.pages)[0].clone() for q in queries]
    graphs, outs = [torch.cuda.CUDAGraph() for _ in queries], []
    for graph, q in zip(graphs, queries):
        with torch.cuda.graph(graph):
            outs.append(decode(q, paged.pages)[0])
    streams = [torch.cuda.Stream() for _ in queries]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted))
