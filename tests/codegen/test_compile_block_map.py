"""The mask builder's kernels compile for every target without a GPU, within bounds on registers and spills."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from flexattn.codegen.spec import CaptureLayout, KernelSpec, capture_layout, wide_number
from flexattn.codegen.target import GFX942, target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.trace import trace
from tests.codegen.compiled import TARGETS, Resources, compile_and_measure
from tests.frontend.zoned_masks import ZONED

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)
FAST = (80, 90, 100, GFX942)  # the others have 80's code, but for the number that is written into it
SPILLS = 96  # bytes a thread; the most today is 68, in the slow path of a sine
ROW, FILL, ORDER, RANGES = (TileConfig(*c, 1) for c in ((64, 64, 1), (64, 64, 2), (64, 64, 4), (64, 64, 4)))
IDS, FIRST, WINDOW = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int64), 9
PADDING, ROWS, VALUES = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(9, 9, dtype=torch.bool), torch.zeros(9)
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "local positions": lambda b, h, q, k: (FIRST[q] == FIRST[k]) & (q - FIRST[q] >= k - FIRST[k]),
    "padding": lambda b, h, q, k: PADDING[b, k] & (q >= k),
    "dilated": lambda b, h, q, k: ((q - k) % 4 == 0) & (q - k < WINDOW),
    "neighbourhood": lambda b, h, q, k: ((q // 64 - k // 64).abs() <= 3) & ((q % 64 - k % 64).abs() <= 3),
    "relative": lambda b, h, q, k: IDS[q - k] > 0,
    "chosen blocks": lambda b, h, q, k: ROWS[q // 64, k // 64],
    "any pair": lambda b, h, q, k: ROWS[q, k],
    "floats": lambda b, h, q, k: VALUES[q] * 0.5 > torch.sin(VALUES[k]),
    "bits": lambda b, h, q, k: ((q ^ k) & 5 == 0) | (q >> 3 == k >> 3),
    "divisor": lambda b, h, q, k: q // FIRST[b] == k % FIRST[h],
}


@pytest.fixture(autouse=True)
def _own_leaves(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def compiled(kernel: str, arch: int, config: TileConfig, **fields: Any) -> tuple[str, Resources]:
    spec = KernelSpec(kernel, target_of(arch), config, 0, 0, layouts=(), **fields)
    text, used = compile_and_measure(spec)
    assert used.shared <= 4096
    assert used.registers <= (512 if spec.target.is_amd else 255)
    assert used.spills <= SPILLS, used
    return text, used


def builder(name: str, arch: int, kernel: str = "block_map", **fields: Any) -> Resources:
    program, (captures, numbers) = trace(MASKS.get(name) or ZONED[name], "mask")
    layouts, wide = tuple(capture_layout(c) for c in captures), tuple(wide_number(n) for n in numbers)
    facts = {"mask": program, "captures": layouts, "wide_numbers": wide, **fields}
    return compiled(kernel, arch, FILL if kernel == "fill" else ROW, **facts)[1]


@pytest.mark.parametrize("name", ["causal", "documents", "local positions", "neighbourhood"])
@pytest.mark.parametrize("arch", FAST)
def test_builder(name: str, arch: int) -> None:
    used = builder(name, arch)
    assert name != "causal" or used.registers <= 168


@pytest.mark.parametrize("name", ["causal", "sink and window", "padding on both sides"])
@pytest.mark.parametrize("arch", FAST)
def test_builder_by_formula(name: str, arch: int) -> None:
    assert builder(name, arch, "fill").spills == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ZONED)
@pytest.mark.parametrize("arch", TARGETS)
def test_builder_of_every_mask_of_zones(name: str, arch: int) -> None:
    assert builder(name, arch, "fill").spills == 0


def test_builder_with_wide_lengths() -> None:
    builder("dilated", 90, wide_lengths=True)
    builder("padding", 90, wide_lengths=True)


def test_builder_with_wide_numbers_and_captured_tensors() -> None:
    builder("dilated", 90, wide_numbers=(True,))
    builder("documents", 90, captures=(CaptureLayout("i32", 1, is_wide=True),))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("arch", TARGETS)
def test_builder_of_every_kind_of_mask(name: str, arch: int) -> None:
    builder(name, arch)


@pytest.mark.parametrize("arch", FAST)
def test_order(arch: int) -> None:
    compiled("order", arch, ORDER)


@pytest.mark.parametrize(
    "layout", [CaptureLayout("i32", 1, False), CaptureLayout("i64", 1, True)], ids=["i32", "wide i64"]
)
@pytest.mark.parametrize("arch", FAST)
def test_trees(arch: int, layout: CaptureLayout) -> None:
    compiled("ranges", arch, RANGES, captures=(layout,))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["u8", "i8", "i16", "u16", "u32", "i32", "i64"])
@pytest.mark.parametrize("arch", TARGETS)
def test_trees_of_every_type(arch: int, dtype: str) -> None:
    compiled("ranges", arch, RANGES, captures=(CaptureLayout(dtype, 1, False),))


def test_the_runtime_asks_for_these_tiles() -> None:
    from flexattn.runtime import table_builder

    configs = table_builder._ROW, table_builder._FILL, table_builder._ORDER, table_builder._RANGES
    assert configs == (ROW, FILL, ORDER, RANGES)
