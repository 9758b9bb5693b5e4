"""Captured and learnable tensors: parameters, tables, biases, document ids and buffers that a mod reads.

Every case compares with the float64 oracle, gradients of what was captured included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import create_block_mask, create_mask, flex_attention
from flexattn.runtime.reference import oracle
from flexattn.runtime.stats import Stats
from tests.cases.bounds import (
    assert_each_within,
    assert_half_within,
    assert_summed_in_float32,
    dense_with_wide_captures,
)
from tests.helpers import causal, check, dense, exact, guarded, make_qkv, on_devices, run, window

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------- C28: scalar parameters
class _Affine(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.t, self.a = (torch.nn.Parameter(torch.tensor(x, device=device)) for x in (0.7, 0.3))

    def forward(self, score, b, h, q_idx, kv_idx):
        return score * self.t + self.a


@on_devices
@pytest.mark.parametrize("form", ["closure", "module"])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_c28_scalar_parameters(device, dtype, form) -> None:
    """One gradient is one number, so eight problems together say how large its error is."""
    module = _Affine(device)
    t, a = module.t, module.a
    plain = lambda s, b, h, i, j: s * t + a
    score = module if form == "module" else plain
    got, wanted, fair = [], [], []
    for _ in range(8):
        qkv = make_qkv(1, (2, 2), (130, 130), (32, 32), dtype=dtype, device=device)
        options = {"captures": [t, a], "with_lse": False}
        got.append(run(qkv, causal, score, **options).grads[3:])
        wanted.append(exact(qkv, causal, plain, **options).grads[3:])
        fair.append([x.grads[3:] for x in dense(qkv, causal, plain, **options)])
    assert {x.dtype for pair in got for x in pair} == {F32}
    for n, name in enumerate(("t", "a")):
        actual, expected = (torch.stack([pair[n] for pair in pairs]) for pairs in (got, wanted))
        rounded = [torch.stack([pair[n] for pair in way]) for way in zip(*fair)]
        if dtype == F16:
            assert_half_within(name, actual, expected, rounded)
        elif name == "t":
            assert_each_within(name, actual, expected)
        else:  # a shift of all scores changes nothing: what is left is rounding, as the dense formula's is
            rounding = max(x.abs().max().item() for x in rounded)
            assert expected.abs().max() < 1e-12
            assert actual.abs().max() <= max(2e-5, 2 * rounding)


# ---------------------------------------------------------------- C29, C31, C37: tables and biases
@on_devices
@pytest.mark.parametrize("dtypes", [(F32, F32), (F32, BF16), (BF16, BF16), (BF16, F32)], ids=str)
def test_c29_relative_position_table(device, dtypes) -> None:
    table = guarded((2, 599), dtype=dtypes[1], device=device).requires_grad_()
    score = lambda s, b, h, i, j: s + table[h, i - j + 299]
    qkv = make_qkv(2, (2, 2), (300, 300), (32, 32), dtype=dtypes[0], device=device)
    expected = exact(qkv, None, score, captures=[table])
    if dtypes[0] == dtypes[1]:
        result = check(qkv, None, score, captures=[table])
    else:  # the error rule is one for tensors of one dtype
        result = run(qkv, None, score, captures=[table])
    if dtypes[0] == F32:
        for name, got, want in zip(("dq", "dk", "dv"), result.grads, expected.grads):
            assert_each_within(name, got, want)
    (fair,) = dense_with_wide_captures(qkv, None, score, captures=[table])
    assert result.grads[3].dtype == dtypes[1]
    assert_summed_in_float32(result.grads[3], expected.grads[3], fair, dtypes[0])


BIAS_SHAPES = {
    "all": (1, 1, 384, 384),
    "batch": (2, 1, 384, 384),
    "heads": (1, 2, 384, 384),
    "keys": (2, 1, 1, 384),
    "queries": (1, 2, 384, 1),
}


@on_devices
@pytest.mark.parametrize("layout", ["view", "transposed"])
@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_c31_dense_bias_with_broadcast_dimensions(device, shape, layout) -> None:
    sizes = BIAS_SHAPES[shape]
    stored = (*sizes[:2], sizes[3], sizes[2]) if layout == "transposed" else sizes
    p = guarded(stored, dtype=BF16, device=device).requires_grad_()

    def score(s, b, h, i, j):
        bias = (2 * p).transpose(2, 3) if layout == "transposed" else (2 * p.flatten()).view(sizes)
        return s + bias[tuple(0 if n == 1 else index for n, index in zip(sizes, (b, h, i, j)))]

    qkv = make_qkv(2, (2, 2), (384, 384), (16, 16), dtype=BF16, device=device)
    result = check(qkv, None, score, captures=[p])
    (fair,) = dense_with_wide_captures(qkv, None, score, captures=[p])
    expected = exact(qkv, None, score, captures=[p])
    assert result.grads[3].shape == p.shape
    assert_summed_in_float32(result.grads[3], expected.grads[3], fair, BF16)


@on_devices
def test_c31_a_bias_of_queries_alone_has_no_gradient(device) -> None:
    p = guarded((1, 2, 384, 1), device=device).requires_grad_()
    qkv = make_qkv(2, (2, 2), (384, 384), (16, 16), device=device)
    options = {"captures": [p], "with_lse": False}
    grad = run(qkv, None, lambda s, b, h, i, j: s + (2 * p)[0, h, i, 0], **options).grads[3]
    assert_each_within("shift of a row", grad, torch.zeros_like(grad))


@on_devices
def test_c37_banded_bias_without_a_clamp(device) -> None:
    band = guarded((2, 2, 320, 48), device=device).requires_grad_()
    qkv = make_qkv(2, (2, 2), (320, 320), (32, 32), device=device)
    result = run(qkv, window(48), lambda s, b, h, i, j: s + band[b, h, i, i - j], captures=[band])
    clamped = lambda s, b, h, i, j: s + band[b, h, i, (i - j).clamp(0, 47)]
    expected = exact(qkv, window(48), clamped, captures=[band])
    assert_same(result, expected)
    assert result.grads[3][:, :, 0, 1:].abs().max() == 0  # the first query has one key


def assert_same(result, expected) -> None:
    """float32: out, lse and every gradient."""
    names = ("out", "lse", "dq", "dk", "dv", "capture")
    for name, got, want in zip(
        names, (result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)
    ):
        assert_each_within(name, got, want)


# ---------------------------------------------------------------- C32: a bias made by a network
ATTENTION = ("forward", "delta", "dq", "dkdv", "torch forward", "torch backward")


class _PairBias(torch.nn.Module):
    """bias[h, i, j] = <left(x)[i, h], right(x)[j, h]>."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.left, self.right = (torch.nn.Linear(width, heads * 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (torch.tanh(part(x)).view(len(x), self.heads, 4) for part in (self.left, self.right))
        return torch.einsum("ihc,jhc->hij", left, right)


