"""What the API promises at its edges: what mods may return, head groups, mixed dtypes, empty sizes, devices, copies, merging.

Cases that name a size too slow for a CPU run in full on a GPU; the CPU then takes the smaller size the test states.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import flexattn
from flexattn import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention, merge_states
from flexattn.errors import DTypeError, MaskTypeError, ShapeError, TraceError
from flexattn.runtime import cpu
from flexattn.runtime.reference import oracle
from tests.cases.bounds import assert_each_within, assert_half_within
from tests.helpers import (
    Result,
    assert_explains,
    causal,
    check,
    dense,
    differentiate,
    exact,
    guarded,
    make_qkv,
    nan_filled_allocations,
    on_devices,
    run,
    weights_for,
)

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROOT = Path(__file__).resolve().parents[2]
NAMES = ("out", "lse", "dq", "dk", "dv", "capture")


def values(result: Result) -> tuple[Tensor, ...]:
    return result.out, result.lse, *result.grads


# ---------------------------------------------------------------- C26, C27: attention in parts
def near(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 40)


def far(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx > 40)


def in_parts(qkv, *masks) -> tuple[Tensor, Tensor]:
    """Attention over each mask's keys, merged in order."""
    states = [flex_attention(*qkv, mask_mod=m, enable_gqa=True, return_aux=AuxRequest(lse=True)) for m in masks]
    out, lse = states[0][0], states[0][1].lse
    for part, aux in states[1:]:
        out, lse = merge_states(out, lse, part, aux.lse)
    return out, lse


@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_c26_split_and_merge(device, dtype) -> None:
    qkv = make_qkv(2, (4, 2), (200, 200), (32, 48), dtype=dtype, device=device)
    with torch.no_grad():
        lse = flex_attention(*qkv, mask_mod=far, enable_gqa=True, return_aux=AuxRequest(lse=True))[1].lse
    assert torch.isneginf(lse).sum() == 2 * 4 * 41  # rows that have a key in one part only
    with nan_filled_allocations():
        result = differentiate(*in_parts(qkv, near, far), qkv, weights_for(qkv[0], qkv[2]))
    expected = exact(qkv, causal)
    fair = dense(qkv, causal)
    for n, (name, got, want) in enumerate(zip(NAMES, values(result), values(expected))):
        assert torch.isfinite(got).all(), name
        if dtype == F32 or name == "lse":
            assert_each_within(name, got, want)
        else:
            assert_half_within(name, got, want, [values(x)[n] for x in fair])


@on_devices
def test_c26_any_number_of_parts_in_any_order(device) -> None:
    qkv = make_qkv(2, (2, 1), (130, 200), (16, 24), device=device)
    parts = [lambda b, h, i, j, n=n: (i >= j) & (j % 4 == n) for n in range(4)]
    expected = exact(qkv, causal)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        result = differentiate(*in_parts(qkv, *(parts[n] for n in order)), qkv, weights_for(qkv[0], qkv[2]))
        for name, got, want in zip(NAMES, values(result), values(expected)):
            assert_each_within(name, got, want)


@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_c27_two_empty_parts(device, dtype) -> None:
    """Rows below 64 have no key in either part, rows from 64 have one part or both."""
    parts = (lambda b, h, i, j: (i >= 64) & (j < 50), lambda b, h, i, j: (i >= 80) & (j >= 50))
    qkv = make_qkv(2, (2, 2), (100, 90), (16, 24), dtype=dtype, device=device)
    out, lse = in_parts(qkv, *parts)
    assert out[:, :, :64].abs().max() == 0
    assert torch.isneginf(lse[:, :, :64]).all()
    assert torch.isfinite(lse[:, :, 64:]).all()
    result = differentiate(out, lse, qkv, weights_for(qkv[0], qkv[2]))
    assert result.grads[0][:, :, :64].abs().max() == 0
    whole = lambda b, h, i, j: ((i >= 64) & (j < 50)) | ((i >= 80) & (j >= 50))
    expected, fair = exact(qkv, whole), dense(qkv, whole)
    for n, (name, got, want) in enumerate(zip(NAMES, values(result), values(expected))):
        if dtype == F32 or name == "lse":
            assert_each_within(name, got, want)
        else:
            assert_half_within(name, got, want, [values(x)[n] for x in fair])


