"""The kernel that appends tokens to pages, in Triton's interpreter: the same bytes as torch's operations.

The interpreter does not round to bfloat16 and to 8 bits as GPUs do: those types get numbers here that need no rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flexattn import PagedKVCache
from flexattn.runtime import paged_cache
from flexattn.runtime.append_pages import by_kernel, by_torch

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ROUNDED_RIGHT = (torch.float32, torch.float16)


def numbers(*shape: int, exact: bool) -> Tensor:
    """Any numbers, an infinity and a NaN among them; or such of three bits, and some that are too large for 8 bits."""
    x = torch.randint(-7, 8, shape) * 2.0 ** torch.randint(-2, 4, shape) if exact else torch.randn(shape) * 200
    if x.numel():
        special = [59904.0, -59904.0] if exact else [torch.inf, torch.nan]
        x.view(-1)[:2] = torch.tensor(special)
    return x


def written(
    by: Callable[..., None], *, given: torch.dtype, counts: list[tuple[int, int]], **facts: Any
) -> list[Tensor]:
    """The bytes of both pools, zeros before, after steps of two requests of so many tokens each; equal ones come as a batch."""
    torch.manual_seed(0)
    cache = PagedKVCache(100, kv_heads=3, layers=2, device="cpu", max_requests=7, max_length=130, **facts)
    raw = [x.view(torch.uint8) if x.dtype.itemsize == 1 else x for x in (cache._k, cache._v)]
    raw[0].zero_(), raw[1].zero_()
    slots = [cache.allocate().slot for _ in range(5)][1:4:2]
    for step in counts:
        cache.reserve(slots, step)
        shape = (2, 3, step[0]) if step[0] == step[1] else (sum(step), 3)
        exact = cache._k.dtype not in ROUNDED_RIGHT
        k, v = (numbers(*shape, x.shape[-1], exact=exact).to(given) for x in (cache._k, cache._v))
        with mock.patch.object(paged_cache, "append_pages", by):
            cache.append(1, slots, k, None if facts.get("v_in_k") else v, None if step[0] == step[1] else step)
    return [x.contiguous().view(torch.uint8) for x in raw]


def check(given: torch.dtype = torch.float32, counts: Any = ((19, 0), (3, 70), (2, 2), (0, 0)), **facts: Any) -> None:
    facts = {"page_size": 16, "qk_dim": 24, "v_dim": 20, "dtype": torch.float32, **facts}
    for a, b in zip(*(written(by, given=given, counts=counts, **facts) for by in (by_torch, by_kernel))):
        assert a.any()
        assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 64, 672])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_page_sizes(page_size, layout) -> None:
    check(page_size=page_size, layout=layout)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *FP8])
def test_types(dtype, given) -> None:
    check(given, dtype=dtype, layout="NHD")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *FP8])
def test_scales(dtype) -> None:
    k_scale, v_scale = (
        (0.7, torch.tensor([0.3, 1.1, 0.6])) if dtype in ROUNDED_RIGHT else (0.5, torch.tensor([2.0, 0.25, 1.0]))
    )
    check(dtype=dtype, k_scale=k_scale, v_scale=v_scale)


def test_values_within_keys() -> None:
    check(torch.bfloat16, dtype=torch.bfloat16, qk_dim=144, v_dim=128, v_in_k=True)


@pytest.mark.parametrize("by", [by_torch, by_kernel])
def test_slots_and_counts_as_tensors(by) -> None:
    """A slot that nobody has gets nothing, and tokens behind all counts go nowhere."""
    cache = PagedKVCache(4, 8, kv_heads=1, qk_dim=16, dtype=torch.float32, device="cpu", max_requests=3, max_length=16)
    cache._k.zero_()
    cache.reserve([cache.allocate().slot], [10])
    k = torch.arange(1.0, 16)[:, None, None].expand(15, 1, 16)
    with mock.patch.object(paged_cache, "append_pages", by):
        cache.append(0, torch.tensor([2, 0]), k, k, torch.tensor([2, 10]))
    assert cache.view([0]).gathered(torch.float32)[0][0, 0, :10, 0].tolist() == list(range(3, 13))
    assert cache._k.sum() == sum(range(3, 13)) * 16
