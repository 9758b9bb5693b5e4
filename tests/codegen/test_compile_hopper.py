"""The forward kernel for Hopper compiles without a GPU, spills nothing where it is chosen, and its leaves are spelled in Gluon."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from flexattn.codegen.emit import emit
from flexattn.frontend.trace import trace
from flexattn.runtime.compile import leaf_module
from tests.goldens_of import GOLDENS
from tests.leaf_kernel import spec_of as leaf_spec
from tests.leaf_kernel import text_of
from tests.spelling_cases import CASES, case

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter")


@pytest.mark.parametrize("name, kind", CASES)
def test_each_row_of_the_op_table_is_spelled_in_gluon(name: str, kind: str) -> None:
    from tests.codegen.gluon_leaf_kernel import translated

    traced, _ = case(name, kind, torch.device("cpu"))
    spec = leaf_spec(traced, dtype="bf16", kernel="hopper_forward")
    text = text_of(spec)
    leaf = leaf_module(text, f"gluon{abs(hash(text))}").score_mod
    assert "tt.store" in translated(leaf, emit(spec).signature["caps"], is_mask=False)


def _score_of_a_constant(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx % 7 == 3, 0.5, score) + torch.floor_divide(kv_idx, 3) * 1e-40


def _mask_of_nothing_but_a_constant(b, h, q_idx, kv_idx):
    return torch.tensor(True)


@pytest.mark.parametrize("function", [_score_of_a_constant, _mask_of_nothing_but_a_constant, *GOLDENS])
def test_whole_functions_are_spelled_in_gluon(function: object) -> None:
    from tests.codegen.gluon_leaf_kernel import translated

    is_mask = function is _mask_of_nothing_but_a_constant
    traced = trace(function, "mask" if is_mask else "score") if callable(function) else GOLDENS[function]()
    spec = leaf_spec(traced, dtype="bf16", kernel="hopper_forward")
    text = text_of(spec)
    leaf = getattr(leaf_module(text, f"gluon{abs(hash(text))}"), f"{traced.program.kind}_mod")
    assert "tt.store" in translated(leaf, emit(spec).signature["caps"], is_mask=traced.program.kind == "mask")
