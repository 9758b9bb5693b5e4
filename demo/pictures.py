"""The loss curve of a training run as a picture (masks draw themselves: BlockMask.figure)."""

from __future__ import annotations

from pathlib import Path

import torch


def draw_loss(losses: list[float], path: Path) -> None:
    """The loss of each step, and its running mean over a twentieth of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)  # draws without a screen
    axes = figure.add_subplot()
    width = max(1, len(losses) // 20)
    mean = torch.tensor(losses).unfold(0, width, 1).mean(-1).tolist()
    axes.plot(losses, color="#c9d6df", linewidth=1, label="each step")
    axes.plot(range(width - 1, len(losses)), mean, color="#2c5aa0", linewidth=2, label=f"mean of {width} steps")
    axes.set(xlabel="step", ylabel="loss, nats per character", title="training on packed documents")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, bbox_inches="tight")
