"""The contract, line by line, through the public API; tests/cases holds the cases users ran into, by their numbers.

Every case compares with the float64 oracle under the contract's error rule, or demands exact equality where the contract does.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexattn
from flexattn import AuxRequest, flex_attention
from flexattn.errors import CaptureIndexError, FlexError
from flexattn.runtime.reference import oracle
from tests.helpers import (
    causal,
    check,
    exact,
    make_qkv,
    nan_filled_allocations,
    on_devices,
    run,
    window,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def lse_of(q, k, v, **mods) -> Tensor:
    return flex_attention(q, k, v, return_aux=AuxRequest(lse=True), enable_gqa=True, **mods)[1].lse


# ---------------------------------------------------------------- line 1: empty rows
@on_devices
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("how", ["constant", "captured"])
def test_masks_that_are_the_same_everywhere(device, kept, how) -> None:
    flag = torch.tensor(kept, device=device)
    mask = {"constant": lambda b, h, i, j: kept, "captured": lambda b, h, i, j: flag}[how]
    result = check(make_qkv(2, (4, 2), (40, 70), (8, 12), device=device), mask)
    assert bool(torch.isneginf(result.lse).all()) is not kept


# ---------------------------------------------------------------- line 2: lse
@on_devices
def test_lse_alone_gives_gradients(device) -> None:
    q, k, v = make_qkv(device=device)
    grads = torch.autograd.grad(lse_of(q, k, v, mask_mod=window(20)).sum(), (q, k, v), allow_unused=True)
    expected = torch.autograd.grad(oracle(q, k, v, window(20))[1][:, :, :].sum(), (q, k))
    for got, want in zip(grads, expected):
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())
    assert grads[2] is None or grads[2].abs().max() == 0


# ---------------------------------------------------------------- line 3: what changes no bit
@on_devices
def test_nan_at_masked_positions_of_a_visited_tile(device) -> None:
    score = lambda s, b, h, i, j: torch.where(i >= j, s, math.nan) + torch.sqrt((i - j).to(torch.float32)) * s
    kept = lambda s, b, h, i, j: s + torch.sqrt((i - j).abs().to(torch.float32)) * s
    qkv = make_qkv(1, (2, 2), (150, 150), (16, 16), device=device)
    result, expected = run(qkv, causal, score), run(qkv, causal, kept)
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


def test_a_kept_read_out_of_range_is_an_index_error() -> None:
    short = torch.randn(150)
    qkv = make_qkv(1, (2, 1), (160, 160), (32, 32))
    with pytest.raises(CaptureIndexError, match="out of range") as raised:
        run(qkv, causal, lambda s, b, h, i, j: s + short[j])
    assert isinstance(raised.value, IndexError)
    with pytest.raises(IndexError):
        run(qkv, lambda b, h, i, j: short[j] > -100)


# ---------------------------------------------------------------- line 5: 64 bits
@on_devices
def test_offsets_past_2_to_the_31(device) -> None:
    memory = torch.empty(2**31 + 2**20, dtype=BF16, device=device)  # touched only where the views are
    shape = (1, 2, 64, 32)
    views = [memory.as_strided(shape, (0, 2**31, 32, 1), 4096 * n) for n in range(3)]
    for view in views:
        view.copy_(torch.randn(shape, device=device))
    small = [x.clone().requires_grad_() for x in views]
    result, expected = run([x.requires_grad_() for x in views], causal), run(small, causal)
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert torch.equal(got, want)


@on_devices
def test_more_heads_than_a_grid_dimension_holds(device) -> None:
    qkv = make_qkv(22_720, (3, 3), (3, 5), (4, 8), device=device)
    result, expected = run(qkv, causal), exact(qkv, causal)
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())


# ---------------------------------------------------------------- line 6 and 7: precision and the error rule
DOCUMENTS = torch.arange(260) // 37
MODS = {
    "none": (None, None),
    "causal": (causal, None),
    "window": (window(50), None),
    "documents": (lambda b, h, i, j: DOCUMENTS.to(i.device)[i] == DOCUMENTS.to(i.device)[j], None),
    "soft-cap": (causal, lambda s, b, h, i, j: 20 * torch.tanh(s / 20)),
    "alibi": (causal, lambda s, b, h, i, j: s + (j - i) * torch.exp2(-2.0 * (h + 1))),
    "squared": (None, lambda s, b, h, i, j: s * s * 0.25),
}


@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("name", MODS)
def test_error_rule(device, name, dtype) -> None:
    mask, score = MODS[name]
    if name == "documents":
        ids = DOCUMENTS.to(device)
        mask = lambda b, h, i, j: ids[i] == ids[j]
    qkv = make_qkv(2, (4, 2), (250, 260), (32, 48), dtype=dtype, device=device)
    if dtype is F64:
        result, expected = run(qkv, mask, score), exact(qkv, mask, score)
        for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
            assert (got - want).abs().max() < 1e-12
    else:
        check(qkv, mask, score)


@on_devices
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(device, scale) -> None:
    check(make_qkv(device=device), causal, scale=scale)


# ---------------------------------------------------------------- line 8: errors
def test_errors_say_what_came_and_what_to_try() -> None:
    q, k, v = make_qkv()

    def branches(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else -score

    calls = {
        "query": lambda: flex_attention(q[0], k, v),
        "key": lambda: flex_attention(q, k[..., :-1], v, enable_gqa=True),
        "enable_gqa": lambda: flex_attention(q, k, v),
        "torch.where": lambda: flex_attention(q, k, v, branches, enable_gqa=True),
        "kernel_options": lambda: flex_attention(q, k, v, enable_gqa=True, kernel_options={"BLOK_M": 1}),
    }
    for word, call in calls.items():
        with pytest.raises(FlexError, match=word) as raised:
            call()
        assert "got " in str(raised.value) or "Try: " in str(raised.value)


# ---------------------------------------------------------------- line 9: nothing is built again
@on_devices
def test_numbers_lengths_and_batches_build_nothing_again(device, fresh_stats) -> None:
    def call(size: int, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        slopes = torch.rand(heads, device=device)
        qkv = make_qkv(batch, (heads, heads), (q_len, kv_len), (16, 16), device=device)
        mask = lambda b, h, i, j: (i - j <= size) & (j - i <= size)
        check(qkv, mask, lambda s, b, h, i, j: s + slopes[h] * j)

    call(5, 2, 2, 70, 80)
    call(2**31, 2, 2, 70, 80)  # numbers of 64 bits are another class: once more each, then never
    before = flexattn.stats()
    assert all(count <= 2 for count in before.builds.values()), before.builds
    for size in (0, 1, 16, 17, -1, 2**40, 2**31):
        call(size, 1, 3, 71, 83)
    for n in (1, 16, 17):
        call(3, n, 2, 40, 41)
        call(3, 1, n, 40, 41)
        call(3, 1, 1, n, 33)
        call(3, 1, 1, 33, n)
    assert flexattn.stats().builds.total() == before.builds.total()
    assert flexattn.stats().plans.total() == before.plans.total()


def test_new_memory_is_checked() -> None:
    with nan_filled_allocations():
        assert torch.empty(3).isnan().all()
        assert F.relu(torch.empty(2)).isnan().all()
