import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def mask_mod(b, h, q_idx, kv_idx, caps):
    t0 = tl.load(caps[0] + q_idx, mask=((q_idx < caps[1])) != 0, other=0)
    t1 = tl.load(caps[0] + kv_idx, mask=((kv_idx < caps[1])) != 0, other=0)
    return (t0 == t1) & (kv_idx <= q_idx)
