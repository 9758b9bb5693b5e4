"""Runs a score_mod or mask_mod once on proxies and records what it computes as a Program, and with what as a Binding.

Reads a Python callable; makes a hashable Program (structure only) and this call's captured tensors and numbers. The one idea:
operators, torch functions and `tensor[proxy]` all reach `Proxy`, so ordinary code traces itself; whatever would need the value
of a traced index raises, naming the user's line.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import torch

from flexattn.errors import CaptureIndexError, FlexError, MaskTypeError, TraceError
from flexattn.frontend import expr as ex
from flexattn.frontend.expr import Expr, NumberRef, Operand, convert, load, make, to_text, var
from flexattn.frontend.numbers import FloatArg, IntArg, Tagger
from flexattn.frontend.ops import OPS
from flexattn.frontend.simplify import simplify
from flexattn.frontend.source import Source, function_name, function_source, user_source

ROW_LIMIT = 256  # a row is unrolled element by element
_INDICES = ("b", "h", "q_idx", "kv_idx")


class CaptureInfo(NamedTuple):
    """What a program knows of a captured tensor: never its size, strides or contents."""

    dtype: torch.dtype
    rank: int
    requires_grad: bool


class Program:
    """The structure of a mod: equal and hash-equal iff the same computation on the same kinds of captures and numbers."""

    __slots__ = ("kind", "body", "captures", "numbers", "sources", "name", "_key", "_hash")

    def __init__(self, kind: str, body: Expr, captures: tuple[CaptureInfo, ...] = (), numbers: tuple[str, ...] = (), *,
                 sources: Mapping[Expr, Source] | None = None, name: str = "mod") -> None:
        self.kind, self.body, self.captures, self.numbers = kind, body, captures, numbers
        self.sources, self.name = sources or {}, name
        self._key = (kind, body, captures, numbers)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return to_text(self.body)

    def __repr__(self) -> str:
        return f"Program({self.kind} {self.name}: {self})"


class Binding(NamedTuple):
    """One call's values: captured tensors and numbers, in order of first use."""

    captures: tuple[torch.Tensor, ...]
    numbers: tuple[int | float, ...]


class Traced(NamedTuple):
    """A program and what it is bound to."""

    program: Program
    binding: Binding


class _Trace:
    """What one run of a mod collects."""

    def __init__(self, tagger: Tagger, remember: bool) -> None:
        self.tagger, self.remember = tagger, remember
        self.captures: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.sources: dict[Expr, Source] = {}

    def capture(self, tensor: torch.Tensor) -> int:
        for slot, known in enumerate(self.captures):
            if known is tensor:
                return slot
        if tensor.is_complex():
            raise error("a captured tensor must be real", given=tensor.dtype)
        self.captures.append(tensor)
        return len(self.captures) - 1

    def operand(self, x: Any) -> Operand:
        """A traced value, a number or a captured scalar as an operand of `make`."""
        if isinstance(x, Proxy):
            return x.expr
        if isinstance(x, (IntArg, FloatArg)):
            if x.slot is None or x.slot >= len(self.numbers) or self.numbers[x.slot] is not x:
                x.slot = len(self.numbers)
                self.numbers.append(x)
            return NumberRef(x.slot, "int" if isinstance(x, IntArg) else "float")
        if isinstance(x, bool):
            return x
        if type(x) in (int, float):
            return x  # type: ignore[no-any-return]
        if isinstance(x, torch.Tensor):
            return self.scalar(x)
        if hasattr(x, "item") and getattr(x, "ndim", None) == 0:  # a numpy scalar
            return self.operand(self.outside(x.item()))
        raise error(f"a mod cannot use a {type(x).__name__} as a value", hint="use Python numbers or captured torch tensors")

    def outside(self, x: Any) -> Any:
        """A value as it comes from the user's code: a plain number is a constant only if that code contains it."""
        if type(x) in (int, float) and math.isfinite(x) and not self.tagger.is_literal(x):
            return IntArg(x) if type(x) is int else FloatArg(x)
        return x

    def scalar(self, tensor: torch.Tensor) -> Expr:
        if tensor.numel() != 1:
            raise error("a captured tensor must be indexed down to one element", given=f"shape {tuple(tensor.shape)}",
                        hint="index it, as in table[h, q_idx]")
        flat = tensor if tensor.ndim == 0 else tensor.reshape(())
        if flat is not tensor:
            for slot, known in enumerate(self.captures):  # the same one-element tensor, reshaped before
                if known.ndim == 0 and known.data_ptr() == flat.data_ptr() and known.dtype == flat.dtype and known._base is tensor:
                    return load(slot, flat.dtype, ())
        return load(self.capture(flat), flat.dtype, ())

    def wrap(self, node: Expr) -> Proxy:
        if self.remember and node not in self.sources and (where := user_source()):
            self.sources[node] = where
        return Proxy(node, self)

    def call(self, op: str, *args: Any) -> Any:
        """Apply a table operation to proxies, numbers and scalars; rows apply elementwise."""
        if any(isinstance(a, Row) for a in args):
            return Row.zip(self, op, args)
        try:
            return self.wrap(make(op, *(self.operand(a) for a in args)))
        except FlexError as e:
            raise e if e.where else error(e.what, given=e.given, hint=e.hint, cls=type(e)) from None


