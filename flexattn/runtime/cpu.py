"""Block-sparse attention in torch operations, forward and backward: what runs without a GPU, and for float64 on one.

Reads a Problem (tensors, traced mods, a BlockMask) and makes out, lse, max_scores or gradients. The one idea: a row of q tiles
meets a few long runs of keys, so a row of tiles is a couple of large matrix products over plain slices of key and value, shared by
all heads of the same mask, with the mask evaluated only in the partial tiles. Nothing grows with q_len x kv_len.

The softmax of a row is first tried without subtracting its maximum, which costs two passes over the scores. Where a row's sum shows
that this was unsafe (exp overflowed, or the sum is tiny or zero) the row is done again with the maximum; both are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flexattn.runtime.cpu_mods import MaskMod, Positions, ScoreMod
from flexattn.runtime.cpu_rows import (
    SHORTEST,
    TILE,
    Chunk,
    Lines,
    Row,
    Unit,
    any_tile,
    choose_tiles,
    cut_chunks,
    make_units,
    split_chunks,
)
from flexattn.runtime.plan import Needs, Plan, Problem, output_like

Grads = tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]

TILES_KEPT = 16  # tiles of a mask kept for the next row
SAFE_SUM = (1e-15, 1e15)  # sums of exp(score) without a maximum that lose no accuracy
_FUSED: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
PATIENCE = 4  # rows done twice before a call stops trying without the maximum


# ---------------------------------------------------------------- one call
class _Call:
    """What both directions share: inputs in the type they are computed in, the mods, and the rows of tiles."""

    def __init__(self, problem: Problem, needs: Needs | None = None) -> None:
        q, k, v = problem.q, problem.k, problem.v
        self.problem = problem
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.device = q.device
        self.q, self.k, self.v = (x.to(self.dtype) for x in (q, k, v))
        self.mask = MaskMod(problem.mask, q.device) if problem.mask is not None else None
        captures = needs[3] if needs is not None else None
        self.score = ScoreMod(problem.score, q.device, captures) if problem.score is not None else None
        self.mask_is_whole = problem.block_mask is None or any_tile(problem.block_mask)
        self.tiles, self.q_tile = choose_tiles(problem)
        self.lines = Lines(self.tiles) if self.tiles is not None else None
        self.axes = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
        self.buffers: list[Tensor] = []
        self.kept: dict[tuple[str, tuple[int, ...] | None], Any] = {}

    def units(self) -> Iterator[tuple[Unit, Iterator[Row]]]:
        """Units with their rows."""
        groups = (self.tiles.batch, self.tiles.heads) if self.tiles is not None else (1, 1)
        for group, unit in make_units(self.problem, groups, self.q_tile):
            yield unit, self.rows(group)

    def rows(self, group: int) -> Iterator[Row]:
        """The rows of tiles of a group of the tile map."""
        q_len, kv_len = self.problem.q.shape[2], self.problem.k.shape[2]
        everything = [(0, kv_len, self.mask is not None)]
        for index, start in enumerate(range(0, q_len, self.q_tile)):
            spans = everything
            if self.lines is not None:
                spans = self.lines.spans(group * self.lines.tiles.rows + index)
            yield Row(start, min(q_len, start + self.q_tile), spans)

    def chunks(self, unit: Unit, row: Row) -> list[Chunk]:
        """A row's keys in products of about TILE scores."""
        at_once = TILE // (unit.n * unit.rows_per_query * self.q_tile)
        return cut_chunks(row.spans, max(SHORTEST, at_once), self.device)

    def positions(self, unit: Unit, row: Row, keys: slice | Tensor) -> Positions:
        """Index tensors of a tile."""
        b, h, q_idx, kv_idx = self.axes
        return Positions(
            b[unit.batch].view(-1, 1, 1, 1),
            h[unit.heads].view(1, -1, 1, 1),
            q_idx[row.start : row.stop].view(1, 1, -1, 1),
            kv_idx[keys].view(1, 1, 1, -1),
        )

    def buffer(self, which: int, *shape: int) -> Tensor:
        """Uninitialised work space, one allocation per call and `which`."""
        size = math.prod(shape)
        while len(self.buffers) <= which:
            self.buffers.append(self.q.new_empty(0))
        if self.buffers[which].numel() < size:
            self.buffers[which] = self.q.new_empty(size)
        return self.buffers[which][:size].view(*shape)

    def dropped(self, unit: Unit, row: Row, chunk: Chunk) -> list[tuple[int, int, Tensor]]:
        """The parts of a chunk the mask decides, with what it drops there."""
        if self.mask is None:
            return []
        parts = []
        masked = chunk.masked
        if len(masked) > 1 and self.mask_is_whole and 2 * sum(b - a for a, b in masked) >= chunk.length:
            masked = ((0, chunk.length),)  # the mask holds in full tiles too: one evaluation instead of several
        for start, stop in masked:
            keys = chunk.keys
            part = slice(keys.start + start, keys.start + stop) if isinstance(keys, slice) else keys[start:stop]
            make = functools.partial(self.mask.dropped, self.positions(unit, row, part))
            parts.append((start, stop, self.once(("dropped", self.diagonal(unit, row, part)), make)))
        return parts

    def diagonal(self, unit: Unit, row: Row, keys: slice | Tensor) -> tuple[int, ...] | None:
        """What a tile of the mask depends on if it is the same along diagonals; None if it is not."""
        if self.mask is None or not self.mask.moves or not isinstance(keys, slice):
            return None
        heads = (unit.batch.start, unit.heads.start) if self.mask.per_head else ()
        return (row.start - keys.start, row.stop - row.start, keys.stop - keys.start, *heads)

    def once(self, key: tuple[str, tuple[int, ...] | None], make: Callable[[], Any]) -> Any:
        """make(), kept for the next tile on the same diagonal."""
        if key[1] is None:
            return make()
        if key not in self.kept:
            if len(self.kept) >= TILES_KEPT:
                self.kept.clear()
            self.kept[key] = make()
        return self.kept[key]

    def scores(
        self, unit: Unit, row: Row, chunk: Chunk, q: Tensor, k: Tensor
    ) -> tuple[Tensor, list[tuple[int, int, Tensor]], list[Tensor]]:
        """Modified scores [n, rows, keys], -inf where the mask drops; also the dropped parts and what the derivative needs."""
        scores = self.buffer(0, unit.n, q.shape[1], chunk.length)
        torch.bmm(q, _take(k, chunk.keys).transpose(1, 2), out=scores)
        dropped = self.dropped(unit, row, chunk)
        saved: list[Tensor] = []
        tile = unit.unfold(scores)
        if self.score is not None:
            spare = lambda: unit.unfold(self.buffer(2, *scores.shape))
            modified, saved = self.score.apply(
                tile, spare, self.positions(unit, row, chunk.keys), lambda: _kept(tile, dropped)
            )
            if modified is not tile:
                tile, scores = modified, self.buffer(2, *scores.shape)
        for start, stop, drop in dropped:
            tile[..., start:stop].masked_fill_(drop, -math.inf)
        return scores, dropped, saved


