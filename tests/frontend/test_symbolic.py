"""Formulas say what programs compute: sympy's values against the program's, and the LaTeX of well-known mods."""

from __future__ import annotations

import math

import pytest
import sympy
import torch

import flexattn.mods as mods
from flexattn.errors import UnsupportedError
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.ops import OPS
from flexattn.frontend.symbolic import to_latex, to_sympy
from flexattn.frontend.trace import trace

NAMES = ("b", "h", "q_idx", "kv_idx")
POINTS = [(0, 0, 5, 3), (1, 2, 3, 17), (1, 0, 40, 40), (0, 1, 9, 2)]
IDS, FLAGS = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3] * 8), torch.arange(64) % 3 == 0

MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < 7),
    "floor": lambda b, h, q, k: ((q - k) // 4 == -1) | ((q - k) % 4 == 3),
    "where": lambda b, h, q, k: torch.where(h == 1, k >= q, q >= k),
    "not": lambda b, h, q, k: ~((q > k) ^ (k < 9)),
    "abs, min, max": lambda b, h, q, k: (torch.minimum(q, k) * 2 > torch.maximum(q, k) - 9) & ((q - k).abs() < 8),
    "truth as a number": lambda b, h, q, k: (q > k).int() + (k > 3).int() == 1,
}
SCORES = {
    "softcap": mods.softcap(2.0),
    "alibi": mods.alibi(4),
    "masked": lambda s, b, h, q, k: torch.where(q >= k, s * 0.5, s - 1.0),
    "functions": lambda s, b, h, q, k: (
        torch.exp(-s.abs()) + torch.log1p(s * s) + torch.sigmoid(s) + torch.sqrt(s.abs() + 1)
    ),
}


def value(expression: sympy.Basic, **at: float) -> object:
    by_name = {s.name: s for s in expression.free_symbols}
    return expression.subs({by_name[n]: v for n, v in at.items() if n in by_name}).doit()


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_the_programs_values(name: str) -> None:
    traced = trace(MASKS[name], "mask")
    formula = to_sympy(traced.program)
    for point in POINTS:
        want = bool(evaluate(*traced, **{n: torch.tensor(x) for n, x in zip(NAMES, point, strict=True)}))
        numbers = {f"num{i}": x for i, x in enumerate(traced.binding.numbers)}
        assert bool(value(formula, **dict(zip(NAMES, point, strict=True)), **numbers)) == want, (name, point)


@pytest.mark.parametrize("name", SCORES)
def test_scores_have_the_programs_values(name: str) -> None:
    traced = trace(SCORES[name], "score")
    formula = to_sympy(traced.program)
    numbers = {f"num{i}": x for i, x in enumerate(traced.binding.numbers)}
    for score, point in zip((0.5, -1.25, 3.0, 0.0), POINTS, strict=True):
        index = {n: torch.tensor(x) for n, x in zip(NAMES, point, strict=True)}
        want = float(evaluate(*traced, **index, score=torch.tensor(score)))
        got = float(value(formula, score=score, **dict(zip(NAMES, point, strict=True)), **numbers))
        assert math.isclose(got, want, rel_tol=1e-5, abs_tol=1e-6), (name, point)


def test_latex() -> None:
    latex = lambda f, kind="mask", **names: to_latex(trace(f, kind).program, **names)
    assert latex(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx) == r"kv_{idx} \leq q_{idx}"
    assert latex(mods.softcap(20.0), "score", numbers=["cap", "cap"]).count("cap") == 2
    assert r"\tanh" in latex(mods.softcap(20.0), "score")
    documents = latex(lambda b, h, q, k: (IDS[q] == IDS[k]) & FLAGS[k], captures=["doc", "visible"])
    assert r"{doc}_{q_{idx}} = {doc}_{kv_{idx}}" in documents
    assert r"{visible}_{kv_{idx}} = 1" in documents
    assert r"\left\lfloor" in latex(lambda b, h, q, k: q // 4 == k // 4)
    assert r"\bmod" in latex(lambda b, h, q, k: (q - k) % 4 == 0)
    assert r"-\infty" in latex(lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")), "score").replace(" ", "")
    assert latex(lambda b, h, q, k: True) == r"\text{True}"


def test_a_program_is_shown_as_its_formula() -> None:
    """`_repr_latex_` is what a notebook asks an object for."""
    slopes = torch.ones(4)
    program = trace(lambda s, b, h, q, k: s - slopes[h] * (q - k), "score").program
    assert program._repr_latex_() == f"${to_latex(program)}$"
    assert "{cap_{0}}_{h}" in program._repr_latex_()


def test_every_operation_has_a_formula() -> None:
    from flexattn.frontend.symbolic import ON_TRUTH, meanings

    assert set(OPS) - {"cast"} == set(meanings(sympy))
    assert set(ON_TRUTH) <= set(OPS)


def test_unknown_operation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import flexattn.frontend.symbolic as symbolic

    monkeypatch.setattr(symbolic, "meanings", lambda _: {})
    with pytest.raises(UnsupportedError, match="`le` has no formula"):
        to_sympy(trace(MASKS["causal"], "mask").program)
