"""Closed forms keep exactly what their masks keep, at any length; masks without one say so."""

from __future__ import annotations

import operator
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
    "the same run twice, in another order": (
        lambda b, h, q, k: ((k <= q) & (k <= START[q])) | ((k <= START[q]) & (k <= q)),
        "kv_idx <= min(q_idx, cap0[q_idx])",
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


class _Grammar:
    """Boolean combinations of comparisons in which kv_idx mostly occurs once."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        table = lambda n: torch.tensor([rng.randint(-5, 45) for _ in range(n)])
        first, second, few = table(50), table(50), table(4)
        self.rows = [
            lambda b, h, q, k: q,
            lambda b, h, q, k: first[q],
            lambda b, h, q, k: few[b],
            lambda b, h, q, k: h * 5 + q // 6,
            lambda b, h, q, k: q % 7 - q * 2,
            lambda b, h, q, k: second[q] - few[h],
        ]

    def keyed(self):
        n, by, s = self.rng.randint(-20, 40), self.rng.choice((2, 3, 8)), self.rng.choice((-3, -2, -1, 1, 2, 3))
        row = self.rng.choice(self.rows)
        return self.rng.choice(
            [
                lambda *i: i[3],
                lambda *i: s * i[3] + row(*i),
                lambda *i: (i[3] - row(*i) + n).abs(),
                lambda *i: (s * i[3] + n) // by + row(*i),
                lambda *i: torch.minimum(i[3] + n, row(*i)),
                lambda *i: (torch.maximum(s * i[3], row(*i)) - n).abs() // by,
            ]
        )

    def comparison(self):
        x, row, n = self.keyed(), self.rng.choice(self.rows), self.rng.randint(-20, 40)
        compare = self.rng.choice([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
        return lambda *i: compare(x(*i), row(*i) + n)

    def mask(self, depth: int):
        if not depth:
            return self.comparison()
        a, b = self.mask(depth - 1), self.mask(self.rng.randint(0, depth - 1))
        return self.rng.choice(
            [
                lambda *i: a(*i) & b(*i),
                lambda *i: a(*i) | b(*i),
                lambda *i: a(*i) ^ b(*i),
                lambda *i: ~a(*i) & b(*i),
                lambda *i: torch.where(a(*i), b(*i), ~b(*i)),
            ]
        )


@pytest.mark.parametrize("seed", range(6))
def test_random_combinations(seed: int) -> None:
    grammar, found = _Grammar(seed), 0
    for n in range(50):
        mask_mod = grammar.mask(n % 3)
        q_len, kv_len = grammar.rng.choice([(50, 37), (31, 50), (1, 50), (50, 3)])
        mask = create_block_mask(mask_mod, 3, 3, q_len, kv_len, "cpu")
        if mask.traced is not None and closed_form(mask.traced) is not None:
            assert count(mask_mod, 3, 3, q_len, kv_len) == int(mask.to_mask().sum()), (seed, n)
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
