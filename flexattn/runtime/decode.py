"""Calls of few queries: whether they take the decode kernel, into how many parts keys are split, and its launches.

Reads a Problem and a Plan; makes the forward's results. The idea: every length is an argument of the launch and no table is made, so a
cache that grows by a token builds, decides and keeps nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.decode_tiles import (
    CHAINED,
    FEWEST_KEYS,
    MOST_QUERIES,
    WIDEST,
    WIDEST_V,
    pays,
    split_count,
)
from flexattn.codegen.shared_memory import tile_dims
from flexattn.codegen.spec import KernelSpec, any_wide, capture_layout, fresh_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig, is_fixed
from flexattn.runtime import device as devices
from flexattn.runtime.choose import Chosen, bound, choose, facts_of_decode, scales_of, v_in_k
from flexattn.runtime.compile import InterpretedKernel, Kernel, Starts, first_that_builds, keep_ready
from flexattn.runtime.plan import Plan, Problem, dense_strides, why_no_decode

_EACH_CALL = ("caps", "kv_len")  # arguments that follow tensors, values and the number of keys
Results = tuple[Tensor, Tensor, Tensor | None]


def decode_choice(problem: Problem, target: Target) -> tuple[bool, str]:
    """Whether a call takes the decode kernel on a device, and why or why not, for people."""
    options, q, k = problem.options, problem.q, problem.k
    obstacle = why_no_decode(problem)
    if obstacle is not None:
        return False, obstacle
    if options.backend == "TRITON_DECODE":
        return True, "given by kernel_options"
    if options.backend == "TRITON" or options.force_flex or options.warp_specialized is not None:
        return False, "given by kernel_options"
    if is_fixed("forward", options.forward):
        return False, "kernel_options fixes tiles of the forward kernel"
    if q.shape[3] > WIDEST or problem.v.shape[3] > WIDEST_V:
        return False, f"it takes head dimensions up to {WIDEST} of query and key and {WIDEST_V} of value"
    if problem.lengths is not None and q.shape[2] <= MOST_QUERIES:
        return True, "keys lie in pages" if problem.pages is not None else "keys end at lengths on the device"
    sizes = {"q_len": q.shape[2], "kv_len": problem.kv_len, "group": q.shape[1] // k.shape[1]}
    device = {"programs": q.shape[0] * q.shape[1], "processors": target.processors}
    if pays(**sizes, **device, dim=max(q.shape[3], problem.v.shape[3])):
        return True, "few queries meet long rows of keys"
    if q.shape[2] > MOST_QUERIES or problem.kv_len < FEWEST_KEYS:
        return False, f"it takes at most {MOST_QUERIES} queries and at least {FEWEST_KEYS} keys"
    return False, f"more than {MOST_QUERIES} rows share a key head, and there are heads for all processors"


def splits_of(problem: Problem, config: TileConfig, target: Target) -> int:
    """Into how many parts the keys of a call are split."""
    if problem.options.split_kv is not None:
        return problem.options.split_kv
    groups = problem.q.shape[0] * problem.k.shape[1] * _lines(problem, config)
    is_small = config.num_warps <= 4 and max(problem.q.shape[3], problem.v.shape[3]) <= 128  # a processor holds two
    in_pairs = problem.pages is not None and is_small
    return _split_count(groups, problem.kv_len, config.BLOCK_N, target.processors, in_pairs)


@functools.lru_cache(maxsize=4096)
def _split_count(groups: int, kept: int, tile: int, processors: int, in_pairs: bool) -> int:
    return split_count(groups=groups, kept=kept, tile=tile, processors=processors, in_pairs=in_pairs)


def _lines(problem: Problem, config: TileConfig) -> int:
    """Tiles that the rows of a key head fill."""
    return -(-problem.q.shape[2] * (problem.q.shape[1] // problem.k.shape[1]) // config.BLOCK_M)


class Form(NamedTuple):
    """How a call is launched, as far as it follows from the number of keys.

    Attributes:
        splits: into how many parts keys are split.
        is_chained: the call starts before the kernel in front of it has ended. Not where programs run for long: those of two calls then
            share processors while others are idle.
    """

    splits: int
    is_chained: bool


def _form(problem: Problem, config: TileConfig, target: Target) -> Form:
    splits, k, v = splits_of(problem, config, target), problem.k, problem.v
    dims = k.shape[3] + (0 if v_in_k(problem, target) else v.shape[3])
    read = problem.kv_batch * k.shape[1] * problem.kv_len * dims * k.element_size()
    return Form(splits, read <= CHAINED)


class Ready(NamedTuple):
    """The launches for calls of certain sizes but for the number of keys."""

    decode: Starts
    merge: Starts | None
    between: int  # float32 numbers of all parts


def forward(
    problem: Problem, plan: Plan, order: tuple[int, ...], inputs: Callable[[], dict[str, Any]],
    sizes: Callable[[], dict[str, Any]],
) -> Results:  # fmt: skip
    """Runs the decode kernel, and the one that merges the parts of split keys.

    Args:
        problem, plan: one call; last strides are 1.
        order: of out's dimensions in memory.
        inputs: makes the tensors and captured values that every attention kernel has.
        sizes: makes the sizes.

    Raises:
        CompileError: no configuration could be built.
        StaleMaskError: a captured tensor has been written to since the mask was made.
    """
    q, mask = problem.q, problem.block_mask
    if mask is not None and mask.predicate is not None:
        mask.predicate.check_current()
    known: dict[Any, Any] = plan.memo.setdefault("ready to decode", {})
    key = (order, *_key(problem))
    config, target = known.get(key), devices.target_for(q.device)
    ready = None if config is None else known.get((key, _form(problem, config, target)))
    if ready is not None:
        return _start(problem, ready, order, inputs())
    fixed, given = sizes(), inputs()
    make = lambda chosen: _ready(problem, plan, chosen, {**fixed, **given, "out_strides": _out_strides(problem, order)})
    run = lambda chosen: _start(problem, make(chosen), order, given)
    chosen = choose(problem, plan, "decode", run, **facts_of_decode(problem, target))
    ready = make(chosen)
    if not devices.is_capturing(q.device):  # a call then times nothing, a later one may
        keep_ready(known, key, chosen.config)
        keep_ready(known, (key, _form(problem, chosen.config, target)), ready)
    return _start(problem, ready, order, given)


def _key(problem: Problem) -> tuple[Any, ...]:
    """What launches rest on that are ready, but for their form."""
    q, k, v = problem.q, problem.k, problem.v
    captures, numbers = bound(problem)
    length = problem.kv_len if problem.options.autotune else any_wide((problem.kv_len,))
    page_size = 0 if problem.pages is None else problem.pages.page_size
    return (
        q.device.index, problem.scale, problem.want_max, q.shape, k.shape[:2], v.shape[0], v.shape[3], length, page_size,
        q.stride(), k.stride(), v.stride(), q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16, k.data_ptr() == v.data_ptr(),
        k.dtype, scales_of(problem),
        tuple(map(capture_layout, captures)), tuple(map(wide_number, numbers)),
    )  # fmt: skip


def _out_strides(problem: Problem, order: tuple[int, ...]) -> tuple[int, ...]:
    return dense_strides((*problem.q.shape[:3], problem.v.shape[3]), order)


def _ready(problem: Problem, plan: Plan, chosen: Chosen, arguments: dict[str, Any]) -> Ready:
    q, spec = problem.q, chosen.spec
    lines, form = _lines(problem, spec.config), _form(problem, spec.config, spec.target)
    tiles = q.shape[0] * problem.k.shape[1] * lines
    arguments = {**arguments, "lines": lines, "splits": form.splits}
    decode = chosen.kernel.fix(tiles * form.splits, arguments, changing=_EACH_CALL, chained=form.is_chained)
    if form.splits == 1:
        return Ready(decode, None, 0)
    v_pad = tile_dims(spec.qk_dim, spec.v_dim, spec.target)[1]
    between = tiles * form.splits * spec.config.BLOCK_M * (v_pad + 2)
    merge = _merge_kernel(plan, spec, problem).fix(q.shape[0] * q.shape[1] * q.shape[2], arguments)
    return Ready(decode, merge, between)


def _start(problem: Problem, ready: Ready, order: tuple[int, ...], inputs: dict[str, Any]) -> Results:
    q, single = problem.q, torch.float32
    out = torch.empty_permuted((*q.shape[:3], problem.v.shape[3]), order, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=single, device=q.device)
    peaks = torch.empty_like(lse) if problem.want_max else None
    parts = torch.empty(ready.between, dtype=single, device=q.device) if ready.between else lse
    results = {"OUT": out, "LSE": lse, "MAX": lse if peaks is None else peaks, "PARTS": parts}
    ready.decode({**inputs, **results, "kv_len": problem.kv_len}, device=q.device)
    if ready.merge is not None:
        ready.merge(results, device=q.device)
    return out, lse, peaks


def _merge_kernel(plan: Plan, spec: KernelSpec, problem: Problem) -> Kernel | InterpretedKernel:
    """The kernel that adds up what a decode kernel made; it knows nothing of mods."""
    key = ("merge", problem.q.device, spec.config.BLOCK_M, spec.want_max)
    kernel: Kernel | InterpretedKernel | None = plan.memo.get(key)
    if kernel is None:
        merge = merge_spec(spec, problem.q.dtype)
        kernel = plan.memo[key] = first_that_builds([merge], problem.q.device)[1]
    return kernel


def merge_spec(spec: KernelSpec, dtype: torch.dtype) -> KernelSpec:
    """Of the kernel that merges the parts that a decode kernel makes."""
    return replace(
        spec, kernel="merge", config=TileConfig(spec.config.BLOCK_M, 16, 4, 1), layouts=(fresh_layout(dtype, spec.v_dim),) * 4,
        score=None, mask=None, captures=(), wide_numbers=(), fold_scale=True, precision="ieee", wide_lengths=False, page_size=0,
        v_in_k=False, scales=(0, 0),
    )  # fmt: skip


__all__ = ["decode_choice", "forward", "merge_spec", "splits_of"]