def _take(x: Tensor, keys: slice | Tensor) -> Tensor:
    """Rows `keys` of [n, kv_len, width]."""
    return x[:, keys] if isinstance(keys, slice) else x.index_select(1, keys)


def _kept(tile: Tensor, dropped: list[tuple[int, int, Tensor]]) -> Tensor:
    kept = torch.ones(tile.shape, dtype=torch.bool, device=tile.device)
    for start, stop, drop in dropped:
        kept[..., start:stop].masked_fill_(drop, False)
    return kept


def make_tile_maps(problem: Problem, plan: Plan) -> None:
    """Builds the tile map that `forward` and `backward` will look up (they use the same one)."""
    choose_tiles(problem)


# ---------------------------------------------------------------- forward
def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Attention of one call.

    Args:
        problem: tensors and mods; see Problem.
        plan: unused, the torch path chooses its tiles from sizes alone.

    Returns:
        out `[batch, q_heads, q_len, v_dim]` in q's dtype and stride order, lse `[batch, q_heads, q_len]` (natural log, float32 or
        float64), max_scores of that shape or None.

    Raises:
        CaptureIndexError: a mod reads a captured tensor out of range at a kept position (CPU tensors only).
    """
    call = _Call(problem)
    out = output_like(problem.q, problem.v.shape[3])
    lse = torch.empty(problem.q.shape[:3], dtype=call.dtype, device=call.device)
    peaks = torch.empty_like(lse) if problem.want_max else None
    patience = 0 if problem.want_max else PATIENCE
    fused = _fits_fused(call)
    for unit, rows in call.units():
        k, v = _plain(unit.key_rows(call.k)), _plain(unit.key_rows(call.v))
        for row in rows:
            if fused and row.spans and _fused_row(call, unit, row, (k, v), (out, lse)):
                continue
            q = unit.fold(unit.queries(call.q, row) * problem.scale)
            total: Tensor | None = None
            peak: Tensor | None = None
            if patience and row.spans:
                acc, total = _sum_row(call, unit, row, q, k, v)
                low, high = torch.aminmax(total)
                if not (low >= SAFE_SUM[0] and high <= SAFE_SUM[1]):
                    total, patience = None, patience - 1
            if total is None:
                acc, total, peak = _sum_row_safely(call, unit, row, q, k, v)
            _finish(unit, row, acc, total, peak, (out, lse, peaks))
    return out, lse, peaks


def _fits_fused(call: _Call) -> bool:
    """Whether torch's fused attention for the CPU can compute the rows: plain scores, one head dim."""
    problem = call.problem
    same_dim = problem.q.shape[3] == problem.v.shape[3] and problem.q.shape[3] > 0
    return call.device.type == "cpu" and call.score is None and not problem.want_max and same_dim and _FUSED is not None


