"""The mask builder in Triton's interpreter: its tables are the CPU's tile maps, its trees the extremes of their ranges."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from flexattn import BlockMask, create_block_mask
from flexattn.codegen.skeletons import block_map as skeleton
from flexattn.codegen.target import INTERPRETER
from flexattn.errors import CaptureIndexError
from flexattn.frontend.zones import hold_for
from flexattn.runtime import block_map, settings, table_builder
from flexattn.runtime.block_map import usual_spans
from flexattn.runtime.table_builder import Built, Cut, build_tables, build_tree
from tests.frontend.mask_families import BATCH, HEADS, families
from tests.frontend.mask_fuzz import Sizes, predicate
from tests.frontend.test_mask_fuzz import budget
from tests.frontend.zoned_masks import ZONED
from tests.span_tables import check_table, dense_of, expected_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says when a lane that is not used overflows
N = 200
MASKS = families(N)
ROOM = 64


def check(
    mask_mod: Callable[..., Any], lengths: tuple[int, int], tile: tuple[int, int], *, room: int = ROOM,
    sizes: tuple[int, int] = (BATCH, HEADS), directions: tuple[bool, ...] = (False, True),
) -> Built:  # fmt: skip
    """Both tables of a mask, made together by search and, where it has zones, by formula, equal its tile map; returns what the
    search built."""
    predicate = create_block_mask(mask_mod, *sizes, *lengths, device="cpu").predicate
    assert predicate is not None
    tiles = predicate.tile_map(*tile)
    cuts, traced = tuple(Cut(*tile, x) for x in directions), predicate.traced
    roads = [True, False] if traced is not None and hold_for(traced.program, traced.binding.numbers) else [False]
    for by_formula in roads:
        manner = mock.patch.object(table_builder, "_manner", table_builder._manner.__wrapped__)  # nothing remembered
        with manner, mock.patch.object(table_builder, "hold_for", return_value=by_formula):
            built = build_tables(predicate, cuts, INTERPRETER, room=room)
        assert int(built.needed) == 0 and (by_formula or built.room == room)
        for transposed, table in zip(directions, built.tables, strict=True):
            assert (table.batch, table.heads) == (tiles.batch, tiles.heads)
            check_table(table, tiles, transposed=transposed)
    return built


@pytest.mark.parametrize(
    "name",
    [
        "window", "prefix per batch", "block diffusion", "documents, causal", "chunked",
        "video, temporal", "window per head", "dense", "relative table", "wrapping index", "sine",
    ],
)  # fmt: skip
def test_tables_are_the_tile_maps(name: str) -> None:
    check(MASKS[name], (N - 110, N - 50), (64, 64))


@pytest.mark.parametrize("name", ["all", "none", "full by union only"])
def test_tables_of_one_kind(name: str) -> None:
    for lengths, tile in (((64, 96), (32, 32)), ((40, 1), (16, 64)), ((1, 70), (16, 64))):
        check(MASKS[name], lengths, tile)


@pytest.mark.parametrize("name", ZONED)
def test_tables_by_formula(name: str) -> None:
    for (lengths, tile), sizes in zip(
        (((90, 130), (32, 16)), ((33, 20), (16, 16)), ((130, 71), (64, 32))), ((2, 2), (1, 1), (2, 1))
    ):
        check(ZONED[name], lengths, tile, sizes=sizes)


def test_more_blocks_than_a_strip_and_more_strips_than_are_looked_at_together() -> None:
    causal = lambda b, h, q_idx, kv_idx: q_idx + 4150 >= kv_idx
    check(causal, (3, 4291), (2, 1), sizes=(1, 1), directions=(False,))
    check(lambda b, h, q_idx, kv_idx: kv_idx // 64 % 3 > 0, (3, 64 * 7), (4, 1), sizes=(1, 1), directions=(False,))
    check(
        lambda b, h, q_idx, kv_idx: (kv_idx < 64) | (kv_idx > 190), (4, 260), (4, 1), sizes=(1, 1), directions=(False,)
    )


def test_every_pair_is_looked_at_where_bounds_and_witnesses_do_not_tell() -> None:
    """One kept pair in a block of dropped ones, or the other way round, anywhere."""
    for q, k, is_dropped in ((0, 1, False), (37, 21, True), (17, 64, False)):
        check(lambda b, h, i, j: ((i ^ q) + (j ^ k) == 0) ^ is_dropped, (64, 70), (64, 64), sizes=(1, 1))


def test_lengths_up_to_the_end_of_32_bits() -> None:
    """No index passes the length on the way: tiles of a million tokens, so that there are few, and the same across."""
    last = 2**31 - 1
    mask_mod = lambda b, h, q_idx, kv_idx: (kv_idx < 3 << 20) | (kv_idx >= last - 5000)
    swapped = lambda b, h, q_idx, kv_idx: mask_mod(b, h, kv_idx, q_idx)
    for mask, lengths, tile, transposed in (
        (mask_mod, (9, last), (8, 1 << 20), False),
        (swapped, (last, 9), (1 << 20, 8), True),
        (lambda b, h, i, j: (i >= j) & (i < last - 3), (last, 5), (1 << 29, 8), False),
    ):
        check(mask, lengths, tile, sizes=(1, 1), directions=(transposed,))


def test_random_masks_have_the_tables_of_the_cpu() -> None:
    """FLEXATTN_FUZZ_SECONDS (4) from FLEXATTN_FUZZ_SEED (0) on; a failure prints its seed."""
    first = seed = int(budget("SEED", "0"))
    end, seen = time.monotonic() + float(budget("SECONDS", "4")), Counter[str]()
    while seed == first or time.monotonic() < end:
        rng = random.Random(seed)
        sizes = Sizes(1, rng.randint(1, 2), rng.randint(1, 60), rng.randint(1, 60))
        made, tile = predicate(rng, sizes), (rng.choice([32, 64]), rng.choice([8, 32]))
        seed += 1
        try:
            create_block_mask(made.function(), *sizes, device="cpu").tile_map(*tile)
            check(made.function(), sizes[2:], tile, sizes=sizes[:2], directions=(rng.random() < 0.3,))
        except (CaptureIndexError, IndexError):
            seen["misread"] += 1
        except Exception as error:
            if "not supported for the input types" not in str(error):
                raise AssertionError(f"seed {seed - 1}, {sizes}, tile {tile}:\n{made}") from error
            seen["interpreter"] += 1  # takes a float comparison of b or h for a float where it meets a truth value
        else:
            seen["equal"] += 1
    print(f"seeds {first}..{seed - 1}: {dict(seen)}")
    assert seen["equal"] > sum(seen.values()) // 2


def no_evaluation(*_: Any) -> None:
    raise AssertionError("a block was evaluated pair by pair")


def test_documents_in_no_order_and_tables_of_blocks_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sets of values, in strips and in blocks, and by the one element that a block reads."""
    monkeypatch.setattr(skeleton, "_evaluate", no_evaluation)
    ids = torch.tensor([5, 0, 9, 2, 7, 4, 8, 1]).repeat_interleave(32)
    wide = torch.stack((torch.arange(7), 100 - torch.arange(7)), 1).repeat_interleave(256, 1).flatten()  # 512 a strip
    chosen = torch.rand(9, 40, generator=torch.Generator().manual_seed(0)) < 0.4
    masks: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
        "strips": (lambda b, h, i, j: wide[i * 256] == wide[j], (14, 7 * 512), (1, 8)),
        "blocks": (lambda b, h, i, j: ids[i] == ids[j], (250, 256), (64, 64)),
        "unequal": (lambda b, h, i, j: ids[i] != ids[j], (256, 250), (64, 64)),
        "chosen": (lambda b, h, i, j: chosen[i // 16, j // 8], (9 * 16, 40 * 8 - 3), (16, 8)),
        "chosen, smaller tiles": (lambda b, h, i, j: chosen[i // 16, j // 8], (9 * 16 - 5, 40 * 8), (8, 4)),
    }
    for name, (mask_mod, lengths, tile) in masks.items():
        found = check(mask_mod, lengths, tile, sizes=(1, 1), directions=(False,))
        assert len(found.tables) == 1, name


# ---------------------------------------------------------------- rows that do not fit
def degraded(wanted: Tensor, room: int) -> tuple[Tensor, int]:
    """The map in which rows of too many spans are one partial span, and the most spans of such a row; [lines, cells]."""
    wanted, needed = wanted.clone(), 0
    for line in wanted:
        runs = [int((torch.nn.functional.pad(line == kind, (1, 0)).int().diff() == 1).sum()) for kind in (1, 2)]
        if max(runs) > room:
            needed, some = max(needed, *runs), line.nonzero()
            line[int(some.min()) : int(some.max()) + 1] = 1
    return wanted, needed


def comb(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (kv_idx % 20 < 9) & (kv_idx > 5) & (kv_idx <= 3 * q_idx) | (q_idx == 9)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_too_many_spans_are_one_partial_span(transposed: bool) -> None:
    if transposed:
        predicate = create_block_mask(lambda b, h, i, j: comb(b, h, j, i), None, None, 90, 30, device="cpu").predicate
        tile = (3, 8)
    else:
        predicate, tile = create_block_mask(comb, None, None, 30, 90, device="cpu").predicate, (8, 3)
    exact = expected_of(predicate.tile_map(*tile), transposed=transposed)[0]
    for room, needs in ((1, 5), (4, 5), (5, 0)):
        built = build_tables(predicate, (Cut(*tile, transposed),), INTERPRETER, room=room)
        (table,), (wanted, needed) = built.tables, degraded(exact, room)
        assert torch.equal(dense_of(table, lines=4, cells=30)[0], wanted)
        assert int(built.needed) == needed == needs
        assert len(table.extra) == 4 * 2 * room


class LateReport:
    """A report that arrives when the test says so, where the real one asks a GPU."""

    has_arrived = False

    def __init__(self) -> None:
        self.told = torch.full((1,), -1, dtype=torch.int32)

    @property
    def is_known(self) -> bool:
        return LateReport.has_arrived

    def spans(self) -> int:
        assert int(self.told) >= 0, "the kernel has not said so"
        return int(self.told) if LateReport.has_arrived else 0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateReport]:
    monkeypatch.setattr(block_map, "_Report", LateReport)
    monkeypatch.setattr(block_map, "_ROOMS", {})
    monkeypatch.setattr(block_map, "usual_spans", lambda program: 2)
    monkeypatch.setattr(LateReport, "has_arrived", False)
    settings.forget_warnings()
    return LateReport


def test_a_place_is_used_again_only_after_a_kernel_has_written_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory, **options: zeros(*shape, **options))
    for places in (block_map._FREE, block_map._LEFT):
        places.clear()
    monkeypatch.setattr(block_map, "_PLACES_AT_ONCE", 2)
    first, second = block_map._Report(), block_map._Report()
    assert (first.spans(), first.is_known) == (0, False)
    first.told.fill_(5)
    assert (first.spans(), first.is_known, second.is_known) == (5, True, False)
    early, late = first.told.data_ptr(), second.told.data_ptr()
    del first, second
    third = block_map._Report()
    assert third.told.data_ptr() == early and third.spans() == 0
    assert late not in {place.tensor.data_ptr() for place in block_map._FREE}
    next(p for p in block_map._LEFT if p.tensor.data_ptr() == late).tensor.fill_(0)  # long after nobody asks any more
    assert block_map._Report().told.data_ptr() == late
    for places in (block_map._FREE, block_map._LEFT):
        places.clear()


def striped(n: int) -> BlockMask:
    return create_block_mask(lambda b, h, i, j: j % 8 < 4, None, None, 8, n, device="cpu")


def kept_table(mask: BlockMask) -> Any:
    return block_map._tables_on_device(mask.predicate, [Cut(4, 4, False)])[0]


def test_a_table_grows_once_the_device_has_said_how_much_its_rows_need(late: type[LateReport]) -> None:
    mask = striped(48)  # 6 spans a row
    first = kept_table(mask)
    assert first.rows[0, :, 1:9].tolist() == [[0, 11, 0, 1, 0, 0, 0, 11]] * 2
    assert kept_table(mask).rows is first.rows  # nothing is known yet
    late.has_arrived = True
    grown = kept_table(mask)
    check_table(grown, mask.tile_map(4, 4), transposed=False)
    assert len(grown.extra) == 2 * 2 * 8  # two rows, two kinds, 6 in powers of two
    assert kept_table(mask).rows is grown.rows
    other = striped(56)  # of the same structure: has learnt
    check_table(kept_table(other), other.tile_map(4, 4), transposed=False)


def test_a_table_that_would_be_too_large_has_less_room_and_says_so(
    late: type[LateReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_builder, "_MOST_BYTES", 2 * 3 * 16)  # two rows with room for 3
    monkeypatch.setattr(table_builder, "_READY", {})  # none that was made before
    mask, late.has_arrived = striped(48), True
    kept_table(mask)  # with room for 2
    with pytest.warns(settings.FlexPerformanceWarning, match="6 runs of tiles and its table room for 3"):
        second = kept_table(mask)
    assert len(second.extra) == 2 * 2 * 3
    assert kept_table(mask).rows is second.rows
    assert second.rows[0, :, 1:9].tolist() == [[0, 11, 0, 1, 0, 0, 0, 11]] * 2


def test_a_mask_of_zones_without_room_for_its_spans_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows degrade where they must; a formula would write behind its row."""
    monkeypatch.setattr(table_builder, "_READY", {})
    monkeypatch.setattr(table_builder, "_MOST_BYTES", 6 * 3 * 16)  # six rows with room for 3, where the formula wants 5
    mask = create_block_mask(ZONED["sink and window"], None, None, 90, 130, device="cpu")
    traced = mask.predicate.traced
    assert hold_for(traced.program, traced.binding.numbers)
    (table,), room, needed, _ = build_tables(mask.predicate, (Cut(16, 16, False),), INTERPRETER, room=64)
    assert room == 3 and int(needed) == 0
    check_table(table, mask.tile_map(16, 16), transposed=False)


def test_a_deterministic_run_never_uses_a_table_without_room(
    late: type[LateReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    late.has_arrived, mask = True, striped(48)  # a real report is waited for
    check_table(kept_table(mask), mask.tile_map(4, 4), transposed=False)


def test_usual_room_follows_the_kind_of_mask() -> None:
    room = lambda mask: usual_spans(create_block_mask(mask, None, None, 9, 9, device="cpu").predicate.traced.program)
    ids = torch.arange(9)
    assert (
        room(lambda b, h, i, j: i >= j)
        < room(lambda b, h, i, j: ids[i] == ids[j])
        < room(lambda b, h, i, j: j % 2 == 0)
    )


# ---------------------------------------------------------------- integers that wrap around, captured tensors
@pytest.mark.parametrize("far", [2**63 - 1, 2**62, 2**31, 5])
def test_numbers_for_which_integers_wrap_around(far: int) -> None:
    """Evaluated in 64 bits as torch does, since bounds then say nothing."""
    check(lambda b, h, q_idx, kv_idx: q_idx + far > kv_idx, (40, 50), (64, 32), sizes=(1, 1))


@pytest.mark.parametrize("far", [2**63 - 1, -(2**63), 2**40, 3])
def test_captured_integers_for_which_integers_wrap_around(far: int) -> None:
    start = torch.tensor([far, 7])
    check(lambda b, h, q_idx, kv_idx: q_idx + start[b] > kv_idx, (40, 50), (64, 32), sizes=(2, 1))


def test_captured_tensors_of_every_kind() -> None:
    ids = torch.arange(60) // 13
    once: dict[str, Any] = {"sizes": (1, 1), "directions": (False,)}
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64):
        values = ids.to(dtype)
        check(lambda b, h, q_idx, kv_idx: values[q_idx] <= values[kv_idx], (60, 55), (64, 32), **once)
    wide = torch.stack([ids.flip(0), ids], 1)[:, 1]  # strided
    few = torch.arange(20)  # shorter than the sequence: a read behind its end gives 0
    none = torch.zeros(0, dtype=torch.int64)
    check(lambda b, h, q_idx, kv_idx: wide[q_idx] == wide[kv_idx], (60, 55), (64, 32), **once)
    check(lambda b, h, q_idx, kv_idx: (q_idx < 20) & (few[q_idx] > kv_idx), (60, 55), (64, 32), **once)
    check(lambda b, h, q_idx, kv_idx: (none[q_idx] != 0) & (none[kv_idx - 5] > -3), (60, 55), (64, 32), **once)


# ---------------------------------------------------------------- trees
def check_tree(data: Tensor) -> None:
    """(least, greatest) and the set of values of every 64 elements, of every 4 such groups and so on to one; levels are a
    quarter of the one below."""
    (tree, sets), values = build_tree(data, INTERPRETER), data.reshape(-1).long()
    width = 4 ** next(n for n in range(20) if 64 * 4**n >= len(values))
    assert len(tree) == len(sets) == (4 * width - 1) // 3
    at, step = 0, 64
    while width:
        wanted = torch.stack([torch.stack(torch.aminmax(group)) for group in values.split(step)])
        assert torch.equal(tree[at : at + len(wanted)].long(), wanted), f"groups of {step}"
        one_hot = [((group[:, None] & 63) == torch.arange(64)).any(0) for group in values.split(step)]
        bits = (sets[at : at + len(wanted), None] >> torch.arange(64)) & 1
        assert torch.equal(bits.bool(), torch.stack(one_hot)), f"sets of {step}"
        at, width, step = at + width, width // 4, step * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int8], ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 256, 4095, 4096, 4097, 70000])
def test_trees_hold_the_extremes_of_their_ranges(length: int, dtype: torch.dtype) -> None:
    data = torch.randint(-128, 128, (length,)).to(dtype)
    data = data * (1 << 55) if dtype == torch.int64 else data
    check_tree(data)


def test_tree_of_an_empty_tensor_is_zero() -> None:
    assert build_tree(torch.zeros(0, 5, dtype=torch.int64), INTERPRETER).ends[0].tolist() == [0, 0]


def test_tree_of_truth_values_and_of_a_tensor_that_is_not_contiguous() -> None:
    grid = torch.rand(70, 90) < 0.01
    for data in (grid, grid.t(), grid[::2, 5:]):
        check_tree(data)
