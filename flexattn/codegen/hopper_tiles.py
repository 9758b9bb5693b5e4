"""Tiles of the kernels for Hopper, and whether they can serve a call: reads facts of a call, makes a short list.

The idea: 64 queries a warpgroup and two buffers are fixed by the skeleton; what is left to choose is how many warpgroups (2 with 240
registers a thread, 3 with 160) and how many keys, by what the assembler spills and by how long rows are: three warpgroups are faster
in full tiles and slower in all else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexattn.codegen.shared_memory import TileConfig, tile_dims
from flexattn.codegen.spec import HOPPER_GRADIENTS, KernelSpec
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import SHORT_QUERIES, captured_reads, gathers_of
from flexattn.codegen.tile_preferences import HOPPER
from flexattn.frontend.gradient import passes_gradient

if TYPE_CHECKING:
    from flexattn.frontend.program import Program

WARPGROUP_ROWS = (
    64  # of queries in skeletons/hopper_forward.py, of keys in hopper_backward.py, of either in hopper_gradients.py
)
LONG_KEYS = 8192  # from here on rows have many more full tiles than others
_FUSED_DIMS = ((64, 64), (128, 128))  # padded; a warpgroup has registers for dk and dv of 64 keys and 128 dimensions
_PIECE = 8  # rows after which the order of columns in shared memory begins again
_BARRIERS = 1024  # and the captured values of a role


def hopper_tiles(
    target: Target, *, qk_dim: int, v_dim: int, q_len: int, kv_len: int, programs: Sequence[Program | None] = ()
) -> tuple[TileConfig, ...]:
    """Configurations of half types, best first; none where the portable kernel must serve.

    Args:
        target: where it will run.
        qk_dim, v_dim: head dimensions.
        q_len, kv_len: only whether they are short matters.
        programs: score and mask program.

    Example:
        >>> from flexattn.codegen.target import target_of
        >>> hopper_tiles(target_of(90), qk_dim=64, v_dim=64, q_len=4096, kv_len=16384)[0]
        TileConfig(BLOCK_M=192, BLOCK_N=128, num_warps=4, num_stages=2)
    """
    dims = tile_dims(qk_dim, v_dim, target)
    if target.arch != 90 or min(dims) < 64 or max(dims) > 256 or q_len <= SHORT_QUERIES:
        return ()
    listed = next(rows for pad, rows in HOPPER[_kind(programs, kv_len)] if pad >= max(dims))
    return tuple(c for c in (TileConfig(*row) for row in listed) if _shared(c, dims) <= target.shared_bytes)


def hopper_backward_tiles(
    target: Target, *, qk_dim: int, v_dim: int, q_len: int, programs: Sequence[Program | None] = ()
) -> tuple[TileConfig, ...]:
    """Configurations of the fused backward, best first; none where the portable kernels must serve. Arguments as of `hopper_tiles`.

    128 queries of narrow heads fill all registers: not where a score's derivative, divisions, or what is read for each pair or each
    query need some too.
    """
    dims = tile_dims(qk_dim, v_dim, target)
    if target.arch != 90 or dims not in _FUSED_DIMS or q_len <= SHORT_QUERIES:
        return ()
    given = [p for p in programs if p is not None]
    reads = any(gathers_of(p) or captured_reads(p).query for p in given)
    needs_room = reads or any(_divides(p) or (p.kind == "score" and not passes_gradient(p)) for p in given)
    rows = (64,) if dims[0] == 128 else (64, 128) if needs_room else (128, 64)
    return tuple(TileConfig(m, 128, 4, 2) for m in rows)


def hopper_gradient_tiles(
    kernel: str, target: Target, *, qk_dim: int, v_dim: int, q_len: int, programs: Sequence[Program | None] = ()
) -> tuple[TileConfig, ...]:
    """Configurations of the kernels that share a backward, best first; none where the portable kernels must serve. What is read for
    each pair needs registers that the larger tile does not leave; of narrow heads, where dq is left out, also a score that asks where
    it is.

    Args:
        kernel: 'hopper_query_gradient' or 'hopper_key_gradients'.
        target, qk_dim, v_dim, q_len, programs: as of `hopper_tiles`.
    """
    dims = tile_dims(qk_dim, v_dim, target)
    if target.arch != 90 or min(dims) < 64 or max(dims) > 256 or q_len <= SHORT_QUERIES:
        return ()
    if kernel == "hopper_key_gradients" and dims in _FUSED_DIMS:
        fused = hopper_backward_tiles(target, qk_dim=qk_dim, v_dim=v_dim, q_len=q_len, programs=programs)
        is_placed = any(p.kind == "score" and not _is_plain(p) for p in programs if p is not None)
        return tuple(sorted(fused, key=lambda c: c.BLOCK_M)) if is_placed else fused
    reads = any(gathers_of(p) for p in programs if p is not None)
    most = 128 if kernel == "hopper_query_gradient" and max(dims) <= 128 else 64
    others = (most // 2, most) if reads else (most, most // 2)
    if kernel == "hopper_query_gradient":
        return tuple(TileConfig(2 * WARPGROUP_ROWS, n, 4, 2) for n in others)
    return tuple(TileConfig(m, WARPGROUP_ROWS, 4, 2) for m in others)


def _kind(programs: Sequence[Program | None], kv_len: int) -> str:
    given = [p for p in programs if p is not None]
    if any(_divides(p) for p in given):
        return "dividing"
    is_reading = any(gathers_of(p) or (p.kind == "score" and captured_reads(p).key) for p in given)
    if is_reading:
        return "reading"
    return "long" if kv_len > LONG_KEYS and all(_is_plain(p) for p in given) else "plain"


def _is_plain(program: Program) -> bool:
    """Whether a score does not ask where it is, or a mask keeps no band of keys around a query, but long runs."""
    import torch

    from flexattn.frontend.expr import DEP_KV, DEP_Q, const
    from flexattn.frontend.zones import FAR, zones

    if program.kind == "score":
        return not program.body.deps & (DEP_Q | DEP_KV)
    found, ends = zones(program), (const(-FAR, torch.int64), const(FAR, torch.int64))
    return found is not None and all(z.apart_least is ends[0] or z.apart_most is ends[1] for z in found.kept)


def _divides(program: Program) -> bool:
    """Whether integers that differ by query and key are divided."""
    from flexattn.frontend.expr import DEP_KV, DEP_Q, topological

    nodes = topological([program.body])
    return any(
        n.op in ("floordiv", "mod") and n.deps & DEP_Q and n.deps & DEP_KV and not n.dtype.is_floating_point
        for n in nodes
    )


def query_buffers(config: TileConfig, dims: tuple[int, int], target: Target) -> int:
    """How many tiles of queries are held: two where there is room, so that the next one's queries are there in time."""
    return 2 if _shared(config, dims, 2) <= target.shared_bytes else 1


