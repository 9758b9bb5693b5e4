"""Mask builder: makes the span tables that the attention kernels walk, by formula or by search.

The idea: one program a row of tiles, no list of rectangles. Bounds decide strips of 64 blocks at once; a strip they leave
open is looked at block by block, first by bounds, then at 16 points (one kept and one dropped pair prove a block partial),
then by the sets of values that captured tensors have there; what is still open is evaluated pair by pair, so the answer is
exact. Runs come out in order: a row's states are walked from left to right, and every change of state is one end of a span.
Of a mask that is a union of zones (frontend/zones.py) the ends follow by formula instead, one lane a row.
One launch makes all the tables that a call reads, in tiles of several sizes, by row and by column: a launch takes the host
longer than the device.
"""

import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops

STRIP = tl.constexpr(64)  # blocks decided at once, one a lane; their states fit the bits of an integer
FEW = tl.constexpr(4)  # undecided strips that are looked at by block rather than with sets of values
ROW_INTS = tl.constexpr(12)  # as skeletons/tiles.py reads them
TABLES = tl.constexpr(3)  # of one launch at most
TABLE_INTS = tl.constexpr(5)  # that say how one of them is cut, see `_place`


# ---------------------------------------------------------------- captured tensors over ranges
@triton.jit
def ranges(DATA, TREE, SETS, DONE, length, programs, IS_WIDE: tl.constexpr):
    """(least, greatest) of every 64 elements, of every 4 such groups, and so on up to all of them, and the sets of their values
    modulo 64; one program for 4,096 elements, and the last one to finish makes the levels above those of one program.

    DONE is 0 before, and counts programs."""
    first = tl.program_id(0) * 64
    groups = first + tl.arange(0, 64)
    begin = groups.to(tl.int64) * 64 if IS_WIDE else groups * 64
    kept = tl.minimum(begin[:, None] + tl.arange(0, 64)[None, :], length - 1)  # the last element again: it changes no extreme
    value = tl.load(DATA + kept, mask=kept >= 0, other=0).to(TREE.dtype.element_ty)
    least = tl.min(value, 1)
    greatest = tl.max(value, 1)
    found = tl.zeros((64,), tl.int64)
    for element in range(64):  # a lane for each group: what is loaded again is in the L1 cache
        spot = tl.minimum(begin + element, length - 1)
        one = tl.load(DATA + spot, mask=spot >= 0, other=0).to(tl.int64)
        found = found | (tl.full([], 1, tl.int64) << (one & 63))
    count = tl.maximum((length - 1) // 64, 0) + 1  # an empty tensor has one node too, of 0
    width = leaf_ops.tree_width(length)
    SIZE: tl.constexpr = 64
    for level in tl.static_range(4):  # above the only node of a level comes that node again
        node = (first >> (2 * level)) + tl.arange(0, SIZE >> (2 * level))
        NODES = TREE + 2 * leaf_ops.tree_level(width, 2 * level)
        tl.store(NODES + 2 * node, least, mask=node < count)
        tl.store(NODES + 2 * node + 1, greatest, mask=node < count)
        tl.store(SETS + leaf_ops.tree_level(width, 2 * level) + node, found, mask=node < count)
        if level < 3:
            found = _joined_pairs(_joined_pairs(found, SIZE >> (2 * level + 1)), SIZE >> (2 * level + 2))
            least = tl.min(tl.reshape(least, (SIZE >> (2 * level + 2), 4)), 1)
            greatest = tl.max(tl.reshape(greatest, (SIZE >> (2 * level + 2), 4)), 1)
            count = (count + 3) // 4
    if programs > 1:
        tl.debug_barrier()  # the other threads of this program have stored
        if tl.atomic_add(DONE, 1, sem="acq_rel") == programs - 1:
            _upper_levels(TREE, SETS, length)


@triton.jit
def _joined_pairs(sets, COUNT: tl.constexpr):
    """The unions of neighbours, COUNT of them."""
    left, right = tl.split(tl.reshape(sets, (COUNT, 2)))
    return left | right


@triton.jit
def _upper_levels(TREE, SETS, length):
    """The levels above those of 4,096 elements, one by one."""
    width = leaf_ops.tree_width(length)
    count = (length - 1) // 4096 + 1
    twice_level = count * 0 + 6
    while count > 1:
        tl.debug_barrier()  # reads what other threads wrote
        below = leaf_ops.tree_level(width, twice_level)
        twice_level += 2
        here = leaf_ops.tree_level(width, twice_level)
        BELOW = TREE + 2 * below
        NODES = TREE + 2 * here
        next_count = (count + 3) // 4
        for start in range(0, next_count, 256):
            node = start + tl.arange(0, 256)
            child = tl.minimum(node[:, None] * 4 + tl.arange(0, 4)[None, :], count - 1)
            least = tl.min(tl.load(BELOW + 2 * child), 1)
            greatest = tl.max(tl.load(BELOW + 2 * child + 1), 1)
            tl.store(NODES + 2 * node, least, mask=node < next_count)
            tl.store(NODES + 2 * node + 1, greatest, mask=node < next_count)
            found = tl.zeros((256,), tl.int64)
            for step in tl.static_range(4):
                found = found | tl.load(SETS + below + tl.minimum(node * 4 + step, count - 1))
            tl.store(SETS + here + node, found, mask=node < next_count)
        count = next_count


# ---------------------------------------------------------------- deciding
@triton.jit
def _extent(block, blocks, tile, length):
    """First and last index of a block, of the last one for those behind it; no sum passes the length."""
    lo = tl.minimum(block, blocks - 1) * tile
    return lo, lo + tl.minimum(length - lo, tile) - 1


@triton.jit
def _bounds(b, h, own_lo, own_hi, lo, hi, caps, trees, trusted, by_column, MASK_BOUNDS: tl.constexpr):
    """(must, may) of boxes [own_lo, own_hi] x [lo, hi] as 0 and 1 in the shape of lo; undecided where not trusted."""
    q_lo, kv_lo = _in_order(own_lo + lo * 0, lo, by_column)
    q_hi, kv_hi = _in_order(own_hi + lo * 0, hi, by_column)
    must, may = MASK_BOUNDS(b, h, q_lo, q_hi, kv_lo, kv_hi, caps, trees)
    must = tl.where(must, trusted, 0) + lo * 0
    may = tl.where(may, 1, 1 - trusted) + lo * 0
    return must, may


@triton.jit
def _in_order(own, other, by_column):
    """(queries, keys) of what lies along the table's rows and across them, two vectors of one shape."""
    return tl.where(by_column > 0, other, own), tl.where(by_column > 0, own, other)


@triton.jit
def _kept(b, h, q_idx, kv_idx, caps, MASK_MOD: tl.constexpr):
    """The mask at points, 0 or 1, in the common shape of the indices."""
    return tl.where(MASK_MOD(b, h, q_idx, kv_idx, caps), 1, 0) + q_idx * 0 + kv_idx * 0


@triton.jit
def _evaluate(b, h, own_lo, own_hi, first, last, caps, by_column, MASK_MOD: tl.constexpr):
    """(some pair is kept, some pair is dropped) of one block, pair by pair until both are known."""
    some = first * 0
    hole = first * 0
    row = own_lo
    while (row <= own_hi) & (some + hole < 2):
        own = row + tl.arange(0, 8)
        for start in range(first, last + 1, STRIP):
            other = start + tl.arange(0, STRIP)
            inside = (own <= own_hi)[:, None] & (other <= last)[None, :]
            if by_column > 0:  # not by `_in_order`: what reads at one index alone stays a vector
                kept = _kept(b, h, other[None, :], own[:, None], caps, MASK_MOD)
            else:
                kept = _kept(b, h, own[:, None], other[None, :], caps, MASK_MOD)
            some = tl.maximum(some, tl.max(tl.max(tl.where(inside, kept, 0), 1), 0))
            hole = tl.maximum(hole, tl.max(tl.max(tl.where(inside, 1 - kept, 0), 1), 0))
        row += 8
    return some, hole


@triton.jit
def _strip(strip, b, h, own_lo, own_hi, is_cut, other_tile, other_len, cols, caps, trees, trusted, by_column,
           MASK_MOD: tl.constexpr, MASK_BOUNDS: tl.constexpr, SHARPER_BOUNDS: tl.constexpr):
    """(full, partial) of 64 blocks, each 0 or 1; blocks past the end are neither, one that a length cuts is never full."""
    lane = tl.arange(0, STRIP)
    valid = tl.where(lane < cols - strip * STRIP, 1, 0)
    lo, hi = _extent(strip * STRIP + lane, cols, other_tile, other_len)
    must, may = _bounds(b, h, own_lo, own_hi, lo, hi, caps, trees, trusted, by_column, MASK_BOUNDS)
    some = must * valid
    hole = some * 0
    undecided = may * (1 - must) * valid
    if tl.sum(undecided, 0) > 0:
        todo = undecided
        point = strip * 0
        while (point < 4) & (tl.sum(todo, 0) > 0):  # four queries, the outer ones first, by four keys
            own = lane[:, None] * 0 + own_lo + (own_hi - own_lo) * (3 * point % 4) // 3
            other = lo[:, None] + ((hi - lo)[:, None] * tl.arange(0, 4)[None, :]) // 3
            q_idx, kv_idx = _in_order(own + other * 0, other, by_column)
            kept = _kept(b, h, q_idx, kv_idx, caps, MASK_MOD)
            some = tl.where(undecided > 0, tl.maximum(some, tl.max(kept, 1)), some)
            hole = tl.where(undecided > 0, tl.maximum(hole, 1 - tl.min(kept, 1)), hole)
            todo = undecided * (1 - some * hole)
            point += 1
        if SHARPER_BOUNDS is not None:
            if tl.sum(todo, 0) > 0:
                must, may = _bounds(b, h, own_lo, own_hi, lo, hi, caps, trees, trusted, by_column, SHARPER_BOUNDS)
                some = tl.where(todo > 0, tl.maximum(some, must), some)
                todo = todo * may * (1 - must)
        left = tl.sum(todo, 0)
        while left > 0:
            at = tl.min(tl.where(todo > 0, lane, STRIP), 0)
            first, last = _extent(strip * STRIP + at, cols, other_tile, other_len)
            is_kept, is_dropped = _evaluate(b, h, own_lo, own_hi, first, last, caps, by_column, MASK_MOD)
            some = tl.where(lane == at, is_kept, some)
            hole = tl.where(lane == at, is_dropped, hole)
            todo = tl.where(lane == at, 0, todo)
            left -= 1
    whole = (1 - hole) * (1 - is_cut) * tl.where(hi - lo == other_tile - 1, 1, 0)
    return some * whole, some * (1 - whole)


# ---------------------------------------------------------------- runs
@triton.jit
def _changes(SPOT, states, lane, begin, end, first_block, unit, is_on, ends, start, stop, last, blocks, room):
    """Walks lanes begin .. end of one kind's states: each change is an end of a span, kept in order at SPOT."""
    place = lane.to(tl.int64)
    states = tl.where((lane >= begin) & (lane < end), states, 0)
    packed = tl.sum(states.to(tl.int64) << place, 0)
    before = (packed << 1) | (is_on.to(tl.int64) << begin.to(tl.int64))
    is_on = ((packed >> (end - 1).to(tl.int64)) & 1).to(tl.int32)
    behind = tl.where(end < STRIP, is_on, 0).to(tl.int64) << tl.minimum(end, STRIP - 1).to(tl.int64)  # not looked at yet
    change = packed ^ before ^ behind
    found = leaf_ops.count_bits(change)
    if found > 0:
        here = ((change >> place) & 1).to(tl.int32)
        order = ends + tl.cumsum(here, 0) - here
        position = first_block + lane * unit
        tl.store(SPOT + order, position, mask=(here > 0) & (order < 2 * room))
        start += tl.sum(tl.where((here > 0) & (order == 0), position, 0), 0)
        stop += tl.sum(tl.where((here > 0) & (order == 1), position, 0), 0)
        last = tl.maximum(last, tl.max(tl.where(here > 0, position, 0), 0))
    return is_on, ends + found, start, stop, last, blocks + leaf_ops.count_bits(packed) * unit


@triton.jit
def _closed(SPOT, cols, is_on, ends, stop, last, room):
    """(ends, stop of the first span, the last end) once the row is over: a span that is open reaches its end."""
    if is_on > 0:
        tl.store(SPOT + ends, cols, mask=ends < 2 * room)
        stop = tl.where(ends == 1, cols, stop)
        last = cols
        ends += 1
    return ends, stop, last


@triton.jit
def _place(tables, heads, q_len, kv_len, LINES_AT_ONCE: tl.constexpr):
    """Where a program works: (own_tile, other_tile, own_len, other_len) of its table, along its rows and across them, by_column,
    b, h, its first line, and the number of its first row among those of all tables.

    Each table is told by (q_tile, kv_tile, by_column, its first program, its first row)."""
    program = tl.program_id(0)
    q_tile, kv_tile, by_column, first_program, first_row = tables[0], tables[1], tables[2], tables[3], tables[4]
    for table in tl.static_range(1, TABLES):
        is_later = program >= tables[table * TABLE_INTS + 3]
        q_tile = tl.where(is_later, tables[table * TABLE_INTS], q_tile)
        kv_tile = tl.where(is_later, tables[table * TABLE_INTS + 1], kv_tile)
        by_column = tl.where(is_later, tables[table * TABLE_INTS + 2], by_column)
        first_program = tl.where(is_later, tables[table * TABLE_INTS + 3], first_program)
        first_row = tl.where(is_later, tables[table * TABLE_INTS + 4], first_row)
    own_tile, other_tile = tl.where(by_column > 0, kv_tile, q_tile), tl.where(by_column > 0, q_tile, kv_tile)
    own_len, other_len = tl.where(by_column > 0, kv_len, q_len), tl.where(by_column > 0, q_len, kv_len)
    lines = (own_len - 1) // own_tile + 1
    programs = (lines - 1) // LINES_AT_ONCE + 1  # of a group
    group = (program - first_program) // programs
    line = ((program - first_program) % programs) * LINES_AT_ONCE
    row = first_row + group * lines + line
    return own_tile, other_tile, own_len, other_len, by_column, group // heads, group % heads, line, row


@triton.jit
def _store_row(ROWS, row, rows, line, inside, room, f_blocks, f_spans, f_start, f_stop, p_blocks, p_spans, p_start, p_stop):
    """One row, or a vector of them, and their costs behind all `rows`; first spans are in the row, further ones at its place."""
    ROW = ROWS + row.to(tl.int64) * ROW_INTS
    extra = row * 2 * room
    tl.store(ROWS + rows.to(tl.int64) * ROW_INTS + row, f_blocks + p_blocks, mask=inside)
    tl.store(ROW, line, mask=inside)
    tl.store(ROW + 1, f_blocks, mask=inside)
    tl.store(ROW + 2, p_blocks, mask=inside)
    tl.store(ROW + 3, f_spans, mask=inside)
    tl.store(ROW + 4, p_spans, mask=inside)
    tl.store(ROW + 5, f_start, mask=inside)
    tl.store(ROW + 6, f_stop, mask=inside)
    tl.store(ROW + 7, p_start, mask=inside)
    tl.store(ROW + 8, p_stop, mask=inside)
    tl.store(ROW + 9, extra + 1, mask=inside)
    tl.store(ROW + 10, extra + room + 1, mask=inside)
    tl.store(ROW + 11, row * 0, mask=inside)


# ---------------------------------------------------------------- by search
@triton.jit
def block_map(ROWS, EXTRA, NEEDED, WILD, caps, trees, tables, rows, heads, q_len, kv_len, room, MASK_MOD: tl.constexpr,
              MASK_BOUNDS: tl.constexpr, SHARPER_BOUNDS: tl.constexpr):
    """One unsorted row of one of up to TABLES tables; grid: the rows of all of them, for each group.

    A row of more than `room` spans of a kind becomes one partial span from its first to its last block, which is always
    right, and NEEDED learns how many it has. Where WILD is not 0 integers of the mask may wrap around, and bounds say
    nothing."""
    own_tile, other_tile, own_len, other_len, by_column, b, h, line, row = _place(tables, heads, q_len, kv_len, 1)
    lines = (own_len - 1) // own_tile + 1
    trusted = tl.where(tl.load(WILD) == 0, 1, 0)
    own_lo, own_hi = _extent(line, lines, own_tile, own_len)
    is_cut = tl.where(own_hi - own_lo < own_tile - 1, 1, 0)
    cols = (other_len - 1) // other_tile + 1
    strips = (cols - 1) // STRIP + 1
    lane = tl.arange(0, STRIP)
    F_SPOT = EXTRA + row.to(tl.int64) * (4 * room)
    P_SPOT = F_SPOT + 2 * room
    zero = line * 0
    f_on, f_ends, f_start, f_stop, f_last, f_blocks = zero, zero, zero, zero, zero, zero
    p_on, p_ends, p_start, p_stop, p_last, p_blocks = zero, zero, zero, zero, zero, zero
    for top in range(0, strips, STRIP):
        count = tl.minimum(strips - top, STRIP)
        lo, hi = _extent(top + lane, strips, STRIP * other_tile, other_len)
        must, may = _bounds(b, h, own_lo, own_hi, lo, hi, caps, trees, trusted, by_column, MASK_BOUNDS)
        whole = must * tl.where(hi - lo == STRIP * other_tile - 1, 1, 0)  # one that a length cuts is looked at by block
        undecided = may * (1 - whole)
        if SHARPER_BOUNDS is not None:
            if tl.sum(tl.where(lane < count, undecided, 0), 0) > FEW:
                must, may = _bounds(b, h, own_lo, own_hi, lo, hi, caps, trees, trusted, by_column, SHARPER_BOUNDS)
                whole = tl.maximum(whole, must * tl.where(hi - lo == STRIP * other_tile - 1, 1, 0))
                undecided = undecided * may * (1 - whole)
        here = zero
        while here < count:
            begin = here
            end = tl.min(tl.where((undecided > 0) & (lane >= here) & (lane < count), lane, count), 0)
            full = whole * (1 - is_cut)
            partial = whole * is_cut
            unit = zero + STRIP
            first_block = top * STRIP + zero
            if end == here:  # an undecided strip, block by block
                full, partial = _strip(top + here, b, h, own_lo, own_hi, is_cut, other_tile, other_len, cols, caps, trees,
                                       trusted, by_column, MASK_MOD, MASK_BOUNDS, SHARPER_BOUNDS)
                first_block = (top + here) * STRIP
                unit = zero + 1
                begin = zero
                end = zero + STRIP
                here += 1
            else:
                here = end
            f_on, f_ends, f_start, f_stop, f_last, f_blocks = _changes(F_SPOT, full, lane, begin, end, first_block, unit, f_on,
                                                                       f_ends, f_start, f_stop, f_last, f_blocks, room)
            p_on, p_ends, p_start, p_stop, p_last, p_blocks = _changes(P_SPOT, partial, lane, begin, end, first_block, unit,
                                                                       p_on, p_ends, p_start, p_stop, p_last, p_blocks, room)
    f_ends, f_stop, f_last = _closed(F_SPOT, cols, f_on, f_ends, f_stop, f_last, room)
    p_ends, p_stop, p_last = _closed(P_SPOT, cols, p_on, p_ends, p_stop, p_last, room)
    spans = tl.maximum(f_ends, p_ends) // 2
    if spans > room:
        tl.atomic_max(NEEDED, spans)
        least = tl.minimum(tl.where(f_ends > 0, f_start, cols), tl.where(p_ends > 0, p_start, cols))
        most = tl.maximum(f_last, p_last)
        f_blocks, f_ends, f_start, f_stop = zero, zero, zero, zero
        p_blocks, p_ends, p_start, p_stop = most - least, zero + 2, least, most
    _store_row(ROWS, row, rows, line, line >= 0, room, f_blocks, f_ends // 2, f_start, f_stop, p_blocks, p_ends // 2, p_start,
               p_stop)


# ---------------------------------------------------------------- by formula
@triton.jit
def _run_of(numbers, AT: tl.constexpr, own_lo, own_hi, other_tile, other_len, by_column):
    """The blocks [start, stop) that the zone at a place of `numbers` touches in the rows [own_lo, own_hi]; (0, 0) where none.

    Of a system of bounds on two whole numbers and their difference, what the one may be is exactly one run."""
    swapped = by_column > 0
    own_least = tl.maximum(own_lo, tl.where(swapped, numbers[AT + 2], numbers[AT]))
    own_most = tl.minimum(own_hi, tl.where(swapped, numbers[AT + 3], numbers[AT + 1]))
    near = tl.where(swapped, -numbers[AT + 5], numbers[AT + 4])  # of other - own
    far = tl.where(swapped, -numbers[AT + 4], numbers[AT + 5])
    least = tl.maximum(tl.maximum(tl.where(swapped, numbers[AT], numbers[AT + 2]), 0), own_least + near)
    most = tl.minimum(tl.minimum(tl.where(swapped, numbers[AT + 1], numbers[AT + 3]), other_len - 1), own_most + far)
    some = (own_least <= own_most) & (near <= far) & (least <= most)
    start = tl.where(some, least, 0).to(tl.int32) // other_tile
    stop = tl.where(some, most, 0).to(tl.int32) // other_tile + 1
    return start, tl.where(some, stop, 0)


@triton.jit
def _extended(SPOT, is_on, at, next, spans, end, start, stop, blocks):
    """One kind's spans in a vector of rows, after [at, next) that is, or is not, of that kind."""
    is_new = is_on & (end != at)
    spans += tl.where(is_new, 1, 0)
    tl.store(SPOT + 2 * (spans - 1), at, mask=is_new)
    tl.store(SPOT + 2 * (spans - 1) + 1, next, mask=is_on)
    start = tl.where(is_new & (spans == 1), at, start)
    stop = tl.where(is_on & (spans == 1), next, stop)
    return spans, tl.where(is_on, next, end), start, stop, blocks + tl.where(is_on, next - at, 0)


@triton.jit
def fill(ROWS, EXTRA, caps, tables, rows, heads, q_len, kv_len, room, ZONES: tl.constexpr, KEPT: tl.constexpr,
         DROPPED: tl.constexpr, LINES_AT_ONCE: tl.constexpr):
    """Unsorted rows of the tables of a mask that is a union of zones, as `block_map` makes them; a program makes LINES_AT_ONCE.

    A block in which a zone that is kept and one that is dropped have a pair is partial; so is one that a length cuts."""
    own_tile, other_tile, own_len, other_len, by_column, b, h, first_line, first_row = _place(tables, heads, q_len, kv_len,
                                                                                               LINES_AT_ONCE)
    numbers = ZONES(b, h, caps)
    lane = tl.arange(0, LINES_AT_ONCE)
    lines = (own_len - 1) // own_tile + 1
    inside = first_line + lane < lines
    own_lo, own_hi = _extent(first_line + lane, lines, own_tile, own_len)
    is_cut = own_hi - own_lo < own_tile - 1
    cols = (other_len - 1) // other_tile + 1
    uncut = other_len // other_tile  # blocks that the length does not cut
    F_SPOT = EXTRA + (first_row + lane).to(tl.int64) * (4 * room)
    P_SPOT = F_SPOT + 2 * room
    at = tl.where(inside, lane * 0, cols)
    zero = lane * 0
    f_spans, f_end, f_start, f_stop, f_blocks = zero, zero - 1, zero, zero, zero
    p_spans, p_end, p_start, p_stop, p_blocks = zero, zero - 1, zero, zero, zero
    while tl.min(at, 0) < cols:  # from one end of a run to the next, in which nothing changes
        next = tl.where(at < uncut, uncut, cols)
        kept = zero > 0
        dropped = is_cut | (at >= uncut)
        for zone in tl.static_range(KEPT + DROPPED):
            start, stop = _run_of(numbers, 6 * zone, own_lo, own_hi, other_tile, other_len, by_column)
            here = (start <= at) & (at < stop)
            if zone < KEPT:
                kept = kept | here
            else:
                dropped = dropped | here
            next = tl.where(at < start, tl.minimum(next, start), next)
            next = tl.where(at < stop, tl.minimum(next, stop), next)
        next = tl.where(at < cols, next, at)
        is_on = kept & (at < cols)
        f_spans, f_end, f_start, f_stop, f_blocks = _extended(F_SPOT, is_on & (dropped == 0), at, next, f_spans, f_end, f_start,
                                                              f_stop, f_blocks)
        p_spans, p_end, p_start, p_stop, p_blocks = _extended(P_SPOT, is_on & dropped, at, next, p_spans, p_end, p_start, p_stop,
                                                              p_blocks)
        at = next
    _store_row(ROWS, first_row + lane, rows, first_line + lane, inside, room, f_blocks, f_spans, f_start, f_stop, p_blocks,
               p_spans, p_start, p_stop)


# ---------------------------------------------------------------- the dearest first
@triton.jit
def block_order(UNSORTED, ROWS, NEEDED, TOLD, tables, rows, heads, q_len, kv_len, LINES_AT_ONCE: tl.constexpr,
                OTHERS: tl.constexpr):
    """Rows of one group of a table in falling order of cost, equal ones as they were; a program places LINES_AT_ONCE.

    TOLD gets NEEDED, which is settled by now; it may lie in the host's memory."""
    if tl.program_id(0) == 0:
        tl.store(TOLD, tl.load(NEEDED))
    own_tile, _, own_len, _, _, _, _, first_line, first_row = _place(tables, heads, q_len, kv_len, LINES_AT_ONCE)
    lines = (own_len - 1) // own_tile + 1
    group_row = first_row - first_line
    COSTS = UNSORTED + rows.to(tl.int64) * ROW_INTS + group_row
    own = first_line + tl.arange(0, LINES_AT_ONCE)
    inside = own < lines
    worth = (tl.load(COSTS + own, mask=inside, other=0).to(tl.int64) << 32) - own  # dearer, or as dear and earlier, is more
    before = tl.zeros((LINES_AT_ONCE, OTHERS), tl.int32)  # added up once at the end: each sum over lanes would wait for shuffles
    for start in range(0, lines, OTHERS):
        other = start + tl.arange(0, OTHERS)
        others = (tl.load(COSTS + other, mask=other < lines, other=-1).to(tl.int64) << 32) - other
        before += (others[None, :] > worth[:, None]).to(tl.int32)
    rank = tl.sum(before, 1)
    FROM = UNSORTED + (group_row + own).to(tl.int64) * ROW_INTS
    TO = ROWS + (group_row + rank).to(tl.int64) * ROW_INTS
    for field in tl.static_range(12):
        tl.store(TO + field, tl.load(FROM + field, mask=inside, other=0), mask=inside)
