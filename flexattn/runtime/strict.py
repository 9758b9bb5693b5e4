"""kernel_options={'strict_nan': True}: a non-finite row of query, key, value or d_out reaches only what keeps it.

Offers what a backend offers (forward, backward) in torch ops over all pairs. In a matrix product a weight of 0 times NaN is NaN,
so one bad row can spoil the results of rows that do not keep it; here bad entries enter products as 0, and what does keep them
is set to NaN afterwards. Cost: every call reads its inputs once to look for bad entries, and waits for the answer; only a
call that has some comes here, where no tile is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flexattn.frontend.expr import Expr
from flexattn.frontend.gradient import score_gradient
from flexattn.runtime.pairs import Part, kept, parts
from flexattn.runtime.plan import Needs, Plan, Problem, output_like


def is_needed(problem: Problem, *more: Tensor) -> bool:
    """True when the option is set and an input holds a NaN or an infinity; reads them all, and waits for the device."""
    if not problem.options.strict_nan:
        return False
    return any(not bool(torch.isfinite(x).all()) for x in (problem.q, problem.k, problem.v, *more))


class _Tile:
    """One part of the score matrix: its rows of query, key and value in the computing dtype, scores and kept pairs."""

    def __init__(self, problem: Problem, part: Part) -> None:
        self.problem, self.part = problem, part
        self.q = wide(problem.q[part.batch, :, part.start : part.stop])
        self.k, self.v = self._keys(problem.k), self._keys(problem.v)
        self.raw = self.q @ self.k.transpose(1, 2) * problem.scale
        self.scores = self._all(self.evaluate(None, self.raw)) if problem.score is not None else self.raw
        self.keep = self._all(kept(problem, part)) & (self.scores != -math.inf)

    def _keys(self, x: Tensor) -> Tensor:
        """Rows of key or value per query head, [q_heads, kv_len, dim]."""
        rows = x[self.part.batch if x.shape[0] > 1 else 0]
        return wide(rows.repeat_interleave(self.problem.q.shape[1] // x.shape[1], 0))

    def _all(self, x: Tensor) -> Tensor:
        """x for every pair of the part, [q_heads, rows, kv_len]."""
        return x.expand(1, *self.raw.shape)[0]

    def evaluate(self, body: Expr | None, score: Tensor, grad: Tensor | None = None) -> Tensor:
        """The score program, or another expression over its captures, at every pair."""
        assert self.problem.score is not None
        grad = None if grad is None else grad[None]
        value = self.part.evaluate(self.problem.score, score=score[None], grad=grad, body=body)
        return value.to(score.device, score.dtype)

    def rows(self, x: Tensor) -> Tensor:
        """The part's rows of a tensor [batch, q_heads, q_len, ...]."""
        return x[self.part.batch, :, self.part.start : self.part.stop]


def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """As a backend's forward."""
    q = problem.q
    out = output_like(q, problem.v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=wide(q[:0]).dtype, device=q.device)
    peaks = torch.empty_like(lse)
    for tile in _tiles(problem):
        scores = torch.where(tile.keep, tile.scores, -math.inf)
        peak = scores.amax(-1, keepdim=True)
        empty = ~tile.keep.any(-1, keepdim=True)
        weights = torch.where(tile.keep, (scores - peak).exp(), 0.0)
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        value = _product(weights / total, tile.v, tile.keep).masked_fill(empty, 0.0)
        tile.rows(out).copy_(value)
        tile.rows(lse).copy_((peak + total.log())[..., 0])
        tile.rows(peaks).copy_(peak[..., 0])
    return out, lse, peaks if problem.want_max else None


def backward(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """As a backend's backward."""
    inputs = (problem.q, problem.k, problem.v, *problem.captures)
    d_q, d_k, d_v, *d_captures = (torch.zeros_like(wide(x.detach())) for x in inputs)
    for tile in _tiles(problem):
        upstream = wide(tile.rows(d_out))
        delta = (wide(tile.rows(out)) * upstream).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta - tile.rows(d_lse)[..., None]
        weights = torch.where(tile.keep, (tile.scores - tile.rows(lse)[..., None]).exp(), 0.0)
        grad = torch.where(tile.keep, weights * (upstream @ tile.v.transpose(1, 2) - delta), 0.0)
        _add_keys(d_v, tile, _product(weights.transpose(1, 2), upstream, tile.keep.transpose(1, 2)))
        if problem.score is not None:
            grad = _through_score(tile, grad, d_captures)
        grad = grad * problem.scale
        tile.rows(d_q).copy_(grad @ _finite(tile.k))
        _add_keys(d_k, tile, grad.transpose(1, 2) @ _finite(tile.q))
    wanted = (*needs[:3], *needs[3])
    results = [g.to(x.dtype) if want else None for g, x, want in zip((d_q, d_k, d_v, *d_captures), inputs, wanted)]
    return results[0], results[1], results[2], tuple(results[3:])


def _tiles(problem: Problem) -> Iterator[_Tile]:
    return (_Tile(problem, part) for part in parts(problem))


def _through_score(tile: _Tile, grad: Tensor, d_captures: list[Tensor]) -> Tensor:
    """The gradient with respect to the plain score, adding what captured tensors get to d_captures."""
    assert tile.problem.score is not None
    derivative = score_gradient(tile.problem.score.program)
    for slot, load, body in derivative.d_captures:
        into = d_captures[slot]
        value = torch.where(tile.keep, tile._all(tile.evaluate(body, tile.raw, grad)), 0.0)
        where, inside = _position(tile, load, into)
        value = torch.where(inside, value, 0.0).reshape(-1).to(into.dtype)
        into.view(-1).index_add_(0, where.reshape(-1), value)
    d_score = tile._all(tile.evaluate(derivative.d_score, tile.raw, grad))
    return torch.where(tile.keep, d_score, 0.0)


def _position(tile: _Tile, load: Expr, into: Tensor) -> tuple[Tensor, Tensor]:
    """Where in the flat captured tensor each pair reads, and whether that is inside; negative indices wrap once."""
    traced = tile.problem.score
    assert traced is not None
    where = torch.zeros(tile.raw.shape, dtype=torch.int64, device=tile.raw.device)
    inside = torch.ones_like(where, dtype=torch.bool)
    for size, body in zip(into.shape, load.args):
        index = tile.part.evaluate(traced, score=tile.raw[None], body=body)
        index = tile._all(index.to(where.device))
        index = torch.where(index < 0, index + size, index)
        inside &= (index >= 0) & (index < size)
        where = where * size + index.clamp(0, max(size - 1, 0))
    return where, inside


def _product(weights: Tensor, values: Tensor, keep: Tensor) -> Tensor:
    """weights @ values, where a bad value reaches only the rows that keep it."""
    bad = (~torch.isfinite(values)).to(values.dtype)
    reached = keep.to(values.dtype) @ bad > 0
    return (weights @ _finite(values)).masked_fill(reached, math.nan)


def _add_keys(total: Tensor, tile: _Tile, grad: Tensor) -> None:
    """Adds [q_heads, kv_len, dim] to the gradient of key or value, summed over the heads that share one."""
    kv_heads = total.shape[1]
    total[tile.part.batch if total.shape[0] > 1 else 0] += grad.unflatten(0, (kv_heads, -1)).sum(1)


def _finite(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0)


def wide(x: Tensor) -> Tensor:
    """x in the dtype sums run in."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
