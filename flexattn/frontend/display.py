"""Pictures of block masks: characters, and SVG for notebooks.

Reads a mask's tile map; makes text or a drawing with axes and a legend. The one idea: a picture has few cells, so it is summed
from the runs of tiles, section by section, and a million tokens cost no more than a thousand.
"""

from __future__ import annotations

import html as markup
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError
from flexattn.frontend.list_mask import two_sizes
from flexattn.frontend.spans import coverage
from flexattn.frontend.statistics import COUNTED_PAIRS, SHOWN_PAIRS, MaskStatistics
from flexattn.frontend.tile_map import TileMap

if TYPE_CHECKING:
    from flexattn.frontend.mask_window import MaskWindow

EMPTY, PARTIAL, FULL = (245, 245, 242), (253, 174, 97), (44, 90, 160)  # colours that stay apart in grey
MAX_CELLS = 64  # a side of a picture
PLOT = 380.0  # the longer side of a drawing, in pixels
KINDS = (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))


class Drawable(Protocol):
    """What a picture needs of a mask."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]: ...

    def tile_map(self, q_block: int, kv_block: int) -> TileMap: ...

    def statistics(self, *, most_counted: int = ...) -> MaskStatistics: ...


@dataclass(frozen=True)
class Picture:
    """Sections of one head's block map: the share of each section's blocks that are partial and full, float64 [rows, cols]."""

    partial: Tensor
    full: Tensor
    blocks: tuple[int, int]  # of a section, (q, kv)
    tile: tuple[int, int]  # tokens of a block
    lengths: tuple[int, int]

    @property
    def visited(self) -> Tensor:
        return self.partial + self.full


def picture(
    tile_map: TileMap, *, batch: int = 0, head: int = 0, max_rows: int = MAX_CELLS, max_cols: int = MAX_CELLS
) -> Picture:
    """Sum the blocks of one head into at most max_rows x max_cols sections."""
    group = min(batch, tile_map.batch - 1) * tile_map.heads + min(head, tile_map.heads - 1)
    rows, cols = tile_map.rows, tile_map.cols
    step = (max(1, -(-rows // max_rows)), max(1, -(-cols // max_cols)))
    shares = []
    for spans in (tile_map.partial, tile_map.full):
        count = coverage(spans, group=group, lines=rows, cells=cols, line_step=step[0], cell_step=step[1]).cpu()
        shares.append(count / _areas(rows, cols, step))
    return Picture(shares[0], shares[1], step, (tile_map.q_block, tile_map.kv_block), (tile_map.q_len, tile_map.kv_len))


def _areas(rows: int, cols: int, step: tuple[int, int]) -> Tensor:
    """Blocks in each section; those at the ends may be smaller."""
    sides = (torch.arange(0, n, s).neg().add(n).clamp(max=s) for n, s in ((rows, step[0]), (cols, step[1])))
    height, width = sides
    return (height[:, None] * width).double()


def notes_of(mask: Drawable) -> list[str]:
    """A mask's statistics for a picture, a fact a line: nothing that takes long is counted."""
    found = mask.statistics(most_counted=SHOWN_PAIRS)
    lines = found.lines()
    lanes = found.blocks["partial"] * found.block[0] * found.block[1]
    if not found.is_exact and lanes <= COUNTED_PAIRS:
        lines.append("statistics() counts the pairs")
    return lines


def check_group(mask: Drawable, batch: int, head: int) -> None:
    """Refuses a batch entry or head that the mask does not have."""
    for name, n, size in zip(("batch", "head"), (batch, head), two_sizes(tuple(mask.shape[:-2])), strict=True):
        if not isinstance(n, int) or not 0 <= n < size:
            given, hint = f"{name}={n!r} of {size}", f"0 to {size - 1}; expand() for a mask that is the same in all"
            raise CaptureIndexError(f"a picture's {name} must be one of the mask's", given=given, hint=hint)


