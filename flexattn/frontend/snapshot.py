"""A traced mask as a snapshot: what it captured, whether that has changed, on which device, and copies of it.

Reads a mask function or a traced mask; makes traced masks. The one idea: torch counts the writes to every tensor, so a mask can
tell that it is out of date without looking at any value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError, DeviceError
from flexattn.frontend import algebra
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.mask_functions import MaskMod, noop_mask
from flexattn.frontend.program import Binding, Program, Traced
from flexattn.frontend.trace import trace


def version(tensor: Any) -> int | None:
    """How often a tensor was written to; None where torch does not count (inference mode)."""
    return None if not isinstance(tensor, Tensor) or tensor.is_inference() else tensor._version


def versions(traced: Traced | None) -> tuple[int | None, ...]:
    return () if traced is None else tuple(map(version, traced.binding.captures))


def is_noop(mask_mod: MaskMod) -> bool:
    """Our noop_mask or torch's, recognised without importing torch's module."""
    name = (getattr(mask_mod, "__module__", None), getattr(mask_mod, "__name__", None))
    return mask_mod is noop_mask or name == ("torch.nn.attention.flex_attention", "noop_mask")


def trace_mask(mask_mod: MaskMod) -> Traced | None:
    traced = None if is_noop(mask_mod) else trace(mask_mod, "mask")
    return None if algebra.keeps_all(traced) else traced


def indexed(device: torch.device) -> torch.device:
    """The device with its index, so that devices compare as their tensors do."""
    if device.index is None and device.type not in ("cpu", "meta"):
        return torch.empty(0, device=device).device
    return device


def device_for(traced: Traced | None, device: torch.device | str | None) -> torch.device:
    """The given device, else that of the captured tensors, else the accelerator, else the CPU."""
    captures = traced.binding.captures if traced is not None else ()
    tables = [t for t in captures if t.dim()]
    if device is None and tables:
        device = tables[0].device
    if device is None:
        device = next((t.device for t in captures if t.device.type != "cpu"), None)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = indexed(torch.device(device))
    for t in tables:
        if t.device != device:
            raise DeviceError(
                "a tensor captured by mask_mod must be on the mask's device",
                given=f"{t.device} and {device}",
                hint=f"tensor.to({str(device)!r})",
            )
    return device


def rebound(traced: Traced | None, replace: Any) -> Traced | None:
    if traced is None:
        return None
    return Traced(traced.program, Binding(tuple(map(replace, traced.binding.captures)), traced.binding.numbers))


def packed(traced: Traced | None) -> tuple[Any, ...] | None:
    """A traced mask in pieces that pickle: identity and hashes of expressions belong to a process."""
    if traced is None:
        return None
    program, binding = traced
    return (program.kind, program.body, program.captures, program.numbers, program.name, binding)


def unpacked(state: tuple[Any, ...] | None) -> Traced | None:
    if state is None:
        return None
    kind, body, captures, numbers, name, binding = state
    return Traced(Program(kind, body, captures, numbers, name=name), binding)


def dense(
    traced: Traced | None,
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device,
    *,
    score: bool = False,
) -> Tensor:
    """Every pair of a mask, or of a score mod (kept: not -inf): bool [B, H, q_len, kv_len]."""
    shape = (*sizes, *lengths)
    if traced is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    index = (torch.arange(n, device=device).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(shape))
    b, h, q_idx, kv_idx = index
    outside: list[Tensor] = []
    zero = torch.zeros((), device=device) if score else None
    kept = evaluate(
        traced.program, traced.binding, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=zero, out_of_range=outside
    )
    kept = ~torch.isneginf(kept) if score else kept
    if any(bool((bad & kept).any()) for bad in outside):
        raise CaptureIndexError(
            f"{traced.program.name} reads a captured tensor out of range at a pair it keeps",
            hint="longer captured tensors",
        )
    return kept.to(device).expand(shape).contiguous()
