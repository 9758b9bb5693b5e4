"""Backward attention for Hopper in Gluon by two kernels: one makes dq, the other dk and dv, and no program adds to another's result.

They serve heads too wide for the fused backward's registers; the first also all others, beside the fused kernel without its dq, where
gradients must not depend on the order in which programs end, or not all are wanted. Both read q, k, v, d_out and the pre-pass's row
statistics; the first walks the keys of each tile of queries, the second the queries of each tile of keys.

The ideas, each for one reason:
  one sum    a warpgroup has registers for one result of 64 rows and 256 columns. Of dq two warpgroups make 64 rows each; of a tile of
             64 keys one warpgroup makes dv and the other dk, each from scores of its own: a fifth of the products is made twice, and
             nothing passes between the two.
  operands   probabilities and their gradients are, as they are, the register operands of the products that follow.
  roles      one warp copies tiles to shared memory; "this buffer is free" is an arrival at a named barrier, as in the forward.
Two programs never add to one address, so results have the same bits in every run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexattn.codegen.skeletons import tiles
from flexattn.codegen.skeletons.hopper_backward import (
    EVERYBODY,
    KEYS,
    TILE_FREE,
    by_query,
    exponents,
    nothing,
    put_spans,
    row_of,
    score_gradient,
    sloped,
    write,
)
from flexattn.codegen.skeletons.hopper_forward import (
    FULL,
    PARTIAL,
    QUERIES,
    barrier_arrive,
    barrier_wait,
    buffer_of,
    copy_in,
    further_span,
    issue_scores,
    queries_of,
    sums_of,
)
from flexattn.codegen.skeletons.leaf_ops import opaque

# Named barriers, to which both warpgroups and the copying warp come. Triton itself takes one for each of the three roles and one more.
K_FREE = gl.constexpr(6)  # + buffer
V_FREE = gl.constexpr(8)  # + buffer
MEETING = gl.constexpr(10)  # both warpgroups, no more


@gluon.jit
def times(grads, tile, sums, PAD: gl.constexpr):
    """Starts sums += grads @ tile, the former from registers."""
    operand = gl.convert_layout(grads.to(tile.dtype), gl.DotOperandLayout(0, sums_of(PAD), k_width=2))
    return warpgroup_mma(operand, tile, sums, is_async=True)


# ---------------------------------------------------------------- dq
@gluon.jit
def put_keys(K, V, ring, line, EXTRA, batches, head, at, KIND: gl.constexpr, BLOCK_N: gl.constexpr, V_BUFFERS: gl.constexpr):
    """Copies all tiles of keys and values of one kind, each to its buffer once that is free."""
    k_buffers, v_buffers, k_ready, v_ready = ring
    k_batch, v_batch = batches
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            buffer, _ = buffer_of(at)
            if at >= 2:
                barrier_wait(K_FREE + buffer, EVERYBODY)
            mbarrier.expect(k_ready.index(buffer), K.block_type.nbytes)
            copy_in(K, [k_batch, head, block * BLOCK_N, 0], k_ready.index(buffer), k_buffers.index(buffer))
            buffer, _ = queries_of(at, V_BUFFERS)
            if at >= V_BUFFERS:
                barrier_wait(V_FREE + buffer, EVERYBODY)
            mbarrier.expect(v_ready.index(buffer), V.block_type.nbytes)
            copy_in(V, [v_batch, head, block * BLOCK_N, 0], v_ready.index(buffer), v_buffers.index(buffer))
            at += 1
    return at


@gluon.jit
def produce_keys(Q, K, V, D_OUT, own, ring, row, table, steps, BLOCK_N: gl.constexpr, V_BUFFERS: gl.constexpr):
    """The copying warp: the row's queries and their output's gradients, then its keys and values."""
    q_tiles, d_out_tiles, own_ready = own
    batch, head, first, line = row
    group, k_step, v_step = steps
    mbarrier.expect(own_ready, 2 * (Q.block_type.nbytes + D_OUT.block_type.nbytes))
    for half in gl.static_range(2):
        copy_in(Q, [batch, head, first + half * QUERIES, 0], own_ready, q_tiles.index(half))
        copy_in(D_OUT, [batch, head, first + half * QUERIES, 0], own_ready, d_out_tiles.index(half))
    batches = (gl.where(k_step == 0, 0, batch), gl.where(v_step == 0, 0, batch))
    at = 0
    at = put_keys(K, V, ring, line, table, batches, head // group, at, PARTIAL, BLOCK_N, V_BUFFERS)
    put_keys(K, V, ring, line, table, batches, head // group, at, FULL, BLOCK_N, V_BUFFERS)


@gluon.jit
def sweep_keys(GROUP: gl.constexpr, dq, at, line, EXTRA, own, ring, lse, delta, place, sizes, caps, KIND: gl.constexpr,
               SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
               QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_N: gl.constexpr, V_BUFFERS: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """Adds every tile of one kind to dq."""
    S: gl.constexpr = sums_of(BLOCK_N)
    k_buffers, v_buffers, k_ready, v_ready = ring
    batch, head, q_idx, known = place
    q_tiles, d_out_tiles, _ = own
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            k_buffer, k_phase = buffer_of(at)
            v_buffer, v_phase = queries_of(at, V_BUFFERS)
            mbarrier.wait(k_ready.index(k_buffer), k_phase)
            mine = nothing(at) + GROUP
            q = q_tiles.index(mine).reshape([QUERIES, QK_PAD])
            scores = issue_scores(q, k_buffers, k_buffer, BLOCK_N, QK_PAD, QK_USED)
            mbarrier.wait(v_ready.index(v_buffer), v_phase)
            values = v_buffers.index(v_buffer).reshape([BLOCK_N, V_PAD])
            zeros = gl.zeros([QUERIES, BLOCK_N], gl.float32, S)
            d_out = d_out_tiles.index(mine).reshape([QUERIES, V_PAD])
            d_probs = warpgroup_mma(d_out, values.permute((1, 0)), zeros, use_acc=False, is_async=True)
            seen = caps
            if SEEN is not None:  # captured values that are the same for every query, read while the scores are being multiplied
                columns = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, S)), 0)
                seen = SEEN(batch, head, block * BLOCK_N, columns, caps, known)
            scores = warpgroup_mma_wait(1, deps=[scores])
            kv_idx = gl.expand_dims(opaque(block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))), 0)
            found, slope = exponents(
                scores, lse, q_idx, kv_idx, place, sizes, caps, seen, KIND, SCORE_MOD, MASK_MOD, SLOPE, FOLD_SCALE
            )
            probs = sloped(gl.exp2(found), slope, KIND, SLOPE)
            d_probs = warpgroup_mma_wait(0, deps=[d_probs])
            barrier_arrive(V_FREE + v_buffer, EVERYBODY)
            grad = score_gradient(probs, d_probs, delta, KIND == PARTIAL)
            dq = times(grad, k_buffers.index(k_buffer).reshape([BLOCK_N, QK_PAD]), dq, QK_PAD)
            dq = warpgroup_mma_wait(0, deps=[dq])
            barrier_arrive(K_FREE + k_buffer, EVERYBODY)
            at += 1
    return dq, at


@gluon.jit
def consume_keys(GROUP: gl.constexpr, DQ, ROW_LSE, DELTA, own, ring, row, table, row_offset, sizes, caps, SCORE_MOD: gl.constexpr,
                 MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
                 QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_N: gl.constexpr, V_BUFFERS: gl.constexpr,
                 FOLD_SCALE: gl.constexpr):
    """One warpgroup: 64 queries, from their first keys to dq. Where there are no keys that is 0."""
    q_tiles, _, own_ready = own
    batch, head, first, line = row
    first += GROUP * QUERIES
    rows = first + gl.arange(0, QUERIES, gl.SliceLayout(1, sums_of(BLOCK_N)))
    inside = rows < sizes[0]
    lse = gl.expand_dims(gl.load(ROW_LSE + row_offset + rows, mask=inside, other=float("inf")), 1)
    delta = gl.expand_dims(gl.load(DELTA + row_offset + rows, mask=inside, other=0.0), 1)
    q_idx = gl.expand_dims(rows, 1)
    known = caps
    if KNOWN is not None:  # captured values that are the same for every key
        known = KNOWN(batch, head, q_idx, caps)
    place = (batch, head, q_idx, known)
    dq = gl.zeros([QUERIES, QK_PAD], gl.float32, sums_of(QK_PAD))
    mbarrier.wait(own_ready, 0)
    at = 0
    dq, at = sweep_keys(GROUP, dq, at, line, table, own, ring, lse, delta, place, sizes, caps, PARTIAL, SCORE_MOD, MASK_MOD, SEEN,
                        SLOPE, QK_PAD, QK_USED, V_PAD, BLOCK_N, V_BUFFERS, FOLD_SCALE)  # fmt: skip
    dq, at = sweep_keys(GROUP, dq, at, line, table, own, ring, lse, delta, place, sizes, caps, FULL, SCORE_MOD, MASK_MOD, SEEN,
                        SLOPE, QK_PAD, QK_USED, V_PAD, BLOCK_N, V_BUFFERS, FOLD_SCALE)  # fmt: skip
    write(DQ, dq * sizes[2], q_tiles.index(GROUP), batch, head, first, QK_PAD)  # only this warpgroup reads that tile


@gluon.jit
def hopper_query_gradient(Q, K, V, D_OUT, ROW_LSE, DELTA, DQ, ROWS, EXTRA, k_strides, v_strides, caps, scale, q_heads, group, q_len,
                          row_step, kv_len, pairs, lines, batch_step, head_step, swizzle, SCORE_MOD: gl.constexpr,
                          MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr,
                          QK_PAD: gl.constexpr, QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_N: gl.constexpr,
                          V_BUFFERS: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """dq of 128 queries of one (batch, head) pair, tiles of BLOCK_N keys; grid: pairs * lines programs."""
    pair, rank = tiles.locate(gl.program_id(0), pairs, lines, swizzle)
    batch = pair // q_heads
    head = pair % q_heads
    line = tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)
    first = gl.load(line) * (2 * QUERIES)
    q_tiles = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, QUERIES, QK_PAD], Q.layout)
    d_out_tiles = gl.allocate_shared_memory(D_OUT.dtype, [2, 1, 1, QUERIES, V_PAD], D_OUT.layout)
    k_buffers = gl.allocate_shared_memory(K.dtype, [2, 1, 1, BLOCK_N, QK_PAD], K.layout)
    v_buffers = gl.allocate_shared_memory(V.dtype, [V_BUFFERS, 1, 1, BLOCK_N, V_PAD], V.layout)
    own_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [V_BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_ready, count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(k_ready.index(buffer), count=1)
    for buffer in gl.static_range(V_BUFFERS):
        mbarrier.init(v_ready.index(buffer), count=1)
    fence_async_shared()
    own = (q_tiles, d_out_tiles, own_ready)
    ring = (k_buffers, v_buffers, k_ready, v_ready)
    row = (batch, head, first, line)
    row_offset = pair.to(gl.int64) * row_step
    sizes = (q_len, kv_len, scale)
    steps = (group, k_strides[0], v_strides[0])
    gl.warp_specialize([
        (consume_keys, (0, DQ, ROW_LSE, DELTA, own, ring, row, EXTRA, row_offset, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                        QK_PAD, QK_USED, V_PAD, BLOCK_N, V_BUFFERS, FOLD_SCALE)),
        (consume_keys, (1, DQ, ROW_LSE, DELTA, own, ring, row, EXTRA, row_offset, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                        QK_PAD, QK_USED, V_PAD, BLOCK_N, V_BUFFERS, FOLD_SCALE)),
        (produce_keys, (Q, K, V, D_OUT, own, ring, row, EXTRA, steps, BLOCK_N, V_BUFFERS)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---------------------------------------------------------------- dk and dv
@gluon.jit
def produce_queries(Q, K, V, D_OUT, STATS, own, ring, column, table, steps, BLOCK_M: gl.constexpr):
    """The copying warp: the column's keys and values, then its queries."""
    k_tile, v_tile, k_ready, v_ready = own
    kv_batch, kv_head, _, first = column
    mbarrier.expect(k_ready, K.block_type.nbytes)
    copy_in(K, [kv_batch, kv_head, first, 0], k_ready, k_tile.index(0))
    mbarrier.expect(v_ready, V.block_type.nbytes)
    copy_in(V, [kv_batch, kv_head, first, 0], v_ready, v_tile.index(0))
    at = 0
    for repeat in range(steps[2]):
        batch, head, pair, line = row_of(repeat, column, table, steps)
        row = pair * steps[3] * BLOCK_M
        at = put_spans(Q, D_OUT, STATS, ring, line, table[1], batch, head, row, at, PARTIAL, BLOCK_M)
        at = put_spans(Q, D_OUT, STATS, ring, line, table[1], batch, head, row, at, FULL, BLOCK_M)


