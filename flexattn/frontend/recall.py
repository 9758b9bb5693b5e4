"""Traces that need no second run: reads everything a plain function can see, and knows its last trace if that is unchanged.

The one idea: a function's result follows from its code, the values its cells, defaults and global names hold, and torch's
default data type. Where all of that can be compared in a few microseconds (numbers, strings, tensors by identity, modules of
torch and Python's mathematics, functions of the same kind), and every name in the code is one of a pure function, the last
trace stands; in doubt (a name that is not listed here, as is_grad_enabled, open or globals; a write), the mod is run again.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexattn.frontend.bytecode import code_facts, once
from flexattn.frontend.program import Traced
from flexattn.frontend.proxy import FUNCTIONS

_MODULES = ("torch", "math", "operator", "numpy")
_DEEPEST = 4  # functions that call functions
# fmt: off
_BUILTINS = frozenset((
    "abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "isinstance", "issubclass", "len", "list", "max", "min",
    "pow", "range", "reversed", "round", "sorted", "str", "sum", "tuple", "zip",
))
_READS = frozenset(("item", "tolist", *_BUILTINS))  # what may look at the contents of a tensor
_ATTRIBUTES = frozenset((
    "nn", "functional", "special", "Tensor", "Size", "is_tensor", "dtype", "device", "shape", "ndim", "size", "dim", "numel", "T",
    "mT", "item", "tolist", "inf", "nan", "pi", "e", "tau", "float16", "float32", "float64", "bfloat16", "half", "double", "int8",
    "int16", "int32", "int64", "uint8", "finfo", "iinfo", "eps", "tiny", "is_floating_point", "tensor", "as_tensor", "arange", "full",
    "zeros", "ones", "gcd", "lcm", "isqrt", "log10", "atan", "sinh", "cosh", "asin", "acos", "radians", "degrees",
))
# fmt: on


class _Seen(NamedTuple):
    """What a function could see: `facts` compare by value, tensors are listed in the order they were met."""

    facts: tuple[Hashable, ...]
    tensors: tuple[torch.Tensor, ...]
    codes: tuple[types.CodeType, ...]


class _Memory(NamedTuple):
    seen: _Seen
    versions: tuple[int, ...] | None  # of the tensors, where a number may have been read from one
    traced: Traced


class _Met(NamedTuple):
    """The tensors and the code that a function can reach."""

    tensors: list[torch.Tensor]
    codes: list[types.CodeType]


_KNOWN: WeakKeyDictionary[types.FunctionType, dict[Hashable, _Memory]] = WeakKeyDictionary()


@once
def _is_pure(code: types.CodeType) -> bool:
    """Whether all that a code names, apart from its globals, is known to follow from its arguments alone."""
    facts = code_facts(code)
    return not facts.writes and all(n in FUNCTIONS or n in _BUILTINS or n in _ATTRIBUTES for n in facts.attributes)


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
        reads = bool(traced.binding.numbers) or any(f.branches or f.names & _READS for f in map(code_facts, seen.codes))
        versions = tuple(t._version for t in seen.tensors) if reads else None
        _KNOWN.setdefault(fn, {})[key] = _Memory(seen, versions, traced)


def _look(fn: types.FunctionType) -> _Seen | None:
    met = _Met([], [])
    facts = _function_facts(fn, met, 0)
    return None if facts is None else _Seen((torch.get_default_dtype(), *facts), tuple(met.tensors), tuple(met.codes))


def _function_facts(fn: types.FunctionType, met: _Met, depth: int) -> list[Hashable] | None:
    if fn.__dict__ or depth > _DEEPEST or not _is_pure(fn.__code__):
        return None
    facts: list[Hashable] = [fn.__code__]
    met.codes.append(fn.__code__)
    try:
        values = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:  # a name that is bound later
        return None
    values += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    known = code_facts(fn.__code__)
    for name in known.names:
        if name in fn.__globals__:
            facts.append(name)
            values.append(fn.__globals__[name])
        elif name in known.globals and name not in _BUILTINS:
            return None
    for value in values:
        found = _fact(value, met, depth)
        if found is None:
            return None
        facts.append(found)
    return facts


def _fact(value: Any, met: _Met, depth: int) -> Hashable | None:
    """Something that is equal exactly while `value` means the same to a mod; None where that cannot be said."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None), torch.dtype):
        return kind, value
    if kind in (torch.Tensor, torch.nn.Parameter):
        met.tensors.append(value)
        return "tensor", value.dtype, value.shape
    if kind is types.FunctionType:
        facts = _function_facts(value, met, depth + 1)
        return None if facts is None else tuple(facts)
    if kind is tuple:
        items = [_fact(x, met, depth) for x in value]
        return None if any(x is None for x in items) else ("tuple", *items)
    if kind is types.ModuleType and value.__name__.split(".")[0] in _MODULES:
        return "module", value.__name__
    if kind in (types.BuiltinFunctionType, type) and value.__module__.split(".")[0] in (*_MODULES, "builtins"):
        return "built in", value.__module__, value.__qualname__
    return None


__all__ = ["recall", "remember"]
