"""Generated leaves run: every row of the op table as it is spelled, and the golden leaves."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops
from flexattn.codegen.spec import KernelSpec
from flexattn.frontend.trace import trace
from flexattn.runtime.compile import leaf_module
from tests.goldens_of import GOLDENS, golden_path
from tests.leaf_kernel import KEYS, ROWS, right_values, run_leaf, spec_of, text_of
from tests.spelling_cases import CASES, case

CPU = torch.device("cpu")


def _leaf(spec: KernelSpec, name: str):
    text = text_of(spec)
    return getattr(leaf_module(text, f"test{abs(hash(text))}"), name)


@pytest.mark.parametrize("name, kind", CASES)
def test_each_row_is_spelled_as_it_evaluates(name, kind):
    traced, score = case(name, kind, CPU)
    got = run_leaf(_leaf(spec_of(traced, interpreted=True), "score_mod"), traced, score)
    torch.testing.assert_close(got, right_values(traced, score), rtol=3e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, ::2], lambda t: t.t(), lambda t: t[:, :1].expand(64, 40), lambda t: t[:, 3:4], lambda t: t[:, 7:]],
    ids=["every other", "transposed", "one for all", "one", "a part"],
)
def test_captured_tensors_of_any_strides(view):
    table = view(torch.randn(64, 64, generator=torch.Generator().manual_seed(5)))
    traced = trace(lambda score, b, h, q_idx, kv_idx: score + table[q_idx, kv_idx % table.shape[1]], "score")
    score = torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(6))
    leaf = _leaf(spec_of(traced, interpreted=True), "score_mod")
    torch.testing.assert_close(run_leaf(leaf, traced, score), right_values(traced, score))


@triton.jit
def read_kernel(OUT, ROW, first, size, IS_INSIDE: tl.constexpr, OTHER: tl.constexpr):
    columns = tl.arange(0, 32)[None, :]
    tl.store(OUT + columns, leaf_ops.read_run(ROW, first, columns, size, first >= 0 if IS_INSIDE else first < 0, OTHER))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "first, offset, is_inside", [(0, 0, True), (32, 0, True), (32, 1, True), (64, 0, True), (0, 0, False)]
)
def test_a_run_of_a_row_ends_with_the_row(first, offset, is_inside, dtype):
    size, other = 80 - offset, float("nan") if dtype.is_floating_point else 0
    row = torch.arange(1, 81).to(dtype)[offset:]
    out = torch.zeros(32, dtype=dtype)
    read_kernel[(1,)](out, row, first, size, is_inside, other)
    held = row[first : first + 32] if is_inside else row[:0]
    right = torch.cat([held, torch.full((32 - len(held),), other, dtype=dtype)])
    torch.testing.assert_close(out, right, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_leaves_compute_their_programs(name):
    """The file itself is imported and run; test_goldens.py keeps it equal to what is generated."""
    traced = GOLDENS[name]()
    module_spec = importlib.util.spec_from_file_location(f"golden_{name}", golden_path(name))
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    score = torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(5))
    leaf = getattr(module, f"{traced.program.kind}_mod")
    torch.testing.assert_close(run_leaf(leaf, traced, score), right_values(traced, score), rtol=3e-6, atol=1e-6)
