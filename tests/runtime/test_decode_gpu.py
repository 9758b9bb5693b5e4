"""The decode kernel on a GPU: against the oracle in three data types, in CUDA graphs, and what it must not build."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention
from flexattn.runtime.reference import oracle
from tests.helpers import dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_memory_is_nan")]
GPU = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CAP = 5.0


def inputs(
    q_len: int, kv_len: int, *, batch: int = 2, kv_heads: int = 2, group: int = 4, dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:  # fmt: skip
    shapes = (kv_heads * group, q_len, dims[0]), (kv_heads, kv_len, dims[0]), (kv_heads, kv_len, dims[1])
    return [torch.randn(batch, *shape, device=GPU).to(dtype) for shape in shapes]


def decode(qkv: list[Tensor], mask: Any = None, score: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    before = flexattn.stats().launches["decode"]
    out, aux = flex_attention(
        *qkv, score, mask_mod=mask, enable_gqa=True, kernel_options=options, return_aux=AuxRequest(lse=True)
    )
    assert flexattn.stats().launches["decode"] == before + 1
    return out, aux.lse


def check(qkv: list[Tensor], mask: Any = None, score: Any = None, **options: Any) -> None:
    out, lse = decode(qkv, mask, score, **options)
    right, right_lse = oracle(*qkv, mask, score)
    fair = dense([x.detach().clone().requires_grad_() for x in qkv], mask, score)
    empty = torch.isneginf(right_lse)
    assert torch.equal(torch.isneginf(lse), empty) and (out[empty] == 0).all()
    torch.testing.assert_close(lse.double()[~empty], right_lse[~empty], rtol=0, atol=3e-3)
    error, *others = ((x.double() - right).abs().mean().item() for x in (out, *(x.out for x in fair)))
    is_single = out.dtype == torch.float32
    floor = 1e-7 * right.abs().mean().item() if is_single else 1e-9
    assert error <= (2 if is_single else 1.1) * max(others) + floor, (error, others)


def masks() -> dict[str, Any]:
    lengths = torch.tensor([700, 0], device=GPU)
    ids = (torch.arange(4096, device=GPU) // 37).int()
    return {
        "none": None,
        "causal": lambda b, h, i, j: i + 1290 >= j,
        "window": lambda b, h, i, j: (i + 1290 >= j) & (i + 1290 - j < 300),
        "prefix": lambda b, h, i, j: (j < 70) | (i + 1200 - j < 100),
        "lengths": lambda b, h, i, j: j < lengths[b],
        "per head": lambda b, h, i, j: j >= 1200 - 100 * h,
        "documents": lambda b, h, i, j: ids[i + 600] == ids[j],
        "remainder": lambda b, h, i, j: (i + j + h) % 3 != 1,
        "empty rows": lambda b, h, i, j: i - 2 >= j,
    }


def scores() -> dict[str, Any]:
    slopes, table = torch.rand(8, device=GPU), torch.randn(8, 3000, device=GPU)
    return {
        "soft-cap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
        "ALiBi": lambda s, b, h, i, j: s + slopes[h] * (j - i - 1290) * 0.01,
        "relative bias": lambda s, b, h, i, j: s + table[h, i - j + 1500],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["none", "causal", "window", "prefix", "lengths", "per head", "documents", "remainder", "empty rows"]
)
def test_masks(name: str, dtype: torch.dtype) -> None:
    qkv = inputs(3, 1301, dtype=dtype)
    check(qkv, masks()[name])
    check(qkv, masks()[name], BACKEND="TRITON_DECODE", SPLIT_KV=1)


@pytest.mark.parametrize("name", ["soft-cap", "ALiBi", "relative bias"])
def test_scores(name: str) -> None:
    check(inputs(2, 1301), masks()["causal"], scores()[name])


@pytest.mark.parametrize("q_len, group", [(1, 1), (1, 5), (3, 6), (17, 7), (1, 64), (64, 1), (64, 12), (2, 12)])
def test_queries_and_groups_of_any_number(q_len: int, group: int) -> None:
    check(inputs(q_len, 1111, batch=1, group=group), lambda b, h, i, j: i + 1000 >= j)


@pytest.mark.parametrize("dims", [(16, 16), (64, 96), (80, 40), (128, 64), (256, 256), (512, 512)])
def test_head_dims(dims: tuple[int, int]) -> None:
    check(inputs(2, 999, dims=dims), lambda b, h, i, j: i + 990 >= j)


def test_splits_cost_no_accuracy() -> None:
    qkv = inputs(4, 20000, batch=1)
    right, _ = oracle(*qkv)
    error = lambda n: (decode(qkv, BACKEND="TRITON_DECODE", SPLIT_KV=n)[0].double() - right).abs().mean().item()
    whole = error(1)
    assert all(error(splits) <= 1.05 * whole for splits in (2, 7, 33, 200))


def test_parts_of_any_number_are_merged() -> None:
    flexattn.reset_stats()
    for q_len, group, splits in ((1, 1, 2), (3, 3, 7), (9, 3, 40), (5, 7, 150), (16, 16, 3)):
        for _ in range(3):
            check(inputs(q_len, group=group, kv_len=9600, batch=1), BACKEND="TRITON_DECODE", SPLIT_KV=splits)
    assert flexattn.stats().launches["merge"] == flexattn.stats().launches["decode"] > 0


def test_it_is_the_same_in_every_run() -> None:
    qkv = inputs(4, 20000, batch=1)
    first = decode(qkv)[0]
    assert all(torch.equal(first, decode(qkv)[0]) for _ in range(10))


def test_strides_of_every_kind() -> None:
    fused = torch.randn(2, 900, 3, 2, 64, device=GPU, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, n].transpose(1, 2) for n in range(3))
    odd = torch.randn(2 * 2 * 900 * 67 + 1, device=GPU, dtype=torch.bfloat16)[1:].view(2, 2, 900, 67)[..., :64]
    for tensors in ((q, k, v), (odd, k.mT.contiguous().mT, odd), (q, k, v[:, :1].expand(2, 2, 900, 64))):
        check([tensors[0][:, :, :5], *tensors[1:]], lambda b, h, i, j: i + 800 >= j)


def test_offsets_past_32_bits() -> None:
    wide = torch.empty(300 * 8 * (1 << 20), dtype=torch.bfloat16, device=GPU)  # 4.7 GiB
    for strides in ((1, 1 << 31, 256, 1), (1, 1 << 11, 8 << 20, 1)):
        k, v = (wide.as_strided((1, 2, 300, 64), strides, offset) for offset in (64, 128))
        for view in (k, v):
            view.copy_(torch.randn(view.shape))
        check([inputs(2, 1, batch=1, dims=(64, 64))[0], k, v])


@pytest.mark.parametrize("mask", [lambda b, h, i, j: (j < 100) | (j >= 900 + i), lambda b, h, i, j: j % 7 != 3])
def test_what_no_query_keeps_may_hold_anything(mask: Any) -> None:
    q, k, v = inputs(3, 1200)
    clean = decode([q, k, v], mask)
    dropped = ~torch.stack([mask(0, 0, i, torch.arange(1200, device=GPU)) for i in range(3)]).any(0)
    for poison in (math.nan, math.inf):
        k[:, :, dropped] = v[:, :, dropped] = poison
        assert all(torch.equal(a, b) for a, b in zip(clean, decode([q, k, v], mask)))


def test_a_cache_that_grows_builds_nothing() -> None:
    q, k, v = inputs(1, 4096)
    step = lambda n: decode([q, k[:, :, :n], v[:, :, :n]], lambda b, h, i, j: i + (n - 1) >= j)
    step(700)
    flexattn.reset_stats()
    for n in range(701, 800):
        out, _ = step(n)
        if n % 20 == 0:
            torch.testing.assert_close(out.double(), oracle(q, k[:, :, :n], v[:, :, :n])[0], atol=1e-2, rtol=0)
    found = flexattn.stats()
    assert found.builds.total() == found.mask_builds.total() == found.plans.total() == 0
    assert set(found.launches) == {"decode", "merge"}


@pytest.mark.parametrize("is_formula", [True, False])
def test_a_graph_follows_what_changes_in_place(is_formula: bool) -> None:
    q, k, v = inputs(1, 4096, batch=1)
    length, keep = torch.tensor([700], device=GPU), torch.ones(4096, dtype=torch.bool, device=GPU)
    mask = (lambda b, h, i, j: j < length[b]) if is_formula else (lambda b, h, i, j: keep[j])
    decode([q, k, v], mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = decode([q, k, v], mask)
    flexattn.reset_stats()
    for n in (700, 1, 4096, 0, 2222):
        length.fill_(n)
        keep.fill_(False)[:n] = True
        q.normal_()
        torch.full((1 << 20,), math.nan, device=GPU)  # memory that the graph does not own
        graph.replay()
        right, right_lse = oracle(q, k[:, :, :n], v[:, :, :n])
        torch.testing.assert_close(out.double(), right, atol=2e-2, rtol=0)
        torch.testing.assert_close(lse.double(), right_lse, atol=2e-3, rtol=0)
    assert flexattn.stats().launches.total() == 0


def test_calls_of_several_streams_do_not_meet() -> None:
    qkv = inputs(2, 20000, batch=1)
    wanted, streams = decode(qkv)[0], [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for n in range(24):
        with torch.cuda.stream(streams[n % 4]):
            results.append(decode(qkv)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(x, wanted) for x in results)


def test_who_takes_it() -> None:
    q, k, v = inputs(1, 1024)
    causal = lambda b, h, i, j: i + 1023 >= j
    lists = create_block_mask(causal, None, None, 1, 1024, device=GPU)
    lists.mask_mod = causal  # now it is made of lists of blocks
    for is_decode, options, more in (
        (True, {}, {}),
        (True, {}, {"block_mask": create_block_mask(causal, None, None, 1, 1024, device=GPU)}),
        (False, {}, {"block_mask": lists}),
        (False, {"BACKEND": "TRITON"}, {}),
        (False, {"FORCE_USE_FLEX_ATTENTION": True}, {}),
        (False, {"BLOCK_N": 32}, {}),
        (True, {"BACKEND": "TRITON_DECODE", "BLOCK_N": 32}, {}),
    ):
        flexattn.reset_stats()
        flex_attention(q, k, v, enable_gqa=True, kernel_options=options, **more)
        assert ("decode" in flexattn.stats().launches) == is_decode, (options, more)
    flexattn.reset_stats()
    flex_attention(q.clone().requires_grad_(), k, v, enable_gqa=True).sum().backward()
    assert "decode" not in flexattn.stats().launches
