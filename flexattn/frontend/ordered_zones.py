"""Masks as ordered zones: a query has one run of keys, whose ends never fall from a query to the next (packed documents).

Reads a mask program; makes the zones that it keeps and those that it drops, as conditions between a function of q_idx and one of
kv_idx that both rise, if the captured tensors they read do. The one idea: `table[q_idx] == table[kv_idx]` of a sorted table
bounds kv_idx on both sides as `q_idx - window < kv_idx` does on one, so that of many queries the first and the last one tell.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flexattn.frontend.closed_form import KEY, Linear, NoFormulaError, joined, linear
from flexattn.frontend.expr import DEP_KV, DEP_Q, Expr, make, topological
from flexattn.frontend.program import Program
from flexattn.frontend.zones import MOST_ZONES, QUERY

INDICES = DEP_Q | DEP_KV


class Condition(NamedTuple):
    """`query <= key` where `is_lower`, else `key <= query`; `<` where strict. Both rise; `query` has no kv_idx, `key` no q_idx.

    `offset`: without an index, what q_idx must grow by for `key` of it to be `query`; None where they are not alike so."""

    query: Expr
    key: Expr
    is_lower: bool
    is_strict: bool
    offset: Expr | None


class OrderedZone(NamedTuple):
    """The pairs for which all conditions hold, if all of `where` do, which have no index."""

    conditions: tuple[Condition, ...]
    where: tuple[Expr, ...]


class OrderedZones(NamedTuple):
    """A mask keeps the union of `kept` and drops that of `dropped`, which are each other's complement."""

    kept: tuple[OrderedZone, ...]
    dropped: tuple[OrderedZone, ...]


@lru_cache(maxsize=1024)
def ordered_zones(program: Program) -> OrderedZones | None:
    """The ordered zones of a mask program that reads captured tensors at q_idx or kv_idx.

    Args:
        program: a mask; whether its tensors rise, and whether its integers may wrap around, is not looked at.

    Returns:
        Zones; None where the mask is no union of a few, or reads no captured tensor at q_idx or kv_idx.

    Example:
        >>> import torch
        >>> from flexattn.frontend.trace import trace
        >>> table = torch.arange(8) // 4
        >>> documents = trace(lambda b, h, q_idx, kv_idx: table[q_idx] == table[kv_idx], "mask").program
        >>> [len(part) for part in ordered_zones(documents)]
        [1, 2]
    """
    if not any(n.op == "load" and n.deps & INDICES for n in topological([program.body])):
        return None
    try:
        kept, dropped = (tuple(_truth(program.body, wanted)) for wanted in (True, False))
    except (_NoZoneError, NoFormulaError):
        return None
    return OrderedZones(kept, dropped) if len(kept) + len(dropped) <= MOST_ZONES else None


class _NoZoneError(Exception):
    """Caught here: the mask has no ordered zones."""


Zones = list[OrderedZone]


def _truth(node: Expr, wanted: bool) -> Zones:
    """Where a truth value is as wanted."""
    op, args = node.op, node.args
    if not node.deps & INDICES:
        return [OrderedZone((), (node if wanted else make("not", node),))]
    found = joined(node, wanted, _truth, _both, _either)
    if found is not None:
        return found
    if op in ("le", "lt", "eq", "ne") and args[0].dtype == torch.int64:
        return _comparison(op, wanted, linear(args[0]) - linear(args[1]))
    raise _NoZoneError


def _comparison(op: str, wanted: bool, apart: Linear) -> Zones:
    """Where a difference compares with 0 as wanted."""
    if op in ("eq", "ne"):
        is_equal = (op == "eq") == wanted
        below, above = (_at_most_zero(x, not is_equal) for x in (apart, apart * -1))
        return _both(below, above) if is_equal else _either(below, above)
    return _at_most_zero(apart if wanted else apart * -1, (op == "lt") == wanted)


def _both(a: Zones, b: Zones) -> Zones:
    return _few([OrderedZone(x.conditions + y.conditions, x.where + y.where) for x in a for y in b])


