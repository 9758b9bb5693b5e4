"""Every row of the table on the CPU: out and lse beside torch's eager flex_attention, gradients beside the dense formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.differential.cases import CASES, Sizes
from tests.differential.compare import compare, judge, make_problem, ours, torch_forward

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


# ---------------------------------------------------------------- the rule itself
def _judged(
    error: float, *, torch_error: float = 0.0, name: str = "out", dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Figures of a tensor of ones whose dense form errs by 1e-3."""
    right = torch.ones(2000, dtype=torch.float64)
    return judge(name, right + error, right, [right + 1e-3], [right + torch_error], dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "factor"),
    [
        ("out", torch.bfloat16, 1.1),
        ("lse", torch.float16, 1.1),
        ("dQ", torch.bfloat16, 1.25),
        ("captured gradient 0", torch.float16, 1.25),
        ("out", torch.float32, 2.0),
        ("dV", torch.float32, 2.0),
    ],
)
def test_the_rule_has_the_contracts_factors(name: str, dtype: torch.dtype, factor: float) -> None:
    assert _judged(0.99 * factor * 1e-3, name=name, dtype=dtype) == []
    (text,) = _judged(1.01 * factor * 1e-3, name=name, dtype=dtype)
    assert text.startswith(f"{name}: mean error") and "max" in text and "torch 0 (max 0)" in text


def test_the_larger_of_two_errors_is_fair() -> None:
    assert _judged(2.1e-3, torch_error=2e-3) == []
    assert _judged(2.3e-3, torch_error=2e-3) != []


def test_a_wrong_result_of_torch_excuses_nothing() -> None:
    (text,) = _judged(0.2, torch_error=0.3)
    assert "torch computes something else" in text
    (text,) = _judged(0.0, torch_error=math.nan)
    assert "torch computes something else" in text


def test_nan_and_misplaced_infinities_fail() -> None:
    assert _judged(math.nan) != []
    assert _judged(math.inf) != []
    right = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    assert judge("lse", right, right, [right], [], torch.float32) == []
    assert judge("lse", right.flip(0), right, [right], [], torch.float32) != []


def test_few_numbers() -> None:
    """A single float32 sum is judged by its size, four numbers in a half type by what a mean of four is worth."""
    right = torch.full((4,), 100.0, dtype=torch.float64)
    name = "captured gradient 0"
    assert judge(name, right + 1.9e-3, right, [right], [], torch.float32) == []
    assert judge(name, right + 2.1e-3, right, [right], [], torch.float32) != []
    assert judge(name, right * math.nan, right, [right], [], torch.float32) != []
    assert judge(name, right + 3.2, right, [right + 1], [], torch.bfloat16) == []
    assert judge(name, right + 3.3, right, [right + 1], [], torch.bfloat16) != []


@pytest.mark.parametrize("wrong", ["scale", "mask", "captured gradient"])
def test_small_mistakes_fail(wrong: str) -> None:
    """A scale off by a thousandth, one key too many in each row, a captured gradient off by a part in ten thousand."""
    problem = make_problem(CASES["relative 1-D"], SIZES["float32, groups"], "cpu")
    if wrong == "mask":
        problem = replace(problem, mask=lambda b, h, i, j: i >= j)
        result = ours(replace(problem, mask=lambda b, h, i, j: i + 1 >= j))
    elif wrong == "scale":
        result = ours(problem, scale=0.25 * 1.001)
    else:
        result = ours(problem)
        result.grads[3].mul_(1.0001)
    with pytest.raises(AssertionError, match="captured gradient 0: "):
        compare(problem, result)
