"""Block-sparse attention in torch operations, forward and backward: what runs without a GPU, and for float64 on one.

Reads a Problem (tensors, traced mods, a BlockMask) and makes out, lse, max_scores or gradients. The one idea: a row of q tiles
meets a few long runs of keys, so a row of tiles is a couple of large matrix products over plain slices of key and value, shared by
all heads of the same mask, with the mask evaluated only in the partial tiles. Nothing grows with q_len x kv_len.

The softmax of a row is first tried without subtracting its maximum, which costs two passes over the scores. Where a row's sum shows
that this was unsafe (exp overflowed, or the sum is tiny or zero) the row is done again with the maximum; both are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.runtime.cpu_mods import MaskMod, Positions, ScoreMod
from flexattn.runtime.plan import Plan, Problem, output_like

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask
    from flexattn.frontend.tile_map import Spans, TileMap

Needs = tuple[bool, bool, bool, tuple[bool, ...]]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]

TILE = 1 << 20  # scores computed at once: they should stay in the processor's caches
Q_TILE, KV_TILE = 128, 128
ONE_TILE = 1 << 16  # below this q_len * kv_len evaluating the mask everywhere costs less than a tile map
SHORTEST = 512  # keys of one matrix product, at least, where a row has more
JOIN_BELOW = 256  # runs of keys shorter than this (on average) are gathered into one product
SAFE_SUM = (1e-15, 1e15)  # sums of exp(score) without a maximum that lose no accuracy
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
PATIENCE = 4  # rows done twice before a call stops trying without the maximum


# ---------------------------------------------------------------- which keys a row of q tiles meets
class Chunk(NamedTuple):
    """Keys of one matrix product: a slice, or the positions of several runs; `masked` are the parts the mask decides."""

    keys: slice | Tensor
    length: int
    masked: tuple[tuple[int, int], ...]


Span = tuple[int, int, bool]  # keys [start, stop), and whether the mask decides there


class Row(NamedTuple):
    """Queries [start, stop) and their keys."""

    start: int
    stop: int
    spans: Sequence[Span]


def _chunks(spans: Sequence[Span], longest: int, device: torch.device) -> list[Chunk]:
    """Spans in order, cut into products of at most `longest` keys; short separate runs are joined by gathering."""
    total = sum(stop - start for start, stop, _ in spans)
    runs = sum(1 for i, span in enumerate(spans) if i == 0 or spans[i - 1][1] != span[0])
    if total == 0:
        return []
    join = runs > 1 and total < JOIN_BELOW * runs
    longest = -(-total // -(-total // longest))  # products of equal size
    chunks: list[Chunk] = []
    pieces: list[Span] = []
    size = 0
    for start, stop, masked in spans:
        while start < stop:
            if size == longest or (pieces and not join and pieces[-1][1] != start):
                chunks.append(_chunk(pieces, device))
                pieces, size = [], 0
            end = min(stop, start + longest - size)
            pieces.append((start, end, masked))
            size += end - start
            start = end
    chunks.append(_chunk(pieces, device))
    return chunks


def _chunk(pieces: Sequence[Span], device: torch.device) -> Chunk:
    masked: list[tuple[int, int]] = []
    at = 0
    for start, stop, is_masked in pieces:
        if is_masked and masked and masked[-1][1] == at:
            masked[-1] = (masked[-1][0], at + stop - start)
        elif is_masked:
            masked.append((at, at + stop - start))
        at += stop - start
    first, last = pieces[0][0], pieces[-1][1]
    if last - first == at:
        return Chunk(slice(first, last), at, tuple(masked))
    keys = torch.cat([torch.arange(start, stop, device=device) for start, stop, _ in pieces])
    return Chunk(keys, at, tuple(masked))


def _split(spans: Sequence[Span], device: torch.device) -> list[Chunk]:
    """All keys as one chunk, or unmasked and masked keys apart where most are unmasked: there the mask would only be read."""
    full = [span for span in spans if not span[2]]
    partial = [span for span in spans if span[2]]
    unmasked = sum(stop - start for start, stop, _ in full)
    masked = sum(stop - start for start, stop, _ in partial)
    if unmasked and masked and unmasked > max(SHORTEST, 2 * masked):
        return [_chunk(full, device), _chunk(partial, device)]
    return [_chunk(spans, device)] if spans else []


class _Lines:
    """The spans of a TileMap as lists, by line."""

    def __init__(self, tiles: TileMap) -> None:
        self.tiles = tiles
        self.full, self.partial = _tolist(tiles.full), _tolist(tiles.partial)

    def spans(self, line: int) -> list[Span]:
        """Keys of a line of tiles, in order."""
        width, end = self.tiles.kv_block, self.tiles.kv_len
        found = [
            (start * width, min(stop * width, end), masked)
            for (indptr, starts, stops), masked in ((self.full, False), (self.partial, True))
            for start, stop in zip(starts[indptr[line] : indptr[line + 1]], stops[indptr[line] : indptr[line + 1]])
        ]
        found.sort()
        return found


def _tolist(spans: Spans) -> tuple[list[int], list[int], list[int]]:
    return spans.indptr.tolist(), spans.start.tolist(), spans.stop.tolist()


# ---------------------------------------------------------------- which heads share a product
class Unit:
    """Batch entries and query heads that meet the same keys and are computed together.

    Scores are one batched matrix product [n, rows, keys]: n runs over (batch, kv head), rows over (query head of the group, query).
    Where key and value have batch 1, all batch entries are rows of the same product instead.
    """

    def __init__(self, problem: Problem, batch: tuple[int, int], heads: tuple[int, int]) -> None:
        group = problem.q.shape[1] // problem.k.shape[1]
        self.batch, self.heads = slice(*batch), slice(*heads)
        self.kv_heads = slice(heads[0] // group, -(-heads[1] // group))
        self.batches, self.q_heads = batch[1] - batch[0], heads[1] - heads[0]
        self.one_kv = problem.k.shape[0] == 1
        self.kv_batch = slice(0, 1) if self.one_kv else self.batch
        self.n = (self.kv_heads.stop - self.kv_heads.start) * (1 if self.one_kv else self.batches)
        self.rows_per_query = self.batches * self.q_heads // self.n

    def fold(self, x: Tensor) -> Tensor:
        """[batch, q_heads, queries, width] -> [n, rows, width], a copy only where needed."""
        x = x.transpose(0, 1) if self.one_kv else x
        return x.reshape(self.n, self.rows_per_query * x.shape[2], x.shape[3])

    def unfold(self, x: Tensor) -> Tensor:
        """[n, rows, width] -> [batch, q_heads, queries, width], a view of a contiguous tensor."""
        outer = (self.q_heads, self.batches) if self.one_kv else (self.batches, self.q_heads)
        x = x.reshape(*outer, x.shape[1] // self.rows_per_query, x.shape[2])
        return x.transpose(0, 1) if self.one_kv else x

    def queries(self, x: Tensor, row: Row) -> Tensor:
        """This unit's part of a tensor [batch, q_heads, q_len, ...] for the queries of a row."""
        return x[self.batch, self.heads, row.start : row.stop]

    def key_rows(self, x: Tensor) -> Tensor:
        """This unit's part of a tensor [kv_batch, kv_heads, kv_len, width] as [n, kv_len, width]; a view if x is contiguous."""
        return x[self.kv_batch, self.kv_heads].reshape(self.n, x.shape[2], x.shape[3])


