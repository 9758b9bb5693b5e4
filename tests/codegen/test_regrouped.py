"""Regrouped expressions have the value they had, and what was to come together has."""

from __future__ import annotations

import math

import pytest
import torch

from flexattn import mods
from flexattn.codegen.regrouped import ends_by_key, ends_of, in_base_2, one_index_a_side
from flexattn.frontend import expr as ex
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.program import Traced
from flexattn.frontend.trace import trace
from tests.goldens_of import GOLDENS
from tests.spelling_cases import CASES, case

SCALE = 0.375


def _value(traced: Traced, body: ex.Expr, score: torch.Tensor) -> torch.Tensor:
    """On 16 queries and 32 keys."""
    known = lambda node, args: ex.const(SCALE, torch.float32) if node.attr == "scale" else ex.rebuild(node, args)
    zero, q_idx, kv_idx = torch.zeros((), dtype=torch.int64), torch.arange(16)[:, None], torch.arange(32)[None, :]
    body = ex.fold([body], known)[0]
    found = evaluate(*traced, b=zero, h=zero, q_idx=q_idx, kv_idx=kv_idx, score=score, body=body)
    return found.expand(16, 32)


def _check_score(traced: Traced, score: torch.Tensor) -> None:
    body = traced.program.body
    got = _value(traced, in_base_2(one_index_a_side(body)), score / SCALE)
    want = _value(traced, body, score).double() * math.log2(math.e)
    close = torch.isclose(got.double(), want, rtol=3e-5, atol=3e-5, equal_nan=True)
    assert close.double().mean() > 0.99  # a rounding may fall on the other side of a comparison, a floor, or a range


@pytest.mark.parametrize("name, kind", CASES)
def test_every_row_of_the_op_table(name: str, kind: str) -> None:
    _check_score(*case(name, kind, torch.device("cpu")))


SCORES = {
    "cap": lambda score, b, h, q_idx, kv_idx: 30 * torch.tanh(score / 30),
    "shared": lambda score, b, h, q_idx, kv_idx: (score + kv_idx) * 3 - torch.tanh(score + kv_idx) / 2,
    "where": lambda score, b, h, q_idx, kv_idx: torch.where(score > kv_idx - 9, -score * 2, float("-inf")),
    "half": lambda score, b, h, q_idx, kv_idx: (score.to(torch.float16) * 2).to(torch.float32) + 1,
    "no score": lambda score, b, h, q_idx, kv_idx: (q_idx - kv_idx) / 7,
    "square": lambda score, b, h, q_idx, kv_idx: (2 * score) * (score / 4) + score**2,
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    _check_score(trace(SCORES[name], "score"), torch.randn(16, 32, generator=generator) * 4)


def test_factors_become_one() -> None:
    text = ex.to_text(in_base_2(trace(mods.softcap(30.0), "score").program.body))
    assert text == "tanh(score*(scale*(1/num0)))*(num0*1.4427)"


MASKS = {
    "window": mods.sliding_window(5),
    "both sides": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 4,
    "strictly": lambda b, h, q_idx, kv_idx: (kv_idx - q_idx - 3).abs() < 4,
    "bent": lambda b, h, q_idx, kv_idx: 3 - q_idx > 7 - kv_idx - q_idx,
    "not one": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 <= q_idx * kv_idx - 8,
    "equal": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx == 2) | (kv_idx + 1 != q_idx),
    "negative": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= -1,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    traced = trace(MASKS[name], "mask")
    got, want = (
        _value(traced, body, torch.zeros(16, 32))
        for body in (one_index_a_side(traced.program.body), traced.program.body)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", [n for n in GOLDENS if n in ("causal", "window", "floors", "documents")])
def test_golden_masks(name: str) -> None:
    traced = GOLDENS[name]()
    body = traced.program.body
    assert torch.equal(*(_value(traced, x, torch.zeros(16, 32)) for x in (one_index_a_side(body), body)))


@pytest.mark.parametrize("name", ["window", "both sides", "strictly"])
def test_no_side_has_both_indices(name: str) -> None:
    both = ex.DEP_Q | ex.DEP_KV
    for node in ex.topological([one_index_a_side(trace(MASKS[name], "mask").program.body)]):
        if node.op in ("lt", "le"):
            assert all(side.deps & both != both for side in node.args)


BOUNDED = {
    "causal": (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, True),
    "window": (mods.sliding_window(5), True),
    "before": (lambda b, h, q_idx, kv_idx: (kv_idx < q_idx + 3) & (kv_idx % 3 != 1), True),
    "no end": (lambda b, h, q_idx, kv_idx: q_idx <= kv_idx, False),
    "either": (lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (kv_idx == 20), False),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_end_of_keys_becomes_a_rows_own(name: str) -> None:
    function, is_bounded = BOUNDED[name]
    traced = trace(function, "mask")
    lower, upper, rest = ends_of(one_index_a_side(traced.program.body))
    plain = _value(traced, traced.program.body, torch.zeros(16, 32))
    keys = ex.var("kv_idx")
    body = ex.make("lt", keys, upper)
    for part in (None if lower is None else ex.make("le", lower, keys), rest):
        body = body if part is None else ex.make("and", body, part)
    for length in (1, 9, 32):
        known = lambda node, args: ex.const(length, torch.int64) if node.attr == "kv_len" else ex.rebuild(node, args)
        cut = _value(traced, ex.fold([body], known)[0], torch.zeros(16, 32))
        assert torch.equal(cut, plain & (torch.arange(32) < length))
    assert ("min(" in ex.to_text(upper)) == is_bounded
    assert (lower is not None) == (name in ("window", "no end"))


BANDS = {
    "window": mods.sliding_window(5),
    "both sides": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 4,
    "with holes": lambda b, h, q_idx, kv_idx: (
        (q_idx >= kv_idx) & (q_idx - kv_idx < 7) & (kv_idx % 3 != 1) & (kv_idx > 1)
    ),
    "nothing": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx < kv_idx - 2),
}


@pytest.mark.parametrize("name", BANDS)
def test_a_band_is_a_run_of_each_keys_queries(name: str) -> None:
    traced = trace(BANDS[name], "mask")
    found = ends_by_key(traced.program.body)
    assert found is not None and found.lower is not None
    assert not (found.lower.deps | found.upper.deps) & ex.DEP_Q
    query = ex.var("q_idx")
    body = ex.make("and", ex.make("le", found.lower, query), ex.make("lt", query, found.upper))
    body = body if found.rest is None else ex.make("and", body, found.rest)
    plain = _value(traced, traced.program.body, torch.zeros(16, 32))
    for length in (1, 9, 32):
        known = lambda node, args: ex.const(length, torch.int64) if node.attr == "kv_len" else ex.rebuild(node, args)
        cut = _value(traced, ex.fold([body], known)[0], torch.zeros(16, 32))
        assert torch.equal(cut, plain & (torch.arange(32) < length))


def test_what_has_one_end_of_queries_is_no_band() -> None:
    assert all(ends_by_key(trace(BOUNDED[n][0], "mask").program.body) is None for n in ("causal", "before", "either"))
