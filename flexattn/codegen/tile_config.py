"""Tiles, warps and pipeline stages: reads head dims, data type and target, makes a short list of legal configurations.

The idea: a fixed preference list, measured where it could be, of which shared memory leaves what fits; every list ends with
tiles that fit everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flexattn.codegen.shared_memory import (
    CapturedReads,
    TileConfig,
    TileProblem,
    decode_dims,
    is_legal,
    padded,
    shared_bytes,
    tile_dims,
)
from flexattn.codegen.target import Target
from flexattn.codegen.tile_preferences import (
    AMD,
    DEFAULT,
    GATHERING,
    KEPT,
    MASKED,
    SCORED,
    SHORT,
    SINGLE,
    SMALLEST,
    Rows,
)
from flexattn.errors import OptionError, UnsupportedError
from flexattn.frontend.gradient import passes_gradient

if TYPE_CHECKING:
    from flexattn.frontend.expr import Expr
    from flexattn.frontend.program import Program

SHORT_QUERIES = 32  # up to here a call is in the "short" size class and takes small query tiles
AT_MOST = 3  # configurations a direction may try
_DEP_Q, _DEP_KV = 8, 16
_CHOSEN = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")  # what a caller may fix
# of torch's names for the tiles of a kernel
_SUFFIX = {
    "forward": "", "hopper_forward": "", "decode": "", "dkdv": "1", "hopper_backward": "1", "hopper_key_gradients": "1", "dq": "2",
    "hopper_query_gradient": "2",
}  # fmt: skip
_INTERPRETER = (TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1))


def candidates(
    kernel: str, target: Target, *, element_bytes: int, qk_dim: int, v_dim: int, q_len: int,
    programs: Sequence[Program | None] = (), options: Any = None, precision: str = "ieee",
) -> tuple[TileConfig, ...]:  # fmt: skip
    """Configurations of a kernel, best first.

    Args:
        kernel: 'forward', 'dq' or 'dkdv'.
        target: Where it will run.
        element_bytes: Of q, k and v.
        qk_dim, v_dim: Head dimensions.
        q_len: Only its size class matters.
        programs: Score and mask program; captured reads inside the loop cost shared memory.
        options: A TileOptions of the caller, honoured or refused, never ignored.
        precision: Of float32 products, 'ieee' or 'tf32'.

    Returns:
        At least one configuration that fits.

    Raises:
        OptionError: The caller's tiles do not fit.
    """
    sizes: dict[str, Any] = {"element_bytes": element_bytes, "qk_dim": qk_dim, "v_dim": v_dim, "q_len": q_len}
    problem = tile_problem(kernel, target, programs=programs, precision=precision, **sizes)
    found = _preferred(problem)
    return found if options is None else _with_options(problem, found, options)


def dividing(kernel: str, block: tuple[int, int], **sizes: Any) -> tuple[TileConfig, ...]:
    """Small legal configurations whose tiles divide a list mask's blocks, the largest first; the other arguments are as of
    `candidates`."""
    problem = tile_problem(kernel, **sizes)
    sides = [[n for n in (64, 32, 16) if size % n == 0] for size in block]
    found = [TileConfig(m, n, 4, 1) for m in sides[0] for n in sides[1]]
    return tuple(c for c in found if is_legal(c, problem))[:AT_MOST]


def tile_problem(
    kernel: str, target: Target, *, element_bytes: int, qk_dim: int, v_dim: int, q_len: int,
    programs: Sequence[Program | None] = (), precision: str = "ieee", is_paged: bool = False, v_in_k: bool = False,
    kv_bytes: int = 0,
) -> TileProblem:  # fmt: skip
    """The facts of a call that tiles rest on; arguments as of `candidates`."""
    given = [p for p in programs if p is not None]
    reads = [captured_reads(p) for p in given]
    (qk_pad, v_pad), qk_rest = tile_dims(qk_dim, v_dim, target), 0
    if kernel == "decode":
        qk_pad, qk_rest, v_pad = decode_dims(qk_dim, v_dim, target)
    return TileProblem(
        kernel, target, element_bytes, qk_pad, v_pad, q_len <= SHORT_QUERIES,
        gathers=sum(gathers_of(p) for p in given), has_score=any(p.kind == "score" and not passes_gradient(p) for p in given),
        reads=CapturedReads(
            element=sum(r.element for r in reads), query=sum(r.query for r in reads), key=sum(r.key for r in reads),
            is_narrow=any(r.is_narrow for r in reads), may_have_gradient=any(r.may_have_gradient for r in reads),
        ),
        precision=precision, mask=max((mask_kind(p) for p in given if p.kind == "mask"), default="plain"),
        is_kept=any(p.kind == "mask" and gathers_of(p) > 0 for p in given), is_paged=is_paged,
        qk_rest=qk_rest, v_in_k=v_in_k, kv_bytes=kv_bytes,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def mask_kind(program: Program) -> str:
    """How rows of tiles under a mask look, by its structure: 'plain', 'banded' or 'reading'."""
    from flexattn.frontend.expr import topological

    ops = [n.op for n in topological([program.body])]
    if "load" in ops:
        return "reading"
    return "plain" if sum(ops.count(op) for op in ("lt", "le", "eq", "ne")) < 2 else "banded"


@functools.lru_cache(maxsize=1024)
def gathers_of(program: Program) -> int:
    """Captured reads whose index moves along both tile axes."""
    return sum(1 for n in _loads(program) if n.deps & _DEP_Q and n.deps & _DEP_KV)


@functools.lru_cache(maxsize=1024)
def captured_reads(program: Program) -> CapturedReads:
    """What one program's reads take."""
    import torch

    loads = [(n.deps & _DEP_Q, n.deps & _DEP_KV, getattr(torch, n.attr[2])) for n in _loads(program)]
    return CapturedReads(
        element=sum(d.itemsize for q, kv, d in loads if q and kv and d.itemsize >= 4),
        query=sum(d.itemsize for q, kv, d in loads if q and not kv),
        key=sum(d.itemsize for q, kv, d in loads if kv and not q),
        is_narrow=any(q and kv and d.itemsize < 4 for q, kv, d in loads),
        may_have_gradient=program.kind == "score" and any(q and kv and d.is_floating_point for q, kv, d in loads),
    )


