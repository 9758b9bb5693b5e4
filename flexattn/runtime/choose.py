"""A Problem and a Plan -> the kernel a launch runs and its tiles: asks the options, the mask, autotuning and the compiler.

The idea: a spec holds facts only, so it is found again by a small key of facts (layouts, size classes, the blocks of a list
mask) in the plan's memo. Tiles come from a short list of legal ones: the caller's, or the first that builds, or, with autotuning, the
one that was fastest on a call like this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.decode_tiles import decode_tiles
from flexattn.codegen.hopper_tiles import LONG_KEYS, hopper_backward_tiles, hopper_gradient_tiles, hopper_tiles, why_not
from flexattn.codegen.shared_memory import reads_v_in_k
from flexattn.codegen.spec import (
    BY_COLUMN,
    KernelSpec,
    TensorLayout,
    any_wide,
    capture_layout,
    fresh_layout,
    tensor_layout,
    wide_number,
)
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import SHORT_QUERIES, TileConfig, candidates, dividing, is_fixed, trials
from flexattn.errors import OptionError, UnsupportedError
from flexattn.runtime import autotune
from flexattn.runtime import device as devices
from flexattn.runtime.compile import InterpretedKernel, Kernel, first_that_builds, kernel_for
from flexattn.runtime.options import must_be_deterministic
from flexattn.runtime.plan import Needs, Plan, Problem, why_dense

_FORWARD = ("forward", "hopper_forward", "decode")  # kernels with the forward's options and facts
# What makes gradients, in order of preference.
FUSED, APART, PORTABLE = ("hopper_backward",), ("hopper_query_gradient", "hopper_key_gradients"), ("dq", "dkdv")
_FUSED_BACKWARD = True  # whether calls may take the fused backward; tests pair it with the portable kernels
_HOPPER_HEADS = "it takes more than 32 queries and head dimensions from 33 to 256"
_NOT_BUILT = "no configuration of the kernel for Hopper could be built"


class Chosen(NamedTuple):
    """A kernel that builds, and its tiles."""

    spec: KernelSpec
    kernel: Kernel | InterpretedKernel

    @property
    def config(self) -> TileConfig:
        return self.spec.config


def choose(
    problem: Problem, plan: Plan, kernel: str, start: Callable[[Chosen], Any], *, d_out: TensorLayout | None = None, **wants: Any
) -> Chosen:  # fmt: skip
    """The kernel for the facts of this call, from the plan's memo, or built now (and timed, with `start`, if asked)."""
    group = _group(problem, kernel)
    key, without_facts = (group, *_fact_key(problem, d_out), *wants.values()), ("last", group)
    chosen: Chosen | None = plan.memo.get(key)
    if chosen is not None:
        return chosen
    facts, configs = {**kernel_facts(problem, plan, d_out), **wants}, legal_tiles(problem, plan, kernel)
    device = problem.q.device
    spec = KernelSpec(kernel=kernel, target=devices.target_for(device), config=configs[0], **facts)
    specs = [dataclasses.replace(spec, config=c) for c in configs]
    is_final = True
    if _is_tuned(problem, kernel):
        run = lambda config: start(_built(dataclasses.replace(spec, config=config), device))
        tuned = autotune.tune(_question(problem, plan, kernel, facts), run)
        specs = specs if tuned is None else [dataclasses.replace(spec, config=tuned.winner), *specs]
        is_final = tuned is not None  # a call while a CUDA graph is captured times nothing, a later one may
    chosen = Chosen(*first_that_builds(specs, device))
    if is_final:
        plan.memo[key] = plan.memo[without_facts] = chosen
    return chosen


def forward_kernel(problem: Problem, plan: Plan) -> tuple[str, str]:
    """Which kernel a call's forward runs, 'forward' or 'hopper_forward', and why, for people.

    Raises:
        OptionError: kernel_options asks for the one that cannot serve this call.
    """
    asked = problem.options.warp_specialized
    if asked is False:
        return "forward", "given by kernel_options"
    key = ("forward kernel", _group(problem, "forward"), _fact_key(problem, None))
    found: tuple[str, str] | None = plan.memo.get(key)
    if found is None:
        reason = why_portable(problem, plan, devices.target_for(problem.q.device))
        found = (
            ("hopper_forward", "given by kernel_options" if asked else "this is Hopper")
            if reason is None
            else ("forward", reason)
        )
        plan.memo[key] = found
    if asked and found[0] == "forward":
        raise OptionError(
            "kernel_options 'warp_specialized' asks for a kernel that cannot serve this call",
            given=found[1],
            hint="leaving it out",
        )
    return found


