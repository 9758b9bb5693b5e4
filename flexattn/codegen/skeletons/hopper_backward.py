"""Backward attention kernel for Hopper in Gluon: all of dq, dk and dv in one walk over the queries of each tile of keys.

Reads q, k, v, d_out, the pre-pass's row statistics and the transposed span table; makes dk and dv, and float32 sums of dq that
`hopper_dq_results` turns into dq.

The ideas, each for one reason:
  columns    a program owns 128 keys and walks their queries, over every query head and batch entry that shares these keys, so dk and
             dv stay in registers until they are done; two warpgroups have 64 keys each.
  transposed scores are [keys, queries]: probabilities and their gradients are then, as they are, the register operands of dv and dk.
  exchange   dq of a tile of queries is a sum over all keys: each warpgroup puts its gradients of scores into shared memory and
             multiplies a part of dq (half of the dimensions, or half of the queries) by what both have put there.
  addition   that part is added to the sums in global memory from registers, four numbers an instruction, in the order in which
             registers hold it: nothing goes through shared memory, and no other warp is woken.
  statistics rows' log-sums and deltas come with the tiles, by the same copies; rows past the end have log-sum +inf there, which
             makes their probabilities 0.
  releases   "this buffer is free" is an arrival at a named barrier, as in the forward.
  queue      columns of documents are short and differ: there programs take columns until there are none, by a counter in global
             memory, and the next one's keys come while the last queries of this one are multiplied.
The order of additions to dq is not the same in every run. Where it must be, or where dq is not wanted, the kernel leaves it out
(WANT_DQ), and hopper_gradients.py makes it.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexattn.codegen.skeletons import softmax, tiles
from flexattn.codegen.skeletons.hopper_forward import (
    FULL,
    PARTIAL,
    barrier_arrive,
    barrier_wait,
    buffer_of,
    copy_in,
    further_span,
    sums_of,
)
from flexattn.codegen.skeletons.leaf_ops import opaque

_renamed = hasattr(tma, "async_store")  # since Triton 3.7
copy_out = tma.async_store if _renamed else tma.async_copy_shared_to_global
together = gl.barrier if _renamed else gl.thread_barrier

KEYS = gl.constexpr(64)  # of one warpgroup
# Slopes of a score function: the derivative of the modified score by the score.
ONE = gl.constexpr(0)
ANY = gl.constexpr(1)
BOUNDED = gl.constexpr(2)  # finite, whatever the score
# Named barriers and who comes to them; Triton itself takes one for each of the three roles and one more.
EXCHANGE = gl.constexpr(6)  # + 2 * (position of the tile, modulo 2) + warpgroup: its gradients are there; both warpgroups
COLUMN_FREE = gl.constexpr(10)  # + slot: its keys, values and number have been read; both warpgroups and the copying warp
TILE_FREE = gl.constexpr(14)  # + buffer: its queries have been read; both warpgroups and the copying warp
EVERYBODY = gl.constexpr(2 * 128 + 32)


# ---------------------------------------------------------------- what Gluon has no word for
@gluon.jit
def nothing(at):
    """0, of which the compiler knows only that it changes with `at`: what is addressed with it is not kept in registers around a
    loop."""
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [gl.to_tensor(at)], dtype=gl.int32, is_pure=True, pack=1)


_is_public = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # since Triton 3.7


@gluon.jit
def seen_as(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same bytes of float32 in another shape and order."""
    if _is_public:
        return buffer.reinterpret(gl.float32, SHAPE, LAYOUT)
    else:
        return buffer._reinterpret(gl.float32, SHAPE, LAYOUT)


# ---------------------------------------------------------------- layouts
@gluon.constexpr_function
def part_of(BLOCK_M, QK_PAD):
    """Dimensions of a warpgroup's part of dq: of 64 queries half of them, of 128 all of them for its own 64 queries."""
    return QK_PAD // 2 if BLOCK_M == 64 else QK_PAD


