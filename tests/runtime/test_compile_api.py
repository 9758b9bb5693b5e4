"""torch.compile around flexattn: it runs eagerly inside a graph break, with the same results, also in training."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

import flexattn
from flexattn import create_block_mask, flex_attention

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(length=40):
    return tuple(torch.randn(2, 4, length, 16) for _ in range(3))


class Model(torch.nn.Module):
    """A projection, attention with a learnt slope and a mask, a projection."""

    def __init__(self, mask=None):
        super().__init__()
        self.inner = torch.nn.Linear(32, 96)
        self.outer = torch.nn.Linear(32, 32)
        self.slope = torch.nn.Parameter(torch.ones(2))
        self.mask = mask

    def forward(self, x, window=5):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)

        def score_mod(score, b, h, q_idx, kv_idx):
            return score * self.slope[h]

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx).abs() < window

        out = flexattn.flex_attention(q, k, v, score_mod, block_mask=self.mask, mask_mod=mask_mod)
        return torch.relu(self.outer(out.transpose(1, 2).flatten(-2)) + x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_flex_attention(backend):
    compiled = torch.compile(flex_attention, backend=backend)
    bias = torch.randn(300)
    for length in (40, 17, 300):
        q, k, v = (x.requires_grad_() for x in qkv(length))
        arguments = {"score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx], "mask_mod": CAUSAL}
        out, expected = compiled(q, k, v, **arguments), flex_attention(q, k, v, **arguments)
        assert torch.equal(out, expected)
        grads = [torch.autograd.grad(x.square().sum(), [q, k, v]) for x in (out, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_create_block_mask(backend):
    q, k, v = qkv()
    compiled = torch.compile(create_block_mask, backend=backend)
    for mask in (
        compiled(CAUSAL, None, None, 40, 40, device="cpu"),
        create_block_mask(CAUSAL, None, None, 40, 40, device="cpu", _compile=True),
    ):
        assert torch.equal(mask.to_dense(), create_block_mask(CAUSAL, None, None, 40, 40, device="cpu").to_dense())
        assert torch.equal(flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v, mask_mod=CAUSAL))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_model_trains_as_the_eager_one(backend, masked):
    model = Model(create_block_mask(CAUSAL, None, None, 40, 40, device="cpu") if masked else None)
    twin = Model(model.mask)
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(twin, backend=backend)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(3):
        x = torch.randn(2, 40, 32)
        losses = [m(x, window=3 + step).square().mean() for m in (model, compiled)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss, optimiser in zip(losses, optimisers):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs)
        assert mine.grad.abs().sum() > 0


def test_mask_made_inside_a_compiled_function():
    def step(q, k, v, width):
        mask = flexattn.create_block_mask(
            lambda b, h, i, j: (i - j).abs() <= width, None, None, q.shape[2], k.shape[2], device=q.device
        )
        return flexattn.flex_attention(q * 2, k, v, block_mask=mask) + 1

    compiled = torch.compile(step, backend="eager")
    for length, width in [(40, 3), (33, 9)]:
        q, k, v = qkv(length)
        assert torch.equal(compiled(q, k, v, width), step(q, k, v, width))


def test_compiled_calls_do_not_recompile_for_new_lengths():
    """The wrapper itself is skipped by Dynamo, so changing shapes never runs into its recompile limit."""
    from torch._dynamo.utils import counters

    compiled = torch.compile(flex_attention, backend="eager")
    compiled(*qkv(8))
    counters.clear()
    for length in range(9, 29):
        compiled(*qkv(length))
    assert counters["frames"]["total"] <= 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor():
    model = Model()
    x = torch.randn(2, 40, 32)
    expected = model(x)
    out = torch.compile(model)(x)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert model.slope.grad is not None


def test_dynamo_is_not_imported_for_eager_calls():
    code = """
import sys, torch, flexattn
x = torch.randn(1, 2, 40, 8, requires_grad=True)
flexattn.flex_attention(x, x, x, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
