"""Sizes, head dims, groups, block sizes, scales and strides beside torch, on the CPU and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexattn
from tests.differential.cases import CASES, Sizes
from tests.differential.compare import (
    Problem,
    compare,
    make_problem,
    ours,
    torch_compiler,
    torch_result,
    torch_without_compiler,
)
from tests.helpers import guarded, on_devices

BF16, F32 = torch.bfloat16, torch.float32

# name: (row of the table, sizes)
SHAPES = {
    "as long": ("alibi", Sizes(2, 4, 4, 256, 256, 64, 64)),
    "fewer keys than a block": ("relative table", Sizes(2, 2, 2, 192, 70, 32, 32)),
    "group of two": ("causal mask", Sizes(2, 4, 2, 140, 140, 16, 16)),
    "group of four": ("bias by sequence", Sizes(2, 4, 1, 140, 160, 32, 32)),
    "group of six": ("causal mask ending together", Sizes(1, 12, 2, 130, 200, 16, 16)),
    "shared batch 3": ("identity", Sizes(3, 2, 2, 130, 150, 16, 16, kv_batch=1)),
    "shared batch 5, causal": ("causal mask", Sizes(5, 2, 1, 130, 150, 16, 16, kv_batch=1)),
    "wider values": ("alibi and causal mask", Sizes(2, 2, 2, 150, 150, 16, 64)),
    "narrower values": ("soft cap", Sizes(2, 2, 2, 150, 150, 64, 16)),
    "dim 17": ("causal mask", Sizes(1, 2, 2, 150, 150, 17, 17)),
    "dim 24 and 94": ("documents", Sizes(1, 2, 2, 150, 150, 24, 94)),
    "dim 121": ("times two", Sizes(1, 2, 2, 150, 150, 121, 121)),
    "block 256": ("documents", Sizes(2, 2, 2, 300, 420, 16, 16, block=256)),
    "block 128 by 256": ("window mask", Sizes(2, 2, 2, 300, 420, 16, 16, block=(128, 256))),
    "block 256 by 128": ("head-dependent window", Sizes(2, 2, 2, 300, 420, 16, 16, block=(256, 128))),
    "block longer than all": ("causal mask", Sizes(2, 2, 2, 130, 150, 16, 16, block=512)),
    "one query": ("relative bias", Sizes(2, 4, 2, 1, 700, 16, 16)),
    "one query, documents": ("offset by batch in a tensor", Sizes(4, 8, 2, 1, 700, 16, 16)),
    "four queries": ("causal mask ending together", Sizes(2, 4, 2, 4, 700, 16, 16)),
    "23 queries, group of 16": ("causal mask ending together", Sizes(2, 16, 1, 23, 300, 16, 16)),
    "100 queries": ("by batch and head", Sizes(2, 4, 2, 100, 300, 16, 16)),
    "one key": ("alibi", Sizes(2, 2, 2, 150, 1, 16, 16)),
    "one of each": ("causal mask", Sizes(1, 1, 1, 1, 1, 16, 16)),
    "tiny": ("boolean table", Sizes(2, 2, 2, 7, 5, 16, 16)),
}


def middling(device: str) -> Sizes:
    """Sizes for tests of something else."""
    return (
        Sizes(2, 4, 2, 140, 150, 32, 32, dtype=BF16) if device == "cuda" else Sizes(2, 4, 2, 50, 60, 16, 16, block=32)
    )


@on_devices
@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, device: str) -> None:
    row, z = SHAPES[name]
    problem = make_problem(CASES[row], replace(z, dtype=BF16 if device == "cuda" else F32), device)
    compare(problem, ours(problem), torch_result(problem) if device == "cpu" else None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_shape_beside_torchs_kernels(name: str) -> None:
    """Apart from the test above, since a compiler that ends the process would take ours along."""
    row, z = SHAPES[name]
    problem = make_problem(CASES[row], replace(z, dtype=BF16), "cuda")
    compare(problem, ours(problem), torch_result(problem))


@on_devices
@pytest.mark.parametrize("scale", [1.0, -0.4, 0.0])
def test_scale(scale: float, device: str) -> None:
    z = middling(device)
    problem = make_problem(CASES["soft cap"], z, device)
    compare(problem, ours(problem, scale=scale), torch_result(problem, scale=scale), scale=scale)


@on_devices
def test_more_batches_and_heads_than_a_grid_dimension_holds(device: str) -> None:
    z = Sizes(22720, 3, 3, 16, 20, 16, 16, dtype=BF16) if device == "cuda" else Sizes(22720, 3, 3, 2, 3, 4, 4)
    problem = make_problem(CASES["causal mask"], z, device)
    compare(problem, ours(problem), torch_result(problem))


# ---------------------------------------------------------------- strides
def _like(x: Tensor, *shape: int) -> Tensor:
    return guarded(shape, dtype=x.dtype, device=str(x.device))


def _with_offset(x: Tensor) -> Tensor:
    """In the middle of something larger, every dimension padded."""
    b, h, n, d = x.shape
    return _like(x, b + 1, h + 2, n + 3, d + 8)[1:, 2:, 3:, 8:]


def _last_two_swapped(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    return _like(x, b, h, d, n).transpose(2, 3)


def _overlapping(x: Tensor) -> Tensor:
    """Rows that overlap in memory: every row starts half a row after the one before it."""
    b, h, n, d = x.shape
    return _like(x, b * h * (n + 1) * d).as_strided(x.shape, (h * n * d, n * d, d // 2, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "offset and padded rows": _with_offset,
    "length before heads": lambda x: _like(x, x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2),
    "heads before batch": lambda x: _like(x, x.shape[1], x.shape[0], x.shape[2], x.shape[3]).transpose(0, 1),
    "length outermost": lambda x: _like(x, x.shape[2], x.shape[0], x.shape[1], x.shape[3]).permute(1, 2, 0, 3),
    "dim before length": _last_two_swapped,
    "last stride 2": lambda x: _like(x, *x.shape[:3], 2 * x.shape[3])[..., ::2],
    "expanded batch": lambda x: _like(x, 1, *x.shape[1:]).expand(x.shape),
    "expanded heads": lambda x: _like(x, x.shape[0], 1, *x.shape[2:]).expand(x.shape),
    "expanded length": lambda x: _like(x, *x.shape[:2], 1, x.shape[3]).expand(x.shape),
    "overlapping rows": _overlapping,
}


def _laid_out(problem: Problem, which: str, layout: str) -> Problem:
    """The same problem with query, or key and value, or all of them, in another layout."""
    make = LAYOUTS[layout]
    new = [make(x).detach().requires_grad_() if n in which else x for n, x in zip("qkv", problem.qkv)]
    return replace(problem, qkv=tuple(new))


@on_devices
@pytest.mark.parametrize("which", ["qkv", "q", "kv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, which: str, device: str) -> None:
    z = middling(device)
    problem = _laid_out(make_problem(CASES["documents"], z, device), which, layout)
    beside = torch_result(problem) if device == "cpu" or which == "qkv" else None
    result = ours(problem)
    compare(problem, result, beside)
    strides = problem.qkv[0].stride()
    if beside is not None and strides[3] == 1 and 0 not in strides:  # else torch's versions differ in what they make
        assert result.out.stride() == beside.out.stride()


@on_devices
@pytest.mark.parametrize("layout", ["length before heads", "dim before length", "last stride 2", "expanded length"])
def test_layout_of_captured_tables(layout: str, device: str) -> None:
    z = middling(device)
    table = torch.empty(z.batch, z.q_heads, z.q_len, z.kv_len, device=device)
    table = LAYOUTS[layout](table).detach().requires_grad_()
    case = replace(CASES["by batch and head"], captured=lambda z: [table])
    problem = make_problem(case, z, device)
    assert problem.learnt[0].stride() == table.stride()
    compare(problem, ours(problem), torch_result(problem))


# ---------------------------------------------------------------- what else is returned
def _row_maxima(problem: Problem) -> Tensor:
    """The largest modified score of each row, from float64."""
    q, k = (x.detach().double() for x in problem.qkv[:2])
    z = problem.sizes
    scores = q @ k.repeat_interleave(z.q_heads // z.kv_heads, 1).transpose(-1, -2) / math.sqrt(z.qk_dim)
    axes = [
        torch.arange(n, device=q.device).view([-1 if d == a else 1 for d in range(4)])
        for a, n in enumerate(scores.shape)
    ]
    kept = problem.mask(*axes) if problem.mask else torch.ones_like(scores, dtype=torch.bool)
    return torch.where(kept, problem.score(scores, *axes), -math.inf).amax(-1)


@on_devices
@pytest.mark.parametrize("row", ["alibi and causal mask", "first rows empty", "trigonometric"])
def test_row_maxima(row: str, device: str) -> None:
    z = middling(device)
    problem = make_problem(CASES[row], z, device)
    wanted = _row_maxima(problem)
    arguments = (*problem.qkv, problem.score)
    request = torch_flex.AuxRequest(lse=True, max_scores=True)  # torch's own tuple is accepted
    mask = problem.block_mask(flexattn)
    aux = flexattn.flex_attention(*arguments, mask, enable_gqa=True, return_aux=request)[1]
    assert aux.max_scores.dtype == F32 and not aux.max_scores.requires_grad and aux.lse.requires_grad
    torch.testing.assert_close(aux.max_scores.double(), wanted, atol=1e-5, rtol=1e-5)
    if device == "cuda":
        with torch_compiler(dynamic=False) as (compiled, _):
            mask = problem.block_mask(torch_flex)
            theirs = compiled(*arguments, mask, enable_gqa=True, return_aux=request)[1]
        some = ~torch.isneginf(wanted)
        torch.testing.assert_close(aux.max_scores[some], theirs.max_scores[some], atol=1e-4, rtol=1e-4)


REQUESTS = {
    "nothing": {},
    "an empty request": {"return_aux": torch_flex.AuxRequest()},
    "lse": {"return_aux": torch_flex.AuxRequest(lse=True)},
    "maxima": {"return_aux": torch_flex.AuxRequest(max_scores=True)},
    "lse, as once": {"return_lse": True},
}


@on_devices
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_returned(name: str, device: str) -> None:
    """A tensor, or a pair of it and lse, or of it and a named tuple with None for what was not asked for."""
    qkv = make_problem(CASES["causal mask"], Sizes(1, 2, 2, 20, 30, 16, 16), device, requires_grad=False).qkv
    mine = _flat(flexattn.flex_attention(*qkv, **REQUESTS[name]))
    with torch_without_compiler():
        if name == "maxima" and device == "cpu":
            with pytest.raises(NotImplementedError, match="max scores is not supported on CPU"):
                torch_flex.flex_attention(*qkv, **REQUESTS[name])
            assert [x is None for x in mine] == [False, True, False]
            return
        theirs = _flat(torch_flex.flex_attention(*qkv, **REQUESTS[name]))
    assert len(mine) == len(theirs)
    for x, y in zip(mine, theirs):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def _flat(returned: Any) -> list[Tensor | None]:
    """out, then lse, or the members of a named tuple in order."""
    if isinstance(returned, Tensor):
        return [returned]
    out, rest = returned
    return [out, rest] if isinstance(rest, Tensor) else [out, *rest]
