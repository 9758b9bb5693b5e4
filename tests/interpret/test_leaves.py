"""Generated leaves run: every row of the op table as it is spelled, and the golden leaves."""

from __future__ import annotations

import importlib.util

import pytest
import torch

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
