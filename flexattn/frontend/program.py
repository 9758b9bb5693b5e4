"""What tracing yields: a Program (structure, hashable) and a Binding (this call's tensors and numbers).

A program knows of its captures only data type and rank: sizes, strides and contents are the binding's, so they never build a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flexattn.frontend.expr import Expr, to_text
from flexattn.frontend.source import Source


class CaptureInfo(NamedTuple):
    """What a program knows of a captured tensor: never its size, strides or contents."""

    dtype: torch.dtype
    rank: int


class Program:
    """The structure of a mod: equal and hash-equal iff the same computation on the same kinds of captures and numbers.

    Args:
        kind: 'score' or 'mask'.
        body: the expression; its loads and numbers name their slots.
        captures: data type and rank of each captured tensor, in order of first use.
        numbers: 'int' or 'float' for each number argument, in order of first use.
        sources: user line of each node, where the trace was asked to remember them; not part of equality.
        name: of the function that was traced; not part of equality.
        where: file and line of that function, for messages; not part of equality.
        capture_names: what the function calls each captured tensor, '' where that is not known; not part of equality.

    Example:
        >>> first, second = (trace(mods.softcap(cap), "score").program for cap in (20.0, 30.0))
        >>> first == second, str(first)
        (True, 'num0*tanh(score/num0)')
    """

    __slots__ = ("kind", "body", "captures", "numbers", "sources", "name", "where", "capture_names", "_key", "_hash")

    def __init__(
        self,
        kind: str,
        body: Expr,
        captures: tuple[CaptureInfo, ...] = (),
        numbers: tuple[str, ...] = (),
        *,
        sources: Mapping[Expr, Source] | None = None,
        name: str = "mod",
        where: Source | None = None,
        capture_names: tuple[str, ...] = (),
    ) -> None:
        self.kind, self.body, self.captures, self.numbers = kind, body, captures, numbers
        self.sources, self.name, self.where, self.capture_names = sources or {}, name, where, capture_names
        self._key = (kind, body, captures, numbers)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def capture_name(self, slot: int) -> str:
        """A captured tensor in a message: "captured tensor `table`", or by its number where the function has no name for it."""
        name = self.capture_names[slot] if slot < len(self.capture_names) else ""
        return f"captured tensor `{name}`" if name else f"captured tensor {slot}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Without its hash, as those of expressions belong to a process, and without its user lines."""
        return _program, (self.kind, self.body, self.captures, self.numbers, self.name, self.where)

    def __str__(self) -> str:
        return to_text(self.body)

    def __repr__(self) -> str:
        return f"Program({self.kind} {self.name}: {self})"

    def _repr_latex_(self) -> str:
        """The formula, which a notebook shows; captured tensors and numbers have the names that str() and explain() give them."""
        from flexattn.frontend.symbolic import to_latex

        return f"${to_latex(self)}$"


def _program(kind: str, body: Expr, captures: Any, numbers: Any, name: str, where: Source | None) -> Program:
    return Program(kind, body, captures, numbers, name=name, where=where)


class Binding(NamedTuple):
    """One call's values: captured tensors and numbers, in order of first use."""

    captures: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]


class Traced(NamedTuple):
    """A program and what it is bound to."""

    program: Program
    binding: Binding