# ---------------------------------------------------------------- walking
@gluon.jit
def column_of(tile, pairs, swizzle, table, steps):
    """(key batch, key head, rank, first key) of a column by its number."""
    ROWS, _, lines, batch_step, head_step = table
    q_heads, group, _, _ = steps
    pair, rank = tiles.locate(tile, pairs, lines, swizzle)
    kv_heads = q_heads // group
    kv_batch = pair // kv_heads
    kv_head = pair % kv_heads
    line = tiles.table_line(ROWS, kv_batch, kv_head * group, rank, lines, batch_step, head_step)
    return kv_batch, kv_head, rank, gl.load(line) * (2 * KEYS)


@gluon.jit
def barriers_of(SLOTS: gl.constexpr):
    """A barrier for the keys or the values, or the number, of a column; two where programs take columns."""
    if SLOTS == 1:
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
    else:
        ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(SLOTS):
            mbarrier.init(ready.index(slot), count=1)
    return ready


@gluon.jit
def in_slot(own, slot):
    """A column's tiles and barriers where programs take columns."""
    k_tiles, v_tiles, k_ready, v_ready = own
    return k_tiles, v_tiles, k_ready.index(slot), v_ready.index(slot)


@gluon.jit
def take(COUNTER, columns, turn, total):
    """The copying warp: takes the number of the next column and tells it, once its slot is free. Each program takes one that is no
    column any more, so the last number of all is known, and the counter is 0 again behind it."""
    next_tile, next_ready = columns[0], columns[1]
    slot, _ = buffer_of(turn)
    tile = gl.atomic_add(COUNTER, 1, sem="relaxed")
    if tile == total + gl.num_programs(0) - 1:
        gl.store(COUNTER, 0)
    if turn >= 2:
        barrier_wait(COLUMN_FREE + slot, EVERYBODY)
    next_tile.index(slot).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(next_ready.index(slot), count=1)
    return tile


@gluon.jit
def told(columns, turn):
    """A working warpgroup: the number that the copying warp has taken."""
    next_tile, next_ready = columns[0], columns[1]
    slot, phase = buffer_of(turn)
    mbarrier.wait(next_ready.index(slot), phase)
    return gl.max(next_tile.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def row_of(repeat, column, table, steps):
    """(batch, query head, their pair, pointer to the table's row) of one that shares a column's keys."""
    ROWS, _, lines, batch_step, head_step = table
    kv_batch, kv_head, rank, _ = column
    q_heads, group, _, _ = steps
    batch = kv_batch + repeat // group
    head = kv_head * group + repeat % group
    return batch, head, batch * q_heads + head, tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)


@gluon.jit
def put(Q, D_OUT, STATS, ring, batch, head, row, block, at, BLOCK_M: gl.constexpr):
    """Copies a tile of queries, their output's gradients and their statistics to a buffer, once that is free."""
    q_buffers, d_out_buffers, lse_buffers, delta_buffers, q_ready, d_out_ready = ring
    Q_BYTES: gl.constexpr = Q.block_type.nbytes + STATS.block_type.nbytes
    D_OUT_BYTES: gl.constexpr = D_OUT.block_type.nbytes + STATS.block_type.nbytes
    buffer, _ = buffer_of(at)
    first = block * BLOCK_M
    if at >= 2:
        barrier_wait(TILE_FREE + buffer, EVERYBODY)
    mbarrier.expect(q_ready.index(buffer), Q_BYTES)
    copy_in(Q, [batch, head, first, 0], q_ready.index(buffer), q_buffers.index(buffer))
    copy_in(STATS, [0, row + first], q_ready.index(buffer), lse_buffers.index(buffer))
    mbarrier.expect(d_out_ready.index(buffer), D_OUT_BYTES)
    copy_in(D_OUT, [batch, head, first, 0], d_out_ready.index(buffer), d_out_buffers.index(buffer))
    copy_in(STATS, [1, row + first], d_out_ready.index(buffer), delta_buffers.index(buffer))


@gluon.jit
def put_spans(Q, D_OUT, STATS, ring, line, EXTRA, batch, head, row, at, KIND: gl.constexpr, BLOCK_M: gl.constexpr):
    """Copies all tiles of one kind."""
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            put(Q, D_OUT, STATS, ring, batch, head, row, block, at, BLOCK_M)
            at += 1
    return at


