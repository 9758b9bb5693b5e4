"""Expressions: immutable, hash-consed trees of table rows over indices, numbers and captured tensors.

`make` is the only constructor: it types a node as torch would type the same operation on 0-d tensors and inserts casts, so
that every later pass sees operands of one data type. Equal structure is the same object: passes are memoised by identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from flexattn.errors import TraceError
from flexattn.frontend.ops import OPS

DEP_SCORE, DEP_B, DEP_H, DEP_Q, DEP_KV = 1, 2, 4, 8, 16  # which variables a node depends on
_VARIABLES = {
    "score": (torch.float32, DEP_SCORE),
    "b": (torch.int64, DEP_B),
    "h": (torch.int64, DEP_H),
    "q_idx": (torch.int64, DEP_Q),
    "kv_idx": (torch.int64, DEP_KV),
    "q_lo": (torch.int64, DEP_Q),
    "q_hi": (torch.int64, DEP_Q),
    "kv_lo": (torch.int64, DEP_KV),
    "kv_hi": (torch.int64, DEP_KV),
    "grad": (torch.float32, DEP_SCORE),
    "scale": (torch.float32, 0),
    "kv_len": (torch.int64, 0),
}
T = TypeVar("T")


class Expr:
    """One node. Identity is structural equality; never construct directly, use `make`, `var`, `const`, `num`, `load`."""

    __slots__ = ("op", "args", "attr", "dtype", "deps")
    op: str
    args: tuple[Expr, ...]
    attr: Any
    dtype: torch.dtype
    deps: int

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("expressions are immutable")

    def __reduce__(self) -> tuple[Any, ...]:
        return intern, (self.op, self.args, self.attr, self.dtype)

    def __repr__(self) -> str:
        return f"Expr({to_text(self)})"

    __add__ = lambda a, b: make("add", a, b)
    __radd__ = lambda a, b: make("add", b, a)
    __sub__ = lambda a, b: make("sub", a, b)
    __rsub__ = lambda a, b: make("sub", b, a)
    __mul__ = lambda a, b: make("mul", a, b)
    __rmul__ = lambda a, b: make("mul", b, a)
    __truediv__ = lambda a, b: make("truediv", a, b)
    __neg__ = lambda a: make("neg", a)


class NumberRef(NamedTuple):
    """A Python number that is an argument of the program: its slot and kind."""

    slot: int
    kind: str  # "int" or "float"


Operand = Expr | NumberRef | bool | int | float
_POOL: dict[tuple[Any, ...], Expr] = {}


def intern(op: str, args: tuple[Expr, ...], attr: Any, dtype: torch.dtype) -> Expr:
    """The one node of this structure; it must be typed already."""
    shown = attr if not isinstance(attr, float) else attr.hex()  # 0.0 and -0.0 differ, and every nan is the same
    key = (op, args, type(attr), shown, dtype)
    node = _POOL.get(key)
    if node is None:
        node = object.__new__(Expr)
        deps = _VARIABLES[attr][1] if op == "var" else 0
        for a in args:
            deps |= a.deps
        for name, value in (("op", op), ("args", args), ("attr", attr), ("dtype", dtype), ("deps", deps)):
            object.__setattr__(node, name, value)
        node = _POOL.setdefault(key, node)
    return node


def var(name: str, dtype: torch.dtype | None = None) -> Expr:
    """One of score, b, h, q_idx, kv_idx (in derivatives also grad, the upstream gradient; in bounds q_lo, q_hi, kv_lo and
    kv_hi, the ends of a box, both inclusive; over raw products scale, the softmax's; kv_len); scores may be float64."""
    return intern("var", (), name, dtype or _VARIABLES[name][0])


def const(value: bool | int | float, dtype: torch.dtype) -> Expr:
    """A constant of the program, stored as a value of `dtype`."""
    if dtype == torch.bool:
        value = bool(value)
    elif dtype == torch.int64:
        value = int(value)
    else:
        value = float(value)
    return intern("const", (), value, dtype)


def num(slot: int, dtype: torch.dtype) -> Expr:
    """A number argument, read as `dtype`."""
    return intern("num", (), slot, dtype)


def load(slot: int, storage: torch.dtype, index: Sequence[Expr]) -> Expr:
    """An element of captured tensor `slot`; every integer type is read as int64, so integer expressions never wrap early."""
    integral = not (storage.is_floating_point or storage == torch.bool)
    return intern("load", tuple(index), (slot, len(index), str(storage)[6:]), torch.int64 if integral else storage)


# ---------------------------------------------------------------- typing
def _category(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else 2 if dtype.is_floating_point else 1


def is_floating(dtype: torch.dtype) -> bool:
    """Whether values of this type are floats."""
    return _category(dtype) == 2


def _operand_type(x: Operand) -> tuple[torch.dtype | None, int]:
    """(dtype of a traced value or None for a Python number, category)."""
    if isinstance(x, Expr):
        return x.dtype, _category(x.dtype)
    if isinstance(x, NumberRef):
        return None, 1 if x.kind == "int" else 2
    return None, 0 if isinstance(x, bool) else 1 if isinstance(x, int) else 2


def promote(operands: Iterable[Operand]) -> torch.dtype:
    """The common data type, as torch promotes 0-d tensors among each other and Python numbers weakly."""
    strong: torch.dtype | None = None
    weak = 0
    for x in operands:
        dtype, category = _operand_type(x)
        if dtype is None:
            weak = max(weak, category)
        else:
            strong = dtype if strong is None else torch.promote_types(strong, dtype)
    if strong is None or _category(strong) < weak:
        return (torch.bool, torch.int64, torch.get_default_dtype())[weak]
    return strong


def convert(x: Operand, dtype: torch.dtype) -> Expr:
    """`x` as an expression of `dtype`."""
    if isinstance(x, NumberRef):
        if dtype == torch.bool:
            return make("ne", num(x.slot, torch.int64 if x.kind == "int" else torch.float32), 0)
        return num(x.slot, dtype)
    if not isinstance(x, Expr):
        return const(x, dtype)
    if x.dtype == dtype:
        return x
    if x.op == "const":
        return const(x.attr, dtype)
    if x.op == "num" and _category(dtype) == 2 and x.dtype == torch.int64:
        return num(x.attr, dtype)
    return intern("cast", (x,), None, dtype)


def make(op: str, *operands: Operand) -> Expr:
    """An operation of the table on traced values and Python numbers.

    Args:
        op: A name in OPS, or "gt" or "ge".
        operands: Expressions, number references or Python numbers; at least one is usually an expression.

    Returns:
        The typed, hash-consed node; constants are folded.

    Raises:
        TraceError: The operation is not defined for these types (as `-` of two truth values).

    Example:
        >>> to_text(make("sub", var("q_idx"), var("kv_idx")))
        'q_idx - kv_idx'
    """
    if op in ("gt", "ge"):
        return make("lt" if op == "gt" else "le", operands[1], operands[0])
    row = OPS[op]
    if row.domain == "where":
        condition = operands[0]
        dtype = promote(operands[1:])
        return _finish(
            op, (convert(condition, torch.bool), convert(operands[1], dtype), convert(operands[2], dtype)), dtype
        )
    dtype = promote(operands)
    kind = _category(dtype)
    if row.domain in ("round", "predicate") and kind != 2:
        return const(False, torch.bool) if row.domain == "predicate" else convert(operands[0], dtype)
    if row.domain == "float" and kind != 2:
        dtype = torch.get_default_dtype()
    if row.domain in ("logic", "int") and kind == 2:
        raise TraceError(
            f"`{op}` needs integers or truth values", given=dtype, hint="compare first, or cast with .to(torch.int64)"
        )
    if row.domain == "int" and kind == 0:
        dtype = torch.int64
    if row.domain == "arith" and kind == 0:
        if op in ("add", "mul", "minimum", "maximum"):  # torch: True + True is True
            return make("or" if op in ("add", "maximum") else "and", *operands)
        if op in ("sub", "neg"):
            raise TraceError(
                f"`{op}` is not defined for truth values", hint="use ~ or ^, or cast with .to(torch.int64)"
            )
        dtype = torch.int64
    result = torch.bool if row.domain in ("compare", "predicate") else dtype
    return _finish(op, tuple(convert(x, dtype) for x in operands), result)


def _finish(op: str, args: tuple[Expr, ...], dtype: torch.dtype) -> Expr:
    if op not in ("detach",) and all(a.op == "const" for a in args):
        folded = OPS[op].eval(*(torch.tensor(a.attr, dtype=a.dtype) for a in args))
        return const(folded.item(), dtype)
    return intern(op, args, None, dtype)


# ---------------------------------------------------------------- walking
def fold(roots: Sequence[Expr], visit: Callable[[Expr, list[T]], T]) -> list[T]:
    """Value of each root, computing every shared node once: visit(node, values of its arguments)."""
    done: dict[Expr, T] = {}
    for node in _order(*roots):
        done[node] = visit(node, [done[a] for a in node.args])
    return [done[r] for r in roots]


@lru_cache(maxsize=4096)
def _order(*roots: Expr) -> tuple[Expr, ...]:
    return tuple(topological(roots))


def topological(roots: Sequence[Expr]) -> list[Expr]:
    """Every node below `roots`, arguments before their users."""
    order: list[Expr] = []
    seen: set[Expr] = set()
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args) if a not in seen)
    return list(dict.fromkeys(order))


