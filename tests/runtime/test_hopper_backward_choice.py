"""When the fused backward for Hopper is taken, and what its launches are given: on a device that only says it is one."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn import BlockMask, create_block_mask, explain, mods
from flexattn.codegen.spec import fresh_layout
from flexattn.codegen.target import target_of
from flexattn.runtime import choose, launch
from flexattn.runtime import compile as compiling
from flexattn.runtime.attention import prepare

explain_module = importlib.import_module("flexattn.runtime.explain")
ALL = (True, True, True, ())
CAUSAL = lambda b, h, i, j: i >= j


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.devices, "target_for", lambda device: target_of(90))
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", True)


def _inputs(dim: int = 128, dtype: torch.dtype = torch.bfloat16, length: int = 300) -> tuple[torch.Tensor, ...]:
    q = torch.zeros(2, 6, length, dim, dtype=dtype, requires_grad=True)
    return q, *(torch.zeros(1, 3, 500, dim, dtype=dtype, requires_grad=True) for _ in range(2))


def _is_taken(qkv: tuple[torch.Tensor, ...], needs: Any = ALL, options: dict[str, Any] | None = None) -> bool:
    problem, plan = prepare(qkv, None, (None, CAUSAL), options=options, enable_gqa=True)
    kernels, _ = choose.backward_kernels(problem, plan, fresh_layout(qkv[0].dtype, qkv[0].shape[3]), needs)
    return kernels == ("hopper_backward",)


def test_it_serves_half_types_of_head_dims_up_to_128() -> None:
    assert _is_taken(_inputs()) and _is_taken(_inputs(dtype=torch.float16)) and _is_taken(_inputs(dim=64))
    assert _is_taken(_inputs(dim=96))
    assert not _is_taken(_inputs(dim=256)) and not _is_taken(_inputs(dtype=torch.float32))
    assert not _is_taken(_inputs(length=20))


@pytest.mark.parametrize("needs", [(False, True, True, ()), (True, True, False, ()), (True, False, False, ())])
def test_two_kernels_serve_where_not_all_gradients_are_needed(needs: Any) -> None:
    problem, plan = prepare(_inputs(), None, (None, CAUSAL), options=None, enable_gqa=True)
    kernels, why = choose.backward_kernels(problem, plan, fresh_layout(torch.bfloat16, 128), needs)
    assert kernels == choose.APART and "not all are needed" in why


def test_it_serves_where_all_three_gradients_are_needed() -> None:
    assert not _is_taken(_inputs(), (False, True, True, ())) and not _is_taken(_inputs(), (True, True, False, ()))
    assert _is_taken(_inputs(), (True, True, True, (True,)))


def test_not_where_additions_must_have_an_order_or_tiles_are_given() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert not _is_taken(_inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    assert not _is_taken(_inputs(), options={"bwd_BLOCK_M1": 64})
    assert not _is_taken(_inputs(), options={"deterministic": True}) and _is_taken(
        _inputs(), options={"deterministic": False}
    )


def test_tiles_of_narrow_heads_leave_room_for_leaves() -> None:
    ids, table = torch.zeros(500, dtype=torch.int32), torch.zeros(500, 500)
    same, bias = lambda b, h, i, j: ids[i] == ids[j], lambda s, b, h, i, j: s + table[i, j]
    for mask, score, rows in (
        (CAUSAL, None, 128),
        (same, None, 64),
        (CAUSAL, mods.softcap(30.0), 64),
        (None, bias, 64),
        (lambda b, h, i, j: (i - j) // 4 != -1, None, 64),
    ):
        problem, plan = prepare(_inputs(64), score, (None, mask), enable_gqa=True)
        assert choose.legal_tiles(problem, plan, "hopper_backward")[0].BLOCK_M == rows


@pytest.mark.parametrize(
    "qkv, needs, options, words",
    [
        (_inputs(), ALL, {"warp_specialized": False}, "given by kernel_options"),
        (_inputs(), ALL, {"bwd_BLOCK_M2": 64}, "fixes tiles"),
        (_inputs(dim=32), ALL, {}, "head dimensions from 33"),
        (_inputs(dim=256), ALL, {"warp_specialized": False}, "given by kernel_options"),
        (tuple(x[..., 1:] for x in _inputs(dim=193)), ALL, {}, "aligned to 16 bytes"),
        (_inputs(length=32), ALL, {}, "more than 32 queries"),
        (_inputs(dtype=torch.float32), ALL, {}, "bfloat16 and float16"),
        (tuple(x[..., 1:] for x in _inputs(dim=65)), ALL, {}, "aligned to 16 bytes"),
    ],
)
def test_why_not_is_said(qkv: tuple[torch.Tensor, ...], needs: Any, options: dict[str, Any], words: str) -> None:
    problem, plan = prepare(qkv, None, (None, CAUSAL), options=options, enable_gqa=True)
    for _ in range(2):  # the second time from memory
        kernels, why = choose.backward_kernels(problem, plan, fresh_layout(qkv[0].dtype, qkv[0].shape[3]), needs)
        assert kernels == ("dq", "dkdv") and words in why


def test_what_depends_on_the_run_or_the_device_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        problem, plan = prepare(_inputs(), None, (None, CAUSAL), options=None, enable_gqa=True)
        plan.memo.clear()
        return choose.likely_backward_kernels(problem, plan)[1]

    assert reason() == "this is Hopper"
    torch.use_deterministic_algorithms(True)
    try:
        assert "no fixed order" in reason()
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", False)
    assert "switched off" in reason()
    monkeypatch.setattr(choose.devices, "target_for", lambda device: target_of(100))
    assert "this is sm_100" in reason()


@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (128, 256), (64, 128)])
@pytest.mark.parametrize("needs", [ALL, (True, False, False, ()), (False, True, True, ())])
def test_two_kernels_serve_wider_heads_and_those_that_differ(dims: tuple[int, int], needs: Any) -> None:
    q, k = (torch.zeros(2, 3, n, dims[0], dtype=torch.bfloat16, requires_grad=True) for n in (300, 500))
    v = torch.zeros(2, 3, 500, dims[1], dtype=torch.bfloat16, requires_grad=True)
    problem, plan = prepare((q, k, v), None, (None, CAUSAL), options=None)
    d_out = fresh_layout(torch.bfloat16, dims[1])
    kernels, why = choose.backward_kernels(problem, plan, d_out, needs)
    assert kernels == choose.APART and why.startswith("this is Hopper; two kernels, not one: ")
    torch.use_deterministic_algorithms(True)
    try:
        assert choose.backward_kernels(problem, plan, d_out, needs)[0] == choose.APART
    finally:
        torch.use_deterministic_algorithms(False)
    choose.forget_hopper_backward(problem, plan, d_out, choose.APART)
    kernels, why = choose.backward_kernels(problem, plan, d_out, needs)
    assert kernels == choose.PORTABLE and "could be built" in why
    plan.memo.clear()


def test_list_masks_keep_their_blocks() -> None:
    mask = create_block_mask(CAUSAL, None, None, 320, 320, device="cpu", BLOCK_SIZE=32)
    lists = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=CAUSAL, BLOCK_SIZE=32)
    qkv = tuple(torch.zeros(1, 1, 320, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    kernels, why = choose.likely_backward_kernels(*prepare(qkv, None, (lists, None), options=None))
    assert kernels == ("dq", "dkdv") and "do not divide the block mask's BLOCK_SIZE: 128x128, 128x64" in why


def test_what_could_not_be_built_is_not_tried_again() -> None:
    problem, plan = prepare(_inputs(), None, (None, CAUSAL), options=None, enable_gqa=True)
    d_out = fresh_layout(torch.bfloat16, 128)
    assert choose.backward_kernels(problem, plan, d_out, ALL)[0] == ("hopper_backward",)
    for tried, left in ((choose.FUSED, choose.APART), (choose.APART, choose.PORTABLE)):
        choose.forget_hopper_backward(problem, plan, d_out, tried)
        kernels, why = choose.backward_kernels(problem, plan, d_out, ALL)
        assert kernels == left and "could be built" in why
    plan.memo.clear()


def test_explain_says_which_kernels_and_why() -> None:
    q, k, v = (torch.zeros(1, 2, 64, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    assert "backward: the kernel for Hopper: it serves this call" in explain(q, k, v)
    assert "backward: the kernel for Hopper: it serves this call" in explain(q, k.detach(), v)
    assert "backward:" not in explain(q.detach(), k.detach(), v.detach())
    wide = torch.zeros(1, 2, 64, 256, dtype=torch.float16, requires_grad=True)
    assert "backward: the kernel for Hopper: it serves this call" in explain(wide, wide, wide)
    small = torch.zeros(1, 2, 64, 32, dtype=torch.float16, requires_grad=True)
    assert "backward: not the kernel for Hopper: it takes" in explain(small, small, small)
    table = torch.zeros(64, 64, requires_grad=True)
    problem, plan = prepare((q, k, v), lambda s, b, h, i, j: s + table[i, j], (None, None), options=None)
    lines = list(explain_module._backward_tiles(problem, dataclasses.replace(plan, backend="triton", memo={})))
    assert lines[0] == "  backward: the kernel for Hopper: this is Hopper"
    assert "hopper_backward: tiles 64 x 128, 2 warpgroups, a copying warp, 2 buffers" in lines[1]
    assert lines[2].startswith("  dq: tiles ") and len(lines) == 3


def _started(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What kernels are started with from now on; in place of compiled ones."""
    pytest.importorskip("triton.experimental.gluon")
    started: dict[str, dict[str, Any]] = {}

    def build(source: Any, translated: Callable[[], None] | None = None) -> Any:
        names = compiling.jit_function(source).arg_names

        def run(*given: Any) -> None:
            values = dict(zip(names, given[-len(names) :]))
            started[source.spec.kernel] = {**values, "programs": given[0]}
            assert [n for n in source.signature if n in names and values[n] is None] == []

        ready = {"n_spills": 0, "function": 0, "packed_metadata": None, "run": run}
        return SimpleNamespace(**ready, _init_handles=lambda: None, launch_metadata=lambda *given: None)

    monkeypatch.setattr(compiling, "found_or_built", lambda *of: (build(*of), False))
    compiling.clear()
    return started


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile")
@pytest.mark.parametrize("dim, tile", [(128, 64), (96, 64), (64, 128)])
def test_launches_have_every_argument(dim: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = _started(monkeypatch)
    q, k, v = _inputs(dim)
    table = torch.zeros(6, requires_grad=True)
    problem, plan = prepare((q, k, v), lambda s, b, h, i, j: s + table[h], (None, CAUSAL), enable_gqa=True)
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:3])
    dq, dk, dv, sums = launch.backward(problem, plan, out, lse, torch.zeros_like(q), None, (True, True, True, (True,)))
    compiling.clear()
    assert [x.shape for x in sums if x is not None] == [table.shape]
    assert dq is not None and dk is not None and dv is not None
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape
    assert started.keys() == {"delta", "hopper_backward", "hopper_dq", "dq"}
    given, rows = started["hopper_backward"], 2 * 6 * 384  # 300 queries as whole tiles of 128
    assert given["programs"] == 3 * 4 and given["repeats"] == 4 and given["q_tiles"] == 384 // tile
    assert given["STATS"].shape == [2, rows] and given["STATS"].block_shape == [1, tile]
    pad = 64 if dim == 64 else 128
    assert given["DQ_SUMS"] == started["hopper_dq"]["DQ_SUMS"]
    assert given["DK"].base is dk and given["DV"].base is dv and given["DK"].block_shape == [1, 1, 64, pad]
    assert started["dq"]["row_step"] == 384  # the table's gradient, over the same statistics
    assert started["delta"]["row_step"] == 384 and started["delta"]["lines"] * launch.delta_config(pad).BLOCK_M == 384
    assert started["hopper_dq"]["programs"] == rows // tile


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile")
@pytest.mark.parametrize("kv_heads, programs", [(3, 12), (64, 132)])
def test_documents_have_as_many_programs_as_run_at_once(
    kv_heads: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = _started(monkeypatch)
    q, k, v = (torch.zeros(1, kv_heads, 500, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    ids = torch.zeros(500, dtype=torch.int32)
    problem, plan = prepare((q, k, v), None, (None, lambda b, h, i, j: ids[i] == ids[j]))
    plan.memo.clear()
    launch.backward(problem, plan, torch.zeros_like(q), torch.zeros(q.shape[:3]), torch.zeros_like(q), None, ALL)
    compiling.clear()
    plan.memo.clear()
    given = started["hopper_backward"]
    assert given["programs"] == programs and given["pairs"] * given["lines"] == 4 * kv_heads
    assert given["COUNTER"] == choose.devices.counter_of(q.device).data_ptr()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile")
@pytest.mark.parametrize(
    "needs", [(True, True, True, (True,)), (True, False, False, (False,)), (False, False, True, (False,))]
)
@pytest.mark.parametrize("dims, pads, keys", [((192, 128), (256, 128), 64), ((96, 96), (128, 128), 128)])
def test_launches_of_the_two_kernels_have_every_argument(
    dims: tuple[int, int], pads: tuple[int, int], keys: int, needs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_FUSED_BACKWARD", False)
    started = _started(monkeypatch)
    q, k = (
        torch.zeros(2, heads, n, dims[0], dtype=torch.bfloat16, requires_grad=True) for heads, n in ((6, 300), (3, 500))
    )
    v = torch.zeros(2, 3, 500, dims[1], dtype=torch.bfloat16, requires_grad=True)
    table = torch.zeros(6, requires_grad=needs[3][0])
    problem, plan = prepare((q, k, v), lambda s, b, h, i, j: s + table[h], (None, CAUSAL), enable_gqa=True)
    plan.memo.clear()
    out, lse = torch.zeros(2, 6, 300, dims[1], dtype=torch.bfloat16), torch.zeros(q.shape[:3])
    *grads, sums = launch.backward(problem, plan, out, lse, torch.zeros_like(out), None, needs)
    compiling.clear()
    plan.memo.clear()
    assert [g is not None for g in grads] == list(needs[:3]) and (sums[0] is not None) == needs[3][0]
    assert started.keys() - {"delta"} == {
        *(["hopper_query_gradient"] if needs[0] else []),
        *(["hopper_key_gradients"] if needs[1] or needs[2] else []),
        *(["dq"] if needs[3][0] else []),
    }
    if needs[0]:
        given = started["hopper_query_gradient"]
        assert given["programs"] == 2 * 6 * 3 and given["row_step"] == 384 and given["DQ"].base is grads[0]
        assert given["Q"].block_shape == given["DQ"].block_shape == [1, 1, 64, pads[0]]
        assert given["V"].block_shape == [1, 1, keys, pads[1]]
    if needs[2]:
        given = started["hopper_key_gradients"]
        assert given["programs"] == 2 * 3 * -(-500 // keys) and given["repeats"] == 2 and given["q_tiles"] == 384 // 64
        assert given["DV"].base is grads[2] and given["STATS"].shape == [2, 2 * 6 * 384]


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("is_captured", [False, True])
def test_tables_of_all_that_backward_may_run_are_made_before(dim: int, is_captured: bool) -> None:
    """Gradients of some inputs alone, deterministic ones, and those of captured tensors find theirs."""
    table = torch.zeros(6, requires_grad=is_captured)
    problem, plan = prepare(_inputs(dim), lambda s, b, h, i, j: s + table[h], (None, CAUSAL), enable_gqa=True)
    likely, _ = choose.likely_backward_kernels(problem, plan)
    assert likely == (choose.APART if dim == 256 else choose.FUSED)
    possible = choose.possible_backward_kernels(problem, plan)
    assert set(possible) == {*likely, *choose.APART, *(["dq"] if is_captured else [])}
    problem, plan = prepare(_inputs(32), None, (None, CAUSAL), enable_gqa=True)
    assert choose.possible_backward_kernels(problem, plan) == choose.PORTABLE
