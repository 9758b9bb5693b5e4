"""Compiles kernels for GPUs that are not there, and reads back what they take: shared memory, registers, spills."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexattn.codegen.emit import emit
from flexattn.codegen.spec import KernelSpec, MaskFacts, TensorLayout, capture_layout, wide_number
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import (
    TileConfig,
    TileProblem,
    candidates,
    delta_config,
    padded,
    tile_problem,
)
from flexattn.frontend.trace import Traced, trace
from flexattn.runtime.compile import build


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory, registers a thread, bytes of spilled registers, and ptxas's notes of serialised wgmma."""

    shared: int
    registers: int
    spills: int
    notes: tuple[str, ...]


def _leaves() -> dict[str, tuple[Traced | None, Traced | None]]:
    cap, ids = 30.0, torch.zeros(100, dtype=torch.int32)
    slopes, table = torch.zeros(8), torch.zeros(8, 99, requires_grad=True)
    causal = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask")
    document = trace(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx), "mask")
    softcap = trace(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), "score")
    alibi = trace(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), "score")
    bias = trace(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + 49], "score")
    return {
        "none": (None, None), "causal": (None, causal), "document": (None, document), "softcap": (softcap, causal),
        "alibi": (alibi, causal), "bias": (bias, causal),
    }  # fmt: skip


LEAVES = _leaves()


def spec_of(
    kernel: str, *, arch: int, dim: int, leaf: str = "causal", dtype: str = "bf16", config: TileConfig | None = None,
    aligned: bool = True,
) -> KernelSpec:  # fmt: skip
    """A kernel as the runtime would ask for it, with its preferred tiles."""
    score, mask = LEAVES[leaf]
    bound = [t for t in (score, mask) if t is not None]
    layout = TensorLayout(dtype, aligned, aligned, False)
    capture_grads = (0,) if leaf == "bias" and kernel == "dq" else ()
    return KernelSpec(
        kernel=kernel, target=target_of(arch), config=config or preferred(kernel, arch, dim, dtype, leaf)[0], qk_dim=dim, v_dim=dim,
        layouts=(layout,) * 4, score=score and score.program, mask=mask and mask.program,
        facts=MaskFacts(mask is not None), captures=tuple(capture_layout(c) for t in bound for c in t.binding.captures),
        wide_numbers=tuple(wide_number(n) for t in bound for n in t.binding.numbers), capture_grads=capture_grads,
        fold_scale=score is None,
    )  # fmt: skip


def preferred(kernel: str, arch: int, dim: int, dtype: str = "bf16", leaf: str = "causal") -> tuple[TileConfig, ...]:
    """The configurations the runtime would try, best first."""
    if kernel == "delta":
        return (delta_config(padded(dim)),)
    size = 4 if dtype == "fp32" else 2
    programs = [t.program for t in LEAVES[leaf] if t is not None]
    return candidates(kernel, target_of(arch), element_bytes=size, qk_dim=dim, v_dim=dim, q_len=4096, programs=programs)


def problem_of(spec: KernelSpec) -> TileProblem:
    """What the shared-memory model is asked for this kernel."""
    return tile_problem(
        spec.kernel, spec.target, element_bytes=4 if spec.layouts[0].dtype == "fp32" else 2, qk_dim=spec.qk_dim,
        v_dim=spec.v_dim, q_len=4096, programs=(spec.score, spec.mask), precision=spec.precision,
    )  # fmt: skip


def compile_and_measure(spec: KernelSpec, folder: Path) -> tuple[Any, Resources]:
    """Compiles with Triton, then runs the bundled assembler once more to hear what it used."""
    from triton.backends.nvidia.compiler import get_ptxas

    compiled, arch = build(emit(spec)), spec.target.arch
    text = folder / "kernel.ptx"
    text.write_text(compiled.asm["ptx"])
    name = f"sm_{arch}{'a' if arch >= 90 else ''}"
    command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(text), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    log = done.stdout + done.stderr
    registers, spills = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers and spills, log
    notes = tuple(sorted(set(re.findall(r"\((C75\d+)\)", log))))
    return compiled, Resources(compiled.metadata.shared, int(registers[1]), int(spills[1]), notes)
