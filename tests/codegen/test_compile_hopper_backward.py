"""The fused backward for Hopper compiles without a GPU, keeps its registers in its loops, and its leaves are spelled in Gluon."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import replace

import pytest

pytest.importorskip("triton.experimental.gluon")
import torch
import triton

from flexattn import mods
from flexattn.codegen.emit import emit
from flexattn.codegen.hopper_tiles import hopper_backward_tiles, hopper_gradient_tiles, why_not
from flexattn.codegen.leaves import has_slope
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.trace import trace
from tests.codegen.compiled import LEAVES as PORTABLE_LEAVES
from tests.codegen.compiled import compile_and_measure, loops_of, spec_of, spilled_in
from tests.leaf_kernel import spec_of as leaf_spec
from tests.leaf_kernel import text_of

LEAVES = {**PORTABLE_LEAVES, "window": (None, trace(mods.sliding_window(1024), "mask"))}
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter")


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


# ---------------------------------------------------------------- leaves
def test_what_is_only_added_has_no_slope() -> None:
    alibi, softcap = (leaf_spec(LEAVES[n][0], dtype="bf16", kernel="hopper_backward") for n in ("alibi", "softcap"))
    assert not has_slope(alibi) and has_slope(softcap)
    assert emit(softcap).constexprs["SLOPE"] == 2 and emit(alibi).constexprs["SLOPE"] == 0


def test_score_and_slope_share_what_both_need() -> None:
    text = text_of(leaf_spec(LEAVES["softcap"][0], dtype="bf16", kernel="hopper_backward"))
    assert text.count("leaf_ops.tanh(") == 1
    assert len(ast.parse(text).body[-1].body[-1].value.elts) == 2


def test_what_is_the_same_for_every_query_is_read_once() -> None:
    text = text_of(leaf_spec(LEAVES["alibi"][0], dtype="bf16", kernel="hopper_backward"))
    assert "def known(b, h, kv_idx, caps)" in text and "known[0]" in text


def test_what_is_the_same_for_every_key_is_read_once_a_tile() -> None:
    text = text_of(leaf_spec(LEAVES["document"][1], dtype="bf16", kernel="hopper_backward"))
    assert (
        "def seen(b, h, first, columns, caps, known)" in text
        and "leaf_ops.read_run(caps[0], first, columns, caps[1], True, 0)" in text
    )
    assert "(seen[0] == known[0])" in text or "(known[0] == seen[0])" in text


# ---------------------------------------------------------------- machine code
SPILLS = 256 if triton.__version__.startswith("3.6.") else 512  # bytes a thread, mostly outside the loops
IN_LOOPS = 0 if triton.__version__.startswith("3.6.") else 6  # accesses to them in a loop
# what is read, or made, for each pair takes registers: the most of any Triton
MORE_IN_LOOPS = {"alibi": 4, "document": 21, "bias": 9, "half bias": 7}


def _spec(dim: int, leaf: str, config: TileConfig | None = None, **fields: object) -> KernelSpec:
    programs = [t and t.program for t in LEAVES[leaf]]
    listed = hopper_backward_tiles(target_of(90), qk_dim=dim, v_dim=dim, q_len=4096, programs=programs)
    dtype = str(fields.pop("dtype", "bf16"))
    spec = spec_of("hopper_backward", arch=90, dim=dim, dtype=dtype, config=config or listed[0], leaves=LEAVES[leaf])
    return replace(spec, **fields)  # type: ignore[arg-type]


def _check(dim: int, leaf: str, **fields: object) -> str:
    spec = _spec(dim, leaf, **fields)
    text, used = compile_and_measure(spec)
    assert why_not(spec) is None
    assert used.shared <= spec.target.shared_bytes
    assert used.notes == (), "the assembler serialises wgmma"
    assert used.registers == 168  # setmaxnreg hands registers on: what the assembler was allowed is an equal share
    loops = loops_of(used.binary)
    assert len(loops) == 4, "two warpgroups, partial and full tiles"
    assert max(map(spilled_in, loops)) <= max(IN_LOOPS, MORE_IN_LOOPS.get(leaf, 0)), used
    assert used.spills <= SPILLS, used
    products = {sum("HGMMA" in t for t in body) for body in loops}
    assert products == {24 if spec.config.BLOCK_M == 64 and spec.qk_dim == 64 else 32}, "a product was left out"
    taken = {int(n) for n in re.findall(r"bar(?:rier)?\.sync(?:\.aligned)?\s+(\d+)", text)}
    assert not taken & set(range(6, 16)), "a named barrier of the skeleton is one of Triton's"
    return text


@pytest.mark.parametrize("leaf", ["causal", "softcap"])
def test_wide_heads(leaf: str) -> None:
    assert "red.relaxed.gpu.global.add.v4.f32" in _check(128, leaf)


@pytest.mark.parametrize("leaf", ["causal", "softcap"])
def test_narrow_heads(leaf: str) -> None:
    _check(64, leaf)


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_documents(dim: int) -> None:
    """Their programs take columns, with keys and values of two at once."""
    text = _check(dim, "document")
    assert re.search(r"atom\.[a-z.]*global[a-z.]*\.add\.[su]32", text)


def test_only_columns_of_documents_are_taken_from_a_queue() -> None:
    for leaf in LEAVES:
        made = emit(_spec(128, leaf))
        assert ("COUNTER" in made.signature) == (leaf == "document"), leaf
        assert ("COUNTER" in made.constexprs) == (leaf != "document"), leaf
    same, lengths = LEAVES["document"], torch.zeros(4, dtype=torch.int32)
    by_batch = trace(lambda b, h, q_idx, kv_idx: kv_idx < lengths[b], "mask")
    for leaves in ((LEAVES["alibi"][0], same[1]), (None, by_batch)):
        assert not spec_of(
            "hopper_backward", arch=90, dim=128, config=TileConfig(64, 128, 4, 2), leaves=leaves
        ).is_queued
    without_dq = replace(_spec(128, "document"), kernel="hopper_key_gradients")
    assert not without_dq.is_queued and emit(without_dq).constexprs["COUNTER"] is None


def test_the_other_half_type() -> None:
    assert "f16.f16" in _check(128, "none", dtype="fp16")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_pass_that_turns_sums_into_dq(dim: int, dtype: str) -> None:
    plain = replace(_spec(dim, "none", dtype=dtype), kernel="hopper_dq", score=None, mask=None)
    _, used = compile_and_measure(plain)
    assert used.spills == 0 and used.registers <= 128, used
    assert used.shared <= plain.target.shared_bytes // 2, "less than two programs a multiprocessor"


# ---------------------------------------------------------------- the two kernels that share a backward
APART = ("hopper_query_gradient", "hopper_key_gradients")


def _check_apart(
    kernel: str, dims: tuple[int, int], leaf: str, in_loops: int = 0, spills: int = 64, **fields: object
) -> None:
    programs = [t and t.program for t in LEAVES[leaf]]
    listed = hopper_gradient_tiles(kernel, target_of(90), qk_dim=dims[0], v_dim=dims[1], q_len=4096, programs=programs)
    spec = replace(
        spec_of(kernel, arch=90, dim=dims[0], v_dim=dims[1], config=listed[0], leaves=LEAVES[leaf]), **fields
    )
    text, used = compile_and_measure(spec)
    assert why_not(spec) is None
    assert used.shared <= spec.target.shared_bytes
    assert used.notes == (), "the assembler serialises wgmma"
    assert used.registers == 168
    loops = loops_of(used.binary)
    assert len(loops) == 4, "two warpgroups, partial and full tiles"
    assert max(map(spilled_in, loops)) <= in_loops and used.spills <= spills, used
    taken = {int(n) for n in re.findall(r"bar(?:rier)?\.sync(?:\.aligned)?\s+(\d+)", text)}
    assert not taken & {*range(6, 10), 14, 15}, "a named barrier of the skeleton is one of Triton's"
    assert "red.relaxed" not in text and "atom." not in text, "no program adds to another's result"


@pytest.mark.parametrize("kernel", APART)
@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (128, 128)])
def test_two_kernels(dims: tuple[int, int], kernel: str) -> None:
    _check_apart(kernel, dims, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", APART)
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (128, 256), (64, 128), (128, 128), (64, 64)])
def test_every_leaf_of_two_kernels(dims: tuple[int, int], leaf: str, kernel: str) -> None:
    few = leaf in ("none", "causal", "window", "softcap", "alibi")  # a soft-cap has 2 spilled accesses in a loop
    in_loops, spills = (2, 128) if few else (20, 256)
    _check_apart(kernel, dims, leaf, in_loops=in_loops, spills=spills)


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_leaf(dim: int, leaf: str) -> None:
    _check(dim, leaf)
