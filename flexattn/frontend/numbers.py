"""Which Python numbers are arguments of a kernel and which are constants of the program.

A number that reaches a mod through a closure, a default, a partial argument, a global or an attribute is an argument; a literal
is a constant. Provenance is made visible by running a copy of the function whose cells, defaults and globals hold tagged
numbers (`IntArg`, `FloatArg`): they compute and compare like the originals and stay tagged under arithmetic, so `1 / cap` is one
argument too. A plain number that meets a traced value is a constant only if the code itself contains it.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from flexattn.errors import TraceError
from flexattn.frontend.source import user_source

_CONTAINER_LIMIT = 64  # longer lists of numbers are data, not settings; capture a tensor
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")


class IntArg(int):
    """An int with provenance; `slot` is its place among a trace's numbers."""

    slot: int | None = None


class FloatArg(float):
    """A float with provenance."""

    slot: int | None = None


def tag(value: Any) -> Any:
    """A tagged copy of a finite int or float; anything else unchanged."""
    if type(value) is int:
        return IntArg(value)
    if type(value) is float and math.isfinite(value):
        return FloatArg(value)
    return value


def _contagious(name: str, base: type) -> Callable[..., Any]:
    method = getattr(base, name)

    def call(self: Any, *other: Any) -> Any:
        result = method(self, *other)
        return tag(result)

    return call


for _base, _cls in ((int, IntArg), (float, FloatArg)):
    for _name in [f"__{r}{n}__" for n in _BINARY for r in ("", "r")] + ["__neg__", "__pos__", "__abs__"]:
        setattr(_cls, _name, _contagious(_name, _base))
for _name in ("and", "or", "xor", "lshift", "rshift"):
    for _full in (f"__{_name}__", f"__r{_name}__"):
        setattr(IntArg, _full, _contagious(_full, int))


