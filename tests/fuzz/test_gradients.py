"""The judge of gradients: what it calls exact is what the oracle says, a fused backward's roundings pass, one wrong pair does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.runtime import compile as compiling
from flexattn.runtime import device as devices
from flexattn.runtime import plan as plans
from flexattn.runtime.reference import oracle
from tests.fuzz import ahead
from tests.fuzz.gradients import CHECKS, judge_gradients, right_gradients
from tests.fuzz.judge import by_query_head, keep_of, modify, right
from tests.fuzz.problems import Problem, Wish, make, wish_of
from tests.fuzz.runner import Outcome, Way, run_group
from tests.fuzz.structures import STRUCTURES

CPU = torch.device("cpu")
SMALL = Way("cpu", is_small=True, is_backward=True)
ALL = range(len(STRUCTURES))


def _problem(seed: int) -> Problem:
    return make(seed, CPU, is_small=True, is_backward=True)


# ---------------------------------------------------------------- problems
def test_wishes_are_of_all_kinds() -> None:
    problems = [make(seed, CPU, is_small=True, is_empty=True, is_backward=True) for seed in range(960)]
    wishes = [p.wish for p in problems if p.wish is not None]
    assert {w.is_deterministic for w in wishes} == {True, False}
    assert {(w.q, w.k, w.v) for w in wishes} >= {(n == "q", n == "k", n == "v") for n in "qkv"} | {(True, True, True)}
    assert not any(w.captures and w.is_deterministic for w in wishes)
    assert len({(p.structure, p.variant, p.wish) for p in problems}) <= 3 * 2 * len(STRUCTURES)
    assert {p.upstream.d_lse is None for p in problems if p.upstream is not None} == {True, False}
    assert sum(p.is_fused for p in problems) > 200 and sum(bool(p.captured) for p in problems) > 100
    assert sum(p.sizes.q_len < 700 for p in problems) > 800
    assert wish_of(4711) == wish_of(4711)


@pytest.mark.parametrize("seed", [3, 10, 52])
def test_another_device_gets_the_same_problem(seed: int) -> None:
    p = _problem(seed)
    again = p.to(CPU)
    assert (again.kind, again.sizes, again.scale) == (p.kind, p.sizes, p.scale)
    assert [x.requires_grad for x in (again.q, again.k, again.v)] == [x.requires_grad for x in (p.q, p.k, p.v)]
    assert p.upstream is not None and again.upstream is not None
    assert torch.equal(again.upstream.d_out, p.upstream.d_out)
    assert all(torch.equal(a, b) for a, b in zip(again.captured, p.captured, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(p.exact().captured, p.captured, strict=True))


def _tiny(index: int) -> Problem:
    """The smallest of a few problems of a structure that asks for every gradient."""
    drawn = [_problem(index + len(STRUCTURES) * n) for n in range(20)]
    return min((p for p in drawn if p.wish == Wish()), key=lambda p: math.prod(p.q.shape[:3]) * p.sizes.kv_len)


@pytest.mark.parametrize("index", ALL)
def test_what_is_exact_is_what_the_oracle_says(index: int) -> None:
    p = _tiny(index).exact()
    assert p.upstream is not None
    inputs = [x.detach().double().requires_grad_() for x in (p.q, p.k, p.v)]
    out, lse = oracle(*inputs, p.mask.mod, p.score.mod, p.scale)
    d_lse = torch.zeros_like(lse) if p.upstream.d_lse is None else p.upstream.d_lse.double()
    loss = (out * p.upstream.d_out).sum() + (torch.where(torch.isneginf(lse), 0.0, lse) * d_lse).sum()
    wanted = torch.autograd.grad(loss, [*inputs, *p.captured], allow_unused=True, materialize_grads=True)
    for found, grad in zip(right_gradients(p), wanted, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------- what passes
@pytest.mark.parametrize("first", ALL[::8])
def test_every_structure_is_right_on_the_cpu(first: int) -> None:
    outcomes = run_group([first + n + len(STRUCTURES) * v for n in range(8) for v in range(4)], SMALL)
    assert len(outcomes) == 32 and all(len(o.figures) == len(SMALL.checks) for o in outcomes)
    assert all(o.is_right for o in outcomes), [str(o) for o in outcomes if not o.is_right]


Pairs = dict[str, Tensor]


def _as_a_kernel(p: Problem, change: Callable[[Problem, Pairs], None] | None = None) -> tuple[Any, ...]:
    """(out, lse, gradients) with float32 sums, from out and lse as the forward saved them, rounded where a fused backward rounds.
    `change`: something else happens to pairs before they are rounded."""
    assert p.upstream is not None
    with torch.no_grad():
        out, lse = (x.detach() for x in p.call()[:2])
    dtype, (d_out, d_lse) = out.dtype, p.upstream
    q, k, v = (x.detach().float() for x in (p.q, p.k, p.v))
    k, v = by_query_head(k, q), by_query_head(v, q)
    scale = q.shape[3] ** -0.5 if p.scale is None else p.scale
    raw = (q @ k.transpose(-1, -2) * scale).requires_grad_()
    modified = modify(p, raw)
    keep = keep_of(p, modified.detach())
    row = torch.where(torch.isneginf(lse), math.inf, lse).unsqueeze(-1)
    probs = torch.where(keep, torch.exp2(modified.detach() * 1.44269504 - row * 1.44269504), 0.0)
    delta = (out.float() * d_out.float()).sum(-1) - (0.0 if d_lse is None else d_lse)
    delta = torch.where(torch.isneginf(lse), 0.0, delta)
    pairs = {"probs": probs, "grad": probs * (d_out.float() @ v.transpose(-1, -2) - delta.unsqueeze(-1))}
    if change is not None:
        change(p, pairs)
    inputs = [raw, *p.captured]
    d_raw, *d_captured = (
        (pairs["grad"],) if p.score.mod is None else torch.autograd.grad(modified, inputs, pairs["grad"])
    )
    d_scores = d_raw.to(dtype).float()

    def of_keys(x: Tensor, leaf: Tensor) -> Tensor:
        x = x.unflatten(1, (leaf.shape[1], -1)).sum(2)
        return x.sum(0, keepdim=True) if leaf.shape[0] < x.shape[0] else x

    found = {
        id(p.q): d_scores @ k * scale,
        id(p.k): of_keys(d_scores.transpose(-1, -2) @ q * scale, p.k),
        id(p.v): of_keys(pairs["probs"].to(dtype).float().transpose(-1, -2) @ d_out.float(), p.v),
        **{id(x): d for x, d in zip(p.captured, d_captured)},
    }
    grads = [found[id(x)] for x in p.leaves]
    return out, lse, [g.to(x.dtype) for x, g in zip(p.leaves, grads)]


@pytest.mark.parametrize("first", range(0, 192, 32))
def test_roundings_of_a_fused_kernel_pass(first: int) -> None:
    for seed in range(first, first + 32):
        p = _problem(seed)
        figures = judge_gradients(p, *_as_a_kernel(p))
        assert bool((figures <= 1).all()), (str(p), dict(zip(CHECKS, figures.tolist())))


# ---------------------------------------------------------------- what does not
def _pair(p: Problem, pairs: Pairs) -> tuple[Tensor, ...]:
    """One pair that matters, beside another key of its row."""
    sizes = torch.where(pairs["probs"] < 0.9, pairs["grad"].abs(), 0.0)
    return torch.unravel_index(sizes.argmax(), sizes.shape)


def _without_a_pair(p: Problem, pairs: Pairs) -> None:
    pairs["grad"][_pair(p, pairs)] = 0.0


def _twice_a_pair(p: Problem, pairs: Pairs) -> None:
    pairs["grad"][_pair(p, pairs)] *= 2


def _without_a_value(p: Problem, pairs: Pairs) -> None:
    pairs["probs"][_pair(p, pairs)] = 0.0


def _delta_of_another_row(p: Problem, pairs: Pairs) -> None:
    """The gradient of lse, which is subtracted with it, is forgotten."""
    assert p.upstream is not None
    if p.upstream.d_lse is None:
        _without_a_pair(p, pairs)
    else:
        pairs["grad"] -= pairs["probs"] * p.upstream.d_lse.unsqueeze(-1)


def _one_percent_more(p: Problem, pairs: Pairs) -> None:
    pairs["grad"] *= 1.01
    pairs["probs"] *= 1.01


@pytest.mark.parametrize(
    "change", [_without_a_pair, _twice_a_pair, _without_a_value, _delta_of_another_row, _one_percent_more]
)
def test_wrong_pairs_are_found(change: Callable[[Problem, Pairs], None]) -> None:
    """One pair of tens of thousands, or all of them a little, in problems of both types; a soft-cap's scores are known to 3 % only."""
    problems = [p for p in map(_problem, range(0, 4 * len(STRUCTURES), 3)) if _is_telling(p) and p.score.bend is None]
    problems = [p for p in problems if p.wish is not None and p.wish.q and p.wish.v]
    assert len(problems) > 20
    for p in problems:
        figures = judge_gradients(p, *_as_a_kernel(p, change))
        assert figures.max() > 1, str(p)


