"""Cases users ran into, section A: rows, blocks and lengths that are masked, and the range of the softmax.

Every case compares with the float64 oracle under the contract's error rule, or demands equality where the contract does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention
from flexattn.errors import ShapeError
from tests.cases.bounds import assert_each_within, assert_half_within
from tests.helpers import (
    ALIGNED,
    Result,
    assert_explains,
    assert_rule,
    causal,
    check,
    dense,
    differentiate,
    exact,
    guarded,
    kept_pairs,
    make_qkv,
    mean_error,
    nan_filled_allocations,
    on_devices,
    run,
    weights_for,
    window,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def zero(x: Tensor) -> bool:
    """Literally 0 everywhere, which NaN is not."""
    return torch.equal(x, torch.zeros_like(x))


# ---------------------------------------------------------------- C01: empty leading rows
@on_devices
def test_c01_empty_leading_rows(device) -> None:
    q, k, v = make_qkv(2, (2, 2), (256, 256), (64, 64), dtype=BF16, device=device, guard=ALIGNED)
    mask = lambda b, h, i, j: (i >= j) & (i >= 64)
    whole = check((q, k, v), mask)
    assert zero(whole.out[:, :, :64])
    assert torch.isneginf(whole.lse[:, :, :64]).all()
    assert zero(whole.grads[0][:, :, :64])
    weight, lse_weight = weights_for(q, v)
    rows = q.detach()[:, :, 64:].requires_grad_()
    with nan_filled_allocations():
        out, aux = flex_attention(rows, k, v, mask_mod=lambda b, h, i, j: i + 64 >= j, return_aux=AuxRequest(lse=True))
        part = differentiate(out, aux.lse, (rows, k, v), (weight[:, :, 64:], lse_weight[:, :, 64:]))
    expected, fair = exact((q, k, v), mask), dense((q, k, v), mask)
    for i, name in enumerate(("gradient of key", "gradient of value"), start=1):  # as if the empty rows were not there
        assert torch.isfinite(part.grads[i]).all()
        assert_rule(name, part.grads[i], expected.grads[i], [x.grads[i] for x in fair], BF16)
    assert_rule("out", part.out, expected.out[:, :, 64:], [x.out[:, :, 64:] for x in fair], BF16)


# ---------------------------------------------------------------- C03: nothing kept, and keys that nobody reads
def block_lists(columns: Sequence[int], device: str) -> BlockMask:
    """Blocks of 128 over 300 x 300: the listed columns of every row as full blocks, no partial ones."""
    none = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    count, index = torch.full_like(none, len(columns)), torch.zeros(1, 1, 3, 3, dtype=torch.int32, device=device)
    index[..., : len(columns)] = torch.tensor(columns, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(none, torch.zeros_like(index), count, index, BLOCK_SIZE=128, seq_lengths=(300, 300))


@on_devices
@pytest.mark.parametrize("how", ["never", "constant", "score", "no blocks"])
def test_c03_nothing_is_kept(device, how) -> None:
    options: dict[str, Any] = {
        "never": {"mask_mod": lambda b, h, i, j: i < 0},
        "constant": {"mask_mod": lambda b, h, i, j: False},
        "score": {"score_mod": lambda s, b, h, i, j: torch.where(i < 0, s, -math.inf)},
        "no blocks": {"block_mask": block_lists((), device)},
    }[how]
    if how == "no blocks":
        assert options["block_mask"].sparsity() == 100
    result = run(make_qkv(2, (4, 2), (300, 300), (32, 48), dtype=F16, device=device), **options)
    assert zero(result.out)
    assert torch.isneginf(result.lse).all()
    assert all(zero(g) for g in result.grads)


@on_devices
@pytest.mark.parametrize("how", ["mask_mod", "block lists"])
def test_c03_gradients_of_keys_that_nobody_reads_are_written(device, how) -> None:
    qkv = make_qkv(2, (4, 2), (300, 300), (32, 48), dtype=F16, device=device)
    mask = lambda b, h, i, j: (j < 128) | (j >= 256)
    if how == "mask_mod":
        result = check(qkv, mask)
    else:
        result = run(qkv, block_mask=block_lists((0, 2), device))
        for name, want in exact(qkv, mask).named.items():
            assert_half_within(name, result.named[name], want, [x.named[name] for x in dense(qkv, mask)])
    assert zero(result.grads[1][:, :, 128:256])
    assert zero(result.grads[2][:, :, 128:256])
    assert all((g[:, :, :128].abs().amax(-1) > 0).all() for g in result.grads[1:])


# ---------------------------------------------------------------- C04: NaN that must not leak
@on_devices
def test_c04_nan_in_a_block_that_others_skip(device) -> None:
    """Rows of other tiles than the block's own and the next one never visit it, and the keys they do visit are as clean."""
    clean = make_qkv(1, (2, 2), (1024, 1024), (32, 32), device=device)
    for start in (0, 384, 896):
        rows = torch.ones(1024, dtype=torch.bool, device=device)
        rows[start : start + 256] = False
        keys = torch.ones(1024, dtype=torch.bool, device=device)
        keys[max(start - 128, 0) : start + 256] = False  # those that a spoiled row reads too
        dirty = [x.detach().clone() for x in clean]
        for x in dirty[1:]:
            x[:, :, start : start + 128] = math.nan
        pairs = zip(*(_results_of(qkv, rows, keys) for qkv in (clean, [x.requires_grad_() for x in dirty])))
        for want, got in pairs:
            assert torch.isfinite(got).all()
            assert torch.equal(got, want)


