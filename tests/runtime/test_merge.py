"""merge_states: the formula, associativity, empty parts, gradients of both orders, half types, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import merge_states
from flexattn.errors import CallError, DeviceError, DTypeError, ShapeError
from tests.helpers import on_devices

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def part(*shape: int, dtype: torch.dtype = F32, device: str = "cpu", requires_grad: bool = False) -> list[Tensor]:
    """(out [*shape], lse [shape without its last]), random."""
    wide = F64 if dtype == F64 else F32
    out, lse = torch.randn(shape, dtype=F64).to(device, dtype), torch.randn(shape[:-1], dtype=F64).to(device, wide) * 3
    return [x.requires_grad_(requires_grad) for x in (out, lse)]


def formula(*parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Any number of parts in float64, by the sums themselves; every row has at least one part with keys."""
    outs, lses = (torch.stack([x.double() for x in xs]) for xs in zip(*parts))
    weights = lses.exp().unsqueeze(-1)
    return (weights * outs).sum(0) / weights.sum(0), lses.exp().sum(0).log()


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@on_devices
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 17, 8), (2, 1, 3, 2, 6)])
def test_formula_for_any_leading_shape(device, shape, dtype) -> None:
    a, b = part(*shape, dtype=dtype, device=device), part(*shape, dtype=dtype, device=device)
    out, lse = merge_states(*a, *b)
    want_out, want_lse = formula(a, b)
    assert (out.dtype, lse.dtype) == (dtype, F64 if dtype == F64 else F32)
    assert (out.shape, lse.shape) == (shape, shape[:-1])
    size = a[0].abs() + b[0].abs()
    assert (
        (out - want_out).abs() <= (ulp(dtype) / 2) * want_out.abs() + 4 * ulp(lse.dtype) * size
    ).all()  # rounded once
    assert ((lse - want_lse).abs() <= 4 * ulp(lse.dtype) * want_lse.abs().clamp(min=1)).all()


@on_devices
def test_associative_and_commutative(device) -> None:
    a, b, c = (part(2, 3, 40, 8, device=device) for _ in range(3))
    for x in (a, b, c):
        x[1][torch.rand_like(x[1]) < 0.4] = -math.inf  # some rows are empty in one, two or all parts
    left = merge_states(*merge_states(*a, *b), *c)
    right = merge_states(*a, *merge_states(*b, *c))
    swapped = merge_states(*merge_states(*c, *b), *a)
    assert torch.isneginf(left[1]).any() and not torch.isneginf(left[1]).all()
    for other in (right, swapped):
        assert torch.equal(torch.isneginf(other[1]), torch.isneginf(left[1]))
        assert (other[0] - left[0]).abs().max() < 2e-6
        assert torch.nan_to_num(other[1] - left[1]).abs().max() < 2e-6
    assert all(torch.equal(x, y) for x, y in zip(merge_states(*a, *b), merge_states(*b, *a)))


@on_devices
@pytest.mark.parametrize("held", [0.0, math.nan, math.inf])
def test_an_empty_part_adds_nothing_whatever_its_out_holds(device, held) -> None:
    a, b = part(4, 6, device=device), part(4, 6, device=device)
    b[0].fill_(held)
    b[1].fill_(-math.inf)
    leaves = [x.requires_grad_() for x in (*a, *b)]
    for pair in ((a, b), (b, a)):
        out, lse = merge_states(*pair[0], *pair[1])
        assert torch.equal(out, a[0])
        assert torch.equal(lse, a[1])
        weight = torch.randn_like(out)
        grads = torch.autograd.grad((out * weight).sum() + lse.sum(), leaves)
        assert torch.equal(grads[0], weight)
        assert torch.equal(grads[1], torch.ones_like(lse))
        assert grads[2].abs().max() == grads[3].abs().max() == 0


@on_devices
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_two_empty_parts(device, dtype) -> None:
    a, b = part(4, 6, dtype=dtype, device=device), part(4, 6, dtype=dtype, device=device)
    for x in (a, b):
        x[1].fill_(-math.inf)
    leaves = [x.requires_grad_() for x in (*a, *b)]
    out, lse = merge_states(*a, *b)
    assert out.abs().max() == 0
    assert torch.isneginf(lse).all()
    grads = torch.autograd.grad((out.float() * 3).sum() + torch.where(lse > -math.inf, lse, 0.0).sum(), leaves)
    assert all(g.abs().max() == 0 for g in grads)


def test_gradients_of_both_orders_by_finite_differences() -> None:
    a, b = part(3, 2, 4, dtype=F64, requires_grad=True), part(3, 2, 4, dtype=F64, requires_grad=True)
    with torch.no_grad():
        a[1][0, 0], b[1][2, 1] = -math.inf, -math.inf  # a row that is empty in a, one that is empty in b
    assert torch.autograd.gradcheck(merge_states, (*a, *b))
    assert torch.autograd.gradgradcheck(merge_states, (*a, *b))


