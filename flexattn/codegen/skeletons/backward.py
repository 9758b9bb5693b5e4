"""Backward attention kernels: read the forward's inputs and results, make dq, dk, dv and gradients of captured tensors.

The idea: two kernels without atomics, each with one owner per output tile. One walks the keys of a query tile and owns
dq; the other walks the queries of a key tile (over transposed spans, and over every query head and batch entry that
shares these keys) and owns dk and dv. Probabilities are made again from the saved log-sum, so nothing of size
q_len x kv_len is stored. A pre-pass makes delta = rowsum(out * d_out) - d_lse. What is masked is the gradient, not only
the value: a masked score may be NaN and must still add exactly 0.
"""

import triton
import triton.language as tl

from flexattn.codegen.skeletons import softmax, tiles


@triton.jit
def attention_backward_delta(OUT, D_OUT, LSE, D_LSE, DELTA, ROW_LSE, out_strides, d_out_strides, q_heads, q_len, row_step,
                             pairs, lines, V_DIM: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
                             HAS_D_LSE: tl.constexpr, IS_D_OUT_DESCRIBED: tl.constexpr):
    """delta of BLOCK_M rows, and their log-sums as the gradient kernels read them. A pair has row_step rows there, q_len or more:
    those past the end are empty ones."""
    pair = tl.program_id(0) // lines
    first = (tl.program_id(0) % lines) * BLOCK_M
    batch = pair // q_heads
    head = pair % q_heads
    out = tiles.load_tile(OUT, out_strides, batch, head, first, q_len, BLOCK_M, V_DIM, V_PAD, False, True)
    d_out = tiles.load_tile(D_OUT, d_out_strides, batch, head, first, q_len, BLOCK_M, V_DIM, V_PAD, IS_D_OUT_DESCRIBED, True)
    rows = first + tl.arange(0, BLOCK_M)
    at = pair.to(tl.int64) * q_len + rows
    if out.dtype == tl.float32:  # summed in the order of the products with v: a row of one key then has gradient 0
        products = tl.dot(d_out, tl.trans(out), input_precision="ieee")
        delta = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 1)
    else:
        delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
    if HAS_D_LSE:
        delta -= tl.load(D_LSE + at, mask=rows < q_len, other=0.0)
    lse = tl.load(LSE + at, mask=rows < q_len, other=float("-inf"))
    empty = lse == float("-inf")
    at = pair.to(tl.int64) * row_step + rows
    tl.store(DELTA + at, tl.where(empty, 0.0, delta), mask=rows < row_step)
    tl.store(ROW_LSE + at, softmax.saved_lse(lse, OUT.dtype.element_ty == tl.float32), mask=rows < row_step)


@triton.jit
def _modified(natural, batch, head, q_idx, kv_idx, q_len, kv_len, caps, IS_PARTIAL: tl.constexpr,
              SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr):
    """What the softmax saw: the modified scores, -inf where masked."""
    modified = natural
    if SCORE_MOD is not None:
        modified = SCORE_MOD(natural, batch, head, q_idx, kv_idx, caps)
    if IS_PARTIAL:
        keep = tiles.keep_tile(batch, head, q_idx, kv_idx, q_len, kv_len, caps, MASK_MOD)
        modified = tl.where(keep, modified, float("-inf"))
    return modified


@triton.jit
def _score_gradient(grad, natural, probs, batch, head, q_idx, kv_idx, caps, IS_PARTIAL: tl.constexpr,
                    SCORE_GRAD: tl.constexpr):
    """d loss / d score from d loss / d modified score; exactly 0 where the score did not count, whatever v holds there.
    Such a score has probability 0, which is at hand: the score itself would need registers up to here."""
    d_score = grad
    if SCORE_GRAD is not None:
        d_score = SCORE_GRAD(grad, natural, batch, head, q_idx, kv_idx, caps)
    if IS_PARTIAL or SCORE_GRAD is not None:
        d_score = tl.where(probs == 0.0, 0.0, d_score)
    return d_score


