"""Whether gradients are wrong: sound bounds for every element, as in judge.py, from the roundings that a fused backward makes.

Reads a Problem and what its call and its backward gave; makes a row of figures on the device. The ideas: what a backward rounds to
a half type (the saved output, probabilities before dv, gradients of scores before dq and dk, results) is rounded here too, in float64
otherwise, from the very output and log-sum that the call has saved. What may differ then is float32's error, and where that decides
how a value is rounded, both ways are allowed: hundreds of times narrower than what rounding costs, so that one pair too many or too
few shows. The contract's rule, a mean error of at most 1.25 times that of dense formulas in the same type, is asked against float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.judge import (
    ALIKE,
    FEW,
    HALF,
    SINGLE,
    TINY,
    Right,
    allowed_of_out,
    by_query_head,
    keep_of,
    modify,
    right,
)
from tests.fuzz.problems import Problem

CHECKS = ("dq", "dk", "dv", "captures", "gradient means", "bits")
_SUM = 2.0**-18  # what a long sum in float32 may lose, of the sum of sizes
_MEAN = 1.25


class _Pairs(NamedTuple):
    """What gradients are sums of, [batch, q_heads, q_len, kv_len]: probabilities, and gradients of scores and of modified scores."""

    probs: Tensor
    d_scores: Tensor
    d_modified: Tensor


def judge_gradients(
    problem: Problem, out: Tensor, lse: Tensor, grads: Sequence[Tensor], *, is_rounded: bool = True
) -> Tensor:
    """Figures of CHECKS, float64: each is an error in terms of what is allowed, so that more than 1 is wrong; infinite for NaN.

    Args:
        problem: on the device to compare on.
        out, lse: what the call gave, anywhere.
        grads: of the problem's leaves, once or, where the same bits are asked for, twice; anywhere.
        is_rounded: False where values may also not have been rounded on the way, as in torch's operations on a CPU.
    """
    device, fair = problem.q.device, _fair(problem)
    problem = problem.exact()  # sums of their gradients are float64 then
    leaves, wanted = problem.leaves, right(problem, with_graph=True)
    out, lse, grads = out.detach().to(device), lse.detach().to(device), [g.to(device) for g in grads]
    exact_pairs = _exact(problem, wanted)
    exact = _sums(problem, wanted, exact_pairs)
    rounded, apart = _as_fused(problem, wanted, out, lse, is_rounded)
    made, allowed = _sums(problem, wanted, rounded), _sums(problem, wanted, apart, of_sizes=True)
    at_most = _cost_of_rounding(problem, wanted, exact_pairs, exact)
    figures = {name: torch.zeros((), dtype=torch.float64, device=device) for name in CHECKS}
    for n, (leaf, found) in enumerate(zip(leaves, grads)):
        where, mean = _where(problem, leaf), (found.double() - exact[n]).abs().mean()
        low, high = (_to(made[n] + side * allowed[n], found.dtype) for side in (-1, 1))
        room = torch.maximum(high - made[n], made[n] - low) + 1e-30
        figures[where] = torch.maximum(figures[where], ((found.double() - made[n]).abs() / room).amax())
        dense = torch.stack([(x - exact[n]).abs().mean() for x in fair[n]]).amax()
        bound = _MEAN * dense + allowed[n].mean() + 1e-12
        if found.numel() < FEW or _is_by_chance(problem):
            bound = torch.maximum(bound, at_most[n].mean())
        figures["gradient means"] = torch.maximum(figures["gradient means"], mean / bound)
    if len(grads) > len(leaves):  # a NaN is not like itself
        differ = [(a != b).any() for a, b in zip(grads, grads[len(leaves) :], strict=False)]
        figures["bits"] = torch.stack(differ).any().double() * 2
    return torch.nan_to_num(torch.stack([figures[name] for name in CHECKS]), nan=math.inf, posinf=math.inf)


def right_gradients(problem: Problem) -> list[Tensor]:
    """Of the problem's leaves, float64."""
    problem = problem.exact()
    wanted = right(problem, with_graph=True)
    return _sums(problem, wanted, _exact(problem, wanted))


def _where(problem: Problem, leaf: Tensor) -> str:
    names = {id(problem.q): "dq", id(problem.k): "dk", id(problem.v): "dv"}
    return names.get(id(leaf), "captures")


