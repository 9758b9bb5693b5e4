"""A call of flex_attention whose mods, mask and sizes are settled once: made from one call's arguments, called with its tensors.

The idea: validation, traces, the plan and the choice of a kernel rest on facts that such a caller promises not to change; what is
left of a call is to allocate results and to start the kernel. The promise is checked where it is cheap: shapes, strides, data types,
device and alignment of the tensors, and whether a tensor that the mask captured was written to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.errors import ShapeError
from flexattn.frontend.eager import eager_only
from flexattn.runtime import settings
from flexattn.runtime.attention import AuxRequest, Result, asked_for, deliver, prepare, requested
from flexattn.runtime.plan import Plan, Problem, make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexattn.frontend.block_mask import BlockMask


class PreparedAttention:
    """flex_attention for tensors of one layout; `prepare_attention` makes it, and says what it takes.

    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> flexattn.prepare_attention(x, x, x)(x, x, 3 * x)[0, 0, 0, 0].item()
        3.0
    """

    def __init__(self, problem: Problem, plan: Plan, return_lse: bool, return_aux: Any) -> None:
        self._problem, self._plan = problem, plan
        self._form: dict[str, Any] = {"return_lse": return_lse, "return_aux": return_aux}
        self._layouts = tuple(_layout(x) for x in (problem.q, problem.k, problem.v))
        self._start: Callable[[Problem], tuple[Tensor, Tensor, Tensor | None]] | None = None

    @eager_only
    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Result:
        """As flex_attention with these tensors and all else as it was prepared.

        Args:
            query, key, value: of the shapes, strides, data type and device they had then; gradients flow to them as usual.
        Returns: what flex_attention returns.
        Raises:
            ShapeError: they are laid out in another way.
            StaleMaskError: a tensor that the mask captured was written to.
        """
        layouts = (_layout(query), _layout(key), _layout(value))
        if layouts != self._layouts:
            raise _other_layout(layouts, self._layouts)
        mask = self._problem.block_mask
        if mask is not None and mask.predicate is not None:
            mask.predicate.check_current()
        problem = self._problem.bind(query, key, value, self._problem.captures)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *problem.captures)):
            problem = replace(problem, needs_grad=True, want_lse=True)
            return deliver(problem, make_plan(problem), **self._form)
        if self._start is not None and not _is_watched(query):
            return asked_for(self._start(problem), **self._form)
        result = deliver(problem, self._plan, **self._form)
        if (
            self._start is None and self._plan.backend == "triton" and not settings.debug()
        ):  # which looks at every call's reads
            from flexattn.runtime.launch import ready_forward

            self._start = ready_forward(problem, self._plan)
        return result


def prepare_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable[..., Any] | None = None,
) -> PreparedAttention:
    """A call of flex_attention that is made ready once and called often, for the time that a call takes the host.

    Mods are traced now: numbers that they close over have the values of now, and tensors that they captured are read when it is
    called. A mask that captured tensors is made of what they hold now.

    Args:
        query, key, value: tensors laid out as later calls will have them; they are not kept.
        score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux, mask_mod: as in flex_attention.
    Returns: what takes query, key and value.
    Raises: what flex_attention raises for these arguments.
    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> attention = flexattn.prepare_attention(x, x, x, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
        >>> attention(x, x, 2 * x)[0, 0, 0, 0].item()
        2.0
    """
    aux = requested(return_lse, return_aux)
    problem, plan = prepare(
        (query.detach(), key.detach(), value.detach()),
        score_mod,
        (block_mask, mask_mod),
        scale=scale,
        enable_gqa=enable_gqa,
        aux=aux,
        options=kernel_options,
        needs_grad=False,
    )
    made = PreparedAttention(problem, plan, return_lse, return_aux)
    nothing = query.new_empty(0)  # tensors of now are not held
    made._problem = problem.bind(nothing, nothing, nothing, problem.captures)
    return made


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, int]


def _layout(x: Tensor) -> _Layout:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def _other_layout(given: tuple[_Layout, ...], prepared: tuple[_Layout, ...]) -> ShapeError:
    """Names the first tensor that is laid out in another way, and how."""
    name, (now, then) = next(
        (name, pair) for name, *pair in zip(("query", "key", "value"), given, prepared) if pair[0] != pair[1]
    )
    words = lambda x: f"{list(x[0])}, strides {x[1]}, {x[2]} on {x[3]}, {x[4]} bytes past a multiple of 16"
    return ShapeError(
        f"the call was prepared for another {name}", given=f"{words(now)}; then {words(then)}",
        hint="prepare_attention for these tensors, or flex_attention",
    )  # fmt: skip


def _is_watched(x: Tensor) -> bool:
    """Whether torch transforms or records operations, or these are no plain tensors: the ordinary road knows what to do then."""
    return (
        type(x) is not Tensor or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() > 0
    )


__all__ = ["PreparedAttention", "prepare_attention"]
