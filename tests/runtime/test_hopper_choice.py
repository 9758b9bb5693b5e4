"""When the forward kernel for Hopper is taken, and what it is given: on a device that only says it is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn import BlockMask, create_block_mask, explain, mods
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.errors import CompileError, OptionError
from flexattn.runtime import choose, launch
from flexattn.runtime import compile as compiling
from flexattn.runtime.attention import AuxRequest, prepare
from flexattn.runtime.decode import decode_choice
from flexattn.runtime.settings import FlexPerformanceWarning
from tests.paged import make_paged, query_of

ASKED = {"warp_specialized": True}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.devices, "target_for", lambda device: target_of(90))


def _inputs(dim: int = 64, length: int = 300, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(2, 4, length, dim, dtype=dtype) for _ in range(3))


def _chosen(
    qkv: tuple[torch.Tensor, ...], options: dict[str, Any] | None = None, mask: Any = None, score: Any = None
) -> tuple[str, str]:
    return choose.forward_kernel(*prepare(qkv, score, (mask, None), options=options))


def test_it_is_the_default_and_can_be_forbidden() -> None:
    assert _chosen(_inputs()) == ("hopper_forward", "this is Hopper")
    assert _chosen(_inputs(), ASKED) == ("hopper_forward", "given by kernel_options")
    assert _chosen(_inputs(), {"warp_specialized": False}) == ("forward", "given by kernel_options")


@pytest.mark.parametrize(
    "qkv, options, words",
    [
        (_inputs(dtype=torch.float32), {}, "products are of"),
        (_inputs(dim=32), {}, "head dimensions"),
        (_inputs(length=20), {}, "more than 32 queries"),
        (_inputs(), {"BLOCK_M": 64}, "fixes tiles"),
        (tuple(x[..., 1:] for x in _inputs(dim=65)), {}, "aligned"),
    ],
)
def test_what_it_cannot_serve_is_said(qkv: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        _chosen(qkv, {**options, **ASKED})
    kernel, why = _chosen(qkv, options)
    assert kernel == "forward" and words in why


def test_list_masks_keep_their_blocks() -> None:
    """Tiles of 192 queries divide no block of 128, and none divides one of 32."""
    for block, words in ((128, ""), (32, "do not divide")):
        mask = create_block_mask(mods.causal(), None, None, 384, 384, device="cpu", BLOCK_SIZE=block)
        lists = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, mask_mod=mods.causal(), BLOCK_SIZE=block)
        problem, plan = prepare(_inputs(length=384), None, (lists, None), options=ASKED)
        if words:
            with pytest.raises(OptionError, match=words):
                choose.forward_kernel(problem, plan)
        else:
            assert choose.forward_kernel(problem, plan)[0] == "hopper_forward"
            assert choose.legal_tiles(problem, plan, "hopper_forward") == (
                TileConfig(128, 128, 4, 2),
                TileConfig(128, 64, 4, 2),
            )


def test_other_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose.devices, "target_for", lambda device: target_of(100))
    with pytest.raises(OptionError, match="sm_100"):
        _chosen(_inputs(dim=72), ASKED)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """How kernels are started: each compiled one is replaced by one that notes it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter's functions do not compile")
    pytest.importorskip("triton.experimental.gluon")
    starts: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(
        n_spills=0,
        function=0,
        packed_metadata=None,
        run=lambda *given: starts.append(given),
        _init_handles=lambda: None,
        launch_metadata=lambda *given: None,
    )
    monkeypatch.setattr(compiling, "found_or_built", lambda source, translated=None: (fake, False))
    compiling.clear()
    yield starts
    compiling.clear()


