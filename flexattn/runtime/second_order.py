"""Second derivatives of attention in torch operations: what a double backward runs where the first one ran in torch operations.

Reads a problem, the gradients that came into its backward and those that come into the gradients it gave; makes the gradients of all
of them. The one idea: rows of queries are independent, so a block of rows is written down densely, differentiated twice by torch
and forgotten; memory is O(kv_len x block), and time that of dense attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate, without_autocast
from flexattn.frontend.program import Traced
from flexattn.runtime import transforms
from flexattn.runtime.plan import Problem

SCORES = 1 << 22  # scores of a block of rows
Optional = Tensor | None


def differentiable(
    problem: Problem, grads: Sequence[Optional], upstream: tuple[Optional, Optional]
) -> tuple[Optional, ...]:
    """The same gradients, joined to the graph by a node that can be differentiated once.

    Args:
        problem: the call.
        grads: of query, key, value and each capture, None where there is none.
        upstream: gradients of out and lse that they were made of.
    """
    inputs = (problem.q, problem.k, problem.v, *problem.captures)
    found = iter(_Gradients.apply(problem, tuple(g for g in grads if g is not None),
                                  tuple(g is not None for g in grads), *upstream, *inputs))  # fmt: skip
    return tuple(None if g is None else next(found) for g in grads)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, problem: Problem, grads: tuple[Tensor, ...], made: tuple[bool, ...], *sources: Optional
    ) -> Any:
        d_out, d_lse, *inputs = sources
        ctx.set_materialize_grads(False)
        nothing = torch.empty(0)
        ctx.problem, ctx.made = problem.bind(nothing, nothing, nothing, ()), made
        ctx.save_for_backward(d_out, d_lse, *inputs)
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *given: Optional) -> Any:
        d_out, d_lse, *inputs = ctx.saved_tensors
        problem = ctx.problem.bind(*inputs[:3], tuple(inputs[3:]))
        each = iter(given)
        cotangents = [next(each) if made else None for made in ctx.made]
        needs = ctx.needs_input_grad[3:]
        found: Sequence[Optional] = second_derivatives(problem, (d_out, d_lse), cotangents, needs)
        if torch.is_grad_enabled():
            found = transforms.forbid_further_derivatives(found, (*ctx.saved_tensors, *given))
        return None, None, None, *found


def second_derivatives(
    problem: Problem, upstream: tuple[Optional, Optional], cotangents: Sequence[Optional], needs: Sequence[bool]
) -> list[Optional]:
    """Gradients of the sum of cotangent times gradient.

    Args:
        problem: the call, with its tensors.
        upstream: gradients of out [batch, q_heads, q_len, v_dim] and lse [batch, q_heads, q_len].
        cotangents: one for each of query, key, value and the captures, None for zeros.
        needs: which of d_out, d_lse, query, key, value and the captures want a gradient.
    Returns: those gradients, None where none is wanted or none arises.
    """
    batch, heads, q_len, _ = problem.q.shape
    rows = max(1, SCORES // max(1, batch * heads * problem.kv_len))
    sources = [*upstream, problem.q, problem.k, problem.v, *problem.captures]
    totals = {n: torch.zeros_like(x) for n, x in enumerate(sources) if x is not None and needs[n]}
    mask = None if problem.block_mask is None else problem.block_mask.as_predicate().traced
    with torch.enable_grad(), without_autocast(problem.q.device.type):
        for start in range(0, q_len, rows):
            part = slice(start, min(q_len, start + rows))
            leaves = [x if x is None else _of_rows(n, part, x).detach() for n, x in enumerate(sources)]
            leaves = [x if x is None else x.requires_grad_(x.is_floating_point()) for x in leaves]
            given = {n: _of_rows(n, part, c) for n, c in enumerate(cotangents, 2) if c is not None}
            total = _inner(problem, mask, leaves, given, part)
            if total is not None and total.requires_grad:
                found = torch.autograd.grad(
                    total, [x for n, x in enumerate(leaves) if x is not None and n in totals], allow_unused=True
                )
                for (n, sum_of_rows), grad in zip(totals.items(), found):
                    if grad is not None:
                        _of_rows(n, part, sum_of_rows).add_(grad)
    return [totals.get(n) for n in range(len(sources))]


def _of_rows(place: int, part: slice, x: Tensor) -> Tensor:
    """What a block of rows has of d_out, d_lse and query, which come first; of the others all."""
    return x[:, :, part] if place < 3 else x


def _inner(
    problem: Problem, mask: Traced | None, leaves: Sequence[Optional], cotangents: dict[int, Tensor], part: slice
) -> Optional:
    """The sum of cotangent times gradient over a block of rows, as a function of its leaves."""
    if not cotangents:
        return None
    d_out, d_lse, *inputs = leaves
    outputs = zip(attention_of_rows(problem, mask, [x for x in inputs if x is not None], part), (d_out, d_lse))
    heads, tails = zip(*[(x, d) for x, d in outputs if d is not None])
    by_leaf = [(leaves[n], c) for n, c in cotangents.items()]
    found = torch.autograd.grad(
        heads, [x for x, _ in by_leaf if x is not None], tails, create_graph=True, allow_unused=True
    )
    terms = [(g * c).sum() for g, (_, c) in zip(found, by_leaf) if g is not None]
    return torch.stack(terms).sum() if terms else None


def attention_of_rows(
    problem: Problem, mask: Traced | None, inputs: Sequence[Tensor], part: slice
) -> tuple[Tensor, Tensor]:
    """out [batch, q_heads, rows, v_dim] and lse [batch, q_heads, rows] of some rows, densely, in operations that torch differentiates.

    Args:
        problem: the call.
        mask: what is kept, None for every pair.
        inputs: query of those rows, key, value and the captures.
        part: the rows.
    """
    q, k, v, *captures = inputs
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])
    q_idx, kv_idx = torch.arange(part.start, part.stop, device=q.device), torch.arange(k.shape[2], device=q.device)
    where: dict[str, Any] = {
        "b": b.view(-1, 1, 1, 1),
        "h": h.view(-1, 1, 1),
        "q_idx": q_idx.view(-1, 1),
        "kv_idx": kv_idx,
    }
    scores = problem.scale * (q.to(wide) @ k.transpose(-1, -2))
    if problem.score is not None:
        program, binding = problem.score
        scores = evaluate(program, binding._replace(captures=tuple(captures)), score=scores, **where)
    if mask is not None:
        program, binding = mask
        scores = torch.where(evaluate(program, binding, **where), scores, -math.inf)
    scores = scores.expand(*q.shape[:3], k.shape[2])
    peak = scores.detach().amax(-1, keepdim=True)
    peak = torch.where(peak.isinf(), 0.0, peak)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    kept = total > 0
    safe = torch.where(kept, total, 1.0)
    lse = torch.where(kept, peak + safe.log(), -math.inf)[..., 0]
    return ((weights @ v) / safe).to(q.dtype), lse
