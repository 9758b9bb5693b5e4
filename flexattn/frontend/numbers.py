"""Which Python numbers are arguments of a kernel and which are constants of the program.

A number that reaches a mod through a closure, a default, a partial argument, a global or an attribute is an argument; a literal
is a constant. Provenance is made visible by running a copy of the function whose cells, defaults and globals hold tagged
numbers (`IntArg`, `FloatArg`): they compute and compare like the originals and stay tagged under arithmetic, so `1 / cap` is one
argument too. Objects are the user's own; a plain number that meets a traced value is a constant only if the running code contains it.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch

from flexattn.frontend.bytecode import FloatLiteral, IntLiteral, code_facts, knows_its_integers, last_name, marked
from flexattn.frontend.source import mod_frames

_MARKS_ALL = knows_its_integers()
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


class _Globals(dict[str, Any]):
    """A function's globals with some names replaced; everything else is looked up in the original."""

    def __init__(self, base: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(replaced)
        self["__builtins__"] = base.get("__builtins__", __builtins__)
        self.base = base

    def __missing__(self, name: str) -> Any:
        return self.base[name]


class _AsItIs(Exception):
    """A function must see the very objects: nothing of it may be a copy."""


class Tagger:
    """Copies a callable so that numbers from outside its code arrive tagged, and its own numbers as literals.

    Objects are never replaced: what an attribute holds is a plain number, an argument unless the code that is running contains it.
    Where code assigns to names outside it or asks for identities and types, nothing is copied, and all its numbers are plain.

    Attributes:
        draws: whether a function that was copied names one of torch's random functions; True where nothing was.
    """

    def __init__(self) -> None:
        self.draws = False
        self._copies: dict[types.FunctionType, types.FunctionType] = {}
        self._marked: set[int] = set()  # ids of code that the copies hold
        self._containers: dict[int, tuple[Any, Any, Any]] = {}  # the original, its copy, what the copy held first
        self._arguments: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def runnable(self, fn: Any) -> Any:
        """What to call in place of a mod."""
        # where a graph is made numbers may be its symbols, which do not compute with tagged ones
        if torch._C._len_torch_dispatch_stack():
            self.draws = True
            return fn
        try:
            return self._entry(fn)
        except _AsItIs:
            for known in (self._copies, self._marked, self._containers, self._arguments):
                known.clear()
            self.draws = True
            return fn

    def _entry(self, fn: Any) -> Any:
        kind = type(fn)
        if isinstance(fn, torch.nn.Module):
            return types.MethodType(self.function(kind.forward), fn) if _is_only_its_forward(fn) else fn
        call = getattr(kind, "__call__", None)  # noqa: B004
        if isinstance(call, types.FunctionType) and not isinstance(fn, type) and fn.__class__ is kind:
            return types.MethodType(self.function(call), fn)
        return self.value(fn)

    def value(self, x: Any) -> Any:
        """`x`, tagged if a number, copied if a function or a small container of such; any other object as it is."""
        kind = type(x)
        if kind is int or kind is float:
            return tag(x)
        if kind is types.FunctionType:
            return self.function(x)
        if kind is tuple and len(x) <= _CONTAINER_LIMIT:
            items = tuple(map(self.value, x))
            return x if all(a is b for a, b in zip(items, x)) else items
        if kind in (list, dict) and len(x) <= _CONTAINER_LIMIT:
            return self._container(x)
        if kind is functools.partial:
            return functools.partial(
                self.value(x.func), *map(self.value, x.args), **{k: self.value(v) for k, v in x.keywords.items()}
            )
        if kind is types.MethodType and isinstance(x.__func__, types.FunctionType):
            return types.MethodType(self.function(x.__func__), x.__self__)
        return x

    def _container(self, x: Any) -> Any:
        """A copy of a list or dictionary, whose changes `write_back` brings to the original."""
        if (known := self._containers.get(id(x))) is not None:
            return known[1]
        if isinstance(x, dict):
            if any(isinstance(k, types.FunctionType) for k in x):
                raise _AsItIs
            new: Any = {k: self.value(v) for k, v in x.items()}
            same = all(new[k] is v for k, v in x.items())
        else:
            new = [self.value(v) for v in x]
            same = all(a is b for a, b in zip(new, x))
        if same:
            return x
        self._containers[id(x)] = (x, new, new.copy())
        return new

    def write_back(self) -> None:
        """Brings what a mod wrote into copied containers to the user's own."""
        for original, copy, first in self._containers.values():
            if isinstance(copy, dict):
                if list(copy) != list(first) or any(copy[k] is not first[k] for k in first):
                    new = {k: original[k] if k in first and first[k] is v else self._plain(v) for k, v in copy.items()}
                    original.clear()
                    original.update(new)
            elif len(copy) != len(first) or any(a is not b for a, b in zip(copy, first)):
                own = {id(a): b for a, b in zip(first, original)}
                original[:] = [own.get(id(v)) if id(v) in own else self._plain(v) for v in copy]

    def _plain(self, x: Any) -> Any:
        if isinstance(x, (IntArg, IntLiteral)):
            return int(x)
        if isinstance(x, (FloatArg, FloatLiteral)):
            return float(x)
        return next((o for o, c in self._copies.items() if c is x), x) if isinstance(x, types.FunctionType) else x

    # ---------------------------------------------------------------- plain numbers
    def is_literal(self, value: int | float) -> bool:
        """Whether code that is running, and is no marked copy, contains a number."""
        key = (type(value), value)
        skips_marked = _MARKS_ALL or type(value) is float
        return any(
            key in code_facts(f.f_code).literals
            for f in mod_frames()
            if not (skips_marked and id(f.f_code) in self._marked)
        )

    def argument(self, value: int | float) -> IntArg | FloatArg:
        """A plain number as an argument: the same one for the same object read under the same name."""
        frame = next(mod_frames(), None)
        place = None if frame is None else (frame.f_code, last_name(frame.f_code, frame.f_lasti))
        known = self._arguments.get((place, id(value)))
        if known is None:
            known = self._arguments[place, id(value)] = (tag(value), value)  # holds the object, and so its id
        return known[0]  # type: ignore[no-any-return]

    # ---------------------------------------------------------------- functions
    def function(self, fn: types.FunctionType) -> types.FunctionType:
        if (done := self._copies.get(fn)) is not None:
            return done
        module = fn.__module__ or ""
        if module.split(".")[0] in ("torch", "numpy") and not module.startswith("torch.nn.attention"):
            return fn
        facts, changed = code_facts(fn.__code__), marked(fn.__code__)
        self.draws |= facts.draws
        own = module.startswith("flexattn.")  # the mods of the library, which ask for nothing
        if not own and (facts.rebinds or facts.asks):
            raise _AsItIs
        self._copies[fn] = fn  # while its cells are copied: a recursive function keeps calling the original
        replaced = {
            n: v
            for n in (() if own else facts.globals)
            if n in fn.__globals__ and (v := self.value(fn.__globals__[n])) is not fn.__globals__[n]
        }
        closure = fn.__closure__ and tuple(self._cell(c) for c in fn.__closure__)
        space = _Globals(fn.__globals__, replaced) if replaced else fn.__globals__
        code = fn.__code__ if facts.writes else changed  # a literal that is stored must stay a plain number
        if not facts.writes:
            self._mark(code)
        copy = types.FunctionType(code, space, fn.__name__, None, closure)
        copy.__defaults__ = fn.__defaults__ and tuple(map(self.value, fn.__defaults__))
        copy.__kwdefaults__ = fn.__kwdefaults__ and {k: self.value(v) for k, v in fn.__kwdefaults__.items()}
        copy.__dict__ = fn.__dict__
        self._copies[fn] = copy
        return copy

    def _mark(self, code: types.CodeType) -> None:
        self._marked.add(id(code))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._mark(inner)

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            content = cell.cell_contents
        except ValueError:  # a name bound later
            return cell
        new = self.value(content)
        return cell if new is content else types.CellType(new)


def _is_only_its_forward(module: torch.nn.Module) -> bool:
    """Whether calling a module is calling its forward: no hooks, and nothing replaced."""
    state = module.__dict__
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        "forward" not in state
        and isinstance(type(module).forward, types.FunctionType)
        and type(module).__call__ is torch.nn.Module.__call__
        and not any(state.get(h) for h in hooks)
        and state.get("_compiled_call_impl") is None
        and not torch.nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )
