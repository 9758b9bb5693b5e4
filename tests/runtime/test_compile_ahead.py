"""Kernels that are compiled ahead in a thread: the same kernel, counted once, its errors raised where it is asked for; and what a
call has compiled while its tables are made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn import flex_attention, mods, stats
from flexattn.codegen.emit import emit
from flexattn.codegen.spec import KernelSpec
from flexattn.runtime import compile as compiling
from tests.codegen.compiled import spec_of

SPEC = spec_of("forward", arch=90, dim=64)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Compiler:
    """Stands in for Triton's, and says in which threads it was asked."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.may_end = threading.Event()
        self.error: Exception | None = None

    def build(self, source: Any, translated: Callable[[], None] | None = None) -> Any:
        self.threads.append(threading.current_thread())
        if translated is not None and self.error is None:
            translated()
        assert self.may_end.wait(20)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(run=None, source=source)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    made = Compiler()
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling.store, "find", lambda source, start: None)
    monkeypatch.setattr(compiling.store, "keep", lambda source, compiled: None)
    monkeypatch.setattr(compiling, "build", made.build)
    monkeypatch.setattr(compiling, "_loaded", lambda compiled: compiled)
    for memory in ("_KERNELS", "_FAILED", "_AHEAD"):
        monkeypatch.setattr(compiling, memory, {})
    return made


def test_a_kernel_is_compiled_once_and_waited_for(compiler: Compiler) -> None:
    before = stats().builds
    assert compiling.build_ahead(SPEC, CPU).wait(20)  # translated, not compiled
    assert compiling.build_ahead(SPEC, CPU).is_set()  # it is under way
    assert not compiling._KERNELS and stats().builds == before
    compiler.may_end.set()
    kernel = compiling.kernel_for(SPEC, CPU)
    assert isinstance(kernel, compiling.Kernel) and kernel.source.spec == SPEC
    assert [t is threading.main_thread() for t in compiler.threads] == [False]
    assert compiling.kernel_for(SPEC, CPU) is kernel and len(compiler.threads) == 1
    compiling.build_ahead(SPEC, CPU)  # it is there
    assert not compiling._AHEAD and len(compiler.threads) == 1


def test_a_translation_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler itself, before its passes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    told: list[int] = []
    compiled = compiling.build(
        emit(spec_of("forward", arch=90, dim=16)), lambda: told.append(len(list(tmp_path.rglob("*.cubin"))))
    )
    assert told == [0] and compiled.asm["cubin"]


def test_another_kernel_is_compiled_meanwhile(compiler: Compiler) -> None:
    """Whoever compiles here holds the lock of all kernels; the thread must not need it."""
    other = spec_of("forward", arch=90, dim=128)
    compiling.build_ahead(SPEC, CPU)
    threading.Timer(0.05, compiler.may_end.set).start()
    here, ahead = compiling.kernel_for(other, CPU), compiling.kernel_for(SPEC, CPU)
    assert (here.source.spec, ahead.source.spec) == (other, SPEC)
    assert sorted(t is threading.main_thread() for t in compiler.threads) == [False, True]


def test_an_error_is_raised_where_the_kernel_is_asked_for(compiler: Compiler) -> None:
    compiler.error = ValueError("it does not fit")
    compiler.may_end.set()
    assert compiling.build_ahead(SPEC, CPU).wait(20)  # nobody waits for a translation that failed
    for _ in range(2):
        with pytest.raises(ValueError, match="it does not fit"):
            compiling.kernel_for(SPEC, CPU)
    compiling.build_ahead(SPEC, CPU)  # it has failed
    assert len(compiler.threads) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_call_asks_for_what_it_had_compiled_ahead(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    """Nothing is compiled ahead that the call and its gradients do not take."""
    monkeypatch.setattr(compiling, "_AHEAD", {})  # what other tests have left there
    asked: list[KernelSpec] = []
    ahead = compiling.build_ahead

    def build_ahead(spec: KernelSpec, device: torch.device) -> threading.Event:
        asked.append(spec)
        return ahead(spec, device)

    monkeypatch.setattr("flexattn.runtime.launch.build_ahead", build_ahead)
    gain = 2.0 if masked else 3.0
    score = lambda s, b, h, q_idx, kv_idx: torch.tanh(s / gain + q_idx - kv_idx)  # a structure that no other test has
    q, k, v = (torch.randn(1, 2, 150, 64, device=GPU, dtype=torch.float16, requires_grad=True) for _ in range(3))
    mask = mods.causal() if masked else None
    flex_attention(q, k, v, score_mod=score, mask_mod=mask).sum().backward()
    assert len(asked) >= 2 and {spec for spec, _ in compiling._KERNELS} >= set(asked)
    assert not compiling._AHEAD
    asked.clear()
    flex_attention(q, k, v, score_mod=score, mask_mod=mask).sum().backward()
    assert not asked