@gluon.jit
def sweep_queries(IS_DV: gl.constexpr, sums, at, line, EXTRA, own, ring, place, sizes, caps, KIND: gl.constexpr,
                  SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
                  QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """Adds every tile of one kind to dv, or to dk; scores are transposed, [keys, queries]."""
    S: gl.constexpr = sums_of(BLOCK_M)
    q_buffers, d_out_buffers, lse_buffers, delta_buffers, q_ready, d_out_ready = ring
    batch, head, kv_idx, known = place
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            buffer, phase = buffer_of(at)
            d_out = d_out_buffers.index(buffer).reshape([BLOCK_M, V_PAD])
            mbarrier.wait(q_ready.index(buffer), phase)
            here = nothing(at)
            keys = own[0].index(here).reshape([KEYS, QK_PAD])
            scores = issue_scores(keys, q_buffers, buffer, BLOCK_M, QK_PAD, QK_USED)
            mbarrier.wait(d_out_ready.index(buffer), phase)
            if not IS_DV:
                zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
                values = own[1].index(here).reshape([KEYS, V_PAD])
                d_probs = warpgroup_mma(values, d_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
            seen = caps
            if SEEN is not None:  # captured values that are the same for every key, read while the scores are being multiplied
                columns = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, S)), 0)
                seen = SEEN(batch, head, block * BLOCK_M, columns, caps, known)
            scores = warpgroup_mma_wait(0 if IS_DV else 1, deps=[scores])
            lse = by_query(lse_buffers.index(buffer), S, BLOCK_M)
            q_idx = gl.expand_dims(opaque(block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))), 0)
            found, slope = exponents(
                scores, lse, q_idx, kv_idx, place, sizes, caps, seen, KIND, SCORE_MOD, MASK_MOD, SLOPE, FOLD_SCALE
            )
            probs = gl.exp2(found)
            if IS_DV:
                sums = times(probs, d_out, sums, V_PAD)
            else:
                d_probs = warpgroup_mma_wait(0, deps=[d_probs])
                delta = by_query(delta_buffers.index(buffer), S, BLOCK_M)
                grad = score_gradient(sloped(probs, slope, KIND, SLOPE), d_probs, delta, KIND == PARTIAL)
                sums = times(grad, q_buffers.index(buffer).reshape([BLOCK_M, QK_PAD]), sums, QK_PAD)
            sums = warpgroup_mma_wait(0, deps=[sums])
            barrier_arrive(TILE_FREE + buffer, EVERYBODY)
            at += 1
    return sums, at