def _results_of(qkv: Sequence[Tensor], rows: Tensor, keys: Tensor) -> list[Tensor]:
    """out, lse and gradients of these rows and keys in a window of 128, for a loss over these rows."""
    with nan_filled_allocations():
        out, aux = flex_attention(*qkv, mask_mod=window(128), return_aux=AuxRequest(lse=True))
        loss = out[:, :, rows].square().sum() + aux.lse[:, :, rows].sum()
        dq, dk, dv = torch.autograd.grad(loss, list(qkv))
    return [x[:, :, at] for x, at in ((out, rows), (aux.lse, rows), (dq, rows), (dk, keys), (dv, keys))]


@on_devices
@pytest.mark.parametrize("q_len", [1, 200])
def test_c04_nan_behind_the_real_length(device, q_len) -> None:
    """200 rows in storage for 256."""
    results = []
    for tail in (0.0, math.nan):
        torch.manual_seed(1)
        memory = torch.randn(3, 2, 4, 256, 32, device=device)
        memory[..., 200:, :] = tail
        qkv = [x[:, :, :n].detach().requires_grad_() for x, n in zip(memory, (q_len, 200, 200))]
        results.append(run(qkv, lambda b, h, i, j: i + (200 - q_len) >= j))
    for name, clean in results[0].named.items():
        assert torch.isfinite(results[1].named[name]).all()
        assert torch.equal(clean, results[1].named[name])


# ---------------------------------------------------------------- C05: floors as in Python
FLOORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "operators": (lambda x, n: x // n, lambda x, n: x % n),
    "torch.div": (lambda x, n: torch.div(x, n, rounding_mode="floor"), lambda x, n: x % n),
    "floor_divide": (torch.floor_divide, torch.remainder),
}


@on_devices
def test_c05_floor_semantics(device) -> None:
    for name, (div, mod) in FLOORS.items():
        mask = lambda b, h, i, j: (div(i - j, 4) == -1) | (mod(i - j, 4) == 3) | (i == j)
        assert kept_pairs(mask, 257, 257, device) == 17531, name  # cutting off towards 0, as C does, would keep 9455
        assert int(create_mask(mask, None, None, 257, 257, device=device).sum()) == 17531, name
        score = lambda s, b, h, i, j: s + 0.1 * div(i - j, 4) + 0.2 * mod(i - j, 5)
        check(make_qkv(1, (1, 1), (257, 257), (16, 16), device=device), None, score)


# ---------------------------------------------------------------- C06: extreme logits
@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("keys", [("low", "high"), ("mixed",)], ids=" and ".join)
def test_c06_extreme_logits(device, keys, dtype) -> None:
    for kind in keys:
        for q_len in (1, 40):
            _check_extreme(q_len, kind, dtype, device)


