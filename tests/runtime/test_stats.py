"""The counters: what they show, and that changed values make no new plan."""

from __future__ import annotations

import functools

import pytest
import torch

import flexattn
from flexattn import create_block_mask, explain, flex_attention
from flexattn.runtime import settings, stats
from flexattn.runtime.attention import prepare
from flexattn.runtime.debug import check_reads

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def qkv(batch=2, heads=4, q_len=40, kv_len=40, dtype=torch.float32):
    return tuple(torch.randn(batch, heads, n, 16, dtype=dtype) for n in (q_len, kv_len, kv_len))


def windowed(width, cap, bias):
    """New function objects each time, as code in a training loop makes them."""
    score_mod = lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap) + bias[kv_idx]
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= width
    return {"score_mod": score_mod, "mask_mod": mask_mod}


def test_numbers_lengths_batches_and_tables_make_no_new_plan():
    flex_attention(*qkv(), **windowed(3, 5.0, torch.randn(40)))
    flexattn.reset_stats()
    for width in (0, 1, 16, 17, -1, 2**31, 2**33):
        flex_attention(*qkv(), **windowed(width, 5.0 + width, torch.randn(40)))
    for length in (1, 15, 16, 17, 128, 129, 200):
        flex_attention(*qkv(q_len=length, kv_len=length + 1), **windowed(3, 5.0, torch.randn(length + 1)))
    for batch in (1, 16, 17):
        flex_attention(*qkv(batch=batch), **windowed(3, 5.0, torch.randn(41)))
    for heads in (1, 16, 17):
        flex_attention(*qkv(heads=heads), **windowed(3, 5.0, torch.randn(41)))
    seen = flexattn.stats()
    assert seen.plans.total() == 0
    assert seen.builds.total() == 0
    assert seen.traces == {"score": 20, "mask": 20}


@pytest.mark.gpu
def test_values_build_no_kernel_within_a_size_class():
    def step(*, width=3, cap=5.0, **sizes):
        q, k, v = (x.cuda().requires_grad_() for x in qkv(**sizes))
        flex_attention(q, k, v, **windowed(width, cap, torch.randn(k.shape[2], device="cuda"))).sum().backward()

    for sizes in ({}, {"q_len": 1}, {"width": 2**31}, {"q_len": 1, "width": 2**31}):
        step(**sizes)  # one build a size class
    flexattn.reset_stats()
    for width in (0, 1, 16, 17, -1, 2**31, 2**33):
        step(width=width, cap=5.0 + width)
    for length in (1, 15, 16, 17, 40, 128, 129, 200):
        step(q_len=length, kv_len=length + 1)
    for count in (1, 16, 17):
        step(batch=count)
        step(heads=count)
    assert flexattn.stats().builds.total() == 0
    assert flexattn.stats().plans.total() == 0


def test_partial_and_attribute_numbers_make_no_new_plan():
    def window(width, b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= width

    flex_attention(*qkv(), mask_mod=functools.partial(window, 4))
    flexattn.reset_stats()
    for width in (0, 1, 2, 40):
        flex_attention(*qkv(), mask_mod=functools.partial(window, width))
    assert flexattn.stats().plans.total() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 1.0},
        {"mask_mod": CAUSAL},
        {"kernel_options": {"BACKEND": "TORCH"}},
    ],
)
def test_a_new_structure_makes_one_plan(change):
    flexattn.runtime.plan._plan.cache_clear()
    flex_attention(*qkv())
    flexattn.reset_stats()
    for _ in range(3):
        flex_attention(*qkv(), **change)
    assert flexattn.stats().plans == {"torch": 1}
    assert "plan torch" in flexattn.stats().events[0]


def test_dtypes_and_head_dims_are_structure():
    flexattn.runtime.plan._plan.cache_clear()
    flexattn.reset_stats()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        flex_attention(*qkv(dtype=dtype))
    assert flexattn.stats().plans.total() == 2


def test_repeated_masks_without_captures_are_built_once():
    q, k, v = qkv(q_len=300, kv_len=300)
    flex_attention(q, k, v, mask_mod=CAUSAL)
    flexattn.reset_stats()
    for _ in range(3):
        flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    assert flexattn.stats().mask_builds.total() == 0
    assert flexattn.stats().traces["mask"] == 3


def test_launches_are_counted_by_direction():
    q, k, v = (x.requires_grad_() for x in qkv())
    flexattn.reset_stats()
    out = flex_attention(q, k, v)
    assert flexattn.stats().launches.total() == 1
    out.sum().backward()
    assert flexattn.stats().launches == {"torch forward": 1, "torch backward": 1}


def test_mask_builds_are_counted():
    q, k, v = qkv(q_len=300, kv_len=300)
    flexattn.reset_stats()
    mask = create_block_mask(CAUSAL, None, None, 300, 300, device="cpu")
    flex_attention(q, k, v, block_mask=mask)
    built = flexattn.stats().mask_builds.total()
    assert built >= 1
    flex_attention(q, k, v, block_mask=mask)
    assert flexattn.stats().mask_builds.total() == built


def test_stats_print_nicely_and_are_a_copy():
    flexattn.reset_stats()
    before = flexattn.stats()
    stats.record_build("forward bf16", "first call with this structure")
    assert before.builds.total() == 0
    text = str(flexattn.stats())
    assert text.splitlines()[0] == "flexattn.stats()"
    assert "builds            1  forward bf16 1" in text
    assert "- build forward bf16: first call with this structure" in text
    assert repr(flexattn.stats()) == text
    stats.record_build("forward bf16", "first call with this structure")
    assert str(flexattn.stats()).count("- build") == 1
    assert str(flexattn.stats()).endswith("first call with this structure (2 times)")
    flexattn.reset_stats()
    assert flexattn.stats().events == ()


