"""Hardware markers that skip by themselves, and the helpers every test folder may use."""

from __future__ import annotations

import math

import pytest
import torch

import flexattn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu or multigpu where that hardware is missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multigpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA GPUs, found {gpus}"))
        elif item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_memory_is_nan() -> None:
    """Every uninitialised allocation on a GPU starts as NaN, so a value that is never written shows."""
    if torch.cuda.is_available():
        for size in (1 << 28, 1 << 22, 1 << 16):
            # goes back to the allocator's pool, from which the next ones come
            torch.full((size // 4,), math.nan, device="cuda:0")


@pytest.fixture
def fresh_stats() -> None:
    """Counters at zero at the start of the test."""
    flexattn.reset_stats()


@pytest.fixture
def device() -> torch.device:
    """The device the fast path runs on here: a CUDA GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
