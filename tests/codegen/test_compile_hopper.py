"""The forward kernel for Hopper compiles without a GPU, spills nothing where it is chosen, and its leaves are spelled in Gluon."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
import triton

pytest.importorskip("triton.experimental.gluon")

from flexattn import mods
from flexattn.codegen.emit import emit
from flexattn.codegen.hopper_tiles import hopper_tiles, piece_rows, why_not
from flexattn.codegen.shared_memory import tile_dims
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.target import target_of
from flexattn.frontend.trace import trace
from flexattn.runtime.compile import SPILLED_REGISTERS, leaf_module
from tests.codegen.compiled import LEAVES as PORTABLE_LEAVES
from tests.codegen.compiled import compile_and_measure, loops_of, spec_of, spilled_in
from tests.goldens_of import GOLDENS
from tests.leaf_kernel import spec_of as leaf_spec
from tests.leaf_kernel import text_of
from tests.spelling_cases import CASES, case

_KEYS, _ROWS = torch.zeros(8, 99), torch.zeros(99)
LEAVES = {
    **PORTABLE_LEAVES,
    "window": (None, trace(mods.sliding_window(1024), "mask")),
    "bias of keys": (
        trace(lambda score, b, h, i, j: score + _KEYS[h, j] * _ROWS[i], "score"),
        PORTABLE_LEAVES["document"][1],
    ),
}
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Gluon has no interpreter")


@pytest.mark.parametrize("name, kind", CASES)
def test_each_row_of_the_op_table_is_spelled_in_gluon(name: str, kind: str) -> None:
    from tests.codegen.gluon_leaf_kernel import translated

    traced, _ = case(name, kind, torch.device("cpu"))
    spec = leaf_spec(traced, dtype="bf16", kernel="hopper_forward")
    text = text_of(spec)
    module = leaf_module(text, f"gluon{abs(hash(text))}")
    assert "tt.store" in translated(module, emit(spec).signature["caps"])


def _score_of_a_constant(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx % 7 == 3, 0.5, score) + torch.floor_divide(kv_idx, 3) * 1e-40


def _score_of_nothing_but_a_constant(score, b, h, q_idx, kv_idx):
    return 0.25


def _score_of_keys(score, b, h, q_idx, kv_idx):
    return kv_idx * 0.5


def _mask_of_nothing_but_a_constant(b, h, q_idx, kv_idx):
    return torch.tensor(True)


CONSTANTS = (_score_of_a_constant, _score_of_nothing_but_a_constant, _score_of_keys, _mask_of_nothing_but_a_constant)


@pytest.mark.parametrize("function", [*CONSTANTS, *GOLDENS])
def test_whole_functions_are_spelled_in_gluon(function: object) -> None:
    from tests.codegen.gluon_leaf_kernel import translated

    is_mask = function is _mask_of_nothing_but_a_constant
    traced = trace(function, "mask" if is_mask else "score") if callable(function) else GOLDENS[function]()
    spec = leaf_spec(traced, dtype="bf16", kernel="hopper_forward")
    text = text_of(spec)
    module = leaf_module(text, f"gluon{abs(hash(text))}")
    assert "tt.store" in translated(module, emit(spec).signature["caps"])


# ---------------------------------------------------------------- machine code
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]


def _spec(dims: tuple[int, int], leaf: str, **fields: object) -> KernelSpec:
    programs = [t and t.program for t in LEAVES[leaf]]
    config = hopper_tiles(target_of(90), qk_dim=dims[0], v_dim=dims[1], q_len=4096, kv_len=16384, programs=programs)[0]
    dtype = str(fields.pop("dtype", "bf16"))
    spec = spec_of(
        "hopper_forward", arch=90, dim=dims[0], v_dim=dims[1], dtype=dtype, config=config, leaves=LEAVES[leaf]
    )
    return replace(spec, **fields)  # type: ignore[arg-type]


# Accesses to spilled registers in a masked loop that later versions of Triton than 3.6 have; no other loop has any.
LATER = {((96, 96), "document"): 2, ((128, 128), "document"): 2, ((256, 256), "document"): 6}
OF_PAGES = 3  # more, in those loops, where keys lie in pages


def _in_loops(dims: tuple[int, int], leaf: str) -> int:
    return 0 if triton.__version__.startswith("3.6.") else LATER.get((dims, leaf), 0)


def _check(spec: KernelSpec, in_loops: int = 0) -> str:
    """`in_loops`: accesses to spilled registers that a loop may have."""
    text, used = compile_and_measure(spec)
    assert why_not(spec) is None
    assert used.shared <= spec.target.shared_bytes
    assert used.stack <= 4 * SPILLED_REGISTERS, (spec.config, used)  # once a tile of queries
    loops = loops_of(used.binary)
    assert len(loops) == {2: 2, 3: 6}[spec.config.BLOCK_M // 64], "of each role, partial and full tiles"
    assert max(map(spilled_in, loops)) <= in_loops, (spec.config, used)
    assert used.notes == (), "the assembler serialises wgmma"
    # setmaxnreg hands registers on: what the assembler was allowed is an equal share of all of them
    assert used.registers == {2: 168, 3: 128}[spec.config.BLOCK_M // 64]
    meetings = [t for body in loops for t in body if re.search(r"BAR\.SYNC\S* 0x[0-3]\b", t)]
    assert spec.config.BLOCK_M > 128 or not meetings, "warpgroups of one role wait for each other"
    own, theirs = _barriers(text)
    assert not own & theirs, "a named barrier of the skeleton is one of Triton's"
    return text


def _barriers(text: str) -> tuple[set[int], set[int]]:
    """Named barriers of the skeleton, and those that the compiler took."""
    found = {int(n) for n in re.findall(r"bar(?:rier)?\.sync(?:\.aligned)?\s+(\d+)", text)}
    return set(range(4, 16)), found


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("dims", DIMS)
def test_every_head_dim(dims: tuple[int, int]) -> None:
    assert "wgmma" in _check(_spec(dims, "causal"), _in_loops(dims, "causal"))


@pytest.mark.parametrize("leaf", ["softcap", "alibi", "bias", "bias of keys"])
def test_leaves_of_narrow_heads(leaf: str) -> None:
    _check(_spec((64, 64), leaf))


def test_maxima_and_the_other_half_type() -> None:
    text = _check(_spec((128, 128), "none", want_max=True, dtype="fp16"))
    assert "f16.f16" in text


@pytest.mark.parametrize("page_size", [16, 48, 256])
def test_pages(page_size: int) -> None:
    _check_pages(_spec((128, 128), "causal", page_size=page_size))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [8, 16, 64, 96, 672])
@pytest.mark.parametrize("leaf", ["causal", "alibi", "bias of keys", "document"])
@pytest.mark.parametrize("dims", DIMS)
def test_every_size_of_pages(dims: tuple[int, int], leaf: str, page_size: int) -> None:
    of_dense_keys = _in_loops(dims, leaf)
    _check_pages(_spec(dims, leaf, page_size=page_size), of_dense_keys and of_dense_keys + OF_PAGES)


def _check_pages(spec: KernelSpec, in_loops: int = 0) -> None:
    """Beside what holds of dense keys: pieces lie in a buffer as the rows of one tile do."""
    found, tile = _copied_to(_check(spec, in_loops)), spec.config.BLOCK_N
    piece = piece_rows(tile, spec.page_size)
    for name, dims in zip("KV", tile_dims(spec.qk_dim, spec.v_dim, spec.target)):
        assert emit(spec).signature[name].startswith(f"tensordesc<bf16[1, 1, {piece}, {dims}]")
        columns = range(0, dims // 64 * tile * 128, tile * 128)  # 64 numbers wide, one behind the other
        assert {start + row * 128 for start in columns for row in range(0, tile, piece)} in found, name


def _copied_to(text: str) -> list[set[int]]:
    """Where the copies of each tile go, in bytes from its begin."""
    sums = {m[1]: (m[2], int(m[3])) for m in re.finditer(r"add\.s32\s+(%r\d+), (%r\d+), (-?\d+);", text)}
    found: dict[str, set[int]] = {}
    for register in re.findall(r"cp\.async\.bulk\.tensor\.4d\.shared\S*\s+\[(%r\d+)\]", text):
        base, at = sums.get(register, (register, 0))
        found.setdefault(base, set()).add(at)
    return [{at - min(places) for at in places} for places in found.values()]


@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("dims", DIMS)
def test_every_leaf(dims: tuple[int, int], leaf: str) -> None:
    _check(_spec(dims, leaf), _in_loops(dims, leaf))
