"""The demo's two PNG files: the loss curve, and the mask with the blocks it falls into."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import flexattn

EMPTY, PARTIAL, FULL = 0, 1, 2
COLOURS = ("#f4f4f2", "#e8a33d", "#2f6690")


def block_kinds(block_mask: flexattn.BlockMask) -> Tensor:
    """What each block of the first batch and head is, EMPTY, PARTIAL or FULL: int64 [rows, columns].

    Reads the lists that torch's BlockMask has too: for each row of blocks how many, and which.
    """
    rows, columns = block_mask.kv_indices.shape[2:]
    kinds = torch.zeros(rows, columns, dtype=torch.int64)
    for kind, count, index in (
        (PARTIAL, block_mask.kv_num_blocks, block_mask.kv_indices),
        (FULL, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        if count is not None and index is not None:
            for row in range(rows):
                kinds[row, index[0, 0, row, : int(count[0, 0, row])].long().cpu()] = kind
    return kinds


def draw_mask(kept: Tensor, block_mask: flexattn.BlockMask, path: Path) -> None:
    """kept: bool [q_len, kv_len], the mask element by element (a thinned-out one will do)."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, (left, right) = _figure(2, (10, 5.4))
    extent = (0, block_mask.shape[-1], block_mask.shape[-2], 0)
    left.imshow(
        kept.cpu(), cmap=ListedColormap([COLOURS[EMPTY], COLOURS[FULL]]), extent=extent, interpolation="nearest"
    )
    left.set_title("which keys a query keeps")
    right.imshow(
        block_kinds(block_mask),
        cmap=ListedColormap(COLOURS),
        vmin=EMPTY,
        vmax=FULL,
        extent=extent,
        interpolation="nearest",
    )
    right.set_title("blocks of {} x {}".format(*block_mask.BLOCK_SIZE))
    names = ("empty: skipped", "partial: mask evaluated", "full: no mask code")
    figure.legend(
        [Patch(facecolor=c, edgecolor="#888888") for c in COLOURS], names, loc="lower center", ncols=3, frameon=False
    )
    for axes in (left, right):
        axes.set_xlabel("kv_idx")
    left.set_ylabel("q_idx")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=120)


def draw_loss(losses: list[float], path: Path) -> None:
    """The loss of each step, and its running mean over a twentieth of the run."""
    figure, (axes,) = _figure(1, (7, 4))
    width = max(1, len(losses) // 20)
    mean = torch.tensor(losses).unfold(0, width, 1).mean(-1)
    axes.plot(losses, color="#c9d6df", linewidth=1, label="each step")
    axes.plot(range(width - 1, len(losses)), mean, color=COLOURS[FULL], linewidth=2, label=f"mean of {width} steps")
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per character")
    axes.set_title("training on packed documents")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _figure(columns: int, size: tuple[float, float]):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)  # draws without a screen
    return figure, figure.subplots(1, columns, squeeze=False)[0]
