"""Every row of the table on a GPU: our kernels beside torch's compiled ones, forward and backward, and beside the float64 oracle.

One test is one mod in one dtype with all its sizes inside, so that torch compiles it once and parallel processes share the work:
`pytest -n 16 --dist worksteal tests/differential`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.differential.cases import CASES, Case, Sizes
from tests.differential.compare import compare, make_problem, ours, torch_compiled, torch_compiler, torch_where_it_can

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Torch makes another kernel for other heads, for other head dims and for fewer than 128 queries.
WITH_TORCH = (
    Sizes(5, 4, 2, 300, 900, 64, 64),
    Sizes(3, 4, 2, 384, 256, 64, 64),
    Sizes(2, 4, 2, 555, 777, 64, 64),
)
WITH_ORACLE = (
    Sizes(3, 6, 2, 257, 333, 32, 64, block=(256, 128)),
    Sizes(2, 3, 3, 129, 200, 32, 64, block=(64, 128), kv_batch=1),
)
COMPILATIONS = 2  # for any number of sizes: one for all, and one should a first size be taken for a constant
ROWS = [(name, BF16) for name in CASES]
ROWS += [(name, dtype) for name, case in CASES.items() if case.in_all_dtypes for dtype in (F32, F16)]


def _id(value: object) -> str | None:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=_id)
def test_beside_torchs_kernels(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    if case.torch_cannot:
        _torch_says_why(case, dtype)
        return
    sizes = WITH_TORCH[:1] if case.torch_static else WITH_TORCH
    with torch_compiler(dynamic=not case.torch_static) as (compiled, compilations):
        ran = 0
        for z in sizes:
            problem = make_problem(case, replace(z, dtype=dtype), "cuda")
            torchs = torch_where_it_can(problem, compiled)
            ran += torchs is not None
            compare(problem, ours(problem), torchs)
        assert min(ran, 1) <= compilations() <= COMPILATIONS, f"torch compiled {compilations()} times for {ran} sizes"


def _torch_says_why(case: Case, dtype: torch.dtype) -> None:
    """Torch refuses in the words of the table; ours is right."""
    problems = [make_problem(case, replace(z, dtype=dtype), "cuda") for z in WITH_TORCH]
    for problem in problems:
        compare(problem, ours(problem))
    dynamic = not case.torch_static
    with torch_compiler(dynamic=dynamic) as (compiled, _), pytest.raises(Exception, match=case.torch_cannot):
        torch_compiled(problems[0], compiled)


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(CASES, itertools.cycle((F16, F32)))), ids=_id
)  # bfloat16 ran above
def test_beside_the_oracle(name: str, dtype: torch.dtype) -> None:
    for z in WITH_ORACLE:
        problem = make_problem(CASES[name], replace(z, dtype=dtype), "cuda")
        compare(problem, ours(problem))
