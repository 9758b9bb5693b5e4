"""The decode kernel and its merge against the float64 oracle, in Triton's interpreter."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, explain, flex_attention
from flexattn.frontend.expr import DEP_B, DEP_H
from flexattn.frontend.trace import trace
from flexattn.runtime.choose import v_in_k
from flexattn.runtime.device import target_for
from flexattn.runtime.plan import Problem
from flexattn.runtime.reference import oracle
from tests.frontend.mask_fuzz import Sizes, predicate
from tests.frontend.test_mask_fuzz import budget
from tests.frontend.zoned_masks import ZONED
from tests.helpers import dense
from tests.runtime.kernel_cases import CASES, assert_close, tensors_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says when a masked lane divides by zero
IDS = (torch.arange(400) // 23).int()
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.7, 0.3, 0.9])
TABLE = torch.randn(6, 900, generator=torch.Generator().manual_seed(2))
LENGTHS = torch.tensor([150, 0])
CAP = 2.0
MASKS: dict[str, Any] = {
    "none": None,
    "causal, last rows": lambda b, h, i, j: i + 120 >= j,
    "causal, first rows": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i + 120 >= j) & (i + 120 - j < 33),
    "documents": lambda b, h, i, j: IDS[i + 100] == IDS[j],
    "prefix": lambda b, h, i, j: (j < 20) | (i + 115 - j < 9),
    "lengths": lambda b, h, i, j: j < LENGTHS[b],
    "window per head": lambda b, h, i, j: j >= 100 - 16 * h,
    "remainder": lambda b, h, i, j: (i + j + h) % 3 != 1,
    "remainder in a length": lambda b, h, i, j: ((i + j) % 3 != 1) & (j < LENGTHS[b]),
    "remainder behind a head's start": lambda b, h, i, j: ((i + j) % 3 != 1) & (j >= 100 - 16 * h),
    "empty rows": lambda b, h, i, j: i - 2 >= j,
    "nothing": lambda b, h, i, j: i > j + 1000,
    "wide number": lambda b, h, i, j: i - j > -WIDE,
}
WIDE = 2**31
SCORES: dict[str, Any] = {
    "none": None,
    "soft-cap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
    "ALiBi": lambda s, b, h, i, j: s + SLOPES[h] * (j - i - 120),
    "relative bias": lambda s, b, h, i, j: s + TABLE[h, i - j + 400],
    "key bias": lambda s, b, h, i, j: s + TABLE[h, j],
    "minus infinity": lambda s, b, h, i, j: torch.where(j > 17, s, -math.inf),
}


def inputs(
    q_len: int, group: int = 3, kv_len: int = 173, dims: tuple[int, int] = (16, 16), dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    shapes = (2, 2 * group, q_len, dims[0]), (2, 2, kv_len, dims[0]), (2, 2, kv_len, dims[1])
    return [torch.randn(shape).to(dtype) for shape in shapes]


def decode(
    qkv: list[Tensor], mask: Any = None, score: Any = None, splits: int | None = None, **more: Any
) -> tuple[Tensor, Any]:
    """(out, aux) by the decode kernel, which is proved to have run."""
    options = {"BACKEND": "TRITON_DECODE"} | ({} if splits is None else {"SPLIT_KV": splits})
    before = flexattn.stats().launches
    out, aux = flex_attention(
        *qkv, score, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True),
        kernel_options=options, **more,
    )  # fmt: skip
    launched = flexattn.stats().launches - before
    assert set(launched) <= {"decode", "merge"} and launched["decode"] == 1
    return out, aux


def check(qkv: list[Tensor], mask: Any = None, score: Any = None, splits: int | None = None) -> None:
    out, aux = decode(qkv, mask, score, splits)
    right, lse = oracle(*qkv, mask, score)
    fair = [] if out.dtype == torch.float32 else dense([x.clone().requires_grad_() for x in qkv], mask, score)
    assert_close("out", out, right, [right, *(x.out.detach() for x in fair)])
    assert_close("lse", aux.lse, lse, [lse, *(x.lse.detach() for x in fair)])
    empty = torch.isneginf(lse)
    assert (out[empty] == 0).all() and torch.equal(torch.isneginf(aux.max_scores), empty)


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, splits: int) -> None:
    check(inputs(3), MASKS[name], None, splits)


@pytest.mark.parametrize("name", ZONED)
def test_masks_found_by_formula(name: str) -> None:
    deps = trace(ZONED[name], "mask").program.body.deps
    batch, group = 1 + bool(deps & DEP_B), 1 + bool(deps & DEP_H)  # the interpreter is slow
    q, k, v = (torch.randn(batch, heads, n, 16) for heads, n in ((group, 90), (1, 79), (1, 79)))
    check([q, k, v], ZONED[name], None, 2)


@pytest.mark.parametrize("dims", [(576, 512), (600, 40), (32, 32)])
def test_values_that_are_the_first_dims_of_keys(dims: tuple[int, int]) -> None:
    lengths = torch.tensor([90, 37], dtype=torch.int32)
    q, k = torch.randn(2, 20, 2, dims[0]).bfloat16(), torch.randn(2, 1, 96, dims[0]).bfloat16()
    for b, n in enumerate(lengths):
        k[b, :, n:] = math.nan
    v = k[..., : dims[1]]
    problem = Problem(q, k, v, 1.0)
    target = target_for(CPU)
    assert v_in_k(problem, target) == (dims != (600, 40)) and not v_in_k(replace(problem, v=v.clone()), target)
    assert not v_in_k(replace(problem, k=k[..., 1:]), target), "values begin elsewhere"
    mask, score = lambda b, h, i, j: i + 35 >= j, SCORES["soft-cap"]
    out, aux = decode([q, k, v], mask, score, 2, kv_lengths=lengths)
    for b, n in enumerate(lengths):
        qkv = q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]
        right, lse = oracle(*qkv, mask, score)
        fair = dense([x.clone().requires_grad_() for x in qkv], mask, score)
        assert_close("out", out[b : b + 1], right, [right, *(x.out.detach() for x in fair)])
        assert_close("lse", aux.lse[b : b + 1], lse, [lse, *(x.lse.detach() for x in fair)])


def test_random_masks() -> None:
    """FLEXATTN_FUZZ_SECONDS (4) from FLEXATTN_FUZZ_SEED (0) on; a failure prints its seed."""
    first = seed = int(budget("SEED", "0"))
    end, seen = time.monotonic() + float(budget("SECONDS", "4")), Counter[str]()
    while seed == first or time.monotonic() < end:
        rng = random.Random(seed)
        sizes = Sizes(rng.randint(1, 2), 2 * rng.randint(1, 2), rng.randint(1, 20), rng.randint(1, 150))
        made, splits = predicate(rng, sizes), rng.randint(1, 5)
        kept, misread = made.brute(sizes)
        seed += 1
        if misread.any():
            seen["misread"] += 1
            continue
        qkv = [
            torch.randn(sizes.batch, n, length, 16)
            for n, length in ((sizes.heads, sizes.q_len), *((2, sizes.kv_len),) * 2)
        ]
        try:
            out, aux = decode(qkv, made.function(), None, splits)
            right, lse = oracle(*qkv, lambda b, h, i, j, kept=kept: kept[b, h, i, j])
            assert_close("out", out, right, [right])
            assert_close("lse", aux.lse, lse, [lse])
        except Exception as error:
            if "not supported for the input types" not in str(error):
                raise AssertionError(f"seed {seed - 1}, {sizes}, {splits} splits:\n{made}") from error
            seen["interpreter"] += 1  # takes a float comparison of b or h for a float where it meets a truth value
        else:
            seen["equal"] += 1
    print(f"seeds {first}..{seed - 1}: {dict(seen)}")
    assert seen["equal"] > 0


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, splits: int) -> None:
    check(inputs(2), MASKS["causal, last rows"], SCORES[name], splits)


@pytest.mark.parametrize("q_len, group", [(1, 1), (1, 5), (17, 1), (3, 6), (1, 64), (5, 7), (64, 2), (2, 12)])
def test_queries_and_groups_of_any_number(q_len: int, group: int) -> None:
    check(inputs(q_len, group, 101, (20, 40)), lambda b, h, i, j: i + 40 - h >= j, splits=2)


@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 65])
def test_keys_of_any_number_and_more_splits_than_tiles(kv_len: int) -> None:
    check(inputs(2, 2, kv_len), None, None, 4)
    check(inputs(1, 2, kv_len), lambda b, h, i, j: j % 2 == 0, None, 3)


def test_more_tiles_of_a_program_than_are_decided_at_once() -> None:
    qkv = inputs(1, 1, 32 * 131 + 5)
    check(qkv, None, None, 1)
    check(qkv, lambda b, h, i, j: (j < 40) | (j > 3000), None, 2)
    check(qkv, lambda b, h, i, j: j // 32 % 3 == 1, None, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    for splits in (1, 4):
        check(inputs(3, dtype=dtype), MASKS["window"], SCORES["soft-cap"], splits)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.q_len <= 45])
def test_the_forward_kernels_cases(name: str) -> None:
    """Forward only: captured tensors need no gradient here."""
    case = CASES[name]
    score, mask, _ = case.make(CPU, case)
    qkv = tensors_of(case, torch.float32, CPU)
    with torch.no_grad():
        out, aux = decode(qkv, mask, score, 2, scale=case.scale)
        right, lse = oracle(*qkv, mask, getattr(score, "oracle", score), scale=case.scale)
    assert_close("out", out, right, [right])
    assert_close("lse", aux.lse, lse, [lse])


def test_maxima_of_rows() -> None:
    q, k, v = inputs(2, 1)
    mask = MASKS["causal, first rows"]
    scores = (q @ k.mT) * 0.25
    keep = torch.arange(2)[:, None] >= torch.arange(173)
    for splits in (1, 2):
        aux = decode([q, k, v], mask, None, splits)[1]
        torch.testing.assert_close(aux.max_scores, torch.where(keep, scores, -math.inf).amax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("mask", [lambda b, h, i, j: (j < 20) | (j >= 70 + i), lambda b, h, i, j: j % 7 != 3])
def test_what_no_query_keeps_may_hold_anything(mask: Any, splits: int) -> None:
    storage = [torch.randn(1, 2, n, 16) for n in (3, 200, 200)]
    dropped = ~torch.stack([torch.as_tensor(mask(0, 0, i, torch.arange(173))) for i in range(3)]).any(0)
    results = []
    for poison in (0.0, math.nan, math.inf):
        for x in storage[1:]:
            x[:, :, 173:] = poison
            x[:, :, :173][:, :, dropped] = poison
        out, aux = decode([storage[0], *(x[:, :, :173] for x in storage[1:])], mask, None, splits)
        results.append((out, aux.lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
    assert torch.isfinite(results[0][0]).all()


def test_splits_cost_no_accuracy() -> None:
    qkv = inputs(4, kv_len=390, dims=(32, 32), dtype=torch.float16)
    right, _ = oracle(*qkv)
    error = lambda splits: (decode(qkv, None, None, splits)[0].double() - right).abs().mean().item()
    whole = error(1)
    assert all(error(splits) <= 1.05 * whole for splits in (2, 5, 13))


def test_parts_of_any_number_are_merged() -> None:
    flexattn.reset_stats()
    for q_len, group, splits in (
        (1, 1, 2),
        (3, 3, 7),
        (9, 3, 40),
        (5, 7, 5),
    ):
        check(inputs(q_len, group, 190, (16, 70)), MASKS["causal, last rows"], None, splits)
    assert flexattn.stats().launches["merge"] == flexattn.stats().launches["decode"] > 0


def test_strides_of_every_kind() -> None:
    fused = torch.randn(2, 90, 3, 2, 16)  # [batch, length, 3, heads, dim]
    q, k, v = (fused[:, :, n].transpose(1, 2) for n in range(3))
    odd = torch.randn(2 * 2 * 90 * 17 + 1)[1:].view(2, 2, 90, 17)[..., :16]
    last = q.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for tensors in ((q, k, v), (odd, k[:1], v[:, :1].expand(2, 2, 90, 16)), (last, odd, k.mT.contiguous().mT)):
        few = [tensors[0][:, :, :5], *tensors[1:]]
        if few[1].shape[0] != few[2].shape[0]:
            few[2] = few[2][:1]
        check(few, lambda b, h, i, j: i + 60 >= j, splits=2)
        assert decode(few)[0].stride() == flex_attention(*few, kernel_options={"BACKEND": "TRITON"}).stride()


def test_nothing_is_built_for_another_number_length_or_batch() -> None:
    def call(batch: int, kv_len: int, window: int, splits: int) -> None:
        q, k, v = (torch.randn(batch, 2, n, 16) for n in (1, kv_len, kv_len))
        check([q, k, v], lambda b, h, i, j: (i + kv_len - 1 >= j) & (i + kv_len - 1 - j < window), None, splits)

    call(1, 60, 20, 2)
    flexattn.reset_stats()
    for batch, kv_len, window in ((1, 61, 20), (1, 62, 20), (2, 128, 0), (1, 16, 1), (3, 17, 17), (1, 65, -1)):
        call(batch, kv_len, window, 2)
    found = flexattn.stats()
    assert found.builds.total() == 0 and found.mask_builds.total() == 0


def test_who_takes_it_and_what_explain_says() -> None:
    q, k, v = (torch.randn(1, 2, n, 16) for n in (2, 300, 300))
    forced, not_forced = {"BACKEND": "TRITON_DECODE"}, {"BACKEND": "TRITON"}
    told = explain(q, k, v, mask_mod=MASKS["window"], kernel_options=forced)
    assert "the decode kernel: given by kernel_options" in told and "attention_decode" in told and "by formula" in told
    assert "by asking the mask" in explain(q, k, v, mask_mod=MASKS["remainder"], kernel_options=forced)
    assert "not the decode kernel: given by kernel_options" in explain(q, k, v, kernel_options=not_forced)
    lists = create_block_mask(lambda b, h, i, j: i + 100 >= j, None, None, 2, 300, device="cpu", BLOCK_SIZE=32)
    lists.mask_mod = lists.mask_mod  # now it is made of lists of blocks
    cases: list[tuple[dict[str, Any], bool, dict[str, Any]]] = [
        (not_forced, False, {}),
        (forced, False, {"block_mask": lists}),
        (forced, True, {}),
    ]
    for options, is_decode, more in cases:
        flexattn.reset_stats()
        flex_attention(q, k, v, kernel_options=options, **more)
        assert ("decode" in flexattn.stats().launches) == is_decode
    flexattn.reset_stats()
    x = q.clone().requires_grad_()
    with pytest.warns(UserWarning, match="a gradient is needed"):
        flex_attention(x, k, v, kernel_options=forced).sum().backward()
    assert "decode" not in flexattn.stats().launches
