"""flex_attention as one node of the autograd graph: forward and backward of whatever backend the plan names.

Reads a Problem and a Plan and the tensors that may need gradients (query, key, value, score_mod's captures). Nothing is
decided in backward: the tables its kernels walk are made before the forward launch, so a mask whose tensors change in
between cannot give gradients of a different mask.
"""

from __future__ import annotations

import inspect
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexattn.frontend.eager import never_compiled
from flexattn.frontend.evaluate import without_autocast
from flexattn.runtime import settings, stats, strict, transforms
from flexattn.runtime.options import must_be_deterministic
from flexattn.runtime.plan import Needs, Plan, Problem, dense_strides, output_like, stride_order

_NOTHING = torch.empty(0, device="cpu")


def backend_module(plan: Plan) -> ModuleType:
    """The module that runs a plan, with `forward` and `backward`; imported when first needed."""
    if plan.backend == "triton":
        from flexattn.runtime import launch

        return launch
    from flexattn.runtime import cpu

    return cpu


def attend(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs attention, recording an autograd node where an input needs one.

    Args:
        problem: one call.
        plan: of that call.
    Returns: out [batch, q_heads, q_len, v_dim], lse [batch, q_heads, q_len], max_scores of that shape or None.
    """
    if problem.options.deterministic and not settings.is_deterministic():
        with settings.deterministic():
            return attend(problem, plan)
    transforms.check_transforms((problem.q, problem.k, problem.v, *problem.captures))
    problem = as_it_runs(problem, plan)
    inputs = (problem.q, problem.k, problem.v, *problem.captures)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        out, lse, max_scores = FlexAttention.apply(problem, plan, *inputs)
        return out, lse, max_scores
    return run_forward(problem, plan)


def as_it_runs(problem: Problem, plan: Plan) -> Problem:
    """The problem with dense keys where its kernels read no others; in debug mode its reads are checked."""
    if problem.lengths is not None and not _reads_as_it_is(problem, plan):
        problem = problem.dense()
    if settings.debug() and plan.backend == "triton" and not is_empty(problem):
        from flexattn.runtime.debug import check_reads

        check_reads(problem)
    return problem


class FlexAttention(torch.autograd.Function):
    """The autograd node: apply(problem, plan, query, key, value, *captures) -> (out, lse, max_scores)."""

    @staticmethod
    def forward(problem: Problem, plan: Plan, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Makes the tile maps of both passes, then runs the forward pass."""
        q, k, v, *captures = inputs
        if q is not problem.q or k is not problem.k or v is not problem.v or captures:
            problem = problem.bind(q, k, v, tuple(captures))
        make_tile_maps(problem, plan)
        return run_forward(problem, plan)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor | None]) -> None:
        """Saves what backward recomputes from; tensors go through save_for_backward, so in-place changes are noticed."""
        problem, plan, *tensors = inputs
        out, lse, max_scores = output
        mask_captures = problem.mask.binding.captures if problem.mask is not None else ()
        watched = [x for x in mask_captures if not x.is_inference()]
        ctx.set_materialize_grads(False)
        if max_scores is not None:
            ctx.mark_non_differentiable(max_scores)
        ctx.plan, ctx.inputs = plan, len(tensors)
        ctx.problem = problem.bind(
            _NOTHING, _NOTHING, _NOTHING, ()
        )  # what may be freed is held by save_for_backward alone
        ctx.save_for_backward(*tensors, out, lse, *watched)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs that need one, None for the others."""
        saved = ctx.saved_tensors
        inputs, (out, lse) = saved[: ctx.inputs], saved[ctx.inputs : ctx.inputs + 2]
        need_q, need_k, need_v, *need_captures = ctx.needs_input_grad[2:]
        needs: Needs = (need_q, need_k, need_v, tuple(need_captures))
        if d_out is None and d_lse is None:
            return (None,) * (2 + ctx.inputs)
        sources = (*inputs, d_out, d_lse)
        with torch.no_grad(), transforms.outside() as unwrap:
            inputs, out, lse = tuple(map(unwrap, inputs)), unwrap(out), unwrap(lse)
            d_out, d_lse = (None if x is None else unwrap(x) for x in (d_out, d_lse))
            problem = ctx.problem.bind(*inputs[:3], tuple(inputs[3:]))
            d_out = torch.zeros_like(out) if d_out is None else d_out
            grads = run_backward(problem, ctx.plan, (out, lse), (d_out, d_lse), needs)
        if torch.is_grad_enabled():  # create_graph=True
            grads = _with_derivatives(ctx.problem.bind(*saved[:3], saved[3 : ctx.inputs]), ctx.plan, grads, sources)
        return (None, None, *grads)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """There is no rule for it."""
        raise transforms.no_batching()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none."""
        raise transforms.no_forward_mode()