def rebuild(node: Expr, args: Sequence[Expr]) -> Expr:
    """The same node over other arguments (of the same types)."""
    if all(a is b for a, b in zip(node.args, args)):
        return node
    if node.op in ("load", "least", "greatest", "values"):
        return intern(node.op, tuple(args), node.attr, node.dtype)
    if node.op == "cast":
        return convert(args[0], node.dtype)
    return _finish(node.op, tuple(args), node.dtype)


# ---------------------------------------------------------------- printing
def to_text(root: Expr, captures: Sequence[str] = (), numbers: Sequence[str] = ()) -> str:
    """One line of math; captures and numbers may be given display names."""

    def visit(node: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
        if node.op == "var":
            return str(node.attr), 100
        if node.op == "const":
            return _number_text(node.attr), 100 if not str(node.attr).startswith("-") else 90
        if node.op == "num":
            slot = int(node.attr)
            return (numbers[slot] if slot < len(numbers) else f"num{slot}"), 100
        if node.op == "load":
            slot = node.attr[0]
            name = captures[slot] if slot < len(captures) else f"cap{slot}"
            return (f"{name}[{', '.join(a for a, _ in args)}]" if args else name), 100
        if node.op in ("least", "greatest", "values"):
            return f"{node.op} cap{node.attr[0]}[{args[0][0]} .. {args[1][0]}]", 100
        if node.op == "size":
            return f"size{node.attr[2]}(cap{node.attr[0]})", 100
        if node.op == "cast":
            inner = node.args[0].dtype
            if (
                _category(node.dtype) == 2
                and _category(inner) != 2
                or node.dtype == torch.int64
                and inner == torch.bool
            ):
                return args[0]  # an exact, unsurprising conversion needs no mark
            return f"{str(node.dtype)[6:]}({args[0][0]})", 100
        row = OPS[node.op]
        if row.precedence == 100:
            return row.text.format(*(a for a, _ in args)), 100
        shown = [
            text if rank > row.precedence or rank == row.precedence and i == 0 else f"({text})"
            for i, (text, rank) in enumerate(args)
        ]
        return row.text.format(*shown), row.precedence

    return fold([root], visit)[0][0]


def _number_text(value: object) -> str:
    if isinstance(value, float):
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return f"{value:.6g}"
    return str(value)
