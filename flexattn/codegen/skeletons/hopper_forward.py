"""Forward attention kernel for Hopper in Gluon: the same arguments, table and results as forward.py, for tiles that all come
and go through tensor descriptors.

The ideas, each for one reason:
  roles      one warp copies tiles of keys and values to shared memory, 2 or 3 warpgroups of 64 queries each work on them: copying
             then costs the warpgroups neither registers nor instructions. Two warpgroups are one role, as a role's code is compiled
             for itself; 12 warps cannot be one, so three are three.
  apart      warps of a role never meet in a loop, so that its warpgroups can take turns. One more warp looks whether tiles have come
             and lets each warpgroup on at a named barrier of its own: where warps look at barriers in shared memory twice in a row,
             the compiler lets all of their role meet in between. For the same reason they write from registers to global memory.
  overlap    a step issues the scores of its tile and the values of the tile before, and takes the softmax of the former while the
             latter are still being multiplied: the tensor cores do not wait for exponentials.
  turns      warpgroups issue their products one after the other, so that one's softmax falls into another's products.
  releases   "this buffer is free" is an arrival at a named barrier, which blocks nobody; an mbarrier's is a barrier of the warpgroup.
  lazy peak  the reference maximum of a row stays until it has grown by 2**8, and a warp none of whose rows moved does not rescale
             its output (IS_LAZY); probabilities of up to 2**8 cost float32 sums and half types no digit.
  queue      a program takes tiles of queries until there are none, by a counter in global memory: long rows first. The step of a tile's
             first keys is also that of the last values of the queries before, which are written behind it: the tensor cores do not
             wait for the end of one tile and the begin of the next.
  bits       which keys of a tile lie within their row's ends is a bit an element, made for all elements of a thread at once.
  foresight  captured values that are the same for every query are read while the scores they go with are being multiplied.
  pairs      probabilities are carried from a step to the next as pairs in a register: halves would be moved about within a turn.
  pages      keys that lie in pages come to the same buffers in pieces, each of one page, whose number the copying warp looks up: the
             other warps know nothing of it. The values a length cuts come from a small copy, as what is behind them may be NaN.
  lane sums  a row's sum stays apart in the four lanes that hold the row and is added up once, after the last tile.

A row's first tile of keys is worked on before the loops, by code with a mask; it is also what a row without tiles looks at, so that
barriers have no case of their own for it. The very first step has no values before it and multiplies what lies in shared memory; nobody
reads the result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flexattn.codegen.skeletons import softmax, tiles
from flexattn.codegen.skeletons.leaf_ops import opaque

_renamed = hasattr(tma, "async_store")  # since Triton 3.7
copy_in = tma.async_load if _renamed else tma.async_copy_global_to_shared
copy_out = tma.async_store if _renamed else tma.async_copy_shared_to_global
together = gl.barrier if _renamed else gl.thread_barrier

QUERIES = gl.constexpr(64)  # of one warpgroup
WARP = gl.constexpr(32)  # threads
FULL = gl.constexpr(0)
PARTIAL = gl.constexpr(1)
FIRST = gl.constexpr(2)
# Named barriers; Triton itself takes one for each role of several warps and one more. Two each of keys, values and queries, one of
# each warpgroup for its turn and one for its values.
K_FREE = gl.constexpr(4)
V_FREE = gl.constexpr(6)
Q_FREE = gl.constexpr(8)
TURN = gl.constexpr(10)
V_CAME = gl.constexpr(13)


# ---------------------------------------------------------------- layouts
@gluon.constexpr_function
def sums_of(columns, rows=64):
    """How a role holds a product: 64 rows a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[rows // 16, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def lane_sums_layout(rows):
    """[rows, 4]: what each of the four lanes of a row has summed."""
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0]], lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]][: 3 if rows == 128 else 2], block_bases=[], shape=[rows, 4],
    )  # fmt: skip


@gluon.constexpr_function
def stored_layout(rows, columns, swaps=2):
    """How a product lies before it is written: eight columns of a row in a lane, in the warps that have it already. Lanes differ in
    columns 2 and 4 of a product, here in 8 and 16; after one of the two swaps the compiler needs no shared memory for the other."""
    lanes, kept = ([[0, 8], [0, 16]], [[0, 2], [0, 4]]) if swaps == 2 else ([[0, 8], [0, 4]], [[0, 2], [0, 16]])
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], *kept, [8, 0], *[[0, c] for c in (32, 64, 128) if c < columns]],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0], [64, 0]][: 3 if rows == 128 else 2],
        block_bases=[], shape=[rows, columns],
    )  # fmt: skip


# ---------------------------------------------------------------- who looks whether tiles have come
@gluon.constexpr_function
def is_told(warpgroups):
    """Whether warpgroups share a role and are told by a warp that looks, or look themselves."""
    return warpgroups == 2


@gluon.constexpr_function
def turn_threads(warpgroups):
    """Threads that come to the barrier of a turn: the one before, the one whose turn it is, and the looking warp."""
    return 256 + 32 if is_told(warpgroups) else 256


# ---------------------------------------------------------------- what Gluon has no word for
@gluon.jit
def barrier_wait(number, THREADS: gl.constexpr):
    """Waits until THREADS threads have come to a named barrier, these included."""
    text: gl.constexpr = f"bar.sync $1, {THREADS}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Comes to a named barrier and goes on."""
    text: gl.constexpr = f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def known_first(correction):
    """A correction that is known before anything written behind this waits for a product: among captured values the assembler would
    wait long before. It keeps waits behind barriers, and a negative correction, which there is none of, would come to one."""
    text: gl.constexpr = "{ .reg .pred p; setp.lt.s32 p, $2, 0; @p bar.arrive 15, 64; mov.b32 $0, $2; mov.b32 $1, $3; }"
    return gl.inline_asm_elementwise(text, "=f,=f,r,r", [correction], dtype=gl.float32, is_pure=False, pack=2)


