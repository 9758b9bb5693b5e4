"""Cases that the generated kernels must get right, for the interpreter and for GPUs alike, and how a case is judged.

Each case is made from sizes and two plain functions; right is what `reference.oracle` says in float64, gradients included.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn import AuxRequest, flex_attention
from flexattn.runtime.reference import oracle
from tests.helpers import dense, weights_for

Mod = Callable[..., Any]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def plain(mask: Mod | None = None, score: Mod | None = None) -> Any:
    return lambda device, case: (score, mask, [])


PLAIN = plain()


@dataclass(frozen=True)
class Case:
    """Sizes, and a function (device, case) -> (score_mod, mask_mod, captured tensors that need a gradient)."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int = 16
    v_dim: int = 16
    make: Callable[[torch.device, Case], tuple[Mod | None, Mod | None, list[Tensor]]] = PLAIN
    kv_batch: int | None = None
    scale: float | None = None


def _leaf(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).to(device).requires_grad_()


def softcap(device: torch.device, case: Case) -> Any:
    cap = 3.0
    return (lambda s, b, h, i, j: cap * torch.tanh(s / cap)), (lambda b, h, i, j: i >= j), []


def alibi(device: torch.device, case: Case) -> Any:
    slope = _leaf(device, case.q_heads)
    return (lambda s, b, h, i, j: s + slope[h] * (j - i) * 0.1), (lambda b, h, i, j: i >= j), [slope]


def relative_bias(device: torch.device, case: Case) -> Any:
    table = _leaf(device, case.q_heads, case.q_len + case.kv_len)
    return (lambda s, b, h, i, j: s + table[h, i - j + case.kv_len]), None, [table]


def dense_bias(device: torch.device, case: Case) -> Any:
    bias = _leaf(device, case.kv_len, case.q_len, dtype=torch.bfloat16)
    view = bias.t()
    return (lambda s, b, h, i, j: s + view[i, j]), (lambda b, h, i, j: (i + j) % 3 != 1), [bias]


def scalar_and_vectors(device: torch.device, case: Case) -> Any:
    temperature, rows, keys = _leaf(device), _leaf(device, case.q_len), _leaf(device, case.batch, case.kv_len)
    return (lambda s, b, h, i, j: s * temperature + rows[i] * keys[b, j]), None, [temperature, rows, keys]


def scalar_conditions(device: torch.device, case: Case) -> Any:
    """Conditions on batch and head alone, of integer and boolean tables (the interpreter mistypes float ones)."""
    signs, flags = torch.tensor([1, -1, 2][: case.batch]).to(device), (torch.arange(case.q_heads) % 2 == 0).to(device)
    return None, (lambda b, h, i, j: (signs[b] > 0) & (i >= j) | flags[h] & (j < 7) | (h * 2 > b) & (i == j)), []


def documents(device: torch.device, case: Case) -> Any:
    ids = (torch.arange(max(case.q_len, case.kv_len)) // 13).int().to(device)
    return None, (lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)), []


def per_head_window(device: torch.device, case: Case) -> Any:
    widths = (torch.arange(case.q_heads) * 7 + 3).to(device)
    return None, (lambda b, h, i, j: (i >= j) & (i - j < widths[h])), []