def test_warnings_name_the_line_that_called():
    settings.forget_warnings()
    x = torch.randn(1, 1, 8, 16, requires_grad=True)
    with pytest.warns(FutureWarning, match="return_lse") as seen:
        flex_attention(x, x, x, return_lse=True)
    with pytest.warns(UserWarning, match="no effect") as also_seen:
        flex_attention(x, x, x, kernel_options={"BACKEND": "TORCH", "BLOCK_M": 64})
    assert {w.filename for w in (*seen, *also_seen)} == {__file__}


def test_explain_names_the_line_of_a_block_masks_function():
    mask = create_block_mask(CAUSAL, None, None, 40, 40)
    assert f"written at {__file__}:" in explain(*qkv(), block_mask=mask)


def test_explain_says_how_tiles_are_loaded():
    q, k, v = qkv(dtype=torch.bfloat16)
    text = explain(q, k.expand(2, 4, 40, 16), v[:1, :1].expand(2, 4, 40, 16))
    assert "  query, key: loaded through tensor descriptors\n  value: loaded by pointers, being" in text
    assert "  query, key, value: loaded by pointers, being float32" in explain(*qkv())


def test_settings_read_the_environment(monkeypatch, tmp_path):
    for value, expected in [("1", True), ("0", False), ("", False), ("off", False), ("yes", True)]:
        monkeypatch.setenv("FLEXATTN_DEBUG", value)
        assert settings.debug() is expected
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "here"))
    assert settings.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("FLEXATTN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / "flexattn"


# ---------------------------------------------------------------- debug mode
SHORT = torch.zeros(30)


@pytest.mark.parametrize(
    ("mods", "guilty"),
    [
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score + SHORT[kv_idx]}, "score_mod"),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score + SHORT[kv_idx - 31]}, "score_mod"),
        ({"mask_mod": lambda b, h, q_idx, kv_idx: (SHORT[q_idx] < 1) | (kv_idx < 3)}, "mask_mod"),
        ({"score_mod": lambda score, b, h, i, j: score + SHORT[j], "mask_mod": lambda b, h, i, j: j < 30}, None),
        ({"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx < 30) & (SHORT[q_idx] < 1)}, None),
        ({"score_mod": lambda score, b, h, q_idx, kv_idx: score + SHORT[q_idx - kv_idx - 1]}, "score_mod"),
    ],
)
def test_debug_mode_names_the_mod_that_reads_out_of_range(mods, guilty):
    problem, _ = prepare(qkv(), mods.get("score_mod"), (None, mods.get("mask_mod")))
    if guilty is None:
        assert check_reads(problem) is None
        return
    with pytest.raises(IndexError, match=f"{guilty} .* out of range"):
        check_reads(problem)


def test_debug_mode_prints_new_plans(monkeypatch, capsys):
    monkeypatch.setenv("FLEXATTN_DEBUG", "1")
    flexattn.runtime.plan._plan.cache_clear()
    flex_attention(*qkv())
    assert "flexattn: Plan(backend='torch', reason='cpu tensors'" in capsys.readouterr().err


# ---------------------------------------------------------------- explain
def test_explain_says_what_happens():
    q, k, v = qkv(q_len=300, kv_len=300)
    bias = torch.randn(300)
    text = explain(q, k, v, **windowed(3, 5.0, bias))
    for fragment in (
        "query  [2, 4, 300, 16] float32 cpu",
        "score_mod",
        "tanh",
        "cap0",
        "[300] float32",
        "mask_mod",
        "= 3",
        "tile map",
        "density",
        "backend: torch",
        "cpu tensors",
    ):
        assert fragment in text, fragment


def test_explain_shows_the_code_a_gpu_would_get():
    q, k, v = qkv(q_len=300, kv_len=300)
    text = explain(q, k, v, mask_mod=CAUSAL, score_mod=lambda score, b, h, q_idx, kv_idx: torch.tanh(score))
    assert "def score_mod" in text or "leaf" in text


def test_explain_runs_and_traces_nothing_it_does_not_count():
    q, k, v = qkv()
    flexattn.reset_stats()
    explain(q, k, v)
    assert flexattn.stats().launches.total() == 0


def test_explain_says_how_much_work_a_call_is() -> None:
    """By hand: 1 x 6 heads, 300 queries, 2 x 500 keys, dims 32 and 64, causal."""
    q, k, v = torch.ones(1, 6, 300, 32), torch.ones(1, 2, 500, 32), torch.ones(1, 2, 500, 64)
    kept, visited = 300 * 301 // 2, (1 + 2 + 3) * 128 * 128
    said = flexattn.explain(q, k, v, mask_mod=flexattn.mods.causal(), enable_gqa=True)
    flop, tiles, backward = (6 * 2 * n / 1e6 for n in (96 * kept, 96 * visited, 224 * visited))
    assert (
        f"work: {flop:.3g} MFLOP in kept pairs, {tiles:.3g} MFLOP in visited tiles; backward {backward:.3g} MFLOP"
        in said
    )
    moved = 4 * (6 * 300 * (96 + 1) + 2 * 500 * 96)
    assert f"at least {moved / 1e6:.3g} MB read and written" in said
    whole = flexattn.explain(q, k, v, enable_gqa=True)
    assert f"work: {6 * 2 * 96 * 300 * 500 / 1e6:.3g} MFLOP in kept pairs" in whole
