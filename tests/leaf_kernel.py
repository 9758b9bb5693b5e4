"""A kernel that does nothing but call a generated leaf, and what a leaf should compute: the program itself, in torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from flexattn.codegen.leaves import leaf_functions, leaf_text
from flexattn.codegen.skeletons import tiles
from flexattn.codegen.spec import KernelSpec, TensorLayout, capture_layout, wide_number
from flexattn.codegen.target import INTERPRETER, target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.program import Traced

ROWS, KEYS = 16, 32


@triton.jit
def apply_leaf(OUT, SCORE, caps, LEAF: tl.constexpr, READS: tl.constexpr, IS_MASK: tl.constexpr, ROWS: tl.constexpr,
               KEYS: tl.constexpr):  # fmt: skip
    """OUT [ROWS, KEYS] = the leaf at every (q_idx, kv_idx) of one tile."""
    q_idx = tl.arange(0, ROWS)[:, None]
    kv_idx = tl.arange(0, KEYS)[None, :]
    at = q_idx * KEYS + kv_idx
    zero = tl.program_id(0)
    known = tiles.with_reads(zero, zero, q_idx, 0, caps, READS, KEYS)
    if IS_MASK:
        value = LEAF(zero, zero, q_idx, kv_idx, known)
        value = tl.where(value & (q_idx >= 0) & (kv_idx >= 0), 1.0, 0.0)
    else:
        value = LEAF(tl.load(SCORE + at), zero, zero, q_idx, kv_idx, known)
    tl.store(OUT + at, value)


def spec_of(
    traced: Traced, *, dtype: str = "fp32", interpreted: bool = False, kernel: str = "forward", **fields: Any
) -> KernelSpec:
    """A spec whose only program is `traced`."""
    program, binding = traced
    layout = TensorLayout(dtype, True, False)
    return KernelSpec(
        kernel=kernel,
        target=INTERPRETER if interpreted else target_of(90),
        config=TileConfig(32, 32, 4, 1),
        qk_dim=64,
        v_dim=64,
        layouts=(layout,) * 4,
        captures=tuple(capture_layout(c) for c in binding.captures),
        wide_numbers=tuple(wide_number(n) for n in binding.numbers),
        **{program.kind: program},
        **fields,
    )


def text_of(spec: KernelSpec) -> str:
    return leaf_text(leaf_functions(spec))


def run_leaf(leaf: Any, traced: Traced, score: torch.Tensor) -> torch.Tensor:
    """The leaf's values on one tile, float32 [ROWS, KEYS], on the device of `score`."""
    out = torch.full((ROWS, KEYS), torch.nan, device=score.device)
    caps: list[Any] = []
    for c in traced.binding.captures:
        caps += [c.view(torch.uint8) if c.dtype == torch.bool else c, *c.shape, *c.stride()]
    caps += traced.binding.numbers
    reads = leaf.fn.__globals__.get("reads")  # of the same module
    apply_leaf[(1,)](out, score, tuple(caps) or (0,), leaf, reads, traced.program.kind == "mask", ROWS, KEYS)
    return out


def right_values(traced: Traced, score: torch.Tensor) -> torch.Tensor:
    """The program evaluated in torch on the CPU, float32 [ROWS, KEYS]."""
    on_cpu = traced.binding._replace(captures=tuple(c.cpu() for c in traced.binding.captures))
    zero = torch.zeros((), dtype=torch.int64)
    q_idx, kv_idx = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :]
    found = evaluate(traced.program, on_cpu, score=score.cpu(), b=zero, h=zero, q_idx=q_idx, kv_idx=kv_idx)
    return found.float().expand(ROWS, KEYS)
