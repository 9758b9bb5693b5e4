import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def reads(b, h, q_idx, kv_idx, caps):
    t0 = leaf_ops.wrap((q_idx - kv_idx) + 40, caps[2])
    t1 = tl.load(caps[0] + (h * caps[3] + t0 * caps[4]), mask=((h < caps[1]) & leaf_ops.inside(t0, caps[2])) != 0, other=float("nan"))
    k0 = t1
    return (k0,)


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, caps):
    return score + caps[5]
