"""How programs are spread over (batch, head) pairs."""

from __future__ import annotations

import pytest

from flexattn.runtime.launch import _even


@pytest.mark.parametrize(
    "count, most, size", [(32, 5, 4), (16, 2, 2), (17, 5, 3), (7, 9, 7), (64, 3, 2), (1, 1, 1), (5, 4, 3), (0, 3, 1)]
)
def test_parts_are_even(count: int, most: int, size: int) -> None:
    assert _even(count, most) == size
