"""Closed forms keep exactly what their masks keep, at any length; masks without one say so."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch

from flexattn import mods
from flexattn.frontend.closed_form import closed_form
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.spans import Grid
from flexattn.frontend.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")
START, PREFIX = torch.tensor([0] * 100 + [60] * 120 + [150] * 80), torch.tensor([5, 90])

MASKS = {
    "causal": (mods.causal(), "kv_idx <= q_idx"),
    "lower right": (mods.causal(offset=13), "kv_idx <= q_idx + 13"),
    "window": (mods.sliding_window(16), "q_idx - 15 <= kv_idx <= q_idx"),
    "prefix": (mods.prefix_lm(40), "kv_idx <= 39 or kv_idx <= q_idx"),
    "prefix by batch": (mods.prefix_lm(PREFIX), "kv_idx <= cap0[b] - 1 or kv_idx <= q_idx"),
    "sink": (
        lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 30)),
        "kv_idx <= min(3, q_idx) or q_idx - 29 <= kv_idx <= q_idx",
    ),
    "chunks": (
        lambda b, h, q, k: (q // 64 == k // 64) & (q >= k),
        "q_idx//64*64 <= kv_idx <= min(q_idx//64*64 + 63, q_idx)",
    ),
    "chunks and neighbours": (
        lambda b, h, q, k: (q // 64 - k // 64).abs() <= 1,
        "q_idx//64*64 - 64 <= kv_idx <= q_idx//64*64 + 127",
    ),
    "band": (lambda b, h, q, k: (q - k).abs() < 9, "q_idx - 8 <= kv_idx <= q_idx + 8"),
    "no band": (lambda b, h, q, k: (q - k).abs() > 9, "kv_idx <= q_idx - 10 or q_idx + 10 <= kv_idx"),
    "table of starts": (lambda b, h, q, k: (k >= START[q]) & (k <= q), "cap0[q_idx] <= kv_idx <= q_idx"),
    "by head": (
        lambda b, h, q, k: (q - k < (h + 1) * 8) & (q >= k) & (b < 1),
        "q_idx - h*8 - 7 <= kv_idx <= q_idx where b < 1",
    ),
    "xor": (lambda b, h, q, k: (q >= k) ^ (k < 50), "50 <= kv_idx <= q_idx or q_idx + 1 <= kv_idx <= 49"),
    "not": (lambda b, h, q, k: ~((q >= k) & (q - k < 20)), "q_idx + 1 <= kv_idx or kv_idx <= q_idx - 20"),
    "factors": (
        lambda b, h, q, k: (2 * k <= 3 * q + 5) & (k * 3 > q),
        "-((-q_idx - 1)//3) <= kv_idx <= (q_idx*3 + 5)//2",
    ),
    "unequal": (lambda b, h, q, k: k != q, "kv_idx <= q_idx - 1 or q_idx + 1 <= kv_idx"),
    "minimum and maximum": (
        lambda b, h, q, k: (torch.minimum(q + 3, k) >= 10) & (torch.maximum(k, q // 2) < 200),
        "10 <= kv_idx <= 199 where 7 <= q_idx and q_idx//2 <= 199",
    ),
    "where": (
        lambda b, h, q, k: torch.where(h == 1, k >= q, q >= k),
        "q_idx <= kv_idx where h == 1 or kv_idx <= q_idx where h != 1",
    ),
    "other diagonal": (lambda b, h, q, k: q + k < 300, "kv_idx <= -q_idx + 299"),
    "floor of a distance": (lambda b, h, q, k: (q - k) // 7 <= 3, "q_idx - 27 <= kv_idx"),
    "rows": (lambda b, h, q, k: q % 3 == 0, "any kv_idx where q_idx % 3 == 0"),
    "nothing": (lambda b, h, q, k: q < 0, "any kv_idx where q_idx < 0"),
    "equal truths": (
        lambda b, h, q, k: (q > 50) == (k > 20),
        "21 <= kv_idx where 50 < q_idx or kv_idx <= 20 where q_idx <= 50",
    ),
    "a float of the row": (
        lambda b, h, q, k: ~(q * 0.5 < 20.0) & (k <= q),
        "kv_idx <= q_idx where ~(q_idx*0.5 < 20)",
    ),
}
NONE = {
    "every third distance": lambda b, h, q, k: (q - k) % 3 == 0,
    "captured tensor of the key": lambda b, h, q, k: START[k % 300] <= q,
    "product": lambda b, h, q, k: q * k < 900,
    "float of the key": lambda b, h, q, k: k * 0.5 < 20,
    "key twice": lambda b, h, q, k: k + k // 4 < q,
    "negative divisor": lambda b, h, q, k: (k - q) // -7 <= 3,
    "wraps": lambda b, h, q, k: q + ((1 << 63) - 1) >= k,
    "a solution that wraps": lambda b, h, q, k: k - q < (1 << 63) - 1,
    "a solution past 64 bits": lambda b, h, q, k: k // 8 <= 1 << 61,
    "too many runs": lambda b, h, q, k: sum(((k == q + 2 * n).int() for n in range(40)), (k == 0).int()) > 0,
}


def count(mask_mod, batch: int, heads: int, q_len: int, kv_len: int) -> int | None:
    form = closed_form(trace(mask_mod, "mask"))
    return form.count(Grid(batch, heads, q_len, kv_len, 1, 1), torch.device("cpu"))


@pytest.mark.parametrize("name", MASKS)
def test_formula_and_count(name: str) -> None:
    mask_mod, formula = MASKS[name]
    mask = create_block_mask(mask_mod, 2, 3, 300, 310, "cpu")
    assert str(closed_form(mask.traced)) == formula
    assert count(mask_mod, 2, 3, 300, 310) == int(mask.to_mask().sum())


@pytest.mark.parametrize("name", MASKS)
def test_ends_are_the_kept_keys(name: str) -> None:
    traced = trace(MASKS[name][0], "mask")
    start, stop = closed_form(traced).ends(Grid(2, 3, 300, 310, 1, 1), torch.arange(300))
    keys = torch.arange(310)
    kept = ((keys >= start[..., None]) & (keys < stop[..., None])).any(0).view(2, 3, 300, 310)
    assert torch.equal(kept, create_block_mask(MASKS[name][0], 2, 3, 300, 310, "cpu").to_mask())


@pytest.mark.parametrize("name", NONE)
def test_masks_without_a_formula(name: str) -> None:
    assert closed_form(trace(NONE[name], "mask")) is None


def _random_mask(rng: random.Random):
    """A boolean combination of comparisons in which kv_idx occurs once."""
    c = [rng.randint(-9, 40) for _ in range(4)]
    by = rng.choice((3, 8, 16))
    atoms = [
        lambda b, h, q, k: q - k <= c[0],
        lambda b, h, q, k: (k + c[1]) // by >= q // by - h,
        lambda b, h, q, k: 2 * k + 3 * q < 4 * c[2] + 60,
        lambda b, h, q, k: (k - q + b).abs() > c[3] // 4,
        lambda b, h, q, k: (k // by == c[1] // 8) | (q < c[2]),
        lambda b, h, q, k: torch.maximum(k, q - c[0]) < 30 + c[3],
    ]
    one, two, three = rng.sample(atoms, 3)
    joins = [lambda x, y: x & y, lambda x, y: x | y, lambda x, y: x ^ y, lambda x, y: x & ~y]
    first, second = rng.choice(joins), rng.choice(joins)
    return lambda *i: second(first(one(*i), two(*i)), three(*i))


def test_random_combinations() -> None:
    rng = random.Random(5)
    found = 0
    for _, (q_len, kv_len) in itertools.product(range(60), [(37, 53)]):
        mask_mod = _random_mask(rng)
        mask = create_block_mask(mask_mod, 2, 2, q_len, kv_len, "cpu")
        if mask.traced is not None and closed_form(mask.traced) is not None:
            assert count(mask_mod, 2, 2, q_len, kv_len) == int(mask.to_mask().sum())
            found += 1
    assert found > 40


def test_a_million_tokens_take_milliseconds() -> None:
    n = 1 << 20
    begin = time.perf_counter()
    assert count(mods.causal(), 1, 1, n, n) == n * (n + 1) // 2
    assert count(mods.sliding_window(1024), 1, 1, n, n) == 1024 * n - 1023 * 1024 // 2
    assert time.perf_counter() - begin < 2
    assert count(mods.causal(), 1, 1 << 9, n, n) is None  # rows of so many groups would take seconds


def test_nothing_to_count() -> None:
    assert count(mods.causal(), 1, 1, 0, 5) == count(mods.causal(), 1, 1, 5, 0) == count(mods.causal(), 0, 1, 5, 5) == 0


def test_latex() -> None:
    pytest.importorskip("sympy")
    latex = lambda name: closed_form(trace(MASKS[name][0], "mask")).latex()
    assert latex("causal") == r"kv_{idx} \leq q_{idx}"
    assert latex("sink") == (r"kv_{idx} \leq \min(3, q_{idx}) \;\lor\; q_{idx} - 29 \leq kv_{idx} \leq q_{idx}")
    assert latex("by head").endswith(r"\leq q_{idx} \text{ where } b < 1")
    assert latex("rows").startswith(r"\text{any } kv_{idx} \text{ where } ")
