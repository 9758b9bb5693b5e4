"""Gradients of long rows against float64 on sampled queries and keys: none, causal, a window, documents and a soft-cap.

The idea: with log-sums and outputs of all rows in float64, made a few rows at a time, the gradient of one query needs only its row of
scores, and those of one key only its column. The error is compared with that of the formula in the inputs' type on the same samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import flex_attention, mods
from tests.helpers import assert_rule

HEADS, DIM, AT_ONCE = 2, 128, 1 << 26  # query heads of one key head; pairs of float64 that are made at once
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
    ),
]
LENGTHS = [
    ("cpu", 1500, torch.float32),
    *(pytest.param("cuda", n, torch.bfloat16, marks=GPU) for n in (16384, 65536)),
]
Mod = Callable[..., Any] | None


class Mods(NamedTuple):
    score: Mod
    mask: Mod


class Rows(NamedTuple):
    """Queries of one head and what backward reads of them: gradients and outputs, log-sums, positions."""

    q: Tensor
    d_out: Tensor
    out: Tensor
    lse: Tensor
    at: Tensor

    def some(self, which: Tensor) -> Rows:
        return Rows(*(x[which] for x in self))


def _soft_cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 2.0 * torch.tanh(score / 2.0)


def _mods(name: str, n: int, device: str) -> Mods:
    if name == "documents":
        ids = (torch.rand(n, generator=torch.Generator().manual_seed(1)) < 2e-3).int().cumsum(0).int().to(device)
        return Mods(None, lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))
    masks: dict[str, Mods] = {
        "none": Mods(None, None), "causal": Mods(None, mods.causal()), "window": Mods(None, mods.sliding_window(n // 16)),
        "soft-cap": Mods(_soft_cap, mods.causal()),
    }  # fmt: skip
    return masks[name]


def _scores(q: Tensor, k: Tensor, rows: Tensor, keys: Tensor, of: Mods) -> tuple[Tensor, Tensor]:
    """Scores, -inf where masked, and their derivatives by the raw ones, [rows, keys]."""
    raw = (q @ k.T).to(_wide(q)) * DIM**-0.5
    raw.requires_grad_(of.score is not None)
    i, j = rows[:, None], keys[None]
    modified, slope = raw, torch.ones_like(raw)
    if of.score is not None:
        with torch.enable_grad():
            modified = of.score(raw, 0, 0, i, j)
        (slope,) = torch.autograd.grad(modified, raw, torch.ones_like(raw))
        modified = modified.detach()
    if of.mask is not None:
        modified = torch.where(of.mask(0, 0, i, j), modified, -torch.inf)
    return modified, slope


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, of: Mods) -> Rows:
    """All rows of one head, from float64."""
    at, out, lse = torch.arange(len(q), device=q.device), torch.zeros_like(d_out), q.new_zeros(len(q))
    keys = torch.arange(len(k), device=k.device)
    for some in at.split(max(1, AT_ONCE // len(k))):
        scores, _ = _scores(q[some], k, some, keys, of)
        lse[some] = scores.logsumexp(-1)
        out[some] = scores.softmax(-1) @ v
    return Rows(q, d_out, out, lse, at)


def _pairs(rows: Rows, k: Tensor, v: Tensor, keys: Tensor, of: Mods) -> tuple[Tensor, Tensor]:
    """Probabilities and gradients of scores [rows, keys] in the tensors' type."""
    scores, slope = _scores(rows.q, k, rows.at, keys, of)
    probs = (scores - rows.lse[:, None].to(scores.dtype)).exp()
    delta = (rows.out * rows.d_out).to(scores.dtype).sum(-1, keepdim=True)
    d_scores = probs * ((rows.d_out @ v.T).to(scores.dtype) - delta) * slope
    return probs.to(k.dtype), d_scores.to(k.dtype)


def _samples(n: int, device: str) -> Tensor:
    """The first and the last, some beside corners of tiles, some anywhere."""
    anywhere = torch.randint(0, n, (40,), generator=torch.Generator().manual_seed(2))
    corners = torch.tensor([0, 1, 63, 64, 127, 128, n // 2 - 1, n // 2, n - 129, n - 128, n - 65, n - 64, n - 2, n - 1])
    return torch.cat([corners, anywhere]).unique().to(device)


def _sampled(
    heads: list[Rows], k: Tensor, v: Tensor, which: Tensor, of: Mods, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [heads, samples], dk and dv [samples] by the formula in a type; sums over the group are wide."""
    k, v, keys = k.to(dtype), v.to(dtype), torch.arange(len(k), device=k.device)
    dq, dk, dv = [], 0.0, 0.0
    for head in heads:
        rows = Rows(*(x.to(dtype) for x in head[:3]), *head[3:])
        dq.append(_pairs(rows.some(which), k, v, keys, of)[1] @ k * DIM**-0.5)
        probs, d_scores = _pairs(rows, k[which], v[which], which, of)
        dk = dk + (d_scores.T @ rows.q).to(_wide(k)) * DIM**-0.5
        dv = dv + (probs.T @ rows.d_out).to(_wide(k))
    return torch.stack(dq), dk.to(dtype), dv.to(dtype)  # type: ignore[union-attr]


@pytest.mark.parametrize(("device", "n", "dtype"), LENGTHS)
@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "soft-cap"])
def test_sampled_queries_and_keys(name: str, device: str, n: int, dtype: torch.dtype) -> None:
    generator, of = torch.Generator(device).manual_seed(0), _mods(name, n, device)
    draw = lambda heads: torch.randn(1, heads, n, DIM, device=device, dtype=dtype, generator=generator)
    q, k, v, d_out = draw(HEADS), draw(1), draw(1), draw(HEADS)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = flexattn.stats().launches["hopper_backward"]
    out = flex_attention(*leaves, score_mod=of.score, mask_mod=of.mask, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, d_out)
    assert flexattn.stats().launches["hopper_backward"] == before + (device == "cuda")
    with torch.no_grad():
        which, (key, value) = _samples(n, device), (x[0, 0].double() for x in (k, v))
        heads = [_rows(q[0, h].double(), key, value, d_out[0, h].double(), of) for h in range(HEADS)]
        exact, fair = (_sampled(heads, key, value, which, of, t) for t in (torch.float64, dtype))
    found = grads[0][0][:, which], grads[1][0, 0][which], grads[2][0, 0][which]
    for what, ours, true, dense in zip(("dq", "dk", "dv"), found, exact, fair):
        assert_rule(f"{what}, {name}, {n}", ours, true, [dense], dtype)
        size, error, allowed = (x.norm(dim=-1) for x in (true, ours.double() - true, dense.double() - true))
        wrong = error > 3 * allowed + (1e-2 if dtype == torch.bfloat16 else 1e-5) * (size + size.mean())
        assert not wrong.any(), f"{what}, rows of {name} at {n}: {wrong.nonzero().tolist()}"
