"""The contract, line by line, through the public API; tests/cases holds the cases users ran into, by their numbers.

Every case compares with the float64 oracle under the contract's error rule, or demands exact equality where the contract does.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention
from flexattn.errors import CaptureIndexError, DTypeError, FlexError, MaskTypeError, ShapeError, TraceError
from flexattn.runtime import cpu
from flexattn.runtime.reference import oracle
from tests.helpers import (
    DEVICES,
    causal,
    check,
    exact,
    guarded,
    kept_pairs,
    make_qkv,
    nan_filled_allocations,
    run,
    window,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
on_devices = pytest.mark.parametrize("device", DEVICES)


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


@on_devices
@pytest.mark.parametrize("sizes", [(0, 4, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0), (0, 4, 0, 0)])
def test_c68_sizes_of_zero(device, sizes) -> None:
    batch, heads, q_len, kv_len = sizes
    qkv = make_qkv(batch, (heads, 2), (q_len, kv_len), (8, 12), device=device)
    result = run(qkv, causal, lambda s, b, h, i, j: s * 2)
    assert result.out.shape == (batch, heads, q_len, 12)
    assert result.out.abs().sum() == 0
    assert result.lse.shape == (batch, heads, q_len)
    assert torch.isneginf(result.lse).all()
    assert [g.shape for g in result.grads] == [x.shape for x in qkv]
    assert all(g.abs().sum() == 0 for g in result.grads)


# ---------------------------------------------------------------- line 2: lse


@on_devices
def test_lse_alone_gives_gradients(device) -> None:
    q, k, v = make_qkv(device=device)
    grads = torch.autograd.grad(lse_of(q, k, v, mask_mod=window(20)).sum(), (q, k, v), allow_unused=True)
    expected = torch.autograd.grad(oracle(q, k, v, window(20))[1][:, :, :].sum(), (q, k))
    for got, want in zip(grads, expected):
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())
    assert grads[2] is None or grads[2].abs().max() == 0


@on_devices
def test_c26_split_and_merge(device) -> None:
    near = lambda b, h, i, j: (i >= j) & (i - j <= 40)
    far = lambda b, h, i, j: (i >= j) & (i - j > 40)
    q, k, v = make_qkv(2, (2, 2), (200, 200), (32, 32), device=device)
    parts = [flex_attention(q, k, v, mask_mod=m, return_aux=AuxRequest(lse=True)) for m in (near, far)]
    lse = torch.logaddexp(parts[0][1].lse, parts[1][1].lse)
    out = sum(o * (aux.lse - lse).exp().unsqueeze(-1) for o, aux in parts)
    expected, expected_lse = oracle(q, k, v, causal)
    assert torch.isneginf(parts[1][1].lse).sum() == 2 * 2 * 41
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum() + expected_lse.sum(), (q, k, v))
    for got, want in zip((out, lse, *grads), (expected, expected_lse, *wanted)):
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())


# ---------------------------------------------------------------- line 3: what changes no bit


@on_devices
def test_nan_at_masked_positions_of_a_visited_tile(device) -> None:
    score = lambda s, b, h, i, j: torch.where(i >= j, s, math.nan) + torch.sqrt((i - j).to(torch.float32)) * s
    kept = lambda s, b, h, i, j: s + torch.sqrt((i - j).abs().to(torch.float32)) * s
    qkv = make_qkv(1, (2, 2), (150, 150), (16, 16), device=device)
    result, expected = run(qkv, causal, score), run(qkv, causal, kept)
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


@on_devices
def test_c35_guarded_buffer_is_not_read_past_its_end(device) -> None:
    short = guarded((150,), device=device).requires_grad_()
    padded = torch.cat([short.detach(), torch.zeros(10, device=device)]).requires_grad_()
    mask = lambda b, h, i, j: (j < 150) & (i >= j)
    qkv = make_qkv(2, (2, 1), (160, 160), (32, 32), device=device)
    result = run(qkv, mask, lambda s, b, h, i, j: s + short[j], captures=[short])
    expected = check(qkv, mask, lambda s, b, h, i, j: s + padded[j], captures=[padded])
    for got, want in zip(
        (result.out, result.lse, *result.grads[:3]), (expected.out, expected.lse, *expected.grads[:3])
    ):
        assert torch.equal(got, want)
    assert (result.grads[3] - expected.grads[3][:150]).abs().max() < 1e-5


def test_a_kept_read_out_of_range_is_an_index_error() -> None:
    short = torch.randn(150)
    qkv = make_qkv(1, (2, 1), (160, 160), (32, 32))
    with pytest.raises(CaptureIndexError, match="out of range") as raised:
        run(qkv, causal, lambda s, b, h, i, j: s + short[j])
    assert isinstance(raised.value, IndexError)
    with pytest.raises(IndexError):
        run(qkv, lambda b, h, i, j: short[j] > -100)


@on_devices
def test_c37_banded_bias_without_a_clamp(device) -> None:
    band = guarded((2, 2, 320, 48), device=device).requires_grad_()
    mask = window(48)
    qkv = make_qkv(2, (2, 2), (320, 320), (32, 32), device=device)
    result = run(qkv, mask, lambda s, b, h, i, j: s + band[b, h, i, i - j], captures=[band])
    expected = exact(qkv, mask, lambda s, b, h, i, j: s + band[b, h, i, (i - j).clamp(0, 47)], captures=[band])
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())
    assert result.grads[3][:, :, 0, 1:].abs().max() == 0


# ---------------------------------------------------------------- line 4: sizes, strides, broadcasting


@on_devices
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16, 64])
def test_c61_group_sizes(device, group) -> None:
    for q_len, kv_len in ((1, 4096), (4, 4096)):
        qkv = make_qkv(1, (group, 1), (q_len, kv_len), (128, 128), device=device, requires_grad=False)
        check(qkv, lambda b, h, i, j: i + (kv_len - q_len) >= j)
    check(make_qkv(1, (2 * group, 2), (60, 75), (16, 24), device=device), causal, lambda s, b, h, i, j: s + 0.01 * h)


def test_c61_heads_that_do_not_divide() -> None:
    with pytest.raises(ShapeError, match="35"):
        flex_attention(*make_qkv(1, (35, 2), (8, 8), (16, 16)), enable_gqa=True)


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


# ---------------------------------------------------------------- captured and learnable tensors
class _Affine(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.t, self.a = (torch.nn.Parameter(torch.tensor(x, device=device)) for x in (0.7, 0.3))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.t + self.a


@on_devices
@pytest.mark.parametrize("form", ["closure", "module"])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_c28_scalar_parameters(device, dtype, form) -> None:
    module = _Affine(device)
    t, a = module.t, module.a
    score = module if form == "module" else lambda s, b, h, i, j: s * t + a
    qkv = make_qkv(1, (2, 2), (130, 130), (32, 32), dtype=dtype, device=device)
    result = run(qkv, causal, score, captures=[t, a], with_lse=False)
    expected = exact(qkv, causal, lambda s, b, h, i, j: s * t + a, captures=[t, a], with_lse=False)
    size = expected.grads[3].abs().item()
    assert (result.grads[3] - expected.grads[3]).abs() < (2e-2 if dtype == F16 else 1e-5) * size
    assert result.grads[4].abs() < (2e-2 if dtype == F16 else 1e-4) * size  # a shift of all scores changes nothing
    assert result.grads[3].dtype == F32


@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_c29_relative_position_table(device, dtype) -> None:
    table = guarded((2, 599), dtype=dtype, device=device).requires_grad_()
    score = lambda s, b, h, i, j: s + table[h, i - j + 299]
    qkv = make_qkv(2, (2, 2), (300, 300), (32, 32), dtype=dtype, device=device)
    result = check(qkv, None, score, captures=[table])
    assert result.grads[3].dtype == dtype


BIAS_SHAPES = {
    "all": (1, 1, 384, 384),
    "batch": (2, 1, 384, 384),
    "heads": (1, 2, 384, 384),
    "keys": (2, 1, 1, 384),
    "queries": (1, 2, 384, 1),
}


@on_devices
@pytest.mark.parametrize("layout", ["view", "transposed"])
@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_c31_dense_bias_with_broadcast_dimensions(device, shape, layout) -> None:
    sizes = BIAS_SHAPES[shape]
    stored = (*sizes[:2], sizes[3], sizes[2]) if layout == "transposed" else sizes
    p = guarded(stored, dtype=BF16, device=device).requires_grad_()

    def score(s, b, h, i, j):
        bias = (2 * p).transpose(2, 3) if layout == "transposed" else (2 * p).view(sizes)
        return s + bias[tuple(0 if n == 1 else index for n, index in zip(sizes, (b, h, i, j)))]

    qkv = make_qkv(2, (2, 2), (384, 384), (16, 16), dtype=BF16, device=device)
    result = run(qkv, None, score, captures=[p], with_lse=False)
    expected = exact(qkv, None, score, captures=[p], with_lse=False)
    assert result.grads[3].shape == p.shape
    error, size = (result.grads[3] - expected.grads[3]).abs().max(), expected.grads[3].abs().max()
    assert error < (0.02 * size if shape != "queries" else 0.02)
    assert (result.out - expected.out).abs().max() < 0.02


@on_devices
def test_c36_dense_boolean_mask(device) -> None:
    allowed = (torch.rand(3, 1000, 1000) < 0.1).to(device) | torch.eye(1000, dtype=torch.bool, device=device)
    check(make_qkv(3, (1, 1), (1000, 1000), (16, 16), device=device), lambda b, h, i, j: allowed[b, i, j])


@on_devices
def test_c36_prefix_and_image_spans(device) -> None:
    span = torch.zeros(1000, dtype=torch.int64, device=device)
    span[100:300], span[420:640] = 1, 2
    mask = lambda b, h, i, j: (i >= j) | ((span[i] == span[j]) & (span[i] > 0))
    check(make_qkv(3, (1, 1), (1000, 1000), (16, 16), device=device), mask)


# ---------------------------------------------------------------- masks over time
@on_devices
@pytest.mark.parametrize("mask_heads", [None, 4])
def test_c39_decode_from_a_prefill_mask(device, mask_heads) -> None:
    mask = lambda b, h, i, j: (i >= j) & (i - j < 200)
    q, k, v = make_qkv(2, (4, 2), (512, 512), (32, 32), device=device, requires_grad=False)
    full = flex_attention(q, k, v, mask_mod=mask, enable_gqa=True)
    block_mask = create_block_mask(mask, None, mask_heads, 512, 512, device=device, BLOCK_SIZE=(1, 128))
    for p in (0, 1, 127, 128, 129, 300, 511):
        for index in (p, slice(p, p + 1)):
            row = flex_attention(q[:, :, p : p + 1], k, v, block_mask=block_mask[:, :, index], enable_gqa=True)
            assert (row - full[:, :, p : p + 1]).abs().max() < 2e-6
    blocks = create_block_mask(mask, None, mask_heads, 512, 512, device=device)
    part = flex_attention(q[:, :, 128:384], k, v, block_mask=blocks[:, :, 1:3], enable_gqa=True)
    assert (part - full[:, :, 128:384]).abs().max() < 2e-6


def lower_right(q_len: int, kv_len: int):
    return lambda b, h, i, j: i + (kv_len - q_len) >= j


@on_devices
def test_c40_lower_right_causal_with_captured_lengths(device, fresh_stats) -> None:
    flex_attention(*make_qkv(1, (1, 1), (3, 4), (4, 4), device=device, requires_grad=False), mask_mod=lower_right(3, 4))
    for n, m in ((2, 300), (64, 70)):  # one call of each size class
        kept_pairs(lower_right(n, m), n, m, device)
    before = flexattn.stats()
    pairs = [kept_pairs(lower_right(n, m), n, m, device) for n, m in ((5, 9), (7, 130), (128, 128), (1, 4096))]
    assert pairs == [35, 889, 8256, 4096]
    assert flexattn.stats().builds.total() == before.builds.total()
    assert flexattn.stats().plans.total() == before.plans.total()


# ---------------------------------------------------------------- line 8: errors; what a mod may return
@on_devices
def test_c54_what_masks_may_return(device) -> None:
    qkv = make_qkv(device=device)
    off, one = torch.tensor([7], device=device), torch.ones(1, device=device)
    check(qkv, lambda b, h, i, j: i + off >= j)
    for value in (True, 1):
        assert torch.equal(run(qkv, lambda b, h, i, j, value=value: value).out, run(qkv).out)
    for value in (False, 0):
        assert run(qkv, lambda b, h, i, j, value=value: value).out.abs().max() == 0
    check(qkv, causal, lambda s, b, h, i, j: 0.5)
    check(qkv, causal, lambda s, b, h, i, j: 2)
    check(qkv, causal, lambda s, b, h, i, j: s * one)


def test_c54_what_mods_may_not_return() -> None:
    qkv = make_qkv()
    table = torch.randn(70, 2)

    def named_mask(b, h, q_idx, kv_idx):
        return table[q_idx]

    def float_mask(b, h, q_idx, kv_idx):
        return table[q_idx, 0]

    def nothing(score, b, h, q_idx, kv_idx):
        return None

    with pytest.raises(TraceError, match=r"test_contract\.py:\d+.*named_mask"):
        flex_attention(*qkv, mask_mod=named_mask, enable_gqa=True)
    with pytest.raises(MaskTypeError, match="float_mask"):
        flex_attention(*qkv, mask_mod=float_mask, enable_gqa=True)
    with pytest.raises(TraceError, match=r"nothing.*NoneType"):
        flex_attention(*qkv, nothing, enable_gqa=True)


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


@on_devices
def test_c64_mixed_dtypes(device) -> None:
    q, k, v = make_qkv(device=device)
    v = v.detach().to(BF16).requires_grad_()
    with pytest.raises(DTypeError, match=r"(?s)float32.*float32.*bfloat16"):
        flex_attention(q, k, v, enable_gqa=True)
    with torch.autocast(device, dtype=BF16):
        out = flex_attention(q, k, v, mask_mod=causal, enable_gqa=True)
    assert out.dtype == BF16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert [g.dtype for g in grads] == [F32, F32, BF16]
    expected, _ = oracle(q.to(BF16), k.to(BF16), v, causal)
    assert (out - expected).abs().max() < 0.02


@on_devices
@pytest.mark.parametrize("wanted", [0, 2, 3])
def test_c57_only_what_needs_a_gradient(device, wanted, monkeypatch) -> None:
    bias = guarded((70, 90), device=device)
    tensors = [*make_qkv(device=device, requires_grad=False), bias]
    tensors[wanted].requires_grad_()
    products: list[tuple[int, ...]] = []
    add = cpu._add
    monkeypatch.setattr(cpu, "_add", lambda into, *rest: (products.append(tuple(into.shape)), add(into, *rest))[1])
    flex_attention(
        *tensors[:3], lambda s, b, h, i, j: s + bias[i, j], mask_mod=causal, enable_gqa=True
    ).sum().backward()
    assert [x.grad is not None for x in tensors] == [n == wanted for n in range(4)]
    assert len(products) == (1 if wanted == 2 and device == "cpu" else 0)  # dK and dV alone go through it
    expected = oracle(*tensors[:3], causal, lambda s, b, h, i, j: s + bias[i, j])[0]
    (want,) = torch.autograd.grad(expected.sum(), tensors[wanted])
    assert (tensors[wanted].grad - want).abs().max() < 2e-5 * max(1.0, want.abs().max().item())


# ---------------------------------------------------------------- line 9: nothing is built again
@on_devices
def test_numbers_lengths_and_batches_build_nothing_again(device, fresh_stats) -> None:
    def call(size: int, batch: int, heads: int, q_len: int, kv_len: int) -> None:
        slopes = torch.rand(heads, device=device)
        qkv = make_qkv(batch, (heads, heads), (q_len, kv_len), (16, 16), device=device)
        mask = lambda b, h, i, j: (i - j <= size) & (j - i <= size)
        check(qkv, mask, lambda s, b, h, i, j: s + slopes[h] * j)

    call(5, 2, 2, 70, 80)
    before = flexattn.stats()
    for size in (0, 1, 16, 17, -1, 2**31):
        call(size, 1, 3, 71, 83)
    for n in (1, 16, 17):
        call(3, n, 2, 40, 41)
        call(3, 1, n, 40, 41)
        call(3, 1, 1, n, 33)
        call(3, 1, 1, 33, n)
    assert flexattn.stats().builds.total() == before.builds.total()
    assert flexattn.stats().plans.total() == before.plans.total()


# ---------------------------------------------------------------- C72: no GPU, no kernel compiler
def test_c72_needs_neither_cuda_nor_triton() -> None:
    code = """
import sys, torch, flexattn
q = torch.randn(1, 2, 300, 16, requires_grad=True)
out = flexattn.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, mask_mod=lambda b, h, i, j: i >= j)
out.sum().backward()
print("triton" in sys.modules, torch.cuda.is_initialized(), bool(torch.isfinite(q.grad).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


def test_c72_gradients_by_finite_differences() -> None:
    table = torch.randn(7, dtype=F64, requires_grad=True)
    qkv = make_qkv(1, (2, 1), (4, 6), (3, 2), dtype=F64)

    def call(q, k, v, table):
        out, aux = flex_attention(
            q,
            k,
            v,
            lambda s, b, h, i, j: torch.tanh(s * table[j]) + table[i],
            mask_mod=causal,
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        return out, aux.lse

    assert torch.autograd.gradcheck(call, (*qkv, table))


def test_new_memory_is_checked() -> None:
    with nan_filled_allocations():
        assert torch.empty(3).isnan().all()
        assert F.relu(torch.empty(2)).isnan().all()
