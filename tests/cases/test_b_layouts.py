"""Cases users ran into, section B: strides, shared storage, alignment, broadcasting and batches that change.

Every case compares with the float64 oracle under the contract's error rule, or demands equality where the contract does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.errors import ShapeError
from flexattn.runtime.reference import oracle
from tests.cases.bounds import assert_each_within
from tests.helpers import (
    ALIGNED,
    assert_explains,
    assert_rule,
    causal,
    check,
    check_shared,
    dense,
    exact,
    guarded,
    make_qkv,
    nan_filled_allocations,
    on_devices,
    run,
    window,
)

BF16, F32 = torch.bfloat16, torch.float32


# ---------------------------------------------------------------- C14: fused projections and other strides
@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("upstream", ["contiguous", "transposed", "expanded"])
def test_c14_fused_projection(device, upstream, dtype) -> None:
    x = guarded((2, 70, 3, 4, 16), dtype=dtype, device=device, guard=ALIGNED).requires_grad_()
    qkv = q, k, v = tuple(part.transpose(1, 2) for part in x.unbind(2))
    out = flex_attention(q, k, v, mask_mod=causal)
    assert out.stride() == torch.empty(2, 70, 4, 16).transpose(1, 2).stride()  # query's order, as documented
    weight = torch.randn(2, 70, 4, 16, device=device).to(dtype).transpose(1, 2)
    weight = {
        "contiguous": weight.contiguous(),
        "transposed": weight,
        "expanded": torch.ones((), dtype=dtype, device=device).expand(weight.shape),  # what .sum() sends back
    }[upstream]
    with nan_filled_allocations():
        (grad,) = torch.autograd.grad(out, x, weight)
    leaf = x.detach().double().requires_grad_()
    expected, _ = oracle(*(part.transpose(1, 2) for part in leaf.unbind(2)), causal)
    (want,) = torch.autograd.grad(expected, leaf, weight.double())
    if dtype == F32:
        assert_each_within("out", out, expected)
        assert_each_within("gradient", grad, want)
        check(qkv, causal)
    else:
        packed = [part.detach().contiguous().requires_grad_() for part in qkv]
        dense_out = _dense_out(packed)
        fair = torch.stack(torch.autograd.grad(dense_out, packed, weight), 2).transpose(1, 3)
        assert_rule("out", out, expected, [dense_out], dtype)
        assert_rule("gradient of the projection", grad, want, [fair], dtype)


def _dense_out(qkv: Sequence[Tensor]) -> Tensor:
    """Causal attention in the inputs' type with a float32 softmax."""
    q, k, v = qkv
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    return torch.where(keep, scores, -torch.inf).softmax(-1).to(q.dtype) @ v


@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_c14_key_stored_transposed_and_odd_strides(device, dtype) -> None:
    q = guarded((2, 4, 50, 32), dtype=dtype, device=device)[..., ::2].requires_grad_()  # last stride 2
    k = guarded((2, 2, 16, 60), dtype=dtype, device=device).transpose(2, 3).requires_grad_()  # [batch, heads, dim, len]
    v = guarded((1, 2, 1, 24), dtype=dtype, device=device).expand(2, 2, 60, 24).requires_grad_()  # stride 0
    check((q, k, v), window(30))


# ---------------------------------------------------------------- C15: one storage
@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_c15_one_tensor_as_query_key_and_value(device, dtype) -> None:
    x = guarded((2, 3, 65, 16), dtype=dtype, device=device).requires_grad_()
    check_shared((x, x, x), x, lambda grads: grads[0] + grads[1] + grads[2], causal)


@on_devices
def test_c15_one_tensor_as_key_and_value(device) -> None:
    q, x, _ = make_qkv(2, (4, 2), (65, 70), (16, 16), device=device)
    check_shared((q, x, x), x, lambda grads: grads[1] + grads[2], causal)


# ---------------------------------------------------------------- C16: alignment
def at_the_end(shape: Sequence[int], offset: int, device: str) -> Tensor:
    """A bfloat16 tensor that ends where its memory does, `offset` elements behind a fresh one's place, NaN before it."""
    size = torch.Size(shape).numel()
    memory = torch.full((offset + size,), torch.nan, dtype=BF16, device=device)
    memory[offset:] = torch.randn(size, device=device).to(BF16)
    return memory[offset:].view(*shape)


@on_devices
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dim", [46, 64])
def test_c16_rows_and_storage_that_are_not_aligned(device, dim, offset) -> None:
    shapes = ((2, 4, 70, dim), (2, 2, 90, dim), (2, 2, 90, dim))
    qkv = [at_the_end(shape, offset, device).requires_grad_() for shape in shapes]
    bias = at_the_end((90,), offset, device).requires_grad_()
    check(qkv, lambda b, h, i, j: i + 20 >= j, lambda s, b, h, i, j: s + bias[j], captures=[bias])
    decode = [at_the_end(shape, offset, device) for shape in ((4, 16, 1, dim), (4, 4, 90, dim), (4, 4, 90, dim))]
    check(decode, lambda b, h, i, j: j < 85)


