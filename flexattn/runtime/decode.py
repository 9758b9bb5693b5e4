"""Calls of few queries: whether they take the decode kernel, into how many parts keys are split, and its launches.

Reads a Problem and a Plan; makes the forward's results. The idea: every length is an argument of the launch and no table is made, so a
cache that grows by a token builds, decides and keeps nothing.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexattn.codegen.decode_tiles import FEWEST_KEYS, MOST_QUERIES, pays, split_count
from flexattn.codegen.shared_memory import tile_dims
from flexattn.codegen.spec import KernelSpec, fresh_layout
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.runtime.choose import Chosen, choose
from flexattn.runtime.compile import InterpretedKernel, Kernel, first_that_builds
from flexattn.runtime.plan import Plan, Problem, dense_strides, why_no_decode

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
    if options.forward.given():
        return False, "kernel_options fixes tiles of the forward kernel"
    sizes = {"q_len": q.shape[2], "kv_len": k.shape[2], "group": q.shape[1] // k.shape[1]}
    if pays(**sizes, programs=q.shape[0] * q.shape[1], processors=target.processors):
        return True, "few queries meet long rows of keys"
    if q.shape[2] > MOST_QUERIES or k.shape[2] < FEWEST_KEYS:
        return False, f"it takes at most {MOST_QUERIES} queries and at least {FEWEST_KEYS} keys"
    return False, f"more than {MOST_QUERIES} rows share a key head, and there are heads for all processors"


def splits_of(problem: Problem, config: TileConfig, target: Target) -> int:
    """Into how many parts the keys of a call are split."""
    if problem.options.split_kv is not None:
        return problem.options.split_kv
    q, k = problem.q, problem.k
    groups = q.shape[0] * k.shape[1] * _lines(problem, config)
    return _split_count(groups, k.shape[2], config.BLOCK_N, target.processors)


@functools.lru_cache(maxsize=4096)
def _split_count(groups: int, kept: int, tile: int, processors: int) -> int:
    return split_count(groups=groups, kept=kept, tile=tile, processors=processors)


def _lines(problem: Problem, config: TileConfig) -> int:
    """Tiles that the rows of a key head fill."""
    return -(-problem.q.shape[2] * (problem.q.shape[1] // problem.k.shape[1]) // config.BLOCK_M)


def forward(
    problem: Problem, plan: Plan, order: tuple[int, ...], inputs: dict[str, Any], sizes: dict[str, Any]
) -> Results:
    """Runs the decode kernel, and where keys are split the one that merges the parts.

    Args:
        problem, plan: one call; last strides are 1.
        order: of out's dimensions in memory.
        inputs: the tensors and captured values that every attention kernel has.
        sizes: and the sizes.

    Raises:
        CompileError: no configuration could be built.
        StaleMaskError: a captured tensor has been written to since the mask was made.
    """
    mask = problem.block_mask
    if mask is not None and mask.predicate is not None:
        mask.predicate.check_current()
    start = lambda chosen: _start(problem, plan, chosen, order, {**inputs, **sizes})
    return start(choose(problem, plan, "decode", start, want_max=problem.want_max))


def _start(problem: Problem, plan: Plan, chosen: Chosen, order: tuple[int, ...], arguments: dict[str, Any]) -> Results:
    q, (_, kv_heads, _, v_dim), spec = problem.q, problem.v.shape, chosen.spec
    lines, splits = _lines(problem, spec.config), splits_of(problem, spec.config, spec.target)
    pairs = q.shape[0] * kv_heads
    out_shape = (*q.shape[:3], v_dim)
    out = torch.empty_permuted(out_shape, order, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(lse) if problem.want_max else None
    stats = parts = lse
    if splits > 1:
        rows = pairs * lines * splits * spec.config.BLOCK_M
        stats = torch.empty(2 * rows, dtype=torch.float32, device=q.device)
        parts = torch.empty(rows * _v_pad(spec), dtype=torch.float32, device=q.device)
    arguments = {
        **arguments, "OUT": out, "LSE": lse, "MAX": lse if peaks is None else peaks, "PARTS": parts, "STATS": stats,
        "out_strides": dense_strides(out_shape, order), "lines": lines, "splits": splits,
    }  # fmt: skip
    chosen.kernel(pairs * lines * splits, arguments, device=q.device)
    if splits > 1:
        _merge_kernel(plan, spec, problem)(q.shape[0] * q.shape[1] * q.shape[2], arguments, device=q.device)
    return out, lse, peaks


def _v_pad(spec: KernelSpec) -> int:
    return tile_dims(spec.qk_dim, spec.v_dim, spec.target)[1]


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
        score=None, mask=None, captures=(), wide_numbers=(), fold_scale=True, precision="ieee", wide_lengths=False,
    )  # fmt: skip


__all__ = ["decode_choice", "forward", "merge_spec", "splits_of"]
