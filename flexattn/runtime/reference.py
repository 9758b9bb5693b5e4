"""The definition of the right answer: dense attention in float64, written from the formula and nothing else.

Reads q, k, v and the user's own functions and makes (out, lse), differentiable by torch's autograd. A newcomer should know that
this file shares no code with what it judges: it neither traces a function nor skips a tile, it calls the functions themselves
on index tensors that broadcast over `[batch, q_heads, q_len, kv_len]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexattn.errors import ShapeError

_SAMPLES = 5  # positions at which a broadcast result is compared with a call on scalars; a prime


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Dense attention in float64.

    Args:
        q: `[batch, q_heads, q_len, qk_dim]`, any float dtype.
        k: `[batch or 1, kv_heads, kv_len, qk_dim]`; query head h reads kv head `h // (q_heads // kv_heads)`.
        v: `[batch or 1, kv_heads, kv_len, v_dim]`.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, True keeps the pair.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, on scaled scores in natural units.
        scale: factor of `q @ k.T`; `qk_dim ** -0.5` when None.

    Returns:
        out `[batch, q_heads, q_len, v_dim]` and lse `[batch, q_heads, q_len]` (natural log), both float64.
        A row with no kept key has out 0, lse -inf and zero gradients.

    Raises:
        ShapeError: heads or batch sizes do not fit together.

    Example:
        >>> q = k = v = torch.ones(1, 1, 2, 4)
        >>> oracle(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx > kv_idx)[1]
        tensor([[[-inf, 2.]]], dtype=torch.float64)

    Source: Vaswani et al. 2017, equation 1; the rule for empty rows is line 1 of this package's contract.
    """
    q, k, v = q.double(), k.double(), v.double()
    k, v = _per_query_head(q, k, "key"), _per_query_head(q, v, "value")
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        scores = call_mod(score_mod, scores.shape, q.device, scores).to(torch.float64)
    keep = torch.ones(scores.shape, dtype=torch.bool, device=q.device)
    if mask_mod is not None:
        keep = call_mod(mask_mod, scores.shape, q.device).to(torch.bool)
    return _masked_attention(scores, keep & ~torch.isneginf(scores), v)


def _masked_attention(scores: Tensor, keep: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the kept keys only; what is not kept can hold NaN without reaching a value or a gradient."""
    if scores.shape[-1] == 0:  # no key at all: every row is empty
        out = scores @ v
        return out, out.new_full(scores.shape[:-1], -math.inf)
    some = keep.any(-1, keepdim=True)
    peak = torch.where(keep, scores, -math.inf).amax(-1, keepdim=True).detach()
    peak = torch.where(some, peak, 0.0)
    weight = torch.where(keep, (torch.where(keep, scores, peak) - peak).exp(), 0.0)
    total = torch.where(some, weight.sum(-1, keepdim=True), 1.0)
    lse = torch.where(some, peak + total.log(), -math.inf)
    return (weight / total) @ v, lse.squeeze(-1)


def _per_query_head(q: Tensor, x: Tensor, name: str) -> Tensor:
    """k or v repeated so that it has one head per query head and one batch entry per query batch entry."""
    batch, heads = q.shape[:2]
    if x.shape[0] not in (1, batch) or x.shape[1] == 0 or heads % x.shape[1]:
        raise ShapeError(
            f"{name} needs a batch of {batch} or 1 and a number of heads that divides {heads}",
            given=f"{name} {tuple(x.shape)} for query {tuple(q.shape)}",
            hint="repeat the heads or the batch yourself",
        )
    return x.expand(batch, *x.shape[1:]).repeat_interleave(heads // x.shape[1], dim=1)


def call_mod(
    mod: Callable[..., Any], shape: Sequence[int], device: torch.device, score: Tensor | None = None
) -> Tensor:
    """A mask_mod's (score None) or score_mod's value at every position of `shape` = (batch, q_heads, q_len, kv_len).

    A mod is defined on scalars. It is called once on tensors that broadcast, which is the same thing for elementwise functions;
    where that fails, or a few positions differ from calls on scalars (`rows[q_idx].sum()`), it is mapped over every position.
    """
    axes = [
        torch.arange(n, device=device).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape)
    ]
    with _IndicesInRange():  # `table[b][q_idx]` leaves its table here, and not when it is called on scalars
        try:
            value = torch.as_tensor(mod(*_arguments(score), *axes), device=device).expand(*shape)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return _mapped(mod, device, score, axes)
        return value if _agrees_on_scalars(mod, value, device, score) else _mapped(mod, device, score, axes)


class _IndicesInRange(TorchFunctionMode):
    """Inside, tensor[index] raises IndexError where it leaves the tensor, on every device: a GPU's own check ends its process."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            _check_range(*args)
        return func(*args, **(kwargs or {}))


def _check_range(tensor: Tensor, index: Any) -> None:
    """Has the CPU look at the least and the greatest of each index; a tensor of this shape that takes no memory stands in."""
    items = index if isinstance(index, tuple) else (index,)
    stand_in = torch.zeros((), dtype=torch.bool).expand(tensor.shape)
    for extreme in (Tensor.amin, Tensor.amax):
        stand_in[tuple(_on_cpu(item, extreme) if isinstance(item, Tensor) else item for item in items)]


def _on_cpu(index: Tensor, extreme: Callable[[Tensor], Tensor]) -> Tensor:
    is_mask = index.dtype in (torch.bool, torch.uint8)
    return index.cpu() if is_mask or index.numel() == 0 else extreme(index).reshape(1).cpu()


def _arguments(score: Tensor | None) -> tuple[Tensor, ...]:
    return () if score is None else (score,)


def _agrees_on_scalars(mod: Callable[..., Any], value: Tensor, device: torch.device, score: Tensor | None) -> bool:
    """Whether `value` equals the mod called on scalars, at positions spread over the whole range."""
    if value.numel() == 0:
        return True
    with torch.no_grad():
        for n in range(_SAMPLES):
            steps = [n * (axis + 1) % _SAMPLES for axis in range(4)]  # no two axes walk alike: a swap of axes shows
            at = tuple(step * (size - 1) // (_SAMPLES - 1) for step, size in zip(steps, value.shape))
            indices = torch.tensor(at, device=device).unbind()
            one = torch.as_tensor(mod(*(() if score is None else (score[at],)), *indices), device=device)
            if one.numel() != 1 or not torch.allclose(
                one.reshape(()).double(), value[at].double(), 1e-4, 1e-4, equal_nan=True
            ):
                return False
    return True


def _mapped(mod: Callable[..., Any], device: torch.device, score: Tensor | None, axes: Sequence[Tensor]) -> Tensor:
    """The mod applied position by position with torch.vmap, one dimension after the other."""

    def one(*args: Tensor) -> Tensor:
        return torch.as_tensor(mod(*args), device=device).reshape(())

    mapped = one
    for axis in reversed(range(4)):  # the innermost map runs over kv_idx
        score_axis = () if score is None else (0,)
        mapped = torch.vmap(mapped, in_dims=score_axis + tuple(0 if d == axis else None for d in range(4)))
    return mapped(*_arguments(score), *(axis.reshape(-1) for axis in axes))
