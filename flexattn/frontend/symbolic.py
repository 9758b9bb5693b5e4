"""Programs as sympy expressions, for people: the formula of a mod in a notebook.

Reads a traced program; makes a sympy expression or LaTeX. The one idea: each row of the op table has one mathematical meaning,
so a fold over the program is the translation; casts that change no value vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexattn.errors import UnsupportedError
from flexattn.frontend.expr import Expr, fold
from flexattn.frontend.program import Program


def to_sympy(program: Program, *, captures: Sequence[str] = (), numbers: Sequence[str] = ()) -> Any:
    """The program's body as a sympy expression.

    Args:
        program: a traced score mod or mask.
        captures: names of captured tensors; by default cap0, cap1, ...
        numbers: names of number arguments; by default num0, num1, ...

    Returns:
        A sympy expression: a truth value for a mask, a number for a score.

    Raises:
        UnsupportedError: an operation has no translation.

    Example:
        >>> to_sympy(trace(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, "mask").program)
        kv_idx <= q_idx
    """
    return _expression(program.body, captures, numbers)


def _expression(body: Expr, captures: Sequence[str] = (), numbers: Sequence[str] = ()) -> Any:
    import sympy

    table = meanings(sympy)

    def visit(node: Expr, args: list[Any]) -> Any:
        if node.op == "var":
            kind = "real" if node.attr == "score" else "integer"
            return sympy.Symbol(str(node.attr), **{kind: True})
        if node.op == "const":
            return _constant(sympy, node.attr)
        if node.op == "num":
            return _named(sympy, numbers, node)
        if node.op == "load":
            return _load(sympy, captures, node, args)
        if node.op == "cast":
            return _cast(sympy, node, args[0])
        if node.op == "where" and node.dtype == torch.bool:
            return sympy.ITE(*args)
        if node.args[0].dtype == torch.bool and node.op in ON_TRUTH:
            return ON_TRUTH[node.op](sympy, *args)
        if node.op not in table:
            hint = "printing the program, which shows every operation"
            raise UnsupportedError(f"`{node.op}` has no formula", given="an operation beyond arithmetic", hint=hint)
        return table[node.op](*args)

    return fold([body], visit)[0]


def to_latex(program: Program, *, captures: Sequence[str] = (), numbers: Sequence[str] = ()) -> str:
    """The program's formula in LaTeX, without dollar signs; a notebook shows it for a Program.

    Args:
        program, captures, numbers: as in `to_sympy`.

    Returns:
        LaTeX source.

    Raises:
        UnsupportedError: an operation has no translation.

    Example:
        >>> print(to_latex(trace(lambda b, h, q_idx, kv_idx: kv_idx <= q_idx, "mask").program))
        kv_{idx} \\leq q_{idx}
    """
    return expression_latex(program.body, captures, numbers)


def expression_latex(body: Expr, captures: Sequence[str] = (), numbers: Sequence[str] = ()) -> str:
    """An expression in LaTeX, as `to_latex` writes a program."""
    import sympy

    return str(sympy.latex(_expression(body, captures, numbers), mul_symbol="dot"))


def _named(sympy: Any, names: Sequence[str], node: Expr) -> Any:
    slot = int(node.attr)
    name = names[slot] if slot < len(names) else f"num{slot}"
    return sympy.Symbol(name, integer=True) if node.dtype == torch.int64 else sympy.Symbol(name, real=True)


def _constant(sympy: Any, value: Any) -> Any:
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return sympy.oo if value > 0 else -sympy.oo
    if isinstance(value, float) and value == int(value):
        return sympy.Integer(int(value))
    return sympy.sympify(value)


def _load(sympy: Any, names: Sequence[str], node: Expr, args: list[Any]) -> Any:
    """A table entry; a truth table's as the statement that the entry is one."""
    slot = node.attr[0]
    name = names[slot] if slot < len(names) else f"cap{slot}"
    value = sympy.IndexedBase(name)[tuple(args)] if args else sympy.Symbol(name, real=True)
    return sympy.Eq(value, 1, evaluate=False) if node.dtype == torch.bool else value


def _cast(sympy: Any, node: Expr, value: Any) -> Any:
    old, new = node.args[0].dtype, node.dtype
    if old == torch.bool:
        return sympy.Piecewise((1, value), (0, True))
    if new == torch.bool:
        return sympy.Ne(value, 0)
    if new == torch.int64 and old.is_floating_point:
        return sympy.Function("trunc")(value)
    return value


# and, or, ... of truth values; the table below has them on integers
ON_TRUTH: dict[str, Callable[..., Any]] = {
    "and": lambda sympy, a, b: sympy.And(a, b, evaluate=False),
    "or": lambda sympy, a, b: sympy.Or(a, b, evaluate=False),
    "xor": lambda sympy, a, b: sympy.Xor(a, b, evaluate=False),
    "not": lambda sympy, a: sympy.Not(a, evaluate=False),
    "eq": lambda sympy, a, b: sympy.Equivalent(a, b),
    "ne": lambda sympy, a, b: sympy.Xor(a, b, evaluate=False),
    "lt": lambda sympy, a, b: sympy.And(sympy.Not(a), b),
    "le": lambda sympy, a, b: sympy.Or(sympy.Not(a), b),
}


def meanings(sympy: Any) -> dict[str, Callable[..., Any]]:
    """Operation -> its meaning."""
    named = {n: sympy.Function(n) for n in ("trunc", "round", "isnan", "isinf", "bitand", "bitor", "bitxor", "bitnot")}
    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "truediv": lambda a, b: a / b,
        "floordiv": lambda a, b: sympy.floor(a / b),
        "mod": sympy.Mod,
        "pow": lambda a, b: a**b,
        "neg": lambda a: -a,
        "abs": sympy.Abs,
        "sign": sympy.sign,
        "minimum": sympy.Min,
        "maximum": sympy.Max,
        "lt": sympy.Lt,
        "le": sympy.Le,
        "eq": sympy.Eq,
        "ne": sympy.Ne,
        "and": named["bitand"],
        "or": named["bitor"],
        "xor": named["bitxor"],
        "not": named["bitnot"],
        "lshift": lambda a, b: a * 2**b,
        "rshift": lambda a, b: sympy.floor(a / 2**b),
        "where": lambda c, a, b: sympy.Piecewise((a, c), (b, True)),
        "exp": sympy.exp,
        "exp2": lambda a: sympy.Integer(2) ** a,
        "expm1": lambda a: sympy.exp(a) - 1,
        "log": sympy.log,
        "log2": lambda a: sympy.log(a) / sympy.log(2),
        "log1p": lambda a: sympy.log(a + 1),
        "sqrt": sympy.sqrt,
        "rsqrt": lambda a: 1 / sympy.sqrt(a),
        "tanh": sympy.tanh,
        "sigmoid": lambda a: 1 / (1 + sympy.exp(-a)),
        "sin": sympy.sin,
        "cos": sympy.cos,
        "erf": sympy.erf,
        "floor": sympy.floor,
        "ceil": sympy.ceiling,
        "round": named["round"],
        "trunc": named["trunc"],
        "isnan": named["isnan"],
        "isinf": named["isinf"],
        "detach": lambda a: a,
    }
