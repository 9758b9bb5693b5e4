"""Traces that need no second run: reads everything a plain function can see, and knows its last trace if that is unchanged.

The one idea: a function's result follows from its code, the values its cells, defaults and global names hold, and torch's
default data type. Where all of that can be compared in a few microseconds (numbers, strings, tensors by identity, modules of
torch and Python's mathematics, functions of the same kind), the last trace stands; in doubt, the mod is run again.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexattn.frontend.numbers import code_facts
from flexattn.frontend.program import Traced

_MODULES = ("torch", "math", "operator", "numpy")
_DEEPEST = 4  # functions that call functions


class _Seen(NamedTuple):
    """What a function could see: `facts` compare by value, tensors are listed in the order they were met."""

    facts: tuple[Hashable, ...]
    tensors: tuple[torch.Tensor, ...]


class _Memory(NamedTuple):
    seen: _Seen
    versions: tuple[int, ...] | None  # of the tensors, where a number may have been read from one
    traced: Traced


_KNOWN: WeakKeyDictionary[types.FunctionType, dict[Hashable, _Memory]] = WeakKeyDictionary()


def recall(fn: Any, key: Hashable) -> Traced | None:
    """The last trace of a function under a key, if nothing the function can see has changed since; else None."""
    known = _KNOWN.get(fn) if type(fn) is types.FunctionType else None
    memory = None if known is None else known.get(key)
    if memory is None:
        return None
    seen = _look(fn)
    if seen is None or seen.facts != memory.seen.facts or len(seen.tensors) != len(memory.seen.tensors):
        return None
    if any(a is not b for a, b in zip(seen.tensors, memory.seen.tensors)):
        return None
    if memory.versions is not None and memory.versions != tuple(t._version for t in seen.tensors):
        return None
    return memory.traced


def remember(fn: Any, key: Hashable, traced: Traced) -> None:
    """Keeps a trace, if all it rests on can be compared later; the function itself keeps its tensors alive."""
    seen = _look(fn) if type(fn) is types.FunctionType else None
    if seen is None or any(
        t.is_inference() or t.grad_fn is not None for t in seen.tensors
    ):  # a graph must not be kept alive
        return
    captures = traced.binding.captures
    whole = all(any(c is t for t in seen.tensors) for c in captures) and all(
        any(c is t for c in captures) for t in seen.tensors
    )
    if whole:  # else a tensor was computed from, or only its shape was read
        versions = tuple(t._version for t in seen.tensors) if traced.binding.numbers else None
        _KNOWN.setdefault(fn, {})[key] = _Memory(seen, versions, traced)


def _look(fn: types.FunctionType) -> _Seen | None:
    tensors: list[torch.Tensor] = []
    facts = _function_facts(fn, tensors, 0)
    return None if facts is None else _Seen((torch.get_default_dtype(), *facts), tuple(tensors))


def _function_facts(fn: types.FunctionType, tensors: list[torch.Tensor], depth: int) -> list[Hashable] | None:
    if fn.__dict__ or depth > _DEEPEST:
        return None
    facts: list[Hashable] = [fn.__code__]
    try:
        values = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # a name that is bound later
        return None
    values += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    for name in code_facts(fn.__code__)[1]:
        if name in fn.__globals__:
            facts.append(name)
            values.append(fn.__globals__[name])
    for value in values:
        found = _fact(value, tensors, depth)
        if found is None:
            return None
        facts.append(found)
    return facts


def _fact(value: Any, tensors: list[torch.Tensor], depth: int) -> Hashable | None:
    """Something that is equal exactly while `value` means the same to a mod; None where that cannot be said."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None), torch.dtype):
        return kind, value
    if kind in (torch.Tensor, torch.nn.Parameter):
        tensors.append(value)
        return "tensor", value.dtype, value.shape
    if kind is types.FunctionType:
        facts = _function_facts(value, tensors, depth + 1)
        return None if facts is None else tuple(facts)
    if kind is tuple:
        items = [_fact(x, tensors, depth) for x in value]
        return None if any(x is None for x in items) else ("tuple", *items)
    if kind is types.ModuleType and value.__name__.split(".")[0] in _MODULES:
        return "module", value.__name__
    if kind in (types.BuiltinFunctionType, type) and value.__module__.split(".")[0] in (*_MODULES, "builtins"):
        return "built in", value.__module__, value.__qualname__
    return None


__all__ = ["recall", "remember"]