# ---------------------------------------------------------------- C54: what a mod may return
@on_devices
def test_c54_what_masks_and_scores_may_return(device) -> None:
    qkv = make_qkv(device=device)
    off, one, yes = torch.tensor([7], device=device), torch.ones(1, device=device), torch.ones(1, device=device).bool()
    check(qkv, lambda b, h, i, j: i + off >= j)
    everything = run(qkv)
    for value in (True, 1):  # no mask at all
        for got, want in zip(values(run(qkv, lambda b, h, i, j, value=value: value)), values(everything)):
            assert torch.equal(got, want)
    for value in (yes, yes[0]):
        for name, got, want in zip(NAMES, values(run(qkv, lambda b, h, i, j, value=value: value)), values(exact(qkv))):
            assert_each_within(name, got, want)
    for value in (False, 0, ~yes):
        result = run(qkv, lambda b, h, i, j, value=value: value)
        assert result.out.abs().max() == 0
        assert torch.isneginf(result.lse).all()
        assert all(g.abs().max() == 0 for g in result.grads)
    for value in (0.5, 2, one, one[0]):
        check(qkv, causal, lambda s, b, h, i, j, value=value: value)
    check(qkv, causal, lambda s, b, h, i, j: s * one)
    blocks = create_block_mask(lambda b, h, i, j: i + off >= j, None, None, 70, 90, device=device)
    assert torch.equal(blocks.to_mask(), create_mask(lambda b, h, i, j: i + 7 >= j, None, None, 70, 90, device=device))


def test_c54_what_mods_may_not_return() -> None:
    qkv = make_qkv()
    table = torch.randn(70, 2)

    def row_mask(b, h, q_idx, kv_idx):
        return table[q_idx]

    def float_mask(b, h, q_idx, kv_idx):
        return table[q_idx, 0]

    def text_mask(b, h, q_idx, kv_idx):
        return "causal"

    def wide_mask(b, h, q_idx, kv_idx):
        return table > 0

    def nothing(score, b, h, q_idx, kv_idx):
        return None

    def pair(score, b, h, q_idx, kv_idx):
        return score, score

    def row_score(score, b, h, q_idx, kv_idx):
        return score + table[q_idx]

    for mask_mod in (row_mask, float_mask, text_mask, wide_mask):
        for call in (
            lambda: flex_attention(*qkv, mask_mod=mask_mod, enable_gqa=True),
            lambda: create_block_mask(mask_mod, None, None, 70, 90, device="cpu"),
        ):
            with pytest.raises((TraceError, MaskTypeError)) as raised:
                call()
            assert_explains(raised.value, mask_mod.__name__)
            assert "test_f_api.py:" in str(raised.value)
    for score_mod, came in ((nothing, "NoneType"), (pair, "tuple"), (row_score, "")):
        with pytest.raises(TraceError) as raised:
            flex_attention(*qkv, score_mod, enable_gqa=True)
        assert_explains(raised.value, score_mod.__name__, came)
        assert "test_f_api.py:" in str(raised.value)


# ---------------------------------------------------------------- C57: only what needs a gradient
@on_devices
@pytest.mark.parametrize("wanted", [0, 2, 3])
def test_c57_only_what_needs_a_gradient(device, wanted, monkeypatch) -> None:
    bias = guarded((70, 90), device=device)
    tensors = [*make_qkv(device=device, requires_grad=False), bias]
    tensors[wanted].requires_grad_()
    products: list[tuple[int, ...]] = []
    add = cpu._add
    monkeypatch.setattr(cpu, "_add", lambda into, *rest: (products.append(tuple(into.shape)), add(into, *rest))[1])
    flex_attention(
        *tensors[:3], lambda s, b, h, i, j: s + bias[i, j], mask_mod=causal, enable_gqa=True
    ).sum().backward()
    assert [x.grad is not None for x in tensors] == [n == wanted for n in range(4)]
    assert len(products) == (1 if wanted == 2 and device == "cpu" else 0)  # dK and dV alone go through it
    expected = oracle(*tensors[:3], causal, lambda s, b, h, i, j: s + bias[i, j])[0]
    (want,) = torch.autograd.grad(expected.sum(), tensors[wanted])
    assert_each_within("gradient", tensors[wanted].grad, want)


# ---------------------------------------------------------------- C61: groups of query heads
GROUPS = [1, 2, 3, 5, 6, 7, 8, 12, 16, 64]


@on_devices
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_c61_group_sizes_in_decoding(device, group, q_len) -> None:
    kv_heads = 2 if group <= 8 else 1
    qkv = make_qkv(1, (kv_heads * group, kv_heads), (q_len, 4096), (128, 128), device=device, requires_grad=False)
    check(qkv, lambda b, h, i, j: i + (4096 - q_len) >= j, lambda s, b, h, i, j: s + 0.01 * h)


@on_devices
@pytest.mark.parametrize("group", GROUPS)
def test_c61_group_sizes_in_prefill(device, group) -> None:
    """A chunk of 200 queries at the end of 4096 keys of dimension 128, bfloat16; on a CPU 60 of 75 keys, 16 and 24, float32."""
    kv_heads = 2 if group <= 16 else 1
    lengths, dims, dtype = ((200, 4096), (128, 128), BF16) if device == "cuda" else ((60, 75), (16, 24), F32)
    qkv = make_qkv(1, (kv_heads * group, kv_heads), lengths, dims, dtype=dtype, device=device)
    past = lengths[1] - lengths[0]
    check(qkv, lambda b, h, i, j: i + past >= j, lambda s, b, h, i, j: s + 0.01 * h)


def test_c61_heads_that_do_not_divide() -> None:
    with pytest.raises(ShapeError) as raised:
        flex_attention(*make_qkv(1, (35, 2), (8, 8), (16, 16)), enable_gqa=True)
    assert_explains(raised.value, "Hq=35", "Hkv=2")


# ---------------------------------------------------------------- C64: mixed dtypes and autocast
def mixed(device: str) -> list[Tensor]:
    """Query and key as a norm leaves them, float32; value as a linear layer under autocast does, bfloat16."""
    q, k, v = make_qkv(device=device)
    return [q, k, v.detach().to(BF16).requires_grad_()]


@on_devices
@pytest.mark.parametrize("needs_grad", [True, False])
def test_c64_mixed_dtypes_are_an_error_that_names_them(device, needs_grad, fresh_stats) -> None:
    q, k, v = (x.detach().requires_grad_(needs_grad) for x in mixed(device))
    for given in ((q, k, v), (q, k.to(F16), v), (q.double(), k, v)):
        with pytest.raises(DTypeError) as raised:
            flex_attention(*given, enable_gqa=True)
        named = ", ".join(f"{name}: {x.dtype}" for name, x in zip(("query", "key", "value"), given))
        assert_explains(raised.value, named, "autocast")
    with pytest.raises(DTypeError), torch.autocast(device, enabled=False):
        flex_attention(q, k, v, enable_gqa=True)
    assert flexattn.stats().launches.total() == 0


