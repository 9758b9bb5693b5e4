"""A kernel in Gluon that does nothing but call a generated leaf, as leaf_kernel.py has one in Triton; it is only translated."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def apply_leaf(
    OUT,
    caps,
    SCORE_MOD: gl.constexpr,
    ENDS: gl.constexpr,
    MASK_MOD: gl.constexpr,
    KNOWN: gl.constexpr,
    SEEN: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    q_idx = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, layout)), 1)
    kv_idx = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    zero = gl.program_id(0)
    score = gl.zeros([16, 32], gl.float32, layout)
    known = caps
    if KNOWN is not None:
        known = KNOWN(zero, zero, q_idx, caps)
    seen = caps
    if SEEN is not None:
        seen = SEEN(zero, zero, zero, kv_idx, caps, known)
    if SCORE_MOD is not None:
        score = SCORE_MOD(score, 0.5, zero, zero, q_idx, kv_idx, caps, known, seen)
    if ENDS is not None:
        lower, upper = ENDS(zero, zero, q_idx, 31, caps, known)
        score = gl.where((lower <= kv_idx) & (kv_idx < upper), score, float("-inf"))
    if MASK_MOD is not None:
        score = gl.where(MASK_MOD(zero, zero, q_idx, kv_idx, caps, known, seen), score, float("-inf"))
    gl.store(OUT + q_idx * 32 + kv_idx, score)


def translated(module: Any, caps: tuple[str, ...]) -> str:
    """The kernel with the functions of a module of leaves, verified, before any pass of the compiler."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource

    leaves = {name: getattr(module, name.lower(), None) for name in ("SCORE_MOD", "ENDS", "MASK_MOD", "KNOWN", "SEEN")}
    signature = {"OUT": "*fp32", "caps": caps, **dict.fromkeys(leaves, "constexpr")}
    source = GluonASTSource(apply_leaf, signature, leaves)
    target = GPUTarget("cuda", 90, 32)
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options({"num_warps": 4, **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    assert module.verify()
    return str(module)