@triton.jit
def _dq_sweep(dq, q, d_out, row_lse, delta, K, V, line, EXTRA, k_strides, v_strides, caps, sums, scale,
              factor, batch, head, group, q_idx, q_len, kv_len, KIND: tl.constexpr, SCORE_MOD: tl.constexpr,
              MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, CAPTURE_GRAD: tl.constexpr, QK_DIM: tl.constexpr,
              V_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
              FOLD_SCALE: tl.constexpr, WANT_DQ: tl.constexpr, IS_K_DESCRIBED: tl.constexpr,
              IS_V_DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Adds every key tile of one kind to dq [M, QK] and to the sums of captured tensors."""
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
            v = tiles.load_tile(V, v_strides, batch, kv_head, first, kv_len, BLOCK_N, V_DIM, V_PAD, IS_V_DESCRIBED,
                                IS_PARTIAL)  # [N, V]
            natural = softmax.dot(q, tl.trans(k), None, PRECISION, UPCAST)  # [M, N]
            natural = softmax.natural_scores(natural, scale, FOLD_SCALE)
            kv_idx = (first + tl.arange(0, BLOCK_N))[None, :]
            modified = _modified(natural, batch, head, q_idx, kv_idx, q_len, kv_len, caps, IS_PARTIAL, SCORE_MOD,
                                 MASK_MOD)
            probs = softmax.probabilities(modified, factor, row_lse[:, None], q.dtype == tl.float32)
            d_probs = softmax.dot(d_out, tl.trans(v), None, PRECISION, UPCAST)  # [M, N]
            grad = probs * (d_probs - delta[:, None])
            if CAPTURE_GRAD is not None:
                CAPTURE_GRAD(grad, natural, probs != 0.0, batch, head, q_idx, kv_idx, caps, sums)
            if WANT_DQ:
                d_score = _score_gradient(grad, natural, probs, batch, head, q_idx, kv_idx, caps, IS_PARTIAL,
                                          SCORE_GRAD)
                dq = softmax.dot(d_score.to(k.dtype), k, dq, PRECISION, UPCAST)
    return dq


@triton.jit
def attention_backward_dq(Q, K, V, D_OUT, ROW_LSE, DELTA, DQ, ROWS, EXTRA, q_strides, k_strides, v_strides,
                          d_out_strides, dq_strides, caps, sums, scale, q_heads, group, q_len, row_step, kv_len, pairs, lines,
                          batch_step, head_step, swizzle, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr,
                          SCORE_GRAD: tl.constexpr, CAPTURE_GRAD: tl.constexpr, QK_DIM: tl.constexpr,
                          V_DIM: tl.constexpr, QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
                          BLOCK_N: tl.constexpr, FOLD_SCALE: tl.constexpr,
                          WANT_DQ: tl.constexpr, IS_Q_DESCRIBED: tl.constexpr, IS_K_DESCRIBED: tl.constexpr,
                          IS_V_DESCRIBED: tl.constexpr, IS_D_OUT_DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
                          UPCAST: tl.constexpr):
    """dq of one query tile of one (batch, head) pair; grid: pairs * lines programs."""
    pair, rank = tiles.locate(tl.program_id(0), pairs, lines, swizzle)
    batch = pair // q_heads
    head = pair % q_heads
    line = tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)
    first = tl.load(line) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = tiles.load_tile(Q, q_strides, batch, head, first, q_len, BLOCK_M, QK_DIM, QK_PAD, IS_Q_DESCRIBED, True)
    d_out = tiles.load_tile(D_OUT, d_out_strides, batch, head, first, q_len, BLOCK_M, V_DIM, V_PAD, IS_D_OUT_DESCRIBED, True)
    at = pair.to(tl.int64) * row_step + rows
    row_lse = tl.load(ROW_LSE + at, mask=rows < q_len, other=float("inf"))
    delta = tl.load(DELTA + at, mask=rows < q_len, other=0.0)
    factor = softmax.factor_of(scale, FOLD_SCALE)
    dq = tl.zeros([BLOCK_M, QK_PAD], tl.float32)
    dq = _dq_sweep(dq, q, d_out, row_lse, delta, K, V, line, EXTRA, k_strides, v_strides, caps, sums,
                   scale, factor, batch, head, group, rows[:, None], q_len, kv_len, tiles.PARTIAL, SCORE_MOD, MASK_MOD,
                   SCORE_GRAD, CAPTURE_GRAD, QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_N, FOLD_SCALE,
                   WANT_DQ, IS_K_DESCRIBED, IS_V_DESCRIBED, PRECISION, UPCAST)
    dq = _dq_sweep(dq, q, d_out, row_lse, delta, K, V, line, EXTRA, k_strides, v_strides, caps, sums,
                   scale, factor, batch, head, group, rows[:, None], q_len, kv_len, tiles.FULL, SCORE_MOD, MASK_MOD,
                   SCORE_GRAD, CAPTURE_GRAD, QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_N, FOLD_SCALE,
                   WANT_DQ, IS_K_DESCRIBED, IS_V_DESCRIBED, PRECISION, UPCAST)
    if WANT_DQ:
        tiles.store_tile(DQ, dq_strides, batch, head, first, q_len, dq * scale, BLOCK_M, QK_DIM, QK_PAD)


@triton.jit
def _dkdv_sweep(dk, dv, k, v, Q, D_OUT, lse_base, delta_base, line, EXTRA, q_strides, d_out_strides,
                caps, scale, factor, batch, head, kv_idx, q_len, kv_len, KIND: tl.constexpr, SCORE_MOD: tl.constexpr,
                MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
                QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr, FOLD_SCALE: tl.constexpr,
                WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, IS_Q_DESCRIBED: tl.constexpr,
                IS_D_OUT_DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Adds every query tile of one kind to dk [N, QK] and dv [N, V]; scores are transposed, [N, M]."""
    IS_PARTIAL: tl.constexpr = KIND == tiles.PARTIAL
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(0, spans):
        if span > 0:
            start = tl.load(EXTRA + 2 * (more + span - 1))
            stop = tl.load(EXTRA + 2 * (more + span - 1) + 1)
        for block in tl.range(start, stop):
            first = block * BLOCK_M
            rows = first + tl.arange(0, BLOCK_M)
            q = tiles.load_tile(Q, q_strides, batch, head, first, q_len, BLOCK_M, QK_DIM, QK_PAD, IS_Q_DESCRIBED,
                                IS_PARTIAL)  # [M, QK]
            d_out = tiles.load_tile(D_OUT, d_out_strides, batch, head, first, q_len, BLOCK_M, V_DIM, V_PAD, IS_D_OUT_DESCRIBED,
                                    IS_PARTIAL)  # [M, V]
            if IS_PARTIAL:
                row_lse = tl.load(lse_base + rows, mask=rows < q_len, other=float("inf"))
                delta = tl.load(delta_base + rows, mask=rows < q_len, other=0.0)
            else:
                row_lse = tl.load(lse_base + rows)
                delta = tl.load(delta_base + rows)
            natural = softmax.dot(k, tl.trans(q), None, PRECISION, UPCAST)  # [N, M]
            natural = softmax.natural_scores(natural, scale, FOLD_SCALE)
            modified = _modified(natural, batch, head, rows[None, :], kv_idx, q_len, kv_len, caps, IS_PARTIAL,
                                 SCORE_MOD, MASK_MOD)
            probs = softmax.probabilities(modified, factor, row_lse[None, :], q.dtype == tl.float32)
            if WANT_DV:
                dv = softmax.dot(probs.to(d_out.dtype), d_out, dv, PRECISION, UPCAST)
            if WANT_DK:
                d_probs = softmax.dot(v, tl.trans(d_out), None, PRECISION, UPCAST)  # [N, M]
                grad = probs * (d_probs - delta[None, :])
                d_score = _score_gradient(grad, natural, probs, batch, head, rows[None, :], kv_idx, caps, IS_PARTIAL,
                                          SCORE_GRAD)
                dk = softmax.dot(d_score.to(q.dtype), q, dk, PRECISION, UPCAST)
    return dk, dv


@triton.jit
def attention_backward_dkdv(Q, K, V, D_OUT, ROW_LSE, DELTA, DK, DV, ROWS, EXTRA, q_strides, k_strides, v_strides,
                            d_out_strides, dk_strides, dv_strides, caps, scale, q_heads, group, repeats, q_len, kv_len,
                            pairs, lines, batch_step, head_step, swizzle, SCORE_MOD: tl.constexpr,
                            MASK_MOD: tl.constexpr, SCORE_GRAD: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
                            QK_PAD: tl.constexpr, V_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            FOLD_SCALE: tl.constexpr, WANT_DK: tl.constexpr,
                            WANT_DV: tl.constexpr, IS_Q_DESCRIBED: tl.constexpr, IS_K_DESCRIBED: tl.constexpr,
                            IS_V_DESCRIBED: tl.constexpr, IS_D_OUT_DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
                            UPCAST: tl.constexpr):
    """dk and dv of one key tile of one (key batch, key head) pair; grid: pairs * lines programs.

    `repeats` (query heads of the group, times the batch where k and v have batch 1) are summed in the program, in
    float32 and in order, so the result is the same in every run."""
    pair, rank = tiles.locate(tl.program_id(0), pairs, lines, swizzle)
    kv_heads = q_heads // group
    kv_batch = pair // kv_heads
    kv_head = pair % kv_heads
    line = tiles.table_line(ROWS, kv_batch, kv_head * group, rank, lines, batch_step, head_step)
    first = tl.load(line) * BLOCK_N
    kv_idx = (first + tl.arange(0, BLOCK_N))[:, None]
    k = tiles.load_tile(K, k_strides, kv_batch, kv_head, first, kv_len, BLOCK_N, QK_DIM, QK_PAD, IS_K_DESCRIBED, True)
    v = tiles.load_tile(V, v_strides, kv_batch, kv_head, first, kv_len, BLOCK_N, V_DIM, V_PAD, IS_V_DESCRIBED, True)
    factor = softmax.factor_of(scale, FOLD_SCALE)
    dk = tl.zeros([BLOCK_N, QK_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, V_PAD], tl.float32)
    BY_HEAD: tl.constexpr = k.dtype == tl.float32  # one chain of additions over a group of 64 would lose a digit
    for repeat in range(0, repeats):
        batch = kv_batch + repeat // group
        head = kv_head * group + repeat % group
        line = tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)
        row_offset = (batch * q_heads + head).to(tl.int64) * q_len
        if BY_HEAD:
            part_dk = tl.zeros([BLOCK_N, QK_PAD], tl.float32)
            part_dv = tl.zeros([BLOCK_N, V_PAD], tl.float32)
        else:
            part_dk = dk
            part_dv = dv
        part_dk, part_dv = _dkdv_sweep(part_dk, part_dv, k, v, Q, D_OUT, ROW_LSE + row_offset,
                                       DELTA + row_offset, line, EXTRA, q_strides, d_out_strides, caps, scale,
                                       factor, batch, head, kv_idx, q_len, kv_len, tiles.PARTIAL, SCORE_MOD, MASK_MOD,
                                       SCORE_GRAD, QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE,
                                       WANT_DK, WANT_DV, IS_Q_DESCRIBED, IS_D_OUT_DESCRIBED, PRECISION, UPCAST)
        part_dk, part_dv = _dkdv_sweep(part_dk, part_dv, k, v, Q, D_OUT, ROW_LSE + row_offset,
                                       DELTA + row_offset, line, EXTRA, q_strides, d_out_strides, caps, scale,
                                       factor, batch, head, kv_idx, q_len, kv_len, tiles.FULL, SCORE_MOD, MASK_MOD,
                                       SCORE_GRAD, QK_DIM, V_DIM, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE,
                                       WANT_DK, WANT_DV, IS_Q_DESCRIBED, IS_D_OUT_DESCRIBED, PRECISION, UPCAST)
        if BY_HEAD:
            dk += part_dk
            dv += part_dv
        else:
            dk = part_dk
            dv = part_dv
    if WANT_DK:
        tiles.store_tile(DK, dk_strides, kv_batch, kv_head, first, kv_len, dk * scale, BLOCK_N, QK_DIM, QK_PAD)
    if WANT_DV:
        tiles.store_tile(DV, dv_strides, kv_batch, kv_head, first, kv_len, dv, BLOCK_N, V_DIM, V_PAD)