def why_gathered(problem: Problem, plan: Plan, target: Target) -> str | None:
    """Why keys and values in pages are copied in front of a call's forward kernel, or None where that reads them where they lie.

    Args:
        problem, plan: One call over pages.
        target: A device.
    """
    obstacle = why_dense(problem)
    if obstacle is None and problem.k.dtype.itemsize == 1:
        obstacle = "pages hold numbers of 8 bits"
    if obstacle is None and problem.options.warp_specialized is False:
        obstacle = "given by kernel_options"
    if obstacle is not None:
        return obstacle
    key = ("gathered", target, _group(problem, "forward"), _fact_key(problem, None))
    if key not in plan.memo:
        plan.memo[key] = why_portable(problem, plan, target)
    found: str | None = plan.memo[key]
    return found


def forget_hopper(problem: Problem, plan: Plan) -> None:
    """Remembers that the kernel for Hopper could not be built for calls like this one."""
    key = ("forward kernel", _group(problem, "forward"), _fact_key(problem, None))
    plan.memo[key] = ("forward", _NOT_BUILT)
    target = devices.target_for(problem.q.device)
    plan.memo[("gathered", target, _group(problem, "forward"), _fact_key(problem, None))] = _NOT_BUILT


def backward_kernels(
    problem: Problem, plan: Plan, d_out: TensorLayout, needs: Needs, target: Target | None = None
) -> tuple[tuple[str, ...], str]:
    """Which kernels make the gradients of a call, FUSED, APART or PORTABLE, and why, for people.

    Args:
        problem, plan: One call.
        d_out: The layout of the gradient of out.
        needs: Whether q, k, v and each captured tensor needs a gradient. The latter are dq's to make, whatever makes the others.
        target: Another device than the call's, for people.
    """
    if target is not None:
        reasons = _why_not_hopper(problem, plan, target, d_out)
    else:
        key = _hopper_key(problem, d_out)
        found: _Reasons | None = plan.memo.get(key)
        if found is None:
            found = plan.memo[key] = _why_not_hopper(problem, plan, devices.target_for(problem.q.device), d_out)
        reasons = found
    why_not_fused = reasons.fused or _why_not_fused_this_time(problem, needs)
    if why_not_fused is None:
        return FUSED, "this is Hopper"
    if reasons.apart is None:
        return APART, f"this is Hopper; two kernels, not one: {why_not_fused}"
    return PORTABLE, reasons.apart


def likely_backward_kernels(problem: Problem, plan: Plan, target: Target | None = None) -> tuple[tuple[str, ...], str]:
    """The same, as far as it can be known before the backward pass."""
    d_out = fresh_layout(problem.q.dtype, problem.v.shape[3])
    needs_of_captures = tuple(c.requires_grad for c in problem.captures)
    needs = (problem.q.requires_grad, problem.k.requires_grad, problem.v.requires_grad, needs_of_captures)
    return backward_kernels(problem, plan, d_out, needs, target)