def _is_telling(p: Problem) -> bool:
    """Whether rows have several keys that matter, and queries a gradient."""
    return p.scale != 0.0 and bool(((right(p).weights - 0.45).abs() < 0.445).any())


def _spoilt(p: Problem, spoil: Callable[[list[Tensor]], None]) -> Tensor:
    out, lse, grads = _as_a_kernel(p)
    spoil(grads)
    return judge_gradients(p, out, lse, grads)


def _nan(grads: list[Tensor]) -> None:
    grads[-1].view(-1)[-1] = math.nan


def _an_element(grads: list[Tensor]) -> None:
    grads[0][-1, -1, -1, 0] += 0.1


def _rows_moved_by_one(grads: list[Tensor]) -> None:
    grads[0].copy_(grads[0].roll(1, 2))


def _not_written(grads: list[Tensor]) -> None:
    grads[0][..., -1, :] = 7.0


@pytest.mark.parametrize("spoil", [_nan, _an_element, _rows_moved_by_one, _not_written])
def test_wrong_gradients_are_found(spoil: Callable[[list[Tensor]], None]) -> None:
    problems = [p for p in map(_problem, range(16)) if _is_telling(p)]
    assert len(problems) > 8
    for p in problems:
        assert _spoilt(p, spoil).max() > 1, str(p)


