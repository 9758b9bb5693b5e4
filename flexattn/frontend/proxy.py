"""The values a mod sees while it is traced: `Proxy`, a scalar, and `Row`, a short row of a captured tensor.

Operators, torch functions and `tensor[proxy]` all arrive here and become table operations; whatever would need the value of a
traced index raises an error with the user's line. The functions known by name are registered in `FUNCTIONS` by torch_functions.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flexattn.errors import CaptureIndexError, FlexError
from flexattn.frontend.bytecode import FloatLiteral, IntLiteral, called
from flexattn.frontend.expr import (
    Expr,
    NumberRef,
    Operand,
    const,
    convert,
    is_floating,
    load,
    make,
    promote,
    to_text,
)
from flexattn.frontend.mod_errors import DivisionError, MissingAttributeError, error, unsupported
from flexattn.frontend.numbers import FloatArg, IntArg, Tagger
from flexattn.frontend.source import Source, is_users, user_source

ROW_LIMIT = 256  # a row is unrolled element by element
Handler = Callable[..., Any]
FUNCTIONS: dict[str, Handler] = {}  # torch functions and tensor methods by name


class Trace:
    """What one run of a mod collects."""

    def __init__(self, tagger: Tagger, remember: bool) -> None:
        self.tagger, self.remember = tagger, remember
        self.captures: list[torch.Tensor] = []
        self.plain: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # of a subclass by its id, held so that it stays its own
        self.numbers: list[Any] = []  # ints and floats, or symbols of a graph that is being traced
        self.sources: dict[Expr, Source] = {}

    def capture(self, tensor: torch.Tensor) -> int:
        """The slot of a captured tensor, the same for the same object."""
        if type(tensor) not in _OWN:
            tensor = self.readable(tensor)
        for slot, known in enumerate(self.captures):
            if known is tensor:
                return slot
        self.captures.append(self.readable(tensor))
        return len(self.captures) - 1

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that kernels can read: of a plain subclass its data, the same object each time."""
        own = type(tensor) in _OWN
        if own and tensor.dtype in READABLE and tensor.layout is torch.strided:
            return tensor
        if (known := self.plain.get(id(tensor))) is not None:
            return known[1]
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            kind = tensor.layout if tensor.layout is not torch.strided else type(tensor).__name__
            raise error(
                "a captured tensor must be dense", given=kind, hint=".to_dense(), or .full_tensor(), outside the mod"
            )
        if tensor.dtype not in READABLE:
            raise error(
                "a captured tensor must be bool, an integer or a float of 16 to 64 bits",
                given=tensor.dtype,
                hint="converting it outside the mod, as in table.float()",
            )
        if own or hasattr(type(tensor), "__torch_dispatch__") and _dispatches(type(tensor)):
            return tensor
        self.plain[id(tensor)] = (tensor, tensor.as_subclass(torch.Tensor))
        return self.plain[id(tensor)][1]

    def operand(self, x: Any) -> Operand:
        """A traced value, a number or a captured scalar as an operand of `make`."""
        if type(x) is Proxy:
            if x.trace is not self:
                raise error(
                    "a traced value belongs to the call that made it",
                    given="one of another call or mod, kept in an object or a list",
                    hint="computing it anew in each call",
                )
            return x.expr
        if type(x) is Row:
            raise error(
                "a row is no single value", given=f"shape {tuple(x.shape)}", hint="index it, or reduce it by .sum()"
            )
        if isinstance(x, int) and not -(1 << 63) <= x < 1 << 63:
            raise error("an integer in a mod must fit in 64 bits", given=x, hint="float('inf'), or sys.maxsize")
        if isinstance(x, (IntArg, FloatArg)):
            if x.slot is None or x.slot >= len(self.numbers) or self.numbers[x.slot] is not x:
                x.slot = len(self.numbers)
                self.numbers.append(x)
            return NumberRef(x.slot, "int" if isinstance(x, IntArg) else "float")
        if isinstance(x, (bool, int, float)):
            return x
        if isinstance(x, _SYMBOLS):  # a size of a graph that is being traced
            self.numbers.append(x)
            return NumberRef(len(self.numbers) - 1, "int" if isinstance(x, torch.SymInt) else "float")
        if isinstance(x, torch.Tensor):
            return self.scalar(self.readable(x))
        if hasattr(x, "item") and getattr(x, "ndim", None) == 0:  # a numpy scalar
            return self.operand(self.outside(x.item()))
        raise error(
            f"a mod cannot use a {type(x).__name__} as a value", hint="use Python numbers or captured torch tensors"
        )

    def outside(self, x: Any) -> Any:
        """A value as it comes from the user's code: a plain number is a constant only if that code contains it."""
        kind = type(x)
        if kind is IntLiteral:
            return int(x)
        if kind is FloatLiteral:
            return float(x)
        if (kind is int or kind is float) and math.isfinite(x) and not self.tagger.is_literal(x):
            return self.tagger.argument(x)
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
        if any(type(a) is Row for a in args):
            return Row.zip(self, op, args)
        try:
            operands = [self.operand(a) for a in args]
            if op in ("floordiv", "mod"):
                self.check_divisor(*operands)
            return self.wrap(make(op, *operands))
        except FlexError as e:
            raise e if e.where else error(e.what, given=e.given, hint=e.hint, cls=type(e)) from None

    def check_divisor(self, x: Operand, divisor: Operand) -> None:
        """Integers by a number that is 0 are an error, as in torch."""
        value = self.numbers[divisor.slot] if isinstance(divisor, NumberRef) else divisor
        if isinstance(value, int) and value == 0 and not is_floating(promote([x, divisor])):
            raise error("an integer is divided by zero (`//`, `%`)", hint="a divisor of at least 1", cls=DivisionError)


READABLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64) + (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_OWN = (torch.Tensor, torch.nn.Parameter)


@lru_cache(maxsize=256)
def _dispatches(cls: type) -> bool:
    """Whether a class of tensors has a dispatch of its own, as fake tensors have."""
    return getattr(cls.__torch_dispatch__, "__func__", None) is not None  # type: ignore[attr-defined]


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
        return _attribute(self, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """torch.Tensor where a mod asks for it by isinstance() or torch.is_tensor(); elsewhere the truth, as torch's own
        C++ code asks the same way before it reads memory."""
        return _class_of(self)

    dtype = property(lambda self: self.expr.dtype)
    device = property(lambda self: torch.device("cpu"))  # of scalars made inside a mod; they go where the mod runs
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)
    is_floating_point = lambda self: self.expr.dtype.is_floating_point
    dim = lambda self: 0
    numel = lambda self: 1
    T = property(lambda self: self)

    def __getitem__(self, index: Any) -> Proxy:
        if type(index) is tuple and not index or index is ...:
            return self
        raise error("a traced value is a scalar and cannot be indexed", hint="the value itself; a mod is of one pair")

    def __bool__(self) -> bool:
        raise error(
            "a mod may not branch on a traced value (`if`, `and`, `or`, `not`, `while`, `max()`, `min()`)",
            hint="torch.where(condition, a, b) instead of `if`, & | ~ instead of and, or, not, and torch.maximum and "
            "torch.minimum instead of max() and min()",
        )

    def __int__(self) -> int:
        raise error(
            "a traced value has no Python value (`int()`, `float()`, `range()`)",
            hint="tensor code: x.to(torch.int64) for int(x), torch.sin(x) for math.sin(x), a tensor for a list",
        )

    __float__ = __index__ = __int__

    def __iter__(self) -> Iterator[Any]:
        raise error("a traced value is a scalar and cannot be iterated", hint="the value itself; a mod is of one pair")

    def __len__(self) -> int:
        raise error(
            "a traced value is a scalar and has no length (`len()`, `list()`, `torch.tensor()`)",
            hint="the value itself, which is a tensor already",
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        raise error("a mod may not write in place", hint="return a new value, with torch.where")

    def __pow__(self, other: Any) -> Any:
        return _from_user(self.trace, FUNCTIONS["pow"], (self, other), {})

    def __rpow__(self, other: Any) -> Any:
        return _from_user(self.trace, FUNCTIONS["pow"], (other, self), {})

    def __round__(self, digits: Any = None) -> Any:
        raise error("round() is not for tensors", hint="torch.round(x)")

    def __divmod__(self, other: Any) -> Any:
        raise error("divmod() is not for tensors", hint="x // y and x % y")

    __rdivmod__ = __divmod__

    def __matmul__(self, other: Any) -> Any:
        raise error(
            "a traced value is a scalar and has no product `@`", hint="x * y, or table[q_idx] @ table[kv_idx] of rows"
        )

    __rmatmul__ = __matmul__

    def __repr__(self) -> str:
        return f"Proxy({to_text(self.expr)})"

    __hash__ = object.__hash__


_SYMBOLS = (torch.SymInt, torch.SymFloat)
_VALUES = (
    *_SYMBOLS,
    int,
    float,
    bool,
    IntArg,
    FloatArg,
    IntLiteral,
    FloatLiteral,
    torch.Tensor,
    Proxy,
    torch.nn.Parameter,
)


def _knows_better(x: Any, operator: str) -> bool:
    """Whether an object of the user's has an operator of its own for a traced value on its left."""
    if isinstance(x, (int, float, str, bytes, list, tuple, dict, torch.Tensor, Row)) or hasattr(x, "item"):
        return False
    return getattr(type(x), operator, None) is not getattr(object, operator, None)


def _install_operators(cls: Any) -> None:
    """Python's operators, which have the names of table operations."""

    def forward(op: str, back: str = "") -> Handler:
        def call(self: Any, other: Any) -> Any:
            if type(other) not in _VALUES and _knows_better(other, back or f"__r{op}__"):
                return NotImplemented
            return self.trace.call(op, self, self.trace.outside(other))

        return call

    def reflected(op: str) -> Handler:
        return lambda self, other: self.trace.call(op, self.trace.outside(other), self)

    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
        setattr(cls, f"__{op}__", forward(op))
        setattr(cls, f"__i{op}__", forward(op))
        setattr(cls, f"__r{op}__", reflected(op))
    for op, back in {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}.items():
        setattr(cls, f"__{op}__", forward(op, f"__{back}__"))
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
        if name.startswith("_"):
            raise AttributeError(name)
        return _attribute(self, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _class_of(self)

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
            raise error(
                "rows of different lengths cannot be combined",
                given=[len(r) for r in rows if r is not None],
                hint="rows of one length, or a part of the longer one, as in table[q_idx, :n]",
            )

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
    if type(x) is Row:
        return x.items
    if type(x) is not Proxy and isinstance(x, torch.Tensor) and x.ndim == 1 and x.numel() != 1:
        return Row(trace, tensor=x).items
    return None


# ---------------------------------------------------------------- how torch reaches a proxy
def _class_of(x: Any) -> type:
    """What isinstance is told, which asks whoever is no instance by his type."""
    frame = sys._getframe(2)
    if is_users(frame):
        return torch.Tensor if called(frame.f_code, frame.f_lasti) == "isinstance" else type(x)
    if frame.f_code is _IS_TENSOR:
        return torch.Tensor
    if frame.f_code.co_filename == _FUNCTORCH:
        outer: Any = frame
        while outer is not None and outer.f_code is not _APPLY:
            outer = outer.f_back
        if outer is not None:
            raise error(
                f"autograd.Function {outer.f_locals['cls'].__name__} cannot be used in a mod: its backward would be lost",
                hint="write the function with torch operations; its derivative is derived",
            )
    return type(x)


_IS_TENSOR, _APPLY = torch.is_tensor.__code__, torch.autograd.Function.apply.__code__
_FUNCTORCH = unwrap_dead_wrappers.__code__.co_filename


def _attribute(x: Any, name: str) -> Any:
    """A method of a traced value; one that no mod may call raises when it is called, and what no tensor has is not there."""
    handler = FUNCTIONS.get(name)
    if handler is not None:
        return lambda *args, **kwargs: _from_user(x.trace, handler, (x, *args), kwargs)
    method = getattr(torch.Tensor, name, None)
    if callable(method):

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise unsupported(name, FUNCTIONS)

        return refuse
    if method is not None or hasattr(torch.Tensor, name):
        raise unsupported(name, FUNCTIONS)
    hint = "a captured tensor or a closure for what else a mod needs"
    raise error(f"a tensor has no attribute `{name}`", hint=hint, cls=MissingAttributeError)


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property of a captured tensor never comes here; one of a proxy does
        raise unsupported(str(getattr(getattr(func, "__self__", None), "__name__", name)), FUNCTIONS)
    trace = next(x.trace for x in _flat(args, kwargs) if type(x) in (Proxy, Row))
    return call_by_name(trace, name, args, kwargs)


def call_by_name(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of torch's or a method of tensors of that name makes of arguments of which one is a traced value."""
    if name in ("__getitem__", "getitem"):
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
        raise unsupported(name, FUNCTIONS)
    if kwargs.pop("out", None) is not None or kwargs.pop("inplace", False):
        raise error("a mod may not write in place", hint="return a new value")
    return _from_user(trace, handler, args, kwargs)


def _from_user(trace: Trace, handler: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return handler(trace, *map(trace.outside, args), **{k: trace.outside(v) for k, v in kwargs.items()})


def _flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if type(x) is not Proxy and isinstance(x, (tuple, list)):
            yield from _flat(x, {})
        else:
            yield x


def _index(trace: Trace, tensor: Any, index: Any) -> Any:
    """tensor[index] with traced positions: an element, or a Row when positions are left over."""
    if not issubclass(type(tensor), torch.Tensor):
        raise error(
            "only captured torch tensors can be indexed by traced values",
            given=type(tensor).__name__,
            hint="torch.as_tensor(...) outside the mod",
        )
    if type(tensor) not in _OWN or tensor.layout is not torch.strided:
        tensor = trace.readable(tensor)
    parts = list(index) if type(index) is not Proxy and isinstance(index, tuple) else [index]
    if any(p is None for p in parts):
        raise error(
            "None (a new axis) is not supported when indexing a captured tensor in a mod",
            given=f"shape {tuple(tensor.shape)}",
            hint="leaving it out: what a mod computes has no axes",
        )
    if any(p is ... for p in parts):
        at = next(i for i, p in enumerate(parts) if p is ...)
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - len(parts) + 1)
    if len(parts) > tensor.ndim:
        raise error(
            "too many indices for a captured tensor",
            given=f"{len(parts)} for shape {tuple(tensor.shape)}",
            hint="one index for each dimension of the tensor",
            cls=CaptureIndexError,
        )
    if any(type(p) is slice for p in parts):
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
