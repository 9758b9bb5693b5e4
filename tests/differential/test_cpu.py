"""Every row of the table on the CPU: out and lse beside torch's eager flex_attention, gradients beside the dense formulas."""

from __future__ import annotations

import pytest
import torch

from tests.differential.cases import CASES, Sizes
from tests.differential.compare import compare, make_problem, ours, torch_forward

SIZES = {
    "float32, groups": Sizes(2, 4, 2, 70, 91, 16, 24, block=32),
    "bfloat16, more queries": Sizes(3, 2, 2, 96, 64, 32, 16, block=(16, 32), dtype=torch.bfloat16),
    "float16, shared keys": Sizes(3, 3, 1, 33, 130, 24, 32, kv_batch=1, dtype=torch.float16),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, sizes: str) -> None:
    problem = make_problem(CASES[name], SIZES[sizes], "cpu")
    compare(problem, ours(problem), torch_forward(problem))