def role_rows(config: TileConfig) -> int:
    """Queries of a role of hopper_forward.py: two warpgroups are one, three are three."""
    return 2 * WARPGROUP_ROWS if config.BLOCK_M == 2 * WARPGROUP_ROWS else WARPGROUP_ROWS


def piece_rows(kv_tile: int, page_size: int) -> int:
    """Keys that are copied at once where they lie in pages: tiles and pages are cut into as few equal pieces as fit both."""
    return math.gcd(kv_tile, page_size)


def _shared(config: TileConfig, dims: tuple[int, int], q_buffers: int = 1) -> int:
    """Bytes: tiles of queries, two tiles each of keys and values, and at most 128 columns of the output where that goes this way."""
    qk_pad, v_pad = dims
    own = config.BLOCK_M * (q_buffers * qk_pad + (min(v_pad, 128) if role_rows(config) == WARPGROUP_ROWS else 0))
    return 2 * (own + 2 * config.BLOCK_N * (qk_pad + v_pad)) + _BARRIERS


def why_not(spec: KernelSpec) -> str | None:
    """Why the kernel cannot serve a call whose tiles it has, or None where it can."""
    if spec.layouts[0].dtype not in ("bf16", "fp16"):
        return "its products are of bfloat16 and float16"
    is_gradient = spec.kernel in HOPPER_GRADIENTS
    if spec.page_size % _PIECE:
        return f"pages of {spec.page_size} tokens are no multiple of {_PIECE}"
    if not all(spec.described[: 4 if is_gradient else 3]):
        return "an input is expanded, or not aligned to 16 bytes"
    if is_gradient and spec.qk_dim % 8:
        return "query's head dimension is no multiple of 8"
    return "value's head dimension is no multiple of 8" if spec.v_dim % 8 else None


__all__ = ["hopper_backward_tiles", "hopper_gradient_tiles", "hopper_tiles", "piece_rows", "query_buffers", "why_not"]
