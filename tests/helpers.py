"""What every test of attention needs: problems in NaN-filled memory, the error rule of the contract, gradients in one call.

Reads tensors and mods, makes tensors, or raises AssertionError with the figures; nothing here passes without comparing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.errors import FlexError
from flexattn.runtime.reference import call_mod, oracle

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
on_devices = pytest.mark.parametrize("device", DEVICES)
HALF = (torch.float16, torch.bfloat16)
GUARD = 67  # NaN elements in front of and behind a tensor's own: an odd number, so that nothing is aligned
ALIGNED = 64  # the same where a tensor shall be aligned as a fresh one is


# ---------------------------------------------------------------- mods
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query's own position, from the upper left corner."""
    return q_idx >= kv_idx


def window(size: int) -> Any:
    """The last `size` keys up to the query's own position."""
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < size)


# ---------------------------------------------------------------- problems
def guarded(
    shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: str = "cpu", guard: int = GUARD
) -> Tensor:
    """randn in the middle of an allocation of NaN: reading outside it cannot go unnoticed."""
    size = math.prod(shape)
    memory = torch.full((size + 2 * guard,), math.nan, dtype=dtype, device=device)
    memory[guard : guard + size] = torch.randn(size, device=device).to(dtype)
    return memory[guard : guard + size].view(*shape)


def make_qkv(
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (70, 90),
    dims: tuple[int, int] = (16, 24),
    *,
    kv_batch: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    requires_grad: bool = True,
    guard: int = GUARD,
) -> tuple[Tensor, Tensor, Tensor]:
    """query, key, value in guarded memory; every size differs unless asked otherwise."""
    kv = (batch if kv_batch is None else kv_batch, heads[1], lengths[1])
    shapes = ((batch, heads[0], lengths[0], dims[0]), (*kv, dims[0]), (*kv, dims[1]))
    options: dict[str, Any] = {"dtype": dtype, "device": device, "guard": guard}
    q, k, v = (guarded(shape, **options).requires_grad_(requires_grad) for shape in shapes)
    return q, k, v


