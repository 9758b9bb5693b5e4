"""The keys of each query by formula: a mask as runs `lower <= kv_idx <= upper` whose ends are expressions of q_idx, b and h.

Reads a traced mask; makes a `ClosedForm`, or None where there is no such formula. The one idea: a comparison of whole numbers in
which kv_idx occurs once can be solved for kv_idx, and `and`, `or`, `not` of runs are runs, so a row costs a handful of numbers
and the mask is never looked at pair by pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import DEP_KV, Expr, const, fold, make, rebuild, to_text, var
from flexattn.frontend.interval import Tables
from flexattn.frontend.program import Traced
from flexattn.frontend.simplify import simplify
from flexattn.frontend.spans import Grid

MOST_RUNS = 32  # of a row; a formula of more says nothing to anybody
ROWS_AT_ONCE = 1 << 16
LARGEST = 1 << 62  # a number of a formula: sums of it and positions do not wrap
MOST_ENDS = 1 << 28  # runs of all rows: beyond, counting takes seconds
KEY = var("kv_idx")


class KeyRun(NamedTuple):
    """One run of keys: `max(lower) <= kv_idx <= min(upper)` in the rows where all of `where` hold; expressions without kv_idx."""

    lower: tuple[Expr, ...]
    upper: tuple[Expr, ...]
    where: tuple[Expr, ...]


@dataclass(frozen=True)
class ClosedForm:
    """The kept keys of a query: those in at least one of some runs.

    str() is the formula as text, `latex()` as LaTeX, both with the values of captured numbers.
    """

    runs: tuple[KeyRun, ...]
    traced: Traced

    def __str__(self) -> str:
        return " or ".join(map(_run_text, self.runs)) or "no key"

    def latex(self) -> str:
        """The formula in LaTeX, without dollar signs."""
        from flexattn.frontend.symbolic import expression_latex

        alternatives = [_run_latex(run, expression_latex) for run in self.runs]
        return r" \;\lor\; ".join(alternatives) or r"\text{no key}"

    def ends(self, grid: Grid, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(start, stop), half-open within the keys and empty where a run is: int64 [runs, groups, rows]."""
        shape = (grid.groups, len(rows))
        start, stop = (torch.zeros((len(self.runs), *shape), dtype=torch.int64, device=rows.device) for _ in range(2))
        for n, run in enumerate(self.runs):
            lower, upper, where = ([self._value(e, grid, rows).expand(shape) for e in part] for part in run)
            stop[n] = grid.kv_len
            for least in lower:
                torch.maximum(start[n], least, out=start[n])
            for most in upper:
                torch.minimum(stop[n], most + 1, out=stop[n])
            for holds in where:
                stop[n] *= holds
        return start, torch.maximum(start, stop)

    def _value(self, e: Expr, grid: Grid, rows: Tensor) -> Tensor:
        """An end, or a condition, of each group and row."""
        group = torch.arange(grid.groups, device=rows.device)[:, None]
        b, h = group // max(grid.heads, 1), group % max(grid.heads, 1)
        return evaluate(*self.traced, b=b, h=h, q_idx=rows[None], kv_idx=rows[:1], body=e).to(rows.device)

    def count(self, grid: Grid, device: torch.device) -> int | None:
        """Kept pairs of all groups, exactly, in O(rows); None where the rows of all groups are too many."""
        if grid.groups * grid.q_len * len(self.runs) > MOST_ENDS:
            return None
        total, step = 0, max(1, ROWS_AT_ONCE // max(1, grid.groups))
        for first in range(0, grid.q_len if grid.groups and self.runs else 0, step):
            rows = torch.arange(first, min(first + step, grid.q_len), device=device)
            start, stop = self.ends(grid, rows)
            total += int(_union(start, stop).sum())
        return total


def _union(start: Tensor, stop: Tensor) -> Tensor:
    """The length of the union of runs [n, ...]: starts and stops sort apart, and a gap is where the next start is past a stop."""
    starts, stops = _sorted(list(start)), _sorted(list(stop))
    total = stops[-1] - starts[0]
    for following, end in zip(starts[1:], stops[:-1], strict=True):
        total = total - (following - end).clamp(min=0)
    return total


def _sorted(values: list[Tensor]) -> list[Tensor]:
    """Elementwise; a handful of minima and maxima is many times faster than sorting rows of a handful."""
    for last in range(len(values) - 1, 0, -1):
        for n in range(last):
            values[n], values[n + 1] = torch.minimum(*values[n : n + 2]), torch.maximum(*values[n : n + 2])
    return values


def closed_form(traced: Traced) -> ClosedForm | None:
    """The keys of each query by formula.

    Args:
        traced: a mask.

    Returns:
        Its runs; None if kv_idx occurs where no comparison can be solved for it (`%`, captured tensors read at kv_idx, a
        product with q_idx), or if integers might wrap around.

    Example:
        >>> causal_window = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 1024)
        >>> print(closed_form(trace(causal_window, "mask")))
        q_idx - 1023 <= kv_idx <= q_idx
    """
    tables = Tables(traced.binding)
    if tables.may_wrap(traced.program.body):
        return None
    runs = key_runs(_with_numbers(traced))
    if runs is None or any(tables.may_wrap(e) for run in runs for part in run for e in part):
        return None
    return ClosedForm(runs, traced)


def key_runs(body: Expr, *, wanted: bool = True) -> tuple[KeyRun, ...] | None:
    """The keys for which a mask's body is as wanted, if integers do not wrap around; None where there is no formula."""
    try:
        return _tidied(_truth(body, wanted))
    except NoFormulaError:
        return None


def _with_numbers(traced: Traced) -> Expr:
    """The program with its numbers written in."""

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "num":
            return const(traced.binding.numbers[node.attr], node.dtype)
        return rebuild(node, args)

    return simplify(fold([traced.program.body], visit)[0])


class NoFormulaError(Exception):
    """Caught here: the mask has no closed form."""


# ---------------------------------------------------------------------------------------------- truth values as runs
T = TypeVar("T")
Join = Callable[[T, T], T]
Runs = list[KeyRun]
EVERY: Runs = [KeyRun((), (), ())]


def joined(node: Expr, wanted: bool, truth: Callable[[Expr, bool], T], both: Join[T], either: Join[T]) -> T | None:
    """Where a truth value is as wanted, if it is one made of others.

    Args:
        node: bool.
        truth: the same of any truth value.
        both, either: where two hold, and where one does.

    Returns:
        What `both` and `either` make; None of a comparison, a read and the like.

    Example:
        >>> both = make("and", make("lt", KEY, 3), make("lt", KEY, 5))
        >>> joined(both, False, lambda node, wanted: str(wanted), "{} and {}".format, "{} or {}".format)
        'False or False'
    """
    op, args = node.op, node.args
    if op == "not":
        return truth(args[0], not wanted)
    if op in ("and", "or"):
        parts = [truth(a, wanted) for a in args]
        return both(*parts) if (op == "and") == wanted else either(*parts)
    if op == "where":
        yes, no = (both(truth(args[0], t), truth(a, wanted)) for t, a in ((True, args[1]), (False, args[2])))
        return either(yes, no)
    if op in ("xor", "eq", "ne") and args[0].dtype == torch.bool:
        differ = (op != "eq") == wanted
        return either(*(both(truth(args[0], t), truth(args[1], t != differ)) for t in (True, False)))
    return None


def _truth(node: Expr, wanted: bool) -> Runs:
    """Where a truth value is as wanted."""
    op, args = node.op, node.args
    found = joined(node, wanted, _truth, _both, _either)
    if found is not None:
        return found
    if not node.deps & DEP_KV:
        return [KeyRun((), (), (node if wanted else _opposite(node),))]
    if op in ("le", "lt", "eq", "ne") and args[0].dtype == torch.int64:
        return _comparison(op, wanted, linear(args[0]), linear(args[1]))
    raise NoFormulaError


def _opposite(node: Expr) -> Expr:
    """Not the node, as a comparison where it is one of whole numbers (of floats, NaN is neither less nor not less)."""
    if node.op in ("le", "lt", "eq", "ne") and not node.args[0].dtype.is_floating_point:
        a, b = node.args
        return make(
            {"le": "lt", "lt": "le", "eq": "ne", "ne": "eq"}[node.op], *((b, a) if node.op[0] == "l" else (a, b))
        )
    return simplify(make("not", node))


def _comparison(op: str, wanted: bool, a: Linear, b: Linear) -> Runs:
    if not wanted:
        op, a, b = {"le": ("lt", b, a), "lt": ("le", b, a), "eq": ("ne", a, b), "ne": ("eq", a, b)}[op]
    if op == "eq":
        return _both(_at_most_zero(a - b), _at_most_zero(b - a))
    if op == "ne":
        return _either(_at_most_zero(a - b + 1), _at_most_zero(b - a + 1))
    return _at_most_zero(a - b + (op == "lt"))


def _both(a: Runs, b: Runs) -> Runs:
    return _few([KeyRun(*(x + y for x, y in zip(one, two, strict=True))) for one in a for two in b])


def _either(a: Runs, b: Runs) -> Runs:
    return _few([*a, *b])


def _few(runs: Runs) -> Runs:
    runs = list(dict.fromkeys(KeyRun(*(tuple(dict.fromkeys(part)) for part in run)) for run in runs))
    if len(runs) > MOST_RUNS:
        raise NoFormulaError
    return runs


# ---------------------------------------------------------------------------------------------- whole numbers
class Linear:
    """A sum of whole multiples of expressions, and a number."""

    def __init__(self, terms: dict[Expr, int], number: int = 0) -> None:
        self.terms, self.number = {e: n for e, n in terms.items() if n}, number
        if any(abs(n) > LARGEST for n in (number, *terms.values())):
            raise NoFormulaError

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.number + other)
        terms = {e: self.terms.get(e, 0) + other.terms.get(e, 0) for e in (*self.terms, *other.terms)}
        return Linear(terms, self.number + other.number)

    def __mul__(self, factor: int) -> Linear:
        return Linear({e: factor * n for e, n in self.terms.items()}, factor * self.number)

    def __sub__(self, other: Linear) -> Linear:
        return self + other * -1

    def expression(self) -> Expr:
        """The sum as it would be written: what is added first."""
        total: Expr | None = None
        for e, n in sorted(self.terms.items(), key=lambda item: item[1] < 0):
            term = e if abs(n) == 1 else make("mul", e, abs(n))
            if total is None:
                total = term if n > 0 else make("neg", term)
            else:
                total = make("add" if n > 0 else "sub", total, term)
        if total is None:
            return const(self.number, torch.int64)
        if not self.number:
            return total
        return make("add" if self.number > 0 else "sub", total, abs(self.number))


