"""Mods as text: one line a step, so that an operator of torch's graphs can carry a mod as an argument and any process read it.

Reads a Program, or what a recorder wrote; makes a mod that replays it when it is traced. The one idea: a line is a call that names
earlier values, and names nothing but those, literals, captured tensors (`c0`) and numbers (`n0`); so equal structure is equal text.

A line is either a row of the operation table, `op.add(v5, v6, dtype=float32)`, as a Program has it, or a function of torch's by
its name, `where(v7, v0, -inf)`, as a recorder saw it. `v0` to `v4` are score, b, h, q_idx and kv_idx (a mask's begin with b), and
each line's value is the next. The last line is `return v9`.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError
from flexattn.frontend.bytecode import FloatLiteral, IntLiteral
from flexattn.frontend.expr import Expr, const, convert, intern, load, promote, topological
from flexattn.frontend.numbers import tag
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Program
from flexattn.frontend.proxy import Proxy, Trace, call_by_name

# What makes a scalar of no traced value: by name, which of its arguments is the scalar's value.
_FACTORIES: dict[str, Callable[..., Any]] = {
    "tensor": lambda value: value,
    "as_tensor": lambda value: value,
    "scalar_tensor": lambda value: value,
    "full": lambda shape, value: value,
    "zeros": lambda *shape: 0.0,
    "ones": lambda *shape: 1.0,
}
_VARIABLES = {"score": ("score", "b", "h", "q_idx", "kv_idx"), "mask": ("b", "h", "q_idx", "kv_idx")}


def program_text(program: Program) -> str:
    """A program as text.

    Example:
        >>> print(program_text(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").program))
        op.le(v3, v2, dtype=bool)
        return v4
    """
    variables, body = _VARIABLES[program.kind], program.body
    names: dict[Expr, str] = {}
    lines: list[str] = []
    for node in topological([body]):
        if node.op == "var":
            names[node] = f"v{variables.index(node.attr)}"
            continue
        head = {"load": lambda n: f"c{n.attr[0]}", "num": lambda n: f"n{n.attr}", "const": lambda n: repr(n.attr)}
        inputs = [*([head[node.op](node)] if node.op in head else []), *(names[a] for a in node.args)]
        dtype = str(node.dtype).removeprefix("torch.")
        names[node] = f"v{len(variables) + len(lines)}"
        name = f"{node.op}_" if keyword.iskeyword(node.op) else node.op
        lines.append(f"op.{name}({', '.join(inputs)}, dtype={dtype})")
    return "\n".join([*lines, f"return {names[body]}"])


def replay(
    text: str, captures: Sequence[Tensor], numbers: Sequence[int | float], kind: str = "score"
) -> Callable[..., Any]:
    """The mod of a text, to be traced as any other.

    Args:
        text: what `program_text` or a recorder wrote.
        captures: the tensors it names, in slot order.
        numbers: the numbers it names, in slot order; they are arguments of the program, never constants.
        kind: "score" or "mask".
    Raises: CallError, when it is traced, if a line is none that this module or a recorder writes.
    """
    given = tuple(map(tag, numbers))

    def run(*values: Any) -> Any:
        return _run(_parsed(text), list(values), captures, given)

    if kind == "score":
        return lambda score, b, h, q_idx, kv_idx: run(score, b, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: run(b, h, q_idx, kv_idx)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[ast.expr, ...]:
    """The calls of a text, and what it returns."""
    *lines, last = text.split("\n")
    return tuple(ast.parse(x, mode="eval").body for x in (*lines, last.removeprefix("return ")))


def _run(lines: Sequence[ast.expr], values: list[Any], captures: Sequence[Tensor], numbers: tuple[Any, ...]) -> Any:
    trace = values[0].trace

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | None | str() as value) | ast.Constant(value=value) if value is ...:
                return value
            case ast.Constant(value=int(value)):
                return IntLiteral(value)
            case ast.Constant(value=float(value)):
                return FloatLiteral(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = read(operand)
                return type(value)(-value)
            case ast.Name(id=name) if name in ("inf", "nan"):
                return float(name)
            case ast.Name(id=name) if name[0] in "vcn" and name[1:].isdigit():
                return {"v": values, "c": captures, "n": numbers}[name[0]][int(name[1:])]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(
                dtype := getattr(torch, name, None), torch.dtype
            ):
                return dtype
            case ast.Tuple(elts=items):
                return tuple(map(read, items))
            case ast.List(elts=items):
                return list(map(read, items))
            case ast.Call(func=ast.Name(id="slice"), args=items):
                return slice(*(x if x is None else int(x) for x in map(read, items)))
        raise _unreadable(node)

    for line in lines[:-1]:
        match line:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="op"), attr=op), args=args, keywords=[kind]):
                dtype = getattr(torch, ast.unparse(kind.value))
                values.append(trace.wrap(_node(op.rstrip("_"), [*map(read, args)], dtype, trace)))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
                given = [*map(read, args)]
                named = {k.arg: read(k.value) for k in keywords if k.arg is not None}
                call = _made if name in _FACTORIES else call_by_name
                values.append(call(trace, name, given, named))
            case _:
                raise _unreadable(line)
    return read(lines[-1])


def _node(op: str, inputs: list[Any], dtype: torch.dtype, trace: Trace) -> Expr:
    """A row of the operation table, of a program, typed already."""
    if op == "load":
        return load(trace.capture(inputs[0]), inputs[0].dtype, [x.expr for x in inputs[1:]])
    if op == "num":
        return convert(trace.operand(inputs[0]), dtype)
    if op == "const":
        return const(inputs[0], dtype)
    if op not in OPS and op != "cast":
        raise CallError("a program's text has an unknown operation", given=op, hint="the version that wrote it")
    return intern(op, tuple(x.expr for x in inputs), None, dtype)


def _made(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Proxy:
    """A scalar that a mod makes on the device of a traced value."""
    value = _FACTORIES[name](*args)
    operand = trace.operand(value)
    return trace.wrap(convert(operand, kwargs.get("dtype") or promote([operand])))


def _unreadable(node: ast.AST) -> CallError:
    return CallError("a program's text has a line that cannot be read", given=ast.unparse(node), hint="program_text()")
