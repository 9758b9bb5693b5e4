"""A prepared call: the same results as the ordinary one, for tensors of one layout, with what it promises checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexattn
from flexattn import AuxRequest, flex_attention, prepare_attention
from flexattn.errors import ShapeError, StaleMaskError


def tensors(device: torch.device, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    shapes = (2, 6, 77, 64), (2, 2, 131, 64), (2, 2, 131, 96)
    return [torch.randn(shape, device=device, dtype=dtype, **options) for shape in shapes]


def mods(device: torch.device) -> dict[str, Any]:
    slopes, cap = torch.rand(6, device=device), 7.0
    return {
        "score_mod": lambda s, b, h, i, j: cap * torch.tanh(s / cap) + slopes[h] * (j - i),
        "mask_mod": lambda b, h, i, j: (i - j < 50) & (i + 60 >= j),
    }


@pytest.mark.parametrize("names", [(), ("score_mod",), ("mask_mod",), ("score_mod", "mask_mod")])
def test_results_are_those_of_the_ordinary_call(device: torch.device, names: tuple[str, ...]) -> None:
    given = {name: mods(device)[name] for name in names}
    options = {"enable_gqa": True, "scale": 0.2, "return_aux": AuxRequest(lse=True, max_scores=True), **given}
    attention = prepare_attention(*tensors(device), **options)
    for _ in range(3):
        qkv = tensors(device)
        out, aux = attention(*qkv)
        wanted, wanted_aux = flex_attention(*qkv, **options)
        assert torch.equal(out, wanted) and torch.equal(aux.lse, wanted_aux.lse)
        assert torch.equal(aux.max_scores, wanted_aux.max_scores)
    assert torch.equal(prepare_attention(*qkv, enable_gqa=True)(*qkv), flex_attention(*qkv, enable_gqa=True))


def test_gradients_flow_as_usual(device: torch.device) -> None:
    bias = torch.randn(131, device=device, requires_grad=True)
    score = lambda s, b, h, i, j: s + bias[j]
    attention = prepare_attention(*tensors(device), score, enable_gqa=True)
    qkv = tensors(device, requires_grad=True)
    found = torch.autograd.grad(attention(*qkv).square().sum(), (*qkv, bias))
    wanted = torch.autograd.grad(flex_attention(*qkv, score, enable_gqa=True).square().sum(), (*qkv, bias))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert not attention(*qkv).requires_grad


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "order"])
def test_another_layout_is_refused(device: torch.device, change: str) -> None:
    q, k, v = tensors(device)
    attention = prepare_attention(q, k, v, enable_gqa=True)
    other = {
        "shape": (q[:, :, 1:], k, v), "strides": (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        "dtype": (q, k, v.half()), "order": (k, q, v),
    }[change]  # fmt: skip
    with pytest.raises(ShapeError, match=r"the call was prepared for another (query|key|value)"):
        attention(*other)
    assert attention(q, k, v).shape == (2, 6, 77, 96)


def test_captured_tensors_of_a_score_are_read_at_each_call_and_those_of_a_mask_must_not_change(
    device: torch.device,
) -> None:
    q, k, v = tensors(device)
    slopes, ids = torch.rand(6, device=device), torch.arange(131, device=device) // 40
    attention = prepare_attention(
        q, k, v, lambda s, b, h, i, j: s * slopes[h], mask_mod=lambda b, h, i, j: ids[i] == ids[j], enable_gqa=True
    )
    before = attention(q, k, v)
    slopes.mul_(2)
    after = attention(q, k, v)
    wanted = flex_attention(
        q, k, v, lambda s, b, h, i, j: s * slopes[h], mask_mod=lambda b, h, i, j: ids[i] == ids[j], enable_gqa=True
    )
    assert torch.equal(after, wanted) and not torch.equal(before, after)
    ids.zero_()
    with pytest.raises(StaleMaskError):
        attention(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [(), ("score_mod", "mask_mod")])
def test_one_kernel_and_nothing_else_on_a_gpu(names: tuple[str, ...]) -> None:
    gpu = torch.device("cuda", 0)
    given = {name: mods(gpu)[name] for name in names}
    attention = prepare_attention(*tensors(gpu, torch.bfloat16), enable_gqa=True, **given)
    attention(*tensors(gpu, torch.bfloat16))
    for _ in range(3):
        qkv = tensors(gpu, torch.bfloat16)
        flexattn.reset_stats()
        out = attention(*qkv)
        seen = flexattn.stats()
        assert seen.launches.total() == 1 and seen.traces.total() == seen.plans.total() == seen.builds.total() == 0
        assert torch.equal(out, flex_attention(*qkv, enable_gqa=True, **given))
