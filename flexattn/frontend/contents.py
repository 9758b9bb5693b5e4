"""Whether captured tensors are as they were: by torch's count of writes, and in debug mode by what they hold.

Reads captured tensors; makes something to compare later. The one idea: torch counts the writes that go through it, which costs
nothing to ask; writes around it (`tensor.data`, an array that shares its memory) show only in the contents, which cost a pass.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.program import Traced

_FALSE = frozenset({"", "0", "false", "no", "off"})


def debugging() -> bool:
    """Whether `FLEXATTN_DEBUG` is set."""
    return os.environ.get("FLEXATTN_DEBUG", "").strip().lower() not in _FALSE


def version(tensor: Any) -> int | None:
    """How often a tensor was written to; None where torch does not count (inference mode)."""
    return None if not isinstance(tensor, Tensor) or tensor.is_inference() else tensor._version


def versions(traced: Traced | None) -> tuple[int | None, ...]:
    """The versions of what a mask captures."""
    return () if traced is None else tuple(map(version, traced.binding.captures))


def contents(traced: Traced | None) -> tuple[str | None, ...] | None:
    """A digest of what each captured tensor holds, None for one that cannot be looked at; None where nobody debugs."""
    if traced is None or not debugging():
        return None
    return tuple(map(_digest, traced.binding.captures))


@torch.no_grad()
def _digest(tensor: Any) -> str | None:
    if (
        not isinstance(tensor, Tensor)
        or type(tensor) not in (Tensor, torch.nn.Parameter)
        or tensor.device.type == "meta"
    ):
        return None
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(held.numpy().tobytes(), digest_size=16).hexdigest()


__all__ = ["contents", "debugging", "version", "versions"]
