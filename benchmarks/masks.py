"""Making a mask's tables, from 16,384 to a million tokens: ours against torch's builder, eager and compiled.

The idea: a mask is new every time, as in training, and what is timed is what a forward and a backward at head dim 128 read. A
result is checked first: ours against the tile map that the CPU makes by another way, torch's by its numbers of blocks.
torch evaluates every pair, so a length is tried only if the one before it says that memory and time allow it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import timing
from benchmarks.attention import forget_compiled
from benchmarks.check import WrongResult
from benchmarks.peers import PEERS, compiled
from benchmarks.problems import VARIANTS as FORMULAS
from benchmarks.problems import (
    Shape,
    Variant,
    count_blocks,
    document_ids,
    document_mask,
    document_starts,
    make_variant,
)
from benchmarks.results import OURS
from benchmarks.session import Session
from benchmarks.warm import run_all

LENGTHS = (16384, 65536, 131072, 1048576)
VARIANTS = (
    "causal", "window", "documents", "documents32", "documents1000", "prefix", "sink", "unsorted", "neighbourhood",
    "dilated", "blocks", "random ids",
)  # fmt: skip
COMPARED = (
    "causal",
    "documents",
    "blocks",
    "random ids",
)  # with torch; each length costs a compilation of some seconds
LONGEST = {"blocks": 131072, "random ids": 65536}  # their tables, or their answers, grow with the square of the length
BLOCK, DIM = 128, 128
MOST_SECONDS = 20.0  # predicted for one build of torch's, which grow with the square of the length
BYTES_A_PAIR = 10  # of torch's eager builder: 2.7 GB at 16,384 tokens, 43 GB at 65,536
SECONDS = 50.0  # of compiling torch's builder in this process, after which it is compiled for no further mask or length
_WARM_THREADS = 4  # of each process that compiles beforehand: a builder is several kernels
Build = Callable[[Variant, int, torch.device], Any]


class Made(NamedTuple):
    """The tables of a mask on a GPU, and how each is cut."""

    cuts: tuple[Any, ...]
    tables: list[Any]


def mask_variant(name: str, length: int, device: torch.device) -> Variant:
    """One of VARIANTS; its key ranges are left out where a query keeps more than one run of keys."""
    if name in FORMULAS:
        return make_variant(name, Shape(1, 1, length, 1), device)
    none = torch.zeros(0, dtype=torch.int64)
    return Variant(name, None, _mask(name, length, device), none, none)


def _mask(name: str, length: int, device: torch.device) -> Callable[..., Any]:
    draw = torch.Generator().manual_seed(0)
    if name in ("documents32", "documents1000", "unsorted"):
        ids = document_ids(document_starts(length, 1000 if name == "documents1000" else 32))
        return document_mask((ids.roll(length // 3) if name == "unsorted" else ids).to(device))
    if name == "prefix":
        shared = length // 3
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) | (kv_idx < shared)
    if name == "sink":
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 1024))
    if name == "neighbourhood":
        width = 1 << (length.bit_length() // 2)
        return lambda b, h, q_idx, kv_idx: (
            ((q_idx // width - kv_idx // width).abs() <= 6) & ((q_idx % width - kv_idx % width).abs() <= 6)
        )
    if name == "dilated":
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % 4 == 0)
    if name == "blocks":
        chosen = (torch.rand(length // BLOCK, length // BLOCK, generator=draw) < 0.125).to(device)
        return lambda b, h, q_idx, kv_idx: chosen[q_idx // BLOCK, kv_idx // BLOCK]
    values = torch.randint(0, 64, (length,), generator=draw, dtype=torch.int32).to(device)
    return lambda b, h, q_idx, kv_idx: values[q_idx] == values[kv_idx]


# ---------------------------------------------------------------- builders
def build_ours(variant: Variant, length: int, device: torch.device) -> Any:
    """create_block_mask and its tables in both directions, in the tiles of a forward and a backward; on a CPU 128 x 128."""
    import flexattn

    mask = flexattn.create_block_mask(variant.mask_mod, None, None, length, length, device=device)
    if device.type != "cuda":
        tiles = mask.tile_map(BLOCK, BLOCK)
        tiles.table(False)
        tiles.table(True)
        return tiles
    from flexattn.runtime.block_map import device_tables

    cuts = _cuts(mask.predicate.traced.program, length, device)
    return Made(cuts, device_tables(mask, cuts))


@functools.lru_cache(maxsize=256)
def _cuts(program: Any, length: int, device: torch.device) -> tuple[Any, ...]:
    """Of the tables that a training step at head dim 128 reads in 16-bit types, each once."""
    from flexattn.codegen.hopper_tiles import hopper_backward_tiles, hopper_tiles
    from flexattn.codegen.tile_config import candidates
    from flexattn.runtime.device import target_for
    from flexattn.runtime.tables import Cut

    target, sizes = target_for(device), {"qk_dim": DIM, "v_dim": DIM, "q_len": length, "programs": (program,)}
    portable = lambda kernel: candidates(kernel, target, element_bytes=2, **sizes)
    fused = hopper_backward_tiles(target, **sizes)
    forward = hopper_tiles(target, kv_len=length, **sizes) or portable("forward")
    by_row, by_column = (forward,), (fused,)
    if not fused:
        by_row, by_column = (forward, portable("dq")), (portable("dkdv"),)
    chosen = [(tiles[0], False) for tiles in by_row] + [(tiles[0], True) for tiles in by_column]
    return tuple(dict.fromkeys(Cut(c.BLOCK_M, c.BLOCK_N, transposed) for c, transposed in chosen))


def build_torch(variant: Variant, length: int, device: torch.device, *, compile: bool) -> Any:
    """torch's create_block_mask, which makes its lists in both directions."""
    from torch.nn.attention.flex_attention import create_block_mask

    function = compiled(create_block_mask, device.type) if compile else create_block_mask
    return function(variant.mask_mod, None, None, length, length, device=device.type)


