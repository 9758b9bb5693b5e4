"""What a problem should give, in float64, and whether what it gave is wrong: sound bounds for every row and element.

Reads a Problem and a call's results; makes a row of figures on the device, without waiting for it. The ideas: a bound that follows from
how the kernel rounds (probabilities and results once to a half type, all else in float32) finds one wrong row among thousands, which a
mean does not; and a row's lse is that exact that one key too many or too few shows. The contract's own rule, a mean error of at most
1.1 times that of the same formula rounded as fused kernels round it, is asked as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.fuzz.problems import Problem

CHECKS = ("lse", "out", "mean", "maxima", "empty rows")
SINGLE = 2.0**-20  # what float32 may lose on the way to a score, of the size of what is added up
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # what rounding to it may cost, of a value
TINY = {torch.bfloat16: 0.0, torch.float16: 2.0**-25}  # and of one that is almost 0
_MEAN = 1.1
FEW = 2048  # elements of which a mean may be off by chance
ALIKE = 0.01  # a scale under which queries hardly matter


class Right(NamedTuple):
    """float64, [batch, q_heads, q_len(, v_dim)]."""

    out: Tensor
    lse: Tensor
    maxima: Tensor
    weights: Tensor  # [..., kv_len], normalised
    score_error: Tensor  # of each row, how wrong a kernel's scores may be
    raw_error: Tensor  # and what comes of their products, before any function
    spread: Tensor  # sums of weight * |value|
    values: Tensor
    keys: Tensor  # as values, of each query head
    keep: Tensor
    raw: Tensor  # scores [..., kv_len] before any function
    modified: Tensor  # and behind it; of `raw` and captured tensors in autograd's graph where that was asked for
    scale: float


def modify(problem: Problem, raw: Tensor) -> Tensor:
    """Scores as the problem's function leaves them."""
    if problem.score.mod is None:
        return raw
    return problem.score.mod(raw, *_indices(raw)).to(raw.dtype).expand(raw.shape)


def keep_of(problem: Problem, modified: Tensor) -> Tensor:
    """Which pairs count."""
    keep = ~torch.isneginf(modified)
    return keep if problem.mask.mod is None else keep & problem.mask.mod(*_indices(modified))


def _indices(scores: Tensor) -> list[Tensor]:
    return [
        torch.arange(n, device=scores.device).view([-1 if a == d else 1 for d in range(4)])
        for a, n in enumerate(scores.shape)
    ]


def by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each query head and batch entry."""
    return x.expand(q.shape[0], -1, -1, -1).repeat_interleave(q.shape[1] // x.shape[1], 1)


def right(problem: Problem, *, with_graph: bool = False) -> Right:
    """Dense attention by the formula, as in runtime/reference.py but without asking whether functions are elementwise: these are."""
    q, k, v = (x.detach().double() for x in (problem.q, problem.k, problem.v))
    k, v = by_query_head(k, q), by_query_head(v, q)
    scale = q.shape[3] ** -0.5 if problem.scale is None else problem.scale
    raw = (q @ k.transpose(-1, -2) * scale).requires_grad_(with_graph)
    with torch.set_grad_enabled(with_graph):
        modified = modify(problem, raw)
    keep = keep_of(problem, modified.detach())
    scores = torch.where(keep, modified.detach(), -math.inf)
    maxima = scores.amax(-1)
    some = ~torch.isneginf(maxima)
    peak = torch.where(some, maxima, 0.0).unsqueeze(-1)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(some.unsqueeze(-1), total, 1.0)
    lse = torch.where(some, peak.squeeze(-1) + total.squeeze(-1).log(), -math.inf)
    largest = torch.where(keep, scores.abs(), 0.0).amax(-1)
    size = q.norm(dim=-1) * k.norm(dim=-1).amax(-1, keepdim=True) * abs(scale)
    error = SINGLE * (size * problem.score.gain + size + largest + 1) + problem.score.slack
    return Right(
        weights @ v, lse, maxima, weights, error, SINGLE * size, weights @ v.abs(), v, k, keep, raw, modified, scale
    )


def judge(problem: Problem, out: Tensor, lse: Tensor, maxima: Tensor | None) -> Tensor:
    """Figures of CHECKS, float64: each is an error in terms of what is allowed, so that more than 1 is wrong; infinite for NaN.

    Args:
        problem: on the device to compare on.
        out, lse, maxima: what the call gave, anywhere.
    """
    wanted = right(problem)
    device, dtype = problem.q.device, out.dtype
    out, lse = out.detach().to(device).double(), lse.detach().to(device).double()
    is_empty = torch.isneginf(wanted.lse)
    rows = _ratio(lse - wanted.lse, wanted.score_error, is_empty)
    allowed = allowed_of_out(problem, wanted)
    elements = (out - wanted.out).abs()
    peaks = torch.zeros((), dtype=torch.float64, device=device)
    if maxima is not None:
        maxima = maxima.to(device).double()
        peaks = _ratio(maxima - wanted.maxima, wanted.score_error, is_empty)
    wrongly_empty = (torch.isneginf(lse) != is_empty) | (is_empty & (out != 0).any(-1))
    if maxima is not None:
        wrongly_empty = wrongly_empty | (torch.isneginf(maxima) != is_empty)
    found = [
        rows, (elements / allowed).amax(), elements.mean() / (_MEAN * _fair(problem, wanted, dtype) + 1e-12), peaks,
        wrongly_empty.any().double() * 2,
    ]  # fmt: skip
    return torch.nan_to_num(torch.stack(found), nan=math.inf, posinf=math.inf)


def _ratio(error: Tensor, allowed: Tensor, is_empty: Tensor) -> Tensor:
    return torch.where(is_empty, 0.0, error.abs() / allowed).amax()


def allowed_of_out(problem: Problem, wanted: Right) -> Tensor:
    """Of every element of out: half a unit in the last place of each probability and of the result, and wrong scores."""
    half, tiny = HALF[problem.variant.dtype], TINY[problem.variant.dtype]
    of_scores = 2 * torch.expm1(wanted.score_error).unsqueeze(-1)
    keys = wanted.values.shape[-2]
    of_tiny = tiny * (1 + keys * wanted.values.abs().amax((-1, -2), keepdim=True))
    return wanted.spread * (half * 1.02 + of_scores) + half * wanted.out.abs() + of_tiny + 1e-30


def _fair(problem: Problem, wanted: Right, dtype: torch.dtype) -> Tensor:
    """Mean error of the formula with probabilities rounded before their product and the result after it: the larger of
    normalised ones, as dense attention has them, and of those against a row's maximum, as fused kernels do. Of few elements the
    mean is moved by chance, so those get what rounding costs at most; and a scale of almost 0 makes rows alike, which are few then."""
    peak = wanted.weights.amax(-1, keepdim=True)
    safe = torch.where(peak == 0, 1.0, peak)
    errors = []
    for unit in (1.0, safe):
        rounded = (wanted.weights / unit).to(dtype).double() @ wanted.values * unit
        errors.append((rounded.to(dtype).double() - wanted.out).abs().mean())
    fair = torch.stack(errors).amax()
    rows_are_alike = problem.scale is not None and abs(problem.scale) < ALIKE
    if problem.sizes.kv_len < 64 or wanted.out.numel() < FEW or rows_are_alike:
        return torch.maximum(fair, allowed_of_out(problem, wanted).mean())
    of_scores = (wanted.spread * wanted.score_error.unsqueeze(-1)).mean()
    return fair + of_scores
