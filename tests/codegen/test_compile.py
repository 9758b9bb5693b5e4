"""Every kernel compiles for every target without a GPU, and takes no more than the tile rules say."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import shared_bytes
from tests.codegen.compiled import LEAVES, Resources, compile_and_measure, preferred, problem_of, spec_of

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)
ARCHES = (80, 89, 90, 100, 120)
INSTRUCTION = {80: "mma.sync", 89: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}
# Bytes of registers the preferred tiles may spill; backward tiles hold two accumulators and use every register.
SPILLS = {"forward": 128, "dq": 256, "dkdv": 640, "delta": 0}


@pytest.fixture(autouse=True)
def _own_leaves(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))


def compiled(tmp_path: Path, kernel: str, spills: int | None = None, **what: object) -> tuple[str, Resources]:
    """PTX and resources of a kernel, after checking what holds for all of them."""
    spec = spec_of(kernel, **what)  # type: ignore[arg-type]
    binary, used = compile_and_measure(spec, tmp_path)
    limit = target_of(spec.target.arch).shared_bytes
    assert used.shared <= limit
    assert kernel == "delta" or used.shared <= shared_bytes(spec.config, problem_of(spec)) <= limit
    assert used.spills <= (SPILLS[kernel] if spills is None else spills), used
    # captured reads inside the loop may make the assembler serialise wgmma
    assert used.notes == () or spec.captures, "the assembler serialises wgmma"
    return binary.asm["ptx"], used


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_every_target(kernel: str, arch: int, tmp_path: Path) -> None:
    ptx, _ = compiled(tmp_path, kernel, arch=arch, dim=64)
    assert INSTRUCTION[arch] in ptx


@pytest.mark.parametrize("leaf", [x for x in LEAVES if x != "causal"])
def test_every_kind_of_leaf_forward(leaf: str, tmp_path: Path) -> None:
    ptx, _ = compiled(tmp_path, "forward", arch=90, dim=64, leaf=leaf)
    assert ("tanh.approx" in ptx) == (leaf == "softcap")


def test_captured_gradient_in_the_dq_kernel(tmp_path: Path) -> None:
    ptx, _ = compiled(tmp_path, "dq", arch=90, dim=64, leaf="bias", spills=1024)
    assert "red.global.gpu" in ptx or "atom.global.gpu" in ptx


def test_prepass_and_unaligned_inputs(tmp_path: Path) -> None:
    compiled(tmp_path, "delta", arch=90, dim=128)
    ptx, _ = compiled(tmp_path, "forward", arch=80, dim=40, aligned=False, spills=512)
    assert "cp.async.cg" not in ptx  # 16-byte copies need the alignment that is not promised


def test_aligned_inputs_are_copied_16_bytes_at_a_time(tmp_path: Path) -> None:
    ptx, _ = compiled(tmp_path, "forward", arch=80, dim=64)
    assert "cp.async.cg.shared.global" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_every_kernel_target_and_leaf(kernel: str, arch: int, dim: int, leaf: str, tmp_path: Path) -> None:
    compiled(tmp_path, kernel, arch=arch, dim=dim, leaf=leaf, spills=2048)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dim", [16, 96, 256, 512])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_every_configuration_fits(kernel: str, arch: int, dim: int, dtype: str, tmp_path: Path) -> None:
    for config in preferred(kernel, arch, dim, dtype):
        compiled(tmp_path, kernel, arch=arch, dim=dim, dtype=dtype, config=config, spills=1 << 14)


def test_there_is_a_configuration_for_every_head_dim_and_target() -> None:
    kernels, arches, dims = ("forward", "dq", "dkdv"), (*ARCHES, 75), (4, 64, 100, 129, 256, 512)
    for kernel, arch, dim, dtype in itertools.product(kernels, arches, dims, ("bf16", "fp32")):
        found = preferred(kernel, arch, dim, dtype)
        assert 1 <= len(found) <= 3 and len(set(found)) == len(found)