def _check_extreme(q_len: int, keys: str, dtype: torch.dtype, device: str) -> None:
    """Every score is -72000 or 72000; of mixed keys the mask keeps the low half."""
    q = torch.full((1, 1, q_len, 64), 30.0, dtype=dtype, device=device).requires_grad_()
    k = torch.full((1, 1, 8, 64), 300.0 if keys == "high" else -300.0, dtype=dtype, device=device)
    v = guarded((1, 1, 8, 64), dtype=dtype, device=device)
    mask, kept = None, 8
    if keys == "mixed":
        k[:, :, 4:], mask, kept = 300.0, (lambda b, h, i, j: j < 4), 4
    score = 72000.0 if keys == "high" else -72000.0
    leaves = (q, k.requires_grad_(), v.requires_grad_())
    with nan_filled_allocations():
        out, aux = flex_attention(*leaves, mask_mod=mask, return_aux=AuxRequest(lse=True, max_scores=True))
        grads = torch.autograd.grad(out.float().sum(), leaves)
    mean = v[:, :, :kept].double().mean(2, keepdim=True).expand(out.shape)
    assert (out - mean).abs().max() < (1e-6 if dtype == F32 else 0.01)
    assert (aux.lse - (score + math.log(kept))).abs().max() < 0.01  # float32 has steps of 0.008 there
    assert (aux.max_scores - score).abs().max() <= (0 if dtype == F32 else 0.01)
    assert all(torch.isfinite(g).all() for g in grads)
    share = q_len / kept  # what a value gets from the rows, as exactly as an lse with such steps allows
    assert (grads[2][:, :, :kept] - share).abs().max() < 0.02 * share
    assert zero(grads[1][:, :, kept:])
    assert zero(grads[2][:, :, kept:])


# ---------------------------------------------------------------- C08: bottom-right causal
@on_devices
@pytest.mark.parametrize("how", ["mask_mod", "score_mod", "block_mask"])
def test_c08_bottom_right_causal_with_empty_rows(device, how) -> None:
    mask = lambda b, h, i, j: i - 96 >= j - 64
    score = lambda s, b, h, i, j: torch.where(i - 96 >= j - 64, s, -math.inf)
    qkv = make_qkv(2, (2, 1), (96, 64), (32, 48), device=device)
    if how == "block_mask":
        result = run(qkv, block_mask=create_block_mask(mask, None, None, 96, 64, device=device))
        for name, want in exact(qkv, mask).named.items():
            assert_each_within(name, result.named[name], want)
    else:
        result = check(qkv, *((mask, None) if how == "mask_mod" else (None, score)))
    assert zero(result.out[:, :, :32])
    assert torch.isneginf(result.lse[:, :, :32]).all()  # and not a large negative number
    assert torch.isfinite(result.lse[:, :, 32:]).all()
    assert zero(result.grads[0][:, :, :32])


@on_devices
def test_c08_nan_that_an_empty_row_receives_changes_nothing(device) -> None:
    """logaddexp of two empty rows, for one, sends back NaN."""
    mask = lambda b, h, i, j: i - 96 >= j - 64
    qkv = make_qkv(2, (2, 1), (96, 64), (32, 48), device=device)
    expected = run(qkv, mask)
    with nan_filled_allocations():
        out, aux = flex_attention(*qkv, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        weight, lse_weight = (x.float() for x in weights_for(qkv[0], qkv[2]))
        lse_weight[:, :, :32] = math.nan
        grads = torch.autograd.grad((out, aux.lse), qkv, (weight, lse_weight))
    for got, want in zip(grads, expected.grads):
        assert torch.equal(got, want)


# ---------------------------------------------------------------- C09: every length
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 1025, 1027)
CPU_LENGTHS = (1, 2, 15, 17, 63, 65, 127, 129, 1025)  # every call takes its time there, and there is one kind of tile
OTHER_LENGTHS = ((3, 14), (100, 999), (34, 1026), (1000, 40))
MASKS: dict[str, Callable[[int, int], Any]] = {
    "none": lambda q_len, kv_len: None,
    "bottom-right causal": lambda q_len, kv_len: lambda b, h, i, j: i + (kv_len - q_len) >= j,
    "window": lambda q_len, kv_len: lambda b, h, i, j: (i - j <= 50) & (j - i <= 50),
}