BUILDERS: dict[str, Build] = {
    OURS: build_ours,
    "torch_flex": functools.partial(build_torch, compile=True),
    "torch_flex_eager": functools.partial(build_torch, compile=False),
}


# ---------------------------------------------------------------- checks
def counts(built: Any) -> tuple[int, int]:
    """(blocks with a kept pair, full blocks) of a builder's result."""
    if hasattr(built, "dense"):
        full, partial = built.full.tiles(), built.partial.tiles()
        return full + partial, full
    full = int(built.full_kv_num_blocks.sum())
    return int(built.kv_num_blocks.sum()) + full, full


def _check(built: Any, variant: Variant, length: int) -> list[int]:
    """Compares a result; returns its numbers of kept and of full blocks."""
    import flexattn

    on_cpu = flexattn.create_block_mask(variant.mask_mod, None, None, length, length).to("cpu")
    if isinstance(built, Made):
        for (*tile, transposed), table in zip(built.cuts, built.tables):
            wanted = on_cpu.tile_map(*tile)
            _same(*_numbers(table), wanted.full.tiles() + wanted.partial.tiles(), wanted.full.tiles())
            rows = wanted.table(transposed).rows
            for field in (1, 2):  # of every row
                if not torch.equal(table.rows[0, :, field].cpu().sort().values, rows[0, :, field].sort().values):
                    raise WrongResult(f"rows of tiles {tile} have other numbers of blocks than the CPU's")
        kept, full = _numbers(built.tables[0])
        return [kept, full]
    wanted_counts = count_blocks(variant, BLOCK) if variant.first.numel() else counts(on_cpu.tile_map(BLOCK, BLOCK))
    _same(*counts(built), *wanted_counts)
    return list(wanted_counts)


def _numbers(table: Any) -> tuple[int, int]:
    full, partial = (int(table.rows[..., field].sum(dtype=torch.int64)) for field in (1, 2))
    return full + partial, full


def _same(kept: int, full: int, wanted_kept: int, wanted_full: int) -> None:
    if (kept, full) != (wanted_kept, wanted_full):
        raise WrongResult(f"{kept} kept and {full} full blocks, expected {wanted_kept} and {wanted_full}")


# ---------------------------------------------------------------- compiling beforehand
Case = tuple[str, int]  # a variant's name and a length
Warmed = dict[Case, "str | None"]  # what was compiled beforehand, and why where that failed


def cases_of(impl: str, lengths: Sequence[int], variants: Sequence[str]) -> list[Case]:
    """What a builder is asked for, the shortest length of each mask first."""
    names = variants if impl == OURS else [name for name in variants if name in COMPARED]
    return [(name, length) for name in names for length in sorted(lengths) if length <= LONGEST.get(name, length)]


def run_warm(
    session: Session, lengths: Sequence[int], variants: Sequence[str], workers: int, seconds: float | None
) -> Warmed:
    """Compiles torch's builder for every mask and length, each in a process of its own, `workers` of them at a time."""
    if not workers or "torch_flex" not in BUILDERS:
        return {}
    cases = cases_of("torch_flex", lengths, variants)
    device = session.device.type
    commands = [["compile-mask", name, str(length), "--device", device] for name, length in cases]
    begin = time.monotonic()
    found = dict(zip(cases, run_all(commands, workers, seconds=seconds, threads=_WARM_THREADS)))
    for (name, length), reason in found.items():
        session.say(f"torch's builder for the mask {name} at {length}: {reason or 'compiled'}")
    if cases:
        session.say(f"compiled in {workers} processes at a time, {time.monotonic() - begin:.0f} s together")
    return found


