"""The generated kernels against the float64 oracle, in Triton's interpreter: forward, lse and every gradient."""

from __future__ import annotations

import math

import pytest
import torch

import flexattn
from flexattn import AuxRequest, flex_attention
from flexattn.errors import OptionError
from flexattn.runtime.reference import oracle
from tests.runtime.kernel_cases import CASES, Case, check, check_rows_of_one_key, run, tensors_of

CPU = torch.device("cpu")
TRITON = {"BACKEND": "TRITON"}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says when a masked lane divides by zero


@pytest.mark.parametrize("name", CASES)
def test_case_in_float32(name: str) -> None:
    check(CASES[name], CPU)


@pytest.mark.parametrize("name", ["tail and dims", "softcap", "relative bias", "empty rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_in_half_types(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], CPU, dtype)


@pytest.mark.parametrize("tiles", [(16, 32), (32, 16), (64, 16)])
def test_tiles_a_caller_fixed(tiles: tuple[int, int]) -> None:
    check(CASES["window"], CPU, BLOCK_M=tiles[0], BLOCK_N=tiles[1])
    check(CASES["group of three"], CPU, BLOCK_M1=tiles[0], BLOCK_N1=tiles[1], BLOCK_M2=tiles[1], BLOCK_N2=tiles[0])


def test_tiles_that_are_not_legal_are_refused() -> None:
    q = torch.randn(1, 1, 20, 16)
    with pytest.raises(OptionError, match="BLOCK_N must be a power of two"):
        flex_attention(q, q, q, kernel_options={**TRITON, "BLOCK_N": 512})


def test_empty_rows_are_exactly_zero() -> None:
    case = CASES["empty rows"]
    _, mask, _ = case.make(CPU, case)
    qkv = tensors_of(case, torch.float32, CPU)
    out, lse = run(case, qkv, (None, mask))
    dq, _, _ = torch.autograd.grad(out.sum() + torch.where(torch.isfinite(lse), lse, 0.0).sum(), qkv)
    assert (lse[:, :, :20] == -math.inf).all() and torch.isfinite(lse[:, :, 20:]).all()
    assert (out[:, :, :20] == 0).all() and (dq[:, :, :20] == 0).all()


def test_keys_nobody_reads_get_zero_gradients() -> None:
    case = CASES["empty columns"]
    qkv = tensors_of(case, torch.float32, CPU)
    out, _ = run(case, qkv, case.make(CPU, case)[:2])
    _, dk, dv = torch.autograd.grad(out.sum(), qkv)
    for x in (dk, dv):
        assert (x[:, :, 40:] == 0).all() and (x[:, :, 7] == 0).all() and (x[:, :, :7] != 0).any()


def test_strides_of_every_kind() -> None:
    fused = torch.randn(2, 40, 3, 2, 16)  # [batch, length, 3, heads, dim]
    q, k, v = (fused[:, :, n].transpose(1, 2).requires_grad_() for n in range(3))
    transposed = k.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()  # last stride is not 1
    expanded = v.detach()[:, :1].expand(2, 2, 40, 16).requires_grad_()  # stride 0 over heads
    odd = torch.randn(2 * 2 * 40 * 17 + 1)[1:].view(2, 2, 40, 17)[..., :16].requires_grad_()  # offset of one element
    last = q.detach().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0).requires_grad_()  # out follows this order
    for tensors in ((q, k, v), (q, transposed, expanded), (odd, k, odd.detach().requires_grad_()), (last, k, v)):
        out = flex_attention(*tensors, mask_mod=lambda b, h, i, j: i >= j, kernel_options=TRITON)
        right, _ = oracle(*tensors, lambda b, h, i, j: i >= j)
        for upstream in (torch.ones(()).expand(out.shape), torch.randn(2, 40, 2, 16).transpose(1, 2)):
            got = torch.autograd.grad(out, tensors, upstream, retain_graph=True)
            wanted = torch.autograd.grad(right, tensors, upstream.double(), retain_graph=True)
            for a, b in zip((out, *got), (right, *wanted)):
                torch.testing.assert_close(a.double(), b.double(), atol=3e-5, rtol=0)


def test_one_tensor_as_query_key_and_value() -> None:
    x = torch.randn(1, 2, 37, 16, requires_grad=True)
    y = x.detach().double().requires_grad_()
    got = torch.autograd.grad(flex_attention(x, x, x, kernel_options=TRITON).sum(), x)[0]
    torch.testing.assert_close(got.double(), torch.autograd.grad(oracle(y, y, y)[0].sum(), y)[0], atol=3e-5, rtol=0)


def test_nan_past_the_lengths_and_in_skipped_tiles_changes_no_bit() -> None:
    def once(poison: float) -> list[torch.Tensor]:
        torch.manual_seed(3)
        storage = [torch.randn(1, 1, 128, 16) for _ in range(3)]
        for x in storage:
            x[:, :, 100:] = poison
        storage[1][:, :, 64:96] = storage[2][:, :, 64:96] = poison
        qkv = [x[:, :, :100].detach().requires_grad_() for x in storage]
        out = flex_attention(*qkv, mask_mod=lambda b, h, i, j: (j < 64) | (j >= 96), kernel_options=TRITON)
        return [out, *torch.autograd.grad(out.sum(), qkv)]

    for clean, dirty in zip(once(0.0), once(math.nan)):
        assert torch.equal(clean, dirty)


def test_kept_read_out_of_range_is_nan_for_floats_and_zero_for_integers() -> None:
    q = torch.randn(1, 1, 20, 16)
    floats, ints = torch.zeros(10), torch.ones(10, dtype=torch.int64)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s + floats[i], kernel_options=TRITON)
    assert torch.isfinite(out[:, :, :10]).all() and torch.isnan(out[:, :, 10:]).all()
    out = flex_attention(q, q, q, lambda s, b, h, i, j: torch.where(ints[j] == 1, s, -math.inf), kernel_options=TRITON)
    torch.testing.assert_close(out, oracle(q, q[:, :, :10], q[:, :, :10])[0].float(), atol=3e-5, rtol=0)


