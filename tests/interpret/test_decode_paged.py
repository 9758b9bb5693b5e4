"""The decode kernel over keys and values in pages against the float64 oracle over the same keys, in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, PagedKV, paged_attention
from flexattn.runtime.reference import oracle
from tests.helpers import dense
from tests.paged import Paged, assert_nothing_without_keys, make_paged, narrowed, query_of
from tests.runtime.kernel_cases import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
PAGE_SIZES = [1, 8, 16, 24, 64, 512, 672]
LENGTHS = (1, 15, 0, 16, 17, 64, 130)
IDS = (torch.arange(1100) // 23).int()
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.7, 0.3, 0.9, 0.2, 0.4, 0.6, 0.8, 0.01, 0.05])
CAP = 2.0
MASKS: dict[str, Any] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < 33),
    "documents": lambda b, h, i, j: IDS[i] == IDS[j],
    "remainder": lambda b, h, i, j: (i + j + h) % 3 != 1,
}
SCORES: dict[str, Any] = {
    "soft-cap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
    "ALiBi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
}


def decode(
    q: Tensor, pages: PagedKV, mask: Any = None, score: Any = None, splits: int | None = None
) -> tuple[Tensor, Any]:
    """(out, aux) by the decode kernel, which is proved to have read the pages."""
    options = {"BACKEND": "TRITON_DECODE"} | ({} if splits is None else {"SPLIT_KV": splits})
    before = flexattn.stats().launches
    aux = AuxRequest(lse=True, max_scores=True)
    out, aux = paged_attention(q, pages, score, mask_mod=mask, return_aux=aux, kernel_options=options)
    launched = flexattn.stats().launches - before
    assert launched["decode"] == 1 and set(launched) <= {"decode", "merge"}
    return out, aux


def check(paged: Paged, q: Tensor, mask: Any = None, score: Any = None, splits: int | None = None) -> None:
    """Each request against the oracle over its own keys; its queries are the last of them."""
    out, aux = decode(q, paged.pages, mask, score, splits)
    assert_nothing_without_keys(paged, out, aux.lse)
    for b, qkv, placed_mask, placed_score in paged.placed(q, mask, score):
        right, lse = oracle(*qkv, placed_mask, placed_score)
        fair = (
            []
            if out.dtype == torch.float32
            else dense([x.clone().requires_grad_() for x in qkv], placed_mask, placed_score)
        )
        assert_close(f"out of {b}", out[b : b + 1], right, [right, *(x.out.detach() for x in fair)])
        assert_close(f"lse of {b}", aux.lse[b : b + 1], lse, [lse, *(x.lse.detach() for x in fair)])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_any_size(page_size: int) -> None:
    paged = make_paged(LENGTHS, page_size, kv_heads=1)
    check(paged, query_of(paged, 3, 1), splits=2)
    check(paged, query_of(paged, 1, 4), MASKS["window"], splits=1)


@pytest.mark.parametrize("page_size", [1, 16, 24, 672])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_long_rows(page_size: int, layout: str) -> None:
    paged = make_paged((1000, 700), page_size, layout=layout)
    check(paged, query_of(paged, 4, 1), MASKS["causal"], splits=3)


@pytest.mark.parametrize("page_size", [16, 24])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, page_size: int) -> None:
    paged = make_paged((90, 41, 0), page_size)
    for splits in (1, 3):
        check(paged, query_of(paged, 4, 3), MASKS[name], splits=splits)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, page_size: int) -> None:
    paged = make_paged((70, 33), page_size)
    check(paged, query_of(paged, 6, 2), MASKS["causal"], SCORES[name], splits=2)


@pytest.mark.parametrize("q_len, group", [(1, 1), (1, 5), (4, 6), (17, 7), (64, 1), (1, 64), (4, 12)])
def test_queries_and_groups_of_any_number(q_len: int, group: int) -> None:
    paged = make_paged((101, 65), 8, kv_heads=2, dims=(20, 40))
    check(paged, query_of(paged, 2 * group, q_len), MASKS["causal"], splits=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    paged = make_paged((90, 17), 24, dtype=dtype)
    check(paged, query_of(paged, 4, 3), MASKS["window"], SCORES["soft-cap"], splits=2)


@pytest.mark.parametrize("group, page_size", [(16, 64), (20, 24)])
@pytest.mark.parametrize("dims, v_in_k", [((576, 512), True), ((576, 512), False), ((64, 40), True)])
def test_latent_attention(dims: tuple[int, int], v_in_k: bool, group: int, page_size: int) -> None:
    """Values that are the first dims of keys are not loaded, and wide keys come in two parts; all behind a length is NaN."""
    paged = make_paged((70, 0, 33), page_size, kv_heads=1, dims=dims, dtype=torch.bfloat16, v_in_k=v_in_k)
    check(paged, query_of(paged, group, 1), splits=2)
    check(paged, query_of(paged, group, 2), MASKS["causal"], SCORES["soft-cap"], splits=1)


@pytest.mark.parametrize("scales", [(None, None), ((0.5, 2.0), (3.0,)), ((-1.5,), None), (None, (0.25, 3.0))], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_pages_of_eight_bits(dtype: torch.dtype, scales: tuple[tuple[float, ...] | None, ...]) -> None:
    """Tokens are small whole numbers, which every type holds; against the same pages in float16, scaled beforehand."""
    paged = make_paged((70, 0, 33), 16, dtype=torch.float16)
    pools = [(x.nan_to_num() * 2).round().clamp(-4, 4) for x in (paged.pages.k_pages, paged.pages.v_pages)]
    given = [None if s is None else torch.tensor(s) for s in scales]
    wide = [x if s is None else (x * s[:, None, None]).half() for x, s in zip(pools, given)]
    plain = replace(paged.pages, k_pages=wide[0], v_pages=wide[1])
    narrow = [x.to(dtype) for x in pools]
    scaled = replace(paged.pages, k_pages=narrow[0], v_pages=narrow[1], k_scale=given[0], v_scale=given[1])
    q = query_of(paged, 4, 2, dtype=torch.float16)
    for splits in (1, 3):
        (out, aux), (right, extra) = (decode(q, pages, MASKS["causal"], None, splits) for pages in (scaled, plain))
        torch.testing.assert_close(out, right, atol=4e-3, rtol=2e-3)
        torch.testing.assert_close(aux.lse, extra.lse, atol=1e-3, rtol=1e-3)


def check_narrow(paged: Paged, q: Tensor, mask: Any = None, score: Any = None, splits: int | None = None) -> None:
    """As `check`, over pages of 8 bits: queries and probabilities alone are rounded."""
    out, aux = decode(q, paged.pages, mask, score, splits)
    assert_nothing_without_keys(paged, out, aux.lse)
    for b, qkv, placed_mask, placed_score in paged.placed(q, mask, score):
        right, lse = oracle(*qkv, placed_mask, placed_score)
        torch.testing.assert_close(out[b : b + 1].double(), right, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(aux.lse[b : b + 1].double(), lse.double(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("size", [1e6, 1.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_over_eight_bits_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Products are of float16, which does not hold all that bfloat16 does."""
    size = size if dtype == torch.bfloat16 else size**0.5
    paged = make_paged((70, 0, 33), 16, dtype=torch.bfloat16)
    scales = {"k_scale": torch.tensor([1.0, 0.3]) / size, "v_scale": torch.tensor([2.5])}
    q = (query_of(paged, 4, 3, dtype=torch.float32) * size).to(dtype)
    for splits in (1, 3):
        held = narrowed(paged, torch.float8_e4m3fn, **scales)
        check_narrow(held, q, MASKS["causal"], SCORES["soft-cap"], splits)


