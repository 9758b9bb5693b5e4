"""Masks as matplotlib figures: the block map of a whole mask, the pairs of a window.

Reads a mask or a window; makes a Figure. The one idea: a figure is made without pyplot, so it opens no window and needs no display;
matplotlib is imported only here, when somebody asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexattn.errors import UnsupportedError
from flexattn.frontend.display import EMPTY, FULL, KINDS, Drawable, check_group, colours, notes_of, picture, ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexattn.frontend.mask_window import MaskWindow

Colour = tuple[int, int, int]


def block_figure(mask: Drawable, *, batch: int, head: int, title: str | None, max_cells: int) -> Figure:
    """The block map of one head; see `BlockMask.figure`."""
    check_group(mask, batch, head)
    drawn = picture(mask.tile_map(*mask.BLOCK_SIZE), batch=batch, head=head, max_rows=max_cells, max_cols=max_cells)
    q_len, kv_len = drawn.lengths
    reach = [n * step * size for n, step, size in zip(drawn.full.shape, drawn.blocks, drawn.tile, strict=True)]
    figure, axes = _axes((0, max(1, q_len)), (0, max(1, kv_len)))
    pixels = torch.tensor(colours(drawn), dtype=torch.uint8)
    if pixels.numel():  # the last block may reach past the end
        axes.imshow(pixels.numpy(), extent=(0, reach[1], reach[0], 0), aspect="auto", interpolation="nearest")
    axes.set(xlim=(0, max(1, kv_len)), ylim=(max(1, q_len), 0))
    which = f", batch {batch} head {head}" if any(n > 1 for n in mask.shape[:-2]) else ""
    axes.set_title(title or f"{q_len:,} queries x {kv_len:,} keys{which}", fontsize=11, pad=10)
    lines = notes_of(mask)
    if drawn.blocks != (1, 1):
        lines[0] += f", {drawn.blocks[0]} x {drawn.blocks[1]} blocks a cell"
    _legend(axes, KINDS, lines)
    return figure


def window_figure(window: MaskWindow, *, title: str | None) -> Figure:
    """The pairs of a window; see `MaskWindow.figure`."""
    (q, q_end), (kv, kv_end) = window.queries, window.keys
    figure, axes = _axes(window.queries, window.keys)
    pixels = torch.tensor([EMPTY, FULL], dtype=torch.uint8)[window.kept.long()]
    axes.imshow(pixels.numpy(), extent=(kv, kv_end, q_end, q), aspect="auto", interpolation="nearest")
    border = {"color": "#d1495b", "linewidth": 1.0}
    for n in range(q // window.block[0] + 1, -(-q_end // window.block[0])):
        axes.axhline(n * window.block[0], **border)
    for n in range(kv // window.block[1] + 1, -(-kv_end // window.block[1])):
        axes.axvline(n * window.block[1], **border)
    which = f", batch {window.group[0]} head {window.group[1]}" if any(window.group) else ""
    axes.set_title(
        title or f"queries {q:,} to {q_end - 1:,} x keys {kv:,} to {kv_end - 1:,}{which}", fontsize=11, pad=10
    )
    note = f"{int(window.kept.sum()):,} of {window.kept.numel():,} pairs kept; red lines: blocks of {window.block}"
    _legend(axes, (("dropped", EMPTY), ("kept", FULL)), [note])
    return figure


def _axes(queries: tuple[int, int], keys: tuple[int, int]) -> tuple[Figure, Any]:
    """A figure with token axes, the keys above."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install matplotlib; print(block_mask) and a notebook's picture need nothing"
        raise UnsupportedError("a figure needs matplotlib", given="no matplotlib here", hint=hint) from None
    high, wide = queries[1] - queries[0], keys[1] - keys[0]
    aspect = min(2.0, max(0.25, high / wide))  # a very long side is squeezed; the axes keep the numbers
    figure = Figure(figsize=(6.0, 6.0 * aspect) if aspect <= 1 else (7.5 / aspect + 1, 7.5), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="key", ylabel="query")
    axes.set_xticks(ticks(*keys), [f"{n:,}" for n in ticks(*keys)])
    few = ticks(*queries, most=5 if aspect > 0.5 else 3)
    axes.set_yticks(few, [f"{n:,}" for n in few])
    return figure, axes


def _legend(axes: Any, kinds: Sequence[tuple[str, Colour]], lines: Sequence[str]) -> None:
    """The colours, and below them a few lines of text."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=(c[0] / 255, c[1] / 255, c[2] / 255), edgecolor="#555", label=name) for name, c in kinds]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(-0.01, -0.01), ncols=len(kinds), frameon=False)
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "fontsize": 8.5}
    axes.annotate("\n".join(lines), (0, 0), xytext=(0, -32), linespacing=1.4, **place)


__all__ = ["block_figure", "window_figure"]
