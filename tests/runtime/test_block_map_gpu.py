"""Span tables made on a GPU: the CPU's maps for every mask, kept, shared between streams, recorded in CUDA graphs, and grown.

What `build_tables` computes is also tested without a GPU, in Triton's interpreter (tests/interpret/test_block_map.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import BlockMask, create_block_mask, flex_attention
from flexattn.codegen.emit import MOST_TABLES
from flexattn.errors import StaleMaskError
from flexattn.frontend.tile_map import TileMap
from flexattn.runtime import block_map, settings, table_builder
from flexattn.runtime.block_map import Cut, DeviceTable, device_tables
from flexattn.runtime.device import queue_of, target_for
from flexattn.runtime.table_builder import Built, build_tables
from tests.frontend import library_masks
from tests.frontend.library_masks import LIBRARY
from tests.frontend.mask_families import BATCH, HEADS, families
from tests.helpers import is_same_but_for_order
from tests.span_tables import check_table

pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
N = 1100
FAMILIES = families(N)
TILES = ((64, 64), (16, 16), (128, 64), (32, 192))
Mask = Callable[..., Any]


@pytest.fixture(autouse=True)
def _nothing_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for spans as it is at first, and memory that has been something else."""
    monkeypatch.setattr(block_map, "_ROOMS", {})
    torch.full((1 << 22,), 2**30, dtype=torch.int32, device=GPU)


def built(mask: BlockMask, *cuts: Cut, room: int = 128) -> Built:
    assert mask.predicate is not None
    return build_tables(mask.predicate, cuts, target_for(GPU), room=room)


def device_table(mask: BlockMask, q_tile: int, kv_tile: int, *, transposed: bool) -> DeviceTable:
    return device_tables(mask, [Cut(q_tile, kv_tile, transposed)])[0]


def cpu_map(mask: BlockMask, tile: tuple[int, int]) -> TileMap:
    return mask.to("cpu").tile_map(*tile)


def check_both(mask: BlockMask, tiles: tuple[tuple[int, int], ...] = TILES) -> None:
    """Both tables of a mask, in tiles of several sizes, are the CPU's; other sizes build no further kernel."""
    on_cpu = mask.to("cpu")
    for at, tile in enumerate(tiles):
        wanted = on_cpu.tile_map(*tile)
        found = built(mask, Cut(*tile, False), Cut(*tile, True))
        assert int(found.needed) == 0
        for transposed, table in zip((False, True), found.tables):
            assert (table.batch, table.heads) == (wanted.batch, wanted.heads)
            check_table(table, wanted, transposed=transposed)
        if at == 0:
            flexattn.reset_stats()
    assert flexattn.stats().builds.total() == 0


# ---------------------------------------------------------------- equal to the CPU
@pytest.mark.parametrize("name", FAMILIES)
def test_families_have_the_tables_of_the_cpu(name: str) -> None:
    check_both(create_block_mask(FAMILIES[name], BATCH, HEADS, N - 7, N - 150, device="cpu").to(GPU))


@pytest.mark.parametrize("name", LIBRARY)
def test_library_masks_have_the_tables_of_the_cpu(name: str) -> None:
    space = LIBRARY[name]
    mask = create_block_mask(
        space.make(GPU), library_masks.BATCH, library_masks.HEADS, space.q_len, space.kv_len, device=GPU
    )
    if mask.predicate is not None and mask.predicate.traced is not None:
        check_both(mask, TILES[:3])
    else:
        check_table(device_table(mask, 64, 64, transposed=True), cpu_map(mask, (64, 64)), transposed=True)


