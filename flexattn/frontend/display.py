"""Pictures of block masks: characters, SVG for notebooks, PNG files.

Reads a mask's tile map; makes text or an image with a legend. The one idea: a picture has few cells, so it is summed from the
runs of tiles, section by section, and a million tokens cost no more than a thousand.
"""

from __future__ import annotations

import html as markup
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flexattn.frontend.spans import coverage
from flexattn.frontend.tile_map import TileMap

EMPTY, PARTIAL, FULL = (245, 245, 242), (253, 174, 97), (44, 90, 160)  # colours that stay apart in grey
MAX_CELLS = 64  # a side of a picture
COUNTED_PAIRS = 1 << 30  # in partial tiles: beyond, a picture gives bounds of the density and does not count


class Drawable(Protocol):
    """What a picture needs of a mask."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]: ...

    def tile_map(self, q_block: int, kv_block: int) -> TileMap: ...


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


def text(mask: Drawable, *, batch: int = 0, head: int = 0, max_rows: int = 32, max_cols: int = 64) -> str:
    """A mask as characters that tell empty, partial and full apart, with a legend.

    Args:
        mask: a BlockMask.
        batch, head: which one to draw.
        max_rows, max_cols: the largest picture; larger masks are summed into sections.

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
        blocks 128 x 128; empty 37.5%, partial 25.0%, full 37.5%; density 50.10% of pairs
    """
    tile_map = mask.tile_map(*mask.BLOCK_SIZE)
    drawn = picture(tile_map, batch=batch, head=head, max_rows=max_rows, max_cols=max_cols)
    rows = []
    for partial, full in zip(drawn.partial.tolist(), drawn.full.tolist(), strict=True):
        rows.append("".join(2 * _character(p, f) for p, f in zip(partial, full, strict=True)))
    width = 2 * drawn.full.shape[1]
    box = [f"┌{'─' * width}┐", *(f"│{r}│" for r in rows), f"└{'─' * width}┘"]
    return "\n".join([_title(mask, batch, head), *box, "·· empty  ▒▒ partial  ██ full", _caption(tile_map, drawn)])


def _character(partial: float, full: float) -> str:
    """A section drawn as what most of its visited blocks are; empty only if none is visited."""
    if not partial and not full:
        return "·"
    return "█" if full > partial else "▒"


def _title(mask: Drawable, batch: int, head: int) -> str:
    which = f", batch {batch} head {head}" if any(n > 1 for n in mask.shape[:-2]) else ""
    return f"{mask.shape[-2]:,} queries (down) x {mask.shape[-1]:,} keys (right){which}"


def _caption(tile_map: TileMap, drawn: Picture) -> str:
    """The legend's numbers: shares of blocks, the share of pairs kept, what a section is."""
    total = max(1, tile_map.grid.groups * tile_map.rows * tile_map.cols)
    full, partial = tile_map.full.tiles() / total, tile_map.partial.tiles() / total
    size = f"blocks {drawn.tile[0]} x {drawn.tile[1]}"
    if drawn.blocks != (1, 1):
        size += f", {drawn.blocks[0]} x {drawn.blocks[1]} blocks a cell"
    shares = f"empty {1 - full - partial:.1%}, partial {partial:.1%}, full {full:.1%}"
    return f"{size}; {shares}; density {_density(tile_map)} of pairs"


def _density(tile_map: TileMap) -> str:
    """The kept share; where counting it would take long, the bounds that the tiles give."""
    undecided = tile_map.partial.tiles() * tile_map.q_block * tile_map.kv_block
    if undecided <= COUNTED_PAIRS:
        return f"{tile_map.density():.2%}"
    pairs = tile_map.grid.groups * tile_map.q_len * tile_map.kv_len
    full = tile_map.full.tiles() * tile_map.q_block * tile_map.kv_block
    return f"{full / pairs:.2%} to {min(1.0, (full + undecided) / pairs):.2%}"


