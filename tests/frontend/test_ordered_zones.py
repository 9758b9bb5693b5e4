"""Tiles of sorted captured tensors by formula, against every pair and against the search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask
from flexattn.errors import StaleMaskError
from flexattn.frontend.ordered_map import ordered_map
from flexattn.frontend.ordered_zones import ordered_zones
from flexattn.frontend.spans import Grid
from flexattn.frontend.tile_map import TileMap
from flexattn.frontend.tile_search import TileSearch
from flexattn.frontend.trace import trace
from flexattn.frontend.zones import MOST_ZONES
from tests.frontend.mask_families import brute
from tests.frontend.test_tile_map import check

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, BATCH, HEADS, N = torch.device("cpu"), 2, 3, 300
Mask = Callable[..., Any]
TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


def by_formula(mask_mod: Mask, lengths: tuple[int, int], tile: tuple[int, int]) -> TileMap | None:
    """The map by formula, checked against every pair and against the search; None if there is no formula."""
    traced = trace(mask_mod, "mask")
    deps = traced.program.body.deps
    grid = Grid(BATCH if deps & 2 else 1, HEADS if deps & 4 else 1, *lengths, *tile)
    found = ordered_map(traced, grid, CPU)
    if found is None:
        return None
    wanted = TileSearch(traced, grid, CPU).run()
    for name in ("full", "partial", "full_t", "partial_t"):
        for a, b in zip(getattr(found, name), getattr(wanted, name), strict=True):
            assert torch.equal(a, b), (name, lengths, tile)
    tiles = TileMap(grid, *found, traced)
    check(tiles, brute(mask_mod, BATCH, HEADS, *lengths), pairs=False)
    assert set(tiles.decided) == {"tiles", "empty_by_formula", "full_by_formula", "partial_by_formula"}
    return tiles


def ids(rng: random.Random, length: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Sorted: one document, one for each token, documents that end where tiles do, or any, with values left out."""
    kind = rng.randrange(5)
    if kind < 2:
        found = torch.zeros(length) if kind else torch.arange(length) * 200 // max(length, 1)
    else:
        ends = [
            x // 16 * 16 if kind == 2 else x for x in (rng.randrange(length) for _ in range(rng.choice((2, 9, 60))))
        ]
        found = torch.searchsorted(torch.tensor(sorted(ends)), torch.arange(length), right=True) * rng.choice((1, 3))
    return (found - (0 if dtype == torch.uint8 else rng.choice((0, 5)))).to(dtype)