@on_devices
@pytest.mark.parametrize("backward_under_autocast", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_c64_autocast_runs_in_its_dtype(device, dtype, backward_under_autocast) -> None:
    """Bit for bit what casting by hand gives; gradients come back in the dtypes that were given."""
    leaves = mixed(device)
    slope = torch.full((4,), 0.3, device=device, requires_grad=True)
    score = lambda s, b, h, i, j: 20 * torch.tanh(s / 20) - slope[h] * (i - j)
    weight, lse_weight = (w.float() for w in weights_for(leaves[0], leaves[2]))

    def gradients(qkv, out: Tensor, lse: Tensor) -> list[Tensor]:
        loss = (out.float() * weight).sum() + (torch.where(torch.isneginf(lse), 0.0, lse) * lse_weight).sum()
        return list(torch.autograd.grad(loss, [*qkv, slope]))

    options = {
        "mask_mod": lambda b, h, i, j: (i >= j) & (i > 3),
        "enable_gqa": True,
        "return_aux": AuxRequest(lse=True),
    }
    with torch.autocast(device, dtype=dtype):
        out, aux = flex_attention(*leaves, score, **options)
        grads = gradients(leaves, out, aux.lse) if backward_under_autocast else None
    grads = grads or gradients(leaves, out, aux.lse)
    cast = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want, want_aux = flex_attention(*cast, score, **options)
    wanted = gradients(cast, want, want_aux.lse)
    assert out.dtype == dtype
    assert aux.lse.dtype == F32
    assert torch.equal(out, want)
    assert torch.equal(aux.lse, want_aux.lse)
    assert [g.dtype for g in grads] == [F32, F32, BF16, F32]
    for got, by_hand, leaf in zip(grads, wanted, leaves):
        assert torch.equal(got, by_hand.to(leaf.dtype))
    assert (grads[3] - wanted[3]).abs().max() <= 1e-4 * wanted[3].abs().max()  # a GPU may add in another order
    check(cast, options["mask_mod"], score)


@on_devices
def test_c64_autocast_leaves_float64_alone(device) -> None:
    q, k, v = make_qkv(dtype=F64, device=device)
    plain = flex_attention(q, k, v, mask_mod=causal, enable_gqa=True)
    with torch.autocast(device, dtype=BF16):
        assert torch.equal(flex_attention(q, k, v, mask_mod=causal, enable_gqa=True), plain)
        with pytest.raises(DTypeError) as raised:
            flex_attention(q, k.detach().float(), v, enable_gqa=True)
    assert plain.dtype == F64
    assert_explains(raised.value, "query: torch.float64, key: torch.float32, value: torch.float64", "autocast leaves")


@on_devices
def test_c64_masks_are_the_same_under_autocast(device) -> None:
    """torch computes powers and exponentials of half types in float32 under autocast; a mask must not change with it."""
    table = torch.linspace(0.5, 2, 300, device=device).to(BF16)
    mask_mod = lambda b, h, i, j: (table[i] ** 2 > table[j].exp() - 1) | (i == j)
    qkv = [x.to(BF16) for x in make_qkv(1, (2, 2), (300, 300), (16, 16), device=device, requires_grad=False)]
    wanted = create_mask(mask_mod, None, None, 300, 300, device=device)
    out = flex_attention(*qkv, mask_mod=mask_mod)
    with torch.autocast(device, dtype=BF16):
        mask = create_block_mask(mask_mod, None, None, 300, 300, device=device, BLOCK_SIZE=16)
        assert torch.equal(create_mask(mask_mod, None, None, 300, 300, device=device), wanted)
        assert torch.equal(mask.to_mask(), wanted)
        assert torch.equal(flex_attention(*qkv, mask_mod=mask_mod), out)
        assert torch.equal(flex_attention(*qkv, block_mask=mask), out)


# ---------------------------------------------------------------- C68: sizes of zero
@on_devices
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("sizes", [(0, 4, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0), (0, 4, 0, 0)])
def test_c68_sizes_of_zero(device, sizes, dtype) -> None:
    batch, heads, q_len, kv_len = sizes
    qkv = make_qkv(batch, (heads, 2), (q_len, kv_len), (8, 12), dtype=dtype, device=device)
    t = torch.tensor(0.5, device=device, requires_grad=True)
    block_mask = create_block_mask(causal, batch, None, q_len, kv_len, device=device)
    for options in ({"mask_mod": causal}, {"block_mask": block_mask}, {}):
        result = run(qkv, score_mod=lambda s, b, h, i, j: s * t, captures=[t], **options)
        assert result.out.shape == (batch, heads, q_len, 12)
        assert result.out.dtype == dtype
        assert result.out.abs().sum() == 0
        assert result.lse.shape == (batch, heads, q_len)
        assert torch.isneginf(result.lse).all()
        assert [g.shape for g in result.grads] == [x.shape for x in (*qkv, t)]
        assert all(g.abs().sum() == 0 for g in result.grads)


# ---------------------------------------------------------------- C69: devices other than the current one
def test_c69_a_mask_without_a_device_serves_any_inputs(monkeypatch) -> None:
    """What holds for cuda:1 beside cuda:0, with a stand-in for the accelerator that computes nothing."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    mask = create_block_mask(causal, None, None, 70, 90)
    assert mask.device.type == "meta"
    qkv = make_qkv()
    check(qkv, causal)
    for got, want in zip(values(run(qkv, block_mask=mask)), values(run(qkv, causal))):
        assert torch.equal(got, want)
    placed = create_block_mask(causal, None, None, 70, 90, device="meta")
    with pytest.raises(flexattn.errors.DeviceError, match=r"cpu and meta.*block_mask\.to\('cpu'\)"):
        flex_attention(*qkv, block_mask=placed, enable_gqa=True)


@pytest.mark.multigpu
def test_c69_inputs_on_another_device_than_the_current_one() -> None:
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        torch.cuda.set_device(0)
        qkv = make_qkv(2, (4, 2), (300, 300), (64, 48), dtype=BF16, device=device)
        ids, slope = torch.arange(300, device=device) // 70, torch.full((4,), 0.2, device=device, requires_grad=True)
        documents = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
        score = lambda s, b, h, i, j: s - slope[h] * (i - j)
        without = create_block_mask(causal, None, None, 300, 300)  # made on the current device
        captured = create_block_mask(documents, None, None, 300, 300)  # made where ids are
        assert without.device == torch.device("cuda:0")
        assert captured.device == torch.device(device)
        calls = ({"mask_mod": documents}, {"block_mask": captured}, {"block_mask": without}, {})
        for options in calls:
            results.append(run(qkv, score_mod=score, captures=[slope], **options))
            assert {x.device for x in values(results[-1])} == {torch.device(device)}
        check(qkv, documents, score, captures=[slope])
        assert torch.cuda.current_device() == 0
    for on_first, on_second in zip(results[:4], results[4:]):
        for name, got, want in zip(NAMES[:5], values(on_second), values(on_first)):
            assert torch.equal(got.cpu(), want.cpu()), name
    with pytest.raises(flexattn.errors.DeviceError, match="cuda:0"):
        flex_attention(*qkv, mask_mod=lambda b, h, i, j: ids.to("cuda:0")[i] == 0, enable_gqa=True)


# ---------------------------------------------------------------- C71: copies of masks
def same_document(ids: Tensor, b, h, q_idx, kv_idx):
    return (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def packed(lengths: list[int], device: str = "cpu") -> BlockMask:
    """The mask of documents packed into one sequence: a module-level function and a captured tensor."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    return create_block_mask(functools.partial(same_document, ids), None, None, len(ids), len(ids), device=device)


COPIES = {
    "pickle": lambda mask, device: pickle.loads(pickle.dumps(mask)),
    "deepcopy": lambda mask, device: copy.deepcopy(mask),
    "to": lambda mask, device: mask.to(device),
    "there and back": lambda mask, device: mask.to("cpu").to(device),
}


@on_devices
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("way", COPIES)
def test_c71_copies_of_a_mask_attend_alike(device, way, used) -> None:
    mask = packed([40, 3, 57], device)
    qkv = make_qkv(1, (2, 2), (100, 100), (16, 16), device=device)
    first = run(qkv, block_mask=mask) if used else None  # a used mask carries tables
    again = COPIES[way](mask, device)
    assert again.device == mask.device
    result = run(qkv, block_mask=again)
    first = run(qkv, block_mask=mask) if first is None else first
    for got, want in zip(values(result), values(first)):
        assert torch.equal(got, want)
    ids = mask.mask_mod.args[0]
    for name, got, want in zip(NAMES, values(result), values(exact(qkv, functools.partial(same_document, ids)))):
        assert_each_within(name, got, want)


class _Packed(Dataset):
    """Samples with their mask; one mask was made in the parent, the others are made in the worker."""

    def __init__(self) -> None:
        self.lengths = [[40, 3, 57], [100], [1, 98, 1]]
        self.ready = packed(self.lengths[0])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, n: int) -> tuple[Tensor, BlockMask]:
        torch.manual_seed(n)
        return torch.randn(1, 2, 100, 16), self.ready if n == 0 else packed(self.lengths[n])