@pytest.mark.parametrize("want_max", [False, True])
def test_a_launch_has_every_argument(want_max: bool, started: list[tuple[Any, ...]]) -> None:
    q, k, v = torch.zeros(2, 6, 300, 96, dtype=torch.bfloat16), *torch.zeros(2, 1, 3, 500, 96, dtype=torch.bfloat16)
    slopes = torch.ones(6)
    score = lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)
    aux = AuxRequest(lse=True, max_scores=want_max)
    problem, plan = prepare((q, k, v), score, (None, None), options=ASKED, enable_gqa=True, aux=aux)
    out, lse, peaks = launch.forward(problem, plan)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and (peaks is not None) == want_max
    (given,) = started
    kernel = choose.choose(problem, plan, "hopper_forward", lambda chosen: None, want_max=want_max)
    names = compiling.jit_function(kernel.kernel.source).arg_names  # type: ignore[union-attr]
    values = dict(zip(names, given[-len(names) :]))
    assert given[0] == 2 * 6 * 3  # 300 queries are three tiles of 128
    assert values["Q"].block_shape == [1, 1, 128, 128] and values["Q"].base is problem.q
    assert values["OUT"] == out.data_ptr() and values["out_strides"] == out.stride()
    assert values["K"].shape == [1, 3, 500, 96] and values["k_strides"][0] == 0 and values["group"] == 2
    missing = [n for n, kind in kernel.kernel.source.signature.items() if values[n] is None]
    assert missing == []


@pytest.mark.parametrize(
    "mask, score, length, rows",
    [
        (None, None, 16384, 192),
        (mods.causal(), None, 16384, 192),
        (mods.prefix_lm(100), mods.softcap(30.0), 16384, 192),
        (mods.causal(), None, 4096, 128),
        (mods.sliding_window(1024), None, 16384, 128),
        (mods.causal(), lambda s, b, h, i, j: s + (j - i) * 0.1, 16384, 128),
        (lambda b, h, i, j: (j < 4) | ((i - j < 64) & (j <= i)), None, 16384, 128),
    ],
)
def test_three_warpgroups_where_rows_are_long(mask: Any, score: Any, length: int, rows: int) -> None:
    qkv = tuple(torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 1, length, 64) for _ in range(3))
    problem, plan = prepare(qkv, score, (None, mask), options=None)
    assert choose.legal_tiles(problem, plan, "hopper_forward")[0].BLOCK_M == rows


def test_explain_says_which_kernel_and_why() -> None:
    half, single = (torch.zeros(1, 1, 64, 64, dtype=d) for d in (torch.float16, torch.float32))
    text = explain(half, half, half)
    assert "attention_forward_hopper (" in text and "the kernel for Hopper: it serves this call" in text
    text = explain(single, single, single)
    assert "not the kernel for Hopper: its products are of bfloat16 and float16" in text


# ---------------------------------------------------------------- pages
def _paged(page_size: int, dtype: torch.dtype = torch.bfloat16, q_len: int = 150, **options: Any) -> tuple[Any, Any]:
    """A problem over pages and its plan, as of a GPU."""
    paged = make_paged((700, 0, 130), page_size, dims=(64, 64), dtype=dtype)
    q = query_of(paged, 4, q_len, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    return prepare((q, paged.pages, None), None, (None, mods.causal()), options=options)


@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 672])
def test_pages_are_read_where_they_lie(page_size: int) -> None:
    problem, plan = _paged(page_size)
    assert choose.why_gathered(problem, plan, target_of(90)) is None
    assert choose.forward_kernel(problem, plan)[0] == "hopper_forward"
    facts = choose.kernel_facts(problem, plan)
    assert facts["page_size"] == page_size


@pytest.mark.parametrize(
    "given, arch, words",
    [
        ({"page_size": 5}, 90, "pages of 5 tokens"),
        ({"page_size": 12}, 90, "pages of 12 tokens"),
        ({"page_size": 16, "dtype": torch.float32}, 90, "products are of"),
        ({"page_size": 16, "dtype": torch.float8_e4m3fn}, 90, "8 bits"),
        ({"page_size": 16, "strict_nan": True}, 90, "strict_nan"),
        ({"page_size": 16, "BLOCK_M": 64}, 90, "fixes tiles"),
        ({"page_size": 16, "warp_specialized": False}, 90, "given by"),
        ({"page_size": 16, "q_len": 20}, 90, "more than 32 queries"),
        ({"page_size": 16}, 100, "sm_100"),
    ],
)
def test_why_pages_are_gathered(given: dict[str, Any], arch: int, words: str) -> None:
    problem, plan = _paged(**given)
    why = choose.why_gathered(problem, plan, target_of(arch))
    assert why is not None and words in why