def _is_by_chance(problem: Problem) -> bool:
    """Whether a mean error says little: rows of few keys, or rows that are all alike."""
    return problem.sizes.kv_len < 64 or (problem.scale is not None and abs(problem.scale) < ALIKE)


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64, of values of another type."""
    return x.to(dtype).double()


# ---------------------------------------------------------------- gradients as sums over pairs
def _sums(problem: Problem, wanted: Right, pairs: _Pairs, *, of_sizes: bool = False) -> list[Tensor]:
    """Gradients of the leaves, float64; `of_sizes`: every factor counts by its size, as errors add up at worst."""
    size = (lambda x: x.abs()) if of_sizes else (lambda x: x)
    assert problem.upstream is not None
    scale, found = (abs(wanted.scale) if of_sizes else wanted.scale), []
    for leaf in problem.leaves:
        if leaf is problem.q:
            found.append(pairs.d_scores @ size(wanted.keys) * scale)
        elif leaf is problem.k:
            d_k = pairs.d_scores.transpose(-1, -2) @ size(problem.q.detach().double()) * scale
            found.append(_by_key_head(d_k, leaf))
        elif leaf is problem.v:
            d_v = pairs.probs.transpose(-1, -2) @ size(problem.upstream.d_out.double())
            found.append(_by_key_head(d_v, leaf))
        else:
            upstream = pairs.d_modified * _slope_by(wanted, leaf).sign() if of_sizes else pairs.d_modified
            found.append(_through(wanted, leaf, upstream).double())
    return found


def _by_key_head(x: Tensor, leaf: Tensor) -> Tensor:
    """Sums over the query heads, and batch entries, that share a key head."""
    x = x.unflatten(1, (leaf.shape[1], -1)).sum(2)
    return x.sum(0, keepdim=True) if leaf.shape[0] < x.shape[0] else x


def _through(wanted: Right, leaf: Tensor, d_modified: Tensor) -> Tensor:
    """The gradient of a leaf from that of modified scores."""
    return torch.autograd.grad(wanted.modified, leaf, d_modified, retain_graph=True)[0]


def _slope_by(wanted: Right, leaf: Tensor) -> Tensor:
    """The derivative of each modified score by the element of a captured tensor that it reads: a function is linear in what its
    gradient is multiplied with, so that this is the gradient of that product."""
    factor = torch.zeros_like(wanted.modified, requires_grad=True)
    product = torch.autograd.grad(wanted.modified, leaf, factor, create_graph=True)[0]
    return torch.autograd.grad(product, factor, torch.ones_like(product))[0]


def _slope(problem: Problem, wanted: Right) -> Tensor:
    """The derivative of modified by raw scores."""
    if problem.score.mod is None:
        return torch.ones_like(wanted.raw)
    return _through(wanted, wanted.raw, torch.ones_like(wanted.raw))


def _error_of_slope(problem: Problem, wanted: Right, slope: Tensor) -> Tensor:
    """How wrong it may be, by how wrong the raw score may be: also where it jumps."""
    error = SINGLE * slope.abs()
    if problem.score.bend is None:
        return error
    for side in (-1, 1):
        raw = (wanted.raw.detach() + side * wanted.raw_error.unsqueeze(-1)).requires_grad_()
        there = torch.autograd.grad(modify(problem, raw), raw, torch.ones_like(raw))[0]
        error = torch.maximum(error, (there - slope).abs())
    return error + problem.score.bend


# ---------------------------------------------------------------- what is right, exactly and as rounded
def _upstream(problem: Problem) -> tuple[Tensor, Tensor]:
    """float64: of out, and of lse, 0 where there is none."""
    assert problem.upstream is not None
    d_out, d_lse = problem.upstream
    return d_out.double(), d_out.new_zeros(d_out.shape[:3], dtype=torch.float64) if d_lse is None else d_lse.double()


def _exact(problem: Problem, wanted: Right) -> _Pairs:
    d_out, d_lse = _upstream(problem)
    d_probs = d_out @ wanted.values.transpose(-1, -2)
    delta = (wanted.weights * d_probs).sum(-1, keepdim=True) - d_lse.unsqueeze(-1)
    d_modified = wanted.weights * (d_probs - delta)
    return _Pairs(wanted.weights, d_modified * _slope(problem, wanted), d_modified)


def _as_fused(problem: Problem, wanted: Right, out: Tensor, lse: Tensor, is_rounded: bool) -> tuple[_Pairs, _Pairs]:
    """Pairs as rounded by a fused backward, and how far a kernel's may be from them."""
    dtype, (d_out, d_lse) = out.dtype, _upstream(problem)
    lse = torch.where(torch.isneginf(lse), math.inf, lse.double()).unsqueeze(-1)
    probs = torch.where(wanted.keep, torch.exp(wanted.modified.detach() - lse), 0.0)
    of_probs = probs * torch.expm1(2 * wanted.score_error).unsqueeze(-1)
    d_probs = d_out @ wanted.values.transpose(-1, -2)
    of_d_probs = SINGLE * d_out.norm(dim=-1) * wanted.values.norm(dim=-1).amax(-1, keepdim=True)
    delta = (out.double() * d_out).sum(-1) - d_lse
    of_delta = SINGLE * ((out.double() * d_out).abs().sum(-1) + d_lse.abs())
    if not is_rounded:
        of_delta = of_delta + (delta - (wanted.out * d_out).sum(-1) + d_lse).abs()
    apart = d_probs - delta.unsqueeze(-1)
    d_modified = probs * apart
    of_d_modified = of_probs * apart.abs() + (probs + of_probs) * (of_d_probs + of_delta).unsqueeze(-1)
    slope = _slope(problem, wanted)
    of_slope = _error_of_slope(problem, wanted, slope)
    d_scores = d_modified * slope
    of_d_scores = of_d_modified * slope.abs() + (d_modified.abs() + of_d_modified) * of_slope
    halves, of_halves = _rounded(probs, of_probs, dtype, is_rounded)
    d_halves, of_d_halves = _rounded(d_scores, of_d_scores, dtype, is_rounded)
    return _Pairs(halves, d_halves, d_modified), _Pairs(
        of_halves + _SUM * halves, of_d_halves + _SUM * d_halves.abs(), of_d_modified + _SUM * d_modified.abs()
    )


