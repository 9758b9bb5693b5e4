"""The kernel that appends tokens to pages compiles for every target without a GPU, with nothing spilled and wide stores; so does the
one that copies the values that a length cuts, for the target that asks for it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from flexattn.codegen.spec import KernelSpec, TensorLayout
from flexattn.codegen.target import GFX942, target_of
from flexattn.runtime.append_pages import append_tiles
from flexattn.runtime.cut_values import cut_spec
from tests.codegen.compiled import TARGETS, compile_and_measure

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)

OF_8_BITS = (90, 100, 120)


def compiled(arch: int, new: str, pages: str, dims: tuple[int, int], *, aligned: bool = True) -> tuple[str, Any]:
    layouts = tuple(TensorLayout(name, aligned, True) for name in (new, new, pages, pages))
    text, used = compile_and_measure(
        KernelSpec("append_pages", target_of(arch), append_tiles(*dims), *dims, layouts=layouts)
    )
    assert used.spills == 0, used
    return text, used


@pytest.mark.parametrize("arch", TARGETS)
def test_every_target(arch) -> None:
    text, _ = compiled(arch, "bf16", "bf16", (128, 128))
    assert arch == GFX942 or re.search(r"st\.global\.v4", text), "pages are not written 16 bytes at once"


@pytest.mark.parametrize("dims", [(16, 24), (192, 128), (576, 0), (512, 512)])
def test_head_dims(dims) -> None:
    compiled(90, "bf16", "bf16", dims)


@pytest.mark.parametrize("arch", OF_8_BITS)
@pytest.mark.parametrize("new", ["bf16", "fp16", "fp32"])
def test_8_bits_are_rounded_by_the_hardware(arch, new) -> None:
    text, _ = compiled(arch, new, "fp8e4nv", (128, 128))
    assert "cvt.rn.satfinite.e4m3x2.f32" in text


@pytest.mark.parametrize("arch", OF_8_BITS)
def test_wide_range_8_bits(arch) -> None:
    compiled(arch, "bf16", "fp8e5", (128, 64))


@pytest.mark.parametrize("pages", ["bf16", "fp16", "fp32"])
def test_unaligned(pages) -> None:
    compiled(80, "fp32", pages, (40, 33), aligned=False)


@pytest.mark.parametrize("dim", [64, 72, 128, 256])
@pytest.mark.parametrize("rows, page_size", [(8, 8), (16, 48), (128, 256)])
def test_values_that_a_length_cuts(rows, page_size, dim) -> None:
    pages = torch.zeros(3, 2, page_size, dim, dtype=torch.bfloat16)
    text, used = compile_and_measure(cut_spec(pages, rows, target_of(90)))
    assert used.spills == 0, used
    assert re.search(r"st\.global\.(v4|v2)", text) and "ld.global" in text
