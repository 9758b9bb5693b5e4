"""Says whether an output that is about to be timed is right: reads results, compares with dense attention in float64.

The idea: two whole heads, with all gradients, and a few rows of every head cost a fraction of a second at 16,384 tokens and
leave a wrong kernel nowhere to hide; and everything must be finite. The error is |x - exact| / |exact| in the 2-norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problems import Problem

ROWS, CHUNK = 32, 1024
_BOUNDS = {True: (1e-2, 2e-2), False: (1e-4, 2e-4)}  # half types or not: (out, gradients)


class WrongResult(Exception):
    """A result that is not the problem's answer; the text says which and by how much."""


@dataclass(frozen=True)
class Exact:
    """Dense float64 results of parts of a problem.

    Attributes:
        heads: (batch entry, head) of the whole heads.
        whole: One list a whole head: out, dq, dk, dv, each [length, dim]; out alone where no gradient was asked for.
        rows: The rows taken of every head, [rows].
        all_heads: out, dq of these rows, [batch, heads, rows, dim].
    """

    heads: list[tuple[int, int]]
    whole: list[list[Tensor]]
    rows: Tensor
    all_heads: list[Tensor]


def exact(problem: Problem, tensors: Sequence[Tensor], grad: Tensor | None) -> Exact:
    """Computes the parts that `errors` compares; with `grad`, the gradient of out, also gradients."""
    shape = problem.shape
    generator = torch.Generator().manual_seed(1)
    inner = torch.randint(0, shape.length, (ROWS,), generator=generator)
    rows = torch.cat([torch.tensor([0, shape.length - 1]), inner]).unique().to(problem.device)
    heads = list(dict.fromkeys([(0, 0), (shape.batch - 1, shape.heads - 1)]))
    whole = [_whole_head(problem, tensors, grad, b, h) for b, h in heads]
    return Exact(heads, whole, rows, _rows_of_all(problem, tensors, grad, rows))


def errors(found: Exact, results: Sequence[Tensor], half: bool) -> dict[str, float]:
    """Errors of out (and of dq, dk, dv where given), all [batch, heads, length, dim].

    Raises:
        WrongResult: Something is not finite or further from float64 than the data type explains.
    """
    names = ("out", "dq", "dk", "dv")[: len(results)]
    for name, result in zip(names, results):
        if not bool(torch.isfinite(result).all()):
            raise WrongResult(f"{name} is not finite everywhere")
    worst: dict[str, float] = {}
    for i, (name, result) in enumerate(zip(names, results)):
        pairs = []
        if result.shape[1] == results[0].shape[1]:  # under grouped heads a key head's gradient is a sum: rows only
            pairs += [(result[b, h], whole[i]) for (b, h), whole in zip(found.heads, found.whole) if i < len(whole)]
        if i < len(found.all_heads):
            pairs.append((result[:, :, found.rows], found.all_heads[i]))
        worst[name] = max(difference(a, e) for a, e in pairs)
    bounds = _BOUNDS[half]
    for name, error in worst.items():
        bound = bounds[name != "out"]
        if not error <= bound:
            raise WrongResult(f"{name} is {error:.2g} from float64 (at most {bound:g})")
    return worst


def difference(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; NaN passes no bound."""
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def _whole_head(problem: Problem, tensors: Sequence[Tensor], grad: Tensor | None, b: int, h: int) -> list[Tensor]:
    q, k, v = tensors
    group = q.shape[1] // k.shape[1]
    keys, values = (x[b, h // group].double().requires_grad_(grad is not None) for x in (k, v))
    outs: list[Tensor] = []
    grads: list[tuple[Tensor, ...]] = []
    for rows in torch.arange(q.shape[2], device=q.device).split(CHUNK):
        queries = q[b, h, rows].double().requires_grad_(grad is not None)
        index = (torch.tensor(b, device=q.device), torch.tensor(h, device=q.device), rows[:, None])
        out = _dense(problem, queries, keys, values, index)
        outs.append(out.detach())
        if grad is not None:
            grads.append(torch.autograd.grad(out, (queries, keys, values), grad[b, h, rows].double()))
    if grad is None:
        return [torch.cat(outs)]
    dq, dk, dv = zip(*grads)
    return [torch.cat(outs), torch.cat(dq), torch.stack(dk).sum(0), torch.stack(dv).sum(0)]


def _rows_of_all(problem: Problem, tensors: Sequence[Tensor], grad: Tensor | None, rows: Tensor) -> list[Tensor]:
    q, k, v = tensors
    found: list[list[Tensor]] = []
    for b in range(q.shape[0]):  # one batch entry at a time: keys in float64 are large
        group = q.shape[1] // k.shape[1]
        queries = q[b, :, rows].double().unflatten(0, (-1, group)).requires_grad_(grad is not None)
        heads = torch.arange(q.shape[1], device=q.device).view(-1, group, 1, 1)
        index = (torch.tensor(b, device=q.device), heads, rows[:, None])
        out = _dense(problem, queries, k[b, :, None].double(), v[b, :, None].double(), index)
        results = [out.detach()]
        if grad is not None:
            upstream = grad[b, :, rows].double().unflatten(0, (-1, group))
            results += torch.autograd.grad(out, (queries,), upstream)
        found.append([x.flatten(0, 1) for x in results])
    return [torch.stack(parts) for parts in zip(*found)]


def _dense(problem: Problem, q: Tensor, k: Tensor, v: Tensor, index: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Attention of some rows over all keys, in float64; index is (b, h, q_idx), broadcastable to the scores."""
    columns = torch.arange(k.shape[-2], device=k.device)
    scores = q @ k.transpose(-1, -2) * problem.shape.dim**-0.5
    if problem.variant.score_mod is not None:
        scores = problem.variant.score_mod(scores, *index, columns)
    if problem.variant.mask_mod is not None:
        scores = scores.masked_fill(~problem.variant.mask_mod(*index, columns), float("-inf"))
    return scores.softmax(-1) @ v