def _units(problem: Problem, groups: tuple[int, int], q_tile: int) -> Iterator[tuple[int, Unit]]:
    """(group of the tile map, unit) for all heads; a unit is one group's heads, or a part where they are many."""
    batch, heads = problem.q.shape[:2]
    group = heads // problem.k.shape[1]
    at_once = max(1, TILE // (q_tile * SHORTEST))
    head_step = 1 if groups[1] > 1 else _head_step(heads, group, at_once)
    batch_step = 1 if groups[0] > 1 or head_step < heads else max(1, at_once // heads)
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            line = (b if groups[0] > 1 else 0) * groups[1] + (h if groups[1] > 1 else 0)
            yield line, Unit(problem, (b, min(batch, b + batch_step)), (h, min(heads, h + head_step)))


def _head_step(heads: int, group: int, at_once: int) -> int:
    """How many query heads at once: whole groups, or a part of one group that divides it."""
    if heads <= at_once:
        return heads
    if group <= at_once:
        return at_once // group * group
    return max(d for d in range(1, at_once + 1) if group % d == 0)


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
        self.mask_is_whole = problem.block_mask is None or _any_tile(problem.block_mask)
        self.tiles, self.q_tile = _tiles(problem)
        self.lines = _Lines(self.tiles) if self.tiles is not None else None
        self.axes = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.shape[2])]
        self.buffers: list[Tensor] = []

    def units(self) -> Iterator[tuple[Unit, Iterator[Row]]]:
        """Units with their rows."""
        groups = (self.tiles.batch, self.tiles.heads) if self.tiles is not None else (1, 1)
        for group, unit in _units(self.problem, groups, self.q_tile):
            yield unit, self.rows(group, unit)

    def rows(self, group: int, unit: Unit) -> Iterator[Row]:
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
        return _chunks(row.spans, max(SHORTEST, at_once), self.device)

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
            parts.append((start, stop, self.mask.dropped(self.positions(unit, row, part))))
        return parts

    def scores(self, unit: Unit, row: Row, chunk: Chunk, q: Tensor, k: Tensor) -> tuple[Tensor, list[tuple[int, int, Tensor]], list[Tensor]]:
        """Modified scores [n, rows, keys], -inf where the mask drops; also the dropped parts and what the derivative needs."""
        scores = self.buffer(0, unit.n, q.shape[1], chunk.length)
        torch.bmm(q, _take(k, chunk.keys).transpose(1, 2), out=scores)
        dropped = self.dropped(unit, row, chunk)
        saved: list[Tensor] = []
        tile = unit.unfold(scores)
        if self.score is not None:
            spare = lambda: unit.unfold(self.buffer(2, *scores.shape))
            modified, saved = self.score.apply(tile, spare, self.positions(unit, row, chunk.keys), lambda: _kept(tile, dropped))
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


