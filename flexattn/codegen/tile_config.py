"""Tiles, warps and pipeline stages: reads head dims, data type and target, makes a short list of legal configurations.

The idea: what decides whether a launch fits is shared memory, so a model of it (checked against the compiler in the
tests, always at or above it) filters a fixed preference list; every list ends with tiles that fit everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexattn.codegen.target import Target
from flexattn.errors import OptionError, UnsupportedError

if TYPE_CHECKING:
    from flexattn.frontend.program import Program

SHORT_QUERIES = 32  # up to here a call is in the "short" size class and takes small query tiles
AT_MOST = 3  # configurations a direction may try
_DEP_Q, _DEP_KV = 8, 16
_CHOSEN = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")  # what a caller may fix
_SUFFIX = {"forward": "", "dkdv": "1", "dq": "2"}  # of torch's names for the tiles of a kernel


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One launch shape: BLOCK_M query rows by BLOCK_N keys, warps and software pipeline stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class TileProblem:
    """What the choice of tiles rests on."""

    kernel: str  # 'forward', 'dq' or 'dkdv'
    target: Target
    element_bytes: int
    qk_pad: int
    v_pad: int
    is_short: bool
    gathers: int  # captured reads in the loop whose index moves along both tile axes
    has_score: bool = False  # there is a score_mod

    @property
    def pad(self) -> int:
        """The larger of the two padded head dims."""
        return max(self.qk_pad, self.v_pad)


# (largest padded head dim, configurations), best first; 16-bit inputs. Rows below the first fitting one follow it.
_WGMMA = {
    "forward": (
        (64, ((64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2))),
        (128, ((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2))),
        (256, ((128, 64, 8, 2), (64, 64, 4, 1), (64, 32, 4, 1))),
        (512, ((64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))),
    ),
    "dq": (
        (64, ((128, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2))),
        (128, ((128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2))),
        (256, ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1))),
        (512, ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
    ),
    "dkdv": (
        (64, ((32, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2))),
        (128, ((64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2))),
        (256, ((32, 64, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1))),
        (512, ((32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
    ),
}
_WGMMA_SCORED = {  # a score_mod's derivative takes registers that the larger tiles do not have
    "forward": (),
    "dq": ((64, ((64, 64, 4, 3), (64, 64, 4, 2))),),
    "dkdv": ((64, ((64, 64, 4, 2), (64, 64, 4, 3))), (128, ((32, 64, 4, 3), (32, 64, 4, 2)))),
}
_MMA = {
    "forward": (
        (64, ((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2))),
        (128, ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2))),
        (256, ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1))),
        (512, ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
    ),
    "dq": (
        (64, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1))),
        (128, ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1))),
        (256, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (512, ((16, 16, 4, 1),)),
    ),
    "dkdv": (
        (64, ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 1))),
        (128, ((64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1))),
        (256, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (512, ((16, 16, 4, 1),)),
    ),
}
_SINGLE = {  # float32: the dots run on ordinary arithmetic units, so small tiles lose little and compile fast
    "forward": (
        (64, ((64, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (128, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
        (256, ((32, 16, 4, 1), (16, 16, 4, 1))),
        (512, ((16, 16, 4, 1),)),
    ),
    "dq": (
        (64, ((64, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (128, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
        (256, ((16, 16, 4, 1),)),
        (512, ((16, 16, 4, 1), (4, 16, 4, 1))),
    ),
    "dkdv": (
        (64, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (128, ((32, 32, 4, 1), (16, 16, 4, 1))),
        (256, ((16, 16, 4, 1),)),
        (512, ((16, 16, 4, 1), (16, 4, 4, 1))),
    ),
}
_SMALLEST = (TileConfig(32, 32, 4, 1), TileConfig(32, 16, 4, 1), TileConfig(16, 16, 4, 1))
_SHORT = (TileConfig(32, 64, 4, 2), TileConfig(16, 64, 4, 2), TileConfig(16, 32, 4, 1))
_GATHERING = {  # captured reads along both axes keep an address an element in registers: more threads, smaller tiles
    "forward": (TileConfig(128, 64, 8, 2), TileConfig(64, 64, 4, 2)),
    "dq": (TileConfig(64, 64, 8, 2), TileConfig(64, 32, 4, 2)),
    "dkdv": (TileConfig(64, 64, 8, 2), TileConfig(32, 64, 4, 2)),
}
_INTERPRETER = (TileConfig(32, 32, 4, 1), TileConfig(16, 16, 4, 1))


def padded(dim: int) -> int:
    """Head dimension as a tile holds it: the next power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_dims(qk_dim: int, v_dim: int, target: Target) -> tuple[int, int]:
    """(QK_PAD, V_PAD): both head dimensions as tiles hold them.

    On Hopper the narrower one is padded up to the other's shared-memory swizzle (64 elements is the widest). A loop that
    is not pipelined lets a key tile and a value tile take turns in one buffer, and ptxas 12.8 then mixes up the upper
    halves of their matrix descriptors when the swizzles differ: wrong values and reads outside shared memory.
    """
    qk_pad, v_pad = padded(qk_dim), padded(v_dim)
    if target.family == "wgmma":
        return max(qk_pad, min(v_pad, 64)), max(v_pad, min(qk_pad, 64))
    return qk_pad, v_pad