@gluon.jit
def copy_column(Q, K, V, D_OUT, STATS, own, ring, column, slot, at, table, steps, BLOCK_M: gl.constexpr):
    """Copies a column's keys and values to a slot, then its queries."""
    k_tiles, v_tiles, k_ready, v_ready = own
    kv_batch, kv_head, _, first = column
    mbarrier.expect(k_ready, 2 * K.block_type.nbytes)
    for half in gl.static_range(2):
        copy_in(K, [kv_batch, kv_head, first + half * KEYS, 0], k_ready, k_tiles.index(2 * slot + half))
    mbarrier.expect(v_ready, 2 * V.block_type.nbytes)
    for half in gl.static_range(2):
        copy_in(V, [kv_batch, kv_head, first + half * KEYS, 0], v_ready, v_tiles.index(2 * slot + half))
    for repeat in range(steps[2]):
        batch, head, pair, line = row_of(repeat, column, table, steps)
        row = pair * steps[3] * BLOCK_M
        at = put_spans(Q, D_OUT, STATS, ring, line, table[1], batch, head, row, at, PARTIAL, BLOCK_M)
        at = put_spans(Q, D_OUT, STATS, ring, line, table[1], batch, head, row, at, FULL, BLOCK_M)
    return at


@gluon.jit
def produce(Q, K, V, D_OUT, STATS, COUNTER, own, ring, columns, table, steps, BLOCK_M: gl.constexpr):
    """The copying warp: the program's column, or, where there is a counter, each one that it takes."""
    at = gl.to_tensor(0)
    if COUNTER is None:
        copy_column(Q, K, V, D_OUT, STATS, own, ring, columns, 0, at, table, steps, BLOCK_M)
    else:
        pairs, swizzle = columns[2], columns[3]
        total = pairs * table[2]
        turn = 0
        tile = take(COUNTER, columns, turn, total)
        while tile < total:
            column = column_of(tile, pairs, swizzle, table, steps)
            slot, _ = buffer_of(turn)
            at = copy_column(Q, K, V, D_OUT, STATS, in_slot(own, slot), ring, column, slot, at, table, steps, BLOCK_M)
            turn += 1
            tile = take(COUNTER, columns, turn, total)


