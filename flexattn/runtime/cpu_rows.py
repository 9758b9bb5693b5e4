"""What a row of q tiles meets: which keys, as slices of key and value, and which heads are computed together.

Reads a Problem's sizes and the spans of its tile map; makes `Row`s of spans, `Chunk`s of keys for one matrix product, and `Unit`s of
heads that share them. The one idea: runs of tiles are long, so a row is one or two slices; only scattered short runs are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.runtime.plan import Problem

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask
    from flexattn.frontend.tile_map import Spans, TileMap

TILE = 1 << 20  # scores computed at once: they should stay in the processor's caches
Q_TILE, KV_TILE = 128, 128
PLAIN_Q_TILE = 1024  # without a mask and a score_mod nothing is saved by short rows
ONE_TILE = 1 << 16  # below this q_len * kv_len evaluating the mask everywhere costs less than a tile map
SHORTEST = 512  # keys of one matrix product, at least, where a row has more
JOIN_BELOW = 256  # runs of keys shorter than this (on average) are gathered into one product


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


def cut_chunks(spans: Sequence[Span], longest: int, device: torch.device) -> list[Chunk]:
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


def split_chunks(spans: Sequence[Span], device: torch.device) -> list[Chunk]:
    """All keys as one chunk, or unmasked and masked keys apart where most are unmasked: there the mask would only be read."""
    full = [span for span in spans if not span[2]]
    partial = [span for span in spans if span[2]]
    unmasked = sum(stop - start for start, stop, _ in full)
    masked = sum(stop - start for start, stop, _ in partial)
    if unmasked and masked and unmasked > max(SHORTEST, 2 * masked):
        return [_chunk(full, device), _chunk(partial, device)]
    return [_chunk(spans, device)] if spans else []


class Lines:
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


def make_units(problem: Problem, groups: tuple[int, int], q_tile: int) -> Iterator[tuple[int, Unit]]:
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


# ---------------------------------------------------------------- which tile map
def choose_tiles(problem: Problem) -> tuple[TileMap | None, int]:
    """The tile map to follow (None: every key is visited and the mask decides everywhere) and the rows of a q tile."""
    q_len, kv_len = problem.q.shape[2], problem.k.shape[2]
    block_mask = problem.block_mask
    if block_mask is None:
        return None, min(q_len, Q_TILE if problem.score is not None else PLAIN_Q_TILE)
    if not any_tile(block_mask):
        q_tile, kv_tile = (_divisor(size, wanted) for size, wanted in zip(block_mask.BLOCK_SIZE, (Q_TILE, Q_TILE)))
        return block_mask.tile_map(q_tile, kv_tile), q_tile
    if q_len * kv_len <= ONE_TILE:
        return None, q_len
    return block_mask.tile_map(Q_TILE, KV_TILE), Q_TILE


def any_tile(block_mask: BlockMask) -> bool:
    """Whether the mask can be cut into any tiles: a list mask only knows its own blocks."""
    return block_mask.legal_tile(2 * block_mask.BLOCK_SIZE[0], 2 * block_mask.BLOCK_SIZE[1])


def _divisor(size: int, wanted: int) -> int:
    """The greatest divisor of `size` that is at most `wanted`."""
    return next(d for d in range(min(size, wanted), 0, -1) if size % d == 0)
