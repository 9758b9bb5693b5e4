"""Tile maps equal what evaluating every pair gives: on every family of masks, on random ones, at any size."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from flexattn.errors import CaptureIndexError, OptionError
from flexattn.frontend import periodic
from flexattn.frontend.expr import DEP_B, DEP_H
from flexattn.frontend.spans import RUNS_AT_ONCE, Grid, LineRuns, Spans, cover, coverage, turned
from flexattn.frontend.tile_map import TileMap, build_tile_map
from flexattn.frontend.tile_search import TileSearch
from flexattn.frontend.trace import trace
from tests.frontend.mask_families import BATCH, HEADS, brute, brute_tiles, families

pytestmark = pytest.mark.usefixtures("one_thread")
N = 420
MASKS = families(N)
SHAPES = [(N, N, 128, 128), (300, N, 64, 128), (N, 177, 16, 48), (1, N, 1, 64), (257, 33, 192, 8)]


def build(mask_mod, q_len, kv_len, q_block, kv_block, batch=BATCH, heads=HEADS) -> TileMap:
    traced = trace(mask_mod, "mask") if mask_mod is not None else None
    sizes = {"q_len": q_len, "kv_len": kv_len, "q_block": q_block, "kv_block": kv_block}
    return build_tile_map(traced, batch=batch, heads=heads, device="cpu", **sizes)


def searched(mask_mod, q_len, kv_len, q_block, kv_block) -> TileMap:
    """The map by search, also where a formula would give it."""
    traced = trace(mask_mod, "mask")
    sizes = (size if traced.program.body.deps & index else 1 for size, index in ((BATCH, DEP_B), (HEADS, DEP_H)))
    grid = Grid(*sizes, q_len, kv_len, q_block, kv_block)
    return TileMap(grid, *TileSearch(traced, grid, torch.device("cpu")).run(), traced)


def check_spans(spans: Spans, lines: int, cells: int) -> None:
    """Runs are in order, inside, not empty and joined."""
    assert all(x.dtype == torch.int32 for x in spans)
    assert len(spans.indptr) == lines + 1
    assert int(spans.indptr[0]) == 0
    assert int(spans.indptr[-1]) == len(spans.start) == len(spans.stop)
    assert bool((spans.indptr.diff() >= 0).all())
    assert bool((spans.start < spans.stop).all())
    assert not len(spans.start) or (int(spans.start.min()) >= 0 and int(spans.stop.max()) <= cells)
    line = torch.repeat_interleave(torch.arange(lines), spans.indptr.diff())
    same = line[1:] == line[:-1]
    assert bool((spans.start[1:] > spans.stop[:-1])[same].all())


def check(tile_map: TileMap, kept: torch.Tensor, *, pairs: bool = True) -> None:
    """The map against all pairs, in both directions, with its counts."""
    want = brute_tiles(kept, tile_map.q_block, tile_map.kv_block)
    groups, rows, cols = tile_map.batch * tile_map.heads, tile_map.rows, tile_map.cols
    for spans, lines, cells in (
        (tile_map.full, rows, cols),
        (tile_map.partial, rows, cols),
        (tile_map.full_t, cols, rows),
        (tile_map.partial_t, cols, rows),
    ):
        check_spans(spans, groups * lines, cells)
    assert torch.equal(tile_map.dense().expand_as(want), want)
    shape = (tile_map.batch, tile_map.heads, cols, rows)
    full, partial = (cover(s, rows).reshape(shape).to(torch.int8) for s in (tile_map.full_t, tile_map.partial_t))
    assert torch.equal((2 * full + partial).transpose(-1, -2).expand_as(want), want)
    counts = tile_map.decided
    ways = [k for k in counts if k not in ("tiles", "levels")]
    assert sum(counts[k] for k in ways) == counts["tiles"] == groups * rows * cols
    if pairs:
        repeats = kept[:, :, 0, 0].numel() // max(groups, 1)
        assert tile_map.kept_pairs() * repeats == int(kept.sum())


@pytest.mark.parametrize("name", MASKS)
def test_equals_every_pair(name: str) -> None:
    for q_len, kv_len, q_block, kv_block in SHAPES:
        kept = brute(MASKS[name], BATCH, HEADS, q_len, kv_len)
        tile_map = build(MASKS[name], q_len, kv_len, q_block, kv_block)
        check(tile_map, kept)
        if "full_by_formula" in tile_map.decided:
            check(searched(MASKS[name], q_len, kv_len, q_block, kv_block), kept, pairs=False)


@pytest.mark.parametrize(
    "name", ["documents per batch", "block diffusion", "neighbourhood", "sink and window", "dense"]
)
def test_several_levels(name: str) -> None:
    """Small tiles, so that rectangles are split more than once, and more than one chunk of them."""
    mask_mod = families(700, seed=3)[name]
    check(build(mask_mod, 700, 650, 4, 2), brute(mask_mod, BATCH, HEADS, 700, 650))


def test_one_map_where_heads_do_not_differ() -> None:
    assert (build(MASKS["causal"], 64, 64, 16, 16).batch, build(MASKS["causal"], 64, 64, 16, 16).heads) == (1, 1)
    assert (build(MASKS["padding"], 64, 64, 16, 16).batch, build(MASKS["padding"], 64, 64, 16, 16).heads) == (BATCH, 1)
    assert (
        build(MASKS["window per head"], 64, 64, 16, 16).batch,
        build(MASKS["window per head"], 64, 64, 16, 16).heads,
    ) == (1, HEADS)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 50), (50, 0), (130, 50), (128, 128)])
@pytest.mark.parametrize("mask_mod", [None, MASKS["causal"], MASKS["padding"]], ids=["no mask", "causal", "padding"])
def test_sizes_of_zero_and_no_mask(mask_mod, q_len: int, kv_len: int) -> None:
    keep = (lambda b, h, q, k: torch.tensor(True)) if mask_mod is None else mask_mod
    tile_map = build(mask_mod, q_len, kv_len, 64, 32)
    kept = brute(keep, BATCH, HEADS, q_len, kv_len)
    want = brute_tiles(kept, 64, 32)
    assert torch.equal(tile_map.dense().expand_as(want), want)
    assert tile_map.full.indptr.shape == (tile_map.batch * tile_map.heads * tile_map.rows + 1,)
    assert tile_map.full_t.indptr.shape == (tile_map.batch * tile_map.heads * tile_map.cols + 1,)
    assert tile_map.density() == (kept.double().mean().item() if kept.numel() else 0.0)


def test_no_batch() -> None:
    tile_map = build(MASKS["padding"], 40, 40, 16, 16, batch=0)
    assert tile_map.dense().shape == (0, 1, 3, 3)
    assert tile_map.table().rows.shape == (0, 3, 12)


def table_by_hand(full: Spans, partial: Spans, groups: int) -> tuple[list, list]:
    """The kernel's table, in the plainest way."""
    lines = (len(full.indptr) - 1) // groups
    runs = lambda s, i: [(int(s.start[x]), int(s.stop[x])) for x in range(int(s.indptr[i]), int(s.indptr[i + 1]))]
    further = {0: [], 1: []}
    rows = []
    for i in range(groups * lines):
        row = [i % lines] + [0] * 11
        for at, spans in enumerate((full, partial)):
            mine = runs(spans, i)
            row[1 + at], row[3 + at] = sum(z - a for a, z in mine), len(mine)
            if mine:
                row[5 + 2 * at : 7 + 2 * at] = mine[0]
            row[9 + at] = len(further[at]) if len(mine) > 1 else None
            further[at] += mine[1:]
        rows.append(row)
    for row in rows:
        row[9] = row[9] or 0
        row[10] = 0 if row[10] is None else row[10] + len(further[0])
    ordered = []
    for g in range(groups):
        ordered.append(sorted(rows[g * lines : (g + 1) * lines], key=lambda r: -(r[1] + r[2])))
    return ordered, further[0] + further[1]


