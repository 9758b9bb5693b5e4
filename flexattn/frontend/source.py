"""Where in the user's code something happened: finds the innermost frame that is neither flexattn's nor torch's.

Frames are inspected only when an error is raised or a trace is asked to remember sources, never on the hot path.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SKIP = (_PACKAGE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_INNER = (*(f"{_PACKAGE}{folder}{os.sep}" for folder in ("frontend", "codegen", "runtime")), _SKIP[1])
_TRACER = os.path.join(_PACKAGE, "frontend", "trace.py")

_USERS: dict[str, bool] = {}  # by file


class Source(NamedTuple):
    """One line of a user's function."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def user_source() -> Source | None:
    """The innermost frame outside flexattn and torch, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            return Source(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs neither flexattn's code nor torch's."""
    name = frame.f_code.co_filename
    known = _USERS.get(name)
    if known is None:
        known = _USERS[name] = not name.startswith(_SKIP)
    return known


def tb_position(e: BaseException) -> tuple[FrameType, int]:
    """The frame in which an error came up, and which instruction it was at."""
    tb = e.__traceback__
    assert tb is not None
    while tb.tb_next is not None:
        tb = tb.tb_next
    return tb.tb_frame, tb.tb_lasti


def raises(frame: FrameType, position: int) -> bool:
    """Whether the user's code says `raise` or `assert` there."""
    return is_users(frame) and dis.opname[frame.f_code.co_code[position]] in ("RAISE_VARARGS", "RERAISE")


def mod_frames() -> Iterator[FrameType]:
    """Frames of a mod that is being traced, the innermost first: the library of mods counts, other files of flexattn do not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _TRACER:
        name = frame.f_code.co_filename
        if not name.startswith(_INNER):
            yield frame
        frame = frame.f_back


def function_source(fn: Callable[..., object]) -> Source | None:
    """Where a callable was defined, or None for builtins."""
    fn = getattr(fn, "func", fn)
    code = getattr(fn, "__code__", None) or getattr(vars(type(fn)).get("__call__"), "__code__", None)
    return Source(code.co_filename, code.co_firstlineno) if code else None


def function_name(fn: Callable[..., object]) -> str:
    """A short name of a callable for messages."""
    return getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None) or type(fn).__name__


def capture_names(fn: Any, tensors: Sequence[object]) -> tuple[str, ...]:
    """What a callable calls each of some objects: a name of its closure, its globals, its parameters or its object's attributes."""
    known = dict(_names(fn))
    return tuple(known.get(id(t), "") for t in tensors)


def _names(fn: Any) -> Iterator[tuple[int, str]]:
    if isinstance(fn, functools.partial):
        yield from _names(fn.func)
        code = getattr(fn.func, "__code__", None)
        yield from ((id(v), name) for name, v in zip(code.co_varnames if code else (), fn.args))
        yield from ((id(v), name) for name, v in fn.keywords.items())
        return
    owner: Any = None
    if isinstance(fn, types.MethodType):
        owner, fn = fn.__self__, fn.__func__
    elif not isinstance(fn, types.FunctionType):
        owner, fn = fn, getattr(type(fn), "forward", None) or getattr(type(fn), "__call__", None)  # noqa: B004
    if not isinstance(fn, types.FunctionType):
        return
    code, own = fn.__code__, getattr(owner, "__dict__", {})
    spaces = [space for space in (fn.__globals__, own, own.get("_parameters"), own.get("_buffers")) if space]
    yield from ((id(space[name]), name) for name in code.co_names for space in spaces if name in space)
    for name, cell in zip(code.co_freevars, fn.__closure__ or ()):
        try:
            yield id(cell.cell_contents), name
        except ValueError:  # bound later
            continue
