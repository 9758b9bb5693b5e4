"""Bounds of masks over boxes as expressions: sound on every family and on random masks, as tight as the CPU's where promised."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.frontend.box_bounds import BoxBounds, box_bounds
from flexattn.frontend.evaluate import evaluate, gather
from flexattn.frontend.expr import Expr, fold
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Binding, Traced
from flexattn.frontend.trace import trace
from tests.frontend.library_masks import BATCH, HEADS, LIBRARY
from tests.frontend.mask_families import families
from tests.frontend.mask_fuzz import Sizes, predicate
from tests.frontend.test_mask_fuzz import budget

pytestmark = pytest.mark.usefixtures("one_thread")
N = 260
MASKS = families(N)
CPU = torch.device("cpu")
Box = dict[str, Tensor]  # b, h, q_lo, q_hi, kv_lo, kv_hi: int64 [boxes]


# ---------------------------------------------------------------- evaluation of bounds
def value_of(root: Expr, binding: Binding, box: Box) -> Tensor:
    """An expression of bounds at each box, with torch; extremes over ranges come from the captured tensor itself."""

    def visit(node: Expr, args: list[Tensor]) -> Tensor:
        if node.op == "var":
            return box[node.attr]
        if node.op in ("const", "num"):
            return torch.tensor(node.attr if node.op == "const" else binding.numbers[node.attr], dtype=node.dtype)
        if node.op == "load":
            return gather(binding.captures[node.attr[0]], args, None, CPU)
        if node.op == "size":
            return torch.tensor(binding.captures[node.attr[0]].shape[node.attr[2]])
        if node.op in ("least", "greatest", "values"):
            return extreme(node.op, binding.captures[node.attr[0]], *args)
        if node.op == "cast":
            return args[0].to(node.dtype)
        return OPS[node.op].eval(*args)

    found: Tensor = fold([root], visit)[0]
    return found.expand(box["q_lo"].shape)


def extreme(op: str, tensor: Tensor, first: Tensor, last: Tensor, length: Tensor) -> Tensor:
    """Over flat positions first .. last, which lie in the tensor; of an empty one, as of a tree without a leaf, 0. Values as a
    set: exactly those modulo 64, as bits."""
    data = tensor.reshape(-1).long()
    assert int(length) == data.numel()
    first, last = torch.broadcast_tensors(first, last)
    if not data.numel():
        return torch.zeros_like(first) + (op == "values")
    assert bool(((first >= 0) & (first <= last) & (last < length)).all()), "positions outside the captured tensor"
    reduce = {"least": torch.min, "greatest": torch.max, "values": set_of}[op]
    flat = [reduce(data[a : z + 1]) for a, z in zip(first.reshape(-1).tolist(), last.reshape(-1).tolist())]
    return torch.stack(flat).view(first.shape) if flat else torch.zeros_like(first)


def set_of(values: Tensor) -> Tensor:
    bits = sum(1 << int(x) for x in (values & 63).unique())
    return torch.tensor(bits - (1 << 64) if bits >> 63 else bits)


def boxes_of(sizes: tuple[int, int, int, int], count: int, generator: torch.Generator) -> Box:
    """Boxes of all shapes: points, lines, strips as long as the sequence, tiles."""
    draw = lambda n: torch.randint(0, n, (count,), generator=generator)
    batch, heads, q_len, kv_len = sizes
    box = {"b": draw(batch), "h": draw(heads)}
    for name, n in (("q", q_len), ("kv", kv_len)):
        width = torch.tensor([1, 1, 8, 8, 16, 64, n])[draw(7)]
        box[f"{name}_lo"] = (draw(n) // width * width).clamp(max=n - 1)
        box[f"{name}_hi"] = (box[f"{name}_lo"] + width - 1).clamp(max=n - 1)
    return box


def decide(traced: Traced, box: Box, *, sharper: bool = False) -> tuple[Tensor, Tensor]:
    """(must, may); with `sharper` what extremes or sets of values prove."""
    found = box_bounds(traced.program)
    must, may = (value_of(x, traced.binding, box) for x in found[:2])
    if not sharper or found.sharper is None:
        return must, may
    more, less = (value_of(x, traced.binding, box) for x in found.sharper)
    return must | more, may & less


def check_sound(mask_mod: Any, sizes: tuple[int, int, int, int], count: int = 80, seed: int = 0) -> int:
    """must: every pair of the box is kept; not may: none is. Returns how many boxes were decided."""
    traced = mask_mod if isinstance(mask_mod, Traced) else trace(mask_mod, "mask")
    at = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(sizes)]
    kept = evaluate(*traced, b=at[0], h=at[1], q_idx=at[2], kv_idx=at[3]).expand(sizes)
    box = boxes_of(sizes, count, torch.Generator().manual_seed(seed))
    must, may = decide(traced, box, sharper=True)
    names = ("b", "h", "q_lo", "q_hi", "kv_lo", "kv_hi")
    for n, (b, h, q, q_hi, kv, kv_hi) in enumerate(zip(*(box[name].tolist() for name in names))):
        cell = kept[b, h, q : q_hi + 1, kv : kv_hi + 1]
        assert not must[n] or bool(cell.all()), f"must, but not all is kept in {(b, h, q, q_hi, kv, kv_hi)}"
        assert bool(may[n]) or not bool(cell.any()), f"may not, but some is kept in {(b, h, q, q_hi, kv, kv_hi)}"
    return int((must | ~may).sum())


# ---------------------------------------------------------------- soundness
@pytest.mark.parametrize("name", MASKS)
def test_families_are_bounded_soundly(name: str) -> None:
    check_sound(MASKS[name], (2, 3, N - 9, N), seed=1)


@pytest.mark.parametrize("name", LIBRARY)
def test_library_masks_are_bounded_soundly(name: str) -> None:
    space = LIBRARY[name]
    check_sound(space.make(CPU), (BATCH, HEADS, space.q_len, space.kv_len), count=60)


def test_random_masks_are_bounded_soundly() -> None:
    """FLEXATTN_FUZZ_SECONDS and FLEXATTN_FUZZ_SEED as in test_mask_fuzz; 5 seconds from seed 0 by default."""
    seed, seen = int(budget("SEED", "0")), Counter[str]()
    first, end = seed, time.monotonic() + float(budget("SECONDS", "5"))
    while seed == first or time.monotonic() < end:
        rng = random.Random(seed)
        sizes = Sizes(rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 90), rng.randint(1, 90))
        made = predicate(rng, sizes)
        seed += 1
        try:
            traced = trace(made.function(), "mask")
        except IndexError:
            continue  # a captured tensor at a number it does not have, which torch itself refuses
        if Tables(traced.binding).may_wrap(traced.program.body):
            seen["wraps"] += 1  # the builder does not ask for bounds then
        else:
            try:
                seen["decided"] += check_sound(traced, sizes, count=40, seed=seed) > 0
            except Exception as error:
                raise AssertionError(f"seed {seed - 1}, {sizes}:\n{made}") from error
            seen["all"] += 1
    print(f"seeds {first}..{seed - 1}: {dict(seen)}")
    assert seen["decided"] > seen["all"] // 3


SHORT, NONE, GRID = torch.arange(20) // 3, torch.zeros(0, dtype=torch.int64), torch.arange(60).view(6, 10) // 7
MIXED = (torch.arange(70) // 6 * 37) % 12 * 70 - 300  # documents in no order
EMPTY_GRID, FLAGS, ONE = torch.zeros(0, 4, dtype=torch.int32), torch.arange(40) % 9 < 7, torch.tensor(7)
READS = {
    "empty": lambda b, h, q, k: NONE[q] == 0,
    "empty, below zero": lambda b, h, q, k: NONE[k - 9] >= NONE[q - 3],
    "empty, two dimensions": lambda b, h, q, k: EMPTY_GRID[b, k] == 0,
    "out of range": lambda b, h, q, k: SHORT[q] > 0,
    "out of range, guarded": lambda b, h, q, k: (k < 20) & (SHORT[k] <= q),
    "negative": lambda b, h, q, k: SHORT[q - 20] > 2,
    "far below": lambda b, h, q, k: SHORT[q - 45] > 2,
    "around zero": lambda b, h, q, k: SHORT[q - k] > 2,
    "a number": lambda b, h, q, k: ONE + SHORT[3] <= q,
    "a row by batch": lambda b, h, q, k: GRID[b, k] > 2,
    "a row by batch, last first": lambda b, h, q, k: GRID[-1 - b, k % 10] > 2,
    "a column": lambda b, h, q, k: GRID[q % 6, h] <= 2,
    "both along one axis": lambda b, h, q, k: GRID[q // 10, q % 10] <= 2,
    "a matrix": lambda b, h, q, k: GRID[q % 6, k % 10] <= 2,
    "a matrix of blocks": lambda b, h, q, k: GRID[q // 9, (k - 3) // 7] % 3 > 0,
    "a matrix of blocks, out of range": lambda b, h, q, k: GRID[(q >> 3) - 2, k // 4] < 4,
    "a matrix of blocks that moves": lambda b, h, q, k: GRID[(q // 16 - k // 8).clamp(min=0), 3] > 2,
    "unsorted": lambda b, h, q, k: (MIXED[q] == MIXED[k]) & (q >= k),
    "unsorted, unequal": lambda b, h, q, k: (MIXED[q - 5] != MIXED[k]) | (MIXED[k] == 100 * MIXED[q]),
    "unsorted, out of range": lambda b, h, q, k: MIXED[q + 50] == MIXED[k],
    "a matrix, mixed axes": lambda b, h, q, k: GRID[(q + k) % 6, 0] <= 2,
    "truth values": lambda b, h, q, k: FLAGS[q] | ~FLAGS[k],
    "truth values as numbers": lambda b, h, q, k: FLAGS[q].long() + FLAGS[k].long() == 2,
    "nested": lambda b, h, q, k: SHORT[SHORT[q] * 2] == SHORT[k],
    "nested, negative": lambda b, h, q, k: SHORT[SHORT[q] - 4] == k,
    "numbers as truth values": lambda b, h, q, k: ((q - k) % 5).to(torch.bool) & SHORT[k].to(torch.bool),
}


@pytest.mark.parametrize("name", READS)
def test_reads_of_captured_tensors_are_bounded_soundly(name: str) -> None:
    check_sound(READS[name], (3, 4, 50, 60), count=200)


# ---------------------------------------------------------------- tightness
UNFOLLOWED = {  # reads that move along both axes, and float arithmetic: undecided by intent
    "draft tree", "dense", "sorted rows", "sine",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MASKS if name not in UNFOLLOWED])
def test_no_looser_than_the_proof_on_the_cpu(name: str) -> None:
    traced = trace(MASKS[name], "mask")
    box = boxes_of((2, 3, N, N), 200, torch.Generator().manual_seed(2))
    ends = {n: (box[n], box[n]) for n in ("b", "h")} | {
        f"{n}_idx": (box[f"{n}_lo"], box[f"{n}_hi"]) for n in ("q", "kv")
    }
    for sets in (False, True):
        must, may = decide(traced, box, sharper=sets)
        cpu_must, cpu_may = bounds(traced.program, Tables(traced.binding), sets=sets, **ends)
        assert not (cpu_must & ~must).any()
        assert not (may & ~cpu_may).any()


@pytest.mark.parametrize("name", sorted(UNFOLLOWED - {"draft tree", "dense"}))
def test_what_is_not_followed_is_undecided(name: str) -> None:
    found = box_bounds(trace(MASKS[name], "mask").program)
    assert (found.must.attr, found.may.attr, found.ranged) == (False, True, ())


def test_usual_masks_are_decided_off_the_diagonal() -> None:
    for name in (
        "causal",
        "window",
        "documents, causal",
        "documents per batch",
        "prefix per batch",
        "chunked",
        "padding",
    ):
        assert check_sound(MASKS[name], (2, 3, N, N), count=200) > 100, name


def test_bounds_are_short_and_made_once() -> None:
    traced = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask")
    assert str(BoxBounds(*box_bounds(traced.program))[:2]) == "(Expr(kv_hi <= q_lo), Expr(~(q_hi < kv_lo)))"
    again = trace(lambda b, h, i, j: i >= j, "mask")
    assert box_bounds(again.program) is box_bounds(traced.program)


def test_the_tensors_that_are_read_over_ranges_are_named() -> None:
    lengths, ids = torch.tensor([3, 4]), torch.arange(9)
    traced = trace(lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) & (ids[q_idx] == ids[kv_idx]), "mask")
    assert [c.numel() for c in traced.binding.captures] == [2, 9]
    found = box_bounds(traced.program)
    assert (found.ranged, found.valued) == ((1,), (1,))
    assert box_bounds(trace(lambda b, h, q_idx, kv_idx: ids[q_idx] <= ids[kv_idx], "mask").program).sharper is None


def test_documents_in_no_order_are_told_apart_by_their_values() -> None:
    """Documents of 64 tokens whose ids rise and fall: extremes of wider ranges say nothing."""
    ids = torch.tensor([5, 0, 9, 2, 7, 4, 8, 1]).repeat_interleave(32)
    traced = trace(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx], "mask")
    tile = torch.arange(4) * 64
    q, kv = (x.flatten() for x in torch.meshgrid(tile, tile, indexing="ij"))
    zero = torch.zeros_like(q)
    box = {"b": zero, "h": zero, "q_lo": q, "q_hi": q + 63, "kv_lo": kv, "kv_hi": kv + 63}
    assert int(decide(traced, box)[1].sum()) == 16
    assert int(decide(traced, box, sharper=True)[1].sum()) == 4


def test_one_element_for_a_whole_block_decides_it() -> None:
    """A table of blocks, at the size of the tile: nothing is left to evaluate."""
    chosen = torch.rand(8, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    traced = trace(lambda b, h, q_idx, kv_idx: chosen[q_idx // 32, kv_idx // 16], "mask")
    q, kv = (x.flatten() for x in torch.meshgrid(torch.arange(8) * 32, torch.arange(9) * 16, indexing="ij"))
    zero = torch.zeros_like(q)
    must, may = decide(traced, {"b": zero, "h": zero, "q_lo": q, "q_hi": q + 31, "kv_lo": kv, "kv_hi": kv + 15})
    assert torch.equal(must, chosen.flatten()) and torch.equal(may, must)