def first_of(batch):
    return batch[0]


@on_devices
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_c71_masks_from_data_loader_workers(device, start) -> None:
    data = _Packed()
    loader = DataLoader(data, num_workers=1, collate_fn=first_of, multiprocessing_context=start)
    for n, (x, mask) in enumerate(loader):
        wanted = packed(data.lengths[n])
        assert torch.equal(mask.to_mask(), wanted.to_mask())
        x = x.to(device)
        out = flex_attention(x, x, x, block_mask=mask.to(device))
        assert_each_within("out", out, oracle(x, x, x, wanted.to(device).mask_mod)[0])


# ---------------------------------------------------------------- C72: tensors on the CPU
C72 = """
import sys, torch, flexattn
torch.manual_seed(0)
bias = torch.randn(300, requires_grad=True)
q, k, v = (torch.randn(2, h, 300, 16, requires_grad=True) for h in (4, 2, 2))
mask = flexattn.create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 90), None, None, 300, 300)
out = flexattn.flex_attention(q, k, v, lambda s, b, h, i, j: s * 2 + bias[j], mask, enable_gqa=True)
out.square().sum().backward()
print("triton" in sys.modules, torch.cuda.is_initialized())
from flexattn.runtime.reference import oracle
got = [x.grad for x in (q, k, v, bias)]
want = oracle(q, k, v, lambda b, h, i, j: (i >= j) & (i - j < 90), lambda s, b, h, i, j: s * 2 + bias[j])[0]
wanted = torch.autograd.grad(want.square().sum(), (q, k, v, bias))
close = lambda x, y: bool(((x - y).abs() <= 2e-5 * y.abs().clamp(min=1)).all())
print(close(out, want), all(map(close, got, wanted)))
"""


