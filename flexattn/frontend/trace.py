"""Runs a score_mod or mask_mod once on proxies and records what it computes as a Program, and with what as a Binding.

Reads a Python callable; makes a hashable Program (structure only) and this call's captured tensors and numbers. The one idea:
a mod is ordinary code, so running it on proxies is enough; nothing is parsed, and no value of an index ever exists.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

import flexattn.frontend.torch_functions  # noqa: F401  registers what a mod may call
from flexattn.errors import CallError, FlexError, MaskTypeError, TraceError
from flexattn.frontend import expr as ex
from flexattn.frontend.expr import Expr, convert, make, var
from flexattn.frontend.mod_errors import NothingIsDrawn, in_a_mod
from flexattn.frontend.numbers import Tagger
from flexattn.frontend.program import Binding, CaptureInfo, Program, Traced
from flexattn.frontend.proxy import Proxy, Row, Trace
from flexattn.frontend.recall import recall, remember
from flexattn.frontend.simplify import simplify
from flexattn.frontend.source import capture_names, function_name, function_source

_INDICES = ("b", "h", "q_idx", "kv_idx")


def mod_kind(fn: Callable[..., Any], wanted: str | None = None) -> str:
    """'score' for five positional parameters, 'mask' for four, as torch decides it; what is wanted where any number will do.

    Args:
        fn: a mod.
        wanted: "score" or "mask", which a function with `*args` is taken to be.

    Raises:
        CallError: What cannot be called.
        MaskTypeError: Any other number of parameters, or one that can only be given by name.
    """
    kinds = {5: "score", 4: "mask"}
    if type(fn) is types.FunctionType and not fn.__dict__ and not fn.__defaults__ and not fn.__kwdefaults__:
        code = fn.__code__
        if code.co_argcount in kinds and not code.co_flags & inspect.CO_VARARGS and not code.co_kwonlyargcount:
            return kinds[code.co_argcount]  # a plain function, without the cost of inspect
    if not callable(fn):
        raise CallError(
            "a mod must be callable", given=type(fn).__name__, hint="lambda b, h, q_idx, kv_idx: q_idx >= kv_idx"
        )
    parameters = _parameters(fn)
    if parameters is None:
        return wanted or "mask"
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    required = sum(p.default is p.empty for p in positional)
    most = math.inf if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    if named:
        raise MaskTypeError(
            "a mod is called with positions only",
            given=f"{function_name(fn)}, of which {', '.join(named)} must be given by name",
            hint="the parameter before the `*`, a default, or functools.partial",
        )
    if wanted is not None and most == math.inf and required <= {"score": 5, "mask": 4}[wanted]:
        return wanted
    for count in (required, len(positional)):
        if count in kinds:
            return kinds[count]
    if most == math.inf and required <= 5:
        return "mask" if required <= 4 else "score"
    raise MaskTypeError(
        "a mod takes (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx)",
        given=f"{function_name(fn)} with {required} positional parameters",
        hint="functools.partial, or a closure, for what else it needs",
    )


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Parameters of a callable; None for a builtin that does not tell."""
    try:
        return list(inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values())
    except ValueError:
        return None


def trace(
    fn: Callable[..., Any], kind: str, *, score_dtype: torch.dtype = torch.float32, sources: bool = False
) -> Traced:
    """Trace a mod once. A plain function that can see nothing new since its last trace is not run again.

    Args:
        fn: `score_mod(score, b, h, q_idx, kv_idx)` or `mask_mod(b, h, q_idx, kv_idx)`: a function, partial, callable object or module.
        kind: "score" or "mask".
        score_dtype: float32, or float64 for float64 inputs.
        sources: Also remember which user line made each node (slower; for explain()).

    Returns:
        The program (hashable structure) and the binding (this call's captured tensors and numbers).

    Raises:
        TraceError: The mod branches on a traced value or uses an operation that is not pointwise.
        MaskTypeError: A mask_mod returns something that is not a truth value.

    Example:
        >>> str(trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").program)
        'kv_idx <= q_idx'
    """
    key = (kind, score_dtype)
    if not sources and (known := recall(fn, key)) is not None:
        return known
    tagger = Tagger()
    state = Trace(tagger, sources)
    arguments = [Proxy(var(n), state) for n in _INDICES]
    if kind == "score":
        arguments.insert(0, Proxy(var("score", score_dtype), state))
    run = tagger.runnable(fn)
    try:
        with NothingIsDrawn() if tagger.draws else nullcontext():
            result = run(*arguments)
    except RecursionError:
        raise
    except FlexError as e:
        if e.where is None and (where := function_source(fn)):
            raise type(e)(e.what, given=e.given, hint=e.hint, where=str(where)) from None
        raise
    except Exception as e:
        if (explained := in_a_mod(e, (Proxy, Row))) is None:
            raise
        raise explained from e
    finally:
        tagger.write_back()
    body = simplify(_result(fn, kind, state, result, score_dtype))
    traced = _pack(fn, kind, body, state)
    if not sources:
        remember(fn, key, traced)
    return traced


