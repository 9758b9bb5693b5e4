"""The single pairs of a window of a mask: which of them are kept, as a tensor, characters and a picture.

Reads a mask and ranges of queries and keys; makes a `MaskWindow`. The one idea: only the pairs of the window are evaluated, so a
window in the middle of a million tokens costs what it shows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError, OptionError
from flexattn.frontend.arguments import integer
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.list_mask import ListMask, two_sizes
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Spans, chunks, cover
from flexattn.frontend.tile_map import TileMap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PAIRS = 1 << 22
PAIRS_AT_ONCE = 1 << 20
SPACED = 48  # up to so many keys a pair has a blank behind it, so that the picture is about square
Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class MaskWindow:
    """The pairs of some queries and keys of a mask.

    Attributes:
        kept: bool [queries, keys], on the CPU.
        queries, keys: the half-open ranges of tokens.
        block: tokens of the mask's blocks, (q, kv), whose borders pictures show.
        group: (batch, head).
    """

    kept: Tensor
    queries: Range
    keys: Range
    block: tuple[int, int]
    group: tuple[int, int]

    def title(self) -> str:
        """What is shown, in a line."""
        (q, q_end), (kv, kv_end) = self.queries, self.keys
        which = f", batch {self.group[0]} head {self.group[1]}" if any(self.group) else ""
        ranges = f"queries {q:,} to {q_end - 1:,} (down) x keys {kv:,} to {kv_end - 1:,} (right){which}"
        return f"{ranges}; {int(self.kept.sum()):,} of {self.kept.numel():,} pairs kept"

    def __str__(self) -> str:
        """A character a pair, with the borders of blocks."""
        (q, q_end), (kv, kv_end) = self.queries, self.keys
        gap, width = " " if kv_end - kv <= SPACED else "", len(str(q_end))
        borders = [n for n in range(kv + 1, kv_end) if n % self.block[1] == 0]
        edges = [kv, *borders, kv_end]
        cuts = list(itertools.pairwise(edges))
        rule = "┼".join("─" * ((b - a) * (1 + len(gap))) for a, b in cuts)
        lines = [self.title()]
        for n, row in enumerate(self.kept.tolist(), q):
            if n > q and n % self.block[0] == 0:
                lines.append(f"{'':>{width}} ├{rule}")
            parts = ("".join(("█" if row[k - kv] else "·") + gap for k in range(a, b)) for a, b in cuts)
            lines.append(f"{n:>{width}} │{'│'.join(parts)}".rstrip())
        return "\n".join(lines)

    def figure(self, *, title: str | None = None) -> Figure:
        """The window as a matplotlib figure, a pixel a pair, with token axes and the borders of blocks.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        from flexattn.frontend import figures

        return figures.window_figure(self, title=title)

    def _repr_html_(self) -> str:
        from flexattn.frontend import display

        return display.window_svg(self)


def read_window(mask: PredicateMask | ListMask, queries: Range, keys: Range, group: tuple[int, int]) -> MaskWindow:
    """Evaluates the pairs of a window.

    Raises:
        CaptureIndexError: the window, batch or head does not lie within the mask.
        OptionError: there are more than 4,194,304 pairs.
    """
    group, queries, keys = (_integers(x) for x in (group, queries, keys))
    wanted = (*((n, n + 1) for n in group), queries, keys)
    for name, (start, stop), size in zip(
        ("batch", "head", "queries", "keys"), wanted, (*two_sizes(mask.sizes), *mask.lengths), strict=True
    ):
        if not 0 <= start < stop <= size:
            given, hint = f"[{start}, {stop}) of {size}", "a range of at least one, counted from 0"
            raise CaptureIndexError(f"the window's {name} must lie within the mask", given=given, hint=hint)
    pairs = (queries[1] - queries[0]) * (keys[1] - keys[0])
    if pairs > MOST_PAIRS:
        hint = "a smaller window, or figure() for the block map of the whole mask"
        raise OptionError(f"a window has at most {MOST_PAIRS:,} pairs", given=f"{pairs:,}", hint=hint)
    where = (queries, keys, group)
    kept = _listed(mask, *where) if isinstance(mask, ListMask) else _evaluated(mask, *where)
    return MaskWindow(kept.cpu(), queries, keys, mask.block, group)


def _integers(pair: Range) -> Range:
    first, second = (integer(n, "a position of a window", hint="window(0, 64, 0, 64, head=1)") for n in pair)
    return first, second


@torch.no_grad()
def _evaluated(mask: PredicateMask, queries: Range, keys: Range, group: tuple[int, int]) -> Tensor:
    mask.check_current()
    return _values(mask.traced, queries, keys, group, mask.device)


def _values(traced: Traced | None, queries: Range, keys: Range, group: tuple[int, int], device: torch.device) -> Tensor:
    """A traced mask at every pair of a window."""
    rows, cols = (torch.arange(*x, device=device) for x in (queries, keys))
    if traced is None:
        return torch.ones(len(rows), len(cols), dtype=torch.bool, device=device)
    b, h = (torch.tensor(n, device=device) for n in group)
    parts = []
    for some in chunks(rows, max(1, PAIRS_AT_ONCE // len(cols))):
        kept = evaluate(*traced, b=b, h=h, q_idx=some[:, None], kv_idx=cols[None])
        parts.append(kept.to(device).expand(len(some), len(cols)))
    return torch.cat(parts)


@torch.no_grad()
def _listed(mask: ListMask, queries: Range, keys: Range, group: tuple[int, int]) -> Tensor:
    """Pairs of full blocks, and those of partial ones that the function keeps."""
    blocks = mask.block_map()
    full, partial = (_pairs_of(blocks, s, queries, keys, group) for s in (blocks.full, blocks.partial))
    return full | partial & _values(mask.inner, queries, keys, group, full.device)


def _pairs_of(blocks: TileMap, spans: Spans, queries: Range, keys: Range, group: tuple[int, int]) -> Tensor:
    """The pairs of a window that lie in the blocks of some spans, of which only the window's rows are read."""
    first, last = queries[0] // blocks.q_block, (queries[1] - 1) // blocks.q_block
    line = (min(group[0], blocks.batch - 1) * blocks.heads + min(group[1], blocks.heads - 1)) * blocks.rows
    indptr = spans.indptr[line + first : line + last + 2].long()
    part = slice(int(indptr[0]), int(indptr[-1]))
    covered = cover(Spans(indptr - indptr[0], spans.start[part], spans.stop[part]), blocks.cols)
    rows, cols = (torch.arange(*x, device=covered.device) for x in (queries, keys))
    return covered[(rows // blocks.q_block - first)[:, None], (cols // blocks.kv_block)[None]]


__all__ = ["MaskWindow", "read_window"]
