"""The fused backward for Hopper on one: every case of the portable kernels, many spans, any group, long rows, and no hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import flexattn
from flexattn import flex_attention, mods
from flexattn.runtime import choose
from flexattn.runtime import device as devices
from tests.runtime.kernel_cases import CASES, Case, check, plain
from tests.runtime.test_hopper_gpu import GPU, LARGE, finished, patterns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
]
DIMS = [64, 96, 128]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", True)


def _check(case: Case, dtype: torch.dtype = torch.bfloat16, draws: int = 1) -> None:
    """Against the oracle; the fused kernel must have run."""
    before = flexattn.stats().launches.get("hopper_backward", 0)
    finished(lambda: check(case, GPU, dtype, draws=draws))
    assert flexattn.stats().launches.get("hopper_backward", 0) == before + draws


def test_plain_first() -> None:
    """One tile of keys and two of queries: what is wrong here is wrong everywhere."""
    _check(Case(1, 1, 1, 128, 128, 128, 128))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", LARGE)
def test_large(name: str, dim: int) -> None:
    _check(replace(LARGE[name], qk_dim=dim, v_dim=dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [n for n in CASES if n != "functions"])
def test_case(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    _check(replace(case, q_len=5 * case.q_len + 33, kv_len=5 * case.kv_len, qk_dim=64, v_dim=64), dtype, draws=4)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [2, 3, 5, 7, 8, 16])
def test_any_group(group: int, dim: int) -> None:
    _check(Case(2, 2 * group, 2, 240, 290, dim, dim, plain(lambda b, h, i, j: (i >= j - 60) & ((i + j + h) % 7 != 0))))


def test_keys_without_queries_get_zeros() -> None:
    q, k, v = (
        torch.randn(2, 2, n, 128, device=GPU, dtype=torch.bfloat16, requires_grad=True) for n in (700, 1500, 1500)
    )
    mask = lambda b, h, i, j: ((j // 300) % 2 == 1) & (i % 500 < 300)
    for tensor in (k, v):
        with torch.no_grad():
            tensor[:, :, :256] = torch.nan  # whole tiles that nobody looks at
    out = flex_attention(q, k, v, mask_mod=mask)
    d_q, d_k, d_v = finished(lambda: torch.autograd.grad(out.float().square().sum(), (q, k, v)))
    dropped = (torch.arange(1500, device=GPU) // 300) % 2 == 0
    assert not d_k[:, :, dropped].any() and not d_v[:, :, dropped].any()
    assert d_k[:, :, ~dropped].any() and not d_q[:, :, torch.arange(700, device=GPU) % 500 >= 300].any()
    assert torch.isfinite(d_q).all() and torch.isfinite(d_k).all() and torch.isfinite(d_v).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_not_written_would_show(dim: int) -> None:
    """New memory comes from what was freed before, and that was full of NaN."""
    freed = [torch.full((n,), torch.nan, device=GPU) for n in (1 << 26, *(1 << 17,) * 16, *(1 << 10,) * 64)]
    del freed
    _check(Case(2, 4, 2, 700, 1500, dim, dim, plain(lambda b, h, i, j: ((j // 300) % 2 == 1) & (i % 500 < 300))))


@pytest.mark.parametrize("dim", [64, 128])
def test_no_pattern_of_spans_hangs(dim: int) -> None:
    for case in patterns(20, 2000, dim):
        _check(case)


def _columns(count: int, dim: int) -> Iterator[Case]:
    """Cases by what columns of 128 keys hold, which differs by head: nothing, one tile of queries, the first or the last, every other
    one (more spans than a row has room for), two runs, all; tiles are partial or full, and query heads share keys."""
    generator = torch.Generator().manual_seed(dim)
    for n in range(count):
        lines, columns, heads, group = 32 + n % 5, 5 + n % 4, 2 + 2 * (n % 2), 1 + n % 2
        kinds = torch.randint(0, 7, (heads, columns), generator=generator)
        kept = torch.zeros(heads, lines, columns, dtype=torch.bool)
        for head in range(heads):
            for column in range(columns):
                first, last = sorted(torch.randint(0, lines, (2,), generator=generator).tolist())
                chosen = {
                    1: [first], 2: [0], 3: [lines - 1], 4: range(0, lines, 2), 5: [*range(first), *range(last, lines)],
                    6: range(lines),
                }.get(int(kinds[head, column]), [])  # fmt: skip
                kept[head, list(chosen), column] = True
        whole = torch.rand(lines, generator=generator) < 0.7
        kept, whole = kept.to(GPU), whole.to(GPU)
        mask = lambda b, h, i, j, kept=kept, whole=whole: (
            kept[h, i // 64, j // 128] & (whole[i // 64] | ((i + j) % 3 != 0))
        )
        yield Case(
            1 + n % 2,
            heads,
            heads // group,
            64 * lines - 7 * (n % 3),
            128 * columns - 31 * (n % 2),
            dim,
            dim,
            plain(mask),
        )


@pytest.mark.parametrize("dim", [64, 128])
def test_no_kind_of_column_hangs(dim: int) -> None:
    for case in _columns(24, dim):
        _check(case)


# ---------------------------------------------------------------- documents, whose programs take columns
def _kept_documents(device: torch.device, case: Case) -> Any:
    """Documents of 290 tokens, of which every third one has no pairs: some columns have no queries."""
    ids = (torch.arange(max(case.q_len, case.kv_len), device=device) // 290).int()
    return None, (lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j) & (ids[j] % 3 != 1)), []


def _no_documents(device: torch.device, case: Case) -> Any:
    ids = torch.arange(max(case.q_len, case.kv_len), device=device)
    return None, (lambda b, h, i, j: ids[i] - 10000 == ids[j]), []


QUEUED = {
    "fewer columns than programs": Case(1, 2, 1, 1029, 1333, make=_kept_documents),
    "five columns a program": Case(3, 16, 16, 1700, 1690, make=_kept_documents),
    "and shared keys": Case(2, 24, 8, 1290, 1290, make=_kept_documents, kv_batch=1),
    "no queries at all": Case(3, 12, 12, 700, 900, make=_no_documents),
}


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", QUEUED)
def test_programs_take_all_columns(name: str, dim: int) -> None:
    _check(replace(QUEUED[name], qk_dim=dim, v_dim=dim), draws=2)
    assert not devices.counter_of(GPU).any(), "the next kernel would not begin with the first column"


def _document_step(seed: int, dim: int) -> tuple[list[torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]:
    """(q, k, v, a function that makes their gradients) of more columns than programs."""
    generator = torch.Generator(GPU).manual_seed(seed)
    shape = (3, 16, 1300, dim)
    qkv = [torch.randn(shape, device=GPU, dtype=torch.bfloat16, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(shape, device=GPU, dtype=torch.bfloat16, generator=generator)
    ids = (torch.arange(1300, device=GPU) // (150 + 70 * seed)).int()
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    return qkv, lambda: torch.autograd.grad(flex_attention(*qkv, mask_mod=mask), qkv, upstream)


def _agree(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """The same bits of dk and dv; dq may be added in any order."""
    assert (found[0].double() - wanted[0].double()).norm() <= 0.003 * wanted[0].double().norm()
    assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])


@pytest.mark.parametrize("dim", [64, 128])
def test_a_graph_counts_columns_by_itself(dim: int) -> None:
    """Replayed twice, with other calls on another stream at the same time."""
    qkv, step = _document_step(1, dim)
    _, other = _document_step(2, dim)
    side, graph = torch.cuda.Stream(GPU), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        step()
    wanted_of_other = finished(other)
    torch.cuda.synchronize(GPU)
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in (3, 4):
        with torch.no_grad():
            for tensor, fresh in zip(qkv, _document_step(seed, dim)[0]):
                tensor.copy_(fresh)
        wanted = finished(step)
        torch.cuda.synchronize(GPU)
        with torch.cuda.stream(side):
            found_of_other = other()
        finished(graph.replay)
        torch.cuda.synchronize(GPU)
        _agree(recorded, wanted)
        _agree(found_of_other, wanted_of_other)


def test_two_streams_count_columns_apart() -> None:
    steps = [_document_step(seed, 128)[1] for seed in (1, 2)]
    wanted = [finished(step) for step in steps]
    torch.cuda.synchronize(GPU)
    streams = [torch.cuda.Stream(GPU) for _ in steps]
    for _ in range(3):
        found = []
        for stream, step in zip(streams, steps):
            with torch.cuda.stream(stream):
                found.append(step())
        for stream in streams:
            torch.cuda.current_stream(GPU).wait_stream(stream)
        finished(lambda: None)
        for a, b in zip(found, wanted):
            _agree(a, b)


# ---------------------------------------------------------------- beside the two kernels
def _both(dim: int, length: int, monkeypatch: pytest.MonkeyPatch, **call: Any) -> list[tuple[torch.Tensor, ...]]:
    """Gradients of the fused kernel, twice, then of the two kernels that share a backward."""
    torch.manual_seed(0)
    shape = (1, 2, length, dim)
    q, k, v = (torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    d_out, found = torch.randn(shape, device=GPU, dtype=torch.bfloat16), []
    for fused in (True, True, False):
        monkeypatch.setattr(choose, "_FUSED_BACKWARD", fused)
        out = flex_attention(q, k, v, **call)
        found.append(finished(lambda out=out: torch.autograd.grad(out, (q, k, v), d_out)))
    return found


@pytest.mark.parametrize("mask", [None, mods.causal(), mods.sliding_window(1024)])
@pytest.mark.parametrize("dim", [64, 128])
def test_long_rows_agree_with_the_two_kernels(dim: int, mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, apart = _both(dim, 16384, monkeypatch, mask_mod=mask)
    for a, b, c in zip(first, second, apart):
        assert (a.double() - c.double()).norm() <= 0.005 * c.double().norm()
        assert (a.double() - b.double()).norm() <= 0.003 * c.double().norm()  # a stale sum or a race would show
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])


def test_deterministic_runs_do_not_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        before = flexattn.stats().launches.get("hopper_backward", 0)
        first, second, _ = _both(64, 1024, monkeypatch)
        assert flexattn.stats().launches.get("hopper_backward", 0) == before
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_strided_inputs_and_a_shared_batch() -> None:
    fused = torch.randn(2, 300, 3, 2, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (fused[:, :, n].transpose(1, 2) for n in range(3))
    out = flex_attention(q, k[:1], v[:1], mask_mod=mods.causal())
    weight = torch.randn_like(out)
    (found,) = finished(lambda: torch.autograd.grad((out * weight).sum(), fused))
    q, k, v = (fused.double()[:, :, n].transpose(1, 2) for n in range(3))
    keep = torch.ones(300, 300, dtype=torch.bool, device=GPU).tril()
    right = torch.softmax((q @ k[:1].mT * 0.125).masked_fill(~keep, -torch.inf), -1) @ v[:1]
    (wanted,) = torch.autograd.grad((right * weight.double()).sum(), fused)
    assert (found.double() - wanted.double()).norm() <= 0.01 * wanted.double().norm()
