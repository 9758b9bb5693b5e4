"""The values a mod sees while it is traced: `Proxy`, a scalar, and `Row`, a short row of a captured tensor.

Operators, torch functions and `tensor[proxy]` all arrive here and become table operations; whatever would need the value of a
traced index raises an error with the user's line. The functions known by name are registered in `FUNCTIONS` by torch_functions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from flexattn.errors import CaptureIndexError, FlexError, TraceError
from flexattn.frontend.expr import Expr, NumberRef, Operand, const, convert, load, make, to_text
from flexattn.frontend.numbers import FloatArg, IntArg, Tagger
from flexattn.frontend.source import Source, user_source

ROW_LIMIT = 256  # a row is unrolled element by element
Handler = Callable[..., Any]
FUNCTIONS: dict[str, Handler] = {}  # torch functions and tensor methods by name


class Trace:
    """What one run of a mod collects."""

    def __init__(self, tagger: Tagger, remember: bool) -> None:
        self.tagger, self.remember = tagger, remember
        self.captures: list[torch.Tensor] = []
        self.numbers: list[int | float] = []
        self.sources: dict[Expr, Source] = {}

    def capture(self, tensor: torch.Tensor) -> int:
        """The slot of a captured tensor, the same for the same object."""
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
        if isinstance(x, int) and not -(1 << 63) <= x < 1 << 63:
            raise error("an integer in a mod must fit in 64 bits", given=x, hint="float('inf'), or sys.maxsize")
        if isinstance(x, (IntArg, FloatArg)):
            if x.slot is None or x.slot >= len(self.numbers) or self.numbers[x.slot] is not x:
                x.slot = len(self.numbers)
                self.numbers.append(x)
            return NumberRef(x.slot, "int" if isinstance(x, IntArg) else "float")
        if isinstance(x, (bool, int, float)):
            return x
        if isinstance(x, torch.Tensor):
            return self.scalar(x)
        if hasattr(x, "item") and getattr(x, "ndim", None) == 0:  # a numpy scalar
            return self.operand(self.outside(x.item()))
        raise error(
            f"a mod cannot use a {type(x).__name__} as a value", hint="use Python numbers or captured torch tensors"
        )

    def outside(self, x: Any) -> Any:
        """A value as it comes from the user's code: a plain number is a constant only if that code contains it."""
        if type(x) in (int, float) and math.isfinite(x) and not self.tagger.is_literal(x):
            return IntArg(x) if type(x) is int else FloatArg(x)
        return x

    def scalar(self, tensor: torch.Tensor) -> Expr:
        """A captured tensor of one element, of any rank, as a value."""
        if tensor.numel() != 1:
            raise error(
                "a captured tensor must be indexed down to one element",
                given=f"shape {tuple(tensor.shape)}",
                hint="index it, as in table[h, q_idx]",
            )
        flat = tensor if tensor.ndim == 0 else tensor.reshape(())
        if flat is not tensor:
            for slot, known in enumerate(self.captures):  # the same one-element tensor, reshaped before
                if (
                    known.ndim == 0
                    and known.data_ptr() == flat.data_ptr()
                    and known.dtype == flat.dtype
                    and known._base is tensor
                ):
                    return load(slot, flat.dtype, ())
        return load(self.capture(flat), flat.dtype, ())

    def wrap(self, node: Expr) -> Proxy:
        """A proxy of a node, whose user line is remembered if this trace does so."""
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

    def __init__(self, node: Expr, trace: Trace) -> None:
        self.expr, self.trace = node, trace

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        handler = FUNCTIONS.get(name)
        if handler is None:
            raise unsupported(name)
        return lambda *args, **kwargs: _from_user(self.trace, handler, (self, *args), kwargs)

    dtype = property(lambda self: self.expr.dtype)
    device = property(lambda self: torch.device("cpu"))  # of scalars made inside a mod; they go where the mod runs
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    is_floating_point = lambda self: self.expr.dtype.is_floating_point
    dim = lambda self: 0
    numel = lambda self: 1
    T = property(lambda self: self)

    def __getitem__(self, index: Any) -> Proxy:
        if index in ((), ...):
            return self
        raise error("a traced value is a scalar and cannot be indexed")

    def __bool__(self) -> bool:
        raise error(
            "a mod may not branch on a traced value (`if`, `and`, `or`, `not`, `while`)",
            hint="torch.where(condition, a, b) instead of `if`, and & | ~ instead of and, or, not",
        )

    def __int__(self) -> int:
        raise error(
            "a traced value has no Python value (`int()`, `float()`, `range()`)",
            hint="tensor code: x.to(torch.int64) for int(x), torch.sin(x) for math.sin(x), a tensor for a list",
        )

    __float__ = __index__ = __int__

    def __iter__(self) -> Iterator[Any]:
        raise error("a traced value is a scalar and cannot be iterated")

    def __len__(self) -> int:
        raise error("a traced value is a scalar and has no length")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise error("a mod may not write in place", hint="return a new value, with torch.where")

    def __pow__(self, other: Any) -> Any:
        return _from_user(self.trace, FUNCTIONS["pow"], (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return _from_user(self.trace, FUNCTIONS["pow"], (other, self), {})

    def __repr__(self) -> str:
        return f"Proxy({to_text(self.expr)})"

    __hash__ = object.__hash__


def _install_operators(cls: Any) -> None:
    """Python's operators, which have the names of table operations."""

    def forward(op: str) -> Handler:
        return lambda self, other: self.trace.call(op, self, self.trace.outside(other))

    def reflected(op: str) -> Handler:
        return lambda self, other: self.trace.call(op, self.trace.outside(other), self)

    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
        setattr(cls, f"__{op}__", forward(op))
        setattr(cls, f"__i{op}__", forward(op))
        setattr(cls, f"__r{op}__", reflected(op))
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(cls, f"__{op}__", forward(op))
    cls.__neg__ = lambda self: self.trace.call("neg", self)
    cls.__pos__ = lambda self: self
    cls.__abs__ = lambda self: self.trace.call("abs", self)
    cls.__invert__ = lambda self: self.trace.call("not", self)
    cls.__hash__ = object.__hash__


class Row:
    """A captured tensor indexed down to a short row: indexable further, elementwise, and reducible by sum, dot, max, min, mean."""

    __array_priority__ = 1000

    def __init__(
        self,
        trace: Trace,
        items: list[Any] | None = None,
        *,
        tensor: torch.Tensor | None = None,
        index: tuple[Expr, ...] = (),
    ) -> None:
        self.trace, self._items, self.tensor, self.index = trace, items, tensor, index

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, dict(kwargs or {}))

    @property
    def shape(self) -> torch.Size:
        if self.tensor is None:
            return torch.Size((len(self._items or ()),))
        return self.tensor.shape[len(self.index) :]

    ndim = property(lambda self: len(self.shape))
    dim = lambda self: len(self.shape)

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
                raise error(
                    f"only a row of at most {ROW_LIMIT} elements can be used as a whole",
                    given=f"shape {tuple(self.shape)}",
                    hint="index it down to one element, or compute the reduction outside the mod and capture its result",
                )
            slot, dtype = self.trace.capture(self.tensor), self.tensor.dtype
            self._items = [
                self.trace.wrap(load(slot, dtype, (*self.index, const(i, torch.int64)))) for i in range(self.shape[0])
            ]
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
        if name.startswith("_") or name not in FUNCTIONS:
            raise AttributeError(name) if name.startswith("_") else unsupported(name)
        return lambda *args, **kwargs: _from_user(self.trace, FUNCTIONS[name], (self, *args), kwargs)

    def __matmul__(self, other: Any) -> Any:
        return FUNCTIONS["dot"](self.trace, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return FUNCTIONS["dot"](self.trace, other, self)

    def __pow__(self, other: Any) -> Any:
        return _from_user(self.trace, FUNCTIONS["pow"], (self, other), {})

    @staticmethod
    def zip(trace: Trace, op: str, args: Sequence[Any]) -> Row:
        """A table operation element by element; scalars and rows of one element broadcast."""
        rows = [row_items(trace, a) for a in args]
        n = max(len(r) for r in rows if r is not None)
        if any(r is not None and len(r) not in (1, n) for r in rows):
            raise error("rows of different lengths cannot be combined", given=[len(r) for r in rows if r is not None])

        def element(i: int) -> Any:
            return trace.call(op, *(a if r is None else r[i if len(r) > 1 else 0] for r, a in zip(rows, args)))

        return Row(trace, [element(i) for i in range(n)])

    def reduce(self, op: str) -> Any:
        """The elements joined from the first to the last."""
        total = self.items[0]
        for item in self.items[1:]:
            total = self.trace.call(op, total, item)
        return total


_install_operators(Proxy)
_install_operators(Row)


def row_items(trace: Trace, x: Any) -> list[Any] | None:
    """Elements of a row or of a captured 1-D tensor; None for scalars."""
    if isinstance(x, Row):
        return x.items
    if isinstance(x, torch.Tensor) and x.ndim == 1 and x.numel() != 1:
        return Row(trace, tensor=x).items
    return None


# ---------------------------------------------------------------- how torch reaches a proxy
def unsupported(name: str) -> FlexError:
    """The error for a function that is not in FUNCTIONS, with what to write instead."""
    hints = {
        "item": "keep the value as a tensor: a captured tensor may be used directly",
        "tolist": "keep the value as a tensor",
        "rand": "draw random numbers outside the mod and capture them",
        "randn": "draw random numbers outside the mod and capture them",
        "rand_like": "draw random numbers outside the mod and capture them",
        "bernoulli": "draw random numbers outside the mod and capture them",
        "dropout": "draw the mask outside the mod and capture it",
        "apply": "write the function with torch operations; its derivative is derived",
    }
    hint = hints.get(name.strip("_"))
    if hint is None and name.endswith("_") and name.rstrip("_") in FUNCTIONS:
        hint = f"{name.rstrip('_')}, which returns a new value"
    return error(
        f"`{name}` is not supported in a mod",
        hint=hint or "pointwise torch operations, torch.where, and captured tensors indexed by the arguments",
    )


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of a captured tensor never comes here; one of a proxy does
        raise unsupported(str(getattr(getattr(func, "__self__", None), "__name__", name)))
    trace = next(x.trace for x in _flat(args, kwargs) if isinstance(x, (Proxy, Row)))
    if name == "__getitem__":
        return _index(trace, args[0], args[1])
    if name.startswith("__r") and name[3:-2] in FUNCTIONS and name not in ("__rshift__",):
        return _from_user(trace, FUNCTIONS[name[3:-2]], (args[1], args[0]), kwargs)
    inplace = (
        name.endswith("_")
        and not name.startswith("__")
        or name.startswith("__i")
        and name[3:-2] in FUNCTIONS
        or name == "__setitem__"
    )
    handler = None if inplace else FUNCTIONS.get(name.strip("_"))
    if handler is None:
        raise unsupported(name)
    if kwargs.pop("out", None) is not None or kwargs.pop("inplace", False):
        raise error("a mod may not write in place", hint="return a new value")
    return _from_user(trace, handler, args, kwargs)


def _from_user(trace: Trace, handler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return handler(trace, *map(trace.outside, args), **{k: trace.outside(v) for k, v in kwargs.items()})


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (tuple, list)):
            yield from _flat(x, {})
        else:
            yield x


def _index(trace: Trace, tensor: Any, index: Any) -> Any:
    """tensor[index] with traced positions: an element, or a Row when positions are left over."""
    if not isinstance(tensor, torch.Tensor):
        raise error("only captured torch tensors can be indexed by traced values", given=type(tensor).__name__)
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(p is None for p in parts):
        raise error("None (a new axis) is not supported when indexing a captured tensor in a mod")
    if any(p is ... for p in parts):
        at = next(i for i, p in enumerate(parts) if p is ...)
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - len(parts) + 1)
    if len(parts) > tensor.ndim:
        raise error(
            "too many indices for a captured tensor",
            given=f"{len(parts)} for shape {tuple(tensor.shape)}",
            cls=CaptureIndexError,
        )
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


def _position(trace: Trace, p: Any) -> Expr:
    operand = trace.operand(trace.outside(p))
    if isinstance(operand, Expr) and operand.dtype == torch.bool or isinstance(operand, bool):
        raise error("a boolean mask cannot index a captured tensor in a mod", hint="torch.where")
    if isinstance(operand, Expr) and operand.dtype.is_floating_point or isinstance(operand, float):
        raise error("an index must be an integer", given="a float", hint=".to(torch.int64)", cls=CaptureIndexError)
    return convert(operand, torch.int64)