def _train(attend, device: str) -> tuple[list[float], list[Tensor], Stats]:
    """50 steps from the same start on the same data: losses, the producer's parameters, the counters after one step."""
    torch.manual_seed(3)
    net = _PairBias(2, 16).to(device)
    x, goal = torch.randn(256, 16).to(device), torch.randn(1, 2, 256, 16).to(device)
    qkv = [torch.randn(1, 2, 256, 16).to(device) for _ in range(3)]
    optimiser = torch.optim.SGD(net.parameters(), lr=20.0, momentum=0.5)
    losses, first = [], flexattn.stats()
    for _ in range(50):
        bias = net(x)
        loss = (attend(*qkv, lambda s, b, h, i, j: s + bias[h, i, j]).float() - goal).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in net.parameters())
        optimiser.step()
        losses.append(loss.item())
        first = flexattn.stats() if len(losses) == 1 else first
    return losses, [p.detach() for p in net.parameters()], first


@on_devices
def test_c32_bias_from_a_network_in_a_new_closure_each_step(device, fresh_stats) -> None:
    ours = lambda q, k, v, score: flex_attention(q, k, v, score, mask_mod=causal)
    losses, parameters, first = _train(ours, device)
    last = flexattn.stats()
    assert last.builds == first.builds  # nothing is built after the first step
    assert last.plans == first.plans
    for kernel, launches in last.launches.items():  # those that make the mask's tables ran in the first step alone
        assert launches == first.launches[kernel] * (50 if kernel in ATTENTION else 1), kernel
    assert last.launches["forward" if device == "cuda" else "torch forward"] == 50
    wanted, exact_parameters, _ = _train(lambda q, k, v, score: oracle(q, k, v, causal, score)[0], device)
    assert wanted[-1] < wanted[0] - 0.01  # it learns
    assert_each_within("loss curve", torch.tensor(losses), torch.tensor(wanted))
    for got, want in zip(parameters, exact_parameters):
        assert (got - want).abs().max() < 1e-3


# ---------------------------------------------------------------- C34, C35, C36: ids, buffers, dense masks
@on_devices
@pytest.mark.parametrize("length", [10, 100, 1500, 2046])
def test_c34_document_ids_of_exact_length(device, length) -> None:
    ids = torch.full((length + 100,), 7, dtype=torch.int32, device=device)  # what lies around them would be kept
    doc = ids[50 : 50 + length]
    doc.copy_(torch.arange(length) * 8 // length)
    mask = lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j)
    wanted = (doc[:, None] == doc[None]) & torch.ones(length, length, dtype=torch.bool, device=device).tril()
    blocks = create_block_mask(mask, None, None, length, length, device=device)
    assert torch.equal(create_mask(mask, None, None, length, length, device=device)[0, 0], wanted)
    assert torch.equal(blocks.to_mask()[0, 0], wanted)
    assert blocks.density() == pytest.approx(wanted.double().mean().item(), abs=1e-12)
    qkv = make_qkv(
        1, (2, 1), (length, length), (16, 24), device=device, requires_grad=length < 2000 or device == "cuda"
    )
    result = check(qkv, mask)
    with torch.no_grad():
        assert torch.equal(flex_attention(*qkv, block_mask=blocks, enable_gqa=True), result.out)


