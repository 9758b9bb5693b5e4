import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops


@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, caps):
    return caps[0] * (leaf_ops.tanh_exact(score / caps[0]))
