"""Every error flexattn raises: what is wrong, what was given, what to try, and the user's line if a mod is at fault.

Each class also derives from the builtin that torch raises in the same situation, so `except ValueError` keeps working.
"""

from __future__ import annotations


class FlexError(Exception):
    """Base of all flexattn errors.

    Args:
        what: What was expected, naming the argument.
        given: What came instead.
        hint: What to try.
        where: "file:line" in the user's code, when a mod is at fault.

    Example:
        >>> str(FlexError("query must be 4-D", given="3-D", hint="add a batch dimension"))
        'query must be 4-D; got 3-D. Try: add a batch dimension'
    """

    def __init__(self, what: str, *, given: object = None, hint: str | None = None, where: str | None = None) -> None:
        self.what, self.given, self.hint, self.where = what, given, hint, where
        text = f"{where}: {what}" if where else what
        if given is not None:
            text += f"; got {given}"
        if hint:
            text += f". Try: {hint}"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.given, self.hint, self.where)


def _rebuild(cls: type[FlexError], what: str, given: object, hint: str | None, where: str | None) -> FlexError:
    return cls(what, given=given, hint=hint, where=where)


class TraceError(FlexError, TypeError):
    """A score_mod or mask_mod does something that cannot be traced."""


class MaskTypeError(FlexError, AssertionError):
    """A mask_mod returned something that is not a truth value, or the wrong kind of mod was given."""


class CaptureIndexError(FlexError, IndexError):
    """A mod reads a captured tensor out of range at a kept position, or with too many indices."""


class ShapeError(FlexError, ValueError):
    """Sizes of query, key, value, mask or captures do not fit together."""


class DTypeError(FlexError, ValueError):
    """Data types do not fit together."""


class DeviceError(FlexError, RuntimeError):
    """Tensors or masks are on different devices."""


class OptionError(FlexError, ValueError):
    """An option has an unknown name or an illegal value."""


class CallError(FlexError, TypeError):
    """A function was called with an argument of the wrong type."""


class UnsupportedError(FlexError, NotImplementedError):
    """A combination that flexattn does not support."""


class StaleMaskError(FlexError, RuntimeError):
    """A BlockMask is asked for a table after the tensors it was built from have changed."""


class MaskFunctionError(FlexError, RuntimeError):
    """A mask function is missing, or something that cannot be called was given as one."""


class FileError(FlexError, ValueError):
    """A file does not hold what it should."""


class CompileError(FlexError, RuntimeError):
    """No configuration of a kernel could be compiled."""


class OutOfPagesError(FlexError, RuntimeError, AssertionError):
    """A paged cache has too few pages, or no slot, left; nothing of it has changed."""


class PageTableError(FlexError, AssertionError):
    """The records of a paged cache contradict each other."""


class PageShapeError(ShapeError, RuntimeError):
    """New tokens or a mask do not fit the pages of a PagedAttention."""