def test_values_build_no_kernel_again() -> None:
    """Numbers, lengths, batch sizes, sizes and contents of captured tensors, tiles, and room for spans."""

    def check(window: int, batch: int, q_len: int, kv_len: int, ids: Tensor, tile: tuple[int, int] = (64, 64)) -> None:
        mask_mod = lambda b, h, q_idx, kv_idx: (ids[b, q_idx] == ids[b, kv_idx]) & (q_idx - kv_idx < window)
        mask = create_block_mask(mask_mod, batch, None, q_len, kv_len, device=GPU)
        for transposed in (False, True):
            (table,) = built(mask, Cut(*tile, transposed), room=32 + batch).tables
            check_table(table, cpu_map(mask, tile), transposed=transposed)

    draw = lambda batch, n, most: torch.randint(0, most, (batch, n), device=GPU).sort(1).values
    check(5, 1, 100, 100, draw(1, 100, 3))
    check(5, 1, 5000, 5000, draw(1, 5000, 3))  # a tree of more than one program
    flexattn.reset_stats()
    for window in (0, 1, 16, 17, -1):
        check(window, 2, 130, 70, draw(2, 130, 5))
    for length in (1, 15, 16, 17, 64, 65, 4097, 9000):
        check(40, 1, length, length, draw(1, length, 7))
    check(10**6, 17, 33, 40, draw(17, 40, 2).roll(9, 1), tile=(16, 8))
    assert flexattn.stats().builds.total() == 0
    assert flexattn.stats().mask_builds["device"] == 2 * 14


def test_integers_that_wrap_around_are_found_on_the_device() -> None:
    for far in (7, 2**62, 2**63 - 1, -(2**63)):
        start = torch.tensor([far, 40], device=GPU)
        mask = create_block_mask(lambda b, h, i, j: i + start[b] > j, 2, None, 130, 150, device=GPU)
        assert int(table_builder._wild(mask.predicate, (start,), queue_of(GPU), {})) == (abs(far) > 2**62)
        check_both(mask, TILES[:1])


def test_scalars_on_the_cpu_come_along() -> None:
    offset = torch.tensor(37)
    mask_mod = lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx
    mask = create_block_mask(mask_mod, None, None, 200, 300, device=GPU)
    check_table(device_table(mask, 64, 64, transposed=False), cpu_map(mask, (64, 64)), transposed=False)


# ---------------------------------------------------------------- kept, grown, stale
def stripes(n: int, device: torch.device = GPU) -> BlockMask:
    """Every second block of 64 keys: n // 128 spans a row, in a captured tensor, for which rows have room for 8 at first."""
    ids = torch.arange(n, device=device) // 64 % 2
    return create_block_mask(lambda b, h, q_idx, kv_idx: ids[kv_idx] == 1, None, None, 200, n, device=device)


def is_degraded(table: Any, mask: BlockMask) -> bool:
    """Every row is one partial span from its first tile to its last."""
    cells = mask.shape[-1] // 64
    return table.rows[0, :, 1:9].tolist() == [[0, cells - 1, 0, 1, 0, 0, 1, cells]] * table.rows.shape[1]


def test_a_table_grows_after_the_device_has_said_that_rows_did_not_fit() -> None:
    mask, tile = stripes(64 * 100), (64, 64)
    flexattn.reset_stats()
    assert is_degraded(device_table(mask, *tile, transposed=False), mask)
    torch.cuda.synchronize()
    grown = device_table(mask, *tile, transposed=False)
    check_table(grown, cpu_map(mask, (64, 64)), transposed=False)
    assert device_table(mask, *tile, transposed=False).rows is grown.rows
    assert flexattn.stats().mask_builds["device"] == 2
    fresh = stripes(64 * 90)  # another mask of the same structure has room from the start
    check_table(device_table(fresh, *tile, transposed=False), cpu_map(fresh, (64, 64)), transposed=False)
    assert flexattn.stats().builds["block_map"] <= 1


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def test_a_deterministic_table_has_grown_at_once(deterministic: None) -> None:
    mask = stripes(64 * 80)
    check_table(device_table(mask, 64, 64, transposed=False), cpu_map(mask, (64, 64)), transposed=False)


def test_a_table_that_may_not_grow_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_builder, "_MOST_BYTES", 4 * 8 * 16)  # four rows of 8 spans of a kind
    monkeypatch.setattr(table_builder, "_READY", {})  # none that was made before
    settings.forget_warnings()
    mask, tile = stripes(64 * 60), (64, 64)
    first = device_table(mask, *tile, transposed=False)
    torch.cuda.synchronize()
    with pytest.warns(settings.FlexPerformanceWarning, match="30 runs of tiles and its table room for 8"):
        assert device_table(mask, *tile, transposed=False).rows is first.rows
    assert is_degraded(first, mask)


