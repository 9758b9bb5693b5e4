"""The real kernels on a GPU: the interpreter's cases in three data types, larger sizes, and the limits of addressing.

Every length and head dimension is in tests/cases.
"""

from __future__ import annotations

import math

import pytest
import torch

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.runtime.reference import oracle
from tests.helpers import is_same_but_for_order
from tests.runtime.kernel_cases import (
    CASES,
    Case,
    alibi,
    check,
    check_rows_of_one_key,
    dense_bias,
    documents,
    plain,
    relative_bias,
    softcap,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_memory_is_nan")]
GPU = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
causal = lambda b, h, i, j: i >= j
LARGE = {
    "causal": Case(2, 4, 2, 1027, 1300, 64, 64, plain(lambda b, h, i, j: i + 273 >= j)),
    "plain": Case(1, 3, 1, 515, 1025, 128, 128),
    "window": Case(1, 2, 2, 1500, 1500, 128, 64, plain(lambda b, h, i, j: (i >= j) & (i - j < 300))),
    "softcap": Case(1, 4, 4, 777, 777, 128, 128, softcap),
    "alibi": Case(2, 4, 2, 640, 640, 64, 64, alibi),
    "relative bias": Case(2, 2, 2, 300, 500, 64, 64, relative_bias),
    "dense bias": Case(1, 2, 2, 384, 520, 64, 64, dense_bias),
    "documents": Case(1, 2, 2, 900, 900, 128, 128, documents),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, dtype: torch.dtype) -> None:
    if name == "functions" and dtype == torch.float16:
        pytest.skip("the dense formula itself overflows float16 gradients here")
    check(CASES[name], GPU, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_larger_sizes(name: str, dtype: torch.dtype) -> None:
    check(LARGE[name], GPU, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_largest_head_dim(dtype: torch.dtype) -> None:
    check(Case(1, 1, 1, 100, 70, 512, 512, plain(causal)), GPU, dtype)


@pytest.mark.parametrize("group", [2, 3, 5, 7, 8, 16])
def test_any_group(group: int) -> None:
    mask = lambda b, h, i, j: (i >= j - 60) & ((i + j + h) % 7 != 0)
    check(Case(2, 2 * group, 2, 140, 190, 64, 64, plain(mask)), GPU, torch.bfloat16)


def test_strides_of_every_kind() -> None:
    fused = torch.randn(2, 200, 3, 2, 64, device=GPU, dtype=torch.bfloat16)
    q, k, v = (fused[:, :, n].transpose(1, 2) for n in range(3))
    transposed = k.transpose(2, 3).contiguous().transpose(2, 3)
    expanded = v[:, :1].expand(2, 2, 200, 64)
    odd = torch.randn(2 * 2 * 200 * 67 + 1, device=GPU, dtype=torch.bfloat16)[1:].view(2, 2, 200, 67)[..., :64]
    for tensors in ((q, k, v), (q, transposed, expanded), (odd, k, odd)):
        strided = [x.detach().requires_grad_() for x in tensors]
        packed = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in tensors]
        results = []
        for inputs in (strided, packed):
            out = flex_attention(*inputs, mask_mod=causal)
            results.append(
                [out, *torch.autograd.grad(out, inputs, torch.ones((), device=GPU, dtype=out.dtype).expand(out.shape))]
            )
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_nan_past_the_lengths_and_in_skipped_tiles_changes_no_bit() -> None:
    def once(poison: float) -> list[torch.Tensor]:
        torch.manual_seed(3)
        storage = [torch.randn(1, 2, 1024, 64, device=GPU, dtype=torch.bfloat16) for _ in range(3)]
        for x in storage:
            x[:, :, 900:] = poison
        storage[1][:, :, 256:512] = storage[2][:, :, 256:512] = poison
        qkv = [x[:, :, :900].detach().requires_grad_() for x in storage]
        out = flex_attention(*qkv, mask_mod=lambda b, h, i, j: (j < 256) | (j >= 512))
        return [out, *torch.autograd.grad(out.sum(), qkv)]

    for at, (clean, dirty) in enumerate(zip(once(0.0), once(math.nan))):
        assert (
            torch.equal(clean, dirty) if at != 1 else is_same_but_for_order(clean, dirty)
        )  # dq may be added in any order


def test_kept_read_out_of_range_is_nan_and_integers_are_zero() -> None:
    q = torch.randn(1, 1, 200, 64, device=GPU, dtype=torch.bfloat16)
    floats, ints = torch.zeros(100, device=GPU), torch.ones(100, dtype=torch.int64, device=GPU)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s + floats[i])
    assert torch.isfinite(out[:, :, :100]).all() and torch.isnan(out[:, :, 100:]).all()
    out = flex_attention(q, q, q, lambda s, b, h, i, j: torch.where(ints[j] == 1, s, -math.inf))
    torch.testing.assert_close(out.float(), oracle(q, q[:, :, :100], q[:, :, :100])[0].float(), atol=2e-2, rtol=0)


def test_more_heads_than_a_grid_dimension_holds() -> None:
    q = torch.randn(5, 16384, 3, 16, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    out = flex_attention(q, q, q, mask_mod=causal)
    grad = torch.autograd.grad(out.sum(), q)[0]
    tail = q.detach()[4:, 16380:].double().requires_grad_()
    right, _ = oracle(tail, tail, tail, causal)
    torch.testing.assert_close(out[4:, 16380:].double(), right, atol=3e-2, rtol=0)
    torch.testing.assert_close(grad[4:, 16380:].double(), torch.autograd.grad(right.sum(), tail)[0], atol=6e-2, rtol=0)


def test_offsets_past_32_bits_between_heads_and_inside_one() -> None:
    length, heads, dim = 300, 2, 64
    wide = torch.empty(length * 8 * (1 << 20), dtype=torch.bfloat16, device=GPU)  # 4.7 GiB
    for strides in ((1, 1 << 31, 256, 1), (1, 1 << 11, 8 << 20, 1)):
        views = [wide.as_strided((1, heads, length, dim), strides, offset) for offset in (0, 64, 128)]
        for view in views:
            view.copy_(torch.randn(view.shape))
        inputs = [view.detach().requires_grad_() for view in views]
        copies = [view.detach().contiguous().requires_grad_() for view in views]
        for a, b in zip(_all(inputs), _all(copies)):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def _all(qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    out = flex_attention(*qkv, mask_mod=causal)
    return [out, *torch.autograd.grad(out.float().square().sum(), qkv)]


def test_large_captured_table() -> None:
    table = torch.zeros(3, 1 << 30, dtype=torch.bfloat16, device=GPU)  # its last row starts past 2^31 elements
    table[2, -200:] = torch.randn(200, device=GPU)
    small = table[2, -200:].clone()
    start = (1 << 30) - 200
    q = torch.randn(1, 1, 200, 64, device=GPU, dtype=torch.bfloat16)
    a = flex_attention(q, q, q, lambda s, b, h, i, j: s + table[2, start + j])
    b = flex_attention(q, q, q, lambda s, b, h, i, j: s + small[j])
    torch.testing.assert_close(a, b, atol=1e-2, rtol=0)


def test_gradients_of_attention_are_the_same_in_every_deterministic_run() -> None:
    """Those of keys and values in every run."""
    q, k, v = (torch.randn(2, 8, 1000, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for same in (slice(None), slice(2, None)):
        torch.use_deterministic_algorithms(same == slice(None))
        try:
            first = _all([q, k, v])
            for _ in range(5):
                for a, b in zip(first[same], _all([q, k, v])[same]):
                    assert torch.equal(a, b)
        finally:
            torch.use_deterministic_algorithms(False)


def test_only_the_gradients_that_are_needed_cost_a_launch() -> None:
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    of_query, of_keys = ("hopper_query_gradient", "hopper_key_gradients") if is_hopper else ("dq", "dkdv")
    for wanted, kernel in enumerate((of_query, of_keys, of_keys, "dq")):
        qkv = [torch.randn(1, 2, 300, 64, device=GPU, dtype=torch.bfloat16) for _ in range(3)]
        bias = torch.randn(300, device=GPU)
        leaf = [*qkv, bias][wanted].requires_grad_()
        out = flex_attention(*qkv, lambda s, b, h, i, j: s + bias[j])
        flexattn.reset_stats()
        assert torch.isfinite(torch.autograd.grad(out.sum(), leaf)[0]).all()
        assert set(flexattn.stats().launches) == {"delta", kernel}


def test_numbers_lengths_and_batches_build_nothing_again() -> None:
    def call(window: int, batch: int, heads: int, length: int) -> None:
        q = torch.randn(batch, heads, length, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        out = flex_attention(q, q, q, mask_mod=lambda b, h, i, j: (i >= j) & (i - j < window))
        torch.autograd.grad(out.sum(), q)

    call(5, 1, 2, 333)
    call(2**31, 1, 2, 333)
    flexattn.reset_stats()
    calls = (0, 1, 1, 100), (1, 2, 3, 160), (16, 16, 1, 1024), (17, 3, 17, 77), (-1, 1, 16, 512), (2**31, 1, 1, 64)
    for window, batch, heads, length in calls:
        call(window, batch, heads, length)
    assert flexattn.stats().builds.total() == 0


def test_inputs_on_another_stream_and_empty_blocks() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        q = torch.randn(1, 2, 300, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        nothing = create_block_mask(lambda b, h, i, j: i < j - 100000, None, None, 300, 300, device=GPU)
        out = flex_attention(q, q, q, block_mask=nothing)
        grad = torch.autograd.grad(out.sum(), q)[0]
    stream.synchronize()
    assert (out == 0).all() and (grad == 0).all()


@pytest.mark.multigpu
def test_inputs_on_the_second_gpu_while_the_first_is_current() -> None:
    other = torch.device("cuda", 1)
    torch.cuda.set_device(0)
    check(Case(1, 2, 2, 300, 300, 64, 64, plain(causal)), other, torch.bfloat16)
    assert torch.cuda.current_device() == 0


def test_rows_of_one_key_are_exact() -> None:
    check_rows_of_one_key("cuda")
