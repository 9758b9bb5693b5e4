"""Every kernel compiles for every target without a GPU, and takes no more than the tile rules say.

The default set (seconds a kernel) is what a commit must pass, under the newest Triton and under 3.6.0; `-m slow` adds every
leaf, every head dim and every configuration that a call may fall back to.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from flexattn.codegen.emit import _SKELETONS
from flexattn.codegen.target import GFX942, KIB, target_of
from flexattn.codegen.tile_config import TileConfig, is_legal, shared_bytes
from tests.codegen.compiled import (
    BUILDERS,
    KERNELS,
    LEAVES,
    TARGETS,
    Resources,
    compile_and_measure,
    most_shared,
    preferred,
    problem_of,
    shared_of,
    spec_of,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)
NVIDIA = tuple(arch for arch in TARGETS if arch != GFX942)
FAMILIES = (80, 90, 100)  # one architecture of each matrix instruction; 86, 89 and 120 have 80's
INSTRUCTION = {"mma": "mma.sync", "wgmma": "wgmma", "tcgen05": "tcgen05.mma"}

# Bytes of registers a thread of a default configuration may spill. Two dozen registers are the assembler's choice, most of
# them for what the loop does not use. Exceptions, by kernel, family, largest head dim and data type:
SPILLS = 96
EXCEPTIONS = {
    # dk and dv, scores and their gradient in 255 registers: the fastest of those timed on an H200 all the same under Triton 3.6, where
    # it spills 108 bytes; the assembler of Triton 3.9 spills more
    ("dkdv", "wgmma", 128, "bf16"): 304,
    ("dkdv", "wgmma", 128, "fp16"): 304,
    ("dkdv", "wgmma", 256, "bf16"): 256,
    # sums of 512 columns
    ("forward", "wgmma", 512, "bf16"): 896,
    ("forward", "wgmma", 512, "fp16"): 896,
    # sums of 256 columns in the registers of 4 warps; smaller tiles would read everything twice as often
    ("dkdv", "mma", 256, "bf16"): 128,
    # with a table read by the element, under Triton 3.9 (32 bytes under 3.6): every smaller tile spills twice as much
    ("dkdv", "tcgen05", 256, "bf16"): 448,
}


@pytest.fixture(autouse=True)
def _own_leaves(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def compiled(kernel: str, spills: int | None = None, **what: object) -> tuple[str, Resources]:
    """Assembly text and resources of a kernel, after checking what holds for all of them."""
    spec = spec_of(kernel, **what)  # type: ignore[arg-type]
    text, used = compile_and_measure(spec)
    limit = target_of(spec.target.arch).shared_bytes
    assert used.shared <= limit
    assert kernel == "delta" or used.shared <= shared_bytes(spec.config, problem_of(spec)) <= limit
    assert used.registers <= (512 if spec.target.is_amd else 255)
    assert used.spills <= (_spill_limit(spec) if spills is None else spills), (spec.config, used)
    # captured reads inside the loop may make the assembler serialise wgmma
    assert used.notes == () or spec.captures, "the assembler serialises wgmma"
    return text, used


def _spill_limit(spec: object) -> int:
    kernel, dtype, dim = spec.kernel, spec.layouts[0].dtype, problem_of(spec).pad  # type: ignore[attr-defined]
    return EXCEPTIONS.get((kernel, spec.target.family, dim, dtype), SPILLS)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- machine code
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", NVIDIA)
@pytest.mark.parametrize("kernel", KERNELS)
def test_defaults_of_every_target(kernel: str, arch: int, dim: int) -> None:
    if arch in (86, 89) and dim != 128:
        pytest.skip("the code of sm_80, and at 128 the tiles of a small shared memory")
    text, _ = compiled(kernel, arch=arch, dim=dim)
    assert INSTRUCTION[target_of(arch).family] in text


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kernel", KERNELS)
def test_defaults_in_single_precision(kernel: str, arch: int, dim: int) -> None:
    text, _ = compiled(kernel, arch=arch, dim=dim, dtype="fp32")
    assert "mma" not in text, "products of float32 must not be rounded to TF32"


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_single_precision_may_be_rounded_for_the_tensor_cores(precision: str) -> None:
    text, _ = compiled("forward", arch=90, dim=64, dtype="fp32", precision=precision, spills=1024)
    assert ("wgmma" in text) == (precision == "tf32")


@pytest.mark.parametrize("kernel", [*KERNELS, "delta"])
def test_amd(kernel: str) -> None:
    text, _ = compiled(kernel, arch=GFX942, dim=64, leaf="softcap" if kernel == "forward" else "causal")
    assert ("v_mfma" in text) == (kernel != "delta")


def test_no_skeleton_is_left_out() -> None:
    hopper = {
        "hopper_forward",
        "hopper_backward",
        "hopper_dq",
        "hopper_query_gradient",
        "hopper_key_gradients",
    }  # in test_compile_hopper.py and test_compile_hopper_backward.py
    decode = {"decode", "merge"}  # in test_compile_decode.py
    pages = {"append_pages", "cut_values"}  # in test_compile_append.py
    assert {*KERNELS, *BUILDERS, "delta"} | hopper | decode | pages == set(_SKELETONS)


@pytest.mark.parametrize("leaf", [x for x in LEAVES if x != "causal"])
def test_every_kind_of_leaf_forward(leaf: str) -> None:
    text, _ = compiled("forward", arch=90, dim=64, leaf=leaf)
    assert ("tanh.approx" in text) == (leaf == "softcap")


@pytest.mark.parametrize("kernel", ["dq", "dkdv"])
def test_backward_of_a_score_mod(kernel: str) -> None:
    compiled(kernel, arch=90, dim=128, leaf="softcap")


def test_captured_gradient_in_the_dq_kernel() -> None:
    text, _ = compiled("dq", arch=90, dim=64, leaf="bias")
    assert "red.global.gpu" in text or "atom.global.gpu" in text


def test_prepass_and_unaligned_inputs() -> None:
    compiled("delta", arch=90, dim=128)
    # whole tiles pass through registers, since nothing copies them
    text, _ = compiled("forward", arch=80, dim=40, aligned=False, spills=320)
    assert "cp.async.cg" not in text  # 16-byte copies need the alignment that is not promised


def test_aligned_inputs_are_copied_by_the_hardware() -> None:
    ampere, _ = compiled("forward", arch=80, dim=64)
    hopper, _ = compiled("forward", arch=90, dim=64)
    assert "cp.async.cg.shared.global" in ampere
    assert "cp.async.bulk.tensor" in hopper


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", [*FAMILIES, 120])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_target_and_leaf(kernel: str, arch: int, dim: int, leaf: str) -> None:
    compiled(kernel, arch=arch, dim=dim, leaf=leaf)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [16, 96, 512])
@pytest.mark.parametrize("arch", [*FAMILIES, 120])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_head_dim_and_type(kernel: str, arch: int, dim: int, dtype: str) -> None:
    compiled(kernel, arch=arch, dim=dim, dtype=dtype)


# ---------------------------------------------------------------- the model of shared memory
def check_model(spec: object, *, used: int) -> None:
    """Never below what the compiler takes; at most 5 % or 4 KiB above it."""
    model = shared_bytes(spec.config, problem_of(spec))  # type: ignore[arg-type, attr-defined]
    what = f"{spec.kernel} {spec.config} sm_{spec.target.arch}: the model says {model}, the compiler {used}"  # type: ignore[attr-defined]
    assert used <= model, what
    # captured elements that are narrow or have a gradient: Triton 3.9 turns a whole tile of them, 3.6.0 a part
    reads, tile = problem_of(spec).reads, spec.config.BLOCK_M * spec.config.BLOCK_N  # type: ignore[arg-type, attr-defined]
    is_turned = reads.is_narrow or (spec.kernel == "dq" and reads.may_have_gradient)  # type: ignore[attr-defined]
    assert model - used <= max(4 * KIB, 0.05 * used) + (4 * tile if is_turned else 0), what


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_model_of_the_defaults(kernel: str, arch: int, dim: int) -> None:
    for config in preferred(kernel, arch, dim):
        spec = spec_of(kernel, arch=arch, dim=dim, config=config)
        check_model(spec, used=most_shared(spec))


@pytest.mark.parametrize("kernel", KERNELS)
def test_shared_memory_is_known_before_the_assembler_runs(kernel: str) -> None:
    spec = spec_of(kernel, arch=90, dim=64, leaf="kept table")
    assert shared_of(spec) == compile_and_measure(spec)[1].shared


@pytest.mark.parametrize("leaf", ["document", "bias", "half bias", "kept table"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_of_captured_reads(arch: int, leaf: str) -> None:
    for kernel in KERNELS:
        spec = spec_of(kernel, arch=arch, dim=64, leaf=leaf)
        check_model(spec, used=most_shared(spec))


@pytest.mark.parametrize("leaf", ["bias", "half bias", "kept table"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_of_tiles_that_are_read_in_one_stage(arch: int, leaf: str) -> None:
    for tile in ((64, 64, 4, 1), (64, 32, 4, 1)):
        spec = spec_of("forward", arch=arch, dim=128, leaf=leaf, config=TileConfig(*tile))
        used, model = most_shared(spec), shared_bytes(spec.config, problem_of(spec))
        assert used <= model <= used + 4 * KIB + 5 * tile[0] * tile[1], (spec.config, used, model)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_in_single_precision(arch: int, precision: str) -> None:
    for kernel in KERNELS:
        spec = spec_of(kernel, arch=arch, dim=64, v_dim=32, dtype="fp32", precision=precision)
        check_model(spec, used=most_shared(spec))


# 8 warps beside one another (of 64 rows, of 128), above one another, and 16, for which there is no tcgen05
@pytest.mark.parametrize(
    "dim, tile", [(16, (64, 16, 8, 2)), (32, (128, 128, 8, 2)), (64, (256, 32, 8, 2)), (64, (64, 64, 16, 2))]
)
def test_model_of_warps_on_tcgen05(dim: int, tile: tuple[int, int, int, int]) -> None:
    spec = spec_of("forward", arch=100, dim=dim, config=TileConfig(*tile))
    check_model(spec, used=most_shared(spec))


# What a layout of q, k or v adds: rows loaded by the program, tiles turned whole, in halves and with 16 bytes a thread
@pytest.mark.parametrize(
    "kernel, arch, dim, tile",
    [
        ("forward", 90, 64, (32, 128, 4, 2)), ("dkdv", 90, 64, (64, 32, 4, 2)), ("dkdv", 90, 128, (64, 32, 4, 2)),
        ("dq", 80, 64, (64, 64, 4, 2)), ("dq", 80, 64, (64, 128, 8, 3)), ("dq", 90, 256, (16, 32, 4, 1)),
    ],
)  # fmt: skip
def test_model_of_layouts(kernel: str, arch: int, dim: int, tile: tuple[int, int, int, int]) -> None:
    spec = spec_of(kernel, arch=arch, dim=dim, config=TileConfig(*tile))
    check_model(spec, used=most_shared(spec))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_model_of_all_that_is_tried(kernel: str, arch: int, dim: int, dtype: str) -> None:
    tried = (*preferred(kernel, arch, dim, dtype), *preferred(kernel, arch, dim, dtype, timed=True))
    for config in dict.fromkeys(tried):
        spec = spec_of(kernel, arch=arch, dim=dim, dtype=dtype, config=config)
        check_model(spec, used=most_shared(spec))


@pytest.mark.slow
@pytest.mark.parametrize("warps, stages", [(4, 1), (4, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_model_of_tiles_a_caller_may_ask_for(kernel: str, arch: int, warps: int, stages: int) -> None:
    for (m, n), (qk_dim, v_dim) in itertools.product(((64, 32), (32, 64), (128, 128)), ((64, 128), (128, 64))):
        spec = spec_of(kernel, arch=arch, dim=qk_dim, v_dim=v_dim, config=TileConfig(m, n, warps, stages))
        if is_legal(spec.config, problem_of(spec)):
            check_model(spec, used=most_shared(spec))


# Whatever shared memory a device has, a legal configuration fits it: 64 KiB (gfx942, and sm_75's), 99 and 227.
@pytest.mark.parametrize("kib", [64, 99, 227])
@pytest.mark.parametrize("kernel", KERNELS)
def test_legal_configurations_fit_the_device(kernel: str, kib: int) -> None:
    target = replace(target_of({64: GFX942, 99: 89, 227: 90}[kib]), shared_bytes=kib * KIB)
    for dim in (64, 128):
        for config in preferred(kernel, target.arch, dim, target=target):
            used = shared_of(replace(spec_of(kernel, arch=target.arch, dim=dim, config=config), target=target))
            assert used <= kib * KIB, (config, used)


@pytest.mark.slow
@pytest.mark.parametrize("kib", [64, 99, 227])
@pytest.mark.parametrize("dim", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_that_is_tried_fits_a_smaller_device(kernel: str, arch: int, dim: int, kib: int) -> None:
    target = replace(target_of(arch), shared_bytes=kib * KIB)
    if not _has_tiles(kernel, arch, dim, target):
        return
    for config in preferred(kernel, arch, dim, target=target, timed=True):
        used = most_shared(spec_of(kernel, arch=arch, dim=dim, config=config))  # which does not depend on what there is
        assert used <= kib * KIB, (config, used)


def _has_tiles(kernel: str, arch: int, dim: int, target: object) -> bool:
    """Whether any tile fits; head dims of 512 have none in 64 KiB, which is an error and not a kernel that fails later."""
    from flexattn.errors import UnsupportedError

    try:
        return bool(preferred(kernel, arch, dim, target=target))  # type: ignore[arg-type]
    except UnsupportedError:
        assert dim == 512 and target.shared_bytes == 64 * KIB, "only the largest heads have no tile"  # type: ignore[attr-defined]
        return False


def test_there_is_a_configuration_for_every_head_dim_and_target() -> None:
    arches, dims = (*NVIDIA, 75), (4, 64, 100, 129, 256, 512)
    for kernel, arch, dim, dtype in itertools.product(KERNELS, arches, dims, ("bf16", "fp32")):
        found = preferred(kernel, arch, dim, dtype)
        assert 1 <= len(found) <= 3 and len(set(found)) == len(found)