def per_batch_length(device: torch.device, case: Case) -> Any:
    lengths = torch.tensor([(case.kv_len * (n + 1)) // (case.batch + 1) for n in range(case.batch)]).to(device)
    return None, (lambda b, h, i, j: j < lengths[b]), []


def short_buffer(device: torch.device, case: Case) -> Any:
    """Reads past the end only where the mask drops the score."""
    size = case.kv_len - 10
    keys = _leaf(device, size)
    score = lambda s, b, h, i, j: s + keys[j]
    score.oracle = lambda s, b, h, i, j: s + keys[torch.clamp(j, max=size - 1)]  # type: ignore[attr-defined]
    return score, (lambda b, h, i, j: (j < size) & (i >= j)), [keys]


def negative_index(device: torch.device, case: Case) -> Any:
    table = _leaf(device, case.q_len + case.kv_len)
    return (lambda s, b, h, i, j: s + table[j - i]), None, [table]


def boolean_table(device: torch.device, case: Case) -> Any:
    keep = torch.rand(case.q_len, case.kv_len) < 0.3
    keep = keep.to(device)
    return None, (lambda b, h, i, j: keep[i, j]), []


def poisonous(device: torch.device, case: Case) -> Any:
    """Infinite or NaN scores and derivatives where the mask drops them."""
    return (lambda s, b, h, i, j: s + torch.log((i - j).float()) + 1.0 / (i - j)), (lambda b, h, i, j: i > j), []


def minus_infinity(device: torch.device, case: Case) -> Any:
    """A mask spelled in the score; the first rows keep nothing."""
    return (lambda s, b, h, i, j: torch.where((i >= j) & (i > 4), s * 0.5, -math.inf)), None, []


def floors(device: torch.device, case: Case) -> Any:
    score = lambda s, b, h, i, j: s + (i - j) // 3 * 0.1 - ((j - i) % 5) * 0.2
    return score, (lambda b, h, i, j: (i - j) // 4 != -1), []


def functions(device: torch.device, case: Case) -> Any:
    """Every function of the table with a derivative, each on a range where it has one."""

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = torch.sigmoid(s) + 0.5
        y = torch.exp(-x) + torch.log(x) + torch.sqrt(x) + torch.rsqrt(x) + torch.erf(s) + torch.exp2(-x)
        y = y + torch.log2(x) + torch.expm1(-x) + torch.log1p(x) + torch.sin(s) + torch.cos(s) + torch.abs(s)
        y = y + x**2.5 + torch.maximum(s, x)
        return 0.3 * (y + torch.minimum(s, -x) + torch.clamp(s, -0.5, 0.5) + torch.round(s) + torch.floor(s))

    return score, None, []


CASES: dict[str, Case] = {
    "plain": Case(1, 2, 2, 37, 53),
    "tail and dims": Case(2, 2, 2, 41, 67, 20, 24),
    "wide head": Case(1, 1, 1, 33, 40, 40, 72),
    "group of three": Case(2, 6, 2, 37, 45, make=plain(lambda b, h, i, j: i >= j - 5)),
    "heads differ": Case(1, 4, 2, 40, 70, make=per_head_window),
    "batches differ": Case(3, 2, 1, 20, 45, make=per_batch_length),
    "shared keys": Case(3, 4, 2, 21, 45, make=plain(lambda b, h, i, j: (i + 20 - j) % (b + h + 2) != 0), kv_batch=1),
    "empty rows": Case(1, 2, 2, 45, 40, make=plain(lambda b, h, i, j: i - 20 >= j)),
    "empty columns": Case(1, 2, 2, 40, 90, make=plain(lambda b, h, i, j: (i >= j) & (j != 7))),
    "nothing kept": Case(1, 1, 1, 20, 40, make=plain(lambda b, h, i, j: i < j - 1000)),
    "window": Case(1, 2, 2, 100, 100, make=plain(lambda b, h, i, j: (i >= j) & (i - j < 21))),
    "many runs": Case(1, 1, 1, 40, 300, make=plain(lambda b, h, i, j: (j // 32) % 2 == 0)),
    "negative scale": Case(1, 2, 2, 37, 33, scale=-0.7, make=plain(lambda b, h, i, j: i >= j)),
    "zero scale": Case(1, 1, 1, 17, 33, scale=0.0),
    "large scores": Case(1, 1, 1, 40, 40, scale=30.0),
    "truth of scalars": Case(
        2, 2, 2, 20, 33, make=plain(lambda b, h, i, j: ((h == 0) | (i >= j)) & ~((b == 1) & (j > 9)))
    ),
    "softcap": Case(1, 2, 1, 40, 45, make=softcap),
    "alibi": Case(2, 4, 2, 33, 40, make=alibi),
    "relative bias": Case(2, 3, 1, 33, 50, make=relative_bias),
    "dense bias": Case(1, 2, 2, 40, 37, make=dense_bias),
    "scalar and vectors": Case(2, 2, 2, 30, 40, make=scalar_and_vectors),
    "scalar conditions": Case(3, 2, 2, 33, 40, make=scalar_conditions),
    "documents": Case(1, 2, 2, 60, 60, make=documents),
    "short buffer": Case(1, 1, 1, 60, 60, make=short_buffer),
    "negative index": Case(1, 1, 1, 40, 33, make=negative_index),
    "boolean table": Case(1, 1, 1, 40, 45, make=boolean_table),
    "poisonous": Case(1, 2, 2, 45, 45, make=poisonous),
    "minus infinity": Case(1, 1, 1, 45, 45, make=minus_infinity),
    "floors": Case(1, 1, 1, 40, 45, make=floors),
    "functions": Case(1, 1, 1, 20, 33, make=functions),
    "constant score": Case(1, 1, 1, 20, 33, make=plain(score=lambda s, b, h, i, j: 0.25)),
    "score of keys": Case(1, 1, 1, 20, 33, make=plain(score=lambda s, b, h, i, j: j * 0.1)),
    "integer score": Case(1, 1, 1, 20, 33, make=plain(score=lambda s, b, h, i, j: s.to(torch.float16) * 2 + (i > j))),
}


def tensors_of(case: Case, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v that need gradients."""
    kv_batch = case.kv_batch or case.batch
    shapes = [
        (case.batch, case.q_heads, case.q_len, case.qk_dim),
        (kv_batch, case.kv_heads, case.kv_len, case.qk_dim),
        (kv_batch, case.kv_heads, case.kv_len, case.v_dim),
    ]
    return [torch.randn(s).to(device=device, dtype=dtype).requires_grad_() for s in shapes]


def run(case: Case, qkv: list[Tensor], mods: tuple[Mod | None, Mod | None], **options: Any) -> tuple[Tensor, Tensor]:
    """flex_attention on the kernels -> (out, lse)."""
    score, mask = mods
    out, aux = flex_attention(
        *qkv, score_mod=score, mask_mod=mask, scale=case.scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True), kernel_options={"BACKEND": "TRITON", **options},
    )  # fmt: skip
    return out, aux.lse


def gradients(out: Tensor, lse: Tensor, inputs: list[Tensor], weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Gradients of sum(out * w) + sum(lse * w'), over rows that have a key; zeros where an input does not matter."""
    finite = torch.isfinite(lse)
    loss = (out * weights[0].to(out.dtype)).sum() + (torch.where(finite, lse, 0.0) * weights[1].to(lse.dtype)).sum()
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


def check(
    case: Case, device: torch.device, dtype: torch.dtype = torch.float32, *, draws: int = 1, **options: Any
) -> None:
    """Runs a case and compares out, lse and every gradient with the oracle. Several draws of its tensors are judged together: an error
    of one number, as the gradient of a captured scalar is, says little alone."""
    drawn = [_draw(case, device, dtype, options) for _ in range(draws)]
    for parts in zip(*drawn):
        name, *tensors = ([part[at] for part in parts] for at in range(4))
        actual, wanted = map(torch.stack, tensors[:2])
        assert_close(name[0], actual, wanted, [torch.stack(rounded) for rounded in zip(*tensors[2])])


def _draw(
    case: Case, device: torch.device, dtype: torch.dtype, options: dict[str, Any]
) -> list[tuple[str, Tensor, Tensor, tuple[Tensor, ...]]]:
    """Of each result and gradient: its name, what came, what is right, and what the dense formulas give."""
    score, mask, leaves = case.make(device, case)
    qkv = tensors_of(case, dtype, device)
    inputs = [*qkv, *leaves]
    out, lse = run(case, qkv, (score, mask), **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    score = getattr(score, "oracle", score)
    right, right_lse = oracle(*qkv, mask, score, scale=case.scale)
    weights = weights_for(qkv[0], qkv[2])
    got = [out, lse, *gradients(out, lse, inputs, weights)]
    wanted = [right, right_lse, *gradients(right, right_lse, inputs, weights)]
    fair = dense(qkv, mask, score, captures=leaves, scale=case.scale)
    rounded = zip(*([x.out, x.lse, *x.grads] for x in fair))
    names = ["out", "lse", "dq", "dk", "dv", *(f"capture {i}" for i in range(len(leaves)))]
    return list(zip(names, got, wanted, rounded))


def assert_close(name: str, actual: Tensor, wanted: Tensor, rounded: Sequence[Tensor]) -> None:
    """Infinite where wanted; elsewhere within twice the larger error of the dense formulas, plus 2e-5 (1e-3 in half types)."""
    infinite = torch.isinf(wanted)
    assert torch.equal(torch.isinf(actual), infinite), f"{name}: infinities differ"
    zero = torch.zeros((), dtype=torch.float64, device=wanted.device)
    a, b, *fair = (torch.where(infinite, zero, x.double()) for x in (actual, wanted, *rounded))
    error = (a - b).abs()
    size = max(1.0, b.abs().max().item() if b.numel() else 1.0)
    half = 8e-3 if name.startswith("capture") else 1e-3  # captured gradients are sums, which round once
    floor = 2e-5 if actual.dtype.itemsize == 4 else half
    cut_off = actual.dtype == torch.bfloat16 and INTERPRETING  # which does not round
    allowance = 4 if cut_off else 2
    limit = allowance * max((c - b).abs().max().item() for c in fair) + floor * size
    assert not torch.isnan(error).any(), f"{name}: NaN"
    assert error.max().item() <= limit, f"{name}: error {error.max().item():.2e} above {limit:.2e}"


def check_rows_of_one_key(device: str) -> None:
    """float32: such a row gives back its value, its log-sum is its score, and no gradient reaches query or key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, n, 16, device=device, requires_grad=True) for n in (71, 83, 83))
    slopes = torch.rand(3, device=device) * 30  # scores of up to a few thousand, where a rounding is large
    out, aux = flex_attention(
        q, k, v, lambda s, b, h, i, j: s + slopes[h] * j, mask_mod=lambda b, h, i, j: i == j,
        return_aux=AuxRequest(lse=True, max_scores=True), kernel_options={"BACKEND": "TRITON"},
    )  # fmt: skip
    assert torch.equal(out, v[:, :, :71])
    assert torch.equal(aux.lse, aux.max_scores)
    weight = torch.randn_like(out)
    d_q, d_k, d_v = torch.autograd.grad((out * weight).sum(), (q, k, v))
    assert not d_q.any() and not d_k.any()
    torch.testing.assert_close(d_v[:, :, :71], weight, rtol=1e-3, atol=0)  # kernels may round such a score differently
    assert not d_v[:, :, 71:].any()