def shared_bytes(config: TileConfig, problem: TileProblem) -> int:
    """Shared memory the compiled kernel takes at most.

    Tiles that stay for the whole program, plus one buffer per stage of what is streamed, plus a tile of probabilities on
    its way to becoming an operand, plus captured reads the compiler pipelines.
    """
    m, n, size = config.BLOCK_M, config.BLOCK_N, problem.element_bytes
    q_side = m * (problem.qk_pad + (0 if problem.kernel == "forward" else problem.v_pad)) * size
    kv_side = n * (problem.qk_pad + problem.v_pad) * size
    kept, streamed = (kv_side, q_side) if problem.kernel == "dkdv" else (q_side, kv_side)
    uses_shared = problem.target.family != "mma" and size == 2
    buffers = config.num_stages if uses_shared else max(1, config.num_stages - 1)
    probabilities = m * n * (size if problem.kernel == "forward" else 2 * size)
    gathers = problem.gathers * m * n * 4 * config.num_stages
    rows = 2 * m * 4 * config.num_stages
    has_q_twice = problem.kernel == "dkdv" and config.num_stages == 1 and size == 2  # in two layouts
    twice = m * problem.pad * size if has_q_twice else 0
    return kept + buffers * streamed + twice + probabilities + gathers + rows + 1024


def is_legal(config: TileConfig, problem: TileProblem) -> bool:
    """Whether a configuration fits the target."""
    return shared_bytes(config, problem) <= problem.target.shared_bytes


