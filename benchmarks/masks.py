"""Building a block mask from its predicate, from 16,384 to a million tokens: ours against torch's builder, eager and compiled.

The idea: torch evaluates every pair, so a length is tried only if the one before it says that memory and time allow it; the
numbers of kept and of full blocks are checked against a formula at every length, where torch cannot go too.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import timing
from benchmarks.attention import forget_compiled
from benchmarks.check import WrongResult
from benchmarks.peers import PEERS, compiled
from benchmarks.problems import Shape, Variant, count_blocks, make_variant
from benchmarks.results import OURS
from benchmarks.session import Session

LENGTHS = (16384, 65536, 131072, 262144, 1048576)
VARIANTS = ("causal", "documents")
BLOCK = 128
MOST_SECONDS = 20.0  # predicted for one build of torch's, which grow with the square of the length
BYTES_A_PAIR = 10  # of torch's eager builder: 2.7 GB at 16,384 tokens, 43 GB at 65,536
Build = Callable[[Variant, int, torch.device], Any]


def build_ours(variant: Variant, length: int, device: torch.device) -> Any:
    """create_block_mask, and the tables of 128 x 128 tiles in both directions, as a forward and a backward need them."""
    import flexattn

    mask = flexattn.create_block_mask(variant.mask_mod, None, None, length, length, device=device)
    tiles = mask.tile_map(BLOCK, BLOCK)
    tiles.table(False)
    tiles.table(True)
    return tiles


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


def counts(built: Any) -> tuple[int, int]:
    """(blocks with a kept pair, full blocks) of a builder's result."""
    if hasattr(built, "dense"):
        dense = built.dense()
        return int((dense > 0).sum()), int((dense == 2).sum())
    full = int(built.full_kv_num_blocks.sum())
    return int(built.kv_num_blocks.sum()) + full, full


def run(session: Session, lengths: Sequence[int], variants: Sequence[str] = VARIANTS) -> None:
    """All builders at all lengths, the shortest first."""
    for name in variants:
        seconds: dict[str, tuple[int, float]] = {}  # builder -> (length, seconds) of its longest build so far
        for length in sorted(lengths):
            if session.out_of_time():
                session.say(f"no time left for the mask {name} at {length}")
                continue
            _run_length(session, name, length, seconds)


def _run_length(session: Session, name: str, length: int, seconds: dict[str, tuple[int, float]]) -> None:
    forget_compiled()
    variant = make_variant(name, Shape(1, 1, length, 1), session.device)
    for impl, build in BUILDERS.items():
        peer, where = PEERS[impl], (str(length), name)
        if reason := too_much(impl, length, seconds.get(impl), _free_bytes(session.device)):
            session.record("mask", where, peer, status="skipped", reason=reason)
            continue
        begin = time.perf_counter()
        try:
            row = _measure(session, build, variant, length)
        except Exception as error:
            session.failed(["mask"], where, peer, error)
            seconds[impl] = (length, float("inf")) if impl != OURS else (length, 0.0)
            continue
        seconds[impl] = (length, row["ms"] / 1e3)
        session.record("mask", where, peer, **row, first_s=time.perf_counter() - begin)


def _measure(session: Session, build: Build, variant: Variant, length: int) -> dict[str, Any]:
    """Median wall time of a build, its peak memory; the result is checked first."""
    device = session.device
    built = build(variant, length, device)
    expected, found = count_blocks(variant, BLOCK), counts(built)
    if found != expected:
        raise WrongResult(f"{found[0]} kept and {found[1]} full blocks, by formula {expected[0]} and {expected[1]}")
    del built
    run = lambda: build(variant, length, device)
    row: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    first = timing.wall_milliseconds(run, 1, device)
    if device.type == "cuda":
        row["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    repeats = max(0, min(session.rounds - 1, int(2e3 / max(first, 1e-3))))
    times = [first, *(timing.wall_milliseconds(run, 1, device) for _ in range(repeats))]
    return {"ms": statistics.median(times), "rounds": len(times), "blocks": list(expected), **row}


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
