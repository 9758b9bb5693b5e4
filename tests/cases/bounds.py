"""The bounds of the collected cases, element by element, beside the contract's error rule in tests/helpers.py.

Reads results and what they should be; raises AssertionError with the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.helpers import HALF, dense, mean_error


def assert_each_within(name: str, actual: Tensor, expected: Tensor) -> None:
    """float32: every |actual - expected| <= 2e-5 * max(1, |expected|); infinities at the same places, no NaN."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    infinite = torch.isinf(expected)
    assert torch.equal(actual[infinite], expected[infinite]), f"{name}: infinities differ"
    error, size = (actual - expected)[~infinite].abs(), expected[~infinite].abs().clamp(min=1)
    assert (error <= 2e-5 * size).all(), f"{name}: error {(error / size).max().item():.3g} of max(1, |expected|)"


def assert_half_within(name: str, actual: Tensor, expected: Tensor, fair: Sequence[Tensor]) -> None:
    """Half types: the greatest error at most twice that of the dense formula in that dtype, plus 1e-3."""
    worst, allowed = mean_error(actual, expected)[1], 2 * max(mean_error(x, expected)[1] for x in fair) + 1e-3
    assert worst <= allowed, f"{name}: error {worst:.3g}, allowed {allowed:.3g}"


def assert_summed_in_float32(actual: Tensor, expected: Tensor, fair: Sequence[Tensor], dtype: torch.dtype) -> None:
    """A captured gradient: as exact as if it were summed in float32 and rounded once to its own dtype.

    Args:
        actual, expected: the gradient and what it should be.
        fair: the dense formula's, with the captured tensor in float32 (`dense_with_wide_captures`).
        dtype: of query, key and value.
    """
    rounding = torch.finfo(actual.dtype).eps / 2 * expected.abs() if actual.dtype in HALF else 0.0
    if dtype in HALF:
        bound = 2 * max(mean_error(x, expected)[1] for x in fair) + 1e-3
    else:
        bound = 2e-5 * expected.abs().clamp(min=1)
    error = (actual.double() - expected).abs()
    assert (error <= bound + rounding).all(), f"captured gradient: error {(error - rounding).max().item():.3g}"


def dense_with_wide_captures(qkv: Sequence[Tensor], *mods: Any, captures: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients of the captures from the dense formula in qkv's dtype, one list a capture, their own sums in float32."""
    with _in_float32(captures):
        results = dense(qkv, *mods, captures=captures)
    count = sum(x.requires_grad for x in qkv)
    return [[x.grads[count + n] for x in results] for n in range(len(captures))]


@contextmanager
def _in_float32(tensors: Sequence[Tensor]) -> Iterator[None]:
    stored = [x.data for x in tensors]
    try:
        for x in tensors:
            x.data = x.data.float()
        yield
    finally:
        for x, data in zip(tensors, stored):
            x.data = data