FlexAttention.forward.__signature__ = inspect.signature(FlexAttention.forward)  # type: ignore[attr-defined]  # or torch asks each call


def _with_derivatives(
    problem: Problem, plan: Plan, grads: tuple[Tensor | None, ...], sources: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated once more, if torch operations made them, or that raise when somebody tries."""
    transformed = torch._C._are_functorch_transforms_active()
    if plan.backend != "torch" or transformed:
        times = "twice by torch.func" if transformed else "twice in its kernels"
        return transforms.forbid_further_derivatives(grads, sources, times=times)
    from flexattn.runtime.second_order import differentiable

    d_out, d_lse = sources[-2:]
    return differentiable(problem, grads, (d_out, d_lse))


def _reads_as_it_is(problem: Problem, plan: Plan) -> bool:
    """Whether a call whose keys are paged, or end at lengths on the device, runs over them as they are: in the decode kernel, or over
    pages in the forward kernel for Hopper."""
    if plan.backend != "triton":
        return False
    from flexattn.runtime.choose import why_gathered
    from flexattn.runtime.decode import decode_choice
    from flexattn.runtime.device import target_for

    target = target_for(problem.q.device)
    return decode_choice(problem, target)[0] or (
        problem.pages is not None and why_gathered(problem, plan, target) is None
    )


def make_tile_maps(problem: Problem, plan: Plan) -> None:
    """Makes the tile maps that backward will look up."""
    if not is_empty(problem):
        backend_module(plan).make_tile_maps(problem, plan)


def run_forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward pass without autograd: out in query's stride order, lse, max_scores or None."""
    if is_empty(problem):
        return _empty_outputs(problem)
    with torch.no_grad(), without_autocast(problem.q.device.type):  # inputs have its dtype already; sums keep float32
        runner = strict if strict.is_needed(problem) else backend_module(plan)
        out, lse, max_scores = runner.forward(problem, plan)
        _count(plan, "forward")
        return _in_query_order(out, problem.q), lse, max_scores


def run_backward(
    problem: Problem, plan: Plan, saved: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor | None], needs: Needs
) -> tuple[Tensor | None, ...]:
    """The backward pass without autograd: one gradient or None for query, key, value and each capture."""
    if is_empty(problem):
        wanted = (*needs[:3], *needs[3])
        inputs = (problem.q, problem.k, problem.v, *problem.captures)
        return tuple(torch.zeros_like(x) if want else None for x, want in zip(inputs, wanted))
    if any(needs[3]):
        _alert_not_deterministic(plan)
    with without_autocast(problem.q.device.type):
        runner = strict if strict.is_needed(problem, upstream[0]) else backend_module(plan)
        d_q, d_k, d_v, d_captures = runner.backward(problem, plan, *saved, *upstream, needs)
        _count(plan, "backward")
    return (d_q, d_k, d_v, *d_captures)


def _count(plan: Plan, direction: str) -> None:
    """Kernels count their own launches; the torch-ops path counts one a direction."""
    if plan.backend == "torch":
        stats.record_launch(f"torch {direction}")


def is_empty(problem: Problem) -> bool:
    """True when there is no query or no key, so that no kernel has anything to do."""
    return problem.q.numel() == 0 or problem.k.numel() == 0 or problem.kv_len == 0


def _empty_outputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
    q = problem.q
    out = output_like(q, problem.v.shape[-1]).zero_()
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:-1], -math.inf, dtype=dtype, device=q.device)
    return out, lse, lse.clone() if problem.want_max else None


def _in_query_order(out: Tensor, q: Tensor) -> Tensor:
    """out, moved in memory only if its dimensions are not yet laid out in query's order."""
    order = stride_order(q)
    if out.stride() == dense_strides(tuple(out.shape), order):
        return out
    if out.permute(order).is_contiguous():
        return out
    return torch.empty_permuted(out.shape, order, dtype=out.dtype, device=out.device).copy_(out)


def _alert_not_deterministic(plan: Plan) -> None:
    """Captured gradients are added with atomics in the kernels: says so as torch does for its own kernels."""
    if plan.backend != "triton" or not must_be_deterministic(plan.options):
        return
    asked = (
        "kernel_options={'deterministic': True}"
        if plan.options.deterministic
        else "'torch.use_deterministic_algorithms(True)'"
    )
    message = (
        "flex_attention's gradient of captured tensors does not have a deterministic implementation in the kernels, but "
        f"you set {asked}. Try: kernel_options={{'BACKEND': 'TORCH'}}"
    )
    if plan.options.deterministic or not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    settings.warn_once("deterministic captured gradients", message)
