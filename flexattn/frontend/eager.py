"""Keeps torch.compile out of a function: it runs as written, and the graph around it goes on after a break.

flexattn has a tracer and a compiler of its own, so Dynamo has nothing to add inside. The marks below are what
`torch.compiler.disable` sets; that function itself is called only once Dynamo is loaded, since importing it costs a second.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from flexattn.errors import CallError

P = ParamSpec("P")
R = TypeVar("R")


def eager_only(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps `fn` so that `torch.compile(fn)`, and a compiled model that calls it, run it eagerly.

    Args:
        fn: any function.
    Returns: a function of the same name, signature and results.
    """
    disabled: list[Callable[P, R]] = []

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(_disable(fn, call))
            return disabled[0](*args, **kwargs)
        except TypeError:
            if kwargs and (unknown := _unknown(fn, kwargs)) is not None:
                raise unknown from None
            raise

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "flexattn runs its own compiler"  # type: ignore[attr-defined]
    return call


def _unknown(fn: Callable[..., object], given: Iterable[str]) -> CallError | None:
    """The error for an argument by a name that a function has not, with the name that was meant; None if it has them all."""
    parameters = inspect.signature(fn).parameters
    name = next((n for n in given if n not in parameters), None)
    if name is None:
        return None
    masks = [n for n in ("mask_mod", "block_mask") if n in parameters and "mask" in name.lower()]
    meant = masks or difflib.get_close_matches(name, parameters, n=2) or list(parameters)
    hint = (
        "mask_mod= for a function, block_mask= for a BlockMask"
        if len(masks) == 2
        else " or ".join(f"{n}=" for n in meant)
    )
    return CallError(f"{fn.__name__}() has no argument {name!r}", given=f"{name}=", hint=hint)


def _disable(fn: Callable[P, R], outer: Callable[P, R]) -> Callable[P, R]:
    import torch

    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is not None:  # saves guards, and recompiles, of the few lines of the wrapper
        skip_code(outer.__code__)
    disabled: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
    return disabled
