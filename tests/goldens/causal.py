import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, caps):
    return kv_idx <= (q_idx + caps[0])
