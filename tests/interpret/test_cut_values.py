"""The kernel that copies the values that a request's length cuts, in Triton's interpreter: its last ones, and zeros behind them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexattn.runtime.cut_values import cut_values
from tests.paged import make_paged


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size, rows", [(8, 8), (16, 16), (48, 16), (64, 32), (256, 128), (672, 32)])
def test_last_values_and_zeros(page_size: int, rows: int, layout: str) -> None:
    lengths = (1, rows - 1, rows, 0, rows + 1, page_size, 700)
    paged = make_paged(lengths, page_size, layout=layout, dims=(32, 24), dtype=torch.float16)
    plan: Any = SimpleNamespace(memo={})
    for _ in range(2):  # built, and ready
        found = cut_values(paged.pages, plan, rows)
        assert found.shape == (7, 2, rows, 24)
        for b, n in enumerate(lengths):
            first = max(n - 1, 0) // rows * rows
            assert torch.equal(found[b, :, : n - first], paged.v[b, :, first:n])
            assert (found[b, :, n - first :] == 0).all()
