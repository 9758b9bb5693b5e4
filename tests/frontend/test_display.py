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

from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.display import EMPTY, FULL, PARTIAL, html, picture, save_png, svg, text

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
    assert lines[-2] == "·· empty  ▒▒ partial  ██ full"
    density = float(re.search(r"density ([\d.]+)%", lines[-1]).group(1))
    assert abs(density / 100 - make().density()) < 1e-4


def test_text_names_the_head() -> None:
    mask = make(64, 64, 16, batch=2, heads=3, mask_mod=lambda b, h, q, k: (q + 16 * h >= k) & (k < 32 + 16 * b))
    assert "batch 1 head 2" in text(mask, batch=1, head=2)
    assert text(mask, batch=1, head=2) != text(mask, batch=0, head=2)
    assert text(mask, batch=1, head=2) != text(mask, batch=1, head=1)


def read_svg(drawing: str) -> list[list[int]]:
    """The kinds of the cells of an SVG whose sections are single blocks."""
    root = ElementTree.fromstring(drawing)
    cells = [e for e in root if e.tag.endswith("rect") and e.get("stroke") is None]
    side = float(cells[0].get("height"))
    rows: dict[float, list[int]] = {}
    for e in cells:
        rows.setdefault(float(e.get("y")), []).extend([COLOURS[e.get("fill")]] * round(float(e.get("width")) / side))
    return [rows[y] for y in sorted(rows)]


def test_svg_shows_the_map_and_a_legend() -> None:
    drawing = svg(make())
    assert read_svg(drawing) == make().tile_map(32, 64).dense()[0, 0].tolist()
    words = " ".join(e.text for e in ElementTree.fromstring(drawing) if e.tag.endswith("text"))
    for word in ("empty", "partial", "full", "density", "300 queries", "blocks 32 x 64"):
        assert word in words


def test_html_draws_heads_that_differ() -> None:
    mask = make(64, 64, 16, batch=2, heads=3, mask_mod=lambda b, h, q, k: q + 16 * h >= k)
    assert html(mask, limit=2).count("<svg") == 2
    assert "and 1 more heads" in html(mask, limit=2)
    assert mask._repr_html_() == html(mask)
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
    assert len(lines) < 40
    assert "128 x 128 blocks a cell" in drawing
    diagonal = [line[1:-1:2] for line in lines if line.startswith("│")]
    assert all(line[2 * r] != "·" for r, line in enumerate(diagonal))  # a thin band stays visible


@pytest.mark.parametrize(
    ("q_len", "kv_len", "block"), [(300, 500, (32, 64)), (4000, 64, 16), (1, 4096, 128), (0, 0, 16)]
)
def test_png(tmp_path: Path, q_len: int, kv_len: int, block) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    save_png(make(q_len, kv_len, block), str(path), title="a title")
    pixels = torch.from_numpy(matplotlib.image.imread(path))[..., :3]
    assert 300 < pixels.shape[0] < 3000 or q_len < kv_len / 4
    assert 400 < pixels.shape[1] < 1500
    found = {tuple(c) for c in (pixels[::2, ::2].reshape(-1, 3) * 255).round().int().tolist()}
    assert {EMPTY, PARTIAL, FULL} <= found  # the legend has all three, if the mask has not


def test_drawing_imports_nothing_heavy() -> None:
    code = "import sys, flexattn.frontend.display; sys.exit('matplotlib' in sys.modules or 'sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