def test_a_gradient_needs_dense_keys() -> None:
    paged = make_paged((70,), 16, dims=(64, 64), dtype=torch.bfloat16)
    q = query_of(paged, 4, 66).requires_grad_()
    problem, plan = prepare((q, paged.pages, None), None, (None, None))
    assert choose.why_gathered(problem, plan, target_of(90)) == "a gradient is needed"


def test_scales_need_dense_keys() -> None:
    """Of half types too, and the decode kernel reads none either."""
    paged = make_paged((70,), 16, dims=(64, 64), dtype=torch.bfloat16)
    pages = replace(paged.pages, v_scale=torch.full((2,), 0.5))
    for q_len in (1, 66):
        q = query_of(paged, 4, q_len)
        problem, plan = prepare((q, pages, None), None, (None, None))
        assert choose.why_gathered(problem, plan, target_of(90)) == "pages of more than 8 bits have scales"
        assert decode_choice(problem, target_of(90)) == (False, "pages of more than 8 bits have scales")


def test_explain_says_whether_pages_are_copied() -> None:
    for page_size, words in (
        (16, "read where they lie in pages"),
        (5, "copied first, as dense tensors with zeros behind each"),
    ):
        paged = make_paged((700, 130), page_size, dims=(64, 64), dtype=torch.bfloat16)
        text = explain(query_of(paged, 4, 150), paged.pages, None, mask_mod=mods.causal())
        assert words in text and "attention_forward_hopper" in text
        assert ("length: pages of 5 tokens" in text) == (page_size == 5)


def test_a_launch_over_pages_has_every_argument(started: list[tuple[Any, ...]]) -> None:
    """Two kernels are started: the one that copies what lengths cut, and the one that reads its copy and the pages."""
    problem, plan = _paged(48)
    out, _, _ = launch.forward(problem, plan)
    launch.forward(problem, plan)
    assert out.shape == problem.q.shape and len(started) == 4
    kernel = choose.choose(problem, plan, "hopper_forward", lambda chosen: None, want_max=False)
    names = compiling.jit_function(kernel.kernel.source).arg_names  # type: ignore[union-attr]
    for cut, attend in (started[:2], started[2:]):
        assert cut[0] == 3 * 2
        values, pages = dict(zip(names, attend[-len(names) :])), problem.pages
        assert [values[n].block_shape for n in ("K", "V", "V_CUT")] == [[1, 1, 16, 64]] * 3
        assert values["K"].base is pages.k_pages and values["V"].shape == list(pages.v_pages.shape)
        assert values["V_CUT"].shape == [3, 2, 16, 64] and values["V_CUT"].strides == [2048, 1024, 64, 1]
        assert values["PAGES"] == pages.page_indices.data_ptr() and values["kv_len"] == pages.max_length
        assert values["KV_LENGTHS"] == pages.kv_lengths.data_ptr()
        assert [n for n, kind in kernel.kernel.source.signature.items() if values[n] is None] == []


def test_what_cannot_be_built_over_pages_is_gathered_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries whose decode kernel fails, and many for which the kernel for Hopper does: once said, then remembered."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise CompileError("it cannot be built", given="nothing", hint="nothing")

    def runs(problem: Any, *args: Any, **kwargs: Any) -> Any:
        if problem.pages is not None:
            fails()
        ran.append(problem.k.shape)

    ran: list[torch.Size] = []
    monkeypatch.setattr(launch.decode, "forward", fails)
    monkeypatch.setattr(launch, "_run", runs)
    for q_len, said in ((20, "the decode kernel could not"), (150, "the forward kernel over pages could not")):
        problem, plan = _paged(16, q_len=q_len)
        with pytest.warns(FlexPerformanceWarning, match=said):
            launch.forward(problem, plan)
        launch.forward(problem, plan)
        assert choose.why_gathered(problem, plan, target_of(90)) is not None
    assert ran == [(3, 2, 704, 64)] * 4