def linear(node: Expr) -> Linear:
    """An int64 expression as a sum; what is no sum, difference or multiple is a term of its own."""
    op, args = node.op, node.args
    if op == "const":
        return Linear({}, int(node.attr))
    if op in ("add", "sub"):
        a, b = map(linear, args)
        return a + b if op == "add" else a - b
    if op == "neg":
        return linear(args[0]) * -1
    if op == "mul" and "const" in (args[0].op, args[1].op):
        factor, other = args if args[0].op == "const" else args[::-1]
        return linear(other) * int(factor.attr)
    return Linear({node: 1})


def _at_most_zero(total: Linear) -> Runs:
    """Where a sum is at most 0: solved for the one term with kv_idx."""
    keyed = [(e, n) for e, n in total.terms.items() if e.deps & DEP_KV]
    if not keyed:
        return _condition(total)
    if len(keyed) > 1:
        raise NoFormulaError
    (term, factor), rest = (
        keyed[0],
        Linear({e: n for e, n in total.terms.items() if e is not keyed[0][0]}, total.number),
    )
    if factor > 0:
        return _bounded(term, upper=_floor(rest * -1, factor))
    return _bounded(term, lower=_floor(rest * -1, -factor) * -1)  # at least the ceiling


def _condition(total: Linear) -> Runs:
    """A comparison without kv_idx, which holds for a whole row or not at all."""
    left = Linear({e: n for e, n in total.terms.items() if n > 0})
    right = Linear({e: -n for e, n in total.terms.items() if n < 0})
    left, right = (left, right + -total.number) if left.terms else (left + total.number, right)
    where = make("le", left.expression(), right.expression())
    if where.op == "const":
        return list(EVERY) if where.attr else []
    return [KeyRun((), (), (where,))]