def test_maxima_of_rows() -> None:
    case = Case(1, 2, 2, 40, 45)
    q, k, v = (x.detach() for x in tensors_of(case, torch.float32, CPU))
    score, mask = (lambda s, b, h, i, j: 2 * s - 1), (lambda b, h, i, j: i - 10 >= j)
    _, aux = flex_attention(
        q, k, v, score, mask_mod=mask, return_aux=AuxRequest(max_scores=True), kernel_options=TRITON
    )
    scores = 2 * (q @ k.mT) * 0.25 - 1
    keep = torch.arange(40)[:, None] - 10 >= torch.arange(45)
    torch.testing.assert_close(aux.max_scores, torch.where(keep, scores, -math.inf).amax(-1), atol=1e-5, rtol=0)


def test_a_narrow_tables_gradient_is_rounded_once() -> None:
    """Each element is a sum of some 60 terms; rounding them on their own would cost several units in the last place."""
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    table = torch.randn(2, 65, dtype=torch.bfloat16, requires_grad=True)
    wide = table.detach().double().requires_grad_()
    weight = torch.randn(1, 2, 33, 16)
    scores = [lambda s, b, h, i, j, t=t: s + t[h, (i - j) % 3] for t in (table, wide)]
    out = flex_attention(q, k, v, scores[0], kernel_options=TRITON)
    (got,) = torch.autograd.grad((out * weight).sum(), table)
    (right,) = torch.autograd.grad((oracle(q, k, v, None, scores[1])[0] * weight).sum(), wide)
    assert ((got.double() - right).abs() <= right.abs() * 2**-8 + 1e-5).all()


def test_only_the_kernels_that_are_needed_run() -> None:
    for wanted, kernels in ((0, {"delta", "dq"}), (1, {"delta", "dkdv"}), (2, {"delta", "dkdv"}), (3, {"delta", "dq"})):
        qkv = [torch.randn(1, 1, 20, 16) for _ in range(3)]
        bias = torch.randn(20)
        [*qkv, bias][wanted].requires_grad_()
        out = flex_attention(*qkv, lambda s, b, h, i, j: s + bias[j], kernel_options=TRITON)
        right, _ = oracle(*qkv, None, lambda s, b, h, i, j: s + bias[j])
        flexattn.reset_stats()
        weight = torch.randn_like(out)
        got = torch.autograd.grad((out * weight).sum(), [*qkv, bias][wanted])[0]
        assert set(flexattn.stats().launches) == kernels
        torch.testing.assert_close(
            got, torch.autograd.grad((right * weight).sum(), [*qkv, bias][wanted])[0], atol=3e-5, rtol=0
        )


def test_numbers_lengths_and_batches_build_nothing_again() -> None:
    def call(window: int, batch: int, length: int) -> None:
        q = torch.randn(batch, 2, length, 16, requires_grad=True)
        mask = lambda b, h, i, j: (i >= j) & (i - j < window)
        out = flex_attention(q, q, q, mask_mod=mask, kernel_options=TRITON)
        got = torch.autograd.grad(out.sum(), q)[0]
        x = q.detach().double().requires_grad_()
        torch.testing.assert_close(
            got.double(), torch.autograd.grad(oracle(x, x, x, mask)[0].sum(), x)[0], atol=5e-5, rtol=0
        )

    call(5, 1, 33)
    flexattn.reset_stats()
    for window, batch, length in ((0, 1, 40), (1, 2, 49), (16, 1, 65), (17, 3, 33), (-1, 1, 48)):
        call(window, batch, length)
    assert flexattn.stats().builds.total() == 0
    call(2**31, 1, 40)  # the one stated wide class
    assert 0 < flexattn.stats().builds.total() <= 3


def test_rows_of_one_key_are_exact() -> None:
    check_rows_of_one_key("cpu")
