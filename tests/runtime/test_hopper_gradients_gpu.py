"""The two kernels that share a backward on Hopper, against the float64 oracle and beside the portable kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flexattn
from flexattn import flex_attention, mods
from flexattn.runtime import choose
from tests.runtime.kernel_cases import CASES, Case, check, plain
from tests.runtime.test_hopper_gpu import GPU, LARGE, finished, patterns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for sm_90",
    ),
]
DIMS = [(256, 256), (192, 128), (128, 256), (64, 128), (128, 128), (64, 64)]
MOST = [(256, 256), (96, 96)]


@pytest.fixture(autouse=True)
def _not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", False)


def _launches() -> list[int]:
    launches = flexattn.stats().launches
    return [launches.get(kernel, 0) for kernel in choose.APART]


def _check(case: Case, dtype: torch.dtype = torch.bfloat16, draws: int = 1) -> None:
    """Against the oracle; the two kernels must have run."""
    before = _launches()
    finished(lambda: check(case, GPU, dtype, draws=draws))
    assert _launches() == [n + draws for n in before]


def test_plain_first() -> None:
    """One tile of keys and one of queries: what is wrong here is wrong everywhere."""
    _check(Case(1, 1, 1, 128, 64, 256, 256))


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (128, 128)])
@pytest.mark.parametrize("name", LARGE)
def test_large(name: str, dims: tuple[int, int]) -> None:
    _check(replace(LARGE[name], qk_dim=dims[0], v_dim=dims[1]))


@pytest.mark.parametrize("name", [n for n in CASES if n != "functions"])
def test_case(name: str) -> None:
    case = CASES[name]
    sizes = {"q_len": 3 * case.q_len + 33, "kv_len": 3 * case.kv_len, "qk_dim": 200, "v_dim": 136}
    _check(replace(case, **sizes), torch.float16, draws=4)


@pytest.mark.parametrize("dims", DIMS)
def test_any_head_dims(dims: tuple[int, int]) -> None:
    _check(replace(LARGE["causal"], qk_dim=dims[0], v_dim=dims[1]))


@pytest.mark.parametrize("dims", MOST)
@pytest.mark.parametrize("group", [3, 16])
def test_any_group(group: int, dims: tuple[int, int]) -> None:
    _check(Case(2, 2 * group, 2, 240, 290, *dims, plain(lambda b, h, i, j: (i >= j - 60) & ((i + j + h) % 7 != 0))))


@pytest.mark.parametrize("dims", MOST)
def test_what_is_not_written_would_show(dims: tuple[int, int]) -> None:
    """New memory comes from what was freed before, and that was full of NaN."""
    freed = [torch.full((n,), torch.nan, device=GPU) for n in (1 << 26, *(1 << 17,) * 16, *(1 << 10,) * 64)]
    del freed
    _check(Case(2, 4, 2, 700, 1500, *dims, plain(lambda b, h, i, j: ((j // 300) % 2 == 1) & (i % 500 < 300))))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_pattern_of_spans_hangs(dim: int) -> None:
    for case in patterns(12, 2000, dim):
        _check(case)


@pytest.mark.parametrize("mask", [None, mods.causal(), mods.sliding_window(1024)])
@pytest.mark.parametrize("dims", MOST)
def test_long_rows_agree_with_the_portable_kernels(dims: tuple[int, int], mask: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, 16384, d, device=GPU, dtype=torch.bfloat16, requires_grad=True) for d in (dims[0], *dims)
    )
    d_out, found = torch.randn(1, 2, 16384, dims[1], device=GPU, dtype=torch.bfloat16), []
    for options in ({}, {}, {"warp_specialized": False}):
        out = flex_attention(q, k, v, mask_mod=mask, kernel_options=options)
        found.append(finished(lambda out=out: torch.autograd.grad(out, (q, k, v), d_out)))
    for first, second, portable in zip(*found):
        assert torch.equal(first, second), "the same bits in every run"
        assert (first.double() - portable.double()).norm() <= 0.005 * portable.double().norm()


@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_that_are_asked_for(wanted: tuple[int, ...], dim: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, n, dim, device=GPU, dtype=torch.bfloat16) for n in (333, 500, 500)]
    grads = []
    for asked in ((0, 1, 2), wanted):
        before = _launches()
        inputs = [x.detach().requires_grad_(n in asked) for n, x in enumerate(tensors)]
        out = flex_attention(*inputs, mask_mod=mods.causal())
        grads.append(dict(zip(asked, torch.autograd.grad(out.float().square().sum(), [inputs[n] for n in asked]))))
    assert [n - b for n, b in zip(_launches(), before)] == [0 in wanted, 1 in wanted or 2 in wanted]
    assert grads[1].keys() == set(wanted) and all(torch.equal(grads[0][n], grads[1][n]) for n in wanted)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_they_serve_deterministic_runs(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", True)
    q = torch.randn(1, 2, 300, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    before = _launches()
    torch.use_deterministic_algorithms(True)
    try:
        flex_attention(q, q, q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert _launches() == [n + 1 for n in before]


@pytest.mark.parametrize("dim", [64, 128])
def test_deterministic_by_option(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", True)
    q, k, v = (torch.randn(2, 2, 1000, dim, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    before, grads = _launches(), []
    for _ in range(4):
        out = flex_attention(q, k, v, mask_mod=mods.causal(), kernel_options={"deterministic": True})
        grads.append(torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))
    assert _launches() == [n + 4 for n in before]
    table = torch.zeros(2, device=GPU, requires_grad=True)
    out = flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h], kernel_options={"deterministic": True})
    with pytest.raises(RuntimeError, match="you set kernel_options="):
        out.float().sum().backward()