@on_devices
def test_c35_guarded_buffer_is_not_read_past_its_end(device) -> None:
    """On the CPU a read past the end would raise; on a GPU, see test_clean_under_compute_sanitizer."""
    short = guarded((150,), device=device).requires_grad_()
    padded = torch.cat([short.detach(), torch.zeros(10, device=device)]).requires_grad_()
    mask = lambda b, h, i, j: (j < 150) & (i >= j)
    qkv = make_qkv(2, (2, 1), (160, 160), (32, 32), device=device)
    result = run(qkv, mask, lambda s, b, h, i, j: s + short[j], captures=[short])
    expected = check(qkv, mask, lambda s, b, h, i, j: s + padded[j], captures=[padded])
    names = ("out", "lse", "dq", "dk", "dv")
    for name, got, want in zip(
        names, (result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)
    ):
        assert torch.equal(got, want), name
    assert result.grads[3].shape == (150,)
    assert (result.grads[3] - expected.grads[3][:150]).abs().max() < 1e-5
    assert expected.grads[3][150:].abs().max() == 0


@on_devices
@pytest.mark.parametrize("given", ["mask_mod", "block_mask"])
def test_c36_dense_boolean_mask(device, given) -> None:
    allowed = (torch.rand(3, 1000, 1000) < 0.1).to(device) | torch.eye(1000, dtype=torch.bool, device=device)
    _check_mask(lambda b, h, i, j: allowed[b, i, j], allowed[:, None], given, device)


@on_devices
@pytest.mark.parametrize("given", ["mask_mod", "block_mask"])
def test_c36_prefix_and_image_spans(device, given) -> None:
    span = torch.zeros(3, 1000, dtype=torch.int64, device=device)
    for batch, (start, stop) in enumerate(((100, 300), (0, 1000), (777, 778))):
        span[batch, start:stop] = 1
    span[0, 420:640] = 2
    mask = lambda b, h, i, j: (i >= j) | ((span[b, i] == span[b, j]) & (span[b, i] > 0))
    same = (span[:, :, None] == span[:, None]) & (span[:, :, None] > 0)
    _check_mask(mask, (same | torch.ones_like(same).tril())[:, None], given, device)


def _check_mask(mask_mod, wanted: Tensor, given: str, device: str) -> None:
    """The mask is `wanted` [3, 1, 1000, 1000], and attention through it is right for each batch."""
    qkv = make_qkv(3, (1, 1), (1000, 1000), (16, 16), device=device)
    if given == "mask_mod":
        check(qkv, mask_mod)
        return
    blocks = create_block_mask(mask_mod, 3, None, 1000, 1000, device=device)
    assert torch.equal(blocks.to_mask(), wanted)
    result, expected = run(qkv, block_mask=blocks), exact(qkv, mask_mod)
    assert_same(result, expected)


# ---------------------------------------------------------------- reads and writes outside of tensors
MEMORY_CASES = """
import torch
from flexattn import create_block_mask, flex_attention

def attend(length, mask, score=None, heads=1):
    q, k, v = (torch.randn(heads, heads, length, 32, device="cuda", requires_grad=True) for _ in range(3))
    blocks = create_block_mask(mask, heads, heads, length, length, device="cuda")
    for given in ({"mask_mod": mask}, {"block_mask": blocks}):
        flex_attention(q, k, v, score, **given).sum().backward()

for length in (10, 100, 1500, 2046):
    doc = (torch.arange(length, device="cuda") * 8 // length).int()
    attend(length, lambda b, h, i, j: (doc[i] == doc[j]) & (i >= j))
buffer = torch.randn(150, device="cuda", requires_grad=True)
attend(160, lambda b, h, i, j: (j < 150) & (i >= j), lambda s, b, h, i, j: s + buffer[j])
band = torch.randn(2, 2, 320, 48, device="cuda", requires_grad=True)
attend(320, lambda b, h, i, j: (i >= j) & (i - j < 48), lambda s, b, h, i, j: s + band[b, h, i, i - j], heads=2)
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.gpu
@pytest.mark.slow
def test_clean_under_compute_sanitizer() -> None:
    """C34, C35 and C37: every tensor in an allocation of its own, every access of every kernel checked."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [found, "--tool", "memcheck", "--error-exitcode", "3", sys.executable, "-c", MEMORY_CASES]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "done" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