def masks(rng: random.Random) -> dict[str, Mask]:
    """Masks of documents that have a formula, of random tables."""
    dtype = rng.choice(TYPES)
    a, c, two = (ids(rng, N + 40, dtype) for _ in range(3))
    many = torch.stack([ids(rng, N + 40, dtype) for _ in range(BATCH)])
    each = torch.stack([torch.stack([ids(rng, N + 40) for _ in range(HEADS)]) for _ in range(BATCH)])
    window, shift, limit = rng.choice((1, 7, 40, 500)), torch.tensor([0, 40]), rng.randrange(N)
    starts = torch.searchsorted(a.contiguous(), a)
    stops = torch.searchsorted(a.contiguous(), a, right=True)
    pad, wide, offset = int(a[-1]), a.long() * (1 << 40), rng.randrange(40)
    heads = torch.arange(HEADS)
    same = lambda i, j: a[i] == a[j]
    return {
        "documents": lambda b, h, i, j: same(i, j),
        "documents, causal": lambda b, h, i, j: same(i, j) & (i >= j),
        "documents, the other way around": lambda b, h, i, j: (j <= i) & (a[j] == a[i]),
        "documents, anticausal": lambda b, h, i, j: same(i, j) & (i <= j),
        "documents, window": lambda b, h, i, j: same(i, j) & (i >= j) & (i - j < window),
        "documents, distance": lambda b, h, i, j: same(i, j) & ((i - j).abs() <= window),
        "documents, window a head": lambda b, h, i, j: same(i, j) & (i - j <= 9 * h) & (j <= i),
        "documents and a sink": lambda b, h, i, j: (same(i, j) & (i >= j)) | (j < 4),
        "documents, sink in each": lambda b, h, i, j: same(i, j) & (i >= j) & ((i - j < window) | (j < limit)),
        "documents a request": lambda b, h, i, j: many[b, i] == many[b, j],
        "documents a request, causal": lambda b, h, i, j: (many[b, i] == many[b, j]) & (i >= j),
        "documents a request and head": lambda b, h, i, j: (each[b, h, i] == each[b, h, j]) & (i >= j),
        "documents, offset": lambda b, h, i, j: (a[i + offset] == a[j]) & (i + offset >= j),
        "documents, offset a request": lambda b, h, i, j: (a[i + shift[b]] == a[j]) & (i + shift[b] >= j),
        "documents, padding": lambda b, h, i, j: same(i, j) & (i >= j) & (a[i] != pad),
        "documents, padded keys": lambda b, h, i, j: same(i, j) & (a[j] < pad),
        "two kinds of documents": lambda b, h, i, j: same(i, j) & (c[i] == c[j]) & (i >= j),
        "no document of another": lambda b, h, i, j: a[i] >= a[j],
        "the documents before": lambda b, h, i, j: a[i] > a[j],
        "other documents": lambda b, h, i, j: a[i] != a[j],
        "from a start on": lambda b, h, i, j: (j >= starts[i]) & (j <= i),
        "from a start to a stop": lambda b, h, i, j: (j >= starts[i]) & (j < stops[i]),
        "a query before its stop": lambda b, h, i, j: (i >= j) & (i < stops[j]),
        "chunks of documents": lambda b, h, i, j: same(i, j) & (i // 32 == j // 32) & (i >= j),
        "64-bit documents": lambda b, h, i, j: (wide[i] == wide[j]) & (i >= j),
        "a head without documents": lambda b, h, i, j: ((heads[h] == 1) | same(i, j)) & (i >= j),
        "clamped": lambda b, h, i, j: (
            (torch.clamp(a[i], max=two[0] + 9) == torch.clamp(a[j], max=two[0] + 9)) & (i >= j)
        ),
    }


SIZES = [
    ((N, N), (16, 32)),
    ((N, N), (48, 16)),
    ((256, 256), (32, 32)),
    ((1, N), (1, 64)),
    ((N, 77), (7, 5)),
    ((65, N), (128, 128)),
]


@pytest.mark.parametrize("name", masks(random.Random(0)))
def test_equals_every_pair_and_the_search(name: str) -> None:
    for seed, (lengths, tile) in enumerate(SIZES):
        assert by_formula(masks(random.Random(seed))[name], lengths, tile) is not None, (seed, lengths, tile)


@pytest.mark.parametrize("seed", range(25))
def test_random_tables_and_sizes(seed: int) -> None:
    rng = random.Random(1000 + seed)
    lengths = rng.randint(1, N), rng.randint(1, N)
    tile = rng.choice((1, 3, 16, 64, 128)), rng.choice((2, 16, 31, 128))
    found = masks(rng)
    for name in rng.sample(sorted(found), 3):
        assert by_formula(found[name], lengths, tile) is not None, (name, lengths, tile)


def test_one_zone_is_kept_of_documents() -> None:
    table = torch.arange(8) // 3
    found = ordered_zones(trace(lambda b, h, i, j: (table[i] == table[j]) & (i >= j), "mask").program)
    assert (len(found.kept), len(found.dropped)) == (1, 3)
    assert [c.is_strict for c in found.kept[0].conditions] == [False, False, False]


UNSORTED = torch.tensor([3, 3, 1, 1, 2, 2, 2, 9, 9]).repeat_interleave(40)
FALLING = UNSORTED.sort(descending=True).values
PADDED = torch.cat([UNSORTED.sort().values[:340], torch.full((20,), -1)])
SORTED = UNSORTED.sort().values
GAPS, OTHERS = torch.arange(360) * 2, torch.arange(360) * 2 + 1
FLOATS = SORTED.float()


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, i, j: UNSORTED[i] == UNSORTED[j],
        lambda b, h, i, j: FALLING[i] == FALLING[j],
        lambda b, h, i, j: (PADDED[i] == PADDED[j]) & (i >= j),
        lambda b, h, i, j: SORTED[i] == UNSORTED[j],
        lambda b, h, i, j: FLOATS[i] == FLOATS[j],
        lambda b, h, i, j: (SORTED[i] == SORTED[j]) & (i > j),  # the first query of a document has no key
        lambda b, h, i, j: (SORTED[i] == SORTED[j]) & (i - j <= 9) & (i - j >= 5),
        lambda b, h, i, j: GAPS[i] == OTHERS[j],  # no key between those of a query and the next
        lambda b, h, i, j: (SORTED[i] == SORTED[j]) | (GAPS[i] // 300 == GAPS[j] // 300),  # two gaps that overlap
        lambda b, h, i, j: (SORTED[i] == SORTED[j]) & (j % 2 == 0),
        lambda b, h, i, j: SORTED[i] + SORTED[j] <= 5,
        lambda b, h, i, j: SORTED[i - 1] == SORTED[j],  # the last one, for the first query
        lambda b, h, i, j: SORTED[299 - i] == SORTED[299 - j],
        lambda b, h, i, j: (SORTED * (1 << 60))[i] + j >= i + SORTED[j] * (1 << 60),  # may wrap around
    ],
    ids=[
        "unsorted", "falling", "padding of -1", "sorted and unsorted", "floats", "strictly causal", "a band off the diagonal",
        "gaps", "two tables, either", "every second key", "a sum", "negative index", "backwards", "wraps",
    ],
)  # fmt: skip
def test_masks_without_a_formula_are_searched(mask_mod: Mask) -> None:
    assert by_formula(mask_mod, (300, 300), (16, 32)) is None
    tiles = create_block_mask(mask_mod, None, None, 300, 300, "cpu").tile_map(16, 32)
    check(tiles, brute(mask_mod, 1, 1, 300, 300))
    assert not any(way.endswith("by_formula") for way in tiles.decided)