def test_c72_needs_neither_cuda_nor_triton() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", C72], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.stdout.split() == ["False", "False", "True", "True"], done.stderr


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_c72_forward_and_backward_are_right_on_a_cpu(dtype) -> None:
    rel = guarded((4, 500), dtype=dtype).requires_grad_()
    qkv = make_qkv(3, (4, 2), (190, 310), (24, 40), kv_batch=1, dtype=dtype)
    mask = lambda b, h, i, j: (i + 120 >= j) & ((i + b) % 7 != 3)
    score = lambda s, b, h, i, j: 15 * torch.tanh(s / 15) + rel[h, i - j + 310]
    if dtype != F64:
        check(qkv, mask, score, captures=[rel])
        return
    result, expected = run(qkv, mask, score, captures=[rel]), exact(qkv, mask, score, captures=[rel])
    for got, want in zip(values(result), values(expected)):
        finite = torch.isfinite(want)
        assert torch.equal(finite, torch.isfinite(got))
        assert (got - want)[finite].abs().max() < 1e-11


def test_c72_gradients_by_finite_differences() -> None:
    table = torch.randn(7, dtype=F64, requires_grad=True)
    qkv = make_qkv(1, (2, 1), (4, 6), (3, 2), dtype=F64)

    def call(q, k, v, table):
        score = lambda s, b, h, i, j: torch.tanh(s * table[j]) + table[i]
        out, aux = flex_attention(q, k, v, score, mask_mod=causal, enable_gqa=True, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    assert torch.autograd.gradcheck(call, (*qkv, table))
