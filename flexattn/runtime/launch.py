"""A Problem and a Plan -> kernel launches: makes span tables and arguments, allocates results, starts kernels.

The idea: which kernel runs (choose.py) rests on facts alone; what changes from call to call (lengths, strides, captured
tensors, numbers) goes in as arguments. Each of the kernels has one function `start` that allocates results and launches
whatever was chosen; autotuning calls it with several choices and drops their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.codegen.spec import KernelSpec, fresh_layout, tensor_layout
from flexattn.codegen.tile_config import delta_config, padded
from flexattn.runtime import device as devices
from flexattn.runtime import settings
from flexattn.runtime.choose import Chosen, bound, choose, likely_tiles
from flexattn.runtime.compile import first_that_builds, flat_arguments
from flexattn.runtime.plan import Needs, Plan, Problem, stride_order
from flexattn.runtime.tables import prepare_table, table_of

_LINE_LIMIT = (1 << 31) - 1


# ---------------------------------------------------------------- public
def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the forward kernel.

    Args:
        problem: One call; q, k, v of bfloat16, float16 or float32 with at least one query and one key.
        plan: Of that call.

    Returns:
        out [batch, q_heads, q_len, v_dim] in q's dtype and stride order, lse [batch, q_heads, q_len] float32 in natural
        log, and max_scores of that shape or None.

    Raises:
        CompileError: No configuration could be built.
        OptionError: kernel_options names tiles that are not legal here.
    """
    q = problem.q  # its order of dimensions is out's
    pairs, problem = q.shape[0] * q.shape[1], _with_unit_strides(problem)

    def start(chosen: Chosen) -> tuple[Tensor, Tensor, Tensor | None]:
        out = _unit_like(q, problem.v.shape[3])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        peaks = torch.empty_like(lse) if problem.want_max else None
        walk = _walk(problem, chosen, pairs, transposed=False)
        results = {"OUT": out, "out_strides": out.stride(), "LSE": lse, "MAX": lse if peaks is None else peaks}
        arguments = {**_inputs(problem), **walk, **results}
        chosen.kernel(pairs * walk["lines"], arguments, device=q.device)
        return out, lse, peaks

    with devices.current(q.device):
        return start(choose(problem, plan, "forward", start, want_max=problem.want_max))


def backward(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Runs the backward kernels that are needed.

    Args:
        problem, plan: Of the forward call.
        out, lse: What it returned.
        d_out: Gradient of out, any strides.
        d_lse: Gradient of lse, or None.
        needs: Whether q, k, v and each captured tensor of score_mod needs a gradient.

    Returns:
        Gradients in the inputs' dtypes, None where not needed. dk and dv have k's and v's own batch size: where it is 1
        they are summed over the batch inside the kernel, in float32.
    """
    need_q, need_k, need_v, need_captures = needs
    problem = _with_unit_strides(problem)
    with devices.current(problem.q.device):
        d_out = d_out.to(out.dtype)
        if d_out.stride(3) != 1 or not tensor_layout(d_out).is_aligned:
            d_out = d_out.clone(memory_format=torch.contiguous_format)
        if out.stride(3) != 1:  # out follows query's order of dimensions, and the last one may not be innermost there
            out = out.contiguous()
        common = run_delta(problem, plan, out, lse, d_out, d_lse)
        dq, sums = run_dq(problem, plan, common, need_q, need_captures)
        dk, dv = run_dkdv(problem, plan, common, need_k, need_v)
    return dq, dk, dv, sums


def make_tile_maps(problem: Problem, plan: Plan) -> None:
    """Makes the span tables that backward will look up, so that it builds nothing and sees no later change of a mask.

    Before a call is autotuned those are the tables of every configuration that will be timed.

    Args:
        problem, plan: One call that may need gradients.
    """
    predicate, ready = None if problem.block_mask is None else problem.block_mask.predicate, ("ready", id(plan))
    if predicate is not None and ready in predicate.tables:
        return
    for kernel in ("dq", "dkdv"):
        for config in likely_tiles(problem, plan, kernel):
            prepare_table(problem, config, transposed=kernel == "dkdv")
    if predicate is not None and predicate.reusable and not devices.is_capturing(problem.q.device):
        predicate.tables[ready] = plan  # kept, so that no other plan gets its id


def _with_unit_strides(problem: Problem) -> Problem:
    """The problem over copies of those inputs whose last dimension is not contiguous; each would be read many times."""
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    copied = {name: x.contiguous() for name, x in tensors.items() if x.stride(3) != 1 and x.shape[3] > 1}
    if not copied:
        return problem
    names = " and ".join({"q": "query", "k": "key", "v": "value"}[name] for name in copied)
    settings.warn_once(
        f"copies {names}",
        f"flex_attention copies {names} at every call: the last dimension is not contiguous. Try: .contiguous() once",
        settings.FlexPerformanceWarning,
    )
    q, k, v = (copied.get(name, x) for name, x in tensors.items())
    return problem.bind(q, k, v, problem.captures)


# ---------------------------------------------------------------- arguments
def _inputs(problem: Problem) -> dict[str, Any]:
    """Arguments every attention kernel has."""
    q, k, v = problem.q, problem.k, problem.v
    return {
        "Q": q, "K": k, "V": v, "q_strides": q.stride(), "k_strides": _kv_strides(k), "v_strides": _kv_strides(v),
        "scale": float(problem.scale), "q_heads": q.shape[1], "group": q.shape[1] // k.shape[1], "q_len": q.shape[2],
        "kv_len": k.shape[2], "caps": flat_arguments(*bound(problem)),
    }  # fmt: skip


def _kv_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of k or v; a batch of 1 serves every query batch."""
    return (0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:])


