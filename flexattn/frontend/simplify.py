"""Rewrite rules, each a row with its before and after; applied bottom-up once, memoised by expression.

Only rules that change no value for any input (NaN and infinities included) are here: an integer zero may vanish, a float one may not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from flexattn.frontend.expr import Expr, const, convert, fold, rebuild


class Rule(NamedTuple):
    """`apply` returns the better expression or None; `before` and `after` are for people and for the test that checks them."""

    before: str
    after: str
    apply: Callable[[Expr], Expr | None]


def _is(x: Expr, value: float) -> bool:
    return x.op == "const" and not isinstance(x.attr, bool) and x.attr == value


def _truth(x: Expr) -> bool | None:
    return bool(x.attr) if x.op == "const" and x.dtype == torch.bool else None


def _add_zero(e: Expr) -> Expr | None:
    if e.op != "add" or e.dtype != torch.int64:
        return None
    return e.args[0] if _is(e.args[1], 0) else e.args[1] if _is(e.args[0], 0) else None


def _sub_zero(e: Expr) -> Expr | None:
    return e.args[0] if e.op == "sub" and _is(e.args[1], 0) else None


def _mul_one(e: Expr) -> Expr | None:
    if e.op != "mul":
        return None
    return e.args[0] if _is(e.args[1], 1) else e.args[1] if _is(e.args[0], 1) else None


def _div_one(e: Expr) -> Expr | None:
    return (
        e.args[0]
        if e.op == "truediv"
        and _is(e.args[1], 1)
        or e.op == "floordiv"
        and e.dtype == torch.int64
        and _is(e.args[1], 1)
        else None
    )


def _mod_one(e: Expr) -> Expr | None:
    return const(0, torch.int64) if e.op == "mod" and e.dtype == torch.int64 and _is(e.args[1], 1) else None


def _double_neg(e: Expr) -> Expr | None:
    return e.args[0].args[0] if e.op == "neg" and e.args[0].op == "neg" else None


def _double_not(e: Expr) -> Expr | None:
    return e.args[0].args[0] if e.op == "not" and e.args[0].op == "not" else None


def _and_const(e: Expr) -> Expr | None:
    if e.op != "and" or e.dtype != torch.bool:
        return None
    for x, y in (e.args, e.args[::-1]):
        if (t := _truth(x)) is not None:
            return y if t else x
    return None


def _or_const(e: Expr) -> Expr | None:
    if e.op != "or" or e.dtype != torch.bool:
        return None
    for x, y in (e.args, e.args[::-1]):
        if (t := _truth(x)) is not None:
            return x if t else y
    return None


def _same_twice(e: Expr) -> Expr | None:
    return e.args[0] if e.op in ("and", "or", "minimum", "maximum") and e.args[0] is e.args[1] else None


def _where_const(e: Expr) -> Expr | None:
    if e.op != "where":
        return None
    t = _truth(e.args[0])
    return e.args[2] if t is False else e.args[1] if t else e.args[1] if e.args[1] is e.args[2] else None


def _where_bool(e: Expr) -> Expr | None:
    """where(c, True, False) is c."""
    if e.op != "where" or e.dtype != torch.bool:
        return None
    return e.args[0] if _truth(e.args[1]) is True and _truth(e.args[2]) is False else None


def _cast_cast(e: Expr) -> Expr | None:
    """bool -> int64 -> float is bool -> float."""
    inner = e.args[0] if e.op == "cast" else None
    if inner is None or inner.op != "cast" or inner.dtype != torch.int64 or inner.args[0].dtype != torch.bool:
        return None
    return convert(inner.args[0], e.dtype)


def _bool_round_trip(e: Expr) -> Expr | None:
    """int64(bool) != 0 is the bool."""
    if e.op != "ne" or not _is(e.args[1], 0):
        return None
    inner = e.args[0]
    return (
        inner.args[0]
        if inner.op == "cast" and inner.dtype == torch.int64 and inner.args[0].dtype == torch.bool
        else None
    )


RULES = (
    Rule("q_idx + 0", "q_idx", _add_zero),
    Rule("q_idx - 0", "q_idx", _sub_zero),
    Rule("score * 1", "score", _mul_one),
    Rule("score / 1", "score", _div_one),
    Rule("q_idx % 1", "0", _mod_one),
    Rule("-(-score)", "score", _double_neg),
    Rule("~~(q_idx < kv_idx)", "q_idx < kv_idx", _double_not),
    Rule("(q_idx < kv_idx) & True", "q_idx < kv_idx", _and_const),
    Rule("(q_idx < kv_idx) | True", "True", _or_const),
    Rule("(q_idx < kv_idx) & (q_idx < kv_idx)", "q_idx < kv_idx", _same_twice),
    Rule("where(True, score, -inf)", "score", _where_const),
    Rule("where(q_idx < kv_idx, True, False)", "q_idx < kv_idx", _where_bool),
    Rule("float32(int64(q_idx < kv_idx))", "float32(q_idx < kv_idx)", _cast_cast),
    Rule("int64(q_idx < kv_idx) != 0", "q_idx < kv_idx", _bool_round_trip),
)


def _visit(node: Expr, args: list[Expr]) -> Expr:
    node = rebuild(node, args)
    changed = True
    while changed and node.args:
        changed = False
        for rule in RULES:
            if (better := rule.apply(node)) is not None:
                node, changed = better, True
                break
    return node


@lru_cache(maxsize=4096)
def simplify(root: Expr) -> Expr:
    """The same value for every input, in fewer operations."""
    return fold([root], _visit)[0]