class View:
    """Stands in for an object inside a mod: its numbers read as tagged, its methods run on the view."""

    def __init__(self, target: Any, tagger: Tagger) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_tagger", tagger)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # so that isinstance and super() see the original
        return type(object.__getattribute__(self, "_target"))

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(object.__getattribute__(self, "_target"))
        target = object.__getattribute__(self, "_target")
        tagger = object.__getattribute__(self, "_tagger")
        value = getattr(target, name)
        if (
            isinstance(value, types.MethodType)
            and value.__self__ is target
            and isinstance(value.__func__, types.FunctionType)
        ):
            return types.MethodType(tagger.function(value.__func__), self)
        return tagger.value(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        target = object.__getattribute__(self, "_target")
        return object.__getattribute__(self, "_tagger")._callable(target)(*args, **kwargs)


def _through_view(operation: Callable[..., Any]) -> Callable[..., Any]:
    """What Python looks up on the class (`for x in module`, `parameters[0]`) done on the object itself, its numbers tagged."""

    def call(view: View, *args: Any) -> Any:
        target = object.__getattribute__(view, "_target")
        return object.__getattribute__(view, "_tagger").value(operation(target, *args))

    return call


for _name in ("getitem", "contains", "eq", "ne"):
    setattr(View, f"__{_name}__", _through_view(getattr(operator, _name)))
_BUILTINS: dict[str, Callable[..., Any]] = {"iter": iter, "len": len, "bool": bool, "hash": hash}
for _name in _BUILTINS:
    setattr(View, f"__{_name}__", _through_view(_BUILTINS[_name]))


class _NoCustomGradient:
    """Stands in for an autograd.Function, whose own backward a trace could not honour."""

    def __init__(self, function: type) -> None:
        self.function = function

    def apply(self, *args: Any) -> None:
        where = user_source()
        raise TraceError(
            f"autograd.Function {self.function.__name__} cannot be used in a mod: its backward would be lost",
            hint="write the function with torch operations; its derivative is derived",
            where=str(where) if where else None,
        )


@functools.lru_cache(maxsize=4096)
def code_facts(code: types.CodeType) -> tuple[frozenset[tuple[type, Any]], frozenset[str]]:
    """(numeric literals, global names) of a code object and those nested in it."""
    literals: set[tuple[type, Any]] = set()
    names = set(code.co_names)

    def collect(value: Any) -> None:
        if type(value) in (int, float):
            literals.add((type(value), value))
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                collect(item)
        elif isinstance(value, types.CodeType):
            inner, inner_names = code_facts(value)
            literals.update(inner)
            names.update(inner_names)

    for item in code.co_consts:
        collect(item)
    return frozenset(literals), frozenset(names)


class _Globals(dict[str, Any]):
    """A function's globals with some names replaced; everything else is looked up in the original."""

    def __init__(self, base: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self["__builtins__"] = base.get("__builtins__", __builtins__)
        self.base = base

    def __missing__(self, name: str) -> Any:
        return self.base[name]


class Tagger:
    """Copies a callable so that numbers from outside its code arrive tagged; collects the literals of all code it met."""

    def __init__(self) -> None:
        self.literals: set[tuple[type, Any]] = set()
        self._copies: dict[types.FunctionType, types.FunctionType] = {}

    def is_literal(self, value: int | float) -> bool:
        return (type(value), value) in self.literals

    def value(self, x: Any) -> Any:
        """`x`, tagged if a number, copied if a function or a small container of such, viewed if a settings object."""
        kind = type(x)
        if kind is int or kind is float:
            return tag(x)
        if kind is types.FunctionType:
            return self.function(x)
        if kind in (tuple, list) and len(x) <= _CONTAINER_LIMIT:
            items = [self.value(i) for i in x]
            return x if all(a is b for a, b in zip(items, x)) else kind(items)
        if kind is dict and len(x) <= _CONTAINER_LIMIT:
            values = {k: self.value(v) for k, v in x.items()}
            return x if all(values[k] is v for k, v in x.items()) else values
        if kind is functools.partial:
            return functools.partial(
                self.value(x.func), *map(self.value, x.args), **{k: self.value(v) for k, v in x.keywords.items()}
            )
        if kind is types.MethodType and isinstance(x.__func__, types.FunctionType):
            owner = View(x.__self__, self) if self._is_settings(x.__self__) else x.__self__
            return types.MethodType(self.function(x.__func__), owner)
        if isinstance(x, type) and issubclass(x, torch.autograd.Function):
            return _NoCustomGradient(x)
        if self._is_settings(x):
            return View(x, self)
        return x

    @staticmethod
    def _is_settings(x: Any) -> bool:
        """A plain Python object whose attributes a mod may read; tensors, modules, classes and library objects are not."""
        cls = type(x)
        if isinstance(x, (torch.Tensor, type, types.ModuleType)) or not hasattr(x, "__dict__"):
            return False
        if cls.__module__.split(".")[0] in ("flexattn", "torch", "builtins", "numpy") and not isinstance(
            x, torch.nn.Module
        ):
            return getattr(cls, "_flexattn_view", False)
        return isinstance(x, torch.nn.Module) or not any(
            hasattr(cls, n) for n in ("__getitem__", "__add__", "__array__")
        )

    def _callable(self, x: Any) -> Any:
        """A callable object: its __call__ (a module's forward) as a function of a view."""
        name = "forward" if isinstance(x, torch.nn.Module) else "__call__"
        method = getattr(type(x), name)
        return types.MethodType(self.function(method), View(x, self)) if isinstance(method, types.FunctionType) else x

    def function(self, fn: types.FunctionType) -> types.FunctionType:
        if (done := self._copies.get(fn)) is not None:
            return done
        module = fn.__module__ or ""
        if module.split(".")[0] in ("torch", "numpy"):
            return fn
        literals, names = code_facts(fn.__code__)
        self.literals.update(literals)
        self._copies[fn] = fn  # while its cells are copied: a recursive function keeps calling the original
        replaced = {
            n: v for n in names if n in fn.__globals__ and (v := self.value(fn.__globals__[n])) is not fn.__globals__[n]
        }
        closure = fn.__closure__ and tuple(self._cell(c) for c in fn.__closure__)
        space = _Globals(fn.__globals__, replaced) if replaced else fn.__globals__
        copy = types.FunctionType(fn.__code__, space, fn.__name__, None, closure)
        copy.__defaults__ = fn.__defaults__ and tuple(map(self.value, fn.__defaults__))
        copy.__kwdefaults__ = fn.__kwdefaults__ and {k: self.value(v) for k, v in fn.__kwdefaults__.items()}
        self._copies[fn] = copy
        return copy

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a name bound later
            return cell
        new = self.value(content)
        return cell if new is content else types.CellType(new)