def _either(a: Zones, b: Zones) -> Zones:
    return _few([*a, *b])


def _few(zones: Zones) -> Zones:
    zones = [OrderedZone(tuple(dict.fromkeys(z.conditions)), tuple(dict.fromkeys(z.where))) for z in zones]
    zones = list(dict.fromkeys(zones))
    if len(zones) > MOST_ZONES:
        raise _NoZoneError
    return zones


def _at_most_zero(total: Linear, strict: bool) -> Zones:
    """Where a sum is at most 0, or less."""
    other = [e for e in total.terms if not rises(e)]
    if other:
        return _split(total, other[0], strict)
    query, key, rest = ({e: n for e, n in total.terms.items() if e.deps & INDICES == d} for d in (DEP_Q, DEP_KV, 0))
    number = Linear(rest, total.number)
    if not query and not key:
        return [OrderedZone((), (make("lt" if strict else "le", number.expression(), 0),))]
    is_lower = all(n > 0 for n in query.values()) and all(n < 0 for n in key.values())
    if not is_lower and not (all(n < 0 for n in query.values()) and all(n > 0 for n in key.values())):
        raise _NoZoneError
    sign = 1 if is_lower else -1
    queries, keys = Linear(query) * sign, Linear(key) * -sign
    if key:  # what has no index goes to the queries, so that keys may be kv_idx itself
        queries = queries + number * sign
    else:
        keys = number * -sign
    if strict and keys.terms == {KEY: 1}:
        queries, strict = queries + sign, False
    return [OrderedZone((_condition(queries.expression(), keys.expression(), is_lower, strict),), ())]


def _condition(query: Expr, key: Expr, is_lower: bool, is_strict: bool) -> Condition:
    return Condition(query, key, is_lower, is_strict, None if is_strict else _offset(key, query))


def _split(total: Linear, term: Expr, strict: bool) -> Zones:
    """A sum with a distance, a minimum or a maximum is one of several sums, or all of them."""
    if term.op not in ("abs", "minimum", "maximum"):
        raise _NoZoneError
    times, parts = total.terms[term], [linear(a) for a in term.args]
    parts = [*parts, parts[0] * -1] if term.op == "abs" else parts
    rest = Linear({e: n for e, n in total.terms.items() if e is not term}, total.number)
    found = [_at_most_zero(rest + part * times, strict) for part in parts]
    return _both(*found) if (term.op != "minimum") == (times > 0) else _either(*found)


@lru_cache(maxsize=4096)
def rises(e: Expr) -> bool:
    """Whether an expression of at most one index never falls as that grows, if captured tensors do not fall along their last
    dimension, and numbers that it divides by are positive."""
    if e.deps & INDICES == INDICES or e.dtype != torch.int64:
        return False
    if not e.deps & INDICES or e.op == "var":
        return True
    if e.op == "load":
        return not any(a.deps & INDICES for a in e.args[:-1]) and rises(e.args[-1])
    if e.op in ("add", "minimum", "maximum"):
        return all(map(rises, e.args))
    if e.op == "sub":
        return rises(e.args[0]) and not e.args[1].deps & INDICES
    return e.op == "floordiv" and rises(e.args[0]) and _is_divisor(e.args[1])


def _is_divisor(e: Expr) -> bool:
    return e.op == "num" or (e.op == "const" and e.attr > 0)


def _offset(key: Expr, query: Expr) -> Expr | None:
    """What must be added to q_idx so that `key` of the sum is `query`, if that has no index."""
    if key is KEY:
        apart = linear(query) - Linear({QUERY: 1})
        return None if any(e.deps & DEP_Q for e in apart.terms) else apart.expression()
    if (key.op, key.attr, len(key.args)) != (query.op, query.attr, len(query.args)):
        return None
    found = {_offset(k, q) for k, q in zip(key.args, query.args, strict=True) if k is not q}
    return found.pop() if len(found) == 1 else None


__all__ = ["Condition", "OrderedZone", "OrderedZones", "ordered_zones"]
