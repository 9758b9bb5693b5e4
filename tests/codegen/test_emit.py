"""The text of kernels: canonical leaves, typed arguments, index arithmetic in 32 bits where it is proved, legal tiles."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexattn.codegen.emit import emit
from flexattn.codegen.leaves import leaf_functions
from flexattn.codegen.spec import (
    CaptureLayout,
    KernelSpec,
    TensorLayout,
    capture_layout,
    tensor_layout,
    wide_number,
)
from flexattn.codegen.target import INTERPRETER, target_of
from flexattn.codegen.tile_config import TileConfig, candidates, padded, tile_dims
from flexattn.errors import DTypeError, OptionError, UnsupportedError
from flexattn.frontend.trace import trace
from flexattn.runtime.options import parse_options

LAYOUT = TensorLayout("bf16", True, False)


def spec_with(score: Any = None, mask: Any = None, kernel: str = "forward", **fields: Any) -> KernelSpec:
    traced = [trace(fn, kind) if fn else None for fn, kind in ((score, "score"), (mask, "mask"))]
    bound = [t for t in traced if t is not None]
    base = KernelSpec(
        kernel=kernel, target=target_of(90), config=TileConfig(128, 64, 8, 3), qk_dim=64, v_dim=64, layouts=(LAYOUT,) * 4,
        score=traced[0].program if traced[0] else None, mask=traced[1].program if traced[1] else None,
        captures=tuple(capture_layout(c) for t in bound for c in t.binding.captures),
        wide_numbers=tuple(wide_number(n) for t in bound for n in t.binding.numbers), fold_scale=score is None,
    )  # fmt: skip
    return replace(base, **fields)


def body(function: str) -> str:
    return function.split(":\n", 1)[1].strip()


def mask_text(mask: Any, **fields: Any) -> str:
    return body(leaf_functions(spec_with(mask=mask, **fields))["MASK_MOD"])


def score_text(score: Any, **fields: Any) -> str:
    return body(leaf_functions(spec_with(score=score, **fields))["SCORE_MOD"])


def test_same_structure_is_the_same_text_whatever_the_names_and_values() -> None:
    def first(width: int) -> Any:
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width)

    def second(zebra: int) -> Any:
        def my_mask(bb: Any, hh: Any, i: Any, j: Any) -> Any:
            near = i - j < zebra
            return (i >= j) & near

        return my_mask

    a, b = emit(spec_with(mask=first(5))), emit(spec_with(mask=second(77)))
    assert a.leaf_text == b.leaf_text and a.leaf_hash == b.leaf_hash and a.spec == b.spec
    assert "zebra" not in a.leaf_text and "77" not in a.leaf_text


def test_leaf_text_of_a_window() -> None:
    width = 9
    text = mask_text(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width))
    assert text == "return (kv_idx <= q_idx) & ((q_idx - kv_idx) < caps[0])"


def test_32_bits_only_where_proved() -> None:
    assert ".to(tl.int64)" not in mask_text(lambda b, h, i, j: i - j + 100 < 2000)
    assert ".to(tl.int64)" in mask_text(lambda b, h, i, j: i * j < 2000)
    assert ".to(tl.int64)" in mask_text(lambda b, h, i, j: i - j + 100 < 2000, wide_lengths=True)
    far = 2**31
    assert spec_with(mask=lambda b, h, i, j: i - j < far).wide_numbers == (True,)
    assert ".to(tl.int64)" in mask_text(lambda b, h, i, j: i - j < far)


def test_division_by_a_positive_constant_is_short_and_floors() -> None:
    assert mask_text(lambda b, h, i, j: i // 4 == j % 8) == "return (q_idx // 4) == (kv_idx % 8)"
    assert "floor_div_by(q_idx - kv_idx, 4)" in mask_text(lambda b, h, i, j: (i - j) // 4 == 0)
    size = 3
    assert "leaf_ops.floor_mod(q_idx, caps[0])" in mask_text(lambda b, h, i, j: i % size == 0)


def test_reads_are_guarded_and_negative_indices_wrap() -> None:
    table = torch.zeros(5, 7)
    functions = leaf_functions(spec_with(score=lambda s, b, h, i, j: s + table[h, i - j]))
    assert body(functions["SCORE_MOD"]) == "return score + caps[5]"  # behind the table's pointer, sizes and strides
    text = functions["READS"]
    assert "leaf_ops.wrap(q_idx - kv_idx, caps[2])" in text
    assert 'mask=(h < caps[1]) & leaf_ops.inside(t0, caps[2]), other=float("nan")' in text
    flags = torch.zeros(5, dtype=torch.bool)
    text = mask_text(lambda b, h, i, j: flags[j])
    assert "mask=(kv_idx < caps[1]), other=0) != 0" in text


def test_tiles_are_read_before_the_product_only_where_it_is_what_rows_are_reduced_in() -> None:
    table, ids = torch.zeros(5, 7), torch.zeros(5)
    both = lambda b, h, i, j: (table[i, j] > 0) & (ids[j] > 0)
    text = leaf_functions(spec_with(mask=both))
    assert "caps[3] + kv_idx * caps[4]" in text["READS"]
    assert text["READS"].count("tl.load") == 1 and text["MASK_MOD"].count("tl.load") == 1
    assert "READS" not in leaf_functions(spec_with(mask=both, kernel="dkdv"))
    assert "READS" not in leaf_functions(spec_with(mask=lambda b, h, i, j: ids[j] > ids[i]))
    assert "READS" not in leaf_functions(spec_with(score=lambda s, b, h, i, j: s + table[(s > 0).long(), j]))


def test_a_last_stride_of_1_is_not_multiplied_with() -> None:
    table = torch.zeros(6, 8)
    score = lambda s, b, h, i, j: s + table[h, j]
    assert "tl.load(caps[0] + (h * caps[3] + kv_idx), " in score_text(score)
    table = table.t()
    assert "tl.load(caps[0] + (h * caps[3] + kv_idx * caps[4]), " in score_text(score)
    row = torch.zeros(8)
    assert "tl.load(caps[0] + kv_idx, " in score_text(lambda s, b, h, i, j: s + row[j])


@pytest.mark.parametrize("kernel", ["hopper_forward", "hopper_backward"])
def test_one_expression_reads_the_tensor_of_its_own_function(kernel: str) -> None:
    added, kept = torch.zeros(8), torch.zeros(8)
    texts = leaf_functions(spec_with(lambda s, b, h, i, j: s + added[b], lambda b, h, i, j: kept[b] > 0, kernel))
    assert "k0 = t0" in texts["KNOWN"] and "k1 = t0" in texts["KNOWN"] and "return (k0, k1,)" in texts["KNOWN"]
    assert "known[0]" in texts["SCORE_MOD"] and "known[1]" in texts["MASK_MOD"]
    assert "known[1]" not in texts["SCORE_MOD"] and "known[0]" not in texts["MASK_MOD"]


def test_what_is_the_same_for_all_queries_is_read_once_a_tile_of_keys() -> None:
    ids, table = torch.zeros(8, dtype=torch.int32), torch.zeros(6, 8)
    same = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    texts = leaf_functions(spec_with(lambda s, b, h, i, j: s + table[h, j], same, "hopper_forward"))
    assert [line.strip() for line in texts["SEEN"].splitlines() if "read_run" in line] == [
        't0 = leaf_ops.read_run(caps[0] + h * caps[3], first, columns, caps[2], (h < caps[1]), float("nan"))',
        "t0 = leaf_ops.read_run(caps[5], first, columns, caps[6], True, 0)",
    ]
    assert "seen[0]" in texts["SCORE_MOD"] and body(texts["MASK_MOD"]) == "return known[0] == seen[1]"
    wide = leaf_functions(spec_with(mask=same, kernel="hopper_forward", config=TileConfig(192, 128, 4, 2)))
    assert "SEEN" not in wide and "read_run" not in wide["MASK_MOD"]  # three warpgroups have no registers for it
    ids = torch.zeros(16, dtype=torch.int32)[::2]
    texts = leaf_functions(spec_with(mask=same, kernel="hopper_forward"))
    assert "SEEN" not in texts and "tl.load(caps[0] + (kv_idx * caps[2]), " in texts["MASK_MOD"]
    for other in (lambda b, h, i, j: ids[i] > 0, lambda b, h, i, j: ids[i - j] > 0):
        assert "SEEN" not in leaf_functions(spec_with(mask=other, kernel="hopper_forward"))


def test_shared_nodes_have_one_name() -> None:
    text = score_text(lambda s, b, h, i, j: torch.exp(s) / (1.0 + torch.exp(s)))
    assert text.count("tl.exp(score)") == 1


def test_tanh_by_data_type() -> None:
    score = lambda s, b, h, i, j: torch.tanh(s)
    forms = {"bf16": "leaf_ops.tanh(score)", "fp16": "leaf_ops.tanh_exp2(score)", "fp32": "leaf_ops.tanh_exact(score)"}
    for dtype, form in forms.items():
        assert form in score_text(score, layouts=(TensorLayout(dtype, True, False),) * 4)
    assert "leaf_ops.tanh_exact(score)" in score_text(score, target=INTERPRETER)


def test_a_score_that_ignores_the_score_is_spread_over_the_tile() -> None:
    assert score_text(lambda s, b, h, i, j: j * 0.5).startswith("return leaf_ops.spread(")
    assert score_text(lambda s, b, h, i, j: 1.5) == "return leaf_ops.spread(tl.full([], 1.5, tl.float32), score)"


def test_captured_gradients_are_summed_over_the_axes_the_read_does_not_depend_on() -> None:
    row, cell, one = (torch.zeros(n, requires_grad=True) for n in ((9,), (9, 9), ()))
    score = lambda s, b, h, i, j: s * one + row[i] + cell[i, j]
    spec = spec_with(score=score, kernel="dq", capture_grads=(0, 1, 2))
    text = leaf_functions(spec)["CAPTURE_GRAD"]
    sums = [line.strip() for line in text.splitlines() if "leaf_ops.total" in line]
    assert [line.split("= ")[1] for line in sums] == [
        "leaf_ops.total(g0, 0)",
        "leaf_ops.total(g0, 1)",
        "leaf_ops.total(g1, 1)",
    ]
    assert text.count("tl.atomic_add") == 3


def test_argument_types_follow_from_facts_only() -> None:
    table, width = torch.zeros(5, 7), 9
    spec = spec_with(score=lambda s, b, h, i, j: s + table[i, j] * 0.5, mask=lambda b, h, i, j: i - j < width)
    source = emit(spec)
    assert source.signature["caps"] == ("*fp32", "i32", "i32", "i32", "i32", "i32")
    assert source.signature["q_strides"] == ("i64", "i64", "i32", "i32") and source.signature["kv_len"] == "i32"
    assert source.signature["K"] == "tensordesc<bf16[1, 1, 64, 64]>" and ("q_strides", 2, 8) in source.aligned
    expanded = emit(replace(spec, layouts=(LAYOUT._replace(is_expanded=True),) * 4))
    assert expanded.signature["K"] == "*bf16" and ("K", None, 16) in expanded.aligned
    assert not any(name in ("kv_len", "caps", "LSE") for name, _, _ in source.aligned)
    wide = emit(replace(spec, captures=(CaptureLayout("fp32", 2, True),), wide_numbers=(True,)))
    assert wide.signature["caps"] == ("*fp32", "i64", "i64", "i64", "i64", "i64")
    loose = replace(spec, layouts=(TensorLayout("bf16", False, True),) * 4)
    assert emit(loose).signature["k_strides"] == ("i64", "i64", "i64", "i64")
    assert {name for name, _, _ in emit(loose).aligned} == {"OUT", "out_strides"}
    assert emit(spec_with()).signature["caps"] == ("i32",)


def test_readable_text_is_one_file_that_parses() -> None:
    text = emit(
        spec_with(score=lambda s, b, h, i, j: torch.tanh(s), mask=lambda b, h, i, j: i >= j, kernel="dkdv")
    ).readable()
    ast.parse(text)
    assert "score = tanh(score)" in text and "def attention_backward_dkdv" in text and "def score_grad" in text


def test_layout_facts() -> None:
    x = torch.zeros(2, 3, 40, 64, dtype=torch.bfloat16)
    assert tensor_layout(x) == TensorLayout("bf16", True, False)
    assert tensor_layout(x[..., 1:33]) == TensorLayout("bf16", False, False)
    assert tensor_layout(x[:, :, :, :46]).is_aligned
    assert not tensor_layout(torch.zeros(1, 1, 3, 46, dtype=torch.bfloat16)).is_aligned
    assert tensor_layout(x.mT) == tensor_layout(x.mT.contiguous())  # what a launch copies
    huge = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, 1, 300, 64)
    assert not tensor_layout(huge).is_wide
    assert tensor_layout(torch.empty(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (1, 1, 1 << 25, 1))).is_wide
    assert capture_layout(torch.zeros(1).as_strided((2,), (0,))).is_wide is False
    table = torch.zeros(6, 8)
    of_one = table[:, :1].as_strided((6, 1), (8, 5))
    assert all(capture_layout(t).is_unit for t in (table, table[::2], of_one, table[:, :0], table[0, 0]))
    assert not any(capture_layout(t).is_unit for t in (table.t(), table[:, ::2], table[:, :1].expand(6, 8)))
    with pytest.raises(UnsupportedError, match="bfloat16, float16 and float32"):
        tensor_layout(torch.zeros(1, 1, 1, 1, dtype=torch.float64))
    with pytest.raises(DTypeError, match="captured"):
        capture_layout(torch.zeros(1, dtype=torch.complex64))
    assert [padded(d) for d in (1, 16, 17, 64, 65, 512)] == [16, 16, 32, 64, 128, 512]


def test_hopper_tiles_of_keys_and_values_have_one_swizzle():
    """A narrow value tile that shares a buffer with a wider key tile is miscompiled there (ptxas 12.8)."""
    expected_pads = {
        (17, 4): (32, 32),
        (64, 8): (64, 64),
        (8, 256): (64, 256),
        (256, 16): (256, 64),
        (128, 64): (128, 64),
    }
    for (qk_dim, v_dim), expected in expected_pads.items():
        assert tile_dims(qk_dim, v_dim, target_of(90)) == expected
        assert tile_dims(qk_dim, v_dim, target_of(80)) == (padded(qk_dim), padded(v_dim))


def test_a_caller_s_tiles_are_honoured_or_refused() -> None:
    def tiles(kernel: str, **options: Any) -> tuple[TileConfig, ...]:
        parsed = parse_options(options)
        side = parsed.forward if kernel == "forward" else parsed.backward
        return candidates(kernel, target_of(89), element_bytes=2, qk_dim=64, v_dim=64, q_len=500, options=side)

    assert tiles("forward", BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2) == (TileConfig(64, 32, 4, 2),)
    assert tiles("dkdv", BLOCK_M1=32, BLOCK_N1=64)[0].BLOCK_N == 64
    assert tiles("dq", BLOCK_M2=32)[0].BLOCK_M == 32
    assert tiles("dq", BLOCK_M1=32) == tiles("dq")
    assert len(tiles("forward")) == 3
    refused = {
        "power of two": {"BLOCK_M": 512},
        "num_stages": {"num_stages": 9},
        "shared memory": {"BLOCK_M": 256, "BLOCK_N": 256},
    }
    for rule, wrong in refused.items():
        with pytest.raises(OptionError, match=rule):
            tiles("forward", **wrong)


def test_half_inputs_divide_by_a_number_once_a_program() -> None:
    """The reciprocal does not depend on the tile, so the compiler moves it out of the loop; float32 divides exactly."""
    cap = 30.0
    score = lambda s, b, h, q_idx, kv_idx: torch.tanh(s / cap) + s / (q_idx + 1)
    assert "score * (1.0 / caps[0])" in score_text(score)
    assert "score / caps[0]" in score_text(score, layouts=(TensorLayout("fp32", True, False),) * 4)
