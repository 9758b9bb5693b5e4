"""Forward attention kernel: reads q, k, v and a span table, makes the output, the natural-log sums and row maxima.

The idea: partial tiles and full tiles are walked by two copies of one loop, so the mask costs nothing where a tile is
wholly kept. The user's functions arrive as constexpr functions and are inlined.
"""

import triton
import triton.language as tl

from flexattn.codegen.skeletons import softmax, tiles


@triton.jit
def _sweep(acc, peak, total, q, K, V, line, EXTRA, k_strides, v_strides, caps, scale, factor, batch, head,
           group, q_idx, q_len, kv_len, KIND: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
           READS: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_PAD: tl.constexpr,
           BLOCK_N: tl.constexpr, FOLD_SCALE: tl.constexpr, IS_K_DESCRIBED: tl.constexpr, IS_V_DESCRIBED: tl.constexpr,
           PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Adds every tile of one kind (full or partial) to the running rows of this program."""
    IS_PARTIAL: tl.constexpr = KIND == tiles.PARTIAL
    kv_head = head // group
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(0, spans):
        if span > 0:
            start = tl.load(EXTRA + 2 * (more + span - 1))
            stop = tl.load(EXTRA + 2 * (more + span - 1) + 1)
        for block in tl.range(start, stop):
            first = block * BLOCK_N
            k = tiles.load_tile(K, k_strides, batch, kv_head, first, kv_len, BLOCK_N, QK_DIM, QK_PAD, IS_K_DESCRIBED,
                                IS_PARTIAL)  # [N, QK]
            known = tiles.with_reads(batch, head, q_idx, first, caps, READS, BLOCK_N)
            scores = softmax.dot(q, tl.trans(k), None, PRECISION, UPCAST)  # [M, N]
            scores = softmax.natural_scores(scores, scale, FOLD_SCALE)
            kv_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            if SCORE_MOD is not None:
                scores = SCORE_MOD(scores, batch, head, q_idx, kv_idx, known)
            if IS_PARTIAL:
                keep = tiles.keep_tile(batch, head, q_idx, kv_idx, q_len, kv_len, known, MASK_MOD)
                scores = tl.where(keep, scores, float("-inf"))
            probs, correction, peak, total = softmax.online_update(scores, factor, peak, total, q.dtype == tl.float32)
            v = tiles.load_tile(V, v_strides, batch, kv_head, first, kv_len, BLOCK_N, V_DIM, V_PAD, IS_V_DESCRIBED,
                                IS_PARTIAL)  # [N, V]
            acc = softmax.dot(probs.to(v.dtype), v, acc * correction[:, None], PRECISION, UPCAST)
    return acc, peak, total


@triton.jit
def attention_forward(Q, K, V, OUT, LSE, MAX, ROWS, EXTRA, q_strides, k_strides, v_strides, out_strides, caps, scale,
                      q_heads, group, q_len, kv_len, pairs, lines, batch_step, head_step, swizzle,
                      SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, READS: tl.constexpr, QK_DIM: tl.constexpr,
                      V_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, FOLD_SCALE: tl.constexpr, WANT_MAX: tl.constexpr,
                      IS_Q_DESCRIBED: tl.constexpr, IS_K_DESCRIBED: tl.constexpr, IS_V_DESCRIBED: tl.constexpr,
                      PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """One query tile of one (batch, head) pair; grid: pairs * lines programs."""
    pair, rank = tiles.locate(tl.program_id(0), pairs, lines, swizzle)
    batch = pair // q_heads
    head = pair % q_heads
    line = tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)
    first = tl.load(line) * BLOCK_M
    q_idx = (first + tl.arange(0, BLOCK_M))[:, None]
    q = tiles.load_tile(Q, q_strides, batch, head, first, q_len, BLOCK_M, QK_DIM, QK_PAD, IS_Q_DESCRIBED, True)
    factor = softmax.factor_of(scale, FOLD_SCALE)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, peak, total = _sweep(acc, peak, total, q, K, V, line, EXTRA, k_strides, v_strides, caps, scale,
                              factor, batch, head, group, q_idx, q_len, kv_len, tiles.PARTIAL, SCORE_MOD, MASK_MOD, READS,
                              QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_N, FOLD_SCALE, IS_K_DESCRIBED, IS_V_DESCRIBED,
                              PRECISION, UPCAST)
    acc, peak, total = _sweep(acc, peak, total, q, K, V, line, EXTRA, k_strides, v_strides, caps, scale,
                              factor, batch, head, group, q_idx, q_len, kv_len, tiles.FULL, SCORE_MOD, MASK_MOD, READS,
                              QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_N, FOLD_SCALE, IS_K_DESCRIBED, IS_V_DESCRIBED,
                              PRECISION, UPCAST)
    safe = tl.where(total == 0.0, 1.0, total)[:, None]  # an empty row is 0 / 1
    if q.dtype == tl.float32:
        out = tl.div_rn(acc, safe)
    else:
        out = acc * (1.0 / safe)
    tiles.store_tile(OUT, out_strides, batch, head, first, q_len, out, BLOCK_M, V_DIM, V_PAD)
    rows = first + tl.arange(0, BLOCK_M)
    at = pair.to(tl.int64) * q_len + rows
    tl.store(LSE + at, softmax.row_lse(peak, total, q.dtype == tl.float32), mask=rows < q_len)
    if WANT_MAX:
        tl.store(MAX + at, softmax.natural_peak(peak, q.dtype == tl.float32), mask=rows < q_len)
