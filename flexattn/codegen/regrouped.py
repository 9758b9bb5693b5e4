"""Expressions -> cheaper expressions of the same value up to rounding, for kernels whose leaves cost as much as their products.

Reads the body of a program, makes another body. The idea: what is the same for a row, a column or a whole tile is computed once for
it, if only it stands together. So a comparison gets one index a side (`kv_idx >= q_idx - w` for `q_idx - kv_idx <= w`), and the
factors of a score (softmax scale, numbers, log2(e)) become one, and the end of the keys becomes part of a row's own end.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial, reduce
from typing import NamedTuple

import torch

from flexattn.frontend.expr import DEP_KV, DEP_Q, DEP_SCORE, Expr, const, convert, fold, make, rebuild, var

_TILE = DEP_Q | DEP_KV | DEP_SCORE
_ONE = const(1.0, torch.float32)
_LARGEST = 1 << 32  # of a constant; a few of these and of indices are far from the end of 64 bits
_MOST_TERMS = 16


# ---------------------------------------------------------------- comparisons
def one_index_a_side(root: Expr, index: str = "kv_idx") -> Expr:
    """Comparisons of integer sums of indices and numbers with one index on one side and all else on the other.

    Args:
        root: an expression whose numbers are of the narrow class, so that no sum wraps.
        index: the one, 'kv_idx' or 'q_idx'.

    Example:
        >>> from flexattn.frontend.expr import to_text
        >>> to_text(one_index_a_side(make("le", var("q_idx") - var("kv_idx"), 9)))
        'q_idx - 9 <= kv_idx'
    """
    sided: Expr = fold([root], partial(_sided, var(index)))[0]
    return sided


def _sided(index: Expr, node: Expr, args: list[Expr]) -> Expr:
    node = rebuild(node, args)
    if (
        node.op not in ("lt", "le", "eq", "ne")
        or node.args[0].dtype != torch.int64
        or node.deps & _TILE != DEP_Q | DEP_KV
    ):
        return node
    left, right = node.args
    if left.op == "abs" and node.op in ("lt", "le") and not right.deps & _TILE:  # |x| < r: x < r and -x < r
        inner = left.args[0]
        return make(
            "and",
            _separated(index, make(node.op, inner, right)),
            _separated(index, make(node.op, make("neg", inner), right)),
        )
    return _separated(index, node)


class Ends(NamedTuple):
    """A mask as keys from `lower` (None: the first) to before `upper`, both by row, of which `rest` (None: all) are kept; or as
    queries, both by key."""

    lower: Expr | None
    upper: Expr
    rest: Expr | None


def ends_of(root: Expr) -> Ends:
    """The mask, of keys before kv_len only: a bound on keys by row costs an element less than what tells keys apart, and the end of all
    keys then costs a minimum a row.

    Example:
        >>> from flexattn.frontend.expr import to_text
        >>> to_text(ends_of(make("le", var("kv_idx"), var("q_idx"))).upper)
        'min(q_idx + 1, kv_len)'
    """
    lower, upper, rest = _bounds(root, var("kv_idx"))
    end = var("kv_len")
    return Ends(lower, end if upper is None else make("minimum", upper, end), rest)


def ends_by_key(root: Expr) -> Ends | None:
    """The mask, of keys before kv_len only, as queries of each key, where it has two ends of those: for kernels that walk queries.

    Example:
        >>> from flexattn.frontend.expr import to_text
        >>> band = make("and", make("le", var("kv_idx"), var("q_idx")), make("le", var("q_idx") - 9, var("kv_idx")))
        >>> [to_text(end) for end in ends_by_key(band)[:2]]
        ['kv_idx', 'where(kv_idx < kv_len, 9 + kv_idx + 1, 0)']
    """
    lower, upper, rest = _bounds(one_index_a_side(root, "q_idx"), var("q_idx"))
    if lower is None or upper is None:
        return None
    return Ends(lower, make("where", make("lt", var("kv_idx"), var("kv_len")), upper, 0), rest)


def _bounds(root: Expr, index: Expr) -> tuple[Expr | None, Expr | None, Expr | None]:
    """A mask's two ends of an index where that does not move them, and what else it asks."""
    lower: Expr | None = None
    upper: Expr | None = None
    rest: list[Expr] = []
    for term in _conjuncts(root):
        is_order = term.op in ("le", "lt")
        if is_order and upper is None and term.args[0] is index and not term.args[1].deps & index.deps:
            upper = term.args[1] + 1 if term.op == "le" else term.args[1]
        elif is_order and lower is None and term.args[1] is index and not term.args[0].deps & index.deps:
            lower = term.args[0] if term.op == "le" else term.args[0] + 1
        else:
            rest.append(term)
    return lower, upper, reduce(lambda a, b: make("and", a, b), rest) if rest else None


