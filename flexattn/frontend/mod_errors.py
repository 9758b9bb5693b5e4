"""Errors of a mod: with the user's line, and for what Python or torch raise there, as ours and as what it was.

Reads what was expected, or a foreign exception; makes FlexErrors. The one idea: a mod is the user's own code, so its line and what
to write there instead are what an error is for.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from traceback import walk_tb
from typing import Any

from torch.overrides import TorchFunctionMode

from flexattn.errors import FlexError, TraceError
from flexattn.frontend.bytecode import DRAWING
from flexattn.frontend.source import is_users, raises, tb_position, user_source


def error(what: str, *, given: object = None, hint: str | None = None, cls: type[FlexError] = TraceError) -> FlexError:
    """An error that names the user's line."""
    where = user_source()
    return cls(what, given=given, hint=hint, where=str(where) if where else None)


class DivisionError(TraceError, ZeroDivisionError):
    """An integer of a mod divided by the number 0."""


class MissingAttributeError(TraceError, AttributeError):
    """An attribute that tensors have not: hasattr() says False."""


_OUTSIDE = "its results for all positions computed outside the mod, captured and indexed, as in bucket[q_idx]"


def unsupported(name: str, known: Container[str]) -> FlexError:
    """The error for a function that is not in known, with what to write instead."""
    hints = {
        "item": "keep the value as a tensor: a captured tensor may be used directly",
        "tolist": "keep the value as a tensor",
        **dict.fromkeys(DRAWING, "draw random numbers outside the mod and capture them"),
        "dropout": "draw the mask outside the mod and capture it",
        "linear": "a product of rows, (layer.weight[0] * row).sum(), or the layer's result computed outside and captured",
        "embedding": "indexing the table: emb.weight[i, d], or emb.weight[i] for a short row",
        "hypot": "torch.sqrt(x * x + y * y)",
        "atan2": "the angle computed outside the mod and captured as a tensor",
        "stack": "computing with the values themselves: a mod is of one pair",
        "cat": "computing with the values themselves: a mod is of one pair",
        "isin": "a captured tensor of truth values, made outside by torch.isin over all positions, as in allowed[kv_idx]",
        "searchsorted": _OUTSIDE,
        "bucketize": _OUTSIDE,
        "cumsum": _OUTSIDE,
        "sort": _OUTSIDE,
        "argsort": _OUTSIDE,
        "gather": "indexing: table[h, q_idx]",
        "index_select": "indexing: table[h, q_idx]",
        "take": "indexing: table[h, q_idx]",
    }
    hint = hints.get(name.strip("_"))
    if hint is None and name.endswith("_") and name.rstrip("_") in known:
        hint = f"{name.rstrip('_')}, which returns a new value"
    return error(
        f"`{name}` is not supported in a mod",
        hint=hint or "pointwise torch operations, torch.where, and captured tensors indexed by the arguments",
    )


class NothingIsDrawn(TorchFunctionMode):
    """Where torch's random functions are errors: drawn in a mod, one number would stand for every pair."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.rstrip("_") in DRAWING:
            raise unsupported(name, ())
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- what Python or torch raise inside a mod
def in_a_mod(e: Exception, traced: tuple[type, ...]) -> FlexError | None:
    """An error of Python or torch inside a mod as ours, with the user's line; None for one that the user's own code raises."""
    frames = list(walk_tb(e.__traceback__))
    if not frames or isinstance(e, Warning) or raises(*tb_position(e)):
        return None
    inside = [(f, line) for f, line in frames[1:] if is_users(f)]
    where = f"{inside[-1][0].f_code.co_filename}:{inside[-1][1]}" if inside else None
    hint = "torch operations on the values: each is a tensor of no dimensions, and has no Python value"
    if isinstance(e, KeyError) and any(type(key) in traced for key in e.args):
        hint = "a captured tensor instead of a dictionary, as in torch.tensor([0.5, 1.0])[h]"
    elif not any(type(v) in traced for f, _ in inside for v in f.f_locals.values()):
        hint = "running the mod on plain tensors, as in mod(torch.tensor(1.0), 0, 0, 0, 0), to find the mistake"
    return _like(type(e))(  # type: ignore[arg-type]
        f"{type(e).__name__} in a mod: {e}", hint=hint, where=where
    )


@lru_cache(maxsize=64)
def _like(kind: Any) -> type[FlexError]:
    """TraceError that is also what was raised, so that `except KeyError` goes on working."""
    if issubclass(TraceError, kind):
        return TraceError

    def reduced(e: FlexError) -> tuple[object, ...]:
        return TraceError(e.what, given=e.given, hint=e.hint, where=e.where).__reduce__()

    plain = {"__str__": Exception.__str__, "__reduce__": reduced}
    try:
        return type("TraceError", (TraceError, kind), plain)
    except TypeError:  # an exception of another layout, as OSError
        return TraceError
