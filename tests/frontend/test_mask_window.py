"""A window shows exactly its pairs, and evaluates no others."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from flexattn.errors import CaptureIndexError, OptionError, StaleMaskError
from flexattn.frontend import mask_window
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.display import EMPTY, FULL

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(300) // 37
RULES = {
    "ids": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q + b >= k),
    "heads": lambda b, h, q, k: (q + 9 * h >= k) & ((q - k) % (b + 2) == 0),
    "everything": lambda b, h, q, k: q >= 0,
}
WINDOWS = [(0, 1, 0, 1), (0, 200, 0, 300), (63, 66, 120, 140), (199, 200, 299, 300), (10, 190, 64, 65)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("window", WINDOWS)
def test_pairs_of_a_window(name: str, window: tuple[int, int, int, int], monkeypatch) -> None:
    monkeypatch.setattr(mask_window, "PAIRS_AT_ONCE", 1000)
    mask = create_block_mask(RULES[name], 2, 3, 200, 300, "cpu", BLOCK_SIZE=(16, 32))
    q, q_end, kv, kv_end = window
    for batch, head in ((0, 0), (1, 2)):
        found = mask.window(*window, batch=batch, head=head)
        assert torch.equal(found.kept, mask.to_mask()[batch, head, q:q_end, kv:kv_end])


@pytest.mark.parametrize("lengths", [(192, 288), (200, 300)])
def test_pairs_of_a_list_mask(lengths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    full, partial = (torch.rand(2, 1, 13, 10, generator=generator) < 0.3 for _ in range(2))
    lists = [x for t in (partial & ~full, full) for x in (t.sum(-1).int(), t.int().argsort(-1, descending=True).int())]
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(16, 32), mask_mod=RULES["ids"], seq_lengths=lengths)
    dense = mask.to_mask()
    for q, q_end, kv, kv_end in ((0, 192, 0, 288), (15, 33, 31, 65), (100, 101, 50, 280)):
        found = mask.window(q, q_end, kv, kv_end, batch=1)
        assert torch.equal(found.kept, dense[1, 0, q:q_end, kv:kv_end])
        assert found.kept.any()


def test_text() -> None:
    shown = str(
        create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu", BLOCK_SIZE=4).window(6, 10, 3, 9)
    )
    assert shown.splitlines() == [
        "queries 6 to 9 (down) x keys 3 to 8 (right); 21 of 24 pairs kept",
        " 6 │█ │█ █ █ · │·",
        " 7 │█ │█ █ █ █ │·",
        "   ├──┼────────┼──",
        " 8 │█ │█ █ █ █ │█",
        " 9 │█ │█ █ █ █ │█",
    ]
    wide = str(create_block_mask(lambda b, h, q, k: q >= k, None, None, 64, 64, "cpu").window(6, 7, 0, 64))
    assert wide.splitlines()[1] == "6 │" + "█" * 7 + "·" * 57


def test_picture() -> None:
    window = create_block_mask(RULES["ids"], None, None, 200, 300, "cpu", BLOCK_SIZE=32).window(30, 70, 20, 50)
    root = ElementTree.fromstring(window._repr_html_())
    cells = [e for e in root if e.tag.endswith("rect") and e.get("stroke") is None]
    side = float(cells[0].get("height"))
    rows: dict[float, list[bool]] = {}
    for e in cells:
        kept = {f"rgb{FULL}": True, f"rgb{EMPTY}": False}[e.get("fill")]
        rows.setdefault(float(e.get("y")), []).extend([kept] * round(float(e.get("width")) / side))
    assert [rows[y] for y in sorted(rows)] == window.kept.tolist()
    words = " ".join(e.text for e in root if e.tag.endswith("text"))
    for word in ("key", "query", "kept", "dropped", "queries 30 to 69", "blocks of (32, 32)"):
        assert word in words
    large = create_block_mask(RULES["everything"], None, None, 999, 999, "cpu").window(0, 999, 0, 999)
    assert "<svg" not in large._repr_html_()
    assert "998,001 pairs kept" in large._repr_html_()


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    window = create_block_mask(RULES["ids"], None, None, 200, 300, "cpu", BLOCK_SIZE=32).window(30, 70, 20, 50)
    axes = window.figure(title="pairs").axes[0]
    pixels = torch.from_numpy(axes.images[0].get_array().copy())
    assert torch.equal((pixels == torch.tensor(FULL, dtype=torch.uint8)).all(-1), window.kept)
    assert axes.images[0].get_extent() == [20, 50, 70, 30]
    assert axes.get_title() == "pairs"
    assert len(axes.lines) == 3  # borders of blocks at queries 32 and 64, and at key 32


def test_a_window_in_the_middle_of_a_million_tokens() -> None:
    n = 1 << 20
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 9), None, None, n, n, "cpu")
    begin = time.perf_counter()
    found = mask.window(n // 2, n // 2 + 100, n // 2 - 50, n // 2 + 100)
    assert time.perf_counter() - begin < 1
    assert int(found.kept.sum()) == 9 * 100
    assert mask._mask._maps == {}  # no tile was decided for it


def test_errors() -> None:
    table = torch.zeros(64, dtype=torch.int64)
    mask = create_block_mask(lambda b, h, q, k: table[q] == k, 2, None, 64, 4096, "cpu")
    for window, group in (
        ((0, 65, 0, 1), (0, 0)),
        ((3, 3, 0, 1), (0, 0)),
        ((-1, 3, 0, 1), (0, 0)),
        ((0, 1, 0, 1), (2, 0)),
    ):
        with pytest.raises(CaptureIndexError, match="within the mask"):
            mask.window(*window, batch=group[0], head=group[1])
    with pytest.raises(OptionError, match="at most 4,194,304"):
        create_block_mask(RULES["everything"], None, None, 4096, 4096, "cpu").window(0, 4096, 0, 4096)
    table += 1
    with pytest.raises(StaleMaskError):
        mask.window(0, 1, 0, 1)