@builtin
def finished(product, pending, _semantic=None):
    """A product of this warpgroup, once no more than `pending` others are under way. Triton since 3.7 would let all warps of the role
    meet behind it if it were not told that the warpgroup alone waits; 3.6 asks for nothing."""
    product = warpgroup_mma_wait(pending, deps=[product], _semantic=_semantic)
    product.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return product


@gluon.jit
def warpgroup():
    """Which warpgroup of the default role a thread belongs to."""
    text: gl.constexpr = "mov.u32 $0, %tid.x; shr.u32 $0, $0, 7;"
    return gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1)


# A warp's vote lives in a register of the whole kernel, as a tensor's elements cannot become one thread's condition.
@gluon.jit
def declare_vote():
    text: gl.constexpr = ".reg .b32 any_row_moved; mov.b32 any_row_moved, 0; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vote(correction):
    """Whether a correction of this warp differs from 1; gives back the corrections."""
    text: gl.constexpr = (
        "{ .reg .pred a, b; setp.neu.f32 a, $2, 0f3F800000; setp.neu.f32 b, $3, 0f3F800000; or.pred a, a, b; "
        "vote.sync.any.pred a, a, 0xffffffff; selp.b32 any_row_moved, 1, 0, a; mov.b32 $0, $2; mov.b32 $1, $3; }"
    )
    return gl.inline_asm_elementwise(text, "=f,=f,f,f", [correction], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def any_row_moved():
    text: gl.constexpr = "mov.b32 $0, any_row_moved;"
    return gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1) != 0


# ---------------------------------------------------------------- the ring of buffers
@gluon.jit
def buffer_of(at):
    """(buffer, phase of its barrier) of the tile at a position; there are two buffers."""
    return at & 1, (at >> 1) & 1


@gluon.jit
def queries_of(turn, Q_BUFFERS: gl.constexpr):
    """The same of a program's tiles of queries."""
    if Q_BUFFERS == 2:
        return buffer_of(turn)
    else:
        return 0, turn & 1


@gluon.jit
def row_of(tile, table, steps):
    """(batch, head, pointer to the table's row) of a tile of queries."""
    ROWS, _, pairs, lines, swizzle, batch_step, head_step = table
    pair, rank = tiles.locate(tile, pairs, lines, swizzle)
    batch = pair // steps[0]
    head = pair % steps[0]
    return batch, head, tiles.table_line(ROWS, batch, head, rank, lines, batch_step, head_step)


@gluon.jit
def further_span(EXTRA, more, span, start, stop):
    """A span's ends: the first one's came with the row."""
    if span > 0:
        start = gl.load(EXTRA + 2 * (more + span - 1))
        stop = gl.load(EXTRA + 2 * (more + span - 1) + 1)
    return start, stop


