"""Every row of the op table as a leaf on a real GPU, where spelling differs from the interpreter's."""

from __future__ import annotations

import pytest
import torch

from tests.spelling_cases import CASES, case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rows_are_spelled_as_they_evaluate(dtype):
    """One test a data type: the rows differ in a line each, and a GPU's compiler is asked once for every one."""
    from flexattn.runtime.compile import leaf_module
    from tests.leaf_kernel import right_values, run_leaf, spec_of, text_of

    wrong = []
    for name, kind in CASES:
        traced, score = case(name, kind, torch.device("cuda"))
        text = text_of(spec_of(traced, dtype=dtype))
        leaf = leaf_module(text, f"gpu{abs(hash(text))}").score_mod
        got, right = run_leaf(leaf, traced, score).cpu(), right_values(traced, score)
        tolerance = 1e-5 if dtype == "fp32" else 2e-3 if dtype == "bf16" else 2e-5
        if not torch.allclose(got, right, rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = (got - right).abs().nan_to_num(float("inf")).max().item()
            wrong.append(f"{name} of {kind}: {worst:.3g}")
    assert not wrong, wrong