def test_a_table_that_is_read_past_its_end_is_searched() -> None:
    short = SORTED[:200]
    mask_mod = lambda b, h, i, j: (j < 200) & (i < 200) & (short[i] == short[j])
    assert by_formula(mask_mod, (300, 300), (16, 32)) is None
    kept = torch.zeros(300, 300, dtype=torch.bool)
    kept[:200, :200] = short[:, None] == short
    check(create_block_mask(mask_mod, None, None, 300, 300, "cpu").tile_map(16, 32), kept[None, None])


def test_a_view_that_is_not_contiguous() -> None:
    table = torch.stack([SORTED, UNSORTED], 1)[:, 0]
    assert by_formula(lambda b, h, i, j: (table[i] == table[j]) & (i >= j), (300, 360), (16, 32)) is not None


def test_many_zones_are_searched() -> None:
    tables = [SORTED + n for n in range(MOST_ZONES)]
    mask_mod = lambda b, h, i, j: sum((t[i] == t[j]).long() for t in tables) > 0
    every = lambda b, h, i, j: all_of([t[i] == t[j] for t in tables])
    for mask in (mask_mod, every):
        assert by_formula(mask, (100, 100), (16, 16)) is None


def all_of(parts: list[Any]) -> Any:
    for part in parts[1:]:
        parts[0] = parts[0] & part
    return parts[0]


def test_a_table_that_was_written_to() -> None:
    table = SORTED.clone()
    mask_mod = lambda b, h, i, j: table[i] == table[j]
    mask = create_block_mask(mask_mod, None, None, 300, 300, "cpu")
    mask.tile_map(16, 32)
    table[100] = 0
    with pytest.raises(StaleMaskError):
        mask.tile_map(32, 32)
    tiles = create_block_mask(mask_mod, None, None, 300, 300, "cpu").tile_map(16, 32)
    assert "full_by_formula" not in tiles.decided  # it is not sorted any more
    check(tiles, brute(mask_mod, 1, 1, 300, 300))
    table[100] = table[99]
    tiles = create_block_mask(mask_mod, None, None, 300, 300, "cpu").tile_map(16, 32)
    assert "full_by_formula" in tiles.decided
    check(tiles, brute(mask_mod, 1, 1, 300, 300))


@pytest.mark.parametrize("ends", [[], [16], [32, 64], [15, 17, 31, 33], list(range(1, 64)), [63]])
def test_documents_that_end_at_the_edges_of_tiles(ends: list[int]) -> None:
    table = torch.searchsorted(torch.tensor(ends, dtype=torch.int64), torch.arange(64), right=True)
    for q_block, kv_block in itertools.product((1, 16, 32, 64, 100), (1, 16, 32)):
        assert by_formula(lambda b, h, i, j: table[i] == table[j], (64, 64), (q_block, kv_block)) is not None
        assert (
            by_formula(lambda b, h, i, j: (table[i] == table[j]) & (i >= j), (64, 64), (q_block, kv_block)) is not None
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_values_that_the_type_of_a_table_cannot_hold(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    small = torch.tensor([info.min, info.min + 1, 3, info.max - 1, info.max], dtype=dtype).repeat_interleave(20)
    wide = torch.tensor([-(1 << 40), info.min, 3, 1 << 40, 1 << 40]).repeat_interleave(20)
    for mask_mod in (
        lambda b, h, i, j: wide[i] <= small[j],
        lambda b, h, i, j: wide[i] < small[j],
        lambda b, h, i, j: (small[j] <= wide[i]) & (small[i].long() > -1000),
        lambda b, h, i, j: (small[i] == small[j]) & (small[j].long() < 100_000) & (small[j] > info.min),
        lambda b, h, i, j: (small[j].long() > 100_000) | (small[i] < info.max) & (small[j] >= info.max),
    ):
        for lengths in ((100, 100), (60, 100)):
            assert by_formula(mask_mod, lengths, (16, 10)) is not None