# ------------------------------------------------------------------------------------------------------------ text
def block_text(tile_map: TileMap, *, sizes: Sequence[int], grid_size: int | tuple[int, int], limit: int) -> str:
    """torch's picture of the visited blocks: all of a section, some of it, or none, of the first `limit` heads."""
    if grid_size == -1:
        limits = (max(tile_map.rows, 1), max(tile_map.cols, 1))
    else:
        limits = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    parts = []
    for number, index in enumerate(itertools.product(*map(range, sizes))):
        if number == limit:
            parts += ["...", "To print out more, set BlockMask.to_string(limit=N)"]
            parts.append("You can also index (BlockMask[batch, head]) to choose a specific batch or head")
            break
        batch, head = (0, 0, *index)[-2:]
        share = picture(tile_map, batch=batch, head=head, max_rows=limits[0], max_cols=limits[1]).visited.tolist()
        lines = ("".join(2 * ("█" if x == 1 else "░" if x else " ") for x in row) + "\n" for row in share)
        parts.append(f"{index}\n" + "".join(lines))
    return "\n".join(parts)


def text(mask: Drawable, *, batch: int = 0, head: int = 0, max_rows: int = 32, max_cols: int = 32) -> str:
    """A mask as characters that tell empty, partial and full apart, with a legend and its statistics.

    Args:
        mask: a BlockMask.
        batch, head: which one to draw.
        max_rows, max_cols: the largest picture; larger masks are summed into cells of several blocks.

    Returns:
        Lines of text.

    Example:
        >>> print(text(create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 512, 512, "cpu")))
        512 queries (down) x 512 keys (right)
        ┌────────┐
        │▒▒······│
        │██▒▒····│
        │████▒▒··│
        │██████▒▒│
        └────────┘
        ·· empty  ▒▒ partial  ██ full
        blocks of 128 x 128 tokens
          empty   6 (37.5%): by formula
          partial 4 (25.0%): by formula
          full    6 (37.5%): by formula
        density 50.10% of pairs: 131,328 of 262,144 kept, exact, by formula
        FLOPs saved 37.5%; lanes wasted in partial blocks 49.6%
        keys of a query: kv_idx <= q_idx
    """
    check_group(mask, batch, head)
    tiles = mask.tile_map(*mask.BLOCK_SIZE)
    drawn = picture(tiles, batch=batch, head=head, max_rows=max_rows, max_cols=max_cols)
    return "\n".join([*_boxed(drawn, _title(mask, batch, head)), _legend(drawn), *notes_of(mask)])


def heads_text(mask: Drawable, *, limit: int = 4) -> str:
    """`text` for the first `limit` of those heads that differ."""
    tiles = mask.tile_map(*mask.BLOCK_SIZE)
    heads = list(itertools.product(range(tiles.batch), range(tiles.heads)))
    if len(heads) <= 1:
        return text(mask)
    lines: list[str] = []
    for batch, head in heads[:limit]:
        drawn = picture(tiles, batch=batch, head=head, max_rows=16, max_cols=32)
        lines += _boxed(drawn, _title(mask, batch, head))
    lines.append(_legend(drawn))
    if len(heads) > limit:
        lines.append(f"and {len(heads) - limit} more heads; block_mask[batch, head] picks one")
    return "\n".join([*lines, *notes_of(mask)])


def _boxed(drawn: Picture, title: str) -> list[str]:
    rows = []
    for partial, full in zip(drawn.partial.tolist(), drawn.full.tolist(), strict=True):
        rows.append("".join(2 * _character(p, f) for p, f in zip(partial, full, strict=True)))
    width = 2 * drawn.full.shape[1]
    return [title, f"┌{'─' * width}┐", *(f"│{r}│" for r in rows), f"└{'─' * width}┘"]


def _character(partial: float, full: float) -> str:
    """A cell drawn as what most of its blocks are; empty only if none is visited."""
    if not partial and not full:
        return "·"
    if partial + full < 0.5:
        return "░"
    return "█" if full > 0.5 else "▒"


def _legend(drawn: Picture) -> str:
    if drawn.blocks == (1, 1):
        return "·· empty  ▒▒ partial  ██ full"
    size = f"a cell is {drawn.blocks[0]} x {drawn.blocks[1]} blocks"
    return f"·· empty  ░░ mostly empty  ▒▒ mostly partial or mixed  ██ mostly full; {size}"


def _title(mask: Drawable, batch: int, head: int) -> str:
    which = f", batch {batch} head {head}" if any(n > 1 for n in mask.shape[:-2]) else ""
    return f"{mask.shape[-2]:,} queries (down) x {mask.shape[-1]:,} keys (right){which}"