@pytest.mark.parametrize(
    "name", ["causal", "documents per batch", "dilated", "chosen blocks", "window per head", "none"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_table(name: str, transposed: bool) -> None:
    tile_map = build(MASKS[name], 300, N, 16, 32)
    rows, extra = tile_map.table(transposed)
    spans = (tile_map.full_t, tile_map.partial_t) if transposed else (tile_map.full, tile_map.partial)
    want_rows, want_extra = table_by_hand(*spans, tile_map.batch * tile_map.heads)
    assert rows.dtype == extra.dtype == torch.int32
    assert rows.is_contiguous()
    assert extra.is_contiguous()
    assert rows.tolist() == want_rows
    assert [tuple(x) for x in extra.tolist()] == (want_extra or [(0, 0)])
    assert tile_map.table(transposed) is tile_map.table(transposed)


@pytest.mark.parametrize("name", ["causal", "window per head", "documents, shuffled"])
def test_coverage_sums_sections(name: str) -> None:
    tile_map = build(MASKS[name], 300, N, 16, 32)
    dense = tile_map.dense()[0, -1] > 0
    group = tile_map.batch * tile_map.heads - 1
    dense = tile_map.dense().flatten(0, 1)[group] == 1
    got = coverage(tile_map.partial, group=group, lines=tile_map.rows, cells=tile_map.cols, line_step=3, cell_step=5)
    want = torch.nn.functional.pad(dense.double(), (0, -dense.shape[1] % 5, 0, -dense.shape[0] % 3))
    want = want.view(got.shape[0], 3, got.shape[1], 5).sum((1, 3))
    assert torch.equal(got, want)


def test_witnesses_spare_evaluation() -> None:
    """The usual masks are settled without looking at all pairs of a single tile."""
    for name in ("causal", "window", "documents, causal", "prefix", "sink and window", "chunked", "packed by start"):
        counts = searched(MASKS[name], N, N, 16, 16).decided
        assert counts["partial_by_witness"] > 0
        assert counts["empty_by_evaluation"] == counts["full_by_evaluation"] == counts["partial_by_evaluation"] == 0, (
            name
        )


def test_evaluation_settles_what_bounds_cannot() -> None:
    counts = searched(MASKS["full by union only"], 256, 256, 128, 128).decided
    assert counts["full_by_evaluation"] == 2
    assert counts["full_by_interval"] == 2


def test_value_sets_prove_shuffled_tables_apart() -> None:
    a, b = torch.arange(512) % 16, 16 + torch.arange(512) % 16
    counts = build(lambda b_, h, q, k: a[q] == b[k], 512, 512, 128, 128).decided
    assert counts["empty_by_interval"] == counts["tiles"] == 16
    swapped = torch.where(torch.arange(512) % 128 < 64, a * 2, b * 2 + 1)  # even and odd values, never equal across
    other = swapped + torch.where(torch.arange(512) % 128 < 64, 1, -1)
    counts = build(lambda b_, h, q, k: swapped[q] == other[k], 512, 512, 128, 128)
    check(counts, brute(lambda b_, h, q, k: swapped[q] == other[k], BATCH, HEADS, 512, 512))


def test_a_single_equal_pair_is_found() -> None:
    """No witness hits it, and value sets do not rule it out."""
    a, b = torch.arange(512) * 2, torch.arange(512) * 2 + 1
    b[300] = a[200]
    tile_map = build(lambda b_, h, q, k: a[q] == b[k], 512, 512, 128, 128)
    assert tile_map.dense().nonzero().tolist() == [[0, 0, 1, 2]]
    assert tile_map.kept_pairs() == 1
    assert tile_map.decided["partial_by_evaluation"] == 1
    tile_map = build(lambda b_, h, q, k: a[q] != b[k], 512, 512, 128, 128)
    assert (tile_map.dense() == 1).nonzero().tolist() == [[0, 0, 1, 2]]
    assert tile_map.kept_pairs() == 512 * 512 - 1


def test_no_gradient_is_recorded() -> None:
    table = torch.linspace(-1, 1, 64, requires_grad=True)
    assert build(lambda b, h, q, k: table[q] + table[k] > 0, 64, 64, 16, 16).kept_pairs() == 32 * 63


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_default_device_does_not_matter(where: str) -> None:
    mask_mod = MASKS["documents, causal"]
    with torch.device(where):
        tile_map = build(mask_mod, 200, 300, 32, 64)
    check(tile_map, brute(mask_mod, BATCH, HEADS, 200, 300))


def test_kept_read_out_of_range_is_an_error() -> None:
    short = torch.zeros(100, dtype=torch.int32)
    with pytest.raises(CaptureIndexError, match="out of range"):
        build(lambda b, h, q, k: short[q] == short[k], 200, 200, 64, 64)
    guarded = build(lambda b, h, q, k: (k < 100) & (q < 100) & (short[q] == short[k]), 200, 200, 64, 64)
    assert guarded.kept_pairs() == 100 * 100


@pytest.mark.parametrize("sizes", [{"q_block": 0}, {"kv_block": -1}, {"q_len": -1}, {"batch": -2}])
def test_bad_sizes_are_refused(sizes: dict[str, int]) -> None:
    good = {"batch": 1, "heads": 1, "q_len": 8, "kv_len": 8, "q_block": 4, "kv_block": 4}
    with pytest.raises(OptionError, match="must be positive"):
        build_tile_map(None, device="cpu", **(good | sizes))


LONG = 1 << 20


def long_masks() -> dict[str, object]:
    g = torch.Generator().manual_seed(1)
    cuts = torch.sort(torch.randint(1, LONG, (31,), generator=g)).values
    ids = torch.bucketize(torch.arange(LONG), cuts, right=True).to(torch.int32)
    return {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q >= k) & (q - k < 1024),
        "documents": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
    }


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_a_million_tokens(name: str) -> None:
    """Sampled tiles of a map that no dense mask could check, the exact number of pairs, and bounds on time and memory."""
    mask_mod = long_masks()[name]
    begin = time.perf_counter()
    tile_map = build(mask_mod, LONG, LONG, 128, 128)
    assert time.perf_counter() - begin < 2.0
    stored = sum(
        x.numel() * 4 for s in (tile_map.full, tile_map.partial, tile_map.full_t, tile_map.partial_t) for x in s
    )
    assert stored < 1 << 20
    by_search = searched(mask_mod, LONG, LONG, 128, 128)
    for part in ("full", "partial", "full_t", "partial_t"):
        assert all(map(torch.equal, getattr(tile_map, part), getattr(by_search, part)))
    rng = random.Random(0)
    for _ in range(40):
        i = rng.randrange(tile_map.rows)
        ends = [
            int(x)
            for s in (tile_map.full, tile_map.partial)
            for x in torch.cat((s.start, s.stop))[s.indptr[i] : s.indptr[i + 1]]
        ]
        for j in {
            max(0, min(tile_map.cols - 1, e + d)) for e in [*ends, rng.randrange(tile_map.cols)] for d in (-1, 0)
        }:
            q, k = torch.arange(i * 128, i * 128 + 128)[:, None], torch.arange(j * 128, j * 128 + 128)
            kept = mask_mod(0, 0, q, k)
            inside = [
                bool(((s.start <= j) & (j < s.stop))[s.indptr[i] : s.indptr[i + 1]].any())
                for s in (tile_map.full, tile_map.partial)
            ]
            assert inside == [bool(kept.all()), bool(kept.any() and not kept.all())]
    if name == "causal":
        assert tile_map.kept_pairs() == LONG * (LONG + 1) // 2
    if name == "window":
        assert tile_map.kept_pairs() == 1024 * LONG - 1024 * 1023 // 2


@pytest.mark.parametrize("make", [build, searched])
def test_memory_follows_the_answer(make: Callable[..., TileMap]) -> None:
    """A window over 262,144 tokens: NumPy's part of a build (its sort buffers) stays small, and so does the result."""
    tracemalloc.start()
    tile_map = make(lambda b, h, q, k: (q >= k) & (q - k < 1024), 1 << 18, 1 << 18, 128, 128)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    assert tile_map.full.tiles() + tile_map.partial.tiles() < 2048 * 9


def test_waiting_runs_are_narrow_and_few() -> None:
    """Runs are int32 wherever a grid allows it, int64 beyond, and are joined before many wait."""
    narrow, wide = (LineRuns(n, (8192, 8192), (8192, 8192), torch.device("cpu")) for n in (1, 64))
    for lines, dtype in ((narrow, torch.int32), (wide, torch.int64)):
        for begin in range(0, 1 << 17, 4096):
            at = torch.arange(begin, begin + 4096)
            lines.full.add(at, at + 1)
            assert lines.full.size <= RUNS_AT_ONCE
        starts, stops = lines.full.joined()
        assert starts.dtype == stops.dtype == dtype
        assert (starts.tolist(), stops.tolist()) == ([0], [1 << 17])


def test_spans_turned_are_those_of_the_transposed_map() -> None:
    draw = torch.Generator().manual_seed(0)
    for number in range(300):
        groups, lines, cells = (int(torch.randint(0, end, (1,), generator=draw)) for end in (4, 9, 12))
        map_ = torch.rand(groups, lines, cells, generator=draw) < torch.rand(1, generator=draw) ** (1 + number % 3)
        found = turned(_spans_of(map_), groups, lines, cells)
        assert all(map(torch.equal, found, _spans_of(map_.transpose(1, 2))))
        check_spans(found, groups * cells, lines)


def _spans_of(map_: torch.Tensor) -> Spans:
    edges = torch.nn.functional.pad(map_.flatten(0, 1).int(), (1, 1)).diff(dim=1)
    start, stop = (edges == 1).nonzero(), (edges == -1).nonzero()
    counts = torch.bincount(start[:, 0], minlength=len(edges))
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    return Spans(*(x.to(torch.int32) for x in (indptr, start[:, 1], stop[:, 1])))


# ---------------------------------------------------------------- masks that repeat along the diagonal
REPEATING = {
    "causal, shifted": lambda b, h, q, k: q + 30 >= k,
    "window": lambda b, h, q, k: (q - k).abs() < 37,
    "dilated": lambda b, h, q, k: ((q - k) % 6 == 0) & (q >= k),
    "chunks": lambda b, h, q, k: (q // 48 == k // 48) | (q - k == 100),
    "rows of an image": lambda b, h, q, k: ((q // 24 - k // 24).abs() <= 2) & ((q % 24 - k % 24).abs() <= 3),
    "shifts": lambda b, h, q, k: (q >> 4) - (k >> 4) == h,
    "twice": lambda b, h, q, k: 2 * q - 2 * k + b > 9,
    "negative": lambda b, h, q, k: -q + k >= -30,
    "read at the distance": lambda b, h, q, k: DISTANCES[(q - k).abs()] > 3,
}
DISTANCES = torch.arange(1000) % 7


@pytest.mark.parametrize("name", REPEATING)
@pytest.mark.parametrize("shape", [(420, 420, 16, 16), (301, 430, 8, 16), (430, 97, 16, 24), (100, 430, 12, 12)])
def test_masks_that_repeat(name: str, shape: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One period is decided, whether rows or columns are more and whether a length cuts them or not."""
    monkeypatch.setattr(periodic, "LEAST_TILES", 1)
    monkeypatch.setattr(periodic, "SHARE", 0)
    traced, grid = trace(REPEATING[name], "mask"), Grid(BATCH, HEADS, *shape)
    found = periodic.repeated_search(traced, grid, torch.device("cpu"))
    assert found is not None
    assert any("repe" in way for way in found.decided)
    check(TileMap(grid, *found, traced), brute(REPEATING[name], BATCH, HEADS, *shape[:2]))


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, q, k: q + k > 100,
        lambda b, h, q, k: (q >= k) | (k < 60),
        lambda b, h, q, k: 3 * q > 2 * k,
        lambda b, h, q, k: q // (b + 2) == k // (b + 2),
        lambda b, h, q, k: DISTANCES[q] == DISTANCES[k],
        lambda b, h, q, k: (q * 0.5).floor() == (k * 0.5).floor(),
        lambda b, h, q, k: q % (k + 1) == 0,
        lambda b, h, q, k: (q ^ k) < 8,
        lambda b, h, q, k: q - k < 2**63 - 1 - q,
    ],
)
def test_masks_that_do_not_repeat(mask_mod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "LEAST_TILES", 1)
    monkeypatch.setattr(periodic, "SHARE", 0)
    assert periodic.period(trace(mask_mod, "mask"), 16) is None or periodic.repeated_search(
        trace(mask_mod, "mask"), Grid(BATCH, HEADS, 200, 300, 16, 16), torch.device("cpu")
    ) is None  # fmt: skip
    check(build(mask_mod, 200, 300, 16, 16), brute(mask_mod, BATCH, HEADS, 200, 300))


def test_the_most_tiles_of_a_period_are_those_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """More heads make a period's tiles more, but all tiles too."""
    rows = cols = 512 // 16
    monkeypatch.setattr(periodic, "LEAST_TILES", 1)
    monkeypatch.setattr(periodic, "MOST_TILES", 2 * (rows + cols))
    apart = torch.arange(1, HEADS + 1)
    mask_mod = lambda b, h, q, k: (q >= k) & ((q - k) % apart[h] == 0)
    tile_map = build(mask_mod, 512, 512, 16, 16)
    assert any("repe" in way for way in tile_map.decided)
    check(tile_map, brute(mask_mod, BATCH, HEADS, 512, 512))


def test_a_million_tokens_that_repeat() -> None:
    """Dilated over all of causal: refinement alone would look at the square."""
    n = 1 << 20
    tile_map = build(lambda b, h, q, k: ((q - k) % 4 == 0) & (q >= k), n, n, 128, 128, batch=1, heads=1)
    rows = n // 128
    assert len(tile_map.full.start) == 0
    assert torch.equal(tile_map.partial.stop, torch.arange(1, rows + 1, dtype=torch.int32))
    assert torch.equal(tile_map.partial_t.start, torch.arange(rows, dtype=torch.int32))
    assert tile_map.decided["partial_by_repetition"] == rows * (rows + 1) // 2