def _fused_row(call: _Call, unit: Unit, row: Row, keys: tuple[Tensor, Tensor], results: tuple[Tensor, Tensor]) -> bool:
    """A row of out and lse by torch's fused attention; False (nothing written) where a masked score is not finite."""
    q = _plain(unit.fold(unit.queries(call.q, row))).unsqueeze(0)
    found: tuple[Tensor, Tensor] | None = None
    for chunk in split_chunks(row.spans, call.device):
        place = call.diagonal(unit, row, chunk.keys) if chunk.masked and call.mask_is_whole else None
        place = None if place is None else (*place, unit.rows_per_query)
        bias, empty = call.once(("bias", place), functools.partial(_bias, call, unit, row, chunk))
        k, v = (_take(x, chunk.keys).unsqueeze(0) for x in keys)
        out, lse = _FUSED(q, k, v, attn_mask=bias, scale=call.problem.scale)
        out, lse = out[0], lse[0].unsqueeze(-1)
        if empty is not None:
            out, lse = out.masked_fill(empty, 0.0), lse.masked_fill(empty, -math.inf)
        found = (out, lse) if found is None else _merged(found, (out, lse))
    assert found is not None
    out, lse = found
    if not bool(lse.amax() < math.inf):  # NaN or inf
        return False
    unit.queries(results[0], row).copy_(unit.unfold(out))
    unit.queries(results[1], row).copy_(unit.unfold(lse).squeeze(-1))
    return True


def _plain(x: Tensor) -> Tensor:
    """x with rows a matrix product reads without a copy: dense, not overlapping."""
    return x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous()


def _bias(call: _Call, unit: Unit, row: Row, chunk: Chunk) -> tuple[Tensor | None, Tensor | None]:
    """What the fused kernel adds to scores (0 or -inf), and the rows [n, rows, 1] that keep no key (None: every row keeps one)."""
    dropped = call.dropped(unit, row, chunk)
    if not dropped:
        return None, None
    queries = row.stop - row.start
    outer = tuple(max(drop.shape[d] for _, _, drop in dropped) for d in (0, 1))
    bias = torch.zeros((*outer, queries, chunk.length), dtype=call.dtype, device=call.device)
    for start, stop, drop in dropped:
        bias[..., start:stop].masked_fill_(drop, -math.inf)
    if outer == (1, 1):
        bias = bias if unit.rows_per_query == 1 else bias.repeat(1, 1, unit.rows_per_query, 1)
    else:
        bias = unit.fold(bias.expand(unit.batches, unit.q_heads, -1, -1)).unsqueeze(0)
    empty = None
    if sum(stop - start for start, stop in chunk.masked) == chunk.length:
        empty = (bias.amax(-1, keepdim=True) == -math.inf)[0]
        empty = empty if bool(empty.any()) else None
    return bias, empty


