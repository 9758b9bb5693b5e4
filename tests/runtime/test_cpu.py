"""The torch-ops path from inside: which products a row becomes, every branch of the forward, programs run in place, memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from flexattn import AuxRequest, BlockMask, create_block_mask, flex_attention
from flexattn.errors import CaptureIndexError
from flexattn.frontend.trace import trace
from flexattn.runtime import cpu, cpu_mods, cpu_rows
from flexattn.runtime.attention import prepare
from flexattn.runtime.cpu_mods import MaskMod, Positions, ScoreMod, shift_invariant
from flexattn.runtime.cpu_rows import cut_chunks, split_chunks
from tests.helpers import check, exact, make_qkv, run

CPU = torch.device("cpu")
CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
SOFT_CAP = lambda score, b, h, q_idx, kv_idx: 20 * torch.tanh(score / 20)


# ---------------------------------------------------------------- rows and chunks
SPANS = {
    "one run": [(0, 128, True), (128, 512, False), (512, 640, True)],
    "two long runs": [(0, 512, False), (1024, 1536, True)],
    "many short runs": [(64 * n, 64 * n + 32, n % 3 == 0) for n in range(40)],
    "one key": [(7, 8, True)],
}


@pytest.mark.parametrize("longest", [32, 100, 512, 10_000])
@pytest.mark.parametrize("name", SPANS)
def test_chunks_cover_the_spans_once_and_know_what_is_masked(name, longest) -> None:
    spans, line = SPANS[name], torch.arange(4096)
    found, masked = [], []
    for chunk in cut_chunks(spans, longest, CPU):
        assert chunk.length <= longest
        keys = line[chunk.keys]
        assert len(keys) == chunk.length
        found += keys.tolist()
        for start, stop in chunk.masked:
            masked += keys[start:stop].tolist()
    assert found == [key for start, stop, _ in spans for key in range(start, stop)]
    assert masked == [key for start, stop, is_masked in spans for key in range(start, stop) if is_masked]


def test_short_runs_are_gathered_and_long_ones_are_slices() -> None:
    assert len(cut_chunks(SPANS["many short runs"], 10_000, CPU)) == 1
    assert not isinstance(cut_chunks(SPANS["many short runs"], 10_000, CPU)[0].keys, slice)
    assert [c.keys for c in cut_chunks(SPANS["two long runs"], 10_000, CPU)] == [slice(0, 512), slice(1024, 1536)]
    assert cut_chunks([], 512, CPU) == []


def test_unmasked_keys_are_split_off_where_they_are_most() -> None:
    assert [c.masked for c in split_chunks([(0, 2048, False), (2048, 2176, True)], CPU)] == [(), ((0, 128),)]
    assert [c.masked for c in split_chunks(SPANS["one run"], CPU)] == [((0, 128), (512, 640))]


@pytest.mark.parametrize(
    ("heads", "group", "at_once", "step"),
    [(8, 1, 16, 8), (64, 4, 16, 16), (64, 5, 16, 15), (64, 64, 16, 16), (6, 6, 4, 3)],
)
def test_heads_at_once_are_whole_groups_or_a_part_of_one(heads, group, at_once, step) -> None:
    assert cpu_rows._head_step(heads, group, at_once) == step


@pytest.mark.parametrize("kv_batch", [3, 1])
@pytest.mark.parametrize("mask", ["shared", "by batch", "by head", "by both"])
def test_units_whatever_the_mask_depends_on(mask, kv_batch, monkeypatch) -> None:
    monkeypatch.setattr(cpu_rows, "ONE_TILE", 0)
    monkeypatch.setattr(cpu_rows, "TILE", 1 << 17)  # two query heads at once: units are parts of a group
    mods = {
        "shared": CAUSAL,
        "by batch": lambda b, h, i, j: (i >= j) & (j % (b + 2) == 0),
        "by head": lambda b, h, i, j: (i >= j) & (j % (h + 2) == 0),
        "by both": lambda b, h, i, j: (i >= j) & (j % (h + b + 2) == 0),
    }
    qkv = make_qkv(3, (8, 2), (140, 300), (16, 24), kv_batch=kv_batch)
    block_mask = create_block_mask(mods[mask], 3, 8, 140, 300)
    result, expected = run(qkv, block_mask=block_mask), exact(qkv, mods[mask])
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 3e-5 * max(1.0, want[torch.isfinite(want)].abs().max().item()) or torch.equal(
            got.double(), want
        )


# ---------------------------------------------------------------- branches of the forward
@pytest.fixture
def branches(monkeypatch) -> dict[str, int]:
    """How often each way of computing a row was taken."""
    counts = {"fused": 0, "plain": 0, "safe": 0}

    def count(name: str, function: str) -> None:
        original = getattr(cpu, function)

        def counted(*args):
            result = original(*args)
            counts[name] += result is not False
            return result

        monkeypatch.setattr(cpu, function, counted)

    for name, function in (("fused", "_fused_row"), ("plain", "_sum_row"), ("safe", "_sum_row_safely")):
        count(name, function)
    return counts


def test_plain_scores_take_the_fused_rows(branches) -> None:
    check(make_qkv(1, (2, 2), (300, 300), (16, 16), requires_grad=False), CAUSAL)
    assert branches == {"fused": 3, "plain": 0, "safe": 0}


def test_other_scores_are_first_tried_without_a_maximum(branches) -> None:
    check(make_qkv(1, (2, 2), (300, 300), (16, 16), requires_grad=False), CAUSAL, SOFT_CAP)
    assert branches == {"fused": 0, "plain": 3, "safe": 0}


def test_great_scores_are_done_again_with_the_maximum_until_patience_ends(branches) -> None:
    qkv = make_qkv(1, (2, 2), (1000, 1000), (16, 16), requires_grad=False)
    check(qkv, CAUSAL, lambda s, b, h, i, j: s + 200.0)
    assert branches == {"fused": 0, "plain": cpu.PATIENCE, "safe": 8}
    check(qkv, CAUSAL, lambda s, b, h, i, j: s - 200.0)
    assert branches == {"fused": 0, "plain": 2 * cpu.PATIENCE, "safe": 16}


def test_maxima_take_the_safe_rows(branches) -> None:
    q, k, v = make_qkv(2, (4, 2), (140, 150), (16, 24), requires_grad=False)
    mask = lambda b, h, i, j: (i > j) & (i != 77)
    aux = flex_attention(q, k, v, SOFT_CAP, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(max_scores=True))[1]
    scores = SOFT_CAP(q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4, 0, 0, 0, 0)
    keep = mask(0, 0, torch.arange(140)[:, None], torch.arange(150))
    expected = scores.masked_fill(~keep, -math.inf).amax(-1)
    assert torch.equal(torch.isneginf(aux.max_scores), torch.isneginf(expected))
    assert (aux.max_scores - expected)[:, :, 1:77].abs().max() < 1e-5
    assert branches["safe"] > 0
    assert branches["plain"] == branches["fused"] == 0


def test_nan_of_a_masked_key_does_not_reach_fused_rows(branches) -> None:
    q, k, v = make_qkv(1, (2, 2), (100, 100), (16, 16), requires_grad=False)
    expected = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: j != 5)
    k[:, :, 5] = math.nan
    spoiled = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: j != 5)
    assert (spoiled - expected).abs().max() < 1e-6
    assert branches["fused"] == 1
    assert branches["plain"] == 1


def test_without_the_fused_kernel_results_are_the_same(monkeypatch) -> None:
    qkv = make_qkv(2, (4, 2), (260, 300), (16, 16))
    mask = lambda b, h, i, j: (i >= j) & (i - j < 90)
    fused = run(qkv, mask)
    monkeypatch.setattr(cpu, "_FUSED", None)
    plain = check(qkv, mask)
    assert (plain.out - fused.out).abs().max() < 2e-6
    assert (plain.lse - fused.lse).abs().max() < 2e-6


def test_long_rows_are_cut_into_several_products(monkeypatch) -> None:
    monkeypatch.setattr(cpu, "TILE", 1)
    monkeypatch.setattr(cpu, "SHORTEST", 100)
    table = torch.randn(700, requires_grad=True)
    mask = lambda b, h, i, j: (i + 400 >= j) & (j % 3 != 1)
    for score in (SOFT_CAP, lambda s, b, h, i, j: s + 300.0, lambda s, b, h, i, j: s * 0.5 + table[j]):
        check(make_qkv(1, (4, 2), (150, 700), (16, 24)), mask, score, captures=[table])


def test_list_masks_do_not_apply_their_function_in_full_blocks() -> None:
    count = lambda *n: torch.tensor([[list(n)]], dtype=torch.int32)
    index = torch.tensor([[[[0, 2, 1], [1, 0, 2]]]], dtype=torch.int32)
    full = torch.tensor([[[[1, 0, 2], [2, 1, 0]]]], dtype=torch.int32)
    odd = lambda b, h, i, j: (i + j) % 2 == 1
    block_mask = BlockMask.from_kv_blocks(
        count(2, 1), index, count(1, 1), full, BLOCK_SIZE=128, mask_mod=odd, seq_lengths=(200, 384)
    )
    kinds = torch.tensor([[1, 2, 1], [0, 1, 2]])  # nothing, by function, whole
    mask = lambda b, h, i, j: (kinds[i // 128, j // 128] == 2) | ((kinds[i // 128, j // 128] == 1) & ((i + j) % 2 == 1))
    qkv = make_qkv(2, (2, 1), (200, 384), (16, 16))
    result, expected = run(qkv, block_mask=block_mask), exact(qkv, mask)
    for got, want in zip((result.out, result.lse, *result.grads), (expected.out, expected.lse, *expected.grads)):
        assert (got - want).abs().max() < 3e-5 * max(1.0, want.abs().max().item())


# ---------------------------------------------------------------- programs in place
def _positions(shape=(2, 3, 5, 7)) -> Positions:
    return Positions(
        *(torch.arange(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape))
    )


def test_a_soft_cap_needs_no_memory_besides_its_scores() -> None:
    score = torch.randn(2, 3, 5, 7)
    expected = 20 * torch.tanh(score / 20)
    mod = ScoreMod(trace(SOFT_CAP, "score"), CPU)
    result, saved = mod.apply(score, pytest.fail, _positions(), pytest.fail)
    assert result is score
    assert saved == []
    assert torch.allclose(result, expected, rtol=1e-6, atol=1e-6)


TABLE = torch.randn(7, requires_grad=True)
DERIVATIVES = {
    "soft-cap": SOFT_CAP,
    "square": lambda s, b, h, i, j: s * s,
    "exp": lambda s, b, h, i, j: torch.exp(s),
    "shared": lambda s, b, h, i, j: torch.tanh(s) * torch.exp(torch.tanh(s)) + s,
    "where": lambda s, b, h, i, j: torch.where(i > j, s * TABLE[j], torch.sin(s) + TABLE[j] * TABLE[i]),
    "constant": lambda s, b, h, i, j: i * 0.5,
    "identity plus table": lambda s, b, h, i, j: s + TABLE[j],
    "detached": lambda s, b, h, i, j: s * s.detach(),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_start_from_values_nothing_has_written_over(name) -> None:
    shape, positions = (2, 3, 5, 7), _positions()
    score, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.as_tensor(DERIVATIVES[name](score, *positions)).expand(shape).float()
    leaves = [score, TABLE]
    wanted = torch.autograd.grad(expected, leaves, grad, allow_unused=True) if expected.requires_grad else (None, None)
    traced = trace(DERIVATIVES[name], "score")
    mod = ScoreMod(traced, CPU, [c.requires_grad for c in traced.binding.captures])
    tile, spare = score.detach().clone(), torch.full(shape, math.nan)
    result, saved = mod.apply(tile, lambda: spare, positions, pytest.fail)
    assert torch.allclose(result, expected, rtol=1e-6, atol=1e-6)
    result.exp_()  # what the backward pass does next
    d_score, captures = mod.differentiate(grad.clone(), positions, saved)
    sums = [torch.zeros(7)]
    for part in captures:
        part.add_to(sums, torch.zeros(shape, dtype=torch.bool))
    assert torch.allclose(
        d_score.expand(shape), torch.zeros(shape) if wanted[0] is None else wanted[0], rtol=1e-5, atol=1e-5
    )
    assert torch.allclose(sums[0], torch.zeros(7) if wanted[1] is None else wanted[1], rtol=1e-5, atol=1e-5)


def test_reads_out_of_range_count_only_where_kept() -> None:
    short = torch.arange(5.0)
    mask = MaskMod(trace(lambda b, h, i, j: (j < 5) & (short[j] > 0), "mask"), CPU)
    assert torch.equal(~mask.dropped(_positions())[0, 0, 0], torch.tensor([0, 1, 1, 1, 1, 0, 0]).bool())
    with pytest.raises(CaptureIndexError, match=r"kept position.*sizes \(5,\)"):
        MaskMod(trace(lambda b, h, i, j: (short[j] > 3) | (j > 5), "mask"), CPU).dropped(_positions())
    score = ScoreMod(trace(lambda s, b, h, i, j: s + short[j], "score"), CPU)
    kept = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    kept[..., 5:] = False
    result, _ = score.apply(torch.zeros(2, 3, 5, 7), pytest.fail, _positions(), lambda: kept)
    assert torch.equal(result[..., :5], short.expand(2, 3, 5, 5))
    with pytest.raises(CaptureIndexError, match=r"test_cpu\.py:\d+: captured tensor `short`"):
        score.apply(torch.zeros(2, 3, 5, 7), pytest.fail, _positions(), lambda: ~kept)


IDS = torch.arange(9) // 2
SHIFTS = {
    "causal": (CAUSAL, True),
    "window": (lambda b, h, i, j: (i - j < 5) & (j <= i + 3), True),
    "per head": (lambda b, h, i, j: i - j < h * 3, True),
    "table of the distance": (lambda b, h, i, j: IDS[(i - j).abs()] == 1, True),
    "dilated": (lambda b, h, i, j: (i - j) % 3 == 0, True),
    "prefix": (lambda b, h, i, j: (j < 4) | (i >= j), False),
    "documents": (lambda b, h, i, j: IDS[i] == IDS[j], False),
    "chunks": (lambda b, h, i, j: i // 4 == j // 4, False),
    "sum": (lambda b, h, i, j: i + j < 7, False),
    "twice the distance": (lambda b, h, i, j: 2 * i - 2 * j < 7, False),  # is, but not proved
    "scaled": (lambda b, h, i, j: i * 0.5 >= j, False),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_masks_that_repeat_along_the_diagonal(name) -> None:
    mask, expected = SHIFTS[name]
    program = trace(mask, "mask").program
    assert shift_invariant(program.body) is expected
    if expected:
        evaluator = MaskMod(trace(mask, "mask"), CPU)
        first = evaluator.dropped(_positions((1, 3, 4, 4)))
        b, h, i, j = _positions((1, 3, 4, 4))
        assert torch.equal(first, evaluator.dropped(Positions(b, h, i + 5, j + 5)))


def test_mask_tiles_are_kept_along_the_diagonal(monkeypatch) -> None:
    evaluated = []
    original = MaskMod.dropped
    monkeypatch.setattr(
        MaskMod, "dropped", lambda self, positions: (evaluated.append(positions.shape()), original(self, positions))[1]
    )
    check(make_qkv(1, (2, 2), (1280, 1280), (16, 16), requires_grad=False), lambda b, h, i, j: (i >= j) & (i - j < 100))
    assert len(evaluated) <= 3  # the first row of tiles, and all others


# ---------------------------------------------------------------- the promises of the path
def test_memory_grows_with_length_times_block() -> None:
    code = """
