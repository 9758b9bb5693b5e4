"""Draws one file's forward and backward rows as grouped bars, one panel a shape, from zero; writes a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cpu, problems
from benchmarks.peers import PEERS
from benchmarks.report import digest, drawn
from benchmarks.results import Row

# One colour a peer in every picture; flexattn's are the strong ones. Readable with the usual colour deficiencies.
COLOURS = {
    "flexattn": "#d55e00", "flexattn_mask_mod": "#f0a868", "torch_flex": "#0072b2", "torch_flex_flash": "#56b4e9",
    "torch_flex_eager": "#0072b2", "sdpa_cudnn": "#009e73", "sdpa_flash": "#8fd3bb", "sdpa_dense": "#009e73",
    "fa4": "#555555", "flashinfer": "#cc79a7", "flashinfer_paged": "#cc79a7", "flashinfer_paged_tc": "#e8c1d7",
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture of these rows, with their digest in the PNG's 'Source' text."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = drawn(rows)
    whats = [w for w in ("forward", "backward") if any(r["what"] == w for r in bars)]
    shapes = sorted({r["shape"] for r in bars}, key=_size)
    peers = [n for n in PEERS if any(r["impl"] == n for r in bars)]
    small = max((r["tflops"] for r in bars), default=0) < 10
    there = {(r["what"], r["shape"]) for r in bars}
    wanted = [(what, shape) for shape in shapes for what in whats if (what, shape) in there]
    across, down = 2, max(1, -(-len(wanted) // 2))
    figure, axes = plt.subplots(down, across, figsize=(6.2 * across, 3.3 * down), squeeze=False, layout="constrained")
    panels = iter(axes.flat)
    for what, shape in wanted:
        chosen = [r for r in bars if r["what"] == what and r["shape"] == shape]
        _panel(next(panels), chosen, peers, f"{what}, {shape}", "GFLOP/s" if small else "TFLOP/s")
    for left in panels:
        left.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Source": digest(rows), "Software": None})
    plt.close(figure)


def _panel(axis: Any, rows: Sequence[Row], peers: Sequence[str], title: str, unit: str) -> None:
    titles = cpu.TITLES if unit == "GFLOP/s" else problems.TITLES
    order = cpu.VARIANTS if unit == "GFLOP/s" else problems.VARIANTS
    variants = [v for v in order if any(r["variant"] == v for r in rows)]
    scale, width = (1e3 if unit == "GFLOP/s" else 1.0), 0.85 / max(1, len(peers))
    for i, name in enumerate(peers):
        values = {r["variant"]: r["tflops"] * scale for r in rows if r["impl"] == name}
        heights = [values.get(v, 0.0) for v in variants]
        places = [x + (i - (len(peers) - 1) / 2) * width for x in range(len(variants))]
        drawn_bars = axis.bar(places, heights, width, label=PEERS[name].title, color=COLOURS[name])
        labels = [f"{h:.0f}" if h >= 10 else (f"{h:.1f}" if h else "") for h in heights]
        axis.bar_label(drawn_bars, labels, fontsize=6.5, rotation=90, padding=2)
    axis.set_title(title, fontsize=10)
    names = [
        titles.get(v, v).replace("causal, ", "causal,\n").replace("soft-cap 20, ", "soft-cap 20,\n") for v in variants
    ]
    axis.set_xticks(range(len(variants)), names, fontsize=8)
    axis.set_ylabel(f"{unit} on kept pairs", fontsize=8)
    axis.margins(y=0.18)
    axis.spines[["top", "right"]].set_visible(False)


def _size(shape: str) -> tuple[int, str]:
    known = [str(s) for s in problems.SHAPES.values()]
    if shape in known:
        return known.index(shape), shape
    return int(shape.split("x")[2]), shape