@gluon.jit
def consume_queries(IS_DV: gl.constexpr, RESULT, own, ring, column, table, steps, sizes, caps, SCORE_MOD: gl.constexpr,
                    MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
                    QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """One warpgroup: dv of 64 keys, or dk, from their first queries on. Where there are no queries it is 0."""
    PAD: gl.constexpr = V_PAD if IS_DV else QK_PAD
    k_tile, v_tile, k_ready, v_ready = own
    kv_batch, kv_head, _, first = column
    kv_idx = gl.expand_dims(first + gl.arange(0, KEYS, gl.SliceLayout(1, sums_of(BLOCK_M))), 1)
    sums = gl.zeros([KEYS, PAD], gl.float32, sums_of(PAD))
    mbarrier.wait(k_ready, 0)
    mbarrier.wait(v_ready, 0)
    at = 0
    for repeat in range(steps[2]):
        batch, head, _, line = row_of(repeat, column, table, steps)
        known = caps
        if KNOWN is not None:  # captured values that are the same for every query
            known = KNOWN(batch, head, kv_idx, caps)
        place = (batch, head, kv_idx, known)
        sums, at = sweep_queries(IS_DV, sums, at, line, table[1], own, ring, place, sizes, caps, PARTIAL, SCORE_MOD, MASK_MOD, SEEN,
                                 SLOPE, QK_PAD, QK_USED, V_PAD, BLOCK_M, FOLD_SCALE)  # fmt: skip
        sums, at = sweep_queries(IS_DV, sums, at, line, table[1], own, ring, place, sizes, caps, FULL, SCORE_MOD, MASK_MOD, SEEN,
                                 SLOPE, QK_PAD, QK_USED, V_PAD, BLOCK_M, FOLD_SCALE)  # fmt: skip
    barrier_wait(MEETING, 2 * 128)  # then nobody reads the keys and values any more, by way of whose tiles results are written
    if IS_DV:
        write(RESULT, sums, v_tile.index(0), kv_batch, kv_head, first, PAD)
    else:
        write(RESULT, sums * sizes[2], k_tile.index(0), kv_batch, kv_head, first, PAD)


@gluon.jit
def hopper_key_gradients(Q, K, V, D_OUT, STATS, DK, DV, ROWS, EXTRA, caps, scale, q_heads, group, repeats, q_len, kv_len, q_tiles,
                         pairs, lines, batch_step, head_step, swizzle, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
                         KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
                         QK_USED: gl.constexpr, V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """dk and dv of 64 keys of one (key batch, key head) pair, tiles of BLOCK_M queries; grid: pairs * lines programs.

    STATS [2, query pairs * q_tiles * BLOCK_M]: log-sums and deltas of rows."""
    pair, rank = tiles.locate(gl.program_id(0), pairs, lines, swizzle)
    kv_heads = q_heads // group
    kv_batch = pair // kv_heads
    kv_head = pair % kv_heads
    line = tiles.table_line(ROWS, kv_batch, kv_head * group, rank, lines, batch_step, head_step)
    first = gl.load(line) * KEYS
    k_tile = gl.allocate_shared_memory(K.dtype, [1, 1, 1, KEYS, QK_PAD], K.layout)
    v_tile = gl.allocate_shared_memory(V.dtype, [1, 1, 1, KEYS, V_PAD], V.layout)
    q_buffers = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, BLOCK_M, QK_PAD], Q.layout)
    d_out_buffers = gl.allocate_shared_memory(D_OUT.dtype, [2, 1, 1, BLOCK_M, V_PAD], D_OUT.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M], STATS.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M], STATS.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    d_out_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(q_ready.index(buffer), count=1)
        mbarrier.init(d_out_ready.index(buffer), count=1)
    fence_async_shared()
    own = (k_tile, v_tile, k_ready, v_ready)
    ring = (q_buffers, d_out_buffers, lse_buffers, delta_buffers, q_ready, d_out_ready)
    column = (kv_batch, kv_head, rank, first)
    table = (ROWS, EXTRA, lines, batch_step, head_step)
    steps = (q_heads, group, repeats, q_tiles)
    sizes = (q_len, kv_len, scale)
    gl.warp_specialize([
        (consume_queries, (False, DK, own, ring, column, table, steps, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                           QK_PAD, QK_USED, V_PAD, BLOCK_M, FOLD_SCALE)),
        (consume_queries, (True, DV, own, ring, column, table, steps, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                           QK_PAD, QK_USED, V_PAD, BLOCK_M, FOLD_SCALE)),
        (produce_queries, (Q, K, V, D_OUT, STATS, own, ring, column, table, steps, BLOCK_M)),
    ], [4, 1], [240, 24])  # fmt: skip