# ---------------------------------------------------------------- scores
@gluon.jit
def by_query(buffer, S: gl.constexpr, BLOCK_M: gl.constexpr):
    """A tile's statistics [BLOCK_M] as columns of its scores."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    values = seen_as(buffer, [BLOCK_M], plain).load(gl.SliceLayout(0, S))
    return gl.expand_dims(values, 0)


@gluon.jit
def exponents(scores, lse, q_idx, kv_idx, place, sizes, caps, seen, KIND: gl.constexpr, SCORE_MOD: gl.constexpr,
              MASK_MOD: gl.constexpr, SLOPE: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """(exponents of probabilities in base 2, slopes of the modified scores, or the exponents again where those are 1)."""
    batch, head, _, known = place
    q_len, kv_len, scale = sizes
    if SCORE_MOD is None:
        factor = softmax.factor_of(scale, FOLD_SCALE)
        found = softmax.natural_scores(scores, scale, FOLD_SCALE) * factor
        slope = found
    elif SLOPE != ONE:
        found, slope = SCORE_MOD(scores, scale, batch, head, q_idx, kv_idx, caps, known, seen)
    else:
        found = SCORE_MOD(scores, scale, batch, head, q_idx, kv_idx, caps, known, seen)
        slope = found
    found = found - lse
    if KIND == PARTIAL:
        end = kv_len
        if SCORE_MOD is not None:  # which may be NaN where there is no query
            end = gl.where(q_idx < q_len, kv_len, 0)
        if MASK_MOD is not None:  # of keys before `end`
            keep = MASK_MOD(batch, head, q_idx, kv_idx, end, caps, known, seen)
        else:
            keep = kv_idx < end
        found = gl.where(keep, found, float("-inf"))
    return found, slope


@gluon.jit
def sloped(probs, slope, KIND: gl.constexpr, SLOPE: gl.constexpr):
    """Probabilities times the slopes of their scores; 0 where there is no probability, whatever the slope is there."""
    if SLOPE == BOUNDED and KIND == FULL:
        probs = probs * slope
    elif SLOPE != ONE:
        probs = gl.where(probs == 0.0, 0.0, probs * slope)
    return probs


@gluon.jit
def score_gradient(probs, d_probs, delta, MAY_BE_OFF: gl.constexpr):
    """Gradient of scores; exactly 0 where a score did not count, whatever v holds there."""
    grad = probs * (d_probs - delta)
    if MAY_BE_OFF:
        grad = gl.where(probs == 0.0, 0.0, grad)
    return grad


# ---------------------------------------------------------------- the working warpgroups
@gluon.jit
def issue_part(GROUP: gl.constexpr, from_group, dq, d_scores, k_tiles, QK_PAD: gl.constexpr, BLOCK_M: gl.constexpr,
               IS_FIRST: gl.constexpr):
    """Starts warpgroup GROUP's part of dq, as far as it comes from the keys of one warpgroup."""
    PART: gl.constexpr = part_of(BLOCK_M, QK_PAD)
    keys = k_tiles.index(from_group).reshape([KEYS, QK_PAD])
    if BLOCK_M == 64:
        return warpgroup_mma(
            d_scores.permute((1, 0)), keys.slice(GROUP * PART, PART, dim=1), dq, use_acc=not IS_FIRST, is_async=True
        )
    else:
        mine = d_scores.slice(GROUP * 64, 64, dim=1).permute((1, 0))
        return warpgroup_mma(mine, keys, dq, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def add_part(TO, part):
    """Adds a product [64, columns] to sums in global memory, in the order in which registers hold it: four numbers at once."""
    COLUMNS: gl.constexpr = part.shape[1]
    even, odd = gl.split(gl.reshape(part, [64, COLUMNS // 2, 2]))
    upper_even, lower_even = gl.split(gl.permute(gl.reshape(even, [4, 2, 8, COLUMNS // 2]), (0, 2, 3, 1)))
    upper_odd, lower_odd = gl.split(gl.permute(gl.reshape(odd, [4, 2, 8, COLUMNS // 2]), (0, 2, 3, 1)))
    L: gl.constexpr = upper_even.type.layout  # [warp, row, pair of columns]
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L))), 1), 2)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L))), 0), 2)
    pair = gl.expand_dims(gl.expand_dims(gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, gl.SliceLayout(1, L))), 0), 1)
    at = TO + ((pair // 4) * 512 + warp * 128 + row * 16 + (pair % 4) * 4)
    text: gl.constexpr = "red.relaxed.gpu.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;"
    operands = [at.to(gl.int64), upper_even, upper_odd, lower_even, lower_odd]
    gl.inline_asm_elementwise(text, "=r,l,f,f,f,f", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def step(dk, dv, block, at, own, ring, shared, place, sizes, caps, GROUP: gl.constexpr, KIND: gl.constexpr,
         SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
         V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr, WANT_DQ: gl.constexpr):
    """One tile of queries: scores and gradients of probabilities, then dv, this warpgroup's part of dq, and dk."""
    S: gl.constexpr = sums_of(BLOCK_M)
    PART: gl.constexpr = part_of(BLOCK_M, QK_PAD)
    k_tiles, v_tiles, _, _ = own
    q_buffers, d_out_buffers, lse_buffers, delta_buffers, q_ready, d_out_ready = ring
    d_scores, DQ_SUMS, tile, slot = shared
    buffer, phase = buffer_of(at)
    turn = 2 * buffer
    q = q_buffers.index(buffer).reshape([BLOCK_M, QK_PAD])
    d_out = d_out_buffers.index(buffer).reshape([BLOCK_M, V_PAD])
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, S)
    mbarrier.wait(q_ready.index(buffer), phase)
    here = nothing(at) + 2 * slot
    keys = k_tiles.index(here + GROUP).reshape([KEYS, QK_PAD])
    scores = warpgroup_mma(keys, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(d_out_ready.index(buffer), phase)
    values = v_tiles.index(here + GROUP).reshape([KEYS, V_PAD])
    d_probs = warpgroup_mma(values, d_out.permute((1, 0)), zeros, use_acc=False, is_async=True)
    seen = caps
    if SEEN is not None:  # captured values that are the same for every key, read while the scores are being multiplied
        columns = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, S)), 0)
        seen = SEEN(place[0], place[1], block * BLOCK_M, columns, caps, place[3])
    scores = warpgroup_mma_wait(1, deps=[scores])
    lse = by_query(lse_buffers.index(buffer), S, BLOCK_M)
    q_idx = gl.expand_dims(opaque(block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, S))), 0)
    found, slope = exponents(
        scores, lse, q_idx, place[2], place, sizes, caps, seen, KIND, SCORE_MOD, MASK_MOD, SLOPE, FOLD_SCALE
    )
    probs = gl.exp2(found)
    rounded = probs.to(q_buffers.dtype)
    probs = sloped(probs, slope, KIND, SLOPE)
    if KIND == PARTIAL and SLOPE != ONE:  # then whether they are 0 is asked again
        probs = opaque(probs)
    d_probs = warpgroup_mma_wait(0, deps=[d_probs])
    delta = by_query(delta_buffers.index(buffer), S, BLOCK_M)
    grad = score_gradient(probs, d_probs, delta, KIND == PARTIAL).to(q_buffers.dtype)
    mine = d_scores.index(turn + GROUP)
    if WANT_DQ:
        mine.store(grad)
    grad = gl.convert_layout(grad, gl.DotOperandLayout(0, sums_of(QK_PAD), k_width=2))
    operand = gl.convert_layout(rounded, gl.DotOperandLayout(0, sums_of(V_PAD), k_width=2))
    dv = warpgroup_mma(operand, d_out, dv, is_async=True)
    if WANT_DQ:
        fence_async_shared()
        barrier_arrive(EXCHANGE + turn + GROUP, 256)
        dq = gl.zeros([64, PART], gl.float32, sums_of(PART))
        dq = issue_part(GROUP, here + GROUP, dq, mine, k_tiles, QK_PAD, BLOCK_M, True)
        barrier_wait(EXCHANGE + turn + 1 - GROUP, 256)
        dq = issue_part(GROUP, here + 1 - GROUP, dq, d_scores.index(turn + 1 - GROUP), k_tiles, QK_PAD, BLOCK_M, False)
    dk = warpgroup_mma(grad, q, dk, is_async=True)
    if WANT_DQ:
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        add_part(DQ_SUMS + ((tile + block).to(gl.int64) * 2 + GROUP) * (64 * PART), dq)
        dk = warpgroup_mma_wait(0, deps=[dk])
    else:
        dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
    barrier_arrive(TILE_FREE + buffer, EVERYBODY)
    return dk, dv