def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two parts of the keys of one row, of which the first keeps a key in every row."""
    lse = torch.logaddexp(a[1], b[1])
    return torch.mul(a[0], (a[1] - lse).exp_()).addcmul_(b[0], (b[1] - lse).exp_()), lse


def _sum_row(call: _Call, unit: Unit, row: Row, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of exp(score) * v [n, rows, v_dim] and of exp(score) [n, rows, 1], without subtracting anything."""
    acc = call.buffer(1, *q.shape[:2], v.shape[2])
    total: Tensor | None = None
    for chunk in call.chunks(unit, row):
        weights, _, _ = call.scores(unit, row, chunk, q, k)
        weights.exp_()
        part = weights.sum(-1, keepdim=True)
        if total is None:
            total = part
            torch.bmm(weights, _take(v, chunk.keys), out=acc)
        else:
            total += part
            acc.baddbmm_(weights, _take(v, chunk.keys))
    assert total is not None
    return acc, total


def _sum_row_safely(
    call: _Call, unit: Unit, row: Row, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same relative to the row's greatest score `peak` [n, rows, 1] (-inf if no key is kept), chunk after chunk."""
    acc, total = q.new_zeros(*q.shape[:2], v.shape[2]), q.new_zeros(*q.shape[:2], 1)
    peak = torch.full_like(total, -math.inf)
    for chunk in call.chunks(unit, row):
        weights, _, _ = call.scores(unit, row, chunk, q, k)
        higher = torch.maximum(peak, weights.amax(-1, keepdim=True))
        shift = higher.masked_fill(higher == -math.inf, 0.0)
        weights.sub_(shift).exp_()
        keep = (peak - shift).exp_()
        total.mul_(keep).add_(weights.sum(-1, keepdim=True))
        acc.mul_(keep).baddbmm_(weights, _take(v, chunk.keys))
        peak = higher
    return acc, total, peak


def _finish(
    unit: Unit, row: Row, acc: Tensor, total: Tensor, peak: Tensor | None, results: tuple[Tensor, Tensor, Tensor | None]
) -> None:
    """Divides by the sum and writes a row of out, lse and max_scores."""
    out, lse, peaks = results
    log_sum = total.log()
    if peak is not None:
        log_sum += peak
        empty = total == 0
        acc.masked_fill_(empty, 0.0)
        total = total.masked_fill(empty, 1.0)
        if peaks is not None:
            unit.queries(peaks, row).copy_(unit.unfold(peak).squeeze(-1))
    unit.queries(out, row).copy_(unit.unfold(acc.div_(total)))
    unit.queries(lse, row).copy_(unit.unfold(log_sum).squeeze(-1))


# ---------------------------------------------------------------- backward
class _Gradients:
    """Accumulators in the type of the computation; None where no gradient is wanted."""

    def __init__(self, call: _Call, needs: Needs) -> None:
        shapes = (call.q.shape, call.k.shape, call.v.shape)
        self.q, self.k, self.v = (
            torch.zeros(shape, dtype=call.dtype, device=call.device) if need else None
            for shape, need in zip(shapes, needs)
        )
        captures = call.problem.captures
        self.captures = [
            torch.zeros(c.shape, dtype=_wide(c.dtype), device=call.device) if need else None
            for c, need in zip(captures, needs[3])
        ]

    def results(self, problem: Problem) -> Grads:
        """In the types of the inputs."""
        q, k, v = (None if g is None else g.to(problem.q.dtype) for g in (self.q, self.k, self.v))
        captures = tuple(
            None if g is None else g.to(c.device, c.dtype) for g, c in zip(self.captures, problem.captures)
        )
        return q, k, v, captures


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def backward(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> Grads:
    """Gradients of one call, recomputing the scores.

    Args:
        problem, plan: as given to forward.
        out, lse: what forward returned.
        d_out: `[batch, q_heads, q_len, v_dim]`, any strides.
        d_lse: `[batch, q_heads, q_len]` or None.
        needs: whether q, k, v and each captured tensor of the score_mod need a gradient.

    Returns:
        The gradients (None where not needed), in the dtypes of the inputs; sums run in float32 (float64 for float64).
    """
    call = _Call(problem, needs)
    grads = _Gradients(call, needs)
    d_out = d_out.to(call.dtype)
    shift, delta, d_log = _row_terms(out.to(call.dtype), lse, d_out, d_lse)
    for unit, rows in call.units():
        k, v = unit.key_rows(call.k), unit.key_rows(call.v)
        d_k, d_v = (None if g is None else unit.key_rows(g) for g in (grads.k, grads.v))
        for row in rows:
            q = unit.fold(unit.queries(call.q, row) * problem.scale)
            terms = [unit.fold(unit.queries(x, row)) for x in (d_out, shift, delta, d_log)]
            d_q = q.new_zeros(q.shape) if grads.q is not None else None
            chunks = call.chunks(unit, row)
            exact = out.dtype != call.dtype and len(chunks) == 1
            for chunk in chunks:
                _chunk_gradients(call, unit, row, chunk, (q, k, v), terms, (d_q, d_k, d_v), grads.captures, exact=exact)
            if grads.q is not None and d_q is not None:
                unit.queries(grads.q, row).copy_(unit.unfold(d_q.mul_(problem.scale)))
    return grads.results(problem)


def _row_terms(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per row [batch, q_heads, q_len, 1]: what to subtract from scores, sum(out * d_out), and the gradient of lse."""
    empty = (lse == -math.inf).unsqueeze(-1)
    delta = (out * d_out).sum(-1, keepdim=True)
    d_log = torch.zeros_like(delta) if d_lse is None else d_lse.unsqueeze(-1)
    return lse.unsqueeze(-1).masked_fill(empty, math.inf), delta.masked_fill(empty, 0.0), d_log.masked_fill(empty, 0.0)


def _chunk_gradients(
    call: _Call,
    unit: Unit,
    row: Row,
    chunk: Chunk,
    inputs: tuple[Tensor, Tensor, Tensor],
    terms: list[Tensor],
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    captures: list[Tensor | None],
    *,
    exact: bool,
) -> None:
    """Adds what one chunk of keys contributes to every gradient.

    `exact` (the chunk is the whole row, out is a half type): sum(out * d_out) is taken as sum(weights * d_weights), which has not
    been rounded with out; the difference is systematic along a row and would show in captured gradients.
    """
    q, k, v = inputs
    d_out, shift, delta, d_log = terms
    d_q, d_k, d_v = into
    weights, dropped, saved = call.scores(unit, row, chunk, q, k)
    weights.sub_(shift).exp_()
    if d_v is not None:
        _add(d_v, chunk.keys, weights.transpose(1, 2), d_out)
    if d_q is None and d_k is None and not any(c is not None for c in captures):
        return
    d_scores = call.buffer(1, *weights.shape)
    torch.bmm(d_out, _take(v, chunk.keys).transpose(1, 2), out=d_scores)
    if exact:
        delta = torch.mul(weights, d_scores, out=call.buffer(3, *weights.shape)).sum(-1, keepdim=True)
    d_scores.sub_(delta - d_log).mul_(weights)
    tile = unit.unfold(d_scores)
    for start, stop, drop in dropped:
        tile[..., start:stop].masked_fill_(drop, 0.0)
    if call.score is not None:
        dead = unit.unfold(weights) == 0  # dropped, or without weight: nothing may come through, not even NaN
        tile.masked_fill_(dead, 0.0)
        d_tile, parts = call.score.differentiate(tile, call.positions(unit, row, chunk.keys), saved)
        for part in parts:
            part.add_to(captures, dead)
        if d_tile is not tile:
            tile.copy_(d_tile)
        tile.masked_fill_(dead, 0.0)
    if d_q is not None:
        d_q.baddbmm_(d_scores, _take(k, chunk.keys))
    if d_k is not None:
        _add(d_k, chunk.keys, d_scores.transpose(1, 2), q)


def _add(into: Tensor, keys: slice | Tensor, left: Tensor, right: Tensor) -> None:
    """into[:, keys] += left @ right; keys are distinct."""
    if isinstance(keys, slice):
        into[:, keys].baddbmm_(left, right)
    else:
        into.index_add_(1, keys, torch.bmm(left, right))
