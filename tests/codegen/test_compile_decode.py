"""The decode kernel and its merge compile for every kind of target without a GPU, spill little and fit what the model says."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from flexattn import mods
from flexattn.codegen.decode_tiles import decode_tiles, formula_of, hull_of, pays, split_count
from flexattn.codegen.emit import emit
from flexattn.codegen.shared_memory import shared_bytes
from flexattn.codegen.target import KIB, target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.trace import trace
from flexattn.runtime.decode import merge_spec
from tests.codegen.compiled import (
    LEAVES,
    Resources,
    compile_and_measure,
    element_bytes,
    loops_of,
    problem_of,
    shared_of,
    spec_of,
    spilled_in,
)

pytest.importorskip("triton")
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)
SPILLS = 320  # before the loops, whose first tiles are all on their way at once; in a loop of few rows there are none
ASKED_SPILLS = 480  # the same with what a mask that is asked reads of tensors
WIDE_SPILLS, WIDE_SPILLED = 560, 40  # with sums [64, 512]: bytes a thread, and instructions in a loop of about 900
FAMILIES = (80, 90, 100)
WINDOW = (None, trace(mods.sliding_window(1024), "mask"))
PREFIX = (None, trace(lambda b, h, i, j: (j < 7) | (i - j < 300) & (i >= j), "mask"))
LENGTHS = torch.zeros(8, dtype=torch.int32)
BY_LENGTH = (None, trace(lambda b, h, i, j: j < LENGTHS[b], "mask"))
PER_HEAD = (None, trace(lambda b, h, i, j: (j < LENGTHS[b]) & (j >= LENGTHS[h] - 16 * h), "mask"))
REMAINDER = (None, trace(lambda b, h, i, j: (i + j + h) % 3 != 1, "mask"))


@pytest.fixture(autouse=True)
def _own_leaves(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


def tiles(
    arch: int, dim: int, rows: int, dtype: str = "bf16", is_paged: bool = False, leaf: str = "none"
) -> tuple[TileConfig, ...]:
    sizes = {"element_bytes": element_bytes(dtype), "qk_dim": dim, "v_dim": dim}
    programs = [traced and traced.program for traced in LEAVES[leaf]]
    return decode_tiles(target_of(arch), rows=rows, programs=programs, is_paged=is_paged, **sizes)  # type: ignore[arg-type]


def compiled(
    arch: int, dim: int, rows: int, leaf: str = "causal", dtype: str = "bf16", page_size: int = 0, **what: object
) -> tuple[str, Resources]:
    config = tiles(arch, dim, rows, dtype, page_size > 0, leaf)[0]
    spec = spec_of("decode", arch=arch, dim=dim, leaf=leaf, dtype=dtype, config=config, page_size=page_size, **what)  # type: ignore[arg-type]
    text, used = compile_and_measure(spec)
    assert used.shared <= shared_bytes(spec.config, problem_of(spec)) <= target_of(arch).shared_bytes
    assert used.spills <= (ASKED_SPILLS if leaf == "document" else SPILLS), used
    if arch == 90 and rows <= 16 and leaf != "document":
        most = 8 if leaf == "kept table" else 0  # a few numbers that do not change, under Triton 3.6
        assert all(spilled_in(loop) <= most for loop in loops_of(used.binary))
    return text, used


@compiles
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", FAMILIES)
def test_defaults_of_one_tile_of_few_rows(arch: int, dim: int) -> None:
    text, _ = compiled(arch, dim, 4)
    assert "mma.sync" in text and "cp.async.cg.shared.global" in text


@compiles
@pytest.mark.parametrize("arch", FAMILIES)
def test_defaults_of_many_rows(arch: int) -> None:
    text, _ = compiled(arch, 128, 64)
    assert {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}[arch] in text


@compiles
@pytest.mark.parametrize("leaf", ["none", "document", "softcap", "alibi", "bias", "kept table"])
def test_every_kind_of_leaf(leaf: str) -> None:
    compiled(90, 128, 4, leaf)


@compiles
@pytest.mark.parametrize(
    "leaves", [WINDOW, PREFIX, PER_HEAD, REMAINDER], ids=["window", "prefix", "per head", "remainder"]
)
def test_masks_found_by_formula_or_asked(leaves: object) -> None:
    compiled(90, 128, 4, leaves=leaves)


PAGE_LOOKUP, KEYS = r"cp\.async\.ca\.shared\.global", r"cp\.async\.cg\.shared\.global"


@compiles
@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 672])
@pytest.mark.parametrize("arch", FAMILIES)
def test_pages_are_looked_up_ahead_of_keys_on_their_way(arch: int, page_size: int) -> None:
    """As many tiles are in shared memory at once as of dense keys, and page numbers beside them."""
    text, used = compiled(arch, 128, 4, leaves=BY_LENGTH, page_size=page_size)
    assert re.search(PAGE_LOOKUP, text) and re.search(KEYS, text)
    assert used.shared >= 2 * 2 * 64 * 128 * 2


@compiles
@pytest.mark.parametrize("leaves", [REMAINDER, WINDOW, PER_HEAD], ids=["remainder", "window", "per head"])
def test_masks_over_pages(leaves: object) -> None:
    compiled(90, 128, 4, leaves=leaves, page_size=16)


@compiles
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("rows", [4, 17, 64])
@pytest.mark.parametrize("dim", [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 256))])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_of_shared_memory_over_pages(arch: int, dim: int, rows: int, page_size: int) -> None:
    for config in tiles(arch, dim, rows, is_paged=True):
        spec = spec_of("decode", arch=arch, dim=dim, config=config, page_size=page_size)
        used, model = shared_of(spec), shared_bytes(config, problem_of(spec))
        assert used <= model <= used + max(4 * KIB, 0.05 * used), (config, used, model)


LATENT = {"dim": 576, "v_dim": 512}


def latent_tiles(arch: int, rows: int, *, is_paged: bool, v_in_k: bool) -> tuple[TileConfig, ...]:
    sizes = {"element_bytes": 2, "qk_dim": 576, "v_dim": 512}
    return decode_tiles(target_of(arch), rows=rows, is_paged=is_paged, v_in_k=v_in_k, **sizes)


@compiles
@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("rows", [16, 20, 128])
def test_latent_attention_reads_keys_once(rows: int, page_size: int) -> None:
    """More than 64 KiB of keys are on their way to a processor, and no value; sums of 512 columns stay in registers."""
    config = latent_tiles(90, rows, is_paged=page_size > 0, v_in_k=True)[0]
    spec = spec_of("decode", arch=90, config=config, page_size=page_size, v_in_k=True, **LATENT)
    text, used = compile_and_measure(spec)
    assert config.BLOCK_M == {16: 16, 20: 32, 128: 64}[rows] and config.num_warps == 8
    assert ("wgmma" in text) == (rows == 128) and re.search(KEYS, text)
    queries, keys = config.BLOCK_M * 576 * 2, config.BLOCK_N * 576 * 2
    assert used.shared - queries >= 2 * keys >= 64 * KIB
    most, in_loop = (WIDE_SPILLS, WIDE_SPILLED) if rows > 64 else (SPILLS, 0)
    assert used.spills <= most and all(spilled_in(loop) <= in_loop for loop in loops_of(used.binary)), used


@compiles
@pytest.mark.parametrize("v_in_k", [True, False])
@pytest.mark.parametrize("rows", [16, 20, 128])
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 89, 100))])
def test_model_of_shared_memory_of_latent_attention(arch: int, rows: int, v_in_k: bool) -> None:
    for page_size in (0, 16):
        for config in latent_tiles(arch, rows, is_paged=page_size > 0, v_in_k=v_in_k):
            spec = spec_of("decode", arch=arch, config=config, page_size=page_size, v_in_k=v_in_k, **LATENT)
            used, model = shared_of(spec), shared_bytes(config, problem_of(spec))
            assert used <= model <= used + max(4 * KIB, 0.05 * used), (config, used, model)


@compiles
@pytest.mark.parametrize("kv_dtype", ["fp8e4nv", "fp8e5"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [4, 64])
def test_pages_of_eight_bits(rows: int, dtype: str, kv_dtype: str) -> None:
    """They are on their way as they are, and converted in registers."""
    config = decode_tiles(target_of(90), rows=rows, element_bytes=2, qk_dim=128, v_dim=128, is_paged=True, kv_bytes=1)[
        0
    ]
    more = {"leaves": BY_LENGTH, "page_size": 16, "dtype": dtype, "kv_dtype": kv_dtype, "scales": (2, 1)}
    spec = spec_of("decode", arch=90, dim=128, config=config, **more)  # type: ignore[arg-type]
    text, used = compile_and_measure(spec)
    assert re.search(KEYS, text) and used.shared >= 4 * 2 * 64 * 128
    assert used.spills <= SPILLS and not any(spilled_in(loop) for loop in loops_of(used.binary)), used


@compiles
@pytest.mark.parametrize("rows", [4, 20, 64])
@pytest.mark.parametrize(
    "dims", [(128, 128), *(pytest.param(d, marks=pytest.mark.slow) for d in ((64, 64), (256, 256), (576, 512)))]
)
@pytest.mark.parametrize("arch", [90, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (89, 100))])
def test_model_of_shared_memory_of_eight_bits(arch: int, dims: tuple[int, int], rows: int) -> None:
    sizes = {"element_bytes": 2, "qk_dim": dims[0], "v_dim": dims[1], "is_paged": True, "kv_bytes": 1}
    for config in decode_tiles(target_of(arch), rows=rows, **sizes):  # type: ignore[arg-type]
        more = {"page_size": 16, "kv_dtype": "fp8e4nv", "scales": (1, 2)}
        spec = spec_of("decode", arch=arch, dim=dims[0], v_dim=dims[1], config=config, **more)  # type: ignore[arg-type]
        used, model = shared_of(spec), shared_bytes(config, problem_of(spec))
        is_bounded = config.num_stages == 1 or arch == 100 and rows == 64 or dims == (64, 64)
        most = 1.85 * used if is_bounded else used + max(5 * KIB, 0.06 * used)
        assert used <= model <= most, (config, used, model)


@compiles
@pytest.mark.parametrize("arch", [80, 90])
def test_single_precision(arch: int) -> None:
    text, _ = compiled(arch, 64, 4, dtype="fp32")
    assert "mma" not in text, "products of float32 must not be rounded to TF32"


@compiles
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_merge(arch: int, dtype: str) -> None:
    spec = spec_of("decode", arch=arch, dim=128, dtype=dtype, config=tiles(arch, 128, 4, dtype)[0])
    merge = merge_spec(spec, torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert compile_and_measure(merge)[1].spills <= 16
    assert emit(merge).constexprs["V_PAD"] == 128


@compiles
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_of_shared_memory(arch: int, dim: int, rows: int) -> None:
    for config in tiles(arch, dim, rows):
        spec = spec_of("decode", arch=arch, dim=dim, config=config)
        used, model = shared_of(spec), shared_bytes(config, problem_of(spec))
        assert used <= model <= used + max(4 * KIB, 0.05 * used), (config, used, model)


@compiles
@pytest.mark.parametrize("leaf", ["document", "bias", "half bias", "kept table"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_model_of_captured_reads(arch: int, leaf: str) -> None:
    for rows in (4, 64):
        config = tiles(arch, 128, rows, leaf=leaf)[0]
        spec = spec_of("decode", arch=arch, dim=128, leaf=leaf, config=config)
        used, model = shared_of(spec), shared_bytes(config, problem_of(spec))
        tile = config.BLOCK_M * config.BLOCK_N
        bound = used + max(4 * KIB, 0.05 * used) + 4 * config.num_stages * tile
        assert used <= model <= bound, (config, used, model)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("arch", [*FAMILIES, 89, 120])
def test_every_target_and_leaf(arch: int, dim: int, rows: int, leaf: str) -> None:
    for config in tiles(arch, dim, rows, leaf=leaf):
        spec = spec_of("decode", arch=arch, dim=dim, leaf=leaf, config=config)
        assert shared_of(spec) <= shared_bytes(config, problem_of(spec)) <= target_of(arch).shared_bytes


# ---------------------------------------------------------------- numbers
def test_all_rows_of_a_key_head_lie_in_one_tile_where_they_fit() -> None:
    assert [tiles(90, 128, rows)[0].BLOCK_M for rows in (1, 16, 17, 64, 65, 700)] == [16, 16, 32, 64, 64, 64]
    assert all(c.BLOCK_M == 16 for c in tiles(90, 128, 64, "fp32"))


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_there_are_tiles_for_every_head_dim_and_target(arch: int) -> None:
    for dim in (4, 16, 64, 100, 128, 256, 512):
        for dtype in ("bf16", "fp32"):
            for rows in (1, 5, 64, 500):
                found = tiles(arch, dim, rows, dtype)
                assert 1 <= len(found) <= 3 and len(set(found)) == len(found)


def test_splits_fill_the_device_and_no_more() -> None:
    count = lambda groups, kept: split_count(groups=groups, kept=kept, tile=64, processors=132)
    for groups, kept in ((8, 131072), (16, 65536), (4, 32768), (1, 10**6), (3, 100000)):
        assert 0.9 * 132 <= groups * count(groups, kept) <= 132, (groups, kept, count(groups, kept))
    assert count(128, 8192) == count(512, 4096) == count(5000, 10**6) == 1
    assert count(8, 64) == 1, "one tile is not split"
    assert count(8, 2048) >= 8, "moderate rows are split where few key heads would leave processors idle"
    for groups in (1, 7, 40, 300):
        for kept in (1, 63, 65, 1000, 10**5):
            assert 1 <= count(groups, kept) <= max(1, -(-kept // 64))


def test_long_rows_of_pages_are_read_by_two_programs_a_processor() -> None:
    sizes = {"tile": 64, "processors": 132, "in_pairs": True}
    for groups, kept, wanted in ((8, 131072, 32), (128, 8192, 2), (16, 65536, 16), (8, 8192, 16), (512, 4096, 1)):
        assert split_count(groups=groups, kept=kept, **sizes) == wanted  # type: ignore[arg-type]


def test_longer_rows_and_fewer_heads_mean_no_fewer_splits() -> None:
    count = lambda groups, kept: split_count(groups=groups, kept=kept, tile=64, processors=132)
    assert count(8, 1024) <= count(8, 4096) <= count(8, 65536) + 3
    assert count(2, 65536) >= count(8, 65536) >= count(64, 65536) >= count(256, 65536)


def test_it_pays_for_few_queries_and_long_rows() -> None:
    sizes = {"q_len": 1, "kv_len": 8192, "group": 4, "programs": 64, "processors": 132}
    assert pays(**sizes) and pays(**{**sizes, "q_len": 16})
    assert not pays(**{**sizes, "q_len": 65}) and not pays(**{**sizes, "kv_len": 100})
    assert pays(**{**sizes, "q_len": 64, "group": 12}), "few heads leave processors idle"
    assert not pays(**{**sizes, "q_len": 64, "group": 12, "programs": 1000})
    assert pays(**{**sizes, "group": 128, "programs": 2048}, dim=576), "the forward kernel has small tiles there"


def test_masks_of_runs_have_a_formula_and_others_are_asked() -> None:
    limit = 7
    for mask, is_formula in (
        (lambda b, h, i, j: i >= j, True),
        (lambda b, h, i, j: (j < limit) | (i - j < 20), True),
        (lambda b, h, i, j: j < LENGTHS[b], True),
        (lambda b, h, i, j: LENGTHS[j] == LENGTHS[i], False),
        (lambda b, h, i, j: (i + j) % 2 == 0, False),
    ):
        program = trace(mask, "mask").program
        found = formula_of(program, (False,) * len(program.numbers))
        assert (found is not None) == is_formula
    program = trace(lambda b, h, i, j: j < limit, "mask").program
    assert formula_of(program, (True,)) is None, "sums with a wide number may wrap around"


def test_a_mask_without_a_formula_is_asked_where_its_conditions_keep_something() -> None:
    either = lambda b, h, i, j: (LENGTHS[j] == LENGTHS[i]) | (j < LENGTHS[b])
    for mask, kept in (
        (lambda b, h, i, j: (LENGTHS[j] == LENGTHS[i]) & (j < LENGTHS[b]), 1),
        (lambda b, h, i, j: ((i + j) % 2 == 0) & ((j < 7) | (i - j < 20)) & (j < LENGTHS[b]), 2),
        (lambda b, h, i, j: (i + j) % 2 == 0, None),
        (either, None),
    ):
        program = trace(mask, "mask").program
        hull = hull_of(program, (False,) * len(program.numbers))
        assert formula_of(program, (False,) * len(program.numbers)) is None
        assert (None if hull is None else (len(hull.kept), hull.dropped)) == (kept and (kept, ()))


def test_leaves_say_how_tiles_are_found() -> None:
    spec = spec_of("decode", arch=90, dim=64, leaves=WINDOW, config=tiles(90, 64, 1)[0])
    assert {"ZONES", "MASK_MOD"} <= set(emit(spec).leaves) and emit(spec).constexprs["KEPT"] == 1
    assert emit(spec).constexprs["BY_FORMULA"]
    # a document's keys are asked for where causality keeps some
    for leaf, zones in (("document", 1), ("kept table", 0)):
        asked = emit(spec_of("decode", arch=90, dim=64, leaf=leaf, config=tiles(90, 64, 1)[0]))
        assert ("ZONES" in asked.leaves) == (zones > 0) and asked.constexprs["KEPT"] == zones
        assert not asked.constexprs["BY_FORMULA"]
    assert not any(replace(spec, target=target_of(100)).described), "loaded by pointers"
