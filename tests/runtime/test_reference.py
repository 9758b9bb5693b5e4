"""The oracle against hand-made values, autograd's own checker, and torch's dense attention."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from flexattn.errors import ShapeError
from flexattn.runtime import reference
from flexattn.runtime.reference import call_mod, oracle
from tests.helpers import DEVICES, make_qkv

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def test_equals_torch_dense_attention_in_float64() -> None:
    q, k, v = make_qkv(heads=(4, 4), lengths=(70, 70), dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (oracle(q, k, v, CAUSAL)[0] - expected).abs().max() < 1e-14


def test_two_keys_by_hand() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, math.log(3.0)]).view(1, 1, 2, 1)
    v = torch.tensor([1.0, 5.0]).view(1, 1, 2, 1)
    out, lse = oracle(q, k, v, scale=1.0)
    assert out.item() == pytest.approx(0.25 * 1 + 0.75 * 5, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(4.0), rel=1e-6)


def test_scores_are_scaled_and_heads_are_query_heads() -> None:
    q, k, v = make_qkv(batch=1, heads=(4, 2), lengths=(3, 5), dims=(8, 6))
    seen = []

    def score(score, b, h, q_idx, kv_idx):
        seen.append((score.dtype, h.numel()))
        return score + h

    _, lse = oracle(q, k, v, score_mod=score, scale=0.5)
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    assert seen[0] == (torch.float64, 4)
    assert torch.allclose(lse, scores.logsumexp(-1) + torch.arange(4).view(1, 4, 1))


def test_gradients_by_finite_differences_through_empty_rows() -> None:
    q, k, v = make_qkv(batch=1, heads=(2, 1), lengths=(4, 3), dims=(2, 2), kv_batch=1, dtype=torch.float64)
    table = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    mask = lambda b, h, q_idx, kv_idx: (q_idx > kv_idx) & (q_idx != 2)

    def loss(q, k, v, table):
        out, lse = oracle(q, k, v, mask, lambda s, b, h, i, j: s * 1.5 + table[i, j] * s)
        return out, lse[:, :, [1, 3]]

    assert torch.autograd.gradcheck(loss, (q, k, v, table))
    out, lse = oracle(q, k, v, mask)
    assert torch.equal(out[:, :, [0, 2]], torch.zeros(1, 2, 2, 2, dtype=torch.float64))
    assert torch.isneginf(lse[:, :, [0, 2]]).all()


def test_nan_at_masked_positions_reaches_nothing() -> None:
    q, k, v = make_qkv(batch=1, heads=(1, 1), lengths=(6, 6), dims=(4, 4))
    spoiled = lambda s, b, h, i, j: torch.where(i >= j, s, math.nan)
    out, lse = oracle(q, k, v, CAUSAL, spoiled)
    expected = oracle(q, k, v, CAUSAL)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("value", [True, 1, torch.ones(1), torch.tensor(2)])
def test_masks_may_return_numbers(value) -> None:
    q, k, v = make_qkv(requires_grad=False)
    assert torch.equal(oracle(q, k, v, lambda b, h, i, j: value)[0], oracle(q, k, v)[0])


def test_no_key_at_all() -> None:
    q, k, v = make_qkv(lengths=(7, 0))
    out, lse = oracle(q, k, v, CAUSAL)
    assert torch.equal(out, torch.zeros(2, 4, 7, 24, dtype=torch.float64))
    assert torch.isneginf(lse).all()
    assert torch.autograd.grad(out.sum(), q)[0].abs().sum() == 0


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, i, j: torch.dot(LEFT[i], RIGHT[j]),
        lambda b, h, i, j: (LEFT[i] * RIGHT[j]).sum(),
        lambda b, h, i, j: (LEFT[i] * RIGHT[j]).sum(-1),
    ],
    ids=["dot", "sum of all", "sum of last"],
)
def test_a_mod_is_defined_on_scalars(mod) -> None:
    value = call_mod(mod, (1, 1, 6, 7), torch.device("cpu"))
    assert value.shape == (1, 1, 6, 7)
    assert torch.allclose(value[0, 0], LEFT @ RIGHT.T, atol=1e-6)


LEFT, RIGHT = torch.randn(6, 5), torch.randn(7, 5)


def test_a_mod_that_broadcasts_along_the_wrong_axis_is_called_on_scalars() -> None:
    flags = torch.arange(7)[:, None] % 3 == 0
    value = call_mod(lambda b, h, i, j: flags[j][0] & (i >= 0), (1, 1, 7, 7), torch.device("cpu"))
    assert torch.equal(value[0, 0], flags.T.expand(7, 7))  # indexing a broadcast index by [0] would give the transpose


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_of_an_index_is_one_of_scalars(device) -> None:
    """Called on broadcasting tensors it would leave the table: a GPU must not even see that."""
    table = torch.randn(2, 3, 4, 50).to(device)
    which = torch.tensor(2, device=device)
    mods = (
        lambda b, h, i, j: table[b][h][1, i],
        lambda b, h, i, j: table[b, h][1][i],
        lambda b, h, i, j: table[b][h][which, i] - table[b, h, 2, i] + table[b, h, 1, i],
    )
    for mod in mods:
        value = call_mod(mod, (2, 3, 50, 7), torch.device(device))
        assert torch.equal(value, table[:, :, 1, :, None].expand(2, 3, 50, 7))


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_out_of_range_is_an_error_on_every_device(device) -> None:
    table = torch.randn(3, 5).to(device)
    for mod in (
        lambda b, h, i, j: table[b, i],
        lambda b, h, i, j: table[:, i - 6].sum(),
        lambda b, h, i, j: table[..., torch.clamp(j, 5, 6)].sum(0),
    ):
        with pytest.raises(IndexError, match="out of bounds"):
            call_mod(mod, (1, 1, 6, 4), torch.device(device))
    first_column = call_mod(lambda b, h, i, j: table[i, 0] + 0 * j, (1, 1, 3, 4), torch.device(device))
    assert torch.equal(first_column, table[:, :1].expand(1, 1, 3, 4))  # and the device is as well as before


def test_wrong_heads_name_the_argument() -> None:
    q, k, v = make_qkv(heads=(4, 2))
    with pytest.raises(ShapeError, match=r"key needs a batch of 2 or 1 .* divides 3"):
        oracle(q[:, :3], k, v)
    with pytest.raises(ShapeError, match="value needs a batch of 2"):
        oracle(q, k, torch.cat([v, v[:1]]))


def test_imports_nothing_it_judges() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in imported if name and "flexattn" in name} == {"flexattn.errors"}
