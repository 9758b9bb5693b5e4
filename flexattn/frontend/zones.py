"""Masks as zones: bounds on q_idx, on kv_idx and on their difference, from which the tiles of any row follow by formula.

Reads a mask program; makes the zones that it keeps and those that it drops, as expressions of b, h and captured values, so that one
kernel serves every number and length. The one idea: over a row of tiles the keys of a zone are one run, known exactly, and to
have the dropped pairs as zones too avoids the hard question whether several runs cover a tile together.
"""

from __future__ import annotations

import functools
import operator
from functools import lru_cache
from typing import NamedTuple

import torch

from flexattn.frontend.closed_form import KEY, KeyRun, Linear, key_runs, linear
from flexattn.frontend.expr import DEP_KV, DEP_Q, Expr, const, fold, make, rebuild, var
from flexattn.frontend.interval import may_wrap
from flexattn.frontend.program import Program
from flexattn.frontend.simplify import simplify

MOST_ZONES = 12  # of a mask, kept and dropped; more are slower than a search
FAR = 1 << 40  # beyond every index and every difference of two: a bound that there is not
LARGEST = 1 << 59  # of the numbers that a bound is a sum of
QUERY = var("q_idx")


class Zone(NamedTuple):
    """The pairs with `q_least <= q_idx <= q_most`, `kv_least <= kv_idx <= kv_most` and `apart_least <= kv_idx - q_idx <=
    apart_most`: int64 expressions without q_idx and kv_idx."""

    q_least: Expr
    q_most: Expr
    kv_least: Expr
    kv_most: Expr
    apart_least: Expr
    apart_most: Expr


class Zones(NamedTuple):
    """A mask keeps the union of `kept` and drops that of `dropped`, which are each other's complement."""

    kept: tuple[Zone, ...]
    dropped: tuple[Zone, ...]


@lru_cache(maxsize=1024)
def zones(program: Program) -> Zones | None:
    """The zones of a mask program.

    Args:
        program: a mask; whether its zones hold for the numbers of a call `hold_for` says.

    Returns:
        Zones; None where the mask is no union of a few: `%`, tables read at q_idx or kv_idx, other factors than 1 and -1 of an index.

    Example:
        >>> causal = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").program
        >>> [str(zones(causal).kept[0].apart_most), str(zones(causal).dropped[0].apart_least)]
        ['Expr(0)', 'Expr(1)']

    Source: difference bounds (D. L. Dill, Timing Assumptions and Verification of Finite-State Concurrent Systems, 1989).
    """
    try:
        kept, dropped = (_of_runs(key_runs(program.body, wanted=wanted)) for wanted in (True, False))
    except _NoZoneError:
        return None
    return Zones(kept, dropped) if len(kept) + len(dropped) <= MOST_ZONES else None


def hold_for(program: Program, numbers: tuple[int | float, ...]) -> bool:
    """Whether a mask has zones and no integer of it, nor of theirs, may wrap around."""
    return _hold_for_sizes(program, tuple(map(_at_most, numbers)))


def _at_most(number: int | float) -> int:
    """The size class of a number, so that a new number is not a new question."""
    return next(
        (size for size in (1 << 24, 1 << 32, 1 << 44) if abs(number) <= size), LARGEST if abs(number) <= LARGEST else -1
    )


@lru_cache(maxsize=4096)
def _hold_for_sizes(program: Program, sizes: tuple[int, ...]) -> bool:
    found = zones(program)
    if found is None or -1 in sizes:
        return False
    bounds, clamped = {e for zone in (*found.kept, *found.dropped) for e in zone}, (LARGEST,) * len(program.captures)
    return not may_wrap(program.body, sizes) and not any(may_wrap(e, sizes, clamped) for e in bounds)


def most_spans(program: Program) -> int:
    """Of tiles of one kind in a row, for a mask that has zones: a span begins where a run begins or ends, or at the end's rest."""
    found = zones(program)
    assert found is not None
    return len(found.kept) + len(found.dropped) + 1


class _NoZoneError(Exception):
    """Caught here: the mask has no zones."""


def _of_runs(runs: tuple[KeyRun, ...] | None) -> tuple[Zone, ...]:
    if runs is None:
        raise _NoZoneError
    return tuple(zone for run in runs for zone in _of_run(run))


def _of_run(run: KeyRun) -> list[Zone]:
    """The zones of one run of keys: several where a condition on q_idx leaves several runs of queries."""
    alternatives = [KeyRun((), (), tuple(e for e in run.where if not e.deps & DEP_Q))]
    for condition in (e for e in run.where if e.deps & DEP_Q):
        queries = key_runs(_as_key(condition))
        if queries is None:
            raise _NoZoneError
        alternatives = [KeyRun(*map(operator.add, a, b)) for a in alternatives for b in queries]
        if len(alternatives) > MOST_ZONES:
            raise _NoZoneError
    return [_zone(run, queries) for queries in alternatives]


def _as_key(condition: Expr) -> Expr:
    """A condition on q_idx as one on kv_idx, for which `key_runs` can solve it."""
    return fold([condition], lambda node, args: KEY if node is QUERY else rebuild(node, args))[0]


def _zone(keys: KeyRun, queries: KeyRun) -> Zone:
    q_least, q_most = ([_alone(e) for e in part] for part in (queries.lower, queries.upper))
    ends: dict[str, list[Expr]] = {"kv_least": [], "kv_most": [], "apart_least": [], "apart_most": []}
    for kind, part in (("least", keys.lower), ("most", keys.upper)):
        for e in part:
            total = linear(e)
            times = total.terms.get(QUERY, 0)
            rest = Linear({term: n for term, n in total.terms.items() if term is not QUERY}, total.number)
            if times not in (0, 1):
                raise _NoZoneError
            ends[f"{'apart' if times else 'kv'}_{kind}"].append(_alone(rest.expression()))
    least = _one("maximum", q_least, -FAR)
    if queries.where:  # a zone that does not count has no query
        holds = functools.reduce(lambda a, b: make("and", a, b), queries.where)
        least = simplify(make("where", holds, least, const(FAR, torch.int64)))
    others = (
        _one("maximum" if k.endswith("least") else "minimum", e, -FAR if k.endswith("least") else FAR)
        for k, e in ends.items()
    )
    return Zone(least, _one("minimum", q_most, FAR), *others)


def _alone(e: Expr) -> Expr:
    """A bound that has no index; captured integers of 64 bits are brought to where a sum with them does not wrap around."""
    if e.deps & (DEP_Q | DEP_KV):
        raise _NoZoneError
    low, high = const(-LARGEST, torch.int64), const(LARGEST, torch.int64)

    def visit(node: Expr, args: list[Expr]) -> Expr:
        node = rebuild(node, args)
        is_long = node.op == "load" and node.attr[2] == "int64"
        return make("minimum", make("maximum", node, low), high) if is_long else node

    return fold([e], visit)[0]


def _one(op: str, bounds: list[Expr], far: int) -> Expr:
    found = list(dict.fromkeys(bounds))
    return simplify(functools.reduce(lambda a, b: make(op, a, b), found)) if found else const(far, torch.int64)


__all__ = ["FAR", "MOST_ZONES", "Zone", "Zones", "hold_for", "most_spans", "zones"]
