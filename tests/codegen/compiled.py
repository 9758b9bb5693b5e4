"""Compiles kernels for GPUs that are not there, and reads back what they take: shared memory, registers, spills."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from flexattn.codegen.emit import emit
from flexattn.codegen.spec import KernelSpec, TensorLayout, capture_layout, wide_number
from flexattn.codegen.target import GFX942, Target, target_of
from flexattn.codegen.tile_config import TileConfig, TileProblem, candidates, delta_config, padded, tile_problem, trials
from flexattn.frontend.trace import Traced, trace
from flexattn.runtime import compile as compiling

TARGETS = (80, 86, 89, 90, 100, 120, GFX942)
KERNELS = ("forward", "dq", "dkdv")
BUILDERS = ("block_map", "fill", "order", "ranges")  # tests/codegen/test_compile_block_map.py


@dataclass(frozen=True)
class Resources:
    """Bytes of shared memory, registers a thread, bytes stored by spills, ptxas's notes of serialised wgmma, bytes of the stack that
    spills need (what the launcher looks at), and the binary."""

    shared: int
    registers: int
    spills: int
    notes: tuple[str, ...]
    stack: int = 0
    binary: bytes = field(default=b"", repr=False)


def _leaves() -> dict[str, tuple[Traced | None, Traced | None]]:
    cap, ids = 30.0, torch.zeros(100, dtype=torch.int32)
    slopes, table = torch.zeros(8), torch.zeros(8, 99, requires_grad=True)
    half, grid = torch.zeros(8, 99, dtype=torch.bfloat16, requires_grad=True), torch.zeros(99, 99, dtype=torch.bool)
    causal = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask")
    document = trace(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx), "mask")
    kept = trace(lambda b, h, q_idx, kv_idx: grid[q_idx, kv_idx], "mask")
    softcap = trace(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), "score")
    alibi = trace(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx), "score")
    bias = trace(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + 49], "score")
    half_bias = trace(lambda score, b, h, q_idx, kv_idx: score + half[h, q_idx - kv_idx + 49], "score")
    return {
        "none": (None, None), "causal": (None, causal), "document": (None, document), "softcap": (softcap, causal),
        "alibi": (alibi, causal), "bias": (bias, causal), "half bias": (half_bias, causal), "kept table": (None, kept),
    }  # fmt: skip


LEAVES = _leaves()


def spec_of(
    kernel: str, *, arch: int, dim: int, v_dim: int | None = None, leaf: str = "causal", dtype: str = "bf16",
    config: TileConfig | None = None, aligned: bool = True, precision: str = "ieee",
    leaves: tuple[Traced | None, Traced | None] | None = None, page_size: int = 0,
    v_in_k: bool = False, kv_dtype: str | None = None, scales: tuple[int, int] = (0, 0),
) -> KernelSpec:  # fmt: skip
    """A kernel as the runtime would ask for it, with its preferred tiles, for one of LEAVES or for the given ones."""
    score, mask = leaves or LEAVES[leaf]
    bound = [t for t in (score, mask) if t is not None]
    layout, of_kv = (TensorLayout(x, aligned, False) for x in (dtype, kv_dtype or dtype))
    capture_grads = (0,) if leaf in ("bias", "half bias") and kernel == "dq" else ()
    return KernelSpec(
        kernel=kernel, target=target_of(arch), config=config or preferred(kernel, arch, dim, dtype, leaf)[0], qk_dim=dim,
        v_dim=v_dim or dim, layouts=(layout, of_kv, of_kv, layout), score=score and score.program, mask=mask and mask.program,
        captures=tuple(capture_layout(c) for t in bound for c in t.binding.captures),
        wide_numbers=tuple(wide_number(n) for t in bound for n in t.binding.numbers), capture_grads=capture_grads,
        fold_scale=score is None and dtype != "fp32" and kv_dtype in (None, "bf16", "fp16"), precision=precision, page_size=page_size,
        v_in_k=v_in_k, scales=scales,
    )  # fmt: skip


def preferred(
    kernel: str, arch: int, dim: int, dtype: str = "bf16", leaf: str = "causal", *, target: Target | None = None,
    timed: bool = False,
) -> tuple[TileConfig, ...]:  # fmt: skip
    """The configurations the runtime would try, best first; with `timed` those that autotuning would time."""
    if kernel == "delta":
        return (delta_config(padded(dim), 4 if dtype == "fp32" else 2),)
    programs = [t.program for t in LEAVES[leaf] if t is not None]
    rule = trials if timed else candidates
    return rule(
        kernel, target or target_of(arch), element_bytes=element_bytes(dtype), qk_dim=dim, v_dim=dim, q_len=4096,
        programs=programs,
    )  # fmt: skip


def element_bytes(dtype: str) -> int:
    """Of a type as kernels name it."""
    return {"fp32": 4, "fp8e4nv": 1, "fp8e5": 1}.get(dtype, 2)


def narrow_bytes(dtype: str) -> int:
    """Of a type of keys and values that is converted, 0 of others."""
    return 1 if element_bytes(dtype) == 1 else 0


def problem_of(spec: KernelSpec) -> TileProblem:
    """What the shared-memory model is asked for this kernel."""
    return tile_problem(
        spec.kernel, spec.target, element_bytes=element_bytes(spec.layouts[0].dtype), qk_dim=spec.qk_dim,
        v_dim=spec.v_dim, q_len=4096, programs=(spec.score, spec.mask), precision=spec.precision,
        is_paged=spec.page_size > 0, v_in_k=spec.v_in_k,
        kv_bytes=narrow_bytes(spec.layouts[1].dtype if len(spec.layouts) > 1 else ""),
    )  # fmt: skip


def compile_and_measure(spec: KernelSpec) -> tuple[str, Resources]:
    """Assembly text and what the assembler said it took. Triton's cache would swallow the assembler's words, so it is not
    asked."""
    from triton import knobs

    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        compiled = compiling.build(emit(spec))
    if spec.target.is_amd:
        return compiled.asm["amdgcn"], _amd_resources(compiled)
    return compiled.asm["ptx"], _resources(compiled, said.getvalue())


def _resources(compiled: Any, log: str) -> Resources:
    said = [
        re.search(rf"{what}", log)
        for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack")
    ]
    assert all(said), f"ptxas did not say what it used: {log}"
    registers, spills, stack = (int(found[1]) for found in said if found)
    notes = tuple(line for line in log.splitlines() if "serialized" in line)
    return Resources(compiled.metadata.shared, registers, spills, notes, stack, compiled.asm["cubin"])


def spilled_in(loop: list[str]) -> int:
    """How often a loop reads or writes registers that did not fit."""
    return sum("LDL" in t or "STL" in t for t in loop)


def loops_of(binary: bytes) -> list[list[str]]:
    """The instructions of each innermost loop that multiplies on tensor cores, of a binary for an NVIDIA GPU."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", file.name], capture_output=True, text=True, check=True
        )
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", said.stdout, re.MULTILINE)
    place = {int(address, 16): at for at, (address, _) in enumerate(lines)}
    back = [
        (place.get(int(m[1], 16), at), at)
        for at, (_, text) in enumerate(lines)
        if (m := re.search(r"BRA.*?(0x[0-9a-f]+)", text))
    ]
    spans = [(first, last) for first, last in back if first < last]
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    bodies = [[text for _, text in lines[first : last + 1]] for first, last in inner]
    return [body for body in bodies if any("MMA" in text for text in body)]