def _tiles(problem: Problem) -> tuple[TileMap | None, int]:
    """The tile map to follow (None: every key is visited and the mask decides everywhere) and the rows of a q tile."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    block_mask = problem.block_mask
    if block_mask is None:
        return None, min(q_len, Q_TILE)
    if not _any_tile(block_mask):
        q_tile, kv_tile = (_divisor(size, wanted) for size, wanted in zip(block_mask.BLOCK_SIZE, (Q_TILE, Q_TILE)))
        return block_mask.tile_map(q_tile, kv_tile), q_tile
    if q_len * kv_len <= ONE_TILE:
        return None, q_len
    return block_mask.tile_map(Q_TILE, KV_TILE), Q_TILE


def _any_tile(block_mask: BlockMask) -> bool:
    """Whether the mask can be cut into any tiles: a list mask only knows its own blocks."""
    return block_mask.legal_tile(2 * block_mask.BLOCK_SIZE[0], 2 * block_mask.BLOCK_SIZE[1])


def _divisor(size: int, wanted: int) -> int:
    """The greatest divisor of `size` that is at most `wanted`."""
    return next(d for d in range(min(size, wanted), 0, -1) if size % d == 0)


def make_tile_maps(problem: Problem, plan: Plan, *, backward: bool) -> None:
    """Builds the tile map that `forward` and `backward` will look up (they use the same one)."""
    _tiles(problem)


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
    for chunk in _split(row.spans, call.device):
        bias, empty = _bias(unit, row, chunk.length, call.dropped(unit, row, chunk), chunk.masked, call.dtype)
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


def _bias(
    unit: Unit, row: Row, keys: int, dropped: list[tuple[int, int, Tensor]], masked: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """What the fused kernel adds to scores (0 or -inf), and the rows [n, rows, 1] that keep no key (None: every row keeps one)."""
    if not dropped:
        return None, None
    queries = row.stop - row.start
    outer = tuple(max(drop.shape[d] for _, _, drop in dropped) for d in (0, 1))
    bias = torch.zeros((*outer, queries, keys), dtype=dtype, device=dropped[0][2].device)
    for start, stop, drop in dropped:
        bias[..., start:stop].masked_fill_(drop, -math.inf)
    if outer == (1, 1):
        bias = bias if unit.rows_per_query == 1 else bias.repeat(1, 1, unit.rows_per_query, 1)
    else:
        bias = unit.fold(bias.expand(unit.batches, unit.q_heads, -1, -1)).unsqueeze(0)
    empty = None
    if sum(stop - start for start, stop in masked) == keys:
        empty = (bias.amax(-1, keepdim=True) == -math.inf)[0]
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


def _sum_row_safely(call: _Call, unit: Unit, row: Row, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _finish(unit: Unit, row: Row, acc: Tensor, total: Tensor, peak: Tensor | None, results: tuple[Tensor, Tensor, Tensor | None]) -> None:
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
            torch.zeros(shape, dtype=call.dtype, device=call.device) if need else None for shape, need in zip(shapes, needs)
        )
        captures = call.problem.captures
        self.captures = [
            torch.zeros(c.shape, dtype=_wide(c.dtype), device=call.device) if need else None for c, need in zip(captures, needs[3])
        ]

    def results(self, problem: Problem) -> Grads:
        """In the types of the inputs."""
        q, k, v = (None if g is None else g.to(problem.q.dtype) for g in (self.q, self.k, self.v))
        captures = tuple(None if g is None else g.to(c.device, c.dtype) for g, c in zip(self.captures, problem.captures))
        return q, k, v, captures


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def backward(problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs) -> Grads:
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
        into = [None if g is None else unit.key_rows(g) for g in (grads.k, grads.v)]
        for row in rows:
            q = unit.fold(unit.queries(call.q, row) * problem.scale)
            terms = [unit.fold(unit.queries(x, row)) for x in (d_out, shift, delta, d_log)]
            d_q = q.new_zeros(q.shape) if grads.q is not None else None
            chunks = call.chunks(unit, row)
            exact = out.dtype != call.dtype and len(chunks) == 1
            for chunk in chunks:
                _chunk_gradients(call, unit, row, chunk, (q, k, v), terms, (d_q, *into), grads.captures, exact=exact)
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