def _loads(program: Program) -> list[Expr]:
    from flexattn.frontend.expr import topological

    return [n for n in topological([program.body]) if n.op == "load"]


@functools.lru_cache(maxsize=1024)
def _preferred(problem: TileProblem) -> tuple[TileConfig, ...]:
    if problem.target.is_interpreter:
        return _INTERPRETER
    listed = [c for c in _listed(problem) if is_legal(c, problem)]
    fallback = [c for c in SMALLEST if is_legal(c, problem) and c not in listed]
    found = list(dict.fromkeys(listed + fallback))[:AT_MOST]
    if not found:
        raise UnsupportedError(
            f"no tile of the {problem.kernel} kernel fits {problem.target.shared_bytes} bytes of shared memory",
            given=f"head dims padded to {problem.qk_pad} and {problem.v_pad}, {problem.element_bytes} bytes an element",
            hint=f"head dims up to {_largest_dim(problem)} of this data type, bfloat16 inputs, "
            "or kernel_options={'BACKEND': 'TORCH'}",
        )
    return tuple(found)


def _largest_dim(problem: TileProblem) -> int:
    """The largest head dimension, of query and value alike, for which this kernel has a tile."""
    dims = [
        dim
        for dim in (2048, 1024, 512, 256, 128, 64, 32, 16)
        for c in SMALLEST
        if is_legal(c, replace(problem, qk_pad=dim, v_pad=dim))
    ]
    return dims[0] if dims else 0


def _listed(problem: TileProblem) -> list[TileConfig]:
    """The preference list of this family, from the row of this head dim on."""
    family, kernel = problem.target.family, problem.kernel
    if problem.element_bytes == 4:
        return [TileConfig(*c) for pad, configs in SINGLE[kernel] if pad >= problem.pad for c in configs]
    preferences: list[Rows] = [DEFAULT[family][kernel]]
    if problem.target.is_amd:
        preferences.insert(0, AMD.get(kernel, ()))
    preferences.insert(0, MASKED[family].get(problem.mask, {}).get(kernel, ()))
    if problem.has_score:
        preferences.insert(0, SCORED[family].get(kernel, ()))
    if problem.gathers:
        preferences.insert(0, GATHERING[family][kernel])
    if problem.is_kept:
        preferences.insert(0, KEPT.get(family, {}).get(kernel, ()))
    listed = [TileConfig(*c) for rows in preferences for pad, configs in rows if pad >= problem.pad for c in configs]
    return [*(SHORT if problem.is_short and kernel == "forward" else ()), *listed]


def _with_options(problem: TileProblem, found: tuple[TileConfig, ...], options: Any) -> tuple[TileConfig, ...]:
    """The caller's tiles in place of the preferred ones. BLOCK_M1/N1 are torch's names for dk and dv, M2/N2 for dq."""
    suffix = _SUFFIX[problem.kernel]
    given = {name: _option(options, name, suffix) for name in _CHOSEN}
    if all(value is None for value in given.values()):
        return found
    base = found[0]
    config = TileConfig(**{name: value if value is not None else getattr(base, name) for name, value in given.items()})
    check_option(config, problem)
    return (config,)


def _option(options: Any, name: str, suffix: str) -> int | None:
    specific = getattr(options, name + suffix, None) if name.startswith("BLOCK") else None
    value: int | None = specific if specific is not None else getattr(options, name, None)
    return value