class Pooled:
    """The error rule over many calls: the numbers of a short one are too few for a ratio of errors to mean something."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        self.worst: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)

    def add(self, result: Result, expected: Result, fair: Sequence[Result]) -> None:
        for name in result.named:
            actual, wanted, *others = (x.named[name] for x in (result, expected, *fair))
            size = mean_error(torch.where(wanted.isfinite(), wanted, 0.0), torch.zeros_like(wanted))
            errors = [*(mean_error(x, wanted) for x in (actual, *others)), size]
            for n, (mean, largest) in enumerate(errors):
                self.sums[name][n] += mean * wanted.numel()
                self.worst[name][n] = max(self.worst[name][n], largest)

    def check_mean(self) -> None:
        """Contract line 7."""
        for name, (error, *fair, size) in self.sums.items():
            factor = {"out": 1.1, "lse": 2.0}.get(name, 1.25)
            assert error <= max(factor * max(fair), 1e-7 * size), (
                f"{name}: {error / max(fair):.3f} times the fair error"
            )

    def check_largest(self) -> None:
        """The collected cases' bound."""
        for name, (error, *fair, size) in self.worst.items():
            limit = 2e-5 * max(1.0, size) if name == "lse" else 2 * max(fair) + 1e-3
            assert error <= limit, f"{name}: error {error:.3g} above {limit:.3g}"


def once(q_len: int, kv_len: int, name: str, device: str) -> tuple[Result, Result, tuple[Result, ...]]:
    heads = max(1, min(32, 8192 // (q_len * kv_len)))  # a short call gets more of them, and so numbers enough
    qkv = make_qkv(1, (heads, heads), (q_len, kv_len), (64, 64), dtype=BF16, device=device, guard=ALIGNED)
    mask = MASKS[name](q_len, kv_len)
    return run(qkv, mask), exact(qkv, mask), dense(qkv, mask)


@on_devices
@pytest.mark.parametrize("name", MASKS)
def test_c09_every_length(device, name, fresh_stats) -> None:
    lengths = LENGTHS if device == "cuda" else CPU_LENGTHS
    means = Pooled()
    for q_len in lengths:
        row = Pooled()
        for kv_len in lengths:
            results = once(q_len, kv_len, name, device)
            means.add(*results)
            row.add(*results)
        row.check_largest()
    means.check_mean()
    before = flexattn.stats()
    assert all(count <= 3 for count in before.builds.values()), before
    assert before.plans.total() <= 1
    for q_len, kv_len in OTHER_LENGTHS:
        result, expected, fair = once(q_len, kv_len, name, device)
        assert_rule("out", result.out, expected.out, [x.out for x in fair], BF16)
    assert flexattn.stats().builds == before.builds
    assert flexattn.stats().plans == before.plans


# ---------------------------------------------------------------- C11: few tokens
@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_c11_few_tokens(device, dtype, fresh_stats) -> None:
    grid = lambda b, h, i, j: ((i // 5 - j // 5).abs() <= 1) & ((i % 5 - j % 5).abs() <= 1)
    builds = []
    for length in (4, 8, 16, 25, 32):
        result = check(make_qkv(2, (2, 2), (length, length), (64, 64), dtype=dtype, device=device), grid)
        assert all(torch.isfinite(x).all() for x in result.named.values())
        builds.append(flexattn.stats().builds.total())
    assert builds[0] == builds[-1]


# ---------------------------------------------------------------- C12: a mask made for other lengths
@on_devices
def test_c12_mask_of_other_lengths(device, fresh_stats) -> None:
    qkv = make_qkv(3, (2, 2), (5, 5), (32, 32), device=device)
    block_mask = create_block_mask(causal, None, None, 128, 384, device=device)
    with pytest.raises(ShapeError) as raised:
        flex_attention(*qkv, block_mask=block_mask)
    assert_explains(raised.value, "block_mask", 128, 384, "q_len=5", "kv_len=5", "crop")
    assert flexattn.stats().launches.total() == 0
    result = run(qkv, block_mask=block_mask.crop(5, 5))
    for name, want in exact(qkv, causal).named.items():
        assert_each_within(name, result.named[name], want)


@on_devices
def test_c12_mask_of_smaller_lengths(device, fresh_stats) -> None:
    qkv = make_qkv(3, (2, 2), (128, 384), (32, 32), device=device)
    with pytest.raises(ShapeError) as raised:
        flex_attention(*qkv, block_mask=create_block_mask(causal, None, None, 5, 5, device=device))
    assert_explains(raised.value, "block_mask", "(1, 1, 5, 5)", "q_len=128", "kv_len=384", "create_block_mask")
    assert flexattn.stats().launches.total() == 0
