import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, caps):
    t0 = q_idx - kv_idx
    return ((leaf_ops.floor_div_by(t0, 4)) == (-1)) | ((leaf_ops.floor_mod_by(t0, 3)) == 1)