# ----------------------------------------------------------------------------------------------------- SVG and HTML
def svg(mask: Drawable, *, batch: int = 0, head: int = 0, max_cells: int = MAX_CELLS) -> str:
    """A mask as an SVG drawing with a legend."""
    tile_map = mask.tile_map(*mask.BLOCK_SIZE)
    drawn = picture(tile_map, batch=batch, head=head, max_rows=max_cells, max_cols=max_cells)
    rows, cols = drawn.full.shape
    side = max(4.0, min(20.0, 420.0 / max(rows, cols, 1)))
    width, height = cols * side, rows * side
    cells = []
    for r, row in enumerate(_colours(drawn)):
        at = 0
        for colour, run in itertools.groupby(row):
            n = len(list(run))
            cells.append(
                f'<rect x="{at * side:g}" y="{r * side:g}" width="{n * side:g}" height="{side:g}" fill="rgb{colour}"/>'
            )
            at += n
    frame = f'<rect width="{width:g}" height="{height:g}" fill="none" stroke="#555" stroke-width="1"/>'
    lines = (_title(mask, batch, head), *_caption(tile_map, drawn).split("; "))
    notes = (f'<text x="0" y="{height + 42 + 16 * n:g}">{markup.escape(t)}</text>' for n, t in enumerate(lines))
    total_w, total_h = max(width, 330) + 2, height + 42 + 16 * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_w:g}" height="{total_h:g}" viewBox="-1 -1 {total_w:g} {total_h:g}" '
        f'font-family="sans-serif" font-size="12">{"".join(cells)}{frame}{_svg_legend(height + 8)}{"".join(notes)}</svg>'
    )


def _svg_legend(top: float) -> str:
    parts = []
    for n, (name, colour) in enumerate((("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))):
        x = 80 * n
        parts.append(
            f'<rect x="{x}" y="{top:g}" width="12" height="12" fill="rgb{colour}" stroke="#555" stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{x + 17}" y="{top + 10:g}">{name}</text>')
    return "".join(parts)


def _colours(drawn: Picture) -> list[list[tuple[int, ...]]]:
    """One colour per section: the three colours, mixed by what the section holds; a rare block stays visible."""
    share = torch.stack((1 - drawn.visited, drawn.partial, drawn.full), -1)
    some = drawn.visited[..., None] > 0
    least = 0.35  # of the colour of the visited blocks
    visited = share[..., 1:] / drawn.visited[..., None].clamp(min=1e-12)
    weight = drawn.visited[..., None].clamp(min=least)
    mixed = torch.where(
        some, torch.cat((1 - weight, visited * weight), -1), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    )
    colours = (mixed @ torch.tensor([EMPTY, PARTIAL, FULL], dtype=torch.float64)).round().int().tolist()
    return [[tuple(c) for c in row] for row in colours]


def html(mask: Drawable, *, limit: int = 4) -> str:
    """The drawings of the first `limit` heads side by side, for a notebook."""
    *leading, _, _ = mask.shape
    tile_map = mask.tile_map(*mask.BLOCK_SIZE)
    differ = (tile_map.batch, tile_map.heads) if len(leading) == 2 else (1, 1)
    heads = list(itertools.product(range(differ[0]), range(differ[1])))
    drawings = "".join(f'<div style="margin:4px">{svg(mask, batch=b, head=h)}</div>' for b, h in heads[:limit])
    more = f"<div>and {len(heads) - limit} more heads</div>" if len(heads) > limit else ""
    return f'<div style="display:flex;flex-wrap:wrap">{drawings}</div>{more}'


# ------------------------------------------------------------------------------------------------------------- PNG
def save_png(
    mask: Drawable, path: str, *, batch: int = 0, head: int = 0, title: str | None = None, max_cells: int = 256
) -> None:
    """Save a mask as a PNG with token axes and a legend; needs matplotlib.

    Args:
        mask: a BlockMask.
        path: the file to write.
        batch, head: which one to draw.
        title: above the picture; by default the lengths.
        max_cells: sections along a side, at most.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    tile_map = mask.tile_map(*mask.BLOCK_SIZE)
    drawn = picture(tile_map, batch=batch, head=head, max_rows=max_cells, max_cols=max_cells)
    q_len, kv_len = drawn.lengths
    aspect = min(2.5, max(0.3, q_len / max(kv_len, 1)))  # a very long side is squeezed; the axes keep the numbers
    figure = Figure(figsize=(6.0, 6.0 * aspect), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    pixels = torch.tensor(_colours(drawn), dtype=torch.uint8)
    if pixels.numel():
        reach = [n * step * size for n, step, size in zip(drawn.full.shape, drawn.blocks, drawn.tile, strict=True)]
        axes.imshow(pixels.numpy(), extent=(0, reach[1], reach[0], 0), aspect="auto", interpolation="nearest")
        axes.set(xlim=(0, kv_len), ylim=(q_len, 0))  # the last block may reach past the end
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="key position", ylabel="query position")
    axes.set_title(title or _title(mask, batch, head), fontsize=11, pad=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    kinds = (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))
    patches = [
        Patch(facecolor=(colour[0] / 255, colour[1] / 255, colour[2] / 255), edgecolor="#555", label=name)
        for name, colour in kinds
    ]
    note = _caption(tile_map, drawn).replace("; ", "\n")
    legend = {"ncols": 3, "frameon": False, "title": note, "title_fontsize": 9, "alignment": "center"}
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.02), **legend)
    figure.savefig(path, bbox_inches="tight")