def possible_backward_kernels(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """All that a call's backward pass may run, as far as it can be known before: for all gradients, for some of them, and for those of
    captured tensors."""
    d_out, captures = (
        fresh_layout(problem.q.dtype, problem.v.shape[3]),
        tuple(c.requires_grad for c in problem.captures),
    )
    for_some, _ = backward_kernels(problem, plan, d_out, (True, False, False, captures))
    of_captures = ("dq",) if any(captures) else ()
    return tuple(dict.fromkeys((*likely_backward_kernels(problem, plan)[0], *for_some, *of_captures)))


class _Reasons(NamedTuple):
    """Why the backward kernels for Hopper, the one and the two, cannot serve calls of a plan; None where they can."""

    fused: str | None
    apart: str | None


def _why_not_fused_this_time(problem: Problem, needs: Needs) -> str | None:
    """Why the fused backward is not taken, by what may be different in each call of a plan."""
    if not all(needs[:3]):
        return "it makes all three gradients, and not all are needed"
    if must_be_deterministic(problem.options):
        return "it adds to query's gradient in no fixed order, and gradients must be deterministic"
    return None


def _why_not_hopper(problem: Problem, plan: Plan, target: Target, d_out: TensorLayout) -> _Reasons:
    if problem.options.warp_specialized is False:
        return _Reasons(*("given by kernel_options",) * 2)
    if target.arch != 90:
        return _Reasons(*(_not_hopper(target),) * 2)
    if any(is_fixed(kernel, _backward_options(problem)) for kernel in PORTABLE):
        return _Reasons(*("kernel_options fixes tiles of the portable kernels",) * 2)
    whys = []
    for kernel in (*FUSED, *APART):
        tiles = gradient_tiles_on(problem, plan, kernel, target)
        heads = "heads are too wide for one kernel, or query's and value's are not padded alike"
        none = heads if kernel in FUSED else _HOPPER_HEADS
        whys.append(_why_not_these(problem, plan, kernel, target, tiles, d_out) if tiles else none)
    fused = whys[0] if _FUSED_BACKWARD else "it is switched off"
    return _Reasons(fused, next((why for why in whys[1:] if why is not None), None))


def gradient_tiles_on(problem: Problem, plan: Plan, kernel: str, target: Target) -> tuple[TileConfig, ...]:
    """Tiles of a backward kernel for Hopper on a device, best first, whatever the mask; none where it cannot serve."""
    (_, _, q_len, qk_dim), v_dim = problem.q.shape, problem.v.shape[3]
    facts: dict[str, Any] = {"qk_dim": qk_dim, "v_dim": v_dim, "q_len": q_len, "programs": (plan.score, plan.mask)}
    return hopper_backward_tiles(target, **facts) if kernel in FUSED else hopper_gradient_tiles(kernel, target, **facts)


def forget_hopper_backward(problem: Problem, plan: Plan, d_out: TensorLayout, kernels: tuple[str, ...]) -> None:
    """Remembers that these kernels could not be built for calls like this one."""
    key = _hopper_key(problem, d_out)
    plan.memo[key] = plan.memo[key]._replace(**{"fused" if kernels == FUSED else "apart": _NOT_BUILT})


def _hopper_key(problem: Problem, d_out: TensorLayout) -> tuple[Any, ...]:
    return ("hopper backward", _FUSED_BACKWARD, _group(problem, "hopper_backward"), _fact_key(problem, d_out))


def why_portable(problem: Problem, plan: Plan, target: Target) -> str | None:
    """Why the kernel for Hopper cannot serve a call on a device, or None where it can."""
    if target.arch != 90:
        return _not_hopper(target)
    if is_fixed("forward", _tile_options(problem, "forward")):
        return "kernel_options fixes tiles of the portable kernel"
    tiles = tiles_on_hopper(problem, plan, target)
    if not tiles:
        return _HOPPER_HEADS
    return _why_not_these(problem, plan, "hopper_forward", target, tiles, None)


def _why_not_these(
    problem: Problem, plan: Plan, kernel: str, target: Target, tiles: tuple[TileConfig, ...], d_out: TensorLayout | None
) -> str | None:
    """Why a kernel for Hopper cannot serve a call in the tiles it has, or None where it can."""
    if not _allowed(problem, tiles):
        sizes = ", ".join(f"{c.BLOCK_M}x{c.BLOCK_N}" for c in tiles)
        return f"its tiles do not divide the block mask's BLOCK_SIZE: {sizes}"
    return why_not(KernelSpec(kernel=kernel, target=target, config=tiles[0], **kernel_facts(problem, plan, d_out)))


def _not_hopper(target: Target) -> str:
    return f"it is for sm_90, and this is {'the interpreter' if target.is_interpreter else f'sm_{target.arch}'}"


def tiles_on_hopper(problem: Problem, plan: Plan, target: Target) -> tuple[TileConfig, ...]:
    """Tiles of the kernel for Hopper on a device, best first, whatever the mask; none where it cannot serve."""
    (_, _, q_len, qk_dim), v_dim = problem.q.shape, problem.v.shape[3]
    sizes = {"qk_dim": qk_dim, "v_dim": v_dim, "q_len": q_len, "kv_len": problem.kv_len}
    return hopper_tiles(target, programs=(plan.score, plan.mask), **sizes)


def _built(spec: KernelSpec, device: torch.device) -> Chosen:
    return Chosen(spec, kernel_for(spec, device))


def likely_tiles(problem: Problem, plan: Plan, kernel: str) -> tuple[TileConfig, ...]:
    """The tiles a launch will take: those it took last; where it will be autotuned, all that will be timed."""
    last: Chosen | None = plan.memo.get(("last", _group(problem, kernel)))
    if last is not None:
        return (last.config,)
    configs = legal_tiles(problem, plan, kernel)
    if not _is_tuned(problem, kernel):
        return configs[:1]
    question = _question(problem, plan, kernel, _likely_facts(problem, plan, kernel))
    tuned = autotune.find(question)
    if tuned is not None:
        return (tuned.winner,)
    return configs[:1] if devices.is_capturing(problem.q.device) else question.candidates


def unbuilt(problem: Problem, plan: Plan, kernel: str) -> KernelSpec | None:
    """What a call will most likely have built for a kernel; None where it was built before, or several would be, to be timed."""
    if plan.memo.get(("last", _group(problem, kernel))) is not None or _is_tuned(problem, kernel):
        return None
    target, facts = devices.target_for(problem.q.device), _likely_facts(problem, plan, kernel)
    return KernelSpec(kernel=kernel, target=target, config=legal_tiles(problem, plan, kernel)[0], **facts)


def tiles_of(problem: Problem, plan: Plan, kernel: str) -> tuple[TileConfig, str]:
    """The tiles a call would run with, and why those, for people; times nothing.

    Args:
        problem, plan: One call.
        kernel: 'forward', or one of FUSED, APART or PORTABLE.
    """
    configs = legal_tiles(problem, plan, kernel)
    if is_fixed(kernel, _tile_options(problem, kernel)):
        return configs[0], "given by kernel_options"
    if not problem.options.autotune:
        last: Chosen | None = plan.memo.get(("last", _group(problem, kernel)))
        if last is not None and last.config != configs[0]:
            return last.config, f"the first that builds; {configs[0]} does not"
        return configs[0], "the default"
    question = _question(problem, plan, kernel, _likely_facts(problem, plan, kernel))
    tuned = autotune.find(question)
    if tuned is None:
        return configs[0], f"the default; the first call times {len(question.candidates)} configurations"
    return tuned.winner, f"tuned; {tuned}; {tuned.path}"


# ---------------------------------------------------------------- facts
def kernel_facts(problem: Problem, plan: Plan, d_out: TensorLayout | None = None) -> dict[str, Any]:
    """Every field of a spec but the kernel, its target and its tiles; `d_out` is the layout of the gradient of out."""
    q, is_paged = problem.q, problem.pages is not None
    q_layout, *kv_layouts = tensor_layout(q), *(tensor_layout(x, is_paged=is_paged) for x in (problem.k, problem.v))
    captures, numbers = bound(problem)
    return {
        "qk_dim": q.shape[3],
        "v_dim": problem.v.shape[3],
        "layouts": (q_layout, *kv_layouts, d_out or q_layout),
        "score": plan.score,
        "mask": plan.mask,
        "captures": tuple(capture_layout(c) for c in captures),
        "wide_numbers": tuple(wide_number(n) for n in numbers),
        "fold_scale": plan.score is None and problem.scale > 0 and problem.k.dtype in (torch.bfloat16, torch.float16),
        "precision": "tf32" if plan.tf32 else "ieee",
        "wide_lengths": any_wide((*q.shape[:3], problem.kv_len)),
        "page_size": 0 if problem.pages is None else problem.pages.page_size,
    }


def facts_of_decode(problem: Problem, target: Target) -> dict[str, Any]:
    """The fields of a spec that the decode kernel has besides."""
    return {"want_max": problem.want_max, "v_in_k": v_in_k(problem, target), "scales": scales_of(problem)}


def scales_of(problem: Problem) -> tuple[int, int]:
    """How keys and values of 8 bits are scaled, as a spec says it."""
    pages = problem.pages
    given = (None, None) if pages is None else (pages.k_scale, pages.v_scale)
    k, v = (0 if scale is None else min(scale.shape[0], 2) for scale in given)
    return k, v


def v_in_k(problem: Problem, target: Target) -> bool:
    """Whether values are the first dims of keys, in the same memory, and a tile of keys serves the decode kernel for both."""
    k, v = problem.k, problem.v
    steps = zip(k.shape, k.stride(), v.stride())  # of a dimension of one entry a stride may be anything
    is_same = k.data_ptr() == v.data_ptr() and k.dtype == v.dtype and all(a == b for n, a, b in steps if n > 1)
    return is_same and k.shape[3] >= v.shape[3] and reads_v_in_k(k.shape[3], v.shape[3], target)


def _fact_key(problem: Problem, d_out: TensorLayout | None) -> tuple[Any, ...]:
    """What of `kernel_facts` can change between calls of one plan; every call asks, so it is no dictionary."""
    q, page_size = problem.q, 0 if problem.pages is None else problem.pages.page_size
    captures, numbers = bound(problem)
    layouts = tensor_layout(q), *(tensor_layout(x, is_paged=page_size > 0) for x in (problem.k, problem.v)), d_out
    sizes = problem.scale > 0, any_wide((*q.shape[:3], problem.kv_len)), page_size
    return layouts, tuple(map(capture_layout, captures)), tuple(map(wide_number, numbers)), sizes


def bound(problem: Problem) -> tuple[tuple[Tensor, ...], tuple[int | float, ...]]:
    """Captured tensors and numbers of the score program, then of the mask program."""
    bindings = [t.binding for t in (problem.score, problem.mask) if t is not None]
    return sum((b.captures for b in bindings), ()), sum((b.numbers for b in bindings), ())


def _likely_facts(problem: Problem, plan: Plan, kernel: str) -> dict[str, Any]:
    """The facts a launch will find, as far as they can be known before the backward pass."""
    if kernel == "decode":
        return {**kernel_facts(problem, plan), **facts_of_decode(problem, devices.target_for(problem.q.device))}
    if kernel in _FORWARD:
        return {**kernel_facts(problem, plan), "want_max": problem.want_max}
    facts = kernel_facts(problem, plan, fresh_layout(problem.q.dtype, problem.v.shape[3]))
    if kernel in (*FUSED, *APART):
        return facts
    if kernel == "dq":
        slots = tuple(i for i, c in enumerate(problem.captures) if c.requires_grad)
        return {**facts, "want_dq": problem.q.requires_grad, "capture_grads": slots}
    return {**facts, "want_dk": problem.k.requires_grad, "want_dv": problem.v.requires_grad}


# ---------------------------------------------------------------- tiles
def legal_tiles(problem: Problem, plan: Plan, kernel: str) -> tuple[TileConfig, ...]:
    """Configurations of one kernel for this call's size class that its mask allows, best first; at least one.

    Raises:
        UnsupportedError: No tile divides the blocks of a list mask.
        OptionError: kernel_options names tiles that do not fit.
    """
    key = ("legal", _group(problem, kernel))
    known: tuple[TileConfig, ...] | None = plan.memo.get(key)
    if known is not None:
        return known
    found = _listed(problem, plan, kernel, candidates)
    legal = _allowed(problem, found)
    if not legal and problem.block_mask is not None:
        sizes = {n: x for n, x in _tile_facts(problem, plan, kernel).items() if n != "options"}
        fixed = is_fixed(kernel, _tile_options(problem, kernel))
        legal = () if fixed else dividing(kernel, problem.block_mask.BLOCK_SIZE, **sizes)
    if legal:
        plan.memo[key] = legal
    else:
        raise UnsupportedError(
            "no kernel tile divides the block mask's BLOCK_SIZE",
            given=f"tiles {', '.join(f'{c.BLOCK_M}x{c.BLOCK_N}' for c in found)}",
            hint="a BLOCK_SIZE of 128, or create_block_mask from a mask_mod",
        )
    return legal


def _listed(
    problem: Problem, plan: Plan, kernel: str, rule: Callable[..., tuple[TileConfig, ...]]
) -> tuple[TileConfig, ...]:
    """What a rule of tile_config (`candidates` or `trials`) says for this call, whatever its mask."""
    if kernel == "hopper_forward":
        return tiles_on_hopper(problem, plan, devices.target_for(problem.q.device))
    if kernel in (*FUSED, *APART):
        return gradient_tiles_on(problem, plan, kernel, devices.target_for(problem.q.device))
    if kernel == "decode":
        return tiles_of_decode(problem, plan, devices.target_for(problem.q.device))
    return rule(kernel, **_tile_facts(problem, plan, kernel))


def tiles_of_decode(problem: Problem, plan: Plan, target: Target) -> tuple[TileConfig, ...]:
    """Tiles of the decode kernel on a device, best first."""
    q, precision = problem.q, "tf32" if plan.tf32 else "ieee"
    sizes: dict[str, Any] = {
        "rows": _rows(problem),
        "element_bytes": q.element_size(),
        "qk_dim": q.shape[3],
        "v_dim": problem.v.shape[3],
        "is_paged": problem.pages is not None,
        "v_in_k": v_in_k(problem, target),
        "kv_bytes": _narrow_bytes(problem),
    }
    options, programs = _tile_options(problem, "decode"), (plan.score, plan.mask)
    return decode_tiles(target, programs=programs, options=options, precision=precision, **sizes)


def _narrow_bytes(problem: Problem) -> int:
    """Of keys and values that the decode kernel converts, 0 where it does not."""
    size = problem.k.element_size()
    return size if size < problem.q.element_size() else 0


def _rows(problem: Problem) -> int:
    """Queries times the query heads that share a key head."""
    return problem.q.shape[2] * (problem.q.shape[1] // problem.k.shape[1])


def _tile_facts(problem: Problem, plan: Plan, kernel: str) -> dict[str, Any]:
    """What tile_config asks about a call."""
    q = problem.q
    return {
        "target": devices.target_for(q.device), "element_bytes": q.element_size(), "qk_dim": q.shape[3],
        "v_dim": problem.v.shape[3], "q_len": q.shape[2], "programs": (plan.score, plan.mask),
        "options": _tile_options(problem, kernel), "precision": "tf32" if plan.tf32 else "ieee",
    }  # fmt: skip


def _allowed(problem: Problem, configs: tuple[TileConfig, ...]) -> tuple[TileConfig, ...]:
    """Those whose tiles divide the blocks of a list mask; all of them under any other mask."""
    mask = problem.block_mask
    return configs if mask is None else tuple(c for c in configs if mask.legal_tile(c.BLOCK_M, c.BLOCK_N))


def _tile_options(problem: Problem, kernel: str) -> Any:
    """What a caller fixed of a kernel's tiles."""
    return problem.options.forward if kernel in _FORWARD else _backward_options(problem)


def _backward_options(problem: Problem) -> Any:
    """The backward's options. BLOCK_M and BLOCK_N without a number or a prefix mean the forward's tiles, as in torch."""
    forward, backward = problem.options.forward, problem.options.backward
    shared = {name: None for name in ("BLOCK_M", "BLOCK_N") if getattr(forward, name) == getattr(backward, name)}
    return dataclasses.replace(backward, **shared)


# ---------------------------------------------------------------- autotuning
def _is_tuned(problem: Problem, kernel: str) -> bool:
    return problem.options.autotune and not is_fixed(kernel, _tile_options(problem, kernel))


def _group(problem: Problem, kernel: str) -> tuple[Any, ...]:
    """A key of all calls of a plan that share the choice of tiles, but for facts of tensors."""
    mask, q = problem.block_mask, problem.q
    blocks = None if mask is None or mask.predicate is not None else mask.BLOCK_SIZE
    sizes = _size_class(problem, kernel) if problem.options.autotune else ()
    if kernel == "decode":
        loads = problem.pages is not None, _narrow_bytes(problem), v_in_k(problem, devices.target_for(q.device))
        sizes = (*sizes, min(64, *autotune.size_class(_rows(problem))), *loads)
    return kernel, q.device.index, q.shape[2] <= SHORT_QUERIES, problem.kv_len > LONG_KEYS, blocks, sizes


def _question(problem: Problem, plan: Plan, kernel: str, facts: dict[str, Any]) -> autotune.Question:
    """What autotuning is asked for a call."""
    device, worth_timing = problem.q.device, _allowed(problem, _listed(problem, plan, kernel, trials))
    spec = KernelSpec(kernel=kernel, target=devices.target_for(device), config=worth_timing[0], **facts)
    return autotune.Question(spec, worth_timing, _size_class(problem, kernel), device)


def _size_class(problem: Problem, kernel: str) -> tuple[int, ...]:
    """Lengths and (batch, head) pairs of programs, as autotuning tells them apart."""
    q, k = problem.q, problem.k
    pairs = problem.kv_batch * k.shape[1] if kernel in ("decode", *BY_COLUMN) else q.shape[0] * q.shape[1]
    return autotune.size_class(q.shape[2], problem.kv_len, pairs)


__all__ = [
    "APART",
    "FUSED",
    "PORTABLE",
    "Chosen",
    "backward_kernels",
    "bound",
    "choose",
    "facts_of_decode",
    "forget_hopper",
    "forget_hopper_backward",
    "forward_kernel",
    "gradient_tiles_on",
    "kernel_facts",
    "legal_tiles",
    "likely_backward_kernels",
    "likely_tiles",
    "possible_backward_kernels",
    "scales_of",
    "tiles_of",
    "tiles_of_decode",
    "tiles_on_hopper",
    "unbuilt",
    "v_in_k",
    "why_gathered",
    "why_portable",
]
