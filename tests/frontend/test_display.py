"""Pictures show what the tile map holds, stay small for any length, and have a legend."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from flexattn.errors import UnsupportedError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.display import EMPTY, FULL, PARTIAL, heads_text, html, picture, svg, text, ticks

pytestmark = pytest.mark.usefixtures("one_thread")
COLOURS = {f"rgb{EMPTY}": 0, f"rgb{PARTIAL}": 1, f"rgb{FULL}": 2}


def make(q_len: int = 300, kv_len: int = 500, block=(32, 64), batch=None, heads=None, mask_mod=None) -> BlockMask:
    mask_mod = mask_mod or (lambda b, h, q, k: q + 200 >= k)
    return create_block_mask(mask_mod, batch, heads, q_len, kv_len, "cpu", BLOCK_SIZE=block)


def test_a_picture_of_single_blocks_is_the_map() -> None:
    mask = make()
    drawn, dense = picture(mask.tile_map(32, 64)), mask.tile_map(32, 64).dense()[0, 0]
    assert drawn.blocks == (1, 1)
    assert torch.equal(drawn.partial, (dense == 1).double())
    assert torch.equal(drawn.full, (dense == 2).double())


@pytest.mark.parametrize(("rows", "cols"), [(3, 4), (1, 1), (100, 2)])
def test_sections_hold_shares(rows: int, cols: int) -> None:
    mask = make()
    drawn, dense = picture(mask.tile_map(32, 64), max_rows=rows, max_cols=cols), mask.tile_map(32, 64).dense()[0, 0]
    high, wide = drawn.blocks
    for r in range(drawn.full.shape[0]):
        for c in range(drawn.full.shape[1]):
            section = dense[r * high : (r + 1) * high, c * wide : (c + 1) * wide]
            assert drawn.full[r, c] == (section == 2).double().mean()
            assert drawn.partial[r, c] == (section == 1).double().mean()
    assert drawn.full.shape[0] <= rows
    assert drawn.full.shape[1] <= cols


def test_text_has_three_kinds_and_a_legend() -> None:
    lines = text(make()).splitlines()
    assert lines[0] == "300 queries (down) x 500 keys (right)"
    symbols = {"·": 0, "▒": 1, "█": 2}
    cells = [[symbols[c] for c in line[1:-1:2]] for line in lines if line.startswith("│")]
    assert cells == make().tile_map(32, 64).dense()[0, 0].tolist()
    assert "·· empty  ▒▒ partial  ██ full" in lines
    density = next(re.search(r"density ([\d.]+)%", x).group(1) for x in lines if "density" in x)
    assert abs(float(density) / 100 - make().density()) < 1e-4
    assert lines[-7:] == str(make().statistics()).splitlines()[-7:]


def test_text_names_the_head() -> None:
    mask = make(64, 64, 16, batch=2, heads=3, mask_mod=lambda b, h, q, k: (q + 16 * h >= k) & (k < 32 + 16 * b))
    assert "batch 1 head 2" in text(mask, batch=1, head=2)
    assert text(mask, batch=1, head=2) != text(mask, batch=0, head=2)
    assert text(mask, batch=1, head=2) != text(mask, batch=1, head=1)


def read_svg(drawing: str, wide: float | None = None) -> list[list[int]]:
    """The kinds of the cells of an SVG whose sections are single blocks, `wide` pixels each."""
    root = ElementTree.fromstring(drawing)
    cells = [e for e in root if e.tag.endswith("rect") and e.get("stroke") is None]
    wide = min(float(e.get("width")) for e in cells if float(e.get("y")) == 0) if wide is None else wide
    rows: dict[float, list[int]] = {}
    for e in cells:
        count = max(1, round(float(e.get("width")) / wide))  # the last cell is cut by the length
        rows.setdefault(float(e.get("y")), []).extend([COLOURS[e.get("fill")]] * count)
    return [rows[y] for y in sorted(rows)]


def test_svg_shows_the_map_and_a_legend() -> None:
    drawing = svg(make())
    assert read_svg(drawing, 240 * 64 / 500) == make().tile_map(32, 64).dense()[0, 0].tolist()
    words = " ".join(e.text for e in ElementTree.fromstring(drawing) if e.tag.endswith("text"))
    for word in ("empty", "partial", "full", "density", "300 queries", "blocks of 32 x 64", "key", "query", "FLOPs"):
        assert word in words


def test_html_draws_heads_that_differ() -> None:
    mask = make(64, 64, 16, batch=2, heads=3, mask_mod=lambda b, h, q, k: q + 16 * h >= k)
    assert html(mask, limit=2).count("<svg") == 2
    assert "and 1 more heads" in html(mask, limit=2)
    assert mask._repr_html_() == html(mask)
    assert "density" in html(mask, limit=2).split("</svg>")[-1]  # once, below all of them
    assert "q_{idx}" in make()._repr_html_()  # the closed form
    assert "picks one" in heads_text(mask, limit=2)
    assert make(batch=4, heads=4)._repr_html_().count("<svg") == 1


def test_a_long_mask_draws_small_and_fast() -> None:
    n = 1 << 20
    mask = make(n, n, 128, mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 4096))
    begin = time.perf_counter()
    drawing = svg(mask)
    lines = text(mask).splitlines()
    assert time.perf_counter() - begin < 10
    assert len(drawing) < 200_000
    assert max(map(len, lines)) < 140
    assert len(lines) < 48
    assert "a cell is 128 x 128 blocks" in drawing
    diagonal = [line[1:-1:2] for line in lines if line.startswith("│")]
    assert all(line[r] != "·" for r, line in enumerate(diagonal))  # a thin band stays visible


@pytest.mark.parametrize(
    ("q_len", "kv_len", "block"), [(300, 500, (32, 64)), (4000, 64, 16), (1, 4096, 128), (0, 0, 16)]
)
def test_figure(tmp_path: Path, q_len: int, kv_len: int, block) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    figure = make(q_len, kv_len, block).figure(title="a title")
    figure.savefig(path, bbox_inches="tight")
    pixels = torch.from_numpy(matplotlib.image.imread(path))[..., :3]
    assert 300 < pixels.shape[0] < 1500
    assert 300 < pixels.shape[1] < 1500
    found = {tuple(c) for c in (pixels[::2, ::2].reshape(-1, 3) * 255).round().int().tolist()}
    assert {EMPTY, PARTIAL, FULL} <= found  # the legend has all three, if the mask has not
    axes = figure.axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("a title", "key", "query")
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["empty", "partial", "full"]
    assert "density" in axes.texts[0].get_text()


def test_figures_need_matplotlib(monkeypatch) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    for draw in (make().figure, make().window(0, 2, 0, 3).figure):
        with pytest.raises(UnsupportedError, match="pip install matplotlib"):
            draw()


def test_ticks_are_few_and_round() -> None:
    assert ticks(0, 1 << 20) == [0, 262144, 524288, 786432, 1048576]
    assert ticks(0, 1000) == [0, 250, 500, 750, 1000]
    assert ticks(0, 300, most=2) == [0]
    assert ticks(101, 150) == [120, 140]
    for start, stop in ((0, 1), (0, 7), (0, 33), (3, 4), (999, 1040), (0, 1000003)):
        found = ticks(start, stop)
        assert len(found) <= 6
        assert all(start <= n <= stop for n in found)


def test_drawing_imports_nothing_heavy() -> None:
    code = "import sys, flexattn.frontend.display; sys.exit('matplotlib' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


@pytest.mark.parametrize("where", [{"head": 7}, {"head": 2}, {"batch": -3}, {"batch": 1}, {"head": 0.5}])
def test_pictures_of_heads_that_are_not_there_are_refused(where) -> None:
    pytest.importorskip("matplotlib")
    mask = create_block_mask(lambda b, h, q, k: q >= k + h, None, 2, 300, 300, "cpu")
    for draw in (mask.figure, lambda **at: text(mask, **at), lambda **at: svg(mask, **at)):
        with pytest.raises(IndexError, match="must be one of the mask's"):
            draw(**where)
    assert mask.figure(head=1) is not None
