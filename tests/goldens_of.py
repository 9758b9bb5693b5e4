"""The mods whose generated text is kept under tests/goldens, as importable files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flexattn import mods
from flexattn.frontend.program import Traced
from flexattn.frontend.trace import trace

FOLDER = Path(__file__).parent / "goldens"


def golden_path(name: str) -> Path:
    return FOLDER / f"{name}.py"


def _mask(fn: Any) -> Callable[[], Traced]:
    return lambda: trace(fn, "mask")


def _documents() -> Traced:
    ids = torch.arange(40, dtype=torch.int32) // 7
    return trace(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx), "mask")


def _table_bias() -> Traced:
    table = torch.linspace(-1, 1, 80).reshape(1, 80)
    return trace(lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + 40], "score")


def _soft_cap() -> Traced:
    cap = 20.0
    return trace(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), "score")


GOLDENS: dict[str, Callable[[], Traced]] = {
    "causal": _mask(mods.causal()),
    "window": lambda: trace(mods.sliding_window(9), "mask"),
    "floors": _mask(lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) // 4 == -1) | ((q_idx - kv_idx) % 3 == 1)),
    "documents": _documents,
    "soft_cap": _soft_cap,
    "table_bias": _table_bias,
}