def _conjuncts(node: Expr) -> list[Expr]:
    if node.op == "and" and node.dtype == torch.bool:
        return [c for a in node.args for c in _conjuncts(a)]
    return [node]


class _Term(NamedTuple):
    sign: int
    node: Expr


def _separated(index: Expr, node: Expr) -> Expr:
    left, right = node.args
    terms = _terms(left, 1) + _terms(right, -1)
    mixed = [t for t in terms if not _is_simple(t.node)]
    is_done = any(a is index and not b.deps & index.deps for a, b in ((left, right), (right, left)))
    if mixed or len(terms) > _MOST_TERMS or is_done:
        return node
    own = [t for t in terms if t.node.deps & index.deps]
    others = [t for t in terms if not t.node.deps & index.deps]
    if all(t.sign < 0 for t in own):  # others <= own
        return make(node.op, _sum(others, 1), _sum(own, -1))
    return make(node.op, _sum(own, 1), _sum(others, -1))


def _terms(node: Expr, sign: int) -> list[_Term]:
    if node.op in ("add", "sub"):
        return _terms(node.args[0], sign) + _terms(node.args[1], sign if node.op == "add" else -sign)
    if node.op == "neg":
        return _terms(node.args[0], -sign)
    return [_Term(sign, node)]


def _is_simple(node: Expr) -> bool:
    return node.op in ("var", "num") or (node.op == "const" and abs(node.attr) < _LARGEST)


def _sum(terms: list[_Term], sign: int) -> Expr:
    """Of terms times a sign, those that are added first."""
    total: Expr | None = None
    for term in sorted(terms, key=lambda t: t.sign * sign, reverse=True):
        if term.sign * sign > 0:
            total = term.node if total is None else make("add", total, term.node)
        else:
            total = make("neg", term.node) if total is None else make("sub", total, term.node)
    return const(0, torch.int64) if total is None else total


# ---------------------------------------------------------------- factors
def in_base_2(body: Expr) -> Expr:
    """A score program over products of query and key and the variable `scale`, whose result is log2(e) times as large.

    Example:
        >>> from flexattn.frontend.expr import to_text
        >>> to_text(in_base_2(make("tanh", make("truediv", var("score"), 4.0)) * 4.0))
        'tanh(score*(scale*0.25))*5.77078'
    """
    return _times(convert(body, torch.float32), const(math.log2(math.e), torch.float32))


def slope_of(body: Expr) -> Expr:
    """The derivative of a score program, over products of query and key and the variable `scale`."""
    return _times(convert(body, torch.float32), _ONE)


def _product(a: Expr, b: Expr) -> Expr:
    return b if a is _ONE else a if b is _ONE else make("mul", a, b)


@lru_cache(maxsize=4096)
def _times(node: Expr, factor: Expr) -> Expr:
    """node * factor, over raw products; the factor is one number a tile."""
    if node.dtype == torch.float32:
        if node.op == "var" and node.attr == "score":
            return make("mul", node, _product(var("scale"), factor))
        if node.op in ("add", "sub"):
            return make(node.op, *(_times(a, factor) for a in node.args))
        if node.op == "neg":
            return make("neg", _times(node.args[0], factor))
        if node.op == "where":
            return make("where", _raw(node.args[0]), *(_times(a, factor) for a in node.args[1:]))
        taken = _factor_of(node)
        if taken is not None:
            return _times(taken[0], _product(taken[1], factor))
    return _product(_raw(node), factor)


def _factor_of(node: Expr) -> tuple[Expr, Expr] | None:
    """(rest, number) of a product or a quotient with a number a tile."""
    if node.op not in ("mul", "truediv") or not node.deps & _TILE:
        return None
    left, right = node.args
    if not right.deps & _TILE:
        return left, right if node.op == "mul" else make("truediv", _ONE, right)
    return (right, left) if node.op == "mul" and not left.deps & _TILE else None


@lru_cache(maxsize=4096)
def _raw(node: Expr) -> Expr:
    """The same value over raw products."""
    if not node.deps & DEP_SCORE:
        return node
    if node.dtype == torch.float32 and (node.op == "var" or _factor_of(node) is not None):
        return _times(node, _ONE)
    return rebuild(node, [_raw(a) for a in node.args])


__all__ = ["Ends", "ends_by_key", "ends_of", "in_base_2", "one_index_a_side", "slope_of"]
