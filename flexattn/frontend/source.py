"""Where in the user's code something happened: finds the innermost frame that is neither flexattn's nor torch's.

Frames are inspected only when an error is raised or a trace is asked to remember sources, never on the hot path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SKIP = (_PACKAGE, f"{os.sep}torch{os.sep}")


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
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _SKIP[1:]):
            return Source(name, frame.f_lineno)
        frame = frame.f_back
    return None


def function_source(fn: Callable[..., object]) -> Source | None:
    """Where a callable was defined, or None for builtins."""
    fn = getattr(fn, "func", fn)
    code = getattr(fn, "__code__", None) or getattr(vars(type(fn)).get("__call__"), "__code__", None)
    return Source(code.co_filename, code.co_firstlineno) if code else None


def function_name(fn: Callable[..., object]) -> str:
    """A short name of a callable for messages."""
    return getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None) or type(fn).__name__