@gluon.jit
def sweep(dk, dv, at, line, EXTRA, own, ring, shared, place, sizes, caps, GROUP: gl.constexpr, KIND: gl.constexpr,
          SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
          V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr, WANT_DQ: gl.constexpr):
    """Every tile of one kind."""
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            dk, dv = step(dk, dv, block, at, own, ring, shared, place, sizes, caps, GROUP, KIND, SCORE_MOD, MASK_MOD, SEEN,
                          SLOPE, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ)  # fmt: skip
            at += 1
    return dk, dv, at


@gluon.jit
def write(RESULT, values, tile, batch, head, first, PAD: gl.constexpr):
    """One warpgroup's rows of a result, by way of a tile in shared memory that nobody reads any more."""
    tile.reshape([KEYS, PAD]).store(values.to(tile.dtype))
    fence_async_shared()
    copy_out(RESULT, [batch, head, first, 0], tile)
    tma.store_wait(0)


@gluon.jit
def finish_column(GROUP: gl.constexpr, DK, DV, own, ring, sums, column, slot, phase, at, table, steps, sizes, caps,
                  SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr,
                  QK_PAD: gl.constexpr, V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr,
                  WANT_DQ: gl.constexpr):
    """64 keys of a column, from their first queries to dk and dv. Where there are no queries those are 0."""
    _, v_tiles, k_ready, v_ready = own
    kv_batch, kv_head, _, first = column
    first += GROUP * KEYS
    kv_idx = gl.expand_dims(first + gl.arange(0, KEYS, gl.SliceLayout(1, sums_of(BLOCK_M))), 1)
    dk = gl.zeros([KEYS, QK_PAD], gl.float32, sums_of(QK_PAD))
    dv = gl.zeros([KEYS, V_PAD], gl.float32, sums_of(V_PAD))
    mbarrier.wait(k_ready, phase)
    mbarrier.wait(v_ready, phase)
    for repeat in range(steps[2]):
        batch, head, pair, line = row_of(repeat, column, table, steps)
        known = caps
        if KNOWN is not None:  # captured values that are the same for every query
            known = KNOWN(batch, head, kv_idx, caps)
        place = (batch, head, kv_idx, known)
        shared = (sums[0], sums[1], pair * steps[3], slot)
        dk, dv, at = sweep(dk, dv, at, line, table[1], own, ring, shared, place, sizes, caps, GROUP, PARTIAL, SCORE_MOD, MASK_MOD,
                           SEEN, SLOPE, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ)  # fmt: skip
        dk, dv, at = sweep(dk, dv, at, line, table[1], own, ring, shared, place, sizes, caps, GROUP, FULL, SCORE_MOD, MASK_MOD,
                           SEEN, SLOPE, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ)  # fmt: skip
    tile = v_tiles.index(2 * slot + GROUP)  # only this warpgroup reads it
    write(DV, dv, tile, kv_batch, kv_head, first, V_PAD)
    together()
    write(DK, dk * sizes[2], tile, kv_batch, kv_head, first, QK_PAD)
    return at


