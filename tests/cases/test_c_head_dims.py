"""Cases users ran into, section C: head dimensions, data types, precision and the base of the log-sum.

Every case compares with the float64 oracle under the contract's error rule, or demands equality where the contract does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from flexattn import AuxRequest, flex_attention
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import candidates
from flexattn.errors import UnsupportedError
from flexattn.runtime.reference import oracle
from tests.cases.bounds import assert_each_within
from tests.helpers import (
    ALIGNED,
    assert_explains,
    causal,
    check,
    check_shared,
    guarded,
    make_qkv,
    on_devices,
)

BF16, F32 = torch.bfloat16, torch.float32
in_both_dtypes = pytest.mark.parametrize("dtype", [BF16, F32])


# ---------------------------------------------------------------- C22: every head dimension
HEAD_DIMS = (4, 8, 16, 24, 31, 40, 46, 64, 72, 80, 96, 112, 121, 128, 160, 192, 224, 256, 320)


@on_devices
@in_both_dtypes
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_c22_head_dims(device, dim, dtype) -> None:
    """Forward and backward over two query heads of one key head, then one query a head against the same keys."""
    check(make_qkv(1, (2, 1), (200, 200), (dim, dim), dtype=dtype, device=device, guard=ALIGNED), causal)
    decode = make_qkv(4, (16, 4), (1, 200), (dim, dim), dtype=dtype, device=device, guard=ALIGNED, requires_grad=False)
    check(decode, lambda b, h, i, j: i + 189 >= j)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_c22_every_head_dim_has_tiles_on_every_device(arch) -> None:
    for kernel in ("forward", "dq", "dkdv"):
        for size in (2, 4):
            for dim in HEAD_DIMS:
                for q_len in (1, 200):
                    dims = {"qk_dim": dim, "v_dim": dim, "q_len": q_len}
                    assert candidates(kernel, target_of(arch), element_bytes=size, **dims)


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_c22_what_does_not_fit_says_so(kernel) -> None:
    with pytest.raises(UnsupportedError) as raised:
        candidates(kernel, target_of(90), element_bytes=4, qk_dim=2000, v_dim=1000, q_len=200)
    assert_explains(raised.value, kernel, "shared memory", 2048, 1024, "bfloat16", "BACKEND")


# ---------------------------------------------------------------- C23: value of another dimension
DIMS = ((8, 16), (16, 8), (64, 96), (128, 512), (192, 128))
MORE_DIMS = ((72, 80), (121, 128), (160, 192), (320, 64))  # pairs of paddings that only 16-bit kernels tell apart


@on_devices
@pytest.mark.parametrize(
    ("dims", "dtype"), [*((d, t) for d in DIMS for t in (BF16, F32)), *((d, BF16) for d in MORE_DIMS)], ids=str
)
def test_c23_value_of_another_dim(device, dims, dtype) -> None:
    qkv = make_qkv(1, (2, 1), (70, 90), dims, dtype=dtype, device=device, guard=ALIGNED)
    result = check(qkv, causal)
    assert result.out.shape == (1, 2, 70, dims[1])


@on_devices
@in_both_dtypes
def test_c23_value_is_a_view_of_key(device, dtype) -> None:
    """Absorbed latent attention: key is [latent | rotary], value the latent part of the same storage."""
    x = guarded((2, 1, 90, 192), dtype=dtype, device=device, guard=ALIGNED).requires_grad_()
    q = guarded((2, 8, 70, 192), dtype=dtype, device=device, guard=ALIGNED).requires_grad_()
    check_shared((q, x, x[..., :128]), x, lambda grads: grads[1] + F.pad(grads[2], (0, 64)), causal)


@on_devices
def test_c23_absorbed_latent_attention(device) -> None:
    latent = guarded((2, 1, 90, 576), dtype=BF16, device=device)
    q = guarded((2, 16, 20, 576), dtype=BF16, device=device)
    check((q, latent, latent[..., :512]), lambda b, h, i, j: i + 70 >= j)
    latent = guarded((1, 1, 500, 576), dtype=BF16, device=device)
    q = guarded((1, 16, 1, 576), dtype=BF16, device=device)
    check((q, latent, latent[..., :512]))


# ---------------------------------------------------------------- C24: float32 and the log-sum
@on_devices
@pytest.mark.parametrize("q_len", [1, 300, 512])
def test_c24_float32_precision_and_natural_lse(device, q_len) -> None:
    mask = lambda b, h, i, j: i + (512 - q_len) >= j
    qkv = make_qkv(1, (2, 2), (q_len, 512), (64, 64), device=device, guard=ALIGNED)
    result = check(qkv, mask)
    with torch.no_grad():
        options = {
            "FORCE_USE_FLEX_ATTENTION": True
        }  # as with a gradient; few queries without one have a kernel of their own
        out, aux = flex_attention(*qkv, mask_mod=mask, return_aux=AuxRequest(lse=True), kernel_options=options)
    assert torch.equal(out, result.out)
    assert torch.equal(aux.lse, result.lse)
    expected, expected_lse = oracle(*qkv, mask)
    assert (out - expected).abs().max() <= 2e-5
    assert_each_within("lse", aux.lse, expected_lse)  # 0, or a base of 2, which is larger by 1 / ln 2, would be far off
    assert expected_lse.abs().max() > 1
    assert aux.lse.dtype == F32
    assert aux.lse.shape == (1, 2, q_len)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 512])
def test_c24_tf32_only_when_asked(q_len) -> None:
    q, k, v = make_qkv(4, (8, 8), (q_len, 512), (64, 64), device="cuda", guard=ALIGNED, requires_grad=False)
    mask = lambda b, h, i, j: i + (512 - q_len) >= j
    expected, _ = oracle(q, k, v, mask)
    errors = []
    for precision in ("highest", "high", "highest"):
        with matmul_precision(precision):
            errors.append((flex_attention(q, k, v, mask_mod=mask) - expected).abs().max().item())
    assert max(errors[0], errors[2]) <= 2e-5
    assert 10 * max(errors[0], errors[2]) < errors[1] < 2e-2