def _result(fn: Callable[..., Any], kind: str, state: Trace, result: Any, score_dtype: torch.dtype) -> Expr:
    where = function_source(fn)
    if isinstance(result, Row) and len(result.shape) == 1 and len(result) == 1:
        result = result.items[0]
    if (
        type(result) is not Proxy
        and not isinstance(result, (bool, int, float, torch.Tensor))
        or isinstance(result, torch.Tensor)
        and result.numel() != 1
    ):
        shown = f"shape {tuple(result.shape)}" if isinstance(result, (Row, torch.Tensor)) else type(result).__name__
        raise TraceError(
            f"{function_name(fn)} must return one value per (b, h, q_idx, kv_idx)",
            given=shown,
            hint="returning a number, or an expression that indexes every dimension of a captured tensor, as in table[h, q_idx]",
            where=str(where) if where else None,
        )
    node = state.operand(state.outside(result))
    if kind == "score":
        return convert(node, score_dtype)
    dtype = ex.promote([node])
    if dtype.is_floating_point:
        raise MaskTypeError(
            f"mask.dtype must be torch.bool: {function_name(fn)} must return a truth value",
            given=dtype,
            hint="a comparison, or .to(torch.bool)",
            where=str(where) if where else None,
        )
    return (
        node
        if isinstance(node, Expr) and node.dtype == torch.bool
        else convert(make("ne", node, 0) if dtype != torch.bool else node, torch.bool)
    )


def _pack(fn: Callable[..., Any], kind: str, body: Expr, state: Trace) -> Traced:
    """Keep only the captures and numbers that the simplified body reads, in order of first use."""
    body, captures, numbers, moved = _numbered(body)
    tensors = tuple(state.captures[s] for s in captures)
    plain = tuple(map(_plain, (state.numbers[s] for s in numbers)))
    info = tuple(CaptureInfo(t.dtype, t.ndim) for t in tensors)
    sources = {moved[n]: s for n, s in state.sources.items() if n in moved}
    kinds = tuple("int" if isinstance(v, (int, torch.SymInt)) else "float" for v in plain)
    name, where = function_name(fn), function_source(fn)
    names = capture_names(fn, tensors) if tensors else ()
    program = Program(kind, body, info, kinds, sources=sources, name=name, where=where, capture_names=names)
    return Traced(program, Binding(tensors, plain))


def _plain(x: Any) -> Any:
    """A number without its provenance; a symbol of a graph as it is."""
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return x
    return int(x) if isinstance(x, int) else float(x)


@lru_cache(maxsize=4096)
def _numbered(body: Expr) -> tuple[Expr, tuple[int, ...], tuple[int, ...], dict[Expr, Expr]]:
    """The body with slots numbered from 0, the old slots in their new order, and where each node went."""
    captures: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for node in ex.topological([body]):
        if node.op == "load":
            captures.setdefault(node.attr[0], len(captures))
        elif node.op == "num":
            numbers.setdefault(node.attr, len(numbers))
    moved: dict[Expr, Expr] = {}

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "load":
            slot, rank, storage = node.attr
            new = ex.intern("load", tuple(args), (captures[slot], rank, storage), node.dtype)
        elif node.op == "num":
            new = ex.num(numbers[node.attr], node.dtype)
        else:
            new = ex.rebuild(node, args)
        moved[node] = new
        return new

    return ex.fold([body], visit)[0], tuple(captures), tuple(numbers), moved
