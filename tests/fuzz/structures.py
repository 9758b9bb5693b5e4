"""The 48 mod structures of the fuzz test: score and mask functions whose numbers, captured tensors and spans are drawn anew each time.

Reads a `Draw` (random numbers, and the sizes of one problem); makes the two functions. The one idea: a structure is what a kernel is
built for, so everything else about a function must be drawn, and the same few kernels see thousands of different problems.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import BlockMask, mods

Mod = Callable[..., Any]


class Sizes(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int


class Score(NamedTuple):
    """A score_mod and how wrong a kernel's may be.

    Attributes:
        mod: the function.
        gain: how much of an error of the raw score it passes on.
        slack: the absolute error that its functions may add to the score.
        bend: and to its slope, the derivative by the raw score; None where that is the same for every score.
    """

    mod: Mod | None
    gain: float = 1.0
    slack: float = 0.0
    bend: float | None = None


class Mask(NamedTuple):
    """A mask_mod that says what is kept, and the BlockMask to be called with, where it is not made from that function."""

    mod: Mod | None
    blocks: BlockMask | None = None


@dataclass
class Draw:
    """Random numbers and captured tensors for one problem, the same on every device.

    Attributes:
        need_captures: captured tensors of the score need gradients, and are kept in `captured`.
        is_exact: they are float64, of the same values.
    """

    rng: random.Random
    sizes: Sizes
    dtype: torch.dtype
    device: torch.device
    need_captures: bool = False
    is_exact: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.rng.randrange(1 << 40))
        self.captured: list[Tensor] = []

    def whole(self, low: int, high: int) -> int:
        """An integer of [low, high], often one at which tiles end or kernels are specialised."""
        special = [n for n in (0, 1, 16, 17, -1, 64, 127, 128, 129, 192, low, high) if low <= n <= high]
        return self.rng.choice(special) if self.rng.random() < 0.3 else self.rng.randint(low, high)

    def offset(self) -> int:
        """Where a diagonal lies: through a corner, or anywhere."""
        q_len, kv_len = self.sizes.q_len, self.sizes.kv_len
        corner = self.rng.choice([0, kv_len - q_len])
        return corner if self.rng.random() < 0.5 else self.rng.randint(-q_len, kv_len)

    def real(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def floats(self, *shape: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        made = (torch.randn(shape, generator=self.generator) * size).to(dtype).to(self.device)
        if self.is_exact:
            made = made.double()
        if self.need_captures:
            self.captured.append(made.requires_grad_())
        return made

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Of [low, high]."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype).to(self.device)

    def truths(self, *shape: int, share: float | None = None) -> Tensor:
        share = self.rng.random() ** 2 if share is None else share
        return (torch.rand(shape, generator=self.generator) < share).to(self.device)

    def documents(self, length: int, *batch: int) -> Tensor:
        """Ascending ids of documents, some of them long, some of a few tokens."""
        share = self.rng.choice([0.003, 0.01, 0.1, 0.5])
        begins = torch.rand((*batch, length), generator=self.generator) < share
        return begins.int().cumsum(-1).to(torch.int32).to(self.device)


# ---------------------------------------------------------------- masks
def _none(d: Draw) -> Mask:
    return Mask(None)


def _causal(d: Draw) -> Mask:
    offset = d.offset()
    return Mask(lambda b, h, i, j: i + offset >= j)


def _anti_causal(d: Draw) -> Mask:
    offset = d.offset()
    return Mask(lambda b, h, i, j: i + offset < j)


def _window(d: Draw) -> Mask:
    offset, size = d.offset(), d.whole(0, d.sizes.kv_len)
    return Mask(mods.sliding_window(max(size, 1), offset=offset))


def _band(d: Draw) -> Mask:
    left, right = d.whole(-20, d.sizes.kv_len), d.whole(-20, 300)
    return Mask(lambda b, h, i, j: (i - j <= left) & (j - i <= right))


def _window_of_size(d: Draw) -> Mask:
    size = d.whole(0, 400)
    return Mask(lambda b, h, i, j: abs(i - j) < size)


def _dilated(d: Draw) -> Mask:
    return Mask(mods.dilated(d.whole(1, 600), d.whole(1, 40)))


def _sink_and_window(d: Draw) -> Mask:
    sinks, size = d.whole(0, 200), d.whole(1, 300)
    return Mask(lambda b, h, i, j: (i >= j) & ((j < sinks) | (i - j < size)))


def _chunks(d: Draw) -> Mask:
    size = d.whole(1, 500)
    return Mask(lambda b, h, i, j: (i // size == j // size) & (i >= j))


def _square_image(d: Draw) -> Mask:
    width, reach = d.whole(2, 60), d.whole(0, 20)
    return Mask(lambda b, h, i, j: (abs(i // width - j // width) <= reach) & (abs(i % width - j % width) <= reach))


def _stripes(d: Draw) -> Mask:
    """Many spans a row."""
    keys, queries, period = d.whole(1, 300), d.whole(1, 300), d.whole(1, 5)
    return Mask(lambda b, h, i, j: (j // keys + i // queries) % period == 0)


def _empty_rows(d: Draw) -> Mask:
    size, offset = d.whole(1, 500), d.offset()
    return Mask(lambda b, h, i, j: ((i // size) % 2 == 1) & (j <= i + offset))


def _bits(d: Draw) -> Mask:
    bits = d.whole(0, 1023)
    return Mask(lambda b, h, i, j: ((i ^ j) & bits) == 0)


def _far_away(d: Draw) -> Mask:
    """Nothing, little or everything, by one number."""
    distance = d.rng.choice([-(1 << 23), -2000, -500, -100, 0, 100, 500, 2000, 1 << 23])
    return Mask(lambda b, h, i, j: i - j > distance)


def _by_batch_and_head(d: Draw) -> Mask:
    size = d.whole(0, 900)
    return Mask(lambda b, h, i, j: ((h % 2 == 0) | (i >= j)) & ~((b == 1) & (j > size)))


def _prefix_of_a_scalar_tensor(d: Draw) -> Mask:
    length = torch.tensor(d.whole(0, d.sizes.kv_len), device=d.device)
    return Mask(lambda b, h, i, j: (j < length) | (j <= i))


def _prefix_by_batch(d: Draw) -> Mask:
    return Mask(mods.prefix_lm(d.integers(0, d.sizes.kv_len, d.sizes.batch, dtype=torch.int64)))


def _padding(d: Draw) -> Mask:
    """Keys behind each entry's own length, and queries behind theirs, which are empty rows."""
    keys = d.integers(0, d.sizes.kv_len, d.sizes.batch)
    queries = d.integers(0, d.sizes.q_len, d.sizes.batch)
    return Mask(lambda b, h, i, j: (j < keys[b]) & (i < queries[b]))


