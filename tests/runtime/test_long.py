"""A million tokens, forward and backward: a sliding window and packed documents against float64, on stretches of the sequence.

The idea: a query's row, and a key's gradients where all of its queries are at hand, need only a stretch of a long sequence, so
the dense formula on a few stretches is exact for what is compared there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.runtime.reference import oracle

WINDOW, HEADS, DIM = 1024, (2, 1), 128
LONG = pytest.param("cuda", 1 << 20, torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.slow])
SHORT = ("cpu", 3001, torch.float32)


class Stretch(NamedTuple):
    """Queries `q`, the keys `kv` that they see, and the keys `whole` all of whose queries are among them: (first, end)."""

    q: tuple[int, int]
    kv: tuple[int, int]
    whole: tuple[int, int]


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def window_stretches(n: int) -> list[Stretch]:
    """The first, some in the middle, the last."""
    found = []
    for begin in (0, n // 2 - 777, n - 1700):
        end = min(begin + 1700, n)
        found.append(Stretch((begin, end), (max(begin - WINDOW + 1, 0), end), (begin, n if end == n else end - WINDOW)))
    return found


def documents(n: int, device: str) -> tuple[Callable[..., Any], list[Stretch]]:
    """Documents of 300 to 1,700 tokens, and the stretches of the first, one in the middle and the last."""
    lengths = torch.randint(300, 1700, (n // 300,), generator=torch.Generator().manual_seed(1))
    ends = lengths.cumsum(0).clamp(max=n).unique()
    ids = torch.searchsorted(ends, torch.arange(n), right=True).int().to(device)
    starts = [0, *ends.tolist()]
    spans = [(starts[i], starts[i + 1]) for i in (0, len(ends) // 2, len(ends) - 1)]
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx), [
        Stretch(x, x, x) for x in spans
    ]


def attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The formula in the inputs' type with a float32 softmax: how large an error is fair."""
    k, v = (x.repeat_interleave(HEADS[0] // HEADS[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * DIM**-0.5
    return torch.where(keep, scores, -torch.inf).softmax(-1).to(v.dtype) @ v


def results(stretch: Stretch, tensors: tuple[Tensor, ...], mask_mod: Any, *, exact: bool) -> list[Tensor]:
    """out, dq, dk and dv of a stretch, where it knows them."""
    (q0, q1), (k0, k1), (w0, w1) = stretch
    q, k, v, d_out = (x.detach()[:, :, a:z] for x, (a, z) in zip(tensors, ((q0, q1), (k0, k1), (k0, k1), (q0, q1))))
    leaves = [(x.double() if exact else x.clone()).requires_grad_() for x in (q, k, v)]
    here = lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + q0, kv_idx + k0)
    if exact:
        out = oracle(*leaves, here)[0]
    else:
        rows, keys = (torch.arange(n, device=q.device) for n in (q1 - q0, k1 - k0))
        out = attention(*leaves, here(0, 0, rows[:, None], keys[None]))
    grads = torch.autograd.grad(out, leaves, d_out.to(out.dtype))
    part = slice(w0 - k0, w1 - k0)
    return [out.detach(), grads[0], grads[1][:, :, part], grads[2][:, :, part]]


@pytest.mark.parametrize(("device", "n", "dtype"), [SHORT, LONG])
@pytest.mark.parametrize("name", ["window", "documents"])
def test_stretches_of_a_long_sequence(name: str, device: str, n: int, dtype: torch.dtype) -> None:
    """The error of ours against the dense formula's in the same type, as contract 7 has it."""
    mask_mod, stretches = (window, window_stretches(n)) if name == "window" else documents(n, device)
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda heads: torch.randn(1, heads, n, DIM, device=device, dtype=dtype, generator=generator)
    q, k, v, d_out = (draw(heads) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0]))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = create_block_mask(mask_mod, None, None, n, n, device=device)
    flexattn.reset_stats()
    out = flex_attention(*leaves, block_mask=mask, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, d_out)
    assert device == "cpu" or set(flexattn.stats().mask_builds) == {"device"}
    for stretch in stretches:
        exact, fair = (results(stretch, (q, k, v, d_out), mask_mod, exact=x) for x in (True, False))
        (a, z), (w0, w1) = stretch.q, stretch.whole
        ours = [out[:, :, a:z], grads[0][:, :, a:z], grads[1][:, :, w0:w1], grads[2][:, :, w0:w1]]
        for what, mine, theirs, true in zip(("out", "dq", "dk", "dv"), ours, fair, exact, strict=True):
            error, allowed = ((x.double() - true).abs().mean().item() for x in (mine, theirs))
            share = 2.0 if dtype == torch.float32 else 1.1 if what == "out" else 1.25
            floor = 1e-7 * true.abs().mean().item() if dtype == torch.float32 else 0.0
            assert error <= max(share * allowed, floor), f"{what} of {stretch}: {error:.2e}, dense {allowed:.2e}"