@gluon.jit
def consume(GROUP: gl.constexpr, DK, DV, own, ring, sums, columns, table, steps, sizes, caps, SCORE_MOD: gl.constexpr,
            MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr, QK_PAD: gl.constexpr,
            V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr, WANT_DQ: gl.constexpr, IS_QUEUED: gl.constexpr):
    """One warpgroup: 64 keys of the program's column, or of each one that the copying warp takes."""
    at = gl.to_tensor(0)
    if not IS_QUEUED:
        finish_column(GROUP, DK, DV, own, ring, sums, columns, 0, 0, at, table, steps, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN,
                      SEEN, SLOPE, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ)  # fmt: skip
    else:
        pairs, swizzle = columns[2], columns[3]
        total = pairs * table[2]
        turn = 0
        tile = told(columns, turn)
        while tile < total:
            column = column_of(tile, pairs, swizzle, table, steps)
            slot, phase = buffer_of(turn)
            at = finish_column(GROUP, DK, DV, in_slot(own, slot), ring, sums, column, slot, phase, at, table, steps, sizes, caps,
                               SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE, QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ)  # fmt: skip
            barrier_arrive(COLUMN_FREE + slot, EVERYBODY)
            turn += 1
            tile = told(columns, turn)


@gluon.jit
def attention_backward_hopper(Q, K, V, D_OUT, STATS, DQ_SUMS, DK, DV, ROWS, EXTRA, COUNTER, caps, scale, q_heads, group, repeats,
                              q_len, kv_len, q_tiles, pairs, lines, batch_step, head_step, swizzle, SCORE_MOD: gl.constexpr,
                              MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr, SLOPE: gl.constexpr,
                              QK_PAD: gl.constexpr, V_PAD: gl.constexpr, BLOCK_M: gl.constexpr, FOLD_SCALE: gl.constexpr,
                              WANT_DQ: gl.constexpr):
    """128 keys of one (key batch, key head) pair, tiles of BLOCK_M = 64 or 128 queries; grid: pairs * lines programs, or where there is
    a COUNTER, which is 0 before and after, any number: as many as run at once.

    STATS [2, query pairs * q_tiles * BLOCK_M]: log-sums and deltas of rows. DQ_SUMS, 0 before: for each (batch, query head) pair and
    tile of queries, the parts of both warpgroups in the order of registers."""
    gl.static_assert(QK_PAD == V_PAD, "dk is written by way of the values' tile")
    IS_QUEUED: gl.constexpr = COUNTER is not None
    SLOTS: gl.constexpr = 2 if IS_QUEUED else 1
    table = (ROWS, EXTRA, lines, batch_step, head_step)
    steps = (q_heads, group, repeats, q_tiles)
    if IS_QUEUED:
        next_tile = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        columns = (next_tile, barriers_of(SLOTS), pairs, swizzle)
    else:
        columns = column_of(gl.program_id(0), pairs, swizzle, table, steps)
    k_tiles = gl.allocate_shared_memory(K.dtype, [2 * SLOTS, 1, 1, KEYS, QK_PAD], K.layout)
    v_tiles = gl.allocate_shared_memory(V.dtype, [2 * SLOTS, 1, 1, KEYS, V_PAD], V.layout)
    q_buffers = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, BLOCK_M, QK_PAD], Q.layout)
    d_out_buffers = gl.allocate_shared_memory(D_OUT.dtype, [2, 1, 1, BLOCK_M, V_PAD], D_OUT.layout)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M], STATS.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_M], STATS.layout)
    D_SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], Q.dtype)
    d_scores = gl.allocate_shared_memory(Q.dtype, [4 if WANT_DQ else 1, KEYS, BLOCK_M], D_SCORES)
    k_ready = barriers_of(SLOTS)
    v_ready = barriers_of(SLOTS)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    d_out_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_ready.index(buffer), count=1)
        mbarrier.init(d_out_ready.index(buffer), count=1)
    fence_async_shared()
    own = (k_tiles, v_tiles, k_ready, v_ready)
    ring = (q_buffers, d_out_buffers, lse_buffers, delta_buffers, q_ready, d_out_ready)
    sums = (d_scores, DQ_SUMS)
    sizes = (q_len, kv_len, scale)
    gl.warp_specialize([
        (consume, (0, DK, DV, own, ring, sums, columns, table, steps, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                   QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ, IS_QUEUED)),
        (consume, (1, DK, DV, own, ring, sums, columns, table, steps, sizes, caps, SCORE_MOD, MASK_MOD, KNOWN, SEEN, SLOPE,
                   QK_PAD, V_PAD, BLOCK_M, FOLD_SCALE, WANT_DQ, IS_QUEUED)),
        (produce, (Q, K, V, D_OUT, STATS, COUNTER, own, ring, columns, table, steps, BLOCK_M)),
    ], [4, 1], [240, 24])  # fmt: skip