@gluon.jit
def pieces_of(block, numbers, length, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, PIECE: gl.constexpr):
    """Where the pieces of a tile of paged keys lie, each in a lane of its own: [32] pages and first rows in them. What lies behind the
    request's length has page -1: no pool has it, and the hardware makes zeros of it."""
    lane = gl.arange(0, WARP, gl.BlockedLayout([1], [32], [1], [0]))
    first = block * BLOCK_N + lane * PIECE
    pages = gl.load(numbers + first // PAGE_SIZE, mask=(lane < BLOCK_N // PIECE) & (first < length), other=-1)
    return pages, first % PAGE_SIZE


@gluon.jit
def of_lane(values, lane):
    """One of [32] numbers of -1 or more."""
    lanes = gl.arange(0, WARP, values.type.layout)
    return gl.max(gl.where(lanes == lane, values, -1), 0)


@gluon.jit
def put(TENSOR, CUT, buffers, ready, place, block, at, FREE: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr,
        THREADS: gl.constexpr):
    """Copies a tile of keys or values to its buffer, once that is free. The second buffer of values is given free before it was ever
    filled: the very first step multiplies the values of no tile.

    In pages, a tile comes in pieces that each lie in one, whose numbers are on their way while the buffer is waited for. A piece that
    the request's length cuts holds anything behind it, and a probability of 0 makes zeros of numbers only: of values it is read
    from CUT."""
    buffer, _ = buffer_of(at)
    batch, head, numbers, length = place
    if PAGE_SIZE > 0:
        PIECE: gl.constexpr = TENSOR.block_type.shape[2]
        pages, rows = pieces_of(block, numbers, length, BLOCK_N, PAGE_SIZE, PIECE)
    if at >= (2 if FREE == K_FREE else 1):
        barrier_wait(FREE + buffer, THREADS)
    if PAGE_SIZE == 0:
        mbarrier.expect(ready.index(buffer), TENSOR.block_type.nbytes)
        copy_in(TENSOR, [batch, head, block * BLOCK_N, 0], ready.index(buffer), buffers.index(buffer))
    else:
        mbarrier.expect(ready.index(buffer), BLOCK_N // PIECE * TENSOR.block_type.nbytes)
        for piece in gl.static_range(BLOCK_N // PIECE):
            page = of_lane(pages, piece)
            row = 0 if PIECE == PAGE_SIZE else of_lane(rows, piece)
            mine = buffers.index(buffer).slice(piece * PIECE, PIECE, dim=2)
            if CUT is None:
                copy_in(TENSOR, [page, head, row, 0], ready.index(buffer), mine)
            else:
                kept = length - (block * BLOCK_N + piece * PIECE)
                if (kept > 0) & (kept < PIECE):
                    copy_in(CUT, [batch, head, 0, 0], ready.index(buffer), mine)
                else:
                    copy_in(TENSOR, [page, head, row, 0], ready.index(buffer), mine)


@gluon.jit
def put_spans(K, V, CUT, ring, line, EXTRA, places, at, older, last, began, KIND: gl.constexpr, BLOCK_N: gl.constexpr,
              PAGE_SIZE: gl.constexpr, THREADS: gl.constexpr):
    """Copies all tiles of one kind, keys and values in the order of their release: values follow two tiles behind."""
    k_buffers, v_buffers, k_ready, v_ready = ring
    k_place, v_place = places
    spans, start, stop, more = tiles.first_span(line, KIND)
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            if at > began + 1:
                put(V, CUT, v_buffers, v_ready, v_place, older, at - 2, V_FREE, BLOCK_N, PAGE_SIZE, THREADS)
            put(K, None, k_buffers, k_ready, k_place, block, at, K_FREE, BLOCK_N, PAGE_SIZE, THREADS)
            older = last
            last = block
            at += 1
    return at, older, last


@gluon.jit
def produce(Q, K, V, paged, COUNTER, q_tiles, buffers, next_tile, ready, table, steps, strides, WARPGROUPS: gl.constexpr,
            Q_BUFFERS: gl.constexpr, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The copying warp. It takes the number of the next tile of queries, and reads its row, before it waits to copy the last values
    of this one."""
    THREADS: gl.constexpr = WARPGROUPS * 128 + WARP
    ROLES: gl.constexpr = q_tiles.shape[0] // Q_BUFFERS
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PAGES, PAGE_STARTS, KV_LENGTHS, V_CUT = paged
    k_buffers, v_buffers = buffers
    q_ready, k_ready, v_ready, next_ready = ready
    ring = (k_buffers, v_buffers, k_ready, v_ready)
    tile = gl.program_id(0)
    total = table[2] * table[3]
    batch, head, line = row_of(tile, table, steps)
    first = gl.load(line) * (WARPGROUPS * QUERIES)
    at = 0
    turn = 0
    while tile < total:
        kv_head = head // steps[1]
        if PAGE_SIZE == 0:
            k_place = (gl.where(strides[0] == 0, 0, batch), kv_head, None, None)
            v_place = (gl.where(strides[1] == 0, 0, batch), kv_head, None, None)
        else:
            k_place = (batch, kv_head, PAGES + gl.load(PAGE_STARTS + batch), gl.load(KV_LENGTHS + batch))
            v_place = k_place
        q_buffer, _ = queries_of(turn, Q_BUFFERS)
        if turn >= Q_BUFFERS:
            barrier_wait(Q_FREE + q_buffer, THREADS)
        mbarrier.expect(q_ready.index(q_buffer), ROLES * Q.block_type.nbytes)
        for role in gl.static_range(ROLES):
            mine = q_buffer * ROLES + role
            copy_in(Q, [batch, head, first + role * Q.block_type.shape[2], 0], q_ready.index(q_buffer), q_tiles.index(mine))
        began = at
        older = 0
        last = 0
        places = (k_place, v_place)
        at, older, last = put_spans(
            K, V, V_CUT, ring, line, table[1], places, at, older, last, began, PARTIAL, BLOCK_N, PAGE_SIZE, THREADS
        )
        at, older, last = put_spans(
            K, V, V_CUT, ring, line, table[1], places, at, older, last, began, FULL, BLOCK_N, PAGE_SIZE, THREADS
        )
        if at == began:  # a row without tiles
            put(K, None, k_buffers, k_ready, k_place, 0, at, K_FREE, BLOCK_N, PAGE_SIZE, THREADS)
            at += 1
        taken = gl.atomic_add(COUNTER, 1, sem="relaxed")
        if at > began + 1:
            put(V, V_CUT, v_buffers, v_ready, v_place, older, at - 2, V_FREE, BLOCK_N, PAGE_SIZE, THREADS)
        if taken == total - 1:  # the last number anybody takes
            gl.store(COUNTER, 0)
        tile = gl.num_programs(0) + taken
        slot, _ = buffer_of(turn)
        next_tile.index(slot).store(gl.full([1], tile, gl.int32, ROW))
        mbarrier.arrive(next_ready.index(slot), count=1)
        batch, head, line = row_of(gl.minimum(tile, total - 1), table, steps)
        first = gl.load(line) * (WARPGROUPS * QUERIES)
        put(V, V_CUT, v_buffers, v_ready, v_place, last, at - 1, V_FREE, BLOCK_N, PAGE_SIZE, THREADS)
        turn += 1


@gluon.jit
def announce(next_tile, ready, table, steps, WARPGROUPS: gl.constexpr, Q_BUFFERS: gl.constexpr):
    """The warp that looks whether tiles have come, in the order in which warpgroups need them, and lets each one on. It steps as often
    as they do: once for each tile of keys that the row counts, once for a row without."""
    q_ready, k_ready, v_ready, next_ready = ready
    tile = gl.program_id(0)
    total = table[2] * table[3]
    at = 0
    turn = 0
    while tile < total:
        _, _, line = row_of(tile, table, steps)
        last = at + gl.maximum(gl.load(line + 1) + gl.load(line + 2), 1) - 1
        q_buffer, q_phase = queries_of(turn, Q_BUFFERS)
        slot, slot_phase = buffer_of(turn)
        mbarrier.wait(q_ready.index(q_buffer), q_phase)
        while at <= last:
            buffer, phase = buffer_of(at)
            before = buffer ^ 1
            mbarrier.wait(k_ready.index(buffer), phase)
            barrier_wait(TURN, turn_threads(WARPGROUPS))
            mbarrier.wait(v_ready.index(before), phase ^ before)
            if at == last:  # written behind the last keys
                mbarrier.wait(next_ready.index(slot), slot_phase)
                tile = gl.max(next_tile.index(slot).load(gl.BlockedLayout([1], [32], [1], [0])), 0)
            values_came(0, at == last)
            for group in gl.static_range(1, WARPGROUPS):
                barrier_wait(TURN + group, turn_threads(WARPGROUPS))
                values_came(group, at == last)
            at += 1
        turn += 1
    buffer, phase = buffer_of(at - 1)
    mbarrier.wait(v_ready.index(buffer), phase)
    for group in gl.static_range(WARPGROUPS):
        barrier_wait(V_CAME + group, 128 + WARP)


@gluon.jit
def values_came(group, is_last):
    """Lets a warpgroup on to its values. That it has gone on is seen by its next turn; behind the last one there may be none."""
    if is_last:
        barrier_wait(V_CAME + group, 128 + WARP)
    else:
        barrier_arrive(V_CAME + group, 128 + WARP)


# ---------------------------------------------------------------- softmax
@gluon.jit
def modified(scores, block, place, caps, seen, KIND: gl.constexpr, SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr,
             BLOCK_N: gl.constexpr, FOLD_SCALE: gl.constexpr):
    """Scores as the user's functions leave them, -inf where a pair does not count. A score_mod takes raw products and gives scores
    in base 2. The FIRST tile may be a partial one, a full one, whose mask is not asked, or the one of a row that has none."""
    ROWS: gl.constexpr = scores.shape[0]
    S: gl.constexpr = sums_of(BLOCK_N, ROWS)
    batch, head, first, scale, _, is_partial, is_full, known, ends, kv_len = place
    if SCORE_MOD is None:
        scores = softmax.natural_scores(scores, scale, FOLD_SCALE)
    if SCORE_MOD is not None or (KIND != FULL and MASK_MOD is not None):
        q_idx = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, S)), 1)
        kv_idx = gl.expand_dims(opaque(block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))), 0)
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores, scale, batch, head, q_idx, kv_idx, caps, known, seen)
    if KIND != FULL:
        lower, upper = ends
        if KIND == FIRST:
            lower = gl.where(is_partial, lower, 0)
            upper = gl.where(is_partial, upper, gl.where(is_full, kv_len, 0))
        asked = gl.full([ROWS, BLOCK_N], 1, gl.int32, S)
        if MASK_MOD is not None:  # what it asks besides
            keep = MASK_MOD(batch, head, q_idx, kv_idx, caps, known, seen)
            if KIND == FIRST:
                keep = keep | is_full
            asked = gl.where(keep, asked, 0)
        scores = within(scores, lower - block * BLOCK_N, upper - block * BLOCK_N, asked, BLOCK_N)
    return scores


@gluon.jit
def within(scores, lower, upper, asked, BLOCK_N: gl.constexpr):
    """Scores [ROWS, BLOCK_N] of the columns lower .. upper of each row [ROWS, 1] where asked is not 0, -inf elsewhere."""
    ROWS: gl.constexpr = scores.shape[0]
    S: gl.constexpr = sums_of(BLOCK_N, ROWS)
    APART: gl.constexpr = [ROWS, BLOCK_N // 8, 4, 2]  # a lane has two of each eight columns
    P: gl.constexpr = gl.reshape(scores, APART).type.layout
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, P))  # [ROWS, 4]
    EACH: gl.constexpr = gl.SliceLayout(1, LANES)
    lane = gl.expand_dims(2 * gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
    begin = elements_before(gl.expand_dims(rows_in(lower, EACH), 1) - lane, BLOCK_N)
    end = elements_before(gl.expand_dims(rows_in(upper, EACH), 1) - lane, BLOCK_N)
    bits = gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [begin, gl.maximum(end - begin, 0)], dtype=gl.int32, is_pure=True, pack=1
    )
    eighth = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, P))))
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, P))))
    at = 2 * gl.expand_dims(gl.expand_dims(gl.expand_dims(eighth, 0), 2), 3)
    at += gl.expand_dims(gl.expand_dims(gl.expand_dims(odd, 0), 1), 2)
    own = gl.expand_dims(gl.expand_dims(bits, 1), 3)
    # in assembly, as otherwise the compiler packs the comparisons of a thread into bits and takes them out again; where a mask asked,
    # its comparison and the bit are one condition to the assembler only if `and.pred` joins them
    text: gl.constexpr = (
        "{ .reg .pred kept, also; .reg .b32 bit; and.b32 bit, $2, $3; setp.ne.b32 kept, bit, 0; setp.ne.b32 also, $4, 0; "
        "and.pred kept, kept, also; selp.f32 $0, $1, 0fFF800000, kept; }"
    )
    operands = [gl.reshape(scores, APART), own, 1 << at, gl.reshape(asked, APART)]
    kept = gl.inline_asm_elementwise(text, "=f,f,r,r,r", operands, dtype=gl.float32, is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(kept, [ROWS, BLOCK_N]), S, assert_trivial=True)


@gluon.jit
def rows_in(values, LAYOUT: gl.constexpr):
    """[ROWS, 1] -> [ROWS], in the same registers."""
    return gl.convert_layout(gl.reshape(values, [values.shape[0]]), LAYOUT, assert_trivial=True)


@gluon.jit
def elements_before(column, BLOCK_N: gl.constexpr):
    """How many elements the first of the four lanes of a row has before a column; for another lane two columns a lane are taken off."""
    whole = (column >> 3) * 2 + gl.minimum(column & 7, 2)
    return gl.minimum(gl.maximum(whole, 0), BLOCK_N // 4)


@gluon.jit
def lane_sums(probs, BLOCK_N: gl.constexpr):
    """[ROWS, 4]: sums of each lane's own elements."""
    ROWS: gl.constexpr = probs.shape[0]
    apart = gl.reshape(probs, [ROWS, BLOCK_N // 8, 4, 2])
    return gl.convert_layout(gl.sum(gl.sum(apart, 3), 1), lane_sums_layout(ROWS), assert_trivial=True)


@gluon.jit
def update(scores, factor, peak, total, top, BLOCK_N: gl.constexpr, IS_LAZY: gl.constexpr, WANT_MAX: gl.constexpr):
    """One step of the online softmax, in base 2: probabilities, correction of what came before, new row state.

    peak: what exponents are taken against; top: the largest score, kept where somebody wants it."""
    highest = gl.max(scores, 1) * factor
    new_peak = gl.maximum(peak, highest)
    if WANT_MAX:
        top = gl.maximum(top, highest)
    if IS_LAZY:
        new_peak = gl.where(new_peak - peak > 8.0, new_peak, peak)
    safe_peak = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = gl.exp2(scores * factor - gl.expand_dims(safe_peak, 1))
    correction = gl.exp2(peak - safe_peak)
    lanes = gl.convert_layout(correction, gl.SliceLayout(1, lane_sums_layout(scores.shape[0])), assert_trivial=True)
    total = total * gl.expand_dims(lanes, 1) + lane_sums(probs, BLOCK_N)
    return probs, correction, new_peak, total, top


@gluon.jit
def corrected(acc, correction, O: gl.constexpr, IS_LAZY: gl.constexpr):
    """The output's sums against a new peak."""
    rows = gl.convert_layout(correction, gl.SliceLayout(1, O))
    if IS_LAZY:
        rows = vote(rows)
        if any_row_moved():
            acc = acc * gl.expand_dims(rows, 1)
    else:
        acc = acc * gl.expand_dims(rows, 1)
    return acc


# ---------------------------------------------------------------- the working warpgroups
@gluon.jit
def issue_scores(q, buffers, buffer, BLOCK_N: gl.constexpr, QK_PAD: gl.constexpr, QK_USED: gl.constexpr):
    """Starts queries times keys over QK_USED dimensions: tiles are a power of two wide, and what is padding need not be multiplied."""
    keys = buffers.index(buffer).reshape([BLOCK_N, QK_PAD])
    ROWS: gl.constexpr = q.shape[0]
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, sums_of(BLOCK_N, ROWS))
    if QK_USED == QK_PAD:
        return warpgroup_mma(q, keys.permute((1, 0)), scores, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = QK_PAD // 2
        scores = warpgroup_mma(
            q.slice(0, HALF, dim=1), keys.slice(0, HALF, dim=1).permute((1, 0)), scores, use_acc=False, is_async=True
        )
        rest = keys.slice(HALF, QK_USED - HALF, dim=1).permute((1, 0))
        return warpgroup_mma(q.slice(HALF, QK_USED - HALF, dim=1), rest, scores, is_async=True)


@gluon.jit
def issue_values(pairs, acc, is_more, buffers, buffer, BLOCK_N: gl.constexpr, V_PAD: gl.constexpr):
    """Starts probabilities times values, the first ones of a tile of queries in place of what `acc` held, all others on top of it.
    Probabilities become an operand only here, as one that is carried around a loop is taken apart and put together again."""
    operand = gl.convert_layout(from_pairs(pairs, buffers.dtype), gl.DotOperandLayout(0, sums_of(V_PAD, pairs.shape[0]), k_width=2))
    return warpgroup_mma(operand, buffers.index(buffer).reshape([BLOCK_N, V_PAD]), acc, use_acc=is_more, is_async=True)


@gluon.jit
def in_pairs(probs, DTYPE: gl.constexpr):
    """[ROWS, BLOCK_N] float32 -> [ROWS, BLOCK_N / 2] int32 of two half numbers each: the assembler moves single halves about."""
    even, odd = gl.split(gl.reshape(probs, [probs.shape[0], probs.shape[1] // 2, 2]))
    text: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def from_pairs(pairs, DTYPE: gl.constexpr):
    """[ROWS, BLOCK_N / 2] int32 -> [ROWS, BLOCK_N] of a half type, in the same registers."""
    even = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.reshape(gl.join(even, odd), [pairs.shape[0], 2 * pairs.shape[1]])


@gluon.jit
def await_values(group, v_ready, buffer, phase, WARPGROUPS: gl.constexpr):
    if is_told(WARPGROUPS):
        barrier_wait(V_CAME + group, 128 + WARP)
    else:
        mbarrier.wait(v_ready.index(buffer), phase)


@gluon.jit
def issue(acc, probs, correction, at, began, q, ring, group, QK_PAD: gl.constexpr, QK_USED: gl.constexpr,
          V_PAD: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, IS_LAZY: gl.constexpr):
    """Starts the scores of the tile at a position, and behind them the values of the tile before, whose queries began at `began`;
    both in this warpgroup's turn."""
    k_buffers, v_buffers, k_ready, v_ready = ring
    buffer, phase = buffer_of(at)
    before = buffer ^ 1
    if not is_told(WARPGROUPS):
        mbarrier.wait(k_ready.index(buffer), phase)
    barrier_wait(TURN + group, turn_threads(WARPGROUPS))
    scores = issue_scores(q, k_buffers, buffer, BLOCK_N, QK_PAD, QK_USED)
    if IS_LAZY:  # behind the scores, which it does not delay
        acc = corrected(acc, correction, sums_of(V_PAD, acc.shape[0]), True)
    await_values(group, v_ready, before, phase ^ before, WARPGROUPS)
    acc = issue_values(probs, acc, at - 1 != began, v_buffers, before, BLOCK_N, V_PAD)
    barrier_arrive(TURN + (group + 1) % WARPGROUPS, turn_threads(WARPGROUPS))
    return scores, acc


@gluon.jit
def take(scores, acc, peak, total, top, at, block, ring, place, caps, KIND: gl.constexpr, SCORE_MOD: gl.constexpr,
         MASK_MOD: gl.constexpr, SEEN: gl.constexpr, V_PAD: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr,
         FOLD_SCALE: gl.constexpr, IS_LAZY: gl.constexpr, WANT_MAX: gl.constexpr):
    """The softmax of a tile, while the values of the tile before are still being multiplied. What comes before a FIRST tile belongs to
    other queries: it is complete then, and the new ones correct nothing of it."""
    THREADS: gl.constexpr = WARPGROUPS * 128 + WARP
    buffer, _ = buffer_of(at)
    seen = caps
    if SEEN is not None:  # captured values that are the same for every query, read while the scores are being multiplied
        columns = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, sums_of(BLOCK_N, peak.shape[0]))), 0)
        seen = SEEN(place[0], place[1], block * BLOCK_N, columns, caps, place[7])
    scores = finished(scores, 1)
    barrier_arrive(K_FREE + buffer, THREADS)
    scores = modified(scores, block, place, caps, seen, KIND, SCORE_MOD, MASK_MOD, BLOCK_N, FOLD_SCALE)
    LAZY: gl.constexpr = IS_LAZY and KIND != FIRST
    probs, correction, peak, total, top = update(scores, place[4], peak, total, top, BLOCK_N, LAZY, WANT_MAX)
    if SEEN is not None and V_PAD > 64:  # elsewhere holding the wait costs what it gives, or more
        correction = known_first(correction)
    acc = finished(acc, 0)
    barrier_arrive(V_FREE + (buffer ^ 1), THREADS)
    if KIND == FIRST:
        correction = gl.full([acc.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, sums_of(BLOCK_N, acc.shape[0])))
    elif not IS_LAZY:
        acc = corrected(acc, correction, sums_of(V_PAD, acc.shape[0]), False)
    return acc, in_pairs(probs, ring[1].dtype), correction, peak, total, top, at + 1


@gluon.jit
def sweep(state, skipped, began, q, ring, line, EXTRA, place, caps, group, KIND: gl.constexpr,
          SCORE_MOD: gl.constexpr, MASK_MOD: gl.constexpr, SEEN: gl.constexpr, QK_PAD: gl.constexpr, QK_USED: gl.constexpr,
          V_PAD: gl.constexpr, BLOCK_N: gl.constexpr, WARPGROUPS: gl.constexpr, FOLD_SCALE: gl.constexpr, IS_LAZY: gl.constexpr,
          WANT_MAX: gl.constexpr):
    """Every tile of one kind but the first `skipped` ones of the first span."""
    acc, probs, correction, peak, total, top, at = state
    spans, start, stop, more = tiles.first_span(line, KIND)
    start += skipped
    for span in range(spans):
        start, stop = further_span(EXTRA, more, span, start, stop)
        for block in range(start, stop):
            scores, acc = issue(
                acc, probs, correction, at, began, q, ring, group, QK_PAD, QK_USED, V_PAD, BLOCK_N, WARPGROUPS, IS_LAZY
            )
            acc, probs, correction, peak, total, top, at = take(
                scores, acc, peak, total, top, at, block, ring, place, caps, KIND, SCORE_MOD, MASK_MOD, SEEN, V_PAD, BLOCK_N,
                WARPGROUPS, FOLD_SCALE, IS_LAZY, WANT_MAX,
            )  # fmt: skip
    return acc, probs, correction, peak, total, top, at


@gluon.jit
def write_rows(peak, total, top, where, LSE, MAX, q_heads, q_len, O: gl.constexpr, WANT_MAX: gl.constexpr):
    """What is known of a role's queries before their last values are added: gives back what the output is multiplied with, 0 for an
    empty row."""
    R: gl.constexpr = peak.type.layout
    batch, head, first = where
    sums = gl.convert_layout(gl.sum(total, 1), R, assert_trivial=True)
    rows = first + gl.arange(0, peak.shape[0], R)
    at_rows = (batch * q_heads + head).to(gl.int64) * q_len + rows
    gl.store(LSE + at_rows, softmax.row_lse(peak, sums, False), mask=rows < q_len)
    if WANT_MAX:
        gl.store(MAX + at_rows, softmax.natural_peak(top, False), mask=rows < q_len)
    return gl.convert_layout(gl.where(sums == 0.0, 0.0, 1.0 / sums), gl.SliceLayout(1, O))


@gluon.jit
def write(acc, inverse, where, target, V_DIM: gl.constexpr, V_PAD: gl.constexpr):
    """The output of a role's queries, no more than 128 columns at a time."""
    inverse = gl.expand_dims(inverse, 1)
    out = gl.where(inverse == 0.0, 0.0, acc * inverse).to(target[1].dtype)
    if V_PAD <= 128:
        write_part(out, where, 0, target, V_DIM, V_PAD)
    else:
        left, right = gl.split(gl.permute(gl.reshape(out, [out.shape[0], 2, 128]), (0, 2, 1)))
        write_part(left, where, 0, target, V_DIM, 128)
        write_part(right, where, 128, target, V_DIM, 128)


@gluon.jit
def write_part(out, where, column, target, V_DIM: gl.constexpr, COLUMNS: gl.constexpr):
    """By way of shared memory, for which the warps of a role meet; from registers where those are two warpgroups."""
    if out.shape[0] == QUERIES:
        batch, head, first = where
        OUT, o_tile, _, _ = target
        tma.store_wait(0)  # of what was written before
        together()
        o_tile.reshape([QUERIES, COLUMNS]).store(out)
        fence_async_shared()
        copy_out(OUT, [batch, head, first, column], o_tile)
    else:
        write_apart(out, where, column, target, V_DIM, COLUMNS)


@gluon.jit
def write_apart(out, where, column, target, V_DIM: gl.constexpr, COLUMNS: gl.constexpr):
    ROWS: gl.constexpr = out.shape[0]
    L: gl.constexpr = stored_layout(ROWS, COLUMNS)
    OUT, _, strides, q_len = target
    batch, head, first = where
    out = gl.convert_layout(gl.convert_layout(out, stored_layout(ROWS, COLUMNS, 1)), L)
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    columns = gl.expand_dims(column + gl.arange(0, COLUMNS, gl.SliceLayout(0, L)), 0)
    start = OUT + gl.to_tensor(batch).to(gl.int64) * strides[0] + gl.to_tensor(head).to(gl.int64) * strides[1]
    start += gl.to_tensor(first).to(gl.int64) * strides[2]
    inside = rows < q_len - first
    if V_DIM < column + COLUMNS:
        inside = inside & (columns < V_DIM)
    gl.store(start + (rows * strides[2] + columns), out, mask=inside)


@gluon.jit
def consume(group, results, memory, table, steps, caps, sizes,
            SCORE_MOD: gl.constexpr, ENDS: gl.constexpr, MASK_MOD: gl.constexpr, KNOWN: gl.constexpr, SEEN: gl.constexpr,
            QK_PAD: gl.constexpr, QK_USED: gl.constexpr, V_DIM: gl.constexpr, V_PAD: gl.constexpr, BLOCK_N: gl.constexpr,
            WARPGROUPS: gl.constexpr, Q_BUFFERS: gl.constexpr, FOLD_SCALE: gl.constexpr, IS_LAZY: gl.constexpr,
            WANT_MAX: gl.constexpr):
    """One role: its queries of each tile, from their first keys to their output; `group` is None where it is two warpgroups, each with
    turns of its own. The step of a tile's first keys is also that of the last values of the tile of queries before, which is written
    behind it; the first one's has nothing before it, the last one's values a step of their own."""
    THREADS: gl.constexpr = WARPGROUPS * 128 + WARP
    ROLES: gl.constexpr = 1 if is_told(WARPGROUPS) else WARPGROUPS
    ROWS: gl.constexpr = WARPGROUPS * QUERIES // ROLES
    S: gl.constexpr = sums_of(BLOCK_N, ROWS)
    O: gl.constexpr = sums_of(V_PAD, ROWS)
    R: gl.constexpr = gl.SliceLayout(1, S)
    OUT, out_strides, LSE, MAX = results
    q_tiles, o_tiles, buffers, next_tile, ready = memory
    q_ready, k_ready, v_ready, next_ready = ready
    v_buffers = buffers[1]
    ring = (buffers[0], v_buffers, k_ready, v_ready)
    EXTRA = table[1]
    q_len, kv_len, scale = sizes
    factor = 1.0 if SCORE_MOD is not None else softmax.factor_of(scale, FOLD_SCALE)
    role = 0 if ROLES == 1 else group
    target = (OUT, o_tiles.index(role), out_strides, q_len)
    if ROLES == 1:
        group = warpgroup()
    if group == WARPGROUPS - 1:  # the first turn is the first group's
        barrier_arrive(TURN, turn_threads(WARPGROUPS))
    tile = gl.program_id(0)
    total_tiles = table[2] * table[3]
    where = (0, 0, 0)
    none = gl.full([ROWS], float("-inf"), gl.float32, R)
    nothing = gl.full([ROWS, 4], 0.0, gl.float32, lane_sums_layout(ROWS))
    acc = gl.zeros([ROWS, V_PAD], gl.float32, O)
    probs = in_pairs(gl.zeros([ROWS, BLOCK_N], gl.float32, S), v_buffers.dtype)
    correction = gl.full([ROWS], 1.0, gl.float32, R)
    inverse = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, O))
    at = 0
    began = -1  # of the queries before
    turn = 0
    while tile < total_tiles:
        # the first keys
        q_buffer, q_phase = queries_of(turn, Q_BUFFERS)
        mine = q_buffer * ROLES + role
        if not is_told(WARPGROUPS):
            mbarrier.wait(q_ready.index(q_buffer), q_phase)
        q = q_tiles.index(mine).reshape([ROWS, QK_PAD])
        scores, acc = issue(
            acc, probs, correction, at, began, q, ring, group, QK_PAD, QK_USED, V_PAD, BLOCK_N, WARPGROUPS, IS_LAZY
        )
        began = at
        batch, head, line = row_of(tile, table, steps)
        first = gl.load(line) * (WARPGROUPS * QUERIES) + role * ROWS
        is_partial = gl.load(line + 2) > 0
        is_full = (gl.load(line + 1) > 0) & (not is_partial)
        q_idx = gl.expand_dims(first + gl.arange(0, ROWS, R), 1)
        known = caps
        if KNOWN is not None:  # captured values that are the same for every key
            known = KNOWN(batch, head, q_idx, caps)
        ends = (q_idx * 0, q_idx * 0 + kv_len)
        if ENDS is not None:  # of the keys before kv_len
            ends = ENDS(batch, head, q_idx, kv_len, caps, known)
        place = (batch, head, first, scale, factor, is_partial, is_full, known, ends, kv_len)
        _, first_full, _, _ = tiles.first_span(line, FULL)
        _, first_partial, _, _ = tiles.first_span(line, PARTIAL)
        block = gl.where(is_partial, first_partial, first_full)
        acc, probs, correction, peak, total, top, at = take(
            scores, acc, none, nothing, none, at, block, ring, place, caps, FIRST, SCORE_MOD, MASK_MOD, SEEN, V_PAD, BLOCK_N,
            WARPGROUPS, FOLD_SCALE, IS_LAZY, WANT_MAX,
        )  # fmt: skip
        if turn > 0:
            write(acc, inverse, where, target, V_DIM, V_PAD)

        # all others
        state = (acc, probs, correction, peak, total, top, at)
        state = sweep(
            state, 1, began, q, ring, line, EXTRA, place, caps, group, PARTIAL, SCORE_MOD, MASK_MOD, SEEN, QK_PAD, QK_USED,
            V_PAD, BLOCK_N, WARPGROUPS, FOLD_SCALE, IS_LAZY, WANT_MAX,
        )  # fmt: skip
        skipped = gl.where(is_partial, 0, 1)
        state = sweep(
            state, skipped, began, q, ring, line, EXTRA, place, caps, group, FULL, SCORE_MOD, MASK_MOD, SEEN, QK_PAD, QK_USED,
            V_PAD, BLOCK_N, WARPGROUPS, FOLD_SCALE, IS_LAZY, WANT_MAX,
        )  # fmt: skip
        acc, probs, correction, peak, total, top, at = state
        where = (batch, head, first)
        inverse = write_rows(peak, total, top, where, LSE, MAX, steps[0], q_len, O, WANT_MAX)

        # the next tile of queries
        slot, slot_phase = buffer_of(turn)
        if not is_told(WARPGROUPS):
            mbarrier.wait(next_ready.index(slot), slot_phase)
        tile = gl.max(next_tile.index(slot).load(gl.BlockedLayout([1], [32], [ROWS // 16], [0])), 0)
        barrier_arrive(Q_FREE + q_buffer, THREADS)
        turn += 1

    # the last values
    if IS_LAZY:
        acc = corrected(acc, correction, O, False)
    buffer, phase = buffer_of(at - 1)
    await_values(group, v_ready, buffer, phase, WARPGROUPS)
    acc = issue_values(probs, acc, at - 1 != began, v_buffers, buffer, BLOCK_N, V_PAD)
    acc = finished(acc, 0)
    write(acc, inverse, where, target, V_DIM, V_PAD)
    if ROLES > 1:
        tma.store_wait(0)


@gluon.jit
def attention_forward_hopper(Q, K, V, PAGES, PAGE_STARTS, KV_LENGTHS, V_CUT, OUT, LSE, MAX, ROWS, EXTRA, COUNTER, q_strides,
                             k_strides, v_strides, out_strides, caps, scale, q_heads, group, q_len, kv_len, pairs, lines,
                             batch_step, head_step, swizzle,
                             SCORE_MOD: gl.constexpr, ENDS: gl.constexpr, MASK_MOD: gl.constexpr, KNOWN: gl.constexpr,
                             SEEN: gl.constexpr, QK_PAD: gl.constexpr, QK_USED: gl.constexpr, V_DIM: gl.constexpr, V_PAD: gl.constexpr,
                             BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, Q_BUFFERS: gl.constexpr, FOLD_SCALE: gl.constexpr,
                             IS_LAZY: gl.constexpr, WANT_MAX: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Tiles of BLOCK_M = 128 or 192 queries of one (batch, head) pair; grid: as many programs as run at once. COUNTER is 0
    before, and 0 after.

    PAGE_SIZE: 0 where keys and values are dense. Else K and V are pages [pages, heads, PAGE_SIZE, dim]; position p of batch entry b
    lies in page PAGES[PAGE_STARTS[b] + p // PAGE_SIZE], those before KV_LENGTHS[b] count, and V_CUT [batch, heads, piece, dim] are
    the values that length cuts a piece of, with zeros behind it."""
    WARPGROUPS: gl.constexpr = BLOCK_M // 64
    ROLES: gl.constexpr = 1 if is_told(WARPGROUPS) else WARPGROUPS
    ROLE_ROWS: gl.constexpr = BLOCK_M // ROLES
    q_tiles = gl.allocate_shared_memory(Q.dtype, [Q_BUFFERS * ROLES, 1, 1, ROLE_ROWS, QK_PAD], Q.layout)
    k_buffers = gl.allocate_shared_memory(K.dtype, [2, 1, 1, BLOCK_N, QK_PAD], K.layout)
    v_buffers = gl.allocate_shared_memory(V.dtype, [2, 1, 1, BLOCK_N, V_PAD], V.layout)
    o_rows: gl.constexpr = QUERIES if ROLES > 1 else 1  # unless it is written from registers
    o_tiles = gl.allocate_shared_memory(V.dtype, [ROLES, 1, 1, o_rows, min(V_PAD, 128)], OUT.layout if ROLES > 1 else V.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_BUFFERS, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    next_tile = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for tile in gl.static_range(Q_BUFFERS):
        mbarrier.init(q_ready.index(tile), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(k_ready.index(buffer), count=1)
        mbarrier.init(v_ready.index(buffer), count=1)
        mbarrier.init(next_ready.index(buffer), count=1)
    fence_async_shared()
    if IS_LAZY:
        declare_vote()
    buffers = (k_buffers, v_buffers)
    ready = (q_ready, k_ready, v_ready, next_ready)
    memory = (q_tiles, o_tiles, buffers, next_tile, ready)
    results = (OUT, out_strides, LSE, MAX)
    table = (ROWS, EXTRA, pairs, lines, swizzle, batch_step, head_step)
    steps = (q_heads, group)
    sizes = (q_len, kv_len, scale)
    strides = (k_strides[0], v_strides[0])
    paged = (PAGES, PAGE_STARTS, KV_LENGTHS, V_CUT)
    # registers of a thread: the copying and the looking warp 24, the others what is left
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (consume, (None, results, memory, table, steps, caps, sizes, SCORE_MOD, ENDS, MASK_MOD, KNOWN, SEEN, QK_PAD,
                       QK_USED, V_DIM, V_PAD, BLOCK_N, WARPGROUPS, Q_BUFFERS, FOLD_SCALE, IS_LAZY, WANT_MAX)),
            (produce, (Q, K, V, paged, COUNTER, q_tiles, buffers, next_tile, ready, table, steps, strides, WARPGROUPS, Q_BUFFERS,
                       BLOCK_N, PAGE_SIZE)),
            (announce, (next_tile, ready, table, steps, WARPGROUPS, Q_BUFFERS)),
        ], [1, 1], [24, 24])  # fmt: skip
    else:
        gl.static_assert(WARPGROUPS == 3)
        gl.warp_specialize([
            (consume, (0, results, memory, table, steps, caps, sizes, SCORE_MOD, ENDS, MASK_MOD, KNOWN, SEEN, QK_PAD,
                       QK_USED, V_DIM, V_PAD, BLOCK_N, WARPGROUPS, Q_BUFFERS, FOLD_SCALE, IS_LAZY, WANT_MAX)),
            (consume, (1, results, memory, table, steps, caps, sizes, SCORE_MOD, ENDS, MASK_MOD, KNOWN, SEEN, QK_PAD,
                       QK_USED, V_DIM, V_PAD, BLOCK_N, WARPGROUPS, Q_BUFFERS, FOLD_SCALE, IS_LAZY, WANT_MAX)),
            (consume, (2, results, memory, table, steps, caps, sizes, SCORE_MOD, ENDS, MASK_MOD, KNOWN, SEEN, QK_PAD,
                       QK_USED, V_DIM, V_PAD, BLOCK_N, WARPGROUPS, Q_BUFFERS, FOLD_SCALE, IS_LAZY, WANT_MAX)),
            (produce, (Q, K, V, paged, COUNTER, q_tiles, buffers, next_tile, ready, table, steps, strides, WARPGROUPS, Q_BUFFERS,
                       BLOCK_N, PAGE_SIZE)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
