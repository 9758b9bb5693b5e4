"""Computes a program on torch tensors, with torch's own semantics: the exact counterpart of the interval proof.

Reads a program, its binding and broadcasting index tensors; makes the tensor of values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from flexattn.frontend.expr import Expr, fold
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Binding, Program


def evaluate(
    program: Program,
    binding: Binding,
    *,
    b: torch.Tensor,
    h: torch.Tensor,
    q_idx: torch.Tensor,
    kv_idx: torch.Tensor,
    score: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    body: Expr | None = None,
    out_of_range: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The program's value on broadcasting torch tensors, with torch's own semantics, autocast or not.

    Args:
        b, h, q_idx, kv_idx: int64 tensors that broadcast against each other.
        score, grad: Values of those variables, where the program reads them.
        body: Another expression over the same captures and numbers (a derivative).
        out_of_range: If given, receives a truth tensor for each captured read that leaves its tensor somewhere (such a read gives
            NaN, or 0 for integers); the caller decides whether a kept position was hit.

    Returns:
        A tensor that broadcasts to the common shape.
    """
    values: dict[str, Any] = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": score, "grad": grad}
    device = q_idx.device

    def visit(node: Expr, args: list[torch.Tensor]) -> torch.Tensor:
        if node.op == "var":
            value: torch.Tensor = values[node.attr]
            return value
        if node.op == "const":
            return torch.tensor(node.attr, dtype=node.dtype, device="cpu")
        if node.op == "num":
            return torch.tensor(binding.numbers[node.attr], dtype=node.dtype, device="cpu")
        if node.op == "load":
            return gather(binding.captures[node.attr[0]], args, out_of_range, device)
        if node.op == "cast":
            return args[0].to(node.dtype)
        result: torch.Tensor = OPS[node.op].eval(*args)
        return result

    with without_autocast(device.type):  # kernels compute in the program's dtypes, and tile maps must agree with them
        return fold([body or program.body], visit)[0]


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Switches autocast off inside, where it is on for that type of device."""
    return torch.autocast(device_type, enabled=False) if is_autocasting(device_type) else contextlib.nullcontext()


def is_autocasting(device_type: str) -> bool:
    """Whether autocast is on for that type of device; some types have none."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def gather(
    tensor: torch.Tensor, index: Sequence[torch.Tensor], out_of_range: list[torch.Tensor] | None, device: torch.device
) -> torch.Tensor:
    """tensor[index] as int64 or its float type: negative indices wrap once; out of range gives NaN or 0."""
    if tensor.ndim == 0:
        found = tensor
    else:
        bad: torch.Tensor | None = None
        where = []
        for size, i in zip(tensor.shape, index):
            i = i.to(tensor.device)
            if i.numel() and (int(i.min()) < 0 or int(i.max()) >= size):
                i = torch.where(i < 0, i + size, i)
                outside = (i < 0) | (i >= size)
                if bool(outside.any()):
                    bad = outside if bad is None else bad | outside
                    i = i.clamp(0, max(size - 1, 0))
            where.append(i)
        if tensor.numel() == 0:
            shape = sum(where, torch.zeros((), dtype=torch.int64, device=tensor.device)).shape
            found = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
        else:
            found = tensor[tuple(where)]
        if bad is not None:
            lost = torch.full((), math.nan if found.is_floating_point() else 0, dtype=found.dtype, device=found.device)
            found = torch.where(bad, lost, found)
            if out_of_range is not None:
                out_of_range.append(bad)
    if not found.is_floating_point() and found.dtype != torch.bool:
        found = found.to(torch.int64)
    return found if found.device == device or found.ndim == 0 else found.to(device)