# ---------------------------------------------------------------- the post-pass
@triton.jit
def hopper_dq_results(DQ_SUMS, DQ, dq_strides, scale, q_heads, q_len, pairs, lines, QK_DIM: tl.constexpr, QK_PAD: tl.constexpr,
                      BLOCK_M: tl.constexpr):
    """dq of a tile of queries from its sums; grid: pairs * lines programs, `lines` tiles of each (batch, query head) pair."""
    SIZE: tl.constexpr = BLOCK_M * QK_PAD
    pair = tl.program_id(0) // lines
    tile = tl.program_id(0) % lines
    sums = tl.load(DQ_SUMS + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE))
    # from the slowest: warpgroup, dim / 8, row / 16, row % 8, dim / 2 % 4, row / 8 % 2, dim % 2
    sums = tl.reshape(sums, [2, SIZE // 1024, 4, 8, 4, 2, 2])
    if BLOCK_M == 64:  # the warpgroup is the upper half of dims
        sums = tl.permute(sums, [2, 5, 3, 0, 1, 4, 6])
    else:  # of rows
        sums = tl.permute(sums, [0, 2, 5, 3, 1, 4, 6])
    sums = tl.reshape(sums, [BLOCK_M, QK_PAD])
    tiles.store_tile(DQ, dq_strides, pair // q_heads, pair % q_heads, tile * BLOCK_M, q_len, sums * scale, BLOCK_M, QK_DIM, QK_PAD)
