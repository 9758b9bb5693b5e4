"""Derivatives of whole score programs against torch.autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from flexattn.frontend import expr as ex
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import to_text
from flexattn.frontend.gradient import score_gradient
from flexattn.frontend.simplify import RULES, simplify
from flexattn.frontend.trace import trace

torch.manual_seed(0)
TABLE = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
SCALE = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
HEAD = torch.randn(3, dtype=torch.float64, requires_grad=True)
MODS = {
    "softcap": lambda s, b, h, q, k: 5 * torch.tanh(s / 5),
    "bias": lambda s, b, h, q, k: s + TABLE[h, q - k + 20],
    "scaled": lambda s, b, h, q, k: s * SCALE + HEAD[h],
    "twice": lambda s, b, h, q, k: s + TABLE[h, q] * TABLE[h, k],
    "gated": lambda s, b, h, q, k: torch.where(q >= k, s * HEAD[h].sigmoid(), s * s),
    "activation": lambda s, b, h, q, k: F.gelu(s) + F.softplus(s * SCALE) + F.silu(s) ** 2,
    "through half": lambda s, b, h, q, k: s + (TABLE[h, q].float() * 2).double(),
    "log": lambda s, b, h, q, k: torch.log(s.abs() + 1.5) / (SCALE + 2) + torch.exp(-s * s),
    "clamped": lambda s, b, h, q, k: s.clamp(-0.5, 0.5) + torch.minimum(s, HEAD[h]) + torch.maximum(s, SCALE),
    "constant": lambda s, b, h, q, k: q * 0.5 - k,
    "detached": lambda s, b, h, q, k: s * s.detach() + HEAD.detach()[h],
}


@pytest.mark.parametrize("name", MODS)
def test_programs_differentiate_like_autograd(name):
    mod = MODS[name]
    b, h, q, k = (torch.arange(n).view([-1 if d == a else 1 for d in range(4)]) for a, n in enumerate((2, 3, 7, 11)))
    score = torch.randn(2, 3, 7, 11, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 3, 7, 11, dtype=torch.float64)
    program, binding = trace(mod, "score", score_dtype=torch.float64)
    gradient = score_gradient(program)
    index = {"b": b, "h": h, "q_idx": q, "kv_idx": k}
    with torch.no_grad():
        ours = evaluate(program, binding, score=score, grad=upstream, body=gradient.d_score, **index).expand_as(score)
    out = torch.as_tensor(mod(score, b, h, q, k)).to(torch.float64).expand_as(score)
    leaves = [score, TABLE, SCALE, HEAD]
    expected = torch.autograd.grad(out, leaves, upstream, allow_unused=True) if out.requires_grad else [None] * 4
    torch.testing.assert_close(ours, expected[0] if expected[0] is not None else torch.zeros_like(score))
    arrived = [torch.zeros_like(t) for t in binding.captures]
    for entry in gradient.d_captures:
        with torch.no_grad():
            value = evaluate(program, binding, score=score, grad=upstream, body=entry.grad, **index).expand_as(score)
            where = [
                evaluate(program, binding, score=score, body=i, **index).expand(score.shape) for i in entry.load.args
            ]
            total = arrived[entry.slot]
            total.index_put_(tuple(where), value.to(total.dtype), accumulate=True) if where else total.add_(value.sum())
    ours = sums_at_leaves(binding.captures, arrived, leaves[1:])
    for mine, tensor, reference in zip(ours, leaves[1:], expected[1:]):
        torch.testing.assert_close(
            mine, torch.zeros_like(tensor) if reference is None else reference, rtol=1e-6, atol=1e-7
        )


def sums_at_leaves(captures, grads, leaves):
    """What reaches the leaves when captures, which a mod may have computed itself, receive `grads`."""
    pairs = [(c, g) for c, g in zip(captures, grads) if c.requires_grad]
    found = (
        torch.autograd.grad([c for c, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        if pairs
        else [None] * len(leaves)
    )
    return [torch.zeros_like(t) if f is None else f for t, f in zip(leaves, found)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_captures_gradient_is_rounded_only_as_a_sum(dtype):
    table = torch.randn(5, dtype=dtype, requires_grad=True)
    for mod in (lambda s, b, h, q, k: s + table[q], lambda s, b, h, q, k: s * (table[q] * 0.5)):
        (entry,) = score_gradient(trace(mod, "score", score_dtype=torch.float32).program).d_captures
        roundings = [node for node in ex.topological([entry.grad]) if node.op == "cast" and node.dtype == dtype]
        assert entry.grad.dtype == torch.float32 and not roundings


def test_additive_mods_pass_the_gradient_through():
    assert to_text(score_gradient(trace(lambda s, b, h, q, k: s + (q - k), "score").program).d_score) == "grad"
    assert to_text(score_gradient(trace(lambda s, b, h, q, k: q + 0.5 * k, "score").program).d_score) == "0"


def where(condition, a, b):
    """torch.where that also takes a Python condition, which the table's row does."""
    return ex.make("where", condition, a.expr, b) if isinstance(condition, bool) else torch.where(condition, a, b)


def parse(text):
    """The expression that a rule's before or after stands for."""
    for name, short in {"q_idx": "q", "kv_idx": "k", "score": "s"}.items():
        text = text.replace(name, short)
    scope = {
        "where": where,
        "inf": math.inf,
        "float32": lambda x: x.to(torch.float32),
        "int64": lambda x: x.to(torch.int64),
    }
    written = eval(f"lambda s, b, h, q, k: {text}", scope)
    raw = []

    def mod(s, b, h, q, k):
        value = written(s, b, h, q, k)
        raw.append(value.expr if hasattr(value, "expr") else value)
        return s

    trace(mod, "score")
    return raw[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.before)
def test_each_rule_does_what_its_row_says(rule):
    before, after = parse(rule.before), parse(rule.after)
    got = simplify(before)
    assert got is (after if isinstance(after, ex.Expr) else ex.const(after, got.dtype))
