"""The decode kernel's tiles, how many programs share the keys of a row, and when it pays: reads sizes, makes numbers.

The idea: decoding is bound by memory, so what counts is that all processors read at once, with enough on its way. How many parts the
keys are split into follows from batch, heads, lengths and processors together: a moderate sequence is split too where few key heads
would leave processors idle. Nothing here looks at the device's data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from flexattn.codegen.shared_memory import TileConfig, is_legal
from flexattn.codegen.spec import SMALL_INDEX
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import check_option, tile_problem
from flexattn.codegen.tile_preferences import DECODE, DECODE_SINGLE, DECODE_V_IN_K
from flexattn.errors import UnsupportedError
from flexattn.frontend.expr import DEP_H, Expr, make
from flexattn.frontend.program import Program
from flexattn.frontend.zones import Zones, hold_for, zones

MOST_QUERIES = 64  # beyond, products bound a call, and the forward kernels are made for those
FEWEST_KEYS = 256  # below, one program reads them as fast as several
MOST_SPLITS = 256
WIDEST, WIDEST_V = 576, 512  # head dimensions, of query and value: wider tiles do not fit beside those on their way
STRIP = 64  # tiles that a program finds at once, as in the kernel
PROGRAMS_EACH = 1  # of a processor: its stages keep enough on its way; twice as many were 2 to 4 % slower on an H200
CHAINED = 1 << 26  # bytes of keys and values up to which a call starts before the kernel in front of it has ended
SPLIT_COST = 2  # tiles that a program could read while it starts and ends
_ROWS = (16, 32, 64)  # of a tile: what a matrix instruction takes at least, and what registers hold at most
_MOST_KEYS = 128  # of a tile
_WIDE = 256
_ASKED = 4096  # pairs of a mask looked at together: 32 a thread


# ---------------------------------------------------------------- tiles
def decode_tiles(
    target: Target, *, rows: int, element_bytes: int, qk_dim: int, v_dim: int, programs: Sequence[Program | None] = (),
    options: Any = None, precision: str = "ieee", is_paged: bool = False, v_in_k: bool = False,
    kv_bytes: int = 0,
) -> tuple[TileConfig, ...]:  # fmt: skip
    """Configurations, best first.

    Args:
        target: where it will run.
        rows: queries times the query heads that share a key head; they lie in one tile if they fit.
        element_bytes: of q, and of k and v as they are multiplied.
        qk_dim, v_dim: head dimensions.
        programs: score and mask program; captured reads inside the loop cost shared memory.
        options: a TileOptions of the caller, honoured or refused, never ignored.
        precision: of float32 products, 'ieee' or 'tf32'.
        is_paged: keys and values are found by page numbers.
        v_in_k: values are the first dims of keys, and not loaded.
        kv_bytes: of an element of k and v in memory where it is converted; 0 where not.

    Raises:
        OptionError: the caller's tiles do not fit.
        UnsupportedError: no tile fits.

    Example:
        >>> from flexattn.codegen.target import target_of
        >>> decode_tiles(target_of(90), rows=4, element_bytes=2, qk_dim=128, v_dim=128)[0]
        TileConfig(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3)
    """
    sizes: dict[str, Any] = {"element_bytes": element_bytes, "qk_dim": qk_dim, "v_dim": v_dim}
    loads: dict[str, Any] = {"is_paged": is_paged, "v_in_k": v_in_k, "kv_bytes": kv_bytes}
    problem = tile_problem("decode", target, q_len=1, programs=programs, precision=precision, **sizes, **loads)
    if target.is_interpreter:
        found: tuple[TileConfig, ...] = (TileConfig(16, 32, 4, 1),)
    else:
        height = next((n for n in _ROWS if n >= rows), _ROWS[-1])
        table = DECODE[target.family] if element_bytes == 2 else DECODE_SINGLE
        if v_in_k and element_bytes == 2:
            table = (*DECODE_V_IN_K[target.family], *table)
        listed = [row for pad, configs in table if pad >= problem.pad for row in configs]
        # of 8 bits as many bytes a tile as of 16: up to 1.8 times as fast as those, 1.6 with as many keys
        if kv_bytes == 1 and not v_in_k:
            listed = [(most, min(2 * keys, _MOST_KEYS), w, s) for most, keys, w, s in listed] + listed
        tiles = [_with_height(min(height, most), *rest, is_paged=is_paged, v_in_k=v_in_k) for most, *rest in listed]
        found = tuple(c for c in dict.fromkeys(tiles) if is_legal(c, problem))[:3]
    if not found:
        raise UnsupportedError(
            f"no tile of the decode kernel fits {target.shared_bytes} bytes of shared memory",
            given=f"head dims padded to {problem.qk_pad} and {problem.v_pad}, {element_bytes} bytes an element",
            hint="kernel_options={'BACKEND': 'TRITON'}",
        )
    given = (
        {}
        if options is None
        else {name: value for name, value in options.given().items() if name in TileConfig.__slots__}
    )
    if not given:
        return found
    config = TileConfig(**{name: given.get(name, getattr(found[0], name)) for name in TileConfig.__slots__})
    check_option(config, problem)
    return (config,)


def _with_height(height: int, keys: int, warps: int, stages: int, *, is_paged: bool, v_in_k: bool) -> TileConfig:
    """The registers of 4 warps do not hold 64 rows. Of paged keys as many tiles are on their way, and as many page numbers before
    them, for which the compiler takes half of the stages; of keys alone twice as many."""
    ahead = (stages - 1) * (2 if is_paged else 1) * (2 if v_in_k else 1)
    return TileConfig(height, keys, 8 if height == _ROWS[-1] else warps, 1 + ahead)


def asked_together(config: TileConfig) -> tuple[int, int]:
    """Tiles of which every pair is looked at together where a mask has no formula: with all rows, and with a single query."""
    return max(1, _ASKED // (config.BLOCK_M * config.BLOCK_N)), min(64, _ASKED // config.BLOCK_N)


# ---------------------------------------------------------------- splits
def split_count(*, groups: int, kept: int, tile: int, processors: int, in_pairs: bool = False) -> int:
    """How many programs share the keys of a tile of rows.

    Programs run in rounds of PROGRAMS_EACH a processor, and a round takes as long as its longest program: its tiles, and SPLIT_COST
    of them for its start, its end and its part in the sum. Of all counts the one with the least time is taken, the smallest of equals.

    Args:
        groups: (batch, key head) pairs times the tiles of rows of each.
        kept: keys that a row keeps at most, as far as lengths say.
        tile: keys of a tile.
        processors: of the device.
        in_pairs: two programs of more tiles than a strip share a processor: while one finds its next ones, the other reads.

    Example:
        >>> split_count(groups=8, kept=8192, tile=64, processors=132), split_count(groups=512, kept=4096, tile=64, processors=132)
        (16, 1)

    Source: after the heuristic of Flash-Decoding (Dao et al., 2023), which counts waves of programs.
    """
    tiles, at_once = max(1, -(-kept // tile)), PROGRAMS_EACH * processors
    most = min(tiles, MOST_SPLITS, max(1, 2 * at_once // groups))

    def cost(splits: int) -> tuple[int, int]:
        rounds = -(-groups * splits // at_once)
        return rounds * (-(-tiles // splits) + (SPLIT_COST if splits > 1 else 0)), splits

    best = min(range(1, most + 1), key=cost)
    return 2 * best if in_pairs and tiles > STRIP * best and 2 * best <= most else best


def pays(*, q_len: int, kv_len: int, group: int, programs: int, processors: int, dim: int = 0) -> bool:
    """Whether few queries meet long rows of keys, so that this kernel is faster than the forward kernel; at head dimensions beyond
    _WIDE that one's tiles are so small that this one is faster with any number of rows (128 heads of 576: 0.17 ms against 14).

    Args:
        q_len, kv_len: lengths.
        group: query heads that share a key head.
        programs: of the forward kernel: tiles of queries times heads times batch.
        processors: of the device.
        dim: the larger head dimension.

    Example:
        >>> pays(q_len=1, kv_len=8192, group=4, programs=32, processors=132)
        True
    """
    if q_len > MOST_QUERIES or kv_len < FEWEST_KEYS:
        return False
    return q_len * group <= MOST_QUERIES or programs < processors or dim > _WIDE


# ---------------------------------------------------------------- masks
def formula_of(mask: Program | None, wide_numbers: tuple[bool, ...]) -> Zones | None:
    """The zones by which the kernel finds a mask's tiles; None where it has to ask the mask.

    They rest on what a spec knows: no number is wide, so that no sum of them wraps around."""
    if mask is None or "float" in mask.numbers or any(wide_numbers[len(wide_numbers) - len(mask.numbers) :]):
        return None
    return zones(mask) if hold_for(mask, (SMALL_INDEX,) * len(mask.numbers)) else None


def hull_of(mask: Program | None, wide_numbers: tuple[bool, ...]) -> Zones | None:
    """Zones outside of which a mask keeps nothing: its own, or else those of the conditions that it joins by `&`, where some have
    a formula. A mask that is asked is asked there alone: not behind a length."""
    if mask is None:
        return None
    found = formula_of(mask, wide_numbers)
    if found is None:
        known = [e for e in _conditions(mask.body) if formula_of(_with_body(mask, e), wide_numbers) is not None]
        body = functools.reduce(lambda a, b: make("and", a, b), known) if known else mask.body
        joined = formula_of(_with_body(mask, body), wide_numbers)
        found = None if joined is None else Zones(joined.kept, ())
    return found


def _with_body(mask: Program, body: Expr) -> Program:
    return Program(mask.kind, body, mask.captures, mask.numbers)


def _conditions(body: Expr) -> list[Expr]:
    is_joined = body.op == "and" and body.dtype == torch.bool
    return [e for part in body.args for e in _conditions(part)] if is_joined else [body]


def is_by_head(found: Zones) -> bool:
    """Whether zones differ by head."""
    return any(e.deps & DEP_H for zone in (*found.kept, *found.dropped) for e in zone)


__all__ = [
    "MOST_QUERIES",
    "WIDEST",
    "WIDEST_V",
    "asked_together",
    "decode_tiles",
    "formula_of",
    "hull_of",
    "is_by_head",
    "pays",
    "split_count",
]