@pytest.mark.parametrize("v_in_k", [True, False])
def test_latent_attention_over_eight_bits(v_in_k: bool) -> None:
    paged = make_paged((70, 0, 33), 24, kv_heads=1, dims=(576, 512), dtype=torch.bfloat16, v_in_k=v_in_k)
    check_narrow(narrowed(paged, torch.float8_e4m3fn), query_of(paged, 20, 1, dtype=torch.bfloat16), splits=2)


def test_odd_dimensions_of_eight_bits_are_not_read_in_pairs() -> None:
    paged = narrowed(make_paged((70, 33), 16, dims=(33, 24), dtype=torch.bfloat16), torch.float8_e4m3fn)
    q = query_of(paged, 4, 1, dtype=torch.bfloat16)
    flexattn.reset_stats()
    out = paged_attention(q, paged.pages)
    assert "decode" not in flexattn.stats().launches
    for b, qkv, *_ in paged.placed(q, None, None):
        torch.testing.assert_close(out[b : b + 1].double(), oracle(*qkv)[0], atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_where_pages_lie_changes_no_bit(page_size: int) -> None:
    results = []
    for order in range(3):
        paged = make_paged((90, 41), page_size, order=order, spare=order)
        results.append(decode(query_of(paged, 4, 3), paged.pages, MASKS["window"], SCORES["ALiBi"], 2))
    for out, aux in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(aux.lse, results[0][1].lse)


def test_keys_that_no_query_keeps_may_lie_nowhere() -> None:
    """Page numbers are read of kept keys alone: here those in front of a window are gone, and the last page is half kept."""
    paged, q = make_paged((200,), 16), None
    q = query_of(paged, 4, 1)
    mask = lambda b, h, i, j: i - j < 44
    wanted = decode(q, paged.pages, mask, splits=2)[0]
    paged.pages.page_indices[: (200 - 44) // 16] = 1 << 30
    assert torch.equal(decode(q, paged.pages, mask, splits=2)[0], wanted) and torch.isfinite(wanted).all()


def test_lists_of_pages_that_end_with_the_last_request() -> None:
    """FlashInfer's form: the list holds no number more than requests have pages; each is its own tensor's end."""
    paged = make_paged((40, 70), 16)
    table, counts = paged.pages.page_indices.reshape(2, -1), [3, 5]
    indices = torch.cat([table[b, :n] for b, n in enumerate(counts)])
    starts = torch.tensor([0, 3], dtype=torch.int32)
    listed = PagedKV(paged.pages.k_pages, paged.pages.v_pages, indices, starts, paged.pages.kv_lengths, 1000)
    q = query_of(paged, 4, 1)
    assert torch.equal(decode(q, listed, splits=2)[0], decode(q, paged.pages, splits=2)[0])


def test_splits_cost_no_accuracy() -> None:
    paged = make_paged((390,), 16, dims=(32, 32), dtype=torch.float16)
    q = query_of(paged, 6, 1)
    right, _ = oracle(q, paged.k[:, :, :390], paged.v[:, :, :390])
    error = lambda splits: (decode(q, paged.pages, splits=splits)[0].double() - right).abs().mean().item()
    whole = error(1)
    assert all(error(splits) <= 1.05 * whole for splits in (2, 5, 13))


def test_nothing_is_built_for_other_lengths_batches_or_pools() -> None:
    def call(lengths: tuple[int, ...], spare: int) -> None:
        paged = make_paged(lengths, 16, spare=spare)
        check(paged, query_of(paged, 2, 1), MASKS["causal"], None, 2)

    call((60, 3), 2)
    flexattn.reset_stats()
    for lengths, spare in (((61, 3), 2), ((16, 5), 0), ((17, 0, 1), 40), ((128, 16), 1)):
        call(lengths, spare)
    assert flexattn.stats().builds.total() == 0


def test_another_page_size_is_another_kernel() -> None:
    for page_size in (16, 32, 16):
        paged = make_paged((60,), page_size)
        check(paged, query_of(paged, 2, 1), splits=1)


def test_a_request_without_a_key_gives_nothing() -> None:
    paged = make_paged((0, 0), 16, max_length=64)
    out, aux = decode(query_of(paged, 2, 3), paged.pages, splits=3)
    assert (out == 0).all() and torch.isneginf(aux.lse).all() and not math.isnan(out.sum())