# ----------------------------------------------------------------------------------------------------- SVG and HTML
def svg(mask: Drawable, *, batch: int = 0, head: int = 0, max_cells: int = MAX_CELLS, notes: bool = True) -> str:
    """A mask as an SVG drawing with token axes and a legend, and below it the statistics if `notes`."""
    check_group(mask, batch, head)
    tiles = mask.tile_map(*mask.BLOCK_SIZE)
    drawn = picture(tiles, batch=batch, head=head, max_rows=max_cells, max_cols=max_cells)
    plot = _Plot((0, max(1, drawn.lengths[0])), (0, max(1, drawn.lengths[1])), drawn.full.shape)
    for r, row in enumerate(colours(drawn)):
        at = 0
        for colour, run in itertools.groupby(row):
            end = at + len(list(run))
            high, wide = (step * size for step, size in zip(drawn.blocks, drawn.tile, strict=True))
            plot.cell((r * high, (r + 1) * high), (at * wide, end * wide), f"rgb{colour}")
            at = end
    size = "" if drawn.blocks == (1, 1) else f"; a cell is {drawn.blocks[0]} x {drawn.blocks[1]} blocks"
    kinds = [(name, f"rgb{colour}") for name, colour in KINDS]
    return plot.drawing(_title(mask, batch, head) + size, kinds, notes_of(mask) if notes else [])


def window_svg(window: MaskWindow) -> str:
    """The pairs of a window as an SVG drawing; for very many, what it would show in a line."""
    if window.kept.numel() > 1 << 16:
        return f"<div>{markup.escape(window.title())}; print() and figure() show them</div>"
    plot = _Plot(window.queries, window.keys, window.kept.shape)
    for q, row in enumerate(window.kept.tolist(), window.queries[0]):
        at = window.keys[0]
        for kept, run in itertools.groupby(row):
            end = at + len(list(run))
            plot.cell((q, q + 1), (at, end), f"rgb{FULL if kept else EMPTY}")
            at = end
    for axis, size in enumerate(window.block):
        plot.borders(axis, size)
    return plot.drawing(
        window.title(), [("dropped", f"rgb{EMPTY}"), ("kept", f"rgb{FULL}")], [f"red lines: blocks of {window.block}"]
    )


