"""merge_states: attention over two sets of keys, from the attention over each of them.

Reads two partial results (out, lse) of the same queries and makes the result over both sets of keys. The one idea: out is a mean
weighted by exp(score), and exp(lse) is the sum of those weights, so two means merge as any two means do, in proportion to their sums.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, DeviceError, DTypeError, ShapeError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention of some queries over two disjoint sets of keys, from (out, lse) over each set.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    A part with lse -inf is empty: it adds exactly nothing, whatever its out holds, and receives gradients of exactly 0; two empty
    parts give (0, -inf). Computed in lse's dtype, rounded once. Merging is associative, so any number of parts can be folded in any
    order; to lose no digits on the way, fold float32 outs. Differentiable in all four arguments, and saves nothing but them: the
    formula in plain torch operations keeps two further products of out's size for the backward pass.

    Args:
        out_a: [..., v_dim], float16, bfloat16, float32 or float64; usually [batch, q_heads, q_len, v_dim].
        lse_a: [...], natural log, float32 (float64 where out_a is float64), as AuxRequest(lse=True) returns it.
        out_b: as out_a: same shape, dtype and device.
        lse_b: as lse_a.
    Returns:
        out [..., v_dim] in out_a's dtype and lse [...] in lse_a's dtype.
    Raises:
        CallError: an argument is no tensor.
        ShapeError: out_a and out_b differ in shape, or an lse's shape is not out_a's without its last dimension.
        DTypeError: out_a and out_b differ in dtype or are not floating, or an lse has another dtype than out_a's needs.
        DeviceError: the four tensors are not on one device.
    Example:
        >>> q = k = v = torch.eye(4)[None, None]
        >>> part = lambda mask: flexattn.flex_attention(q, k, v, mask_mod=mask, return_aux=flexattn.AuxRequest(lse=True))
        >>> first, second = part(lambda b, h, q_idx, kv_idx: kv_idx < 1), part(lambda b, h, q_idx, kv_idx: kv_idx >= 1)
        >>> out, lse = merge_states(first[0], first[1].lse, second[0], second[1].lse)
        >>> torch.allclose(out, flexattn.flex_attention(q, k, v)), lse.shape
        (True, torch.Size([1, 1, 4]))
        >>> empty = torch.tensor(float("-inf"))
        >>> merge_states(torch.tensor([1.0, 3.0]), torch.tensor(0.0), torch.tensor([3.0, 5.0]), torch.tensor(0.0))
        (tensor([2., 4.]), tensor(0.6931))
        >>> merge_states(torch.tensor([1.0, 3.0]), empty, torch.tensor([3.0, 5.0]), empty)
        (tensor([0., 0.]), tensor(-inf))

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), arXiv:1805.02867, section 3.1; Dao et al.,
    Flash-Decoding (2023); Ye et al., FlashInfer (2025), arXiv:2501.01005, "attention states".
    """
    _check(out_a, lse_a, out_b, lse_b)
    out, lse = _MergeStates.apply(out_a, lse_a, out_b, lse_b)
    return out, lse


class _MergeStates(torch.autograd.Function):
    """The node of the autograd graph: apply(out_a, lse_a, out_b, lse_b) -> (out, lse)."""

    @staticmethod
    def forward(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        total = _part(out_a, lse_a, _share(lse_a, lse_b)).add_(_part(out_b, lse_b, _share(lse_b, lse_a)))
        return total.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """d_out_a = share_a * d_out; d_lse_a = share_a * d_lse + share_a * share_b * <d_out, out_a - out_b>, and so for b.

        Torch operations on the saved inputs, so that the gradients can be differentiated again.
        """
        out_a, lse_a, out_b, lse_b = ctx.saved_tensors
        need_out_a, need_lse_a, need_out_b, need_lse_b = ctx.needs_input_grad
        share_a, share_b = _share(lse_a, lse_b), _share(lse_b, lse_a)
        grads: list[Tensor | None] = [None] * 4
        if d_out is not None:
            for i, lse, share, need in ((0, lse_a, share_a, need_out_a), (2, lse_b, share_b, need_out_b)):
                if need:
                    grads[i] = _part(d_out, lse, share).to(d_out.dtype)
        if need_lse_a or need_lse_b:
            shift = None
            if d_out is not None:  # what moving weight from b to a changes; nothing to move where a part is empty
                pull = ((out_a.to(lse_a.dtype) - out_b) * d_out).sum(-1) * share_a * share_b
                shift = _masked(_masked(pull, lse_a), lse_b)
            direct = [None if d_lse is None else _masked(d_lse * x, y) for x, y in ((share_a, lse_a), (share_b, lse_b))]
            grads[1] = _sum(direct[0], shift) if need_lse_a else None
            grads[3] = _sum(direct[1], None if shift is None else -shift) if need_lse_b else None
        return tuple(grads)


def _share(lse: Tensor, other: Tensor) -> Tensor:
    """exp(lse) / (exp(lse) + exp(other)), [...]; 0 where the part is empty, both empty included.

    As a sigmoid of the difference, it overflows nowhere and loses no digits to large lse; only -inf - -inf must be kept out.
    """
    return (lse - other).masked_fill_(torch.isneginf(lse), -math.inf).sigmoid()


def _part(x: Tensor, lse: Tensor, share: Tensor) -> Tensor:
    """share * x in lse's dtype, [..., v_dim]; exactly 0 where the part is empty, even if x is NaN there."""
    return _masked(x * share.unsqueeze(-1), lse.unsqueeze(-1))


def _masked(x: Tensor, lse: Tensor) -> Tensor:
    """x, 0 in place where lse is -inf."""
    return x.masked_fill_(torch.isneginf(lse), 0.0)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    """Every check of merge_states; each error names the arguments that do not fit together."""
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise CallError(
                f"{name} must be a torch.Tensor", given=type(x).__name__, hint="AuxRequest(lse=True) gives both"
            )
    shapes = {name: tuple(x.shape) for name, x in named.items()}
    if out_a.dim() == 0 or not (out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:-1]):
        raise ShapeError(
            "merge_states needs out_a and out_b of one shape [..., v_dim], and lse_a and lse_b of that shape without v_dim",
            given=", ".join(f"{name}: {shape}" for name, shape in shapes.items()),
            hint="expand() for a part that broadcasts, lse.squeeze(-1) for an lse with a last dimension of 1",
        )
    dtypes = ", ".join(f"{name}: {x.dtype}" for name, x in named.items())
    if out_a.dtype != out_b.dtype or out_a.dtype not in _DTYPES:
        raise DTypeError(
            "merge_states needs out_a and out_b of one dtype: float16, bfloat16, float32 or float64",
            given=dtypes,
            hint="casting both to float32",
        )
    wanted = torch.float64 if out_a.dtype == torch.float64 else torch.float32
    if not lse_a.dtype == lse_b.dtype == wanted:
        raise DTypeError(
            f"merge_states needs lse_a and lse_b in {wanted} where the outs are {out_a.dtype}",
            given=dtypes,
            hint=f"lse.to({wanted}), of an lse that was never rounded to a half type",
        )
    if len({x.device for x in named.values()}) > 1:
        raise DeviceError(
            "merge_states needs its four tensors on one device",
            given=", ".join(f"{name}: {x.device}" for name, x in named.items()),
            hint="moving them to one device",
        )


__all__ = ["merge_states"]
