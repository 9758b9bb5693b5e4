"""Expressions of whole numbers as a tape of NumPy steps, for one row of a mask at a time.

Reads expressions, their binding and the values of some variables; makes a `Tape` that is called with the others. The one idea: what
does not depend on the row is computed once, when the tape is made, and a step on a thousand numbers then takes a
microsecond, where a pass over the op table with torch takes several for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flexattn.frontend.expr import Expr, topological
from flexattn.frontend.interval import Tables

Step = Callable[..., Any]


def _floor_div(a: Any, b: Any) -> Any:
    """Floor division, 0 by 0."""
    return np.where(b == 0, 0, np.floor_divide(a, np.where(b == 0, 1, b)))


def _floor_mod(a: Any, b: Any) -> Any:
    return np.where(b == 0, 0, np.remainder(a, np.where(b == 0, 1, b)))


def _mod_by(a: Any, b: Any) -> Any:
    """Floor modulo of a positive number, by way of the division, which NumPy has vectorised (4 times as fast)."""
    return a - np.floor_divide(a, b) * b


STEPS: dict[str, Step] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "sign": np.sign,
    "minimum": np.minimum, "maximum": np.maximum, "lt": np.less, "le": np.less_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "where": np.where, "floordiv": _floor_div, "mod": _floor_mod, "detach": lambda a: a,
}  # fmt: skip
_BY_CONSTANT: dict[str, Step] = {
    "floordiv": np.floor_divide, "mod": _mod_by, "lshift": np.left_shift, "rshift": np.right_shift,
}  # fmt: skip
_LEAVES = ("var", "const", "num", "load", "size", "cast", "least", "greatest")


def has_steps(roots: Sequence[Expr]) -> bool:
    """Whether a tape can hold expressions: whole numbers and truth values only, no shift by what is not a constant."""
    return all(
        n.dtype in (torch.int64, torch.bool) and (n.op in STEPS or n.op in _LEAVES or _by_constant(n) is not None)
        for n in topological(list(roots))
    )


def _by_constant(node: Expr, numbers: Sequence[int | float] = ()) -> Step | None:
    """A step that needs no look at its second operand, a number from 1 to 63 (any positive one that divides)."""
    if node.op not in _BY_CONSTANT or node.args[1].op not in ("const", "num")[: 2 if numbers else 1]:
        return None
    by = node.args[1].attr if node.args[1].op == "const" else numbers[node.args[1].attr]
    return _BY_CONSTANT[node.op] if by >= 1 and ("shift" not in node.op or by < 64) else None


class Tape:
    """Values of expressions, step by step.

    Args:
        roots: what is asked for; `has_steps` holds.
        tables: ranges of captured tensors on the CPU, and their binding.
        known: variables that stay as they are.
    """

    def __init__(self, roots: Sequence[Expr], tables: Tables, known: Mapping[str, Any]) -> None:
        self._tables, self._registers = tables, []  # type: tuple[Tables, list[Any]]
        self._variables: list[tuple[str, int]] = []
        self._steps: list[tuple[int, Step, tuple[int, ...]]] = []
        place: dict[Expr, int] = {}
        waiting: set[int] = set()
        for node in topological(list(roots)):
            at, args = len(self._registers), tuple(place[a] for a in node.args)
            place[node] = at
            self._registers.append(None)
            if node.op == "var" and node.attr not in known:
                self._variables.append((str(node.attr), at))
                waiting.add(at)
                continue
            step = _always(known[str(node.attr)]) if node.op == "var" else self._step(node)
            if waiting.isdisjoint(args):
                self._registers[at] = step(*(self._registers[a] for a in args))
            else:
                waiting.add(at)
                self._steps.append((at, step, args))
        self._roots = [place[r] for r in roots]

    def __call__(self, **variables: Any) -> list[Any]:
        """Arrays or NumPy scalars, one for each root, in the common shape of what they depend on."""
        values = self._registers.copy()
        for name, at in self._variables:
            values[at] = variables[name]
        for at, step, args in self._steps:
            values[at] = step(*[values[a] for a in args])
        return [values[r] for r in self._roots]

    def _step(self, node: Expr) -> Step:
        numpy_type: Any = np.bool_ if node.dtype == torch.bool else np.int64
        if node.op in ("const", "num"):
            value = node.attr if node.op == "const" else self._tables.binding.numbers[node.attr]
            return _always(np.array(value, numpy_type))  # which ufuncs take faster than a scalar
        if node.op == "cast":
            return lambda x: x.astype(numpy_type)
        if node.op == "load":
            return _reader(self._tables.binding.captures[node.attr[0]], numpy_type)
        if node.op == "size":
            return _always(np.int64(self._tables.binding.captures[node.attr[0]].shape[node.attr[2]]))
        if node.op in ("least", "greatest"):
            return self._extreme(node)
        return _by_constant(node, self._tables.binding.numbers) or STEPS[node.op]

    def _extreme(self, node: Expr) -> Step:
        """The least or greatest element over ranges of flat positions."""
        table, end = self._tables[node.attr[0]], ("least", "greatest").index(node.op)

        def step(first: Any, last: Any, length: Any) -> Any:
            if not length:
                return np.zeros_like(first)
            ends = np.broadcast_arrays(np.atleast_1d(first), last)
            return table.range(*(torch.from_numpy(np.array(x)) for x in ends))[end].numpy()

        return step


def _always(value: Any) -> Step:
    return lambda: value


def _reader(tensor: torch.Tensor, numpy_type: Any) -> Step:
    """Reads at positions: a negative one counts from the end once, and outside there is 0."""
    data = tensor.detach()
    data = data.to(torch.int64) if data.dtype in (torch.uint16, torch.uint32, torch.uint64) else data
    values = data.numpy()

    def step(*index: Any) -> Any:
        if not index:
            return numpy_type(values[()])
        bad: Any = False
        where = []
        for size, i in zip(values.shape, index, strict=True):
            if i.min(initial=0) < 0 or i.max(initial=-1) >= size:
                i = np.where(i < 0, i + size, i)
                bad = bad | (i < 0) | (i >= size)
                i = np.clip(i, 0, max(size - 1, 0))
            where.append(i)
        if not values.size:
            return np.zeros(np.broadcast_shapes(*(i.shape for i in where)), numpy_type)
        found = values.take(where[0]) if len(where) == 1 else values[tuple(where)]
        found = found.astype(numpy_type)
        return found if bad is False else np.where(bad, numpy_type(0), found)

    return step


__all__ = ["STEPS", "Tape", "has_steps"]
