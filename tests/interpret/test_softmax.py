"""The softmax pieces by themselves."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from flexattn.codegen.skeletons import softmax


@triton.jit
def _powers(OUT, X, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(OUT + at, softmax.power_of_two(tl.load(X + at), True))


def test_exact_powers_of_two():
    """Half a unit in the last place on normal results; limits and NaN as they should be."""
    torch.manual_seed(0)
    x = torch.cat([torch.rand(4000) * -30, torch.rand(60) * 20, -torch.rand(20) * 120, torch.arange(-8.0, 8.0)])
    x = torch.nn.functional.pad(x, (0, 4096 - len(x)))
    out = torch.empty_like(x)
    _powers[(1,)](out, x, 4096)
    right = torch.exp2(x.double())
    assert ((out.double() - right).abs() / right).max() < 1.2e-7
    assert ((out.double() - right).abs() / right).mean() < 2.5e-8
    x[:6] = torch.tensor([-math.inf, math.inf, math.nan, -200.0, 200.0, -126.0])
    _powers[(1,)](out, x, 4096)
    assert (
        out[:2].tolist() == [0.0, math.inf] and math.isnan(out[2]) and out[3:6].tolist() == [0.0, math.inf, 2.0**-126]
    )