def _walk(problem: Problem, chosen: Chosen, pairs: int, *, transposed: bool) -> dict[str, Any]:
    """The span table of the chosen tiles, and how programs are numbered."""
    q, k = problem.q, problem.k
    config = chosen.config
    length, tile = (k.shape[2], config.BLOCK_N) if transposed else (q.shape[2], config.BLOCK_M)
    lines = -(-length // tile)
    walk: dict[str, Any] = {"pairs": pairs, "lines": lines, "batch_step": 0, "head_step": 0}
    walk["swizzle"] = _swizzle(problem, pairs, lines, transposed)
    rows, extra, batch, heads = table_of(problem, config, transposed=transposed)
    if transposed and (heads > 1 or batch > 1) and pairs != q.shape[0] * q.shape[1]:
        order = rows[:, :, 0].argsort(1)  # programs that sum over several lines need one order of tiles in all of them
        rows = rows.gather(1, order[:, :, None].expand(rows.shape))
    steps = {"batch_step": heads if batch > 1 else 0, "head_step": 1 if heads > 1 else 0}
    return {**walk, **steps, "ROWS": rows, "EXTRA": extra}


def _swizzle(problem: Problem, pairs: int, lines: int, transposed: bool) -> int:
    """How many (batch, head) pairs are worked on together: as many as have what they stream in half of the L2 cache."""
    q, k, v = problem.q, problem.k, problem.v
    group = q.shape[1] // k.shape[1]
    row = (q.shape[3] + v.shape[3]) * q.element_size()
    streamed = row * (q.shape[2] * group if transposed else k.shape[2])
    fitting = devices.target_for(q.device).l2_bytes // 2 // max(streamed, 1)
    together = max(1, fitting) * (1 if transposed else group)
    return max(1, min(pairs, together, _LINE_LIMIT // max(lines, 1)))


# ---------------------------------------------------------------- backward kernels
def run_delta(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None
) -> dict[str, Any]:
    """Runs the pre-pass; returns the arguments both gradient kernels share."""
    batch, heads, q_len, v_dim = out.shape
    target = devices.target_for(out.device)
    spec = KernelSpec(
        kernel="delta", target=target, config=delta_config(padded(v_dim), out.element_size()), qk_dim=v_dim, v_dim=v_dim,
        layouts=(fresh_layout(out.dtype, v_dim),) * 3 + (tensor_layout(d_out),), has_d_lse=d_lse is not None,
    )  # fmt: skip
    _, kernel = first_that_builds([spec], out.device)
    delta, row_lse = torch.empty_like(lse), torch.empty_like(lse)
    lines = -(-q_len // spec.config.BLOCK_M)
    arguments = {
        "OUT": out, "D_OUT": d_out, "LSE": lse, "D_LSE": lse if d_lse is None else d_lse.to(torch.float32).contiguous(),
        "DELTA": delta, "ROW_LSE": row_lse, "out_strides": out.stride(), "d_out_strides": d_out.stride(),
        "q_heads": heads, "q_len": q_len, "pairs": batch * heads, "lines": lines,
    }  # fmt: skip
    kernel(batch * heads * lines, arguments, device=out.device)
    return {**_inputs(problem), "D_OUT": d_out, "d_out_strides": d_out.stride(), "DELTA": delta, "ROW_LSE": row_lse}


def run_dq(
    problem: Problem, plan: Plan, common: dict[str, Any], need_q: bool, need_captures: Sequence[bool]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """dq and the sums of captured tensors; no launch where neither is needed."""
    q = problem.q
    slots = tuple(i for i, need in enumerate(need_captures) if need)
    if not need_q and not slots:
        return None, (None,) * len(need_captures)
    captures, pairs = problem.captures, q.shape[0] * q.shape[1]

    def start(chosen: Chosen) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        dq = _unit_like(q, q.shape[3]) if need_q else None
        sums = tuple(torch.zeros(captures[i].shape, dtype=torch.float32, device=q.device) for i in slots)
        walk = _walk(problem, chosen, pairs, transposed=False)
        target = q if dq is None else dq
        arguments = {**common, **walk, "DQ": target, "dq_strides": target.stride(), "sums": sums or (0,)}
        chosen.kernel(pairs * walk["lines"], arguments, device=q.device)
        return dq, sums

    wants = {"want_dq": need_q, "capture_grads": slots}
    dq, sums = start(choose(problem, plan, "dq", start, d_out=tensor_layout(common["D_OUT"]), **wants))
    by_slot = {slot: total.to(captures[slot].dtype) for slot, total in zip(slots, sums)}
    return dq, tuple(by_slot.get(i) for i in range(len(need_captures)))


def run_dkdv(
    problem: Problem, plan: Plan, common: dict[str, Any], need_k: bool, need_v: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dk and dv in their tensors' dtypes; no launch where neither is needed."""
    if not need_k and not need_v:
        return None, None
    q, k, v = problem.q, problem.k, problem.v
    pairs = k.shape[0] * k.shape[1]
    repeats = q.shape[0] * q.shape[1] // pairs

    def start(chosen: Chosen) -> tuple[Tensor | None, Tensor | None]:
        dk, dv = (_unit_like(k, k.shape[3]) if need_k else None), (_unit_like(v, v.shape[3]) if need_v else None)
        walk = _walk(problem, chosen, pairs, transposed=True)
        dk_target, dv_target = (k if dk is None else dk), (v if dv is None else dv)
        arguments = {
            **common, **walk, "DK": dk_target, "DV": dv_target, "dk_strides": dk_target.stride(),
            "dv_strides": dv_target.stride(), "repeats": repeats,
        }  # fmt: skip
        chosen.kernel(pairs * walk["lines"], arguments, device=q.device)
        return dk, dv

    wants = {"want_dk": need_k, "want_dv": need_v}
    return start(choose(problem, plan, "dkdv", start, d_out=tensor_layout(common["D_OUT"]), **wants))


def _unit_like(x: Tensor, dim: int) -> Tensor:
    """An uninitialised tensor in x's dtype and order of dimensions, but with the last one, `dim`, contiguous."""
    order = [d for d in stride_order(x) if d != 3] + [3]
    return torch.empty_permuted((*x.shape[:3], dim), order, dtype=x.dtype, device=x.device)


__all__ = ["backward", "forward", "make_tile_maps"]