def check_option(config: TileConfig, problem: TileProblem) -> None:
    """Refuses a caller's tiles that no kernel has or that do not fit."""
    for name in ("BLOCK_M", "BLOCK_N", "num_warps"):
        value = getattr(config, name)
        low, high = (1, 16) if name == "num_warps" else (16, 256)
        if value & (value - 1) or not low <= value <= high:
            raise OptionError(
                f"kernel_options {name} must be a power of two from {low} to {high}",
                given=value,
                hint="64 for BLOCK_M and BLOCK_N, 4 for num_warps",
            )
    if not 1 <= config.num_stages <= 8:
        raise OptionError("kernel_options num_stages must be from 1 to 8", given=config.num_stages, hint="2 or 3")
    needed = shared_bytes(config, problem)
    if needed > problem.target.shared_bytes:
        raise OptionError(
            f"tiles of the {problem.kernel} kernel must fit {problem.target.shared_bytes} bytes of shared memory",
            given=f"{config}, about {needed} bytes",
            hint="smaller BLOCK_M or BLOCK_N, or num_stages=1",
        )


def delta_config(v_pad: int, element_bytes: int = 2) -> TileConfig:
    """Launch shape of the backward's pre-pass: about 8K elements a program; few rows for float32, which multiplies all by
    all of them."""
    return TileConfig(16 if element_bytes == 4 else max(16, min(128, 8192 // v_pad)), 16, 4, 1)


# ---------------------------------------------------------------- what autotuning times
TRIALS_AT_MOST = 10
_ACCUMULATORS = 192  # float32 sums a thread may hold; more spill, and take the compiler long


def trials(
    kernel: str, target: Target, *, element_bytes: int, qk_dim: int, v_dim: int, q_len: int,
    programs: Sequence[Program | None] = (), options: Any = None, precision: str = "ieee",
) -> tuple[TileConfig, ...]:  # fmt: skip
    """Configurations worth timing for a call: the preferred ones, then neighbours of the first.

    Args: as of `candidates`.

    Returns:
        At most TRIALS_AT_MOST legal configurations, the default first; only the caller's own where `options` fixes any.

    Raises:
        OptionError: The caller's tiles do not fit.
    """
    sizes: dict[str, Any] = {"element_bytes": element_bytes, "qk_dim": qk_dim, "v_dim": v_dim, "q_len": q_len}
    preferred = candidates(kernel, target, programs=programs, options=options, precision=precision, **sizes)
    if is_fixed(kernel, options) or target.is_interpreter:
        return preferred
    problem = tile_problem(kernel, target, programs=programs, precision=precision, **sizes)
    near = [c for c in _neighbours(preferred[0]) if is_legal(c, problem) and _accumulators(c, problem) <= _ACCUMULATORS]
    return tuple(dict.fromkeys((*preferred, *near)))[:TRIALS_AT_MOST]


def is_fixed(kernel: str, options: Any) -> bool:
    """Whether a caller's TileOptions fix something of this kernel's tiles, so that there is nothing to choose."""
    suffix = _SUFFIX[kernel]
    return any(_option(options, name, suffix) is not None for name in _CHOSEN)


def _neighbours(config: TileConfig) -> list[TileConfig]:
    """One step away: a stage more or less, other warps, a tile side doubled or halved (rows with their warps)."""
    m, n, warps, stages = config.BLOCK_M, config.BLOCK_N, config.num_warps, config.num_stages
    more, fewer = min(8, 2 * warps), max(4, warps // 2)
    steps = [
        (m, n, warps, stages + 1), (m, n, warps, stages - 1), (2 * m, n, more, stages), (m // 2, n, fewer, stages),
        (m, 2 * n, warps, stages), (m, n // 2, warps, stages), (m, 2 * n, more, stages), (m, n, more, stages),
        (m, n, fewer, stages),
    ]  # fmt: skip
    sound = [s for s in steps if 16 <= s[0] <= 256 and 16 <= s[1] <= 256 and 1 <= s[3] <= 5]
    return [TileConfig(*s) for s in sound]


def _accumulators(config: TileConfig, problem: TileProblem) -> int:
    """float32 sums a thread holds: the kernel's results, and its tile of scores (and of their gradients)."""
    m, n = config.BLOCK_M, config.BLOCK_N
    results = {"forward": m * problem.v_pad, "dq": m * problem.qk_pad, "dkdv": n * (problem.qk_pad + problem.v_pad)}
    scores = m * n * (1 if problem.kernel == "forward" else 2)
    return (results[problem.kernel] + scores) // (32 * config.num_warps)


__all__ = [
    "AT_MOST",
    "SHORT_QUERIES",
    "TRIALS_AT_MOST",
    "CapturedReads",
    "TileConfig",
    "TileProblem",
    "candidates",
    "captured_reads",
    "check_option",
    "decode_dims",
    "delta_config",
    "dividing",
    "gathers_of",
    "is_fixed",
    "is_legal",
    "mask_kind",
    "padded",
    "shared_bytes",
    "tile_dims",
    "tile_problem",
    "trials",
]