class _Plot:
    """A drawing in the making: cells in tokens, axes, a legend."""

    TOP = 58.0

    def __init__(self, queries: tuple[int, int], keys: tuple[int, int], cells: Sequence[int]) -> None:
        self.ranges = queries, keys
        longest = max(b - a for a, b in self.ranges)
        side = min(PLOT, max(160.0, 24.0 * max(*cells, 1)))
        self.height, self.width = (max(36.0, side * (b - a) / longest) for a, b in self.ranges)
        self.left = 36 + 7.2 * max(len(f"{t:,}") for t in self._ticks(0))
        self.parts: list[str] = []

    def _ticks(self, axis: int) -> list[int]:
        return ticks(*self.ranges[axis], most=5 if (self.height, self.width)[axis] > 100 else 2)

    def at(self, axis: int, token: float) -> float:
        """Pixels from the plot's corner; a token past the end is at the end."""
        begin, end = self.ranges[axis]
        return (min(token, end) - begin) / (end - begin) * (self.height, self.width)[axis]

    def cell(self, queries: tuple[int, int], keys: tuple[int, int], colour: str) -> None:
        (y, y_end), (x, x_end) = ([self.at(axis, t) for t in span] for axis, span in enumerate((queries, keys)))
        place = f'x="{x:.7g}" y="{y:.7g}" width="{x_end - x:.7g}" height="{y_end - y:.7g}"'
        self.parts.append(f'<rect {place} fill="{colour}"/>')

    def borders(self, axis: int, size: int) -> None:
        """Lines where blocks of so many tokens meet."""
        begin, end = self.ranges[axis]
        for token in range(-(-begin // size) * size or size, end, size):
            at = self.at(axis, token)
            line = f"M0 {at:.5g}H{self.width:.5g}" if axis == 0 else f"M{at:.5g} 0V{self.height:.5g}"
            self.parts.append(f'<path d="{line}" stroke="#d1495b" stroke-width="1"/>')

    def _axes(self) -> str:
        parts = [f'<rect width="{self.width:.5g}" height="{self.height:.5g}" fill="none" stroke="#555"/>']
        for axis in (0, 1):
            for token in self._ticks(axis):
                at = self.at(axis, token)
                if axis:
                    parts.append(f'<path d="M{at:.5g} -5V0" stroke="#555"/>')
                    parts.append(f'<text x="{at:.5g}" y="-9" text-anchor="middle">{token:,}</text>')
                else:
                    parts.append(f'<path d="M-5 {at:.5g}H0" stroke="#555"/>')
                    parts.append(f'<text x="-9" y="{at + 4:.5g}" text-anchor="end">{token:,}</text>')
        middle = f"{self.height / 2:.5g}"
        parts.append(f'<text x="{self.width / 2:.5g}" y="-28" text-anchor="middle">key</text>')
        turned = f'transform="translate({14 - self.left:.5g} {middle}) rotate(-90)"'
        parts.append(f'<text {turned} text-anchor="middle">query</text>')
        return "".join(parts)

    def drawing(self, title: str, kinds: Sequence[tuple[str, str]], notes: Sequence[str]) -> str:
        """All of it, with a title below, a legend, and lines of notes."""
        below = self.height + 12
        parts = [*self.parts, self._axes()]
        for n, (name, colour) in enumerate(kinds):
            box = f'x="{80 * n}" y="{below:.5g}" width="12" height="12"'
            parts.append(f'<rect {box} fill="{colour}" stroke="#555" stroke-width="0.5"/>')
            parts.append(f'<text x="{80 * n + 17}" y="{below + 10:.5g}">{name}</text>')
        for n, line in enumerate((title, *notes)):
            indent = 12 if line.startswith("  ") else 0
            words = markup.escape(" ".join(line.split()))
            parts.append(f'<text x="{indent}" y="{below + 32 + 17 * n:.5g}">{words}</text>')
        longest = max(map(len, (title, *notes)))
        width = self.left + max(self.width + 30, 6.4 * longest)
        height = self.TOP + below + 24 + 17 * (1 + len(notes))
        box = f"{-self.left:.5g} {-self.TOP:g} {width:.5g} {height:.5g}"
        style = 'font-family="sans-serif" font-size="12" fill="#222" style="background:white"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.5g}" height="{height:.5g}" viewBox="{box}" {style}>'
            f"{''.join(parts)}</svg>"
        )


def ticks(start: int, stop: int, *, most: int = 5) -> list[int]:
    """A few round positions of a half-open range, among them its ends where they are round: quarters, else 1, 2 or 5 times 10**n."""
    length = stop - start
    if start == 0 and length % 4 == 0 and length >= 64 and most >= 5:
        return [n * length // 4 for n in range(5)]
    step = next(
        m * 10**e for e in range(20) for m in (1, 2, 5) if length <= m * 10**e * (most - 1) or m * 10**e > length
    )
    return list(range(-(-start // step) * step, stop + 1, step))


def colours(drawn: Picture) -> list[list[tuple[int, ...]]]:
    """One colour per cell: the three colours, mixed by what the cell holds; a rare block stays visible."""
    some = drawn.visited[..., None] > 0
    least = 0.35  # of the colour of the visited blocks
    visited = torch.stack((drawn.partial, drawn.full), -1) / drawn.visited[..., None].clamp(min=1e-12)
    weight = drawn.visited[..., None].clamp(min=least)
    nothing = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    mixed = torch.where(some, torch.cat((1 - weight, visited * weight), -1), nothing)
    found = (mixed @ torch.tensor([EMPTY, PARTIAL, FULL], dtype=torch.float64)).round().int().tolist()
    return [[tuple(c) for c in row] for row in found]


def html(mask: Drawable, *, limit: int = 4) -> str:
    """The drawings of the first `limit` heads that differ, side by side, and the statistics, for a notebook."""
    tiles = mask.tile_map(*mask.BLOCK_SIZE)
    heads = list(itertools.product(range(tiles.batch), range(tiles.heads))) or [(0, 0)]
    if len(heads) == 1:
        return svg(mask) + _formula_html(mask.statistics(most_counted=SHOWN_PAIRS))
    drawings = "".join(f"<div>{svg(mask, batch=b, head=h, notes=False)}</div>" for b, h in heads[:limit])
    more = f"<div>and {len(heads) - limit} more heads</div>" if len(heads) > limit else ""
    notes = "<pre>" + markup.escape("\n".join(notes_of(mask))) + "</pre>"
    formula = _formula_html(mask.statistics(most_counted=SHOWN_PAIRS))
    return f'<div style="display:flex;flex-wrap:wrap">{drawings}</div>{more}{notes}{formula}'


def _formula_html(found: MaskStatistics) -> str:
    return f"<div>${markup.escape(found.latex)}$</div>" if found.latex is not None else ""
