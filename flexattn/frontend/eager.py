"""Keeps torch.compile out of a function: it runs as written, and the graph around it goes on after a break, or has an operator.

flexattn has a tracer and a compiler of its own, so Dynamo has nothing to add inside. The marks below are what
`torch.compiler.disable` sets; that function itself is called only once Dynamo is loaded, since importing it costs a second.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.compiler import is_dynamo_compiling

from flexattn.errors import CallError

P = ParamSpec("P")
R = TypeVar("R")


def eager_only(fn: Callable[P, R]) -> Callable[P, R]:
    """Wraps `fn` so that `torch.compile(fn)`, and a compiled model that calls it, run it eagerly.

    Args:
        fn: any function.
    Returns: a function of the same name, signature and results.
    """
    call = _wrapped(fn, None, also_watched=False)
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "flexattn runs its own compiler"  # type: ignore[attr-defined]
    return call


def in_graphs_as(form: Callable[..., Any], *, also_watched: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wraps a function so that torch.compile traces another in its place, and eager calls run it as it is.

    Where Dynamo cannot follow the other, the function is kept out of the graph, as by `eager_only`.

    Args:
        form: takes the same arguments; Dynamo traces it into the graph around the call.
        also_watched: an eager call, too, runs it under a mode that watches torch's operators.
    Returns: a decorator.
    """
    return lambda fn: _wrapped(fn, form, also_watched=also_watched)


def _wrapped(fn: Callable[P, R], form: Callable[..., Any] | None, *, also_watched: bool) -> Callable[P, R]:
    disabled: list[Callable[P, R]] = []

    def traced(*args: P.args, **kwargs: P.kwargs) -> R:
        # without Dynamo the graph has broken here: it gave up, and the call comes as it was
        if form is None or not is_dynamo_compiling():
            return call(*args, **kwargs)
        result: R = form(*args, **kwargs)
        return result

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return traced(*args, **kwargs)
        try:
            if also_watched and _len_torch_dispatch_stack() and not _are_functorch_transforms_active():
                assert form is not None
                watched: R = form(*args, **kwargs)
                return watched
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            if not disabled:
                disabled.append(_disable(fn, call))
            return disabled[0](*args, **kwargs)
        except TypeError:
            if kwargs and (unknown := _unknown(fn, kwargs)) is not None:
                raise unknown from None
            raise

    # Not as a frame of its own; inside another frame Dynamo still follows it.
    set_code_exec_strategy(traced.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    return call


def never_compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Has Dynamo leave a function, and all that it calls, alone where it is called from code that Dynamo does not trace."""
    set_code_exec_strategy(fn.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return fn


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

    if getattr(outer, "_torchdynamo_disable", False):  # saves guards, and recompiles, of the few lines of the wrapper
        set_code_exec_strategy(outer.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
    disabled: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
    return disabled
