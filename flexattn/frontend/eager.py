"""Keeps torch.compile out of a function: it runs as written, and the graph around it goes on after a break.

flexattn has a tracer and a compiler of its own, so Dynamo has nothing to add inside. The marks below are what
`torch.compiler.disable` sets; that function itself is called only once Dynamo is loaded, since importing it costs a second.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
        if "torch._dynamo" not in sys.modules:
            return fn(*args, **kwargs)
        if not disabled:
            disabled.append(_disable(fn, call))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "flexattn runs its own compiler"  # type: ignore[attr-defined]
    return call


def _disable(fn: Callable[P, R], outer: Callable[P, R]) -> Callable[P, R]:
    import torch

    skip_code = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
    if skip_code is not None:  # saves guards, and recompiles, of the few lines of the wrapper
        skip_code(outer.__code__)
    disabled: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
    return disabled
