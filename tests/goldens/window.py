import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, caps):
    t0 = (q_idx + caps[0]) - kv_idx
    return (0 <= t0) & (t0 < caps[1])
