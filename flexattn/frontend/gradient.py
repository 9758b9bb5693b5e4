"""Derivatives of a score_mod by a reverse fold over the table's vjp column.

Reads a score program; makes one expression for d loss / d score and one per captured read that needs a gradient, in terms of
`grad`, the gradient that arrives at the modified score.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flexattn.frontend.expr import DEP_SCORE, Expr, const, convert, fold, make, rebuild, topological, var
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Program
from flexattn.frontend.simplify import simplify


class CaptureGradient(NamedTuple):
    """One captured read: which element (the load's own index expressions) receives which gradient."""

    slot: int
    load: Expr
    grad: Expr


class ScoreGradient(NamedTuple):
    """Derivatives of a score program."""

    d_score: Expr
    d_captures: tuple[CaptureGradient, ...]


class _Functions:
    """What a vjp cell may call: any row of the table by name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: make(name, *args)

    @staticmethod
    def cast_like(x: Expr, like: Expr) -> Expr | None:
        """x in the type of `like`'s gradient; None where that has none."""
        return convert(x, _gradient_dtype(like)) if like.dtype.is_floating_point else None


_F = _Functions()


@lru_cache(maxsize=1024)
def score_gradient(program: Program) -> ScoreGradient:
    """Differentiate a score program.

    Args:
        program: A score program.

    Returns:
        d_score, and one entry per distinct read of a captured float tensor; who needs which is decided at the call.
        A tensor read at several places has several entries, whose contributions add.
    """
    order = topological([program.body])
    needed = _needed(order)
    upstream: dict[Expr, Expr] = {program.body: var("grad", program.body.dtype)}
    for node in reversed(order):
        if node not in upstream or node not in needed or not node.args or node.op == "load":
            continue
        cell = OPS[node.op].vjp
        if cell is None:
            continue
        for arg, grad in zip(node.args, cell(_F, upstream[node], node, *node.args)):
            if grad is not None and arg in needed and arg.dtype.is_floating_point:
                grad = convert(grad, _gradient_dtype(arg))
                upstream[arg] = make("add", upstream[arg], grad) if arg in upstream else grad
    dtype = program.body.dtype
    zero = const(0.0, dtype)
    d_score = simplify(upstream.get(var("score", dtype), zero))
    found = tuple(
        CaptureGradient(int(n.attr[0]), n, simplify(upstream[n])) for n in order if n.op == "load" and n in upstream
    )
    return ScoreGradient(d_score, found)


@lru_cache(maxsize=1024)
def score_slope(program: Program) -> Expr:
    """d modified score / d score, the factor of `grad` in d_score."""
    one = const(1.0, program.body.dtype)

    def with_one(node: Expr, args: list[Expr]) -> Expr:
        return one if node.op == "var" and node.attr == "grad" else rebuild(node, args)

    return simplify(fold([score_gradient(program).d_score], with_one)[0])


_BOUNDED = ("tanh", "sigmoid", "sin", "cos", "sign", "erf")
_KEEPS_BOUNDS = ("add", "sub", "mul", "neg", "abs", "minimum", "maximum", "where", "detach", "cast")


def is_bounded(root: Expr) -> bool:
    """Whether an expression is finite wherever the score is a number, infinities included, and captured numbers are finite."""
    return fold([root], _is_bounded)[0]


def _is_bounded(node: Expr, args: list[bool]) -> bool:
    if node.op in ("const", "num", *_BOUNDED) or not node.dtype.is_floating_point:
        return True
    if node.op == "truediv":
        return all(args) and not node.args[1].deps
    return node.op in _KEEPS_BOUNDS and all(args)


def _gradient_dtype(x: Expr) -> torch.dtype:
    """A node's own type, as in torch, on the way to the score. On the way to a captured tensor of a half type float32: what
    reaches an element is one of many terms, and only their sum is rounded."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if is_half and not x.deps & DEP_SCORE else x.dtype


def passes_gradient(program: Program) -> bool:
    """Whether d loss / d score is d loss / d modified score itself, as where something is only added to the score."""
    return score_gradient(program).d_score is var("grad", program.body.dtype)


def _needed(order: list[Expr]) -> set[Expr]:
    """Nodes below which the score or a differentiable capture lies."""
    needed: set[Expr] = set()
    for node in order:
        leaf = node.op == "var" and node.attr == "score" or node.op == "load" and node.dtype.is_floating_point
        if leaf or node.op != "load" and any(a in needed for a in node.args):
            needed.add(node)
    return needed