def compile_child(name: str, length: int, device: torch.device) -> None:
    """What one of these processes does: the call that will be timed, once."""
    forget_compiled()
    BUILDERS["torch_flex"](mask_variant(name, length, device), length, device)
    timing.synchronize(device)


# ---------------------------------------------------------------- measuring
class Spent:
    """What torch's builders have taken so far."""

    def __init__(self) -> None:
        self.compiling = 0.0  # seconds of first calls in this process that no other one had compiled
        self.last: dict[tuple[str, str], tuple[int, float]] = {}  # of the longest build: (length, seconds of one)


def run(
    session: Session, lengths: Sequence[int], variants: Sequence[str] = VARIANTS, warmed: Warmed | None = None
) -> None:
    """Ours at all lengths, then torch's builders beside it, the shortest first.

    Args:
        warmed: what has been compiled beforehand. It is timed in any case, or its row says why it could not be compiled.
    """
    spent = Spent()
    for impl in BUILDERS:
        known = (warmed or {}) if impl == "torch_flex" else {}
        for name, length in cases_of(impl, lengths, variants):
            is_late = session.out_of_time() or impl == "torch_flex" and spent.compiling > SECONDS
            if is_late and (name, length) not in known:
                session.say(f"no time left for the mask {name} at {length} of {impl}")
                continue
            _run_one(session, impl, name, length, spent, known)


def _run_one(session: Session, impl: str, name: str, length: int, spent: Spent, warmed: Warmed) -> None:
    peer, where, case = PEERS[impl], (str(length), name), (name, length)
    if reason := warmed.get(case):
        session.record("mask", where, peer, status="failed", reason=f"compiling it beforehand: {reason}")
        return
    if reason := too_much(impl, length, spent.last.get((impl, name)), _free_bytes(session.device)):
        session.record("mask", where, peer, status="skipped", reason=reason)
        return
    if impl != OURS:
        forget_compiled()
    begin = time.perf_counter()
    try:
        row = _measure(session, BUILDERS[impl], mask_variant(name, length, session.device), length)
    except Exception as error:
        session.failed(["mask"], where, peer, error)
        spent.last[impl, name] = (length, float("inf"))
        return
    finally:
        if impl == "torch_flex" and case not in warmed:
            spent.compiling += time.perf_counter() - begin
    spent.last[impl, name] = (length, row["ms"] / 1e3)
    session.record("mask", where, peer, **row)


def _measure(session: Session, build: Build, variant: Variant, length: int) -> dict[str, Any]:
    """Median wall time of a build until its result is there, its peak memory, and of ours device and host time apart; the
    result is checked first."""
    device, begin = session.device, time.perf_counter()
    built = build(variant, length, device)
    timing.synchronize(device)
    first_s = time.perf_counter() - begin
    is_ours = isinstance(built, Made)
    if is_ours:  # a structure's first table learns how much room its rows need; it is right, but may hold more blocks
        built = build(variant, length, device)
    row: dict[str, Any] = {"blocks": _check(built, variant, length), "first_s": first_s}
    if is_ours:
        row["tiles"] = ["x".join(map(str, tile)) + (" by column" if t else "") for *tile, t in built.cuts]
    del built
    run = lambda: build(variant, length, device)
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    first = timing.wall_milliseconds(run, 1, device)
    if device.type == "cuda":
        row["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    repeats = max(0, min(2 * session.rounds, int(5e2 / max(first, 1e-3))))
    times = [first, *(timing.wall_milliseconds(run, 1, device) for _ in range(repeats))]
    if is_ours and first < 100:
        row["device_ms"] = statistics.median(timing.milliseconds(run, 4, device) for _ in range(3))
        row["host_ms"] = statistics.median(timing.host_milliseconds(run, 10, device) for _ in range(5))
    return {"ms": statistics.median(times), "rounds": len(times), **row}


def too_much(impl: str, length: int, last: tuple[int, float] | None, free: float) -> str | None:
    """Why torch's builder is not tried at a length, or None."""
    if impl == OURS:
        return None
    needed = BYTES_A_PAIR * length**2
    if impl == "torch_flex_eager" and needed > free:
        return f"it would need about {needed / 1e9:.0f} GB ({BYTES_A_PAIR} bytes a pair), {free / 1e9:.0f} GB are free"
    if last is None:
        return None
    if last[1] == float("inf"):
        return f"it failed at {last[0]} tokens"
    predicted = last[1] * (length / last[0]) ** 2
    if predicted > MOST_SECONDS:
        return f"it would take about {predicted:.0f} s, after {last[1]:.2f} s at {last[0]} tokens"
    return None


def _free_bytes(device: torch.device) -> float:
    """Free memory of a GPU, what the allocator keeps included; without a GPU an eighth of a gigabyte, for tests."""
    if device.type != "cuda":
        return 2**27
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