def square_qkv(
    *,
    heads: int = 4,
    kv_heads: int | None = None,
    q_len: int = 40,
    kv_len: int = 40,
    qk_dim: int = 16,
    v_dim: int = 24,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`make_qkv` with every size by name and, by default, as many keys as queries and a key head for each query head."""
    kv_heads = heads if kv_heads is None else kv_heads
    return make_qkv(heads=(heads, kv_heads), lengths=(q_len, kv_len), dims=(qk_dim, v_dim), **options)


@contextmanager
def nan_filled_allocations() -> Iterator[None]:
    """Every torch.empty inside is full of NaN (the greatest value for integers): what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan().all(), "torch does not fill new memory"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def is_same_but_for_order(a: Tensor, b: Tensor) -> bool:
    """Whether two half tensors are the same sums, added in another order in float32: hardly an element is rounded the other way."""
    return bool((a.double() - b.double()).norm() <= 1e-3 * b.double().norm())


# ---------------------------------------------------------------- results
@dataclass
class Result:
    """out, lse and the gradients of the leaves, in order."""

    out: Tensor
    lse: Tensor
    grads: tuple[Tensor, ...]

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {"out": self.out, "lse": self.lse, **{f"gradient {i}": g for i, g in enumerate(self.grads)}}


def weights_for(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Fixed random weights of a loss over out and lse, float64."""
    generator = torch.Generator().manual_seed(17)
    shape = (*q.shape[:3], v.shape[3])
    pair = torch.randn(shape, generator=generator), torch.randn(q.shape[:3], generator=generator)
    return pair[0].double().to(q.device), pair[1].double().to(q.device)


def differentiate(out: Tensor, lse: Tensor, leaves: Sequence[Tensor], weights: tuple[Tensor, Tensor | None]) -> Result:
    """Gradients of sum(out * w) + sum(lse * u) over rows that are not empty; a leaf that is not reached has gradient 0."""
    weight, lse_weight = weights
    loss = (out.double() * weight).sum()
    if lse_weight is not None:
        loss = loss + (torch.where(torch.isneginf(lse), 0.0, lse.double()) * lse_weight).sum()
    grads = torch.autograd.grad(loss, list(leaves), allow_unused=True, retain_graph=True) if leaves else ()
    return Result(
        out.detach(), lse.detach(), tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))
    )


def run(
    qkv: Sequence[Tensor],
    mask_mod: Any = None,
    score_mod: Any = None,
    *,
    captures: Sequence[Tensor] = (),
    with_lse: bool = True,
    **options: Any,
) -> Result:
    """flexattn.flex_attention with gradients for every leaf that wants one, its new memory full of NaN."""
    leaves = [x for x in (*qkv, *captures) if x.requires_grad]
    weights = weights_for(qkv[0], qkv[2])
    with nan_filled_allocations():
        out, aux = flexattn.flex_attention(
            *qkv, score_mod, mask_mod=mask_mod, enable_gqa=True, return_aux=flexattn.AuxRequest(lse=True), **options
        )
        return differentiate(out, aux.lse, leaves, (weights[0], weights[1] if with_lse else None))


def exact(
    qkv: Sequence[Tensor],
    mask_mod: Any = None,
    score_mod: Any = None,
    *,
    captures: Sequence[Tensor] = (),
    scale: float | None = None,
    with_lse: bool = True,
) -> Result:
    """The same from the float64 oracle, with float64 gradients: captured tensors are float64 while it runs."""
    inputs = [x.detach().double().requires_grad_(x.requires_grad) for x in qkv]
    leaves = [x for x in (*inputs, *captures) if x.requires_grad]
    weights = weights_for(qkv[0], qkv[2])
    stored = [x.data for x in captures]
    try:
        for x in captures:
            x.data = x.data.double()
        out, lse = oracle(*inputs, mask_mod, score_mod, scale)
        return differentiate(out, lse, leaves, (weights[0], weights[1] if with_lse else None))
    finally:
        for x, data in zip(captures, stored):
            x.data = data


LOG2E = math.log2(math.e)


class _Chain(torch.autograd.Function):
    """a @ b in one chain of additions an element, as a kernel on ordinary arithmetic units sums it (torch's own among them).

    Libraries split long sums over threads, which is a digit more exact than any such kernel can be.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _chain(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return _chain(grad, b.transpose(-1, -2)), _chain(a.transpose(-1, -2), grad)


def _chain(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device=a.device)
    for i in range(a.shape[-1]):
        total = torch.addcmul(total, a[..., i : i + 1], b[..., i : i + 1, :])
    return total


def dense(
    qkv: Sequence[Tensor],
    mask_mod: Any = None,
    score_mod: Any = None,
    *,
    captures: Sequence[Tensor] = (),
    scale: float | None = None,
    with_lse: bool = True,
) -> tuple[Result, ...]:
    """The same formula done densely in the inputs' type with a float32 softmax: how large an error is fair.

    Differentiated by autograd through the softmax, and as fused kernels do it, from the rounded lse (in natural units, or in base 2 as
    torch's) and out; for float32 on a GPU also with products summed in one chain.
    """
    options: dict[str, Any] = {"captures": captures, "scale": scale, "with_lse": with_lse}
    fair = _dense(qkv, mask_mod, score_mod, product=torch.matmul, **options)
    if qkv[0].is_cuda and qkv[0].dtype == torch.float32:
        fair += _dense(qkv, mask_mod, score_mod, product=_Chain.apply, **options)
    return fair


def _dense(
    qkv: Sequence[Tensor],
    mask_mod: Any,
    score_mod: Any,
    *,
    product: Any,
    captures: Sequence[Tensor],
    scale: float | None,
    with_lse: bool,
) -> tuple[Result, ...]:
    leaves = [x for x in (*qkv, *captures) if x.requires_grad]
    weight, lse_weight = weights_for(qkv[0], qkv[2])
    lse_weight = lse_weight if with_lse else torch.zeros_like(lse_weight)
    q, k, v = qkv
    k, v = (x.expand(q.shape[0], *x.shape[1:]).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = product(q, k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = call_mod(score_mod, scores.shape, q.device, scores).float()
    keep = (
        call_mod(mask_mod, scores.shape, q.device).bool()
        if mask_mod is not None
        else torch.ones_like(scores, dtype=torch.bool)
    )
    keep = keep & ~torch.isneginf(scores)
    some = keep.any(-1, keepdim=True)
    peak = torch.where(some, torch.where(keep, scores, -math.inf).amax(-1, keepdim=True), 0.0).detach()
    p = torch.where(keep, torch.where(keep, scores - peak, 0.0).exp(), 0.0)
    total = torch.where(some, p.sum(-1, keepdim=True), 1.0)
    lse = torch.where(some, peak + total.log(), -math.inf).squeeze(-1)
    out = product((p / total).to(q.dtype), v)
    if not leaves:
        plain = Result(out.detach(), lse.detach(), ())
        return (plain,)
    first = differentiate(out, lse, leaves, (weight, lse_weight))
    d_out = weight.to(q.dtype)
    delta = (d_out.float() * out.float()).sum(-1, keepdim=True) - lse_weight.float().unsqueeze(-1)
    d_p = product(d_out, v.transpose(-1, -2)).float() - delta
    row = torch.where(some, lse.unsqueeze(-1), 0.0)
    results = [first]
    for p in ((scores - row).exp(), torch.exp2(scores * LOG2E - row * LOG2E)):
        p = torch.where(keep, p, 0.0).detach()
        pairs = ((scores, torch.where(keep, p * d_p, 0.0).detach()), (product(p.to(q.dtype), v), d_out))
        outputs, upstream = zip(*(pair for pair in pairs if pair[0].requires_grad))
        grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, retain_graph=True)
        again = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))
        results.append(Result(first.out, first.lse, again))
    return tuple(results)


def kept_pairs(mask_mod: Any, q_len: int, kv_len: int, device: str) -> int:
    """How many pairs attention itself keeps: with scores of 0 a row's lse is the log of its kept keys."""
    q, k = (torch.zeros(1, 1, n, 4, device=device) for n in (q_len, kv_len))
    aux = flexattn.flex_attention(q, k, k, mask_mod=mask_mod, return_aux=flexattn.AuxRequest(lse=True))[1]
    return int(aux.lse.double().exp().round().sum())


# ---------------------------------------------------------------- the error rule
def mean_error(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """(mean, maximum) of |actual - expected|, in float64; infinities must be at the same places, NaN is an infinite error."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    same = actual == expected  # equal infinities
    error = torch.where(same, 0.0, (actual - expected).abs())
    error = torch.where(error.isnan(), math.inf, error)
    return (error.mean().item(), error.max().item()) if error.numel() else (0.0, 0.0)


def assert_rule(name: str, actual: Tensor, expected: Tensor, fair: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Contract line 7 for one tensor.

    Mean error at most 1.1x (out and lse) or 1.25x (gradients) the larger error of `fair` for half types, 2x for float32 with a floor
    of 1e-7 of mean |expected|. The maximum rule of the collected cases is the outer bound.
    """
    error, worst = mean_error(actual, expected)
    fair_error, fair_worst = (max(errors) for errors in zip(*(mean_error(x, expected) for x in fair)))
    finite = expected[torch.isfinite(expected)].double().abs()
    size, largest = (finite.mean().item(), finite.max().item()) if finite.numel() else (0.0, 0.0)
    factor = (1.1 if name in ("out", "lse") else 1.25) if dtype in HALF else 2.0
    figures = f"{name}: mean error {error:.3g} (max {worst:.3g}), fair {fair_error:.3g} (max {fair_worst:.3g})"
    assert error <= max(factor * fair_error, 1e-7 * size), figures
    assert worst <= (2 * fair_worst + 1e-3 if dtype in HALF else 2e-5 * max(1.0, largest)), figures


def assert_explains(error: BaseException, *words: object) -> None:
    """Contract line 8: the text names what `words` say, what came and what to try."""
    assert isinstance(error, FlexError)
    assert "got " in str(error) and error.hint, f"does not say what came and what to try: {error}"
    for word in words:
        assert str(word) in str(error), f"{word} is not in: {error}"


def check(
    qkv: Sequence[Tensor],
    mask_mod: Any = None,
    score_mod: Any = None,
    *,
    captures: Sequence[Tensor] = (),
    scale: float | None = None,
    **options: Any,
) -> Result:
    """Runs, compares out, lse and every gradient with the oracle under the contract's rule, and returns what ran."""
    if scale is not None:
        options["scale"] = scale
    result = run(qkv, mask_mod, score_mod, captures=captures, **options)
    expected = exact(qkv, mask_mod, score_mod, captures=captures, scale=scale)
    fair = dense(qkv, mask_mod, score_mod, captures=captures, scale=scale)
    assert result.out.dtype == qkv[0].dtype
    assert result.lse.dtype == (torch.float64 if qkv[0].dtype == torch.float64 else torch.float32)
    assert_rule("out", result.out, expected.out, [x.out for x in fair], qkv[0].dtype)
    assert_rule("lse", result.lse, expected.lse, [x.lse for x in fair], torch.float32)
    leaves = [x for x in (*qkv, *captures) if x.requires_grad]
    for i, leaf in enumerate(leaves):
        assert result.grads[i].dtype == leaf.dtype
        name = f"gradient {i} of shape {tuple(leaf.shape)}"
        assert_rule(name, result.grads[i], expected.grads[i], [x.grads[i] for x in fair], qkv[0].dtype)
    return result


def check_shared(
    qkv: Sequence[Tensor], leaf: Tensor, collect: Callable[[Sequence[Tensor]], Tensor], mask_mod: Any = None
) -> None:
    """Query, key and value of which some are views of one leaf: its gradient is what `collect` makes of theirs."""
    alone = [x.detach().requires_grad_(x.requires_grad) for x in qkv]
    expected, fair = exact(alone, mask_mod), dense(alone, mask_mod)
    weights = weights_for(qkv[0], qkv[2])
    with nan_filled_allocations():
        out, aux = flexattn.flex_attention(
            *qkv, mask_mod=mask_mod, enable_gqa=True, return_aux=flexattn.AuxRequest(lse=True)
        )
        (grad,) = differentiate(out, aux.lse, [leaf], weights).grads
    assert_rule("out", out, expected.out, [x.out for x in fair], leaf.dtype)
    assert_rule("gradient of the leaf", grad, collect(expected.grads), [collect(x.grads) for x in fair], leaf.dtype)
