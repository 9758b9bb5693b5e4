"""flex_attention as an operator: one graph under torch.compile and torch.export, and what watches operators sees it."""

from __future__ import annotations

import functools
import gc
import math
import shutil

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexattn
from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention, mods
from flexattn.errors import UnsupportedError
from flexattn.frontend.program_text import program_text, replay
from flexattn.frontend.trace import trace
from flexattn.runtime.reference import oracle

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
if shutil.which("g++") is None:
    BACKENDS = BACKENDS[:1]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(q_len=33, kv_len=41, heads=4, dtype=torch.float32):
    return tuple(torch.randn(2, heads, n, 8, dtype=dtype, requires_grad=True) for n in (q_len, kv_len, kv_len))


def compiled(fn, backend="aot_eager"):
    """fn as one graph, and the number of graphs that were made so far."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, backend=counter, fullgraph=True), lambda: counter.frame_count


def gradients(out, leaves):
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in out)
    return torch.autograd.grad(total, leaves)


def agree(fn, one, leaves, *arguments, exact=True):
    """Outputs and gradients of the graph are those of the eager call."""
    outs = [f(*arguments) for f in (fn, one)]
    outs = [o if isinstance(o, tuple) else (o,) for o in outs]
    found = [[*o, *gradients(o, leaves)] for o in outs]
    assert [x.stride() for x in outs[0]] == [x.stride() for x in outs[1]]
    for eager, graph in zip(*found, strict=True):
        assert eager.shape == graph.shape
        assert torch.equal(eager, graph) if exact else torch.allclose(eager, graph, rtol=1e-4, atol=1e-4)
    return found[0]


# ---------------------------------------------------------------- torch.compile
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_of_a_layer_with_a_bias_made_in_it(backend):
    """Projections around it, a captured tensor that the graph itself computes, closure numbers, lse, a mask object besides."""

    def layer(x, weight, bias, window, cap, mask):
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        slope = bias.exp() * 2

        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score * slope[h] / cap) * cap + slope[0]

        def mask_mod(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx).abs() < window

        out, aux = flex_attention(
            q, k, v, score_mod, block_mask=mask, mask_mod=mask_mod, return_aux=AuxRequest(lse=True, max_scores=True)
        )
        return out.transpose(1, 2).flatten(-2).relu(), aux.lse

    one, graphs = compiled(layer, backend)
    made = []
    for length, window, cap in [(40, 5, 2.0), (33, 6, 2.0), (57, 7, 2.5), (65, 9, 3.5), (66, 11, 4.5), (91, 0, 5.0)]:
        weight, bias = torch.randn(32, 96) / 6, torch.rand(2)
        leaves = [weight.requires_grad_(), bias.requires_grad_()]
        mask = create_block_mask(CAUSAL, None, None, length, length, device="cpu")
        _, _, _, d_bias = agree(
            layer,
            one,
            leaves,
            torch.randn(2, length, 32),
            weight,
            bias,
            window,
            cap,
            mask,
            exact=backend == "aot_eager",
        )
        assert window == 0 or d_bias.abs().min() > 0
        made.append(graphs())
    assert made[0] == 1
    assert made[-1] == made[3] <= 4, (
        "constant, then changing lengths and integers, then changing floats: no more graphs"
    )


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, t, n: s * t[0] + 3,
        lambda s, t, n: 2 - s / n,
        lambda s, t, n: torch.where(s > 0.25, s, -float("inf")),
        lambda s, t, n: torch.where(n < s, s, torch.full((), -1.0, device=s.device)),
        lambda s, t, n: s + t[1:3].sum() + t[..., -1],
        lambda s, t, n: s.clamp(min=-n).to(torch.float32) ** 2,
        lambda s, t, n: (t * 2)[2] - s.abs() + t.mean(),
    ],
)
def test_what_a_mod_computes(mod):
    """Literals, reflected operators, comparisons with the number on the left, slices, reductions, scalars made in a mod."""
    q, k, v = qkv()
    table = torch.randn(4, requires_grad=True)

    def call(q, k, v, table, n):
        return flex_attention(q, k, v, lambda score, b, h, i, j: mod(score, table, n) + 0.01 * i - table[h] * j)

    one, _ = compiled(call)
    for n in (3.0, 2.5):
        agree(call, one, [q, k, v, table], q, k, v, table, n)


def test_mods_of_the_library_and_grouped_heads():
    q, k, v = qkv(heads=4)[0], *qkv(heads=2)[1:]
    call = lambda q, k, v: flex_attention(
        q, k, v, mods.softcap(5.0), mask_mod=mods.sliding_window(7), enable_gqa=True, scale=0.3
    )
    agree(call, compiled(call)[0], [q, k, v], q, k, v)


def test_a_graph_computes_attention():
    """Against the float64 oracle, so that a graph and an eager call cannot be wrong alike."""
    q, k, v = qkv()
    bias = torch.randn(4, 41)
    one, _ = compiled(lambda q, k, v: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], mask_mod=CAUSAL))
    expected, _ = oracle(q, k, v, CAUSAL, lambda s, b, h, i, j: s + bias[h, j])
    assert (one(q, k, v) - expected).abs().max() < 1e-5


def test_positions_and_lengths_on_the_way():
    q, k, v = qkv()
    lengths = torch.tensor([11, 41], dtype=torch.int32)
    call = lambda q, k, v, lengths, offset: flex_attention(
        q, k, v, mask_mod=CAUSAL, q_offset=offset, kv_lengths=lengths
    )
    one, graphs = compiled(call)
    for offset in (3, 8, 2, 0, 5):
        agree(call, one, [q, k, v], q, k, v, lengths, offset)
    assert graphs() <= 3


def test_other_masks_of_one_kind_need_no_further_graph():
    q, k, v = qkv(40, 40)
    call = lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask)
    one, graphs = compiled(call)
    for width in (3, 9, 17, 30):
        mask = create_block_mask(lambda b, h, i, j, w=width: (i - j).abs() < w, None, None, 40, 40, device="cpu")
        agree(call, one, [q, k, v], q, k, v, mask)
    ids = torch.arange(40) // 7
    document = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 40, 40, device="cpu")
    agree(call, one, [q, k, v], q, k, v, document)
    lists = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 5, dtype=torch.int32), torch.arange(5, dtype=torch.int32).view(1, 1, 5, 1), BLOCK_SIZE=8,
        seq_lengths=(40, 40),
    )  # fmt: skip
    agree(call, one, [q, k, v], q, k, v, lists)
    assert graphs() <= 2


def test_a_stale_mask_is_noticed_in_a_graph():
    q, k, v = qkv(40, 40)
    ids = torch.arange(40) // 7
    mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 40, 40, device="cpu")
    one, _ = compiled(lambda q: flex_attention(q, k, v, block_mask=mask))
    one(q)
    ids += 1
    with pytest.raises(flexattn.errors.StaleMaskError):
        one(q)


def test_torchs_own_mask():
    from torch.nn.attention.flex_attention import _create_empty_block_mask
    from torch.nn.attention.flex_attention import create_block_mask as torchs

    call = lambda q, k, v, mask: flex_attention(q, k, v, block_mask=mask)
    one, graphs = compiled(call)
    for length in (40, 48, 32):
        q, k, v = qkv(length, length)
        for width in (3, 20):
            band = lambda b, h, i, j, w=width: (i - j).abs() < w
            agree(call, one, [q, k, v], q, k, v, torchs(band, None, None, length, length, device="cpu", BLOCK_SIZE=16))
    agree(call, one, [q, k, v], q, k, v, _create_empty_block_mask(q, k))
    assert graphs() <= 8, "a default of a function is a constant of its graph"


def test_a_mask_made_in_the_graph():
    def step(q, k, v, ids, width):
        mask = create_block_mask(
            lambda b, h, i, j: ((i - j).abs() <= width) & (ids[i] == ids[j]), None, None, q.shape[2], k.shape[2]
        )
        return flex_attention(q * 2, k, v, block_mask=mask) + 1, mask

    one, graphs = compiled(step)
    for length, width in [(40, 3), (33, 9), (51, 10), (52, 0)]:
        q, k, v = qkv(length, length)
        ids = torch.arange(length) // 7
        (out, mask), (expected, right) = (f(q, k, v, ids, width) for f in (one, step))
        assert torch.equal(out, expected)
        for a, b in zip(*(gradients((x,), [q, k, v]) for x in (out, expected))):
            assert torch.equal(a, b)
        assert isinstance(mask, BlockMask)
        assert torch.equal(mask.to_dense(), right.to_dense())
        assert torch.equal(flex_attention(q * 2, k, v, block_mask=mask) + 1, expected)
    assert graphs() <= 2


def test_what_dynamo_cannot_follow_runs_eagerly_after_a_break():
    class Odd:
        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * len(gc.get_objects()) / max(1, len(gc.get_objects()))

    q, k, v = qkv()
    out = torch.compile(lambda q: flex_attention(q * 1, k, v, Odd()) + 1, backend="aot_eager")(q)
    torch.testing.assert_close(out, flex_attention(q, k, v) + 1, rtol=1e-3, atol=1e-3)


def test_a_branch_on_a_traced_value_is_an_error_in_graphs_too():
    q, k, v = qkv()
    branch = lambda score, b, h, i, j: score if i > j else -score
    with pytest.raises(Exception, match=r"branch|data-dependent|Data-dependent"):
        compiled(lambda q: flex_attention(q, k, v, branch))[0](q)
    with pytest.raises(flexattn.errors.TraceError, match="branch"):
        torch.compile(lambda q: flex_attention(q, k, v, branch), backend="aot_eager")(q)


def test_autocast_around_and_inside_of_a_graph():
    q, k, v = qkv()
    inside = lambda q, k, v: torch.autocast("cpu", torch.bfloat16)(flex_attention)(q, k, v, mask_mod=CAUSAL)
    one, _ = compiled(inside)
    assert one(q, k, v).dtype == torch.bfloat16
    agree(inside, one, [q, k, v], q, k, v)
    plain = lambda q, k, v: flex_attention(q, k, v, mask_mod=CAUSAL)
    one, _ = compiled(plain)
    with torch.autocast("cpu", torch.bfloat16):
        out = one(q, k, v)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, plain(q, k, v))
    assert all(g.dtype == torch.float32 for g in gradients((out,), [q, k, v]))


def test_a_kernels_options_and_a_wrong_one():
    q, k, v = qkv()
    one, _ = compiled(lambda q: flex_attention(q, k, v, kernel_options={"BACKEND": "TORCH", "strict_nan": True}))
    assert torch.equal(one(q), flex_attention(q, k, v))
    with pytest.raises(Exception, match="unknown key"):
        compiled(lambda q: flex_attention(q, k, v, kernel_options={"BLOCK_K": 16}))[0](q)


def test_shapes_that_do_not_fit_are_found_while_tracing():
    q, k, v = qkv()
    with pytest.raises(Exception, match="same embedding dimension"):
        compiled(lambda q: flex_attention(q, k[..., :4], v))[0](q)


# ---------------------------------------------------------------- checkpoints, transforms
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_checkpoint_policy_keeps_attention(in_graph):
    """The policy is asked about the operator, and attention runs once in the forward pass and not again in the backward pass."""
    q, k, v = qkv()
    bias = torch.randn(4, requires_grad=True)
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        is_ours = op is torch.ops.flexattn.attention.default
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    plain = lambda q, k, v, bias: flex_attention(q, k, v, lambda s, b, h, i, j: s * bias[h], mask_mod=CAUSAL)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    kept = lambda *x: checkpoint(plain, *x, use_reentrant=False, context_fn=contexts)
    one = compiled(kept)[0] if in_graph else kept
    flexattn.reset_stats()
    found = gradients((one(q, k, v, bias),), [q, k, v, bias])
    assert flexattn.stats().launches == {"torch forward": 1, "torch backward": 1}
    assert torch.ops.flexattn.attention.default in asked
    for a, b in zip(found, gradients((plain(q, k, v, bias),), [q, k, v, bias])):
        assert torch.equal(a, b)


def test_a_plain_checkpoint_in_a_graph():
    q, k, v = qkv()
    call = lambda q, k, v: checkpoint(
        lambda *x: flex_attention(*x, mods.softcap(3.0), mask_mod=CAUSAL), q, k, v, use_reentrant=False
    )
    agree(call, compiled(call)[0], [q, k, v], q, k, v)


def test_function_transforms_break_a_graph():
    q, k, v = (x.detach() for x in qkv())
    bias = torch.randn(4)

    def loss(q, bias):
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h] * j, mask_mod=CAUSAL).square().sum()

    expected = torch.func.grad(loss, argnums=(0, 1))(q, bias)
    whole = lambda q, bias: torch.func.grad(loss, argnums=(0, 1))(q * 1, bias)
    found = torch.compile(whole, backend="aot_eager")(q, bias)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    with pytest.raises(Exception, match=r"under torch\.func"):
        compiled(whole)[0](q, bias)


def test_the_operator_has_no_rule_for_vmap():
    q, k, v = (x.detach() for x in qkv())
    call = (
        "Call(scale=None, enable_gqa=False, q_offset=None, kv_lengths=None, options={}, lse=False, max_scores=False, "
    )
    call += "needs_grad=False, score=None, mask=None, block_mask=None)"
    run = lambda q: torch.ops.flexattn.attention(q, k, v, [], [], [], call)[0]
    assert torch.equal(run(q), flex_attention(q, k, v))
    with pytest.raises(UnsupportedError, match=r"no rule for torch\.vmap"):
        torch.vmap(run)(q[None])


# ---------------------------------------------------------------- the operator itself
def test_opcheck():
    q, k, v = qkv(13, 17)
    bias, ids = torch.randn(4, requires_grad=True), torch.arange(41)
    score = "Mod('score', 'getitem(c0, v2)\\nmul(v0, v5)\\nadd(v6, n0)\\nreturn v7', (t0, ), (f0, ))"
    mask = "Mod('mask', 'getitem(c0, v2)\\nge(v4, v3)\\nsub(v2, n0)\\nlt(v6, v3)\\n__and__(v5, v7)\\nreturn v8', (t1, ), (i0, ))"
    call = (
        "Call(scale=0.5, enable_gqa=False, q_offset=None, kv_lengths=None, options={}, lse=True, max_scores=True, "
        f"needs_grad=True, score={score}, mask={mask}, block_mask=None)"
    )
    arguments = (q, k, v, [bias, ids], [5], [torch.tensor(1.5, dtype=torch.float64)], call)
    torch.library.opcheck(torch.ops.flexattn.attention.default, arguments)
    out, lse, _ = torch.ops.flexattn.attention(*arguments)
    upstream = (torch.randn_like(out), None, out.detach(), lse.detach())
    inputs = tuple(x.detach() for x in (q, k, v))
    back = (*upstream, *inputs, [bias.detach(), ids], *arguments[4:], [True, False, True, True, False])
    torch.library.opcheck(torch.ops.flexattn.attention_backward.default, back)


@pytest.mark.parametrize("order", ["bhld", "blhd", "expanded", "sliced"])
def test_outputs_and_gradients_lie_as_the_graph_was_told(order):
    make = {
        "bhld": lambda n: torch.randn(2, 4, n, 8),
        "blhd": lambda n: torch.randn(2, n, 4, 8).transpose(1, 2),
        "expanded": lambda n: torch.randn(2, 1, n, 8).expand(2, 4, n, 8),
        "sliced": lambda n: torch.randn(2, 4, n, 24)[..., 8:16],
    }[order]
    q, k, v = (make(n).requires_grad_() for n in (33, 41, 41))
    call = lambda q, k, v: flex_attention(q, k, v, mask_mod=CAUSAL)
    agree(call, compiled(call)[0], [q, k, v], q, k, v)


def test_no_query_and_no_key():
    call = lambda q, k, v: flex_attention(q, k, v, mask_mod=CAUSAL, return_aux=AuxRequest(lse=True))[0]
    for q_len, kv_len in [(0, 5), (5, 0)]:
        q, k, v = qkv(q_len, kv_len)
        agree(call, compiled(call)[0], [q, k, v], q, k, v)


@pytest.mark.parametrize("name", ["causal", "softcap", "alibi", "document", "literals"])
def test_a_programs_text_says_the_program(name):
    ids, table = torch.arange(40) // 7, torch.randn(4)
    mod, kind = {
        "causal": (CAUSAL, "mask"),
        "softcap": (mods.softcap(20.0), "score"),
        "alibi": (lambda s, b, h, i, j: s + table[h] * (j - i), "score"),
        "document": (lambda b, h, i, j: (ids[i] == ids[j]) & ~(i - j > 5) | (j < 3), "mask"),
        "literals": (lambda s, b, h, i, j: torch.where(i % 2 == 1, s * 0.5, -math.inf).to(torch.float16), "score"),
    }[name]
    traced = trace(mod, kind)
    again = trace(replay(program_text(traced.program), *traced.binding, kind), kind)
    assert again.program == traced.program
    assert again.binding.numbers == traced.binding.numbers
    assert all(a is b for a, b in zip(again.binding.captures, traced.binding.captures, strict=True))


@pytest.mark.parametrize("line", ["__import__('os')", "open('x')", "v0.__class__", "op.system(v0, dtype=bool)", "n7"])
def test_a_text_computes_nothing_but_mods(line):
    with pytest.raises((flexattn.errors.FlexError, IndexError)):
        trace(replay(f"{line}\nreturn v4", (), (), "mask"), "mask")


# ---------------------------------------------------------------- torch.export
class Biased(torch.nn.Module):
    def __init__(self, mask=None):
        super().__init__()
        self.bias, self.mask = torch.nn.Parameter(torch.randn(4)), mask

    def forward(self, q, k, v):
        window = q.shape[2] // 3
        score_mod = lambda score, b, h, i, j: score * self.bias[h]
        mask_mod = None if self.mask is not None else lambda b, h, i, j: (i - j).abs() <= window
        return flex_attention(q, k, v, score_mod, block_mask=self.mask, mask_mod=mask_mod)


@pytest.mark.parametrize("strict", [False, True])
def test_export_and_back(strict, tmp_path):
    model, inputs = Biased(), qkv()
    lengths = [torch.export.Dim(n, min=4, max=4000) for n in ("q_len", "kv_len")]
    shapes = tuple({2: d} for d in (lengths[0], lengths[1], lengths[1]))
    program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)
    assert torch.ops.flexattn.attention.default in [n.target for n in program.graph.nodes]
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for q_len, kv_len in [(33, 41), (50, 20)]:
        other = qkv(q_len, kv_len)
        assert torch.equal(loaded(*other), model(*other))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_mask_needs_no_object_of_this_process(strict, tmp_path):
    ids = torch.arange(41) // 7
    mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 33, 41, device="cpu")
    model, inputs = Biased(mask), qkv()
    expected = model(*inputs)
    torch.export.save(torch.export.export(model, inputs, strict=strict), tmp_path / "model.pt2")
    model.mask = mask = None
    gc.collect()
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(*inputs), expected)


def test_a_mask_that_is_gone_is_an_error():
    q, k, v = qkv()
    call = (
        "Call(scale=None, enable_gqa=False, q_offset=None, kv_lengths=None, options={}, lse=False, max_scores=False, "
    )
    call += "needs_grad=False, score=None, mask=None, block_mask=Made(i0))"
    with pytest.raises(UnsupportedError, match="BlockMask that is gone"):
        torch.ops.flexattn.attention(q, k, v, [], [1 << 60], [], call)


# ---------------------------------------------------------------- CUDA graphs
def test_what_an_operator_makes_while_a_graph_is_warmed_up_is_the_graphs(monkeypatch):
    import sys
    from types import SimpleNamespace

    from flexattn.runtime import device as devices

    manager = SimpleNamespace(in_warmup=True)
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    gpu = torch.device("cuda", 0)
    assert not devices._warms_up(gpu)
    with devices.within_operator():
        assert devices._warms_up(gpu)
        manager.in_warmup = False
        assert not devices._warms_up(gpu)
    manager.in_warmup = True
    assert not devices._warms_up(gpu)


# ---------------------------------------------------------------- data parallel
DISTRIBUTED = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.runtime.test_compile_api import Model

dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
dist._DEFAULT_FIRST_BUCKET_BYTES = 512  # so that the graph is cut into several
model, x = torch.nn.Sequential(Model(), Model()), torch.randn(2, 40, 32)
model(x).square().sum().backward()
expected = [p.grad.clone() for p in model.parameters()]

def check(run):
    for p in model.parameters():
        p.grad = None
    run(x).square().sum().backward()
    for p, right in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, right)

check(torch.compile(torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005), backend="aot_eager"))
mesh = init_device_mesh("cpu", (1,))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
check(model)
for layer in model:
    layer.compile(backend="aot_eager")
check(model)
dist.destroy_process_group()
print("all agree")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without it")
def test_data_parallel_models_train_as_the_plain_one(tmp_path):
    import os
    import subprocess
    import sys
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "STORE": str(tmp_path / "store"),
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout.strip().endswith("all agree"), done.stderr[-2000:]
