"""What a mask costs and saves, in numbers: blocks by kind and by what settled them, kept pairs, skipped work, the formula of its rows.

Reads a tile map and, where there is one, the closed form; makes `MaskStatistics`. The one idea: a number is exact where a
formula or the pairs of partial blocks give it, and otherwise a bracket that says so; nothing is sampled.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flexattn.frontend.closed_form import MOST_ENDS, ClosedForm
from flexattn.frontend.group_forms import count_by_group
from flexattn.frontend.spans import lines_of
from flexattn.frontend.tile_map import TileMap

COUNTED_PAIRS = 10**9  # of partial blocks: some seconds; beyond, kept pairs are a bracket unless there is a formula
SHOWN_PAIRS = 10**7  # the same for pictures and print(), which nobody wants to wait for
KINDS = ("empty", "partial", "full")
WAYS = {
    "interval": "proof",
    "witness": "witnesses",
    "evaluation": "evaluation",
}  # how the tile map says it -> how we do
Bracket = tuple[int, int]


class Kept(NamedTuple):
    """Kept pairs of the groups of a tile map: at least, at most, and where that comes from."""

    low: int
    high: int
    source: str  # "formula", "count" or "bracket"


@dataclass(frozen=True)
class MaskStatistics:
    """A mask in numbers, over the whole batch and all heads; str() is a summary of a few lines.

    Attributes:
        shape: (B, H, q_len, kv_len).
        block: tokens of a block, (q, kv).
        blocks: how many are "empty", "partial" and "full".
        decided: for each of those, how many were settled which way: by "formula" (the mask is bounds on queries, keys and
            their difference, or compares sorted tensors as packed documents do), by "proof" (bounds of the mask over a
            rectangle), by "repetition" of blocks before them along the diagonal, by "witnesses" (a kept and a dropped pair), by
            "evaluation" of their pairs, by "a ragged end" of a sequence, which cuts them, or by a "list" that somebody gave.
        kept_pairs: at least and at most how many (query, key) pairs are kept; the same number twice where that is exact.
        source: of that number: a "formula", a "count" of the pairs in partial blocks, or "bracket" where both would take long.
        closed_form: the keys of a query by formula, None if there is no such formula.

    Example:
        >>> stats = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 2, 8, 1 << 20, 1 << 20, "cpu").statistics()
        >>> stats.is_exact, stats.density, stats.blocks["partial"]
        (True, (0.5000004768371582, 0.5000004768371582), 131072)
        >>> round(stats.flops_saved, 4), round(stats.wasted_lanes[0], 4), stats.closed_form
        (0.4999, 0.4961, 'kv_idx <= q_idx')
        >>> print(stats.latex)
        kv_{idx} \\leq q_{idx}
    """

    shape: tuple[int, int, int, int]
    block: tuple[int, int]
    blocks: Mapping[str, int]
    decided: Mapping[str, Mapping[str, int]]
    kept_pairs: Bracket
    source: str
    closed_form: str | None
    _formula: ClosedForm | None = field(default=None, repr=False, compare=False)

    @property
    def pairs(self) -> int:
        """All (query, key) pairs, kept or not."""
        batch, heads, q_len, kv_len = self.shape
        return batch * heads * q_len * kv_len

    @property
    def is_exact(self) -> bool:
        """Whether `kept_pairs` is one number."""
        return self.kept_pairs[0] == self.kept_pairs[1]

    @property
    def density(self) -> tuple[float, float]:
        """The share of pairs that is kept, at least and at most; 0 where there is no pair."""
        low, high = (n / self.pairs if self.pairs else 0.0 for n in self.kept_pairs)
        return low, high

    @property
    def flops_saved(self) -> float:
        """The share of the matrix products of dense attention that empty blocks save, from 0 to 1."""
        total = sum(self.blocks.values())
        return self.blocks["empty"] / total if total else 0.0

    @property
    def wasted_lanes(self) -> tuple[float, float]:
        """Of the pairs that kernels compute in partial blocks, the share that is then dropped, at least and at most."""
        area = self.block[0] * self.block[1]
        lanes, full = self.blocks["partial"] * area, self.blocks["full"] * area
        low, high = (1 - (n - full) / lanes if lanes else 0.0 for n in self.kept_pairs[::-1])
        return low, high

    @property
    def latex(self) -> str | None:
        """The closed form in LaTeX, without dollar signs; sympy writes it."""
        return self._formula.latex() if self._formula is not None else None

    def flops(self, qk_dim: int, v_dim: int | None = None) -> int:
        """Floating point operations of a forward pass: two matrix products over every block that is not empty."""
        visited = (self.blocks["partial"] + self.blocks["full"]) * self.block[0] * self.block[1]
        return 2 * visited * (qk_dim + (qk_dim if v_dim is None else v_dim))

    def lines(self) -> list[str]:
        """The summary, a fact a line."""
        total, width = max(1, sum(self.blocks.values())), len(f"{max(self.blocks.values(), default=0):,}")
        found = [f"blocks of {self.block[0]} x {self.block[1]} tokens"]
        for kind in KINDS:
            n, ways = self.blocks[kind], self.decided[kind]
            how = ", ".join(f"by {way}" if m == n else f"{m:,} by {way}" for way, m in ways.items())
            share = "<0.1%" if 0 < n / total < 0.0005 else f"{n / total:.1%}"
            found.append(f"  {kind:<7} {n:>{width},} ({share})" + (f": {how}" if how else ""))
        return [*found, self._density_line(), self._work_line(), *self._formula_lines()]

    def _density_line(self) -> str:
        low, high = self.kept_pairs
        if self.is_exact:
            how = "by formula" if self.source == "formula" else "counted"
            return f"density {self.density[0]:.2%} of pairs: {low:,} of {self.pairs:,} kept, exact, {how}"
        return (
            f"density in the bracket [{self.density[0]:.2%}, {self.density[1]:.2%}] of pairs: {low:,} to {high:,} kept"
        )

    def _work_line(self) -> str:
        low, high = self.wasted_lanes
        wasted = f"{low:.1%}" if self.is_exact else f"[{low:.1%}, {high:.1%}]"
        return f"FLOPs saved {self.flops_saved:.1%}; lanes wasted in partial blocks {wasted}"

    def _formula_lines(self) -> list[str]:
        return [f"keys of a query: {self.closed_form}"] if self.closed_form is not None else []

    def __str__(self) -> str:
        return "\n".join(self.lines())


def statistics(
    tiles: TileMap, *, sizes: tuple[int, int], formula: ClosedForm | None, most_counted: int = COUNTED_PAIRS
) -> MaskStatistics:
    """A mask in numbers.

    Args:
        tiles: its blocks.
        sizes: (batch, heads) of the mask, which may share the blocks.
        formula: of its rows, if there is one.
        most_counted: pairs of partial blocks that may be counted one by one.
    """
    grid = tiles.grid
    repeats = sizes[0] * sizes[1] // grid.groups if grid.groups else 0
    partial, full = tiles.partial.tiles(), tiles.full.tiles()
    blocks = {"empty": grid.groups * grid.rows * grid.cols - partial - full, "partial": partial, "full": full}
    kept = kept_pairs(tiles, formula, most_counted=most_counted)
    return MaskStatistics(
        shape=(*sizes, grid.q_len, grid.kv_len),
        block=(grid.q_block, grid.kv_block),
        blocks={kind: n * repeats for kind, n in blocks.items()},
        decided={k: {w: n * repeats for w, n in ways.items()} for k, ways in _decided(tiles, blocks).items()},
        kept_pairs=(kept.low * repeats, kept.high * repeats),
        source=kept.source,
        closed_form=str(formula) if formula is not None else None,
        _formula=formula,
    )


def _decided(tiles: TileMap, blocks: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """How many blocks of each kind were settled which way. Full ones that a length cuts became partial afterwards."""
    if "listed" in tiles.decided:
        return {kind: {"list": n} if n else {} for kind, n in blocks.items()}
    ways: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for name, n in tiles.decided.items():
        kind, by, way = name.partition("_by_")
        if by and isinstance(n, int) and n:
            ways[kind][WAYS.get(way, way)] = n
    cut = blocks["partial"] - sum(ways["partial"].values())
    if cut > 0:
        ways["partial"]["a ragged end"] = cut
        for way in list(ways["full"]):
            taken = min(cut, ways["full"][way])
            ways["full"][way], cut = ways["full"][way] - taken, cut - taken
    return {kind: {way: n for way, n in found.items() if n} for kind, found in ways.items()}


# ------------------------------------------------------------------------------------------------------ kept pairs
_KNOWN: weakref.WeakKeyDictionary[TileMap, Kept] = weakref.WeakKeyDictionary()


def kept_pairs(tiles: TileMap, formula: ClosedForm | None, *, most_counted: int) -> Kept:
    """Kept pairs of the groups of a tile map.

    Args:
        tiles: the blocks.
        formula: of the rows, if there is one: counts them in O(rows).
        most_counted: pairs of partial blocks, or ends of runs of a formula, that may be counted one by one.
    """
    known = _KNOWN.get(tiles)
    if known is None or known.source == "bracket":
        known = _KNOWN[tiles] = _kept(tiles, formula, most_counted)
    return known


def _kept(tiles: TileMap, formula: ClosedForm | None, most_counted: int) -> Kept:
    grid = tiles.grid
    area, full, partial = grid.q_block * grid.kv_block, tiles.full.tiles(), tiles.partial.tiles()
    counted = _by_formula(tiles, formula, min(most_counted, MOST_ENDS)) if partial and most_counted else None
    if counted is not None:
        return Kept(counted, counted, "formula")
    inside, cut = _real_pairs(tiles)
    if inside <= most_counted:
        counted = tiles.kept_pairs()
        return Kept(counted, counted, "count")
    one = 0 if "listed" in tiles.decided else 1  # a partial block keeps a pair and drops one; a listed one need not
    return Kept(full * area + one * partial, full * area + inside - one * (partial - cut), "bracket")


def _by_formula(tiles: TileMap, formula: ClosedForm | None, most_ends: int) -> int | None:
    """The number by the formula of all rows, or else by those of each head and batch entry; None if both would take long."""
    device = tiles.full.start.device
    if formula is not None and len(formula.runs) * tiles.grid.groups * tiles.q_len <= most_ends:
        return formula.count(tiles.grid, device)
    if tiles.traced is None or "listed" in tiles.decided:
        return None
    return count_by_group(tiles.traced, tiles.grid, device, most_ends=most_ends)


def _real_pairs(tiles: TileMap) -> tuple[int, int]:
    """Pairs of partial blocks within the lengths, and how many of these blocks a length cuts."""
    grid, spans = tiles.grid, tiles.partial
    row = lines_of(spans) % max(grid.rows, 1)
    height = (grid.q_len - row * grid.q_block).clamp(max=grid.q_block)
    start, stop = spans.start.long(), spans.stop.long()
    end = (stop * grid.kv_block).clamp(max=grid.kv_len)
    ragged_row, ragged_end = height < grid.q_block, end < stop * grid.kv_block
    cut = int(((stop - start) * ragged_row + (~ragged_row & ragged_end)).sum())
    return int((height * (end - start * grid.kv_block)).sum()), cut


__all__ = ["COUNTED_PAIRS", "SHOWN_PAIRS", "Kept", "MaskStatistics", "kept_pairs", "statistics"]