def test_degraded_tables_give_the_same_attention() -> None:
    """To rounding: tiles come in another order."""
    q = torch.randn(1, 1, 200, 64, device=GPU, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 64 * 64, 64, device=GPU, dtype=torch.bfloat16)
    mask = stripes(64 * 64)
    first = flex_attention(q, k, k, block_mask=mask)
    torch.cuda.synchronize()
    torch.testing.assert_close(flex_attention(q, k, k, block_mask=mask), first, atol=4e-3, rtol=0)


def test_a_mask_whose_tensors_changed_is_stale() -> None:
    ids = torch.arange(300, device=GPU) // 50
    mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 300, 300, device=GPU)
    kept = device_table(mask, 64, 64, transposed=False)
    assert device_table(mask, 64, 64, transposed=False).rows is kept.rows
    ids += 1
    for tile in (64, 32):
        with pytest.raises(StaleMaskError, match="has changed since the BlockMask was created"):
            device_table(mask, tile, 64, transposed=False)


def test_tensors_of_inference_mode_are_read_again_every_time() -> None:
    with torch.inference_mode():
        ids = torch.arange(300, device=GPU) // 50
        mask = create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 300, 300, device=GPU)
        for _ in range(2):
            table = device_table(mask, 64, 64, transposed=True)
            check_table(table, cpu_map(mask, (64, 64)), transposed=True)
            ids.copy_(ids.flip(0) // 2)


def test_memory_of_long_masks() -> None:
    """262,144 tokens, the three tables of a training step, causal and in documents: kept and temporary below 3 MiB."""
    n = 262_144
    ids = (torch.arange(n, device=GPU) // 8000).int()
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    for mask_mod in (causal, lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)):
        mask = create_block_mask(mask_mod, None, None, n, n, device=GPU)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        tables = device_tables(mask, [Cut(128, 64, False), Cut(64, 64, False), Cut(64, 64, True)])
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated(GPU) - before < 3 << 20
        check_few_rows(tables[1], n // 64)


def check_few_rows(table: Any, lines: int) -> None:
    """Rows of a causal table end at their own tile."""
    rows = table.rows[0].cpu()
    assert rows.shape[0] == lines
    assert torch.equal(rows[:, 8], rows[:, 0] + 1) and bool((rows[:, 2] >= 1).all())
    assert torch.equal(rows[:, 0].sort().values, torch.arange(lines, dtype=torch.int32))


def test_long_masks_of_floats_are_proved_by_the_tile_map() -> None:
    """Whose bounds follow floats; the builder's do not, and evaluating every pair would take seconds."""
    n, tile = 1 << 17, (128, 128)
    near = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() * 0.5 < 300.25
    flexattn.reset_stats()
    table = device_table(create_block_mask(near, None, None, n, n, device=GPU), *tile, transposed=False)
    assert flexattn.stats().mask_builds == {"proved": 1}
    assert table.rows[0, :, 1:3].sum(1).max() == 11
    device_table(create_block_mask(near, None, None, 4096, n // 2, device=GPU), *tile, transposed=False)
    assert flexattn.stats().mask_builds == {"proved": 1, "device": 1}


def test_counted_as_made_by_the_device() -> None:
    q = torch.randn(1, 2, 300, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    flexattn.reset_stats()
    out = flex_attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 77)
    made = flexattn.stats().mask_builds["device"]
    assert (
        2 <= made <= 4
    )  # by row for forward and dq, by column for dk and dv, and for all three; tiles may be the same
    out.sum().backward()
    assert flexattn.stats().mask_builds == {"device": made}  # the backward pass makes none
    launches = flexattn.stats().launches
    assert launches["fill"] == launches["order"] == -(-made // MOST_TABLES)  # of so many together


# ---------------------------------------------------------------- streams and graphs
def busy(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms


def test_another_stream_waits_for_the_table_and_for_what_it_is_made_of() -> None:
    def tables_of(mask: BlockMask) -> list[Any]:
        return [device_table(mask, 64, 64, transposed=False), device_table(mask, 128, 32, transposed=True)]

    ids = torch.arange(3000, device=GPU) // 70
    first_mask, mask = (
        create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 3000, 3000, device=GPU)
        for _ in range(2)
    )
    tables_of(first_mask)  # kernels are built
    first, second = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
    torch.cuda.synchronize()
    busy(first)
    with torch.cuda.stream(first):
        device_table(mask, 64, 64, transposed=False)
    with torch.cuda.stream(second):  # the second table reads the tree that the first stream makes
        copies = [t._replace(rows=t.rows.clone(), extra=t.extra.clone()) for t in tables_of(mask)]
    assert not first.query(), "the first stream was done before the second one asked"
    second.synchronize()
    check_table(copies[0], cpu_map(mask, (64, 64)), transposed=False)
    check_table(copies[1], cpu_map(mask, (128, 32)), transposed=True)


def test_the_host_does_not_wait() -> None:
    """Neither where 64-bit integers may wrap around nor after rows that did not fit."""
    start = torch.tensor([5, 9], device=GPU)

    def tables(n: int) -> None:
        shifted = create_block_mask(lambda b, h, i, j: i + start[b] > j, 2, None, n, n, device=GPU)
        for mask in (stripes(n), shifted):
            for transposed in (False, True, False):
                device_table(mask, 64, 64, transposed=transposed)

    tables(64)  # kernels are built
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream(GPU)
    busy(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tables(64 * 50)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not stream.query(), "the device was done before the host"


MASKS_OF_LENGTHS: dict[str, Callable[[Tensor], Mask]] = {
    "prefix": lambda lengths: lambda b, h, q_idx, kv_idx: kv_idx < lengths[b],
    "shift": lambda lengths: lambda b, h, q_idx, kv_idx: kv_idx < q_idx + lengths[b],  # sums of 64-bit integers
}


@pytest.mark.parametrize("name", MASKS_OF_LENGTHS)
def test_a_graph_makes_its_tables_anew(name: str) -> None:
    """Forward and backward with mask_mod= in a CUDA graph follow lengths that change in place."""
    lengths = torch.tensor([100, 700], device=GPU)
    mask_mod = MASKS_OF_LENGTHS[name](lengths)
    q, k, v = (torch.randn(2, 2, n, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for n in (520, 900, 900))
    upstream = torch.randn(2, 2, 520, 64, device=GPU, dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        out = flex_attention(q, k, v, mask_mod=mask_mod)
        return (out, *torch.autograd.grad(out, (q, k, v), upstream))

    side = torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(GPU).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    flexattn.reset_stats()
    with torch.cuda.graph(graph):
        recorded = step()
    assert flexattn.stats().mask_builds["device"] >= 2 and set(flexattn.stats().mask_builds) == {"device"}
    for values in ([100, 700], [899, 1], [0, 64], [300, 301]):
        lengths.copy_(torch.tensor(values))
        graph.replay()
        for at, (found, wanted) in enumerate(zip(recorded, step(), strict=True)):
            same = (
                torch.equal(found, wanted) if at != 1 else is_same_but_for_order(found, wanted)
            )  # dq may be added in any order
            assert same, values


def test_a_graph_keeps_the_table_that_it_reads() -> None:
    """A kept table that was recorded stays, though a larger one takes its place for later calls."""
    q = torch.randn(1, 1, 200, 64, device=GPU, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 64 * 40, 64, device=GPU, dtype=torch.bfloat16)
    mask = stripes(64 * 40)
    want = flex_attention(q, k, k, block_mask=mask)  # in a table without room enough
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = flex_attention(q, k, k, block_mask=mask)
    flex_attention(q, k, k, block_mask=mask)  # grows
    torch.full((1 << 20,), 2**30, dtype=torch.int32, device=GPU)  # takes what is free
    graph.replay()
    assert torch.equal(recorded, want)