import resource, sys, torch, flexattn
torch.set_num_threads(1)
n = int(sys.argv[1])
q = torch.randn(1, 1, n, 16, requires_grad=True)
window = lambda b, h, i, j: (i >= j) & (i - j < 200)
flexattn.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, mask_mod=window).sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    small, large = (
        int(subprocess.run([sys.executable, "-c", code, n], capture_output=True, text=True, check=True).stdout)
        for n in ("1000", "65000")
    )
    assert (large - small) * 1024 < 200 << 20  # a boolean mask alone would be 4 GB


def test_two_runs_give_the_same_bits() -> None:
    table = torch.randn(599, requires_grad=True)
    qkv = make_qkv(2, (4, 2), (300, 300), (16, 24))
    runs = [run(qkv, CAUSAL, lambda s, b, h, i, j: s + table[i - j + 299], captures=[table]) for _ in range(3)]
    for other in runs[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip((runs[0].out, runs[0].lse, *runs[0].grads), (other.out, other.lse, *other.grads))
        )


def test_tile_maps_are_made_before_they_are_needed() -> None:
    q, k, v = make_qkv(1, (2, 2), (600, 600), (16, 16), requires_grad=False)
    block_mask = create_block_mask(CAUSAL, None, None, 600, 600)
    problem, plan = prepare((q, k, v), None, (block_mask, None))
    cpu.make_tile_maps(problem, plan)
    made = block_mask.tile_map(cpu_rows.Q_TILE, cpu_rows.KV_TILE)
    cpu.forward(problem, plan)
    assert block_mask.tile_map(cpu_rows.Q_TILE, cpu_rows.KV_TILE) is made
    assert cpu_mods._flatten.cache_info().hits > 0


def test_a_derivative_that_is_infinite_at_a_dropped_pair_gives_no_gradient() -> None:
    """d log(w) / dw is infinite where w is 0: with the gradient 0 of a dropped pair it would make NaN."""
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    weight = torch.rand(40) + 0.5
    weight[::3] = 0
    weight.requires_grad_()
    mask_mod = lambda b, h, q_idx, kv_idx: kv_idx % 3 != 0
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.log(weight[j]), mask_mod=mask_mod)
    (grad,) = torch.autograd.grad(out.square().sum(), weight)
    assert torch.equal(grad[::3], torch.zeros(14))
    assert torch.isfinite(grad).all() and grad[1::3].abs().min() > 0