def candidates(
    kernel: str, target: Target, *, element_bytes: int, qk_dim: int, v_dim: int, q_len: int,
    programs: Sequence[Program | None] = (), options: Any = None,
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

    Returns:
        At least one configuration that fits.

    Raises:
        OptionError: The caller's tiles do not fit.
    """
    gathers = sum(gathers_of(p) for p in programs if p is not None)
    pads, is_short = tile_dims(qk_dim, v_dim, target), q_len <= SHORT_QUERIES
    has_score = any(p is not None and p.kind == "score" for p in programs)
    problem = TileProblem(kernel, target, element_bytes, *pads, is_short, gathers, has_score)
    found = _preferred(problem)
    return found if options is None else _with_options(problem, found, options)


@functools.lru_cache(maxsize=1024)
def gathers_of(program: Program) -> int:
    """Captured reads whose index moves along both tile axes."""
    from flexattn.frontend.expr import topological

    loads = [n for n in topological([program.body]) if n.op == "load"]
    return sum(1 for n in loads if n.deps & _DEP_Q and n.deps & _DEP_KV)


@functools.lru_cache(maxsize=1024)
def _preferred(problem: TileProblem) -> tuple[TileConfig, ...]:
    if problem.target.is_interpreter:
        return _INTERPRETER
    listed = [c for c in _listed(problem) if is_legal(c, problem)]
    fallback = [c for c in _SMALLEST if is_legal(c, problem) and c not in listed]
    found = list(dict.fromkeys(listed + fallback))[:AT_MOST]
    if not found:
        raise UnsupportedError(
            f"no tile of the {problem.kernel} kernel fits {problem.target.shared_bytes} bytes of shared memory",
            given=f"head dims padded to {problem.qk_pad} and {problem.v_pad}, {problem.element_bytes} bytes an element",
            hint="bfloat16 or float16 inputs, smaller heads, or kernel_options={'BACKEND': 'TORCH'}",
        )
    return tuple(found)


def _listed(problem: TileProblem) -> list[TileConfig]:
    """The preference list of this family, from the row of this head dim on."""
    families = _SINGLE if problem.element_bytes == 4 else _MMA if problem.target.family == "mma" else _WGMMA
    scored = _WGMMA_SCORED if problem.has_score and families is _WGMMA else {}
    preferences = (*scored.get(problem.kernel, ()), *families[problem.kernel])
    listed = [TileConfig(*c) for pad, configs in preferences if pad >= problem.pad for c in configs]
    gathering = problem.gathers > 0 and problem.element_bytes == 2 and problem.pad <= 128
    short = problem.is_short and problem.kernel == "forward"
    return [*(_SHORT if short else ()), *(_GATHERING[problem.kernel] if gathering else ()), *listed]


def _with_options(problem: TileProblem, found: tuple[TileConfig, ...], options: Any) -> tuple[TileConfig, ...]:
    """The caller's tiles in place of the preferred ones. BLOCK_M1/N1 are torch's names for dk and dv, M2/N2 for dq."""
    suffix = _SUFFIX[problem.kernel]
    given = {name: _option(options, name, suffix) for name in _CHOSEN}
    if all(value is None for value in given.values()):
        return found
    base = found[0]
    config = TileConfig(**{name: value if value is not None else getattr(base, name) for name, value in given.items()})
    _check_option(config, problem)
    return (config,)


def _option(options: Any, name: str, suffix: str) -> int | None:
    specific = getattr(options, name + suffix, None) if name.startswith("BLOCK") else None
    value: int | None = specific if specific is not None else getattr(options, name, None)
    return value


def _check_option(config: TileConfig, problem: TileProblem) -> None:
    for name in ("BLOCK_M", "BLOCK_N", "num_warps"):
        value = getattr(config, name)
        low, high = (1, 16) if name == "num_warps" else (16, 256)
        if value & (value - 1) or not low <= value <= high:
            raise OptionError(f"kernel_options {name} must be a power of two from {low} to {high}", given=value)
    if not 1 <= config.num_stages <= 8:
        raise OptionError("kernel_options num_stages must be from 1 to 8", given=config.num_stages)
    needed = shared_bytes(config, problem)
    if needed > problem.target.shared_bytes:
        raise OptionError(
            f"tiles of the {problem.kernel} kernel must fit {problem.target.shared_bytes} bytes of shared memory",
            given=f"{config}, about {needed} bytes",
            hint="smaller BLOCK_M or BLOCK_N, or num_stages=1",
        )


def delta_config(v_pad: int) -> TileConfig:
    """Launch shape of the backward's pre-pass: about 8K elements a program."""
    return TileConfig(max(16, min(128, 8192 // v_pad)), 16, 4, 1)


# ---------------------------------------------------------------- what autotuning times
TRIALS_AT_MOST = 10
_ACCUMULATORS = 192  # float32 sums a thread may hold; more spill, and take the compiler long


def trials(
    kernel: str, target: Target, *, element_bytes: int, qk_dim: int, v_dim: int, q_len: int,
    programs: Sequence[Program | None] = (), options: Any = None,
) -> tuple[TileConfig, ...]:  # fmt: skip
    """Configurations worth timing for a call: the preferred ones, then neighbours of the first.

    Args: as of `candidates`.

    Returns:
        At most TRIALS_AT_MOST legal configurations, the default first; only the caller's own where `options` fixes any.

    Raises:
        OptionError: The caller's tiles do not fit.
    """
    sizes = {"element_bytes": element_bytes, "qk_dim": qk_dim, "v_dim": v_dim, "q_len": q_len}
    preferred = candidates(kernel, target, programs=programs, options=options, **sizes)
    if is_fixed(kernel, options) or target.is_interpreter:
        return preferred
    gathers = sum(gathers_of(p) for p in programs if p is not None)
    pads = tile_dims(qk_dim, v_dim, target)
    problem = TileProblem(kernel, target, element_bytes, *pads, q_len <= SHORT_QUERIES, gathers)
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