def _floor(total: Linear, by: int) -> Linear:
    """A sum divided and rounded down."""
    if all(n % by == 0 for n in total.terms.values()):
        return Linear({e: n // by for e, n in total.terms.items()}, total.number // by)
    return linear(make("floordiv", total.expression(), by))


def _bounded(term: Expr, *, lower: Linear | None = None, upper: Linear | None = None) -> Runs:
    """Where a term with kv_idx is at least `lower`, or at most `upper`."""
    if term is KEY:
        if upper is not None:
            return [KeyRun((), (upper.expression(),), ())]
        return [KeyRun((_of(lower).expression(),), (), ())]
    if term.op == "floordiv" and term.args[1].op == "const" and term.args[1].attr > 0:
        inside, by = linear(term.args[0]), int(term.args[1].attr)
        if upper is not None:
            return _at_most_zero(inside - (upper * by + (by - 1)))
        return _at_most_zero(_of(lower) * by - inside)
    if term.op in ("abs", "minimum", "maximum"):
        parts = [linear(a) for a in term.args]
        parts = [*parts, parts[0] * -1] if term.op == "abs" else parts
        found = [_at_most_zero(p - upper if upper is not None else _of(lower) - p) for p in parts]
        all_of = (term.op == "minimum") == (upper is None)
        return _both(*found) if all_of else _either(*found)
    raise NoFormulaError


def _of(bound: Linear | None) -> Linear:
    assert bound is not None
    return bound


# ---------------------------------------------------------------------------------------------- tidy, and for people
def _tidied(runs: Runs) -> tuple[KeyRun, ...]:
    """Without what says nothing: weaker constants, runs within others, runs that no row has."""
    kept: Runs = []
    for run in runs:
        where = tuple(e for e in run.where if e.op != "const")
        if all(e.attr for e in run.where if e.op == "const"):
            kept.append(KeyRun(_strongest(run.lower, lower=True), _strongest(run.upper, lower=False), where))
    found: Runs = []
    for run in kept:
        if not any(_covers(a, run) for a in found):
            found = [*(b for b in found if not _covers(run, b)), run]
    return tuple(found)


def _covers(a: KeyRun, b: KeyRun) -> bool:
    """Whether run a has none but conditions of run b, and so keeps all that b keeps."""
    return all(set(x) <= set(y) for x, y in zip(a, b, strict=True))


def _strongest(bounds: tuple[Expr, ...], *, lower: bool) -> tuple[Expr, ...]:
    """Bounds with one number among them at most; a key is at least 0 anyway."""
    numbers = [int(e.attr) for e in bounds if e.op == "const"]
    rest = tuple(e for e in bounds if e.op != "const")
    if not numbers:
        return rest
    best = max(numbers) if lower else min(numbers)
    return rest if lower and best <= 0 else (const(best, torch.int64), *rest)


def _joined(parts: Iterable[str], name: str) -> str:
    found = list(parts)
    return found[0] if len(found) == 1 else f"{name}({', '.join(found)})"


def _run_text(run: KeyRun) -> str:
    text = "kv_idx"
    if run.lower:
        text = f"{_joined(map(to_text, run.lower), 'max')} <= {text}"
    if run.upper:
        text += f" <= {_joined(map(to_text, run.upper), 'min')}"
    if not run.lower and not run.upper:
        text = "any kv_idx"
    return text + "".join(f" {'and' if n else 'where'} {to_text(e)}" for n, e in enumerate(run.where))


def _run_latex(run: KeyRun, latex: Callable[[Expr], str]) -> str:
    text = "kv_{idx}" if run.lower or run.upper else r"\text{any } kv_{idx}"
    if run.lower:
        text = _joined(map(latex, run.lower), r"\max") + rf" \leq {text}"
    if run.upper:
        text += r" \leq " + _joined(map(latex, run.upper), r"\min")
    return text + "".join((r" \text{ and } " if n else r" \text{ where } ") + latex(e) for n, e in enumerate(run.where))


__all__ = ["ClosedForm", "KeyRun", "Linear", "closed_form", "joined", "key_runs", "linear"]