@on_devices
def test_c16_upstream_gradient_that_is_not_aligned(device) -> None:
    qkv = [x.detach().requires_grad_() for x in make_qkv(2, (4, 2), (70, 90), (64, 64), dtype=BF16, device=device)]
    out = flex_attention(*qkv, mask_mod=causal, enable_gqa=True)
    weight = at_the_end(out.shape, 1, device)
    with nan_filled_allocations():
        shifted = torch.autograd.grad(out, qkv, weight, retain_graph=True)
        aligned = torch.autograd.grad(out, qkv, weight.clone())
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    wanted = torch.autograd.grad(oracle(*doubles, causal)[0], doubles, weight.double())
    for got, other, want in zip(shifted, aligned, wanted):
        assert_rule("gradient", got, want, [other], BF16)


# ---------------------------------------------------------------- C17: key and value of batch one
@on_devices
@pytest.mark.parametrize("how", ["expanded", "as it is", "block mask"])
def test_c17_key_and_value_of_batch_one(device, how) -> None:
    q, k, v = make_qkv(4, (4, 2), (70, 150), (16, 24), kv_batch=1, device=device)
    given = (q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1)) if how == "expanded" else (q, k, v)
    masks: dict[str, Any] = {"mask_mod": causal}
    if how == "block mask":
        masks = {"block_mask": create_block_mask(causal, 4, None, 70, 150, device=device)}
    with nan_filled_allocations():
        out = flex_attention(*given, **masks, enable_gqa=True)
        weight = torch.randn_like(out)
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
    repeated = [x.detach().repeat(4, 1, 1, 1).requires_grad_() for x in (k, v)]
    again = flex_attention(q, *repeated, mask_mod=causal, enable_gqa=True)
    more = torch.autograd.grad((again * weight).sum(), repeated)
    expected, _ = oracle(q, k, v, causal)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *grads), (expected, *wanted)):
        assert_each_within(name, got, want)
    for name, got, want in zip(("dk", "dv"), grads[1:], more):
        assert_each_within(f"{name} as a sum over the batch", got, want.double().sum(0, keepdim=True))
    assert_each_within("out of repeated keys", again, expected)


# ---------------------------------------------------------------- C18: masks of batch and head
@on_devices
@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_c18_masks_broadcast(device, size) -> None:
    qkv = make_qkv(3, (2, 2), (12, 12), (32, 32), device=device)
    mask = lambda b, h, i, j: (i >= j) | ((b == 1) & (size[0] == 3)) | ((h == 1) & (size[1] == 2) & (j < 8))
    result = run(qkv, block_mask=create_block_mask(mask, *size, 12, 12, device=device))
    for name, want in exact(qkv, mask).named.items():
        assert_each_within(name, result.named[name], want)


@on_devices
@pytest.mark.parametrize("size", [(2, 1), (4, 1), (1, 4), (3, 3)])
def test_c18_masks_that_do_not_fit_raise_before_launch(device, size, fresh_stats) -> None:
    qkv = make_qkv(3, (2, 2), (12, 12), (32, 32), device=device)
    block_mask = create_block_mask(causal, *size, 12, 12, device=device)
    name, letter, wanted = ("batch", "B", 3) if size[0] not in (1, 3) else ("heads", "H", 2)
    with pytest.raises(ShapeError) as raised:
        flex_attention(*qkv, block_mask=block_mask)
    assert_explains(raised.value, f"block_mask's {name}", (*size, 12, 12), (3, 2, 12, 32), f"{letter}={wanted}", "None")
    assert flexattn.stats().launches.total() == 0
    assert flexattn.stats().builds.total() == 0


# ---------------------------------------------------------------- C20: a mask of each query head
@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("how", ["mask_mod", "block_mask"])
def test_c20_masks_of_a_group_are_not_merged(device, how, dtype) -> None:
    """Eight query heads over two key heads, each keeping its own eighth of the keys: no two of them share one."""
    mask = lambda b, h, i, j: j % 8 == h
    qkv = make_qkv(2, (8, 2), (1, 4096), (64, 64), dtype=dtype, device=device, guard=ALIGNED)
    if how == "mask_mod":
        check(qkv, mask)
    else:
        result = run(qkv, block_mask=create_block_mask(mask, None, 8, 1, 4096, device=device))
        expected, fair = exact(qkv, mask), dense(qkv, mask)
        assert_rule("out", result.out, expected.out, [x.out for x in fair], dtype)


# ---------------------------------------------------------------- C21: the batch shrinks
@on_devices
def test_c21_batch_shrinks(device, fresh_stats) -> None:
    cut = torch.empty(0)

    def mask(b, h, q_idx, kv_idx):
        return (kv_idx < cut[b]) | (q_idx >= kv_idx)

    builds = []
    for batch in (4, 3):
        cut = torch.randint(1, 30, (batch,)).to(device)
        check(make_qkv(batch, (2, 2), (40, 50), (16, 16), device=device), mask)
        builds.append(flexattn.stats().builds.total())
    assert builds[0] == builds[1]
    assert flexattn.stats().plans.total() <= 1
