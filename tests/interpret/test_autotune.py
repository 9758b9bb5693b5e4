"""Autotuned calls run real kernels with the tiles that won, in Triton's interpreter; only the times are made up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.codegen.emit import KernelSource, emit
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.tile_config import TileConfig
from flexattn.runtime import autotune, choose, settings
from flexattn.runtime import compile as compile_kernel
from flexattn.runtime import plan as plans
from flexattn.runtime.attention import prepare
from tests.helpers import causal, check

ROOT = Path(__file__).resolve().parents[2]
TUNED = {"BACKEND": "TRITON", "autotune": True}
DEFAULT, SMALL = TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1)  # the interpreter's two candidates
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says when a masked lane divides by zero


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, nothing remembered, and a timer by which small tiles win."""
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FLEXATTN_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune, "microseconds", lambda run, device: {DEFAULT: 90.0, SMALL: 60.0}[run.args[0]])
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    autotune.clear()
    plans._plan.cache_clear()
    settings.forget_warnings()
    flexattn.reset_stats()


def qkv(length: int = 20) -> list[torch.Tensor]:
    return [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]


def train(length: int = 20, **options: object) -> None:
    flex_attention(*qkv(length), mask_mod=causal, kernel_options={**TUNED, **options}).sum().backward()


def test_results_and_captured_gradients_are_right() -> None:
    slope = torch.rand(1, requires_grad=True)
    alibi = lambda score, b, h, q_idx, kv_idx: score + slope[h] * (kv_idx - q_idx)
    check(qkv(), causal, alibi, captures=[slope], kernel_options=TUNED)
    assert flexattn.stats().tunings == {"forward": 1, "dq": 1, "dkdv": 1}


def test_a_call_is_timed_once_a_size_class_and_runs_with_the_winner(folder: Path) -> None:
    train(20)
    assert flexattn.stats().tunings == {"forward": 1, "dq": 1, "dkdv": 1}
    assert len(list((folder / "tuned").iterdir())) == 3
    flexattn.reset_stats()
    for length in (17, 32):
        train(length)
    assert flexattn.stats().tunings == {} and flexattn.stats().launches["forward"] == 2
    problem, plan = prepare(tuple(qkv()), None, (None, causal), options=TUNED)
    for kernel in ("forward", "dq", "dkdv"):
        assert choose.likely_tiles(problem, plan, kernel) == (SMALL,)
    flex_attention(*qkv(33), mask_mod=causal, kernel_options=TUNED)
    assert flexattn.stats().tunings == {"forward": 1}


def test_a_fresh_process_uses_the_winners_without_timing() -> None:
    train()
    code = (
        "import flexattn; from tests.interpret import test_autotune as t; t.autotune.microseconds = None; t.train()\n"
        "seen = flexattn.stats(); print(seen.tunings.total(), sum(e.startswith('stored tiles') for e in seen.events),"
        " sorted(e for e in seen.events if e.startswith('build f')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=False
    )
    assert result.stdout.strip() == "0 3 ['build forward: tiles 16x16, 4 warps, 1 stages']", result.stderr


def test_the_environment_asks_too_and_an_option_overrides_it(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("FLEXATTN_AUTOTUNE", "1")
    train(autotune=False)
    assert not (folder / "tuned").exists()
    flex_attention(*qkv(), kernel_options={"BACKEND": "TRITON"})
    assert flexattn.stats().tunings == {"forward": 1}


def test_without_it_nothing_is_read_written_or_timed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    train()
    before = {path: path.stat().st_mtime_ns for path in (folder / "tuned").iterdir()}
    forget()
    for name in ("find", "tune", "_read", "_write", "_identity"):
        monkeypatch.delattr(autotune, name)
    train(autotune=False)
    problem, plan = prepare(tuple(qkv()), None, (None, causal), options={"BACKEND": "TRITON"})
    assert choose.tiles_of(problem, plan, "forward") == (DEFAULT, "the default")
    assert {path: path.stat().st_mtime_ns for path in (folder / "tuned").iterdir()} == before
    assert flexattn.stats().builds.total() == 0 or "16x16" not in str(flexattn.stats())


def test_tiles_a_caller_fixed_are_not_timed() -> None:
    train(fwd_BLOCK_M=16)
    assert flexattn.stats().tunings == {"dq": 1, "dkdv": 1}


def test_backward_builds_no_tile_map_before_or_after_tuning() -> None:
    words = torch.arange(20) // 7

    def same_word(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return words[q_idx] == words[kv_idx]

    for _ in range(2):
        mask = create_block_mask(same_word, None, None, 20, 20, device="cpu")
        out = flex_attention(*qkv(), block_mask=mask, kernel_options=TUNED)
        built = flexattn.stats().mask_builds.total()
        out.sum().backward()
        assert flexattn.stats().mask_builds.total() == built > 0


def test_tables_are_prepared_for_the_tiles_that_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def emit_small(spec: KernelSpec) -> KernelSource:
        if spec.config == DEFAULT:
            raise RuntimeError("too large")
        return emit(spec)

    monkeypatch.setattr(compile_kernel, "emit", emit_small)
    compile_kernel.clear()
    try:
        with pytest.warns(settings.FlexPerformanceWarning, match="too large"):
            train(autotune=False)
    finally:
        compile_kernel.clear()  # it remembers failures
    problem, plan = prepare(tuple(qkv()), None, (None, causal), options={"BACKEND": "TRITON"})
    for kernel in ("forward", "dq", "dkdv"):
        assert choose.likely_tiles(problem, plan, kernel) == (SMALL,)


def test_list_masks_run_with_winners_that_divide_their_blocks() -> None:
    tensors = qkv(32)
    lists = create_block_mask(causal, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    lists.mask_mod = causal  # assigning makes a list mask
    out = flex_attention(*tensors, block_mask=lists, kernel_options=TUNED)
    torch.testing.assert_close(out, flex_attention(*tensors, mask_mod=causal), atol=1e-5, rtol=0)
    assert flexattn.stats().launches["forward"] > 1  # trials of the one tile that divides, then the call


def test_explain_says_which_tiles_and_what_was_measured() -> None:
    say = lambda **options: flexattn.explain(*tensors, mask_mod=causal, kernel_options={**TUNED, **options})
    tensors = qkv()
    assert "tiles 32 x 32, 4 warps, 1 stages (the default; the first call times 2 configurations)" in say()
    assert "(the default)" in say(autotune=False) and "(given by kernel_options)" in say(BLOCK_M=16)
    train()
    text = say()
    told = "tiles 16 x 16, 4 warps, 1 stages (tuned; 16x16, 4 warps, 1 stages: 60.0 us, the default 32x32, 4 warps, 1 stages: 90.0 us; "
    assert text.count(told) == 3 and "tuned/" in text  # forward, dq and dkdv