def error(what: str, *, given: object = None, hint: str | None = None, cls: type[FlexError] = TraceError) -> FlexError:
    """An error that names the user's line."""
    where = user_source()
    return cls(what, given=given, hint=hint, where=str(where) if where else None)


# ---------------------------------------------------------------- proxies
class Proxy:
    """A traced scalar: behaves like a 0-d tensor as far as pointwise code can tell."""

    __slots__ = ("expr", "trace")
    __array_priority__ = 1000

    def __init__(self, node: Expr, trace: _Trace) -> None:
        self.expr, self.trace = node, trace

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        handler = _FUNCTIONS.get(name)
        if handler is None:
            raise unsupported(name)
        return lambda *args, **kwargs: _from_user(self.trace, handler, (self, *args), kwargs)

    dtype = property(lambda self: self.expr.dtype)
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    is_floating_point = lambda self: self.expr.dtype.is_floating_point  # noqa: E731
    dim = lambda self: 0  # noqa: E731
    numel = lambda self: 1  # noqa: E731
    T = property(lambda self: self)

    def __getitem__(self, index: Any) -> Proxy:
        if index in ((), ...):
            return self
        raise error("a traced value is a scalar and cannot be indexed")

    def __bool__(self) -> bool:
        raise error("a mod may not branch on a traced value (`if`, `and`, `or`, `not`, `while`)",
                    hint="torch.where(condition, a, b) instead of `if`, and & | ~ instead of and, or, not")

    def __int__(self) -> int:
        raise error("a traced value has no Python value (`int()`, `float()`, `range()`)", hint="tensor code, such as .to(torch.int64)")

    __float__ = __index__ = __int__  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Any]:
        raise error("a traced value is a scalar and cannot be iterated")

    def __len__(self) -> int:
        raise error("a traced value is a scalar and has no length")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise error("a mod may not write in place", hint="return a new value, with torch.where")

    def __pow__(self, other: Any) -> Any:
        return _from_user(self.trace, _pow, (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return _from_user(self.trace, _pow, (other, self), {})

    def __repr__(self) -> str:
        return f"Proxy({to_text(self.expr)})"

    __hash__ = object.__hash__


def _install_operators(cls: type) -> None:
    names = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "truediv", "floordiv": "floordiv", "mod": "mod", "and": "and",
             "or": "or", "xor": "xor", "lshift": "lshift", "rshift": "rshift"}
    for dunder, op in names.items():
        setattr(cls, f"__{dunder}__", lambda self, other, _op=op: self.trace.call(_op, self, self.trace.outside(other)))
        setattr(cls, f"__r{dunder}__", lambda self, other, _op=op: self.trace.call(_op, self.trace.outside(other), self))
        setattr(cls, f"__i{dunder}__", lambda self, other, _op=op: self.trace.call(_op, self, self.trace.outside(other)))
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(cls, f"__{op}__", lambda self, other, _op=op: self.trace.call(_op, self, self.trace.outside(other)))
    cls.__neg__ = lambda self: self.trace.call("neg", self)  # type: ignore[attr-defined]
    cls.__pos__ = lambda self: self  # type: ignore[attr-defined]
    cls.__abs__ = lambda self: self.trace.call("abs", self)  # type: ignore[attr-defined]
    cls.__invert__ = lambda self: self.trace.call("not", self)  # type: ignore[attr-defined]
    cls.__hash__ = object.__hash__  # type: ignore[method-assign, assignment]


class Row:
    """A captured tensor indexed down to a short row: indexable further, elementwise, and reducible by sum, dot, max, min, mean."""

    __array_priority__ = 1000

    def __init__(self, trace: _Trace, items: list[Any] | None = None, *, tensor: torch.Tensor | None = None, index: tuple[Expr, ...] = ()) -> None:
        self.trace, self._items, self.tensor, self.index = trace, items, tensor, index

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._items),)) if self.tensor is None else self.tensor.shape[len(self.index):]  # type: ignore[arg-type]

    ndim = property(lambda self: len(self.shape))
    dim = lambda self: len(self.shape)  # noqa: E731

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def items(self) -> list[Any]:
        """The elements of a rank-1 row, each a proxy."""
        if self._items is None:
            assert self.tensor is not None
            if len(self.shape) != 1 or self.shape[0] > ROW_LIMIT:
                raise error(f"only a row of at most {ROW_LIMIT} elements can be used as a whole", given=f"shape {tuple(self.shape)}",
                            hint="index it down to one element, or compute the reduction outside the mod and capture its result")
            slot, dtype = self.trace.capture(self.tensor), self.tensor.dtype
            self._items = [self.trace.wrap(load(slot, dtype, (*self.index, ex.const(i, torch.int64)))) for i in range(self.shape[0])]
        return self._items

    def __getitem__(self, index: Any) -> Any:
        if self.tensor is not None:
            rest = index if isinstance(index, tuple) else (index,)
            return _index(self.trace, self.tensor, (*(self.trace.wrap(i) for i in self.index), *rest))
        if isinstance(index, slice):
            return Row(self.trace, self.items[index])
        if isinstance(index, int):
            return self.items[index]
        raise error("a computed row can only be indexed by a Python number", hint="index the captured tensor itself")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in _FUNCTIONS:
            raise AttributeError(name) if name.startswith("_") else unsupported(name)
        return lambda *args, **kwargs: _from_user(self.trace, _FUNCTIONS[name], (self, *args), kwargs)

    def __matmul__(self, other: Any) -> Any:
        return _dot(self.trace, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _dot(self.trace, other, self)

    def __pow__(self, other: Any) -> Any:
        return _from_user(self.trace, _pow, (self, other), {})

    @staticmethod
    def zip(trace: _Trace, op: str, args: Sequence[Any]) -> Row:
        rows = [_as_items(trace, a) for a in args]
        n = max(len(r) for r in rows if r is not None)
        if any(r is not None and len(r) not in (1, n) for r in rows):
            raise error("rows of different lengths cannot be combined", given=[len(r) for r in rows if r is not None])
        pick = lambda r, a, i: a if r is None else r[i if len(r) > 1 else 0]  # noqa: E731
        return Row(trace, [trace.call(op, *(pick(r, a, i) for r, a in zip(rows, args))) for i in range(n)])

    def reduce(self, op: str) -> Any:
        total = self.items[0]
        for item in self.items[1:]:
            total = self.trace.call(op, total, item)
        return total


_install_operators(Proxy)
_install_operators(Row)


def _as_items(trace: _Trace, x: Any) -> list[Any] | None:
    """Elements of a row or of a captured 1-D tensor; None for scalars."""
    if isinstance(x, Row):
        return x.items
    if isinstance(x, torch.Tensor) and x.ndim == 1 and x.numel() != 1:
        return Row(trace, tensor=x).items
    return None


# ---------------------------------------------------------------- torch functions by name
def unsupported(name: str) -> FlexError:
    hints = {
        "item": "keep the value as a tensor: a captured tensor may be used directly",
        "tolist": "keep the value as a tensor",
        "rand": "draw random numbers outside the mod and capture them", "randn": "draw random numbers outside the mod and capture them",
        "rand_like": "draw random numbers outside the mod and capture them", "bernoulli": "draw random numbers outside the mod and capture them",
        "dropout": "draw the mask outside the mod and capture it", "apply": "write the function with torch operations; its derivative is derived",
    }
    hint = hints.get(name.strip("_"))
    if hint is None and name.endswith("_") and name.rstrip("_") in _FUNCTIONS:
        hint = f"{name.rstrip('_')}, which returns a new value"
    return error(f"`{name}` is not supported in a mod", hint=hint or "pointwise torch operations, torch.where, and captured tensors indexed by the arguments")


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of a captured tensor never comes here; one of a proxy does
        raise unsupported(getattr(func, "__self__", name).__name__)
    trace = next(x.trace for x in _flat(args, kwargs) if isinstance(x, (Proxy, Row)))
    if name == "__getitem__":
        return _index(trace, args[0], args[1])
    if name.startswith("__r") and name[3:-2] in _FUNCTIONS and name not in ("__rshift__",):
        return _from_user(trace, _FUNCTIONS[name[3:-2]], (args[1], args[0]), kwargs)
    inplace = name.endswith("_") and not name.startswith("__") or name.startswith("__i") and name[3:-2] in _FUNCTIONS or name == "__setitem__"
    handler = None if inplace else _FUNCTIONS.get(name.strip("_"))
    if handler is None:
        raise unsupported(name)
    if kwargs.pop("out", None) is not None or kwargs.pop("inplace", False):
        raise error("a mod may not write in place", hint="return a new value")
    return _from_user(trace, handler, args, kwargs)


def _from_user(trace: _Trace, handler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return handler(trace, *map(trace.outside, args), **{k: trace.outside(v) for k, v in kwargs.items()})


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (tuple, list)):
            yield from _flat(x, {})
        else:
            yield x


def _index(trace: _Trace, tensor: Any, index: Any) -> Any:
    """tensor[index] with traced positions: an element, or a Row when positions are left over."""
    if not isinstance(tensor, torch.Tensor):
        raise error("only captured torch tensors can be indexed by traced values", given=type(tensor).__name__)
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(p is None for p in parts):
        raise error("None (a new axis) is not supported when indexing a captured tensor in a mod")
    if any(p is ... for p in parts):
        at = next(i for i, p in enumerate(parts) if p is ...)
        parts[at:at + 1] = [slice(None)] * (tensor.ndim - len(parts) + 1)
    if len(parts) > tensor.ndim:
        raise error("too many indices for a captured tensor", given=f"{len(parts)} for shape {tuple(tensor.shape)}", cls=CaptureIndexError)
    if any(isinstance(p, slice) for p in parts):
        tensor, parts = _slice(tensor, parts)
    where = tuple(_position(trace, p) for p in parts)
    if len(where) < tensor.ndim:
        return Row(trace, tensor=tensor, index=where)
    return trace.wrap(load(trace.capture(tensor), tensor.dtype, where))


def _slice(tensor: torch.Tensor, parts: list[Any]) -> tuple[torch.Tensor, list[Any]]:
    """Apply slices on the host and move the sliced dimensions behind the indexed ones; a full slice makes no new tensor."""
    full = slice(None)
    if any(isinstance(p, slice) and p != full for p in parts):
        tensor = tensor[tuple(p if isinstance(p, slice) else full for p in parts)]
    sliced = [i for i, p in enumerate(parts) if isinstance(p, slice)]
    indexed = [i for i in range(len(parts)) if i not in sliced]
    order = indexed + sliced + list(range(len(parts), tensor.ndim))
    if order != list(range(tensor.ndim)):
        tensor = tensor.permute(order)
    return tensor, [parts[i] for i in indexed]


def _position(trace: _Trace, p: Any) -> Expr:
    operand = trace.operand(trace.outside(p))
    if isinstance(operand, Expr) and operand.dtype == torch.bool or isinstance(operand, bool):
        raise error("a boolean mask cannot index a captured tensor in a mod", hint="torch.where")
    if isinstance(operand, Expr) and operand.dtype.is_floating_point or isinstance(operand, float):
        raise error("an index must be an integer", given="a float", hint=".to(torch.int64)", cls=CaptureIndexError)
    return convert(operand, torch.int64)


Handler = Callable[..., Any]
_FUNCTIONS: dict[str, Handler] = {}


def _function(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            _FUNCTIONS[name] = handler
        return handler

    return register


def _table(op: str) -> Handler:
    return lambda t, *args, **kwargs: t.call(op, *args, **kwargs)


_ALIASES = {
    "add": (), "mul": ("multiply",), "mod": ("remainder",), "floordiv": ("floor_divide",), "truediv": ("true_divide",),
    "neg": ("negative",), "abs": ("absolute",), "sign": ("sgn",), "minimum": (), "maximum": (), "lt": ("less",), "le": ("less_equal",),
    "gt": ("greater",), "ge": ("greater_equal",), "eq": (), "ne": ("not_equal",), "and": ("bitwise_and",), "or": ("bitwise_or",),
    "xor": ("bitwise_xor",), "not": ("bitwise_not", "invert"), "lshift": ("bitwise_left_shift",), "rshift": ("bitwise_right_shift",),
    "exp": (), "exp2": ("special_exp2",), "expm1": ("special_expm1",), "log": (), "log2": (), "log1p": ("special_log1p",), "sqrt": (),
    "rsqrt": (), "tanh": (), "sigmoid": ("special_expit",), "sin": (), "cos": (), "erf": ("special_erf",), "floor": (), "ceil": (),
    "round": (), "trunc": ("fix",), "isnan": (), "isinf": (), "detach": (),
}
for _op, _names in _ALIASES.items():
    for _name in (_op, *_names):
        _FUNCTIONS[_name] = _table(_op)


@_function("where")
def _where(t: _Trace, condition: Any, a: Any = None, b: Any = None, *, input: Any = None, other: Any = None) -> Any:
    if isinstance(condition, Proxy) and condition.expr.dtype != torch.bool:
        raise error("the condition of torch.where must be a truth value", given=condition.expr.dtype, hint="a comparison")
    return t.call("where", condition, a if a is not None else input, b if b is not None else other)


@_function("sub", "subtract")
def _sub(t: _Trace, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return t.call("sub", a, b if alpha == 1 else t.call("mul", b, alpha))


@_function("add")
def _add(t: _Trace, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return t.call("add", a, b if alpha == 1 else t.call("mul", b, alpha))


@_function("rsub")
def _rsub(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("sub", b, a)


@_function("div", "divide", "truediv", "true_divide")
def _div(t: _Trace, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return t.call("truediv", a, b)
    if rounding_mode == "floor":
        return t.call("floordiv", a, b)
    quotient = t.call("truediv", a, b)
    if isinstance(quotient, Proxy) and all(not _is_float(t, x) for x in (a, b)):  # integers: truncate exactly
        down, exact = t.call("floordiv", a, b), t.call("eq", t.call("mod", a, b), 0)
        return t.call("where", t.call("or", exact, t.call("ge", down, 0)), down, t.call("add", down, 1))
    return t.call("trunc", quotient)


def _is_float(t: _Trace, x: Any) -> bool:
    return ex._category(ex.promote([t.operand(x)])) == 2


@_function("fmod")
def _fmod(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("sub", a, t.call("mul", _div(t, a, b, rounding_mode="trunc"), b))


@_function("reciprocal")
def _reciprocal(t: _Trace, x: Any) -> Any:
    return t.call("truediv", 1.0, x)


@_function("square")
def _square(t: _Trace, x: Any) -> Any:
    return t.call("mul", x, x)


@_function("pow", "float_power")
def _pow(t: _Trace, base: Any, exponent: Any) -> Any:
    """Small constant exponents are multiplications, as in torch; an exponent's value is part of the structure."""
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool) and isinstance(base, (Proxy, Row)):
        return _constant_power(t, base, exponent)
    if isinstance(base, (int, float)) and base == 2 and type(base) in (int, float) and not isinstance(exponent, Row):
        return t.call("exp2", exponent) if _is_float(t, exponent) or not isinstance(base, int) else t.call("lshift", 1, exponent)
    return t.call("pow", base, exponent)


def _constant_power(t: _Trace, x: Any, n: int | float) -> Any:
    integral = float(n).is_integer()
    if integral and 0 <= n <= 8:
        if n == 0:
            return _ones_like(t, x)
        result, square, k = None, x, int(n)
        while k:
            if k & 1:
                result = square if result is None else t.call("mul", result, square)
            k >>= 1
            square = t.call("mul", square, square) if k else square
        return result
    special = {0.5: lambda: t.call("sqrt", x), -0.5: lambda: t.call("rsqrt", x), -1: lambda: _reciprocal(t, x),
               -2: lambda: _reciprocal(t, t.call("mul", x, x))}
    if n in special and (not integral or _is_float(t, x)):
        return special[n]()
    if integral and not isinstance(x, Row) and not _is_float(t, x):
        if n < 0:
            raise error("integers to negative powers are not defined", hint="convert to float first")
        return t.call("mul", _constant_power(t, x, 8), _constant_power(t, x, int(n) - 8))
    return t.wrap(make("pow", t.operand(x), float(n)))


def _ones_like(t: _Trace, x: Any) -> Any:
    dtype = t.operand(x).dtype if isinstance(t.operand(x), Expr) else torch.float32  # type: ignore[union-attr]
    return t.wrap(ex.const(1, torch.int64 if dtype == torch.bool else dtype))


@_function("clamp", "clip", "hardtanh")
def _clamp(t: _Trace, x: Any, min: Any = None, max: Any = None, *, min_val: Any = None, max_val: Any = None) -> Any:
    """Integers clamp by minimum and maximum (tight bounds); floats by selection, which has torch's gradient at the limits."""
    low, high = (min if min is not None else min_val), (max if max is not None else max_val)
    integral = not _is_float(t, x) if not isinstance(x, Row) else False
    if low is not None:
        x = t.call("maximum", x, low) if integral and not _is_float(t, low) else t.call("where", t.call("lt", x, low), low, x)
    if high is not None:
        x = t.call("minimum", x, high) if integral and not _is_float(t, high) else t.call("where", t.call("gt", x, high), high, x)
    return x


@_function("clamp_min")
def _clamp_min(t: _Trace, x: Any, min: Any) -> Any:
    return _clamp(t, x, min)


@_function("clamp_max")
def _clamp_max(t: _Trace, x: Any, max: Any) -> Any:
    return _clamp(t, x, None, max)


@_function("logical_and")
def _logical_and(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("and", _truth(t, a), _truth(t, b))


@_function("logical_or")
def _logical_or(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("or", _truth(t, a), _truth(t, b))


@_function("logical_xor")
def _logical_xor(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("xor", _truth(t, a), _truth(t, b))


@_function("logical_not")
def _logical_not(t: _Trace, a: Any) -> Any:
    return t.call("not", _truth(t, a))


def _truth(t: _Trace, x: Any) -> Any:
    node = t.operand(x)
    return x if isinstance(node, Expr) and node.dtype == torch.bool or isinstance(node, bool) else t.call("ne", x, 0)


@_function("isfinite")
def _isfinite(t: _Trace, x: Any) -> Any:
    return t.call("not", t.call("or", t.call("isnan", x), t.call("isinf", x)))


@_function("isneginf")
def _isneginf(t: _Trace, x: Any) -> Any:
    return t.call("eq", x, -math.inf)


@_function("isposinf")
def _isposinf(t: _Trace, x: Any) -> Any:
    return t.call("eq", x, math.inf)


@_function("masked_fill")
def _masked_fill(t: _Trace, x: Any, mask: Any, value: Any) -> Any:
    return t.call("where", mask, value, x)


@_function("lerp")
def _lerp(t: _Trace, a: Any, b: Any, weight: Any) -> Any:
    return a + weight * (b - a)


@_function("addcmul")
def _addcmul(t: _Trace, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return t.call("add", x, t.call("mul", t.call("mul", a, b), value))


@_function("rad2deg", "deg2rad", "positive", "clone", "contiguous", "squeeze", "alias", "requires_grad", "cpu", "cuda")
def _identity(t: _Trace, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


del _FUNCTIONS["rad2deg"], _FUNCTIONS["deg2rad"], _FUNCTIONS["requires_grad"]


# ---------------------------------------------------------------- casts
@_function("to", "type")
def _to(t: _Trace, x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    wanted = next((d for d in (dtype, kwargs.get("dtype"), *args) if isinstance(d, torch.dtype)), None)
    if wanted is None and isinstance(dtype, Proxy):
        wanted = dtype.expr.dtype
    return x if wanted is None else _cast(t, x, wanted)


def _cast(t: _Trace, x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Row):
        return Row(t, [_cast(t, i, dtype) for i in x.items])
    if dtype.is_complex:
        raise error("complex numbers are not supported in a mod")
    target = dtype if dtype.is_floating_point or dtype == torch.bool else torch.int64
    if target not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64):
        raise error("a mod cannot cast to this type", given=dtype)
    return t.wrap(convert(t.operand(x), target))


for _name, _dtype in {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
                      "int": torch.int64, "long": torch.int64, "short": torch.int64, "bool": torch.bool}.items():
    _FUNCTIONS[_name] = lambda t, x, *a, _d=_dtype, **k: _cast(t, x, _d)
_FUNCTIONS["type_as"] = lambda t, x, like: _cast(t, x, like.dtype)


# ---------------------------------------------------------------- activations, from their definitions
@_function("relu")
def _relu(t: _Trace, x: Any, *args: Any) -> Any:
    return t.call("where", t.call("le", x, 0), 0, x)


@_function("relu6")
def _relu6(t: _Trace, x: Any) -> Any:
    return _clamp(t, _relu(t, x), None, 6.0)


@_function("leaky_relu")
def _leaky_relu(t: _Trace, x: Any, negative_slope: Any = 0.01) -> Any:
    return t.call("where", t.call("gt", x, 0), x, t.call("mul", x, negative_slope))


@_function("silu", "swish")
def _silu(t: _Trace, x: Any) -> Any:
    return t.call("mul", x, t.call("sigmoid", x))


@_function("logsigmoid")
def _logsigmoid(t: _Trace, x: Any) -> Any:
    return t.call("sub", _clamp(t, x, None, 0.0), t.call("log1p", t.call("exp", t.call("neg", t.call("abs", x)))))


@_function("softplus")
def _softplus(t: _Trace, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = t.call("mul", x, beta)
    safe = _clamp(t, scaled, None, threshold)
    soft = t.call("truediv", t.call("log1p", t.call("exp", safe)), beta)
    return t.call("where", t.call("gt", scaled, threshold), x, soft)


@_function("softsign")
def _softsign(t: _Trace, x: Any) -> Any:
    return t.call("truediv", x, t.call("add", t.call("abs", x), 1.0))


@_function("tanhshrink")
def _tanhshrink(t: _Trace, x: Any) -> Any:
    return t.call("sub", x, t.call("tanh", x))


@_function("mish")
def _mish(t: _Trace, x: Any) -> Any:
    return t.call("mul", x, t.call("tanh", _softplus(t, x)))


@_function("hardsigmoid")
def _hardsigmoid(t: _Trace, x: Any) -> Any:
    return t.call("truediv", _clamp(t, t.call("add", x, 3.0), 0.0, 6.0), 6.0)


@_function("hardswish")
def _hardswish(t: _Trace, x: Any) -> Any:
    return t.call("mul", x, _hardsigmoid(t, x))


@_function("elu")
def _elu(t: _Trace, x: Any, alpha: Any = 1.0) -> Any:
    low = t.call("mul", t.call("expm1", _clamp(t, x, None, 0.0)), alpha)
    return t.call("where", t.call("gt", x, 0), x, low)


@_function("selu")
def _selu(t: _Trace, x: Any) -> Any:
    return t.call("mul", _elu(t, x, 1.6732632423543772), 1.0507009873554805)


@_function("gelu")
def _gelu(t: _Trace, x: Any, *, approximate: str = "none") -> Any:
    half = t.call("mul", x, 0.5)
    if approximate == "tanh":
        inner = t.call("mul", t.call("add", x, t.call("mul", t.call("mul", t.call("mul", x, x), x), 0.044715)), math.sqrt(2 / math.pi))
        return t.call("mul", half, t.call("add", t.call("tanh", inner), 1.0))
    return t.call("mul", half, t.call("add", t.call("erf", t.call("mul", x, math.sqrt(0.5))), 1.0))


@_function("threshold")
def _threshold(t: _Trace, x: Any, threshold: Any, value: Any) -> Any:
    return t.call("where", t.call("gt", x, threshold), x, value)


# ---------------------------------------------------------------- reductions of a short row
def _row(t: _Trace, x: Any) -> Row:
    if isinstance(x, Row):
        return x
    items = _as_items(t, x)
    if items is None:
        raise error("a reduction needs a row of a captured tensor", given="a scalar", hint="table[h].sum(), or torch.dot(a[q_idx], b[kv_idx])")
    return Row(t, items)


@_function("sum")
def _sum(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    row = _row(t, x)
    return (row if dtype is None else _cast(t, row, dtype)).reduce("add")


@_function("mean")
def _mean(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return t.call("truediv", _sum(t, x, dim, dtype=dtype), float(len(_row(t, x))))


@_function("prod")
def _prod(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("mul")


@_function("any")
def _any(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return Row(t, [_truth(t, i) for i in _row(t, x).items]).reduce("or")


@_function("all")
def _all(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return Row(t, [_truth(t, i) for i in _row(t, x).items]).reduce("and")


@_function("amax")
def _amax(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("maximum")


@_function("amin")
def _amin(t: _Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("minimum")


@_function("max", "fmax")
def _max(t: _Trace, x: Any, other: Any = None) -> Any:
    return t.call("maximum", x, other) if other is not None else _amax(t, x)


@_function("min", "fmin")
def _min(t: _Trace, x: Any, other: Any = None) -> Any:
    return t.call("minimum", x, other) if other is not None else _amin(t, x)


del _FUNCTIONS["fmax"], _FUNCTIONS["fmin"]  # they ignore NaN, which minimum and maximum do not


@_function("dot", "inner", "vdot", "matmul")
def _dot(t: _Trace, a: Any, b: Any) -> Any:
    return t.call("mul", _row(t, a), _row(t, b)).reduce("add")


# ---------------------------------------------------------------- entry
def mod_kind(fn: Callable[..., Any]) -> str:
    """'score' for five positional parameters, 'mask' for four, as torch decides it.

    Raises:
        MaskTypeError: Any other number of parameters.
    """
    wanted = {5: "score", 4: "mask"}
    parameters = inspect.signature(fn).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    for count in (required, len(positional)):
        if count in wanted:
            return wanted[count]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and required <= 4:
        return "mask"
    raise MaskTypeError("a mod takes (score, b, h, q_idx, kv_idx) or (b, h, q_idx, kv_idx)", given=f"{function_name(fn)} with {required} positional parameters")


def trace(fn: Callable[..., Any], kind: str, *, score_dtype: torch.dtype = torch.float32, sources: bool = False) -> Traced:
    """Trace a mod once.

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
    tagger = Tagger()
    state = _Trace(tagger, sources)
    arguments = [Proxy(var(n), state) for n in _INDICES]
    if kind == "score":
        arguments.insert(0, Proxy(var("score", score_dtype), state))
    run = tagger.value(fn)
    try:
        result = run(*arguments)
    except RecursionError:
        raise
    except FlexError as e:
        if e.where is None and (where := function_source(fn)):
            raise type(e)(e.what, given=e.given, hint=e.hint, where=str(where)) from None
        raise
    body = simplify(_result(fn, kind, state, result, score_dtype))
    return _pack(kind, body, state, function_name(fn))


def _result(fn: Callable[..., Any], kind: str, state: _Trace, result: Any, score_dtype: torch.dtype) -> Expr:
    where = function_source(fn)
    if isinstance(result, Row) and len(result.shape) == 1 and len(result) == 1:
        result = result.items[0]
    if not isinstance(result, (Proxy, bool, int, float, torch.Tensor)) or isinstance(result, torch.Tensor) and result.numel() != 1:
        shown = f"shape {tuple(result.shape)}" if isinstance(result, (Row, torch.Tensor)) else type(result).__name__
        raise TraceError(f"{function_name(fn)} must return one value per (b, h, q_idx, kv_idx)", given=shown, where=str(where) if where else None)
    node = state.operand(state.outside(result))
    if kind == "score":
        return convert(node, score_dtype)
    dtype = ex.promote([node])
    if dtype.is_floating_point:
        raise MaskTypeError(f"mask.dtype must be torch.bool: {function_name(fn)} must return a truth value", given=dtype,
                            hint="a comparison, or .to(torch.bool)", where=str(where) if where else None)
    return node if isinstance(node, Expr) and node.dtype == torch.bool else convert(make("ne", node, 0) if dtype != torch.bool else node, torch.bool)


def _pack(kind: str, body: Expr, state: _Trace, name: str) -> Traced:
    """Drop captures and numbers that the simplified body does not read, and number the rest in order of first use."""
    captures: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for node in ex.topological([body]):
        if node.op == "load":
            captures.setdefault(node.attr[0], len(captures))  # type: ignore[index]
        elif node.op == "num":
            numbers.setdefault(node.attr, len(numbers))  # type: ignore[arg-type]
    body, moved = _renumber(body, captures, numbers)
    tensors = tuple(state.captures[s] for s in captures)
    values = tuple(state.numbers[s] for s in numbers)
    plain = tuple(int(v) if isinstance(v, int) else float(v) for v in values)
    info = tuple(CaptureInfo(t.dtype, t.ndim, t.requires_grad) for t in tensors)
    sources = {moved[n]: s for n, s in state.sources.items() if n in moved}
    program = Program(kind, body, info, tuple("int" if isinstance(v, int) else "float" for v in plain), sources=sources, name=name)
    return Traced(program, Binding(tensors, plain))


def _renumber(body: Expr, captures: Mapping[int, int], numbers: Mapping[int, int]) -> tuple[Expr, dict[Expr, Expr]]:
    moved: dict[Expr, Expr] = {}

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "load":
            slot, rank, storage = node.attr  # type: ignore[misc]
            new = ex._intern("load", tuple(args), (captures[slot], rank, storage), node.dtype)
        elif node.op == "num":
            new = ex.num(numbers[node.attr], node.dtype)  # type: ignore[index]
        else:
            new = ex.rebuild(node, args)
        moved[node] = new
        return new

    if all(k == v for k, v in captures.items()) and all(k == v for k, v in numbers.items()):
        return body, {n: n for n in ex.topological([body])}
    return ex.fold([body], visit)[0], moved


# ---------------------------------------------------------------- evaluation
def evaluate(program: Program, binding: Binding, *, b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor,
             score: torch.Tensor | None = None, grad: torch.Tensor | None = None, body: Expr | None = None,
             out_of_range: list[torch.Tensor] | None = None) -> torch.Tensor:
    """The program's value on broadcasting torch tensors, with torch's own semantics.

    Args:
        b, h, q_idx, kv_idx: int64 tensors that broadcast against each other.
        score, grad: Values of those variables, where the program reads them.
        body: Another expression over the same captures and numbers (a derivative).
        out_of_range: If given, receives a truth tensor for each captured read that leaves its tensor somewhere (such a read gives
            NaN, or 0 for integers); the caller decides whether a kept position was hit.

    Returns:
        A tensor that broadcasts to the common shape.
    """
    values = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": score, "grad": grad}
    device = q_idx.device

    def visit(node: Expr, args: list[torch.Tensor]) -> torch.Tensor:
        if node.op == "var":
            return values[node.attr]  # type: ignore[index, return-value]
        if node.op == "const":
            return torch.tensor(node.attr, dtype=node.dtype)
        if node.op == "num":
            return torch.tensor(binding.numbers[node.attr], dtype=node.dtype)  # type: ignore[index]
        if node.op == "load":
            return gather(binding.captures[node.attr[0]], args, out_of_range, device)  # type: ignore[index]
        if node.op == "cast":
            return args[0].to(node.dtype)
        result: torch.Tensor = OPS[node.op].eval(*args)
        return result

    return ex.fold([body or program.body], visit)[0]


def gather(tensor: torch.Tensor, index: Sequence[torch.Tensor], out_of_range: list[torch.Tensor] | None, device: torch.device) -> torch.Tensor:
    """tensor[index] as int64 or its float type: negative indices wrap once; out of range gives NaN or 0."""
    if tensor.ndim == 0:
        found = tensor
    else:
        bad: torch.Tensor | None = None
        where = []
        for size, i in zip(tensor.shape, index):
            i = i.to(tensor.device)
            if i.numel() and (int(i.min()) < 0 or int(i.max()) >= size):
                i = torch.where(i < 0, i + size, i)
                outside = (i < 0) | (i >= size)
                if bool(outside.any()):
                    bad = outside if bad is None else bad | outside
                    i = i.clamp(0, max(size - 1, 0))
            where.append(i)
        if tensor.numel() == 0:
            found = torch.zeros(torch.broadcast_shapes(*(i.shape for i in where)), dtype=tensor.dtype, device=tensor.device)
        else:
            found = tensor[tuple(where)]
        if bad is not None:
            found = torch.where(bad, math.nan if found.is_floating_point() else 0, found)
            if out_of_range is not None:
                out_of_range.append(bad)
    if not found.is_floating_point() and found.dtype != torch.bool:
        found = found.to(torch.int64)
    return found if found.device == device or found.ndim == 0 else found.to(device)