def _rounded(x: Tensor, error: Tensor, dtype: torch.dtype, is_rounded: bool) -> tuple[Tensor, Tensor]:
    """x in a half type, and how far from that the rounding of what differs from x by an error may be."""
    half = _to(x, dtype)
    apart = torch.maximum(_to(x + error, dtype) - half, half - _to(x - error, dtype))
    return half, apart if is_rounded else apart + (half - x).abs() + error


# ---------------------------------------------------------------- what error is fair
def _fair(problem: Problem) -> list[tuple[Tensor, ...]]:
    """Each leaf's gradient by dense formulas in the inputs' type: differentiated by autograd, and as fused kernels do it, from the
    rounded output and log-sum."""
    assert problem.upstream is not None
    d_out, d_lse = problem.upstream
    leaves = {id(x): x.detach().requires_grad_(x.requires_grad) for x in (problem.q, problem.k, problem.v)}
    q, k, v = leaves.values()
    k, v = by_query_head(k, q), by_query_head(v, q)
    scores = modify(problem, (q @ k.transpose(-1, -2)).float() * _scale(problem))
    keep = keep_of(problem, scores.detach())
    some = keep.any(-1, keepdim=True)
    peak = torch.where(some, torch.where(keep, scores.detach(), -math.inf).amax(-1, keepdim=True), 0.0)
    weights = torch.where(keep, torch.where(keep, scores - peak, 0.0).exp(), 0.0)
    total = torch.where(some, weights.sum(-1, keepdim=True), 1.0)
    out, lse = (weights / total).to(q.dtype) @ v, peak + total.log()
    of_lse = torch.zeros_like(lse) if d_lse is None else torch.where(some, d_lse.unsqueeze(-1), 0.0)
    delta = (d_out.float() * out.detach().float()).sum(-1, keepdim=True) - of_lse
    probs = torch.where(keep, (scores - lse).detach().exp(), 0.0)
    d_scores = probs * ((d_out @ v.detach().transpose(-1, -2)).float() - delta)
    inputs = [leaves.get(id(x), x) for x in problem.leaves]
    found = []
    for outputs, upstream in (
        ((out, lse), (d_out, of_lse)),
        ((probs.to(q.dtype) @ v, scores), (d_out, d_scores)),
    ):
        needed, given = zip(*[(x, d) for x, d in zip(outputs, upstream) if x.requires_grad])
        grads = torch.autograd.grad(needed, inputs, given, retain_graph=True, allow_unused=True)
        found.append([torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads)])
    return list(zip(*found))


def _scale(problem: Problem) -> float:
    return problem.q.shape[3] ** -0.5 if problem.scale is None else problem.scale


def _cost_of_rounding(problem: Problem, wanted: Right, pairs: _Pairs, exact: list[Tensor]) -> list[Tensor]:
    """What roundings to a half type cost each element at most; asked for where a mean of few says little."""
    if all(x.numel() >= FEW for x in problem.leaves) and not _is_by_chance(problem):
        return exact
    half, tiny = HALF[problem.variant.dtype], TINY[problem.variant.dtype]
    d_out, _ = _upstream(problem)
    of_delta = (d_out.abs() * allowed_of_out(problem, wanted)).sum(-1, keepdim=True)
    of_modified = wanted.weights * of_delta
    of_scores = half * pairs.d_scores.abs() + of_modified * _slope(problem, wanted).abs()
    cost = _sums(problem, wanted, _Pairs(half * pairs.probs, of_scores, of_modified), of_sizes=True)
    return [c + half * x.abs() + tiny for c, x in zip(cost, exact)]