@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_result_or_one_argument_alone(which) -> None:
    a, b = part(5, 3, dtype=F64), part(5, 3, dtype=F64)
    pick = {"out": 0, "lse": 1}[which]
    for i in range(4):
        leaves = [x.clone() for x in (*a, *b)]
        leaf = leaves[i].requires_grad_()
        (got,) = torch.autograd.grad(merge_states(*leaves)[pick].square().sum(), leaf, allow_unused=True)
        exact = formula((leaves[0], leaves[1]), (leaves[2], leaves[3]))[pick]
        if which == "lse" and i in (0, 2):
            assert got is None  # lse does not depend on out
            continue
        (want,) = torch.autograd.grad(exact.square().sum(), leaf)
        assert (got - want).abs().max() < 1e-12


@on_devices
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gradients_of_half_types_are_computed_in_float32(device, dtype) -> None:
    leaves = [*part(6, 50, 64, dtype=dtype, device=device), *part(6, 50, 64, dtype=dtype, device=device)]
    leaves = [x.requires_grad_() for x in leaves]
    weight = torch.randn(6, 50, 64, device=device).to(dtype).float()
    out, lse = merge_states(*leaves)
    grads = torch.autograd.grad((out.float() * weight).sum() + lse.sum(), leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want_out, want_lse = formula((exact[0], exact[1]), (exact[2], exact[3]))
    wanted = torch.autograd.grad((want_out * weight).sum() + want_lse.sum(), exact)
    for leaf, got, want in zip(leaves, grads, wanted):
        assert got.dtype == leaf.dtype
        rounding = ulp(dtype) / 2 if leaf.dtype == dtype else 0.0
        assert ((got - want).abs() <= rounding * want.abs() + 2e-5 * want.abs().clamp(min=1)).all()


def test_large_lse_loses_no_digits_and_nan_is_not_hidden() -> None:
    a, b = part(9, 4), part(9, 4)
    near = merge_states(a[0], a[1], b[0], b[1])
    shifted = merge_states(a[0], (a[1] * 64).round() / 64 + 2**14, b[0], (b[1] * 64).round() / 64 + 2**14)
    rounded = merge_states(a[0], (a[1] * 64).round() / 64, b[0], (b[1] * 64).round() / 64)
    assert torch.equal(shifted[0], rounded[0])
    assert near[0].isfinite().all()
    a[1][3] = math.nan
    out, lse = merge_states(*a, *b)
    assert out[3].isnan().all() and lse[3].isnan()
    assert out[4:].isfinite().all()


def test_strides_sizes_of_zero_and_autocast() -> None:
    a, b = part(2, 5, 3, 4), part(2, 5, 3, 4)
    turned = merge_states(*(x.transpose(1, 2) for x in (*a, *b)))
    plain = merge_states(*a, *b)
    assert all(torch.equal(x.transpose(1, 2), y) for x, y in zip(turned, plain))
    with torch.autocast("cpu", dtype=BF16):
        assert all(torch.equal(x, y) for x, y in zip(merge_states(*a, *b), plain))
    for shape in ((0, 4), (3, 0)):
        out, lse = merge_states(*part(*shape, requires_grad=True), *part(*shape))
        assert out.shape == shape
        (out.sum() + lse.sum()).backward()


def test_saves_nothing_but_its_arguments() -> None:
    a, b = part(64, 8, requires_grad=True), part(64, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        merge_states(*a, *b)
    assert sorted(saved) == sorted(x.data_ptr() for x in (*a, *b))


def test_is_public() -> None:
    assert flexattn.merge_states is merge_states
    assert "merge_states" in flexattn.__all__


# ---------------------------------------------------------------- what it refuses
def test_errors_name_what_does_not_fit() -> None:
    out, lse = part(5, 3)
    with pytest.raises(CallError, match=r"lse_a must be a torch\.Tensor; got float"):
        merge_states(out, 1.0, out, lse)
    for bad in ((out, lse, out[:, :2], lse), (out, lse, out, lse[:4]), (out, lse[:, None], out, lse), (lse[0],) * 4):
        with pytest.raises(ShapeError, match=r"of one shape \[\.\.\., v_dim\].*out_a: \(.*lse_b: \("):
            merge_states(*bad)
    with pytest.raises(DTypeError, match=r"one dtype.*out_a: torch\.float32.*out_b: torch\.bfloat16.*float32"):
        merge_states(out, lse, out.to(BF16), lse)
    with pytest.raises(DTypeError, match=r"one dtype.*int64"):
        merge_states(out.long(), lse, out.long(), lse)
    with pytest.raises(DTypeError, match=r"lse_a and lse_b in torch\.float32 where the outs are torch\.bfloat16"):
        merge_states(out.to(BF16), lse.to(BF16), out.to(BF16), lse.to(BF16))
    with pytest.raises(DTypeError, match=r"lse_a and lse_b in torch\.float64"):
        merge_states(out.double(), lse, out.double(), lse)
    with pytest.raises(DeviceError, match="one device; got out_a: cpu, lse_a: cpu, out_b: meta"):
        merge_states(out, lse, out.to("meta"), lse.to("meta"))
