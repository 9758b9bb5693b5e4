"""A function is run again exactly when something that it can see has changed."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.frontend import trace as tracing
from flexattn.frontend.program import Traced
from flexattn.frontend.trace import trace

WINDOW = 5


def helper(distance: Any) -> Any:
    return distance < WINDOW


def by_global(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return helper(q_idx - kv_idx)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time a mod was really run."""
    seen: list[Any] = []
    real = tracing._pack

    def pack(fn: Any, *rest: Any) -> Traced:
        seen.append(fn)
        return real(fn, *rest)

    monkeypatch.setattr(tracing, "_pack", pack)
    return seen


def bias(table: torch.Tensor, factor: float = 2.0) -> tuple[Callable[..., Any], Callable[..., None]]:
    """A score_mod, and what changes a name that it closes over."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * factor + table[h]

    def change(**names: Any) -> None:
        nonlocal table, factor
        table, factor = names.get("table", table), names.get("factor", factor)

    return score_mod, change


def test_nothing_new_is_no_run(runs: list[Any]) -> None:
    score_mod, _ = bias(torch.zeros(4))
    first = trace(score_mod, "score")
    assert trace(score_mod, "score") is first and len(runs) == 1
    assert trace(score_mod, "score", score_dtype=torch.float64) is not first and len(runs) == 2


def test_a_cell_that_changes_is_seen(runs: list[Any]) -> None:
    table, other = torch.zeros(4), torch.ones(4)
    score_mod, change = bias(table)
    assert trace(score_mod, "score").binding.numbers == (2.0,)
    change(factor=3.0)
    assert trace(score_mod, "score").binding.numbers == (3.0,) and len(runs) == 2
    change(factor=3)
    assert type(trace(score_mod, "score").binding.numbers[0]) is int and len(runs) == 3
    change(table=other)
    assert trace(score_mod, "score").binding.captures[0] is other and len(runs) == 4


def test_globals_of_functions_that_are_called_are_seen(runs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert trace(by_global, "mask").binding.numbers == (5,)
    trace(by_global, "mask")
    assert len(runs) == 1
    monkeypatch.setitem(globals(), "WINDOW", 9)
    assert trace(by_global, "mask").binding.numbers == (9,) and len(runs) == 2
    monkeypatch.setitem(globals(), "helper", lambda distance: distance > WINDOW)
    assert str(trace(by_global, "mask").program) == "num0 < q_idx - kv_idx" and len(runs) == 3


def test_code_and_defaults_that_change_are_seen(runs: list[Any]) -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, width: int = 3) -> Any:
        return q_idx - kv_idx < width

    assert trace(mask_mod, "mask").binding.numbers == (3,)
    mask_mod.__defaults__ = (4,)
    assert trace(mask_mod, "mask").binding.numbers == (4,)
    mask_mod.__code__ = (lambda b, h, q_idx, kv_idx, width=3: q_idx >= kv_idx).__code__
    assert trace(mask_mod, "mask").binding.numbers == () and len(runs) == 3


def test_numbers_read_from_a_tensor_follow_its_contents(runs: list[Any]) -> None:
    table = torch.arange(4.0)
    score_mod, _ = bias(table)
    trace(score_mod, "score")
    table[0] = 7.0  # the program reads the tensor itself, but a number might have come from it
    trace(score_mod, "score")
    assert len(runs) == 2
    plain = lambda score, b, h, q_idx, kv_idx: score + table[h]
    trace(plain, "score")
    table[0] = 8.0
    trace(plain, "score")
    assert len(runs) == 3  # without a number, contents do not matter


def test_the_default_data_type_is_seen(runs: list[Any]) -> None:
    ratio = lambda b, h, q_idx, kv_idx: q_idx / (kv_idx + 1) > 1
    single = trace(ratio, "mask").program
    torch.set_default_dtype(torch.float64)
    try:
        assert trace(ratio, "mask").program != single
    finally:
        torch.set_default_dtype(torch.float32)
    assert trace(ratio, "mask").program == single and len(runs) == 3


class Settings:
    width = 3


SETTINGS, LIST = Settings(), [3]
DOUBTFUL = {
    "attribute": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < SETTINGS.width,
    "list": lambda b, h, q_idx, kv_idx: q_idx - kv_idx < LIST[0],
    "computed from a tensor": (lambda t: lambda b, h, q_idx, kv_idx: (t * 2)[q_idx] > kv_idx)(torch.arange(9)),
    "shape only": (lambda t: lambda b, h, q_idx, kv_idx: q_idx < t.shape[0])(torch.arange(9)),
    "part of a graph": (lambda t: lambda b, h, q_idx, kv_idx: t[q_idx] > 0)(torch.ones(9, requires_grad=True) * 2),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_in_doubt_it_is_run_again(name: str, runs: list[Any]) -> None:
    for count in (1, 2):
        trace(DOUBTFUL[name], "mask")
        assert len(runs) == count


FACTOR = 2.0
IMPURE = {
    "grad mode": lambda s, b, h, q, k: s * (2.0 if torch.is_grad_enabled() else 1.0),
    "autocast": lambda s, b, h, q, k: s * (2.0 if torch.is_autocast_enabled("cpu") else 1.0),
    "backends": lambda s, b, h, q, k: s * (2.0 if torch.backends.mkldnn.enabled else 1.0),
    "globals": lambda s, b, h, q, k: s * globals()["FACTOR"],
    "eval": lambda s, b, h, q, k: s * eval("FACTOR"),
    "file": lambda s, b, h, q, k: s * float(open(FILE[0]).read()),  # noqa: SIM115
    "random": lambda s, b, h, q, k: s * random.random(),
}
FILE = [__file__]


@pytest.mark.parametrize("name", IMPURE)
def test_what_calls_more_than_pure_functions_is_run_again(
    name: str, runs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factor").write_text("3.5")
    monkeypatch.setattr(sys.modules[__name__], "FILE", [str(tmp_path / "factor")])
    for count in (1, 2):
        trace(IMPURE[name], "score")
        assert len(runs) == count


def test_a_global_that_is_read_by_name_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("globals", "eval"):
        assert trace(IMPURE[name], "score").binding.numbers == (2.0,)
        monkeypatch.setitem(globals(), "FACTOR", 5.0)
        assert trace(IMPURE[name], "score").binding.numbers == (5.0,)
        monkeypatch.setitem(globals(), "FACTOR", 2.0)


def test_a_branch_on_contents_follows_them(runs: list[Any]) -> None:
    table = torch.ones(4)
    mod = lambda s, b, h, q, k: s * table[h] if table[0] > 0 else s
    assert "cap0" in str(trace(mod, "score").program)
    table.neg_()
    assert str(trace(mod, "score").program) == "score" and len(runs) == 2


def test_a_function_that_is_gone_takes_its_tensors_along() -> None:
    table = torch.zeros(4)
    score_mod, change = bias(table)
    trace(score_mod, "score")
    gone = weakref.ref(table)
    del score_mod, change, table
    gc.collect()
    assert gone() is None