def test_other_bits_in_a_second_run_are_found() -> None:
    p = next(p for p in map(_problem, range(100)) if p.wish is not None and p.wish.is_deterministic)
    out, lse, grads = _as_a_kernel(p)
    again = [g.clone() for g in grads]
    assert judge_gradients(p, out, lse, [*grads, *again]).max() <= 1
    again[-1].view(-1)[0] += 1e-3
    assert judge_gradients(p, out, lse, [*grads, *again])[CHECKS.index("bits")] > 1


def test_an_error_of_the_backward_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "differentiate", lambda self, out, lse: 1 // 0)
    (outcome,) = run_group([0], SMALL)
    assert not outcome.is_right and "ZeroDivisionError" in str(outcome)
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- kernels built beforehand
def test_what_a_call_and_its_backward_take_is_built_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of both directions: fused and its passes, two kernels, some gradients alone. A second time nothing is built."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiling, "found_or_built", compiling.found_or_built)
    folder, index = tmp_path / "kernels", next(n for n, s in enumerate(STRUCTURES) if s.name == "same | none")
    folder.mkdir()
    seeds = [index + len(STRUCTURES) * n for n in range(0, 80, 2)]
    problems = {(p.wish, p.upstream and p.upstream.d_lse is None): p for p in map(_problem, seeds)}
    assert {p.is_fused for p in problems.values()} == {True, False}

    def forget() -> None:
        for memory in ("_KERNELS", "_FAILED", "_AHEAD"):
            monkeypatch.setattr(compiling, memory, {})
        plans._plan.cache_clear()

    def built() -> tuple[set[str], ahead.Log]:
        forget()
        with ahead.no_gpu(folder) as log:
            for p in problems.values():
                ahead.run_without_gpu(p)
        return {kernel for kernel, _, _ in log.spilled}, log

    names, log = built()
    apart = {"hopper_query_gradient", "hopper_key_gradients"}
    assert names == {"hopper_forward", "delta", "hopper_backward", "hopper_dq", *apart} and not log.faults
    again, log = built()
    assert again == names and log.counts["built"] == 0
    specs = [spec for spec, _ in compiling._KERNELS]
    assert {spec.kernel for spec in specs} == names
    used = ahead.use(folder)
    forget()
    for spec in specs:
        assert compiling.build_ahead(spec, CPU).wait(60)
        assert compiling._AHEAD.pop(spec).result()[0].kernel[:4] == b"\x7fELF"
    assert used == {"loaded": len(specs)}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
)
@pytest.mark.parametrize("structure", [0, 3])
def test_random_problems_on_the_kernels_for_hopper(structure: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few structures, as each has a dozen kernels to build: a plain one, and one with a table and captured slopes."""
    monkeypatch.setattr(compiling, "found_or_built", compiling.found_or_built)
    monkeypatch.setattr(devices, "target_for", devices.target_for)
    ahead.use(ahead.FOLDER)
    seeds = list(range(structure, len(STRUCTURES) * 36, len(STRUCTURES)))
    way = replace(SMALL, device="cuda", is_small=False)
    outcomes: list[Outcome] = []
    for first in range(0, len(seeds), 8):
        outcomes += run_group(seeds[first : first + 8], way)
    assert len(outcomes) == 36
    assert all(o.is_right for o in outcomes), [f"{o.seed}: {o}" for o in outcomes if not o.is_right]