def _amd_resources(compiled: Any) -> Resources:
    text = compiled.asm["amdgcn"]
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")}
    registers, spills = found["vgpr_count"], found["vgpr_spill_count"]
    assert registers and spills, "the assembly does not say what it used"
    return Resources(compiled.metadata.shared, int(registers[1]), 4 * int(spills[1]), ())


class _Allocated(Exception):
    """Raised where the compiler has given out shared memory, with its passes so far."""


def shared_of(spec: KernelSpec) -> int:
    """Shared memory alone: the compiler is stopped where it has been given out, after a tenth of the time that compiling takes."""
    from triton._C.libtriton import ir, nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    made, target = emit(spec), GPUTarget(*spec.target.triton_target)
    source, backend = compiling.ast_source(made), make_backend(target)
    options = backend.parse_options({**made.options, **source.parse_options()})
    context, stages, metadata = ir.context(), {}, {"target": target, **options.__dict__}
    ir.load_dialects(context)
    backend.load_dialects(context)
    backend.add_stages(stages, options, source.language)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    if spec.target.is_amd:
        stages["llir"](module, metadata)
        return int(metadata["shared"])

    def stop(passes: Any, *_: Any) -> None:
        raise _Allocated(passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia.passes.ttnvgpuir, "add_allocate_tensor_memory", stop)  # what follows that of shared memory
        try:
            stages["llir"](module, metadata)
        except _Allocated as reached:
            reached.args[0].run(module, "allocate")
    return int(module.get_int_attr("ttg.shared"))


def layouts_of(spec: KernelSpec) -> tuple[KernelSpec, ...]:
    """The layouts of q, k, v and d_out between which shared memory differs: all as given, none aligned, and those of the
    kernel's own rows not aligned. What the hardware copies for products that hold their rows in registers need not stay
    in shared memory; what the program loads must."""
    plain = TensorLayout(spec.layouts[0].dtype, False, False)
    rows, own = (spec.config.BLOCK_N, (1, 2)) if spec.kernel == "dkdv" else (spec.config.BLOCK_M, (0, 3))
    given = [spec, replace(spec, layouts=(plain,) * 4)]
    if any(spec.described) and (rows < 64 or spec.config.num_warps not in (4, 8)):
        mixed = tuple(plain if place in own else layout for place, layout in enumerate(spec.layouts))
        given.append(replace(spec, layouts=mixed))
    return tuple(given)


@functools.cache
def most_shared(spec: KernelSpec) -> int:
    """What the layouts that take the most take: the choice of tiles does not know them."""
    return max(shared_of(each) for each in layouts_of(spec))