def _window_by_head(d: Draw) -> Mask:
    sizes = d.integers(0, 500, d.sizes.q_heads + d.rng.randrange(3), dtype=torch.int64)
    return Mask(lambda b, h, i, j: (i >= j) & (i - j < sizes[h]))


def _documents(d: Draw) -> Mask:
    ids = d.documents(max(d.sizes.q_len, d.sizes.kv_len) + d.rng.randrange(5))
    return Mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def _documents_of_two_sides(d: Draw) -> Mask:
    return Mask(mods.document(d.documents(d.sizes.q_len), d.documents(d.sizes.kv_len)))


def _documents_by_batch(d: Draw) -> Mask:
    ids = d.documents(max(d.sizes.q_len, d.sizes.kv_len), d.sizes.batch)
    return Mask(lambda b, h, i, j: ids[b, i] == ids[b, j])


def _table_of_blocks(d: Draw) -> Mask:
    q_size, kv_size = d.whole(1, 300), d.whole(1, 300)
    kept = d.truths(-(-d.sizes.q_len // q_size), -(-d.sizes.kv_len // kv_size) + d.rng.randrange(3))
    return Mask(lambda b, h, i, j: kept[i // q_size, j // kv_size])


def _table_of_blocks_by_head(d: Draw) -> Mask:
    kept = d.truths(d.sizes.q_heads, -(-d.sizes.q_len // 64), -(-d.sizes.kv_len // 64))
    return Mask(lambda b, h, i, j: kept[h, i // 64, j // 64])


def _table_of_pairs(d: Draw) -> Mask:
    kept = d.truths(d.sizes.q_len, d.sizes.kv_len)
    return Mask(lambda b, h, i, j: kept[i, j])


def _indirect(d: Draw) -> Mask:
    """Positions of an order of their own."""
    queries = torch.randperm(d.sizes.q_len, generator=d.generator).to(d.device)
    keys = torch.randperm(d.sizes.kv_len, generator=d.generator).to(d.device)
    offset = d.offset()
    return Mask(lambda b, h, i, j: queries[i] + offset >= keys[j])


def _twice_indirect(d: Draw) -> Mask:
    groups = d.whole(1, 50)
    place, level = d.integers(0, groups - 1, d.sizes.kv_len), d.integers(-5, 5, groups)
    rows = d.integers(-5, 5, d.sizes.q_len)
    return Mask(lambda b, h, i, j: level[place[j]] <= rows[i])


def _kept_keys(d: Draw) -> Mask:
    kept = d.truths(d.sizes.batch, d.sizes.kv_len)
    return Mask(lambda b, h, i, j: kept[b, j])


def _lists(sizes: tuple[tuple[int, int], ...], mod: Callable[[Draw], Mask]) -> Callable[[Draw], Mask]:
    """Random lists of partial and full blocks, of batches and heads that differ or not."""

    def make(d: Draw) -> Mask:
        block = q_block, kv_block = d.rng.choice(sizes)
        rows, columns = -(-d.sizes.q_len // q_block), -(-d.sizes.kv_len // kv_block)
        groups = d.rng.choice([1, d.sizes.batch]), d.rng.choice([1, d.sizes.q_heads])
        partial = d.truths(*groups, rows, columns)
        full = d.truths(*groups, rows, columns) & ~partial
        inner = mod(d).mod
        blocks = BlockMask.from_kv_blocks(
            *_listed(partial), *_listed(full), BLOCK_SIZE=block, mask_mod=inner, seq_lengths=d.sizes[3:]
        )

        def kept(b: Any, h: Any, i: Any, j: Any) -> Any:
            at = (b if groups[0] > 1 else 0, h if groups[1] > 1 else 0, i // q_block, j // kv_block)
            return full[at] | (partial[at] if inner is None else partial[at] & inner(b, h, i, j))

        return Mask(kept, blocks)

    return make


def _listed(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of the blocks of each row."""
    order = torch.argsort(kept.to(torch.int8), dim=-1, descending=True, stable=True)
    return kept.sum(-1).to(torch.int32), order.to(torch.int32)


MASKS: dict[str, Callable[[Draw], Mask]] = {
    "none": _none, "causal": _causal, "anti-causal": _anti_causal, "window": _window, "band": _band,
    "window of size": _window_of_size, "dilated": _dilated, "sink and window": _sink_and_window, "chunks": _chunks,
    "square image": _square_image, "stripes": _stripes, "empty rows": _empty_rows, "bits": _bits, "far away": _far_away,
    "by batch and head": _by_batch_and_head, "prefix of a scalar tensor": _prefix_of_a_scalar_tensor,
    "prefix by batch": _prefix_by_batch, "padding": _padding, "window by head": _window_by_head,
    "documents": _documents, "documents of two sides": _documents_of_two_sides, "documents by batch": _documents_by_batch,
    "table of blocks": _table_of_blocks, "table of blocks by head": _table_of_blocks_by_head,
    "table of pairs": _table_of_pairs, "indirect": _indirect, "twice indirect": _twice_indirect, "kept keys": _kept_keys,
    "lists": _lists(((128, 128), (256, 128), (128, 384), (384, 256)), _none),
    "lists and causal": _lists(((128, 256), (256, 256), (128, 128)), _causal),
}  # fmt: skip


# ---------------------------------------------------------------- scores
# Of tanh: the relative error of the hardware's, which bfloat16 may use, and the absolute one of 1 - 2 / (exp(2x) + 1) in float32.
_TANH = {torch.bfloat16: 2.0**-10.9, torch.float16: 2.0**-21}


def _same(d: Draw) -> Score:
    return Score(None)


def _softcap(d: Draw) -> Score:
    cap = d.real(0.5, 60.0)
    tanh = _TANH[d.dtype]
    return Score(lambda s, b, h, i, j: cap * torch.tanh(s / cap), slack=cap * tanh, bend=2.5 * tanh)


def _alibi(d: Draw) -> Score:
    slopes = d.floats(d.sizes.q_heads, size=d.rng.choice([0.01, 0.3]))
    return Score(lambda s, b, h, i, j: s + slopes[h] * (j - i))


def _alibi_by_formula(d: Draw) -> Score:
    return Score(mods.alibi(d.sizes.q_heads))


def _softcap_and_alibi(d: Draw) -> Score:
    cap, slopes, tanh = d.real(1.0, 40.0), d.floats(d.sizes.q_heads, size=0.02), _TANH[d.dtype]
    return Score(
        lambda s, b, h, i, j: cap * torch.tanh((s + slopes[h] * (j - i)) / cap), slack=cap * tanh, bend=2.5 * tanh
    )


def _relative_bias(d: Draw) -> Score:
    keys = d.sizes.kv_len
    table = d.floats(d.sizes.q_heads, d.sizes.q_len + keys)
    return Score(lambda s, b, h, i, j: s + table[h, i - j + keys])


def _clamped_bias(d: Draw) -> Score:
    return Score(mods.relative_bias(d.floats(d.sizes.q_heads, 2 * d.whole(1, 300) + 1)))


def _bias_of_keys(d: Draw) -> Score:
    bias = d.floats(d.sizes.batch, d.sizes.kv_len)
    return Score(lambda s, b, h, i, j: s + bias[b, j])


def _bias_of_pairs(d: Draw) -> Score:
    """In bfloat16, and read along the slow dimension."""
    bias = d.floats(d.sizes.kv_len, d.sizes.q_len, dtype=torch.bfloat16).t()
    return Score(lambda s, b, h, i, j: s + bias[i, j])


def _bias_by_batch_and_head(d: Draw) -> Score:
    batches, heads = d.floats(d.sizes.batch), d.floats(d.sizes.q_heads, size=3.0)
    return Score(lambda s, b, h, i, j: s * 0.5 + heads[h] - batches[b], gain=0.5)


def _temperature(d: Draw) -> Score:
    """A captured scalar, of either sign."""
    temperature = d.floats()
    return Score(lambda s, b, h, i, j: s * temperature, gain=abs(temperature.item()))


def _rows_times_keys(d: Draw) -> Score:
    rows, keys = d.floats(d.sizes.q_len), d.floats(d.sizes.kv_len)
    return Score(lambda s, b, h, i, j: s + rows[i] * keys[j])


def _distance(d: Draw) -> Score:
    factor = d.real(-2.0, 2.0)
    return Score(lambda s, b, h, i, j: s - factor * torch.log1p(abs(i - j)))


def _remainders(d: Draw) -> Score:
    period, factor = d.whole(1, 100), d.real(-0.1, 0.1)
    return Score(lambda s, b, h, i, j: s + ((j - i) % period) * factor)


def _chosen(d: Draw) -> Score:
    distance, factor = d.whole(-300, 300), d.real(-2.0, 2.0)
    return Score(lambda s, b, h, i, j: torch.where(i - j > distance, s * factor, s), gain=max(abs(factor), 1.0))


def _minus_infinity(d: Draw) -> Score:
    """A mask that is spelled in the score; some rows keep nothing."""
    distance, first = d.whole(-300, 300), d.whole(0, 200)
    return Score(lambda s, b, h, i, j: torch.where((i - j >= distance) & (i >= first), s, -math.inf))


def _of_keys_alone(d: Draw) -> Score:
    factor = d.real(-0.02, 0.02)
    return Score(lambda s, b, h, i, j: j * factor)


def _smooth(d: Draw) -> Score:
    factor = d.real(0.1, 3.0)
    return Score(
        lambda s, b, h, i, j: factor * torch.log(1 + torch.exp(torch.clamp(s, -20, 20))),
        gain=factor,
        bend=factor * 2.0**-16,
    )


SCORES: dict[str, Callable[[Draw], Score]] = {
    "same": _same, "softcap": _softcap, "alibi": _alibi, "alibi by formula": _alibi_by_formula,
    "softcap and alibi": _softcap_and_alibi, "relative bias": _relative_bias, "clamped bias": _clamped_bias,
    "bias of keys": _bias_of_keys, "bias of pairs": _bias_of_pairs, "bias by batch and head": _bias_by_batch_and_head,
    "temperature": _temperature, "rows times keys": _rows_times_keys, "distance": _distance, "remainders": _remainders,
    "chosen": _chosen, "minus infinity": _minus_infinity, "of keys alone": _of_keys_alone, "smooth": _smooth,
}  # fmt: skip


# ---------------------------------------------------------------- structures
class Variant(NamedTuple):
    """What else a kernel is built for."""

    dims: tuple[int, int]  # qk_dim, v_dim
    dtype: torch.dtype
    want_max: bool
    is_positive: bool  # the scale, where it makes a difference


class Structure(NamedTuple):
    score: str
    mask: str
    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        return f"{self.score} | {self.mask}"


# the first twelve are what a short run sees
_PAIRS = [
    ("same", "causal"), ("softcap", "causal"), ("same", "none"), ("alibi", "documents"), ("same", "stripes"),
    ("same", "table of blocks"), ("relative bias", "window"), ("same", "empty rows"), ("bias of keys", "padding"),
    ("same", "lists"), ("bias of pairs", "none"), ("same", "prefix of a scalar tensor"),
    ("same", "window"), ("same", "anti-causal"), ("same", "band"), ("same", "window of size"), ("same", "dilated"),
    ("same", "sink and window"), ("same", "chunks"), ("same", "square image"), ("same", "bits"), ("same", "far away"),
    ("same", "by batch and head"), ("same", "prefix by batch"), ("same", "window by head"), ("same", "documents"),
    ("same", "documents of two sides"), ("same", "documents by batch"), ("same", "table of blocks by head"),
    ("same", "table of pairs"), ("same", "indirect"), ("same", "twice indirect"), ("same", "kept keys"),
    ("same", "lists and causal"), ("softcap", "none"), ("softcap", "window"), ("alibi", "none"),
    ("alibi by formula", "causal"), ("softcap and alibi", "causal"), ("clamped bias", "chunks"),
    ("bias by batch and head", "far away"), ("temperature", "causal"), ("rows times keys", "sink and window"),
    ("distance", "band"), ("remainders", "lists and causal"), ("chosen", "none"), ("minus infinity", "causal"),
    ("smooth", "stripes"),
]  # fmt: skip
_DIMS = [
    (64, 64), (128, 128), (192, 128), (64, 64), (128, 128), (256, 256), (96, 96), (128, 128), (64, 128), (80, 80),
    (128, 64), (70, 72), (40, 48), (64, 64), (112, 128), (160, 160), (200, 136),
]  # fmt: skip
_VARIANTS = 2


def _variants(index: int) -> tuple[Variant, ...]:
    """Two a structure: all together, every head dim meets both types, either wish for maxima and either sign."""
    numbers = range(_VARIANTS * index, _VARIANTS * (index + 1))
    return tuple(
        Variant(
            _DIMS[n % len(_DIMS)],
            torch.float16 if (n // 2) % 2 else torch.bfloat16,
            want_max=n % 3 == 2,
            is_positive=n % 5 != 4,
        )
        for n in numbers
    )


STRUCTURES = tuple(Structure(*pair, _variants(n)) for n, pair in enumerate(_PAIRS))
