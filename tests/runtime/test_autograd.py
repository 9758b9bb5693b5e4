"""Gradients: against the oracle, only those asked for, through lse, into captured tensors, and never of another mask."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flexattn
import flexattn.runtime.autograd
import flexattn.runtime.second_order
from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention
from flexattn.errors import UnsupportedError
from flexattn.runtime import cpu, settings
from flexattn.runtime.plan import Device, Layout, Plan
from flexattn.runtime.reference import oracle
from tests.helpers import assert_explains
from tests.helpers import square_qkv as qkv

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
IDS = torch.tensor([0] * 11 + [1] * 13 + [2] * 16)


def close(actual, expected, *, atol=5e-5):
    expected = expected.to(actual.dtype)
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= atol * max(1.0, expected.abs().max())


def compare(tensors, captures=(), *, use_lse=False, atol=5e-5, **mods):
    """Gradients of flex_attention and of the oracle for one random loss."""
    leaves = [*tensors, *captures]
    out, aux = flex_attention(*tensors, enable_gqa=True, return_aux=AuxRequest(lse=True), **mods)
    mods.pop("block_mask", None)
    expected, lse = oracle(*tensors, mods.get("mask_mod"), mods.get("score_mod"), mods.get("scale"))
    weight, lse_weight = torch.randn_like(expected), torch.randn_like(lse)
    losses = [(o * weight.to(o.dtype)).sum() for o in (out, expected)]
    if use_lse:
        losses = [
            loss + torch.where(x > -math.inf, x * lse_weight.to(x.dtype), 0).sum()
            for loss, x in zip(losses, (aux.lse, lse))
        ]
    actual = torch.autograd.grad(losses[0], leaves, retain_graph=True)  # a captured tensor may be computed outside
    wanted = torch.autograd.grad(losses[1], leaves, allow_unused=True)
    for leaf, got, want in zip(leaves, actual, wanted):
        assert got.dtype == leaf.dtype
        assert got.shape == leaf.shape
        close(got, torch.zeros_like(leaf) if want is None else want, atol=atol)
    return actual


SCORE_MODS = {
    "none": None,
    "times two": lambda score, b, h, q_idx, kv_idx: score * 2,
    "squared": lambda score, b, h, q_idx, kv_idx: score * score,
    "causal by score": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "slope": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * torch.exp2(-2.0 * (h + 1)),
    "softcap": lambda score, b, h, q_idx, kv_idx: 5.0 * torch.tanh(score / 5.0),
    "document": lambda score, b, h, q_idx, kv_idx: torch.where(IDS[q_idx] == IDS[kv_idx], score, score * 0.5 - 1),
    "sigmoid": lambda score, b, h, q_idx, kv_idx: torch.sigmoid(score) * 3,
    "clamped": lambda score, b, h, q_idx, kv_idx: torch.clamp(score, -0.5, 0.5),
    "powers": lambda score, b, h, q_idx, kv_idx: (score.abs() + 1) ** 1.5 + torch.log(score * score + 1),
    "constant": lambda score, b, h, q_idx, kv_idx: 1.5,
    "ratio": lambda score, b, h, q_idx, kv_idx: score / (1 + q_idx) - torch.maximum(score, -score),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_gradients_of_score_mods(name):
    compare(
        qkv(),
        score_mod=SCORE_MODS[name],
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx - 9) & (kv_idx != 3 + b),
    )


@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"heads": 6, "kv_heads": 2}, {"kv_batch": 1}, {"q_len": 17, "kv_len": 150}, {"q_len": 150, "kv_len": 17}],
)
def test_gradients_of_shapes_and_through_lse(sizes, use_lse):
    compare(
        qkv(**sizes),
        use_lse=use_lse,
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + 5 >= kv_idx) & (q_idx != 4),
        scale=0.3,
    )


def test_only_lse_used():
    q, k, v = qkv()
    _, aux = flex_attention(q, k, v, mask_mod=CAUSAL, return_aux=AuxRequest(lse=True))
    expected = torch.autograd.grad(oracle(q, k, v, CAUSAL)[1].sum(), [q, k])
    actual = torch.autograd.grad(aux.lse.sum(), [q, k, v], allow_unused=True)
    close(actual[0], expected[0])
    close(actual[1], expected[1])
    assert actual[2] is None or (actual[2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_dtypes(dtype):
    atol = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float64: 1e-10}[dtype]
    compare(
        qkv(dtype=dtype), score_mod=SCORE_MODS["softcap"], mask_mod=CAUSAL, atol=atol, use_lse=dtype == torch.float64
    )


def test_rows_without_a_key_give_exactly_zero():
    q, k, v = qkv()
    keep = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx >= 20) & (kv_idx != 7)
    grads = compare((q, k, v), mask_mod=keep, use_lse=True)
    assert (grads[0][:, :, :20] == 0).all()
    assert all((g[:, :, 7] == 0).all() for g in grads[1:])
    compare((q, k, v), mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0)


# ---------------------------------------------------------------- captured tensors
def test_captured_tables_of_every_rank():
    scalar = torch.tensor(0.7, requires_grad=True)
    table = torch.randn(4, 79, requires_grad=True)
    bias = torch.randn(1, 4, 40, 1, requires_grad=True)
    half = torch.randn(40, dtype=torch.bfloat16, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * scalar + table[h, q_idx - kv_idx + 39] + bias[0, h, q_idx, 0] * score + half[kv_idx]

    compare(qkv(), (scalar, table, bias), score_mod=score_mod, mask_mod=CAUSAL)
    q, k, v = qkv()
    grads = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), [half])
    assert grads[0].dtype == torch.bfloat16


def test_same_table_indexed_twice():
    table = torch.randn(40, requires_grad=True)
    compare(qkv(), (table,), score_mod=lambda score, b, h, q_idx, kv_idx: score + table[q_idx] * table[kv_idx])


def test_table_captured_by_score_and_mask():
    table = torch.randn(40, requires_grad=True)
    compare(
        qkv(),
        (table,),
        score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
        mask_mod=lambda b, h, q_idx, kv_idx: (table[kv_idx] > -0.5) | (q_idx == kv_idx),
    )


def test_tensor_computed_inside_the_mod_keeps_its_graph():
    weight = torch.randn(40, 3, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        bias = torch.tanh(weight).sum(-1)
        return score + bias[q_idx - kv_idx]

    compare(qkv(), (weight,), score_mod=score_mod, mask_mod=CAUSAL)


def test_strided_and_broadcast_captures():
    parameter = torch.randn(40, 4, requires_grad=True)
    view = (2 * parameter).transpose(0, 1)
    wide = parameter[:, :1].expand(40, 40)
    compare(
        qkv(), (parameter,), score_mod=lambda score, b, h, q_idx, kv_idx: score + view[h, kv_idx] + wide[q_idx, kv_idx]
    )


def test_module_parameters_train():
    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(4, 79))

        def forward(self, score, b, h, q_idx, kv_idx):
            return score + self.table[h, q_idx - kv_idx + 39]

    module = Bias()
    compare(qkv(), (module.table,), score_mod=module, mask_mod=CAUSAL)


# ---------------------------------------------------------------- only what is asked for
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 3), (1, 2)])
def test_only_wanted_gradients_are_computed(wanted, monkeypatch):
    seen = []
    real = cpu.backward
    monkeypatch.setattr(cpu, "backward", lambda *a: seen.append(a[-1]) or real(*a))
    table = torch.randn(40)
    leaves = [*(x.detach() for x in qkv()), table]
    for i in wanted:
        leaves[i].requires_grad_()
    flex_attention(*leaves[:3], lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]).sum().backward()
    assert seen == [(0 in wanted, 1 in wanted, 2 in wanted, (3 in wanted,))]
    assert [x.grad is not None for x in leaves] == [i in wanted for i in range(4)]


def test_no_grad_makes_no_graph():
    q, k, v = qkv()
    with torch.no_grad():
        assert flex_attention(q, k, v).grad_fn is None
    assert flex_attention(q, k, v).grad_fn is not None
    assert flex_attention(*(x.detach() for x in (q, k, v))).grad_fn is None


def test_max_scores_have_no_gradient():
    q, k, v = qkv()
    _, aux = flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    assert not aux.max_scores.requires_grad


def test_one_tensor_as_query_key_and_value():
    x = torch.randn(2, 4, 40, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(flex_attention(x, x, x, mask_mod=CAUSAL).square().sum(), [x])
    (expected,) = torch.autograd.grad(oracle(x, x, x, CAUSAL)[0].square().sum(), [x])
    close(grad, expected)


@pytest.mark.parametrize("how", ["contiguous", "transposed", "expanded"])
def test_upstream_gradients_of_any_strides(how):
    q, k, v = qkv()
    out = flex_attention(q, k, v, mask_mod=CAUSAL)
    upstream = {
        "contiguous": torch.randn(2, 4, 40, 24),
        "transposed": torch.randn(2, 40, 4, 24).transpose(1, 2),
        "expanded": torch.tensor(0.5).expand(2, 4, 40, 24),
    }[how]
    actual = torch.autograd.grad(out, [q, k, v], upstream)
    expected = torch.autograd.grad(oracle(q, k, v, CAUSAL)[0], [q, k, v], upstream.double())
    for a, e in zip(actual, expected):
        close(a, e)


def test_gradcheck():
    q, k, v = qkv(batch=1, heads=2, q_len=5, kv_len=7, qk_dim=3, v_dim=2, dtype=torch.float64)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias):
        mods = {
            "score_mod": lambda score, b, h, i, j: torch.tanh(score) + bias[j],
            "mask_mod": lambda b, h, i, j: i + 2 >= j,
        }
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **mods)
        return out, aux.lse

    assert torch.autograd.gradcheck(f, (q, k, v, bias), check_batched_grad=False)


# ---------------------------------------------------------------- twice, again, changed in between
def test_second_derivatives_of_all_inputs(monkeypatch):
    """Rows without a key, grouped heads, lse, a captured bias, and blocks of rows that end inside the length."""
    monkeypatch.setattr(flexattn.runtime.second_order, "SCORES", 2 * 4 * 7 * 2)
    q, k, v = (
        torch.randn(2, h, n, d, dtype=torch.float64, requires_grad=True)
        for h, n, d in ((4, 5, 3), (2, 7, 3), (2, 7, 2))
    )
    bias = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias):
        mods = {
            "score_mod": lambda score, b, h, i, j: 2 * torch.tanh(score / 2) + bias[h, j],
            "mask_mod": lambda b, h, i, j: (i >= j) & (i != 3),
        }
        out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), enable_gqa=True, **mods)
        return out, torch.where(aux.lse.isinf(), 0.0, aux.lse)

    assert torch.autograd.gradgradcheck(f, (q, k, v, bias), check_batched_grad=False)


def test_second_derivatives_follow_block_lists():
    q, k, v = (torch.randn(1, 1, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    one, rows = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[0], [2], [1]]]], dtype=torch.int32)
    mod = lambda b, h, i, j: (i + j) % 3 != 0
    mask = BlockMask.from_kv_blocks(one, rows, BLOCK_SIZE=2, mask_mod=mod, seq_lengths=(6, 6))
    assert torch.autograd.gradgradcheck(lambda *x: flex_attention(*x, block_mask=mask), (q, k, v))
    masked = torch.autograd.functional.vhp(lambda q: flex_attention(q, k, v, block_mask=mask).square().sum(), q, q)[1]
    keep = mask.to_mask()
    dense = lambda q: torch.nan_to_num(torch.where(keep, q @ k.mT / 3**0.5, -math.inf).softmax(-1)) @ v
    close(masked, torch.autograd.functional.vhp(lambda q: dense(q).square().sum(), q, q)[1])


def test_a_third_derivative_is_a_clear_error():
    q, k, v = qkv(q_len=5, kv_len=7, dtype=torch.float64)
    (first,) = torch.autograd.grad(flex_attention(q, k, v).sum(), [q], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated three times"):
        second.sum().backward()


def test_a_second_derivative_of_kernels_is_a_clear_error():
    q, k, v = qkv()
    problem, plan = flexattn.runtime.attention.prepare((q, k, v), None, (None, None))
    kernels = dataclasses.replace(plan, backend="triton")
    (grad,) = flexattn.runtime.autograd._with_derivatives(problem, kernels, (torch.ones_like(q),), (q, None, None))
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice in its kernels"):
        grad.square().sum().backward()


def test_backward_twice_with_retained_graph():
    q, k, v = qkv()
    out = flex_attention(q, k, v, mask_mod=CAUSAL).square().sum()
    first = torch.autograd.grad(out, [q, k, v], retain_graph=True)
    second = torch.autograd.grad(out, [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("which", ["query", "score table", "mask table"])
def test_a_tensor_changed_before_backward_is_noticed(which):
    q, k, v = qkv()
    query = q * 1
    table, ids = torch.zeros(40), IDS.clone()
    out = flex_attention(
        query,
        k,
        v,
        score_mod=lambda score, b, h, q_idx, kv_idx: score * table[kv_idx].exp(),
        mask_mod=lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
    )
    {"query": query.detach(), "score table": table, "mask table": ids}[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpoint_and_deepcopy():
    q, k, v = qkv()
    table = torch.nn.Parameter(torch.randn(40))
    mask = create_block_mask(CAUSAL, None, None, 40, 40, device="cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, lambda score, b, h, i, j: score + table[j], block_mask=mask)

    plain = torch.autograd.grad(attend(q, k, v).square().sum(), [q, k, v, table])
    again = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False).square().sum(), [q, k, v, table])
    assert all(torch.equal(a, b) for a, b in zip(plain, again))

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.slope = mask, torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            return flex_attention(x, x, x, lambda score, b, h, i, j: score * self.slope, block_mask=self.mask)

    layer = Layer()
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 4, 40, 16)
    assert torch.equal(layer(x), twin(x))
    twin(x).square().sum().backward()
    assert twin.slope.grad is not None
    assert layer.slope.grad is None


def test_function_transforms_give_first_derivatives():
    q, k, v = (x.detach() for x in qkv())
    grad = torch.func.grad(lambda q: flex_attention(q, k, v, mask_mod=CAUSAL).square().sum())(q)
    leaf = q.clone().requires_grad_()
    close(grad, torch.autograd.grad(oracle(leaf, k, v, CAUSAL)[0].square().sum(), [leaf])[0])


def test_function_transforms_reach_captured_tensors_through_score_mods():
    q, k, v = (x.detach() for x in qkv())
    table = torch.rand(k.shape[2])

    def loss(q, table, attention):
        score_mod = lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * table[kv_idx]
        return attention(q, score_mod).square().sum()

    ours = lambda q, score_mod: flex_attention(q, k, v, score_mod=score_mod)
    grads = torch.func.grad(lambda q, table: loss(q, table, ours), argnums=(0, 1))(q, table)
    leaves = [q.clone().requires_grad_(), table.clone().requires_grad_()]
    right = torch.autograd.grad(loss(*leaves, lambda q, score_mod: oracle(q, k, v, None, score_mod)[0]), leaves)
    for got, want in zip(grads, right):
        close(got, want)


@pytest.mark.parametrize(
    "transform, words",
    [
        (lambda f: lambda q: torch.func.jvp(f, (q,), (q,)), "no forward-mode derivative"),
        (lambda f: torch.func.jacfwd(f), "forward-mode|vmap"),
        (lambda f: lambda q: torch.vmap(f)(q[None]), "no rule for torch.vmap"),
        (lambda f: lambda q: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(q[None]), "no rule for torch.vmap"),
        (lambda f: torch.func.jacrev(f), "no rule for torch.vmap"),
        (lambda f: torch.func.grad(lambda q: torch.func.grad(lambda x: f(x).sum())(q).sum()), "differentiated twice"),
        (lambda f: lambda q: torch.autograd.functional.jacobian(f, q, vectorize=True), "no rule for torch.vmap"),
    ],
)
def test_what_function_transforms_cannot_do_says_so(transform, words):
    q, k, v = (x.detach()[:1, :1, :5] for x in qkv())
    with pytest.raises(UnsupportedError, match=words) as raised:
        transform(lambda x: flex_attention(x, k, v, score_mod=lambda s, b, h, i, j: torch.tanh(s)))(q)
    assert_explains(raised.value)


def test_both_directions_tile_maps_exist_before_backward(monkeypatch):
    """The snapshot rule: no tile map is asked for that was not made before the forward launch."""
    q, k, v = qkv(q_len=300, kv_len=300)
    mask = create_block_mask(
        lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 200), None, None, 300, 300, device="cpu"
    )
    flexattn.reset_stats()
    out = flex_attention(q, k, v, block_mask=mask)
    before = flexattn.stats().mask_builds.total()
    out.sum().backward()
    assert flexattn.stats().mask_builds.total() == before


def test_deterministic_algorithms_speak_up_where_atomics_would_be_used():
    def alert(backend):
        layout = Layout(torch.float32, 8, 8)
        plan = Plan(backend, "test", None, None, layout, Device("cpu"), flexattn.runtime.plan.DEFAULT)
        flexattn.runtime.autograd._alert_not_deterministic(plan)

    alert("triton")
    torch.use_deterministic_algorithms(True)
    try:
        alert("torch")
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            alert("triton")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.forget_warnings()
        with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            alert("triton")
    finally:
        torch.use_deterministic_algorithms(False)
