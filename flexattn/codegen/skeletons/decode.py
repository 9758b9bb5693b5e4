"""Decode kernels: few queries against many keys, dense or in pages; read no table of tiles, make the output from sums over parts.

The idea: all query heads that share a key head lie in one tile of rows, so that K and V are read once, and the keys are split over
programs. A program takes every `splits`-th of the tiles that the mask may keep: wherever kept keys lie, all programs get as many.
Which of its tiles are kept and which are partial it finds by itself, 64 at a time as the bits of two integers: by formula where the
mask is a union of zones (frontend/zones.py), else by asking the mask, within such zones as its conditions have; in both cases before K
and V are read. So nothing is built for a mask, and nothing again for another length. `merge_splits` adds the sums of all splits.
"""

import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops, softmax, tiles

STRIP = tl.constexpr(64)  # tiles decided at once: the bits of an integer
ZONE_ENDS = tl.constexpr(6)  # numbers of a zone
IN_PLACE = tl.constexpr(64)  # rows of queries, from which on products read them where they lie in shared memory
MERGED_AT_ONCE = tl.constexpr(8192)  # numbers of parts on their way to a program that merges


# ---------------------------------------------------------------- bits
@triton.jit
def _below(count):
    """A set of 64 bits: those before `count`, which may lie outside of them."""
    count = tl.minimum(tl.maximum(count, 0), 64).to(tl.int64)
    one = tl.full([], 1, tl.int64)
    return tl.where(count == 64, -one, (one << tl.minimum(count, 63)) - 1)


@triton.jit
def _lowest(bits):
    """The number of the lowest bit that is set: the exponent of that bit as a float."""
    low = (bits & -bits).to(tl.float32)
    return ((low.to(tl.int32, bitcast=True) >> 23) & 255) - 127


# ---------------------------------------------------------------- which tiles
@triton.jit
def _run_of(ends, AT: tl.constexpr, q_lo, q_hi, kv_len, BLOCK_N: tl.constexpr, BY_HEAD: tl.constexpr):
    """The tiles [start, stop) of keys that a zone touches in the queries q_lo .. q_hi; (0, 0) where none. BY_HEAD: in any of the heads,
    whose zones lie along the rows."""
    q_least = tl.maximum(q_lo, ends[AT])
    q_most = tl.minimum(q_hi, ends[AT + 1])
    least = tl.maximum(tl.maximum(ends[AT + 2], 0), q_least + ends[AT + 4])
    most = tl.minimum(tl.minimum(ends[AT + 3], kv_len - 1), q_most + ends[AT + 5])
    some = (q_least <= q_most) & (ends[AT + 4] <= ends[AT + 5]) & (least <= most)
    if BY_HEAD:
        least = tl.min(tl.where(some, least, kv_len), 0)
        most = tl.max(tl.where(some, most, -1), 0)
        some = least <= most
    start = tl.where(some, least, 0).to(tl.int32) // BLOCK_N
    stop = tl.where(some, most, 0).to(tl.int32) // BLOCK_N + 1
    return start, tl.where(some, stop, 0)


@triton.jit
def _place_of(tile, first, splits):
    """How many of a program's tiles first, first + splits, ... lie before a tile."""
    return (tl.maximum(tile - first, 0) + splits - 1) // splits


@triton.jit
def _hull(ends, q_lo, q_hi, kv_len, BLOCK_N: tl.constexpr, KEPT: tl.constexpr, BY_HEAD: tl.constexpr):
    """The first tile that a kept zone touches, and the one behind the last."""
    first, last = kv_len * 0 + 2147483647, kv_len * 0
    for zone in tl.static_range(KEPT):
        start, stop = _run_of(ends, ZONE_ENDS * zone, q_lo, q_hi, kv_len, BLOCK_N, BY_HEAD)
        first = tl.where(start < stop, tl.minimum(first, start), first)
        last = tl.maximum(last, stop)
    return tl.minimum(first, last), last


@triton.jit
def _cut(begin, own, first, splits, kv_len, BLOCK_N: tl.constexpr):
    """The last of a program's tiles, if the length cuts it."""
    last = first + (own - 1) * splits
    return tl.where((last + 1) * BLOCK_N > kv_len, _below(own - begin) & ~_below(own - 1 - begin), 0)


@triton.jit
def _by_formula(ends, begin, own, first, splits, q_lo, q_hi, kv_len, BLOCK_N: tl.constexpr, KEPT: tl.constexpr,
                DROPPED: tl.constexpr, BY_HEAD: tl.constexpr):
    """(kept, partial) of a program's tiles from the begin-th on: those with a pair that a zone keeps, and those with one that a zone
    drops or that the length cuts."""
    kept = tl.full([], 0, tl.int64)
    partial = _cut(begin, own, first, splits, kv_len, BLOCK_N)
    for zone in tl.static_range(KEPT + DROPPED):
        start, stop = _run_of(ends, ZONE_ENDS * zone, q_lo, q_hi, kv_len, BLOCK_N, BY_HEAD)
        run = _below(_place_of(stop, first, splits) - begin) & ~_below(_place_of(start, first, splits) - begin)
        if zone < KEPT:
            kept = kept | run
        else:
            partial = partial | run
    return kept, partial


@triton.jit
def _by_asking(begin, own, first, splits, batch, head, q_idx, q_len, kv_len, caps, MASK_MOD: tl.constexpr, READS: tl.constexpr,
               BLOCK_N: tl.constexpr, ASKED: tl.constexpr):
    """The same by every pair of some queries, ASKED tiles together: (some pair is kept, some is dropped)."""
    kept = tl.full([], 0, tl.int64)
    partial = tl.full([], 0, tl.int64)
    column = tl.arange(0, ASKED * BLOCK_N)
    place = tl.arange(0, ASKED)
    for at in range(begin, tl.minimum(own, begin + STRIP), ASKED):
        tile = first + (at + column // BLOCK_N) * splits
        kv_idx = (tile * BLOCK_N + column % BLOCK_N)[None, :]
        known = caps if READS is None else caps + READS(batch, head, q_idx, kv_idx, caps)
        keep = tiles.keep_tile(batch, head, q_idx, kv_idx, q_len, kv_len, known, MASK_MOD).to(tl.int32)  # [M, ASKED * N]
        some = tl.max(tl.reshape(tl.max(keep, 0), (ASKED, BLOCK_N)), 1)
        hole = 1 - tl.min(tl.reshape(tl.min(keep, 0), (ASKED, BLOCK_N)), 1)
        mine = at + place < own
        kept = kept | tl.sum(tl.where(mine, some, 0).to(tl.int64) << (at - begin + place).to(tl.int64), 0)
        partial = partial | tl.sum(tl.where(mine, hole, 0).to(tl.int64) << (at - begin + place).to(tl.int64), 0)
    return kept, partial


# ---------------------------------------------------------------- sums over them
@triton.jit
def _begin(place, IS_CHAINED: tl.constexpr):
    """To be called before anything is read or written. IS_CHAINED: the program is started while the kernel before it may still run,
    so that nobody waits for a launch; here it waits for that kernel's end, and lets the next one be started in the same way.

    `place` is not negative; the compiler does not know it, or it would wait before the place is computed."""
    if IS_CHAINED:
        if place >= 0:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _load_rows(TENSOR, strides, batch, head, q_idx, FIRST: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, STEP: tl.constexpr):
    """Rows of any heads [M, 1] and queries [M, 1] of a [batch, heads, length, DIM] tensor, from dimension FIRST on, of wider ones the
    beginning -> a tuple of STEP tiles [M, PAD // STEP]: all, or the even and the odd dimensions."""
    start = TENSOR + batch.to(tl.int64) * strides[0]
    parts = ()
    for n in tl.static_range(STEP):
        dims = (FIRST + n + STEP * tl.arange(0, PAD // STEP))[None, :]
        pointers = start + (head.to(tl.int64) * strides[1] + q_idx * strides[2]) + dims
        if DIM < FIRST + PAD:
            parts = parts + (tl.load(pointers, mask=(dims < DIM) & (q_idx >= 0), other=0.0),)
        else:
            parts = parts + (tl.load(pointers),)
    return parts


@triton.jit
def _in_half(parts):
    """Parts of rows [M, D] in bfloat16 -> (the same in float16, units [M, 1] in which they count). A unit is the power of two that
    leaves a row's largest number at 256 to 512: what is small enough to be rounded then is nothing beside that number."""
    largest = tl.zeros([parts[0].shape[0]], tl.float32)
    for n in tl.static_range(len(parts)):
        largest = tl.maximum(largest, tl.max(tl.abs(parts[n].to(tl.float32)), 1))
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 9)
    unit = ((exponent - 8) << 23).to(tl.float32, bitcast=True)[:, None]
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    halves = ()
    for n in tl.static_range(len(parts)):
        halves = halves + ((parts[n].to(tl.float32) * inverse).to(tl.float16),)
    return halves, unit


@triton.jit
def _scale_of(SCALE, head, SCALES: tl.constexpr):
    """The factor of a head's keys or values: 1 (SCALES 0), that of all heads (1), or its own (2)."""
    if SCALES == 0:
        return 1.0
    else:
        return tl.load(SCALE + (head if SCALES > 1 else 0))


@triton.jit
def _awaited(parts, kept):
    """The same rows of queries, for which the compiler waits here and not before. Those that lie in place stay there: they would take
    as many registers as sums do."""
    if parts[0].shape[0] >= IN_PLACE:
        return parts
    else:
        waited = ()
        for n in tl.static_range(len(parts)):
            waited = waited + (tl.where(kept != 0, parts[n], tl.zeros_like(parts[n])),)
        return waited


@triton.jit
def _add_scores(scores, q, FIRST: tl.constexpr, k, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """scores [M, N] and the product of queries, from their part FIRST on, with the parts of keys."""
    for n in tl.static_range(len(k)):
        scores = softmax.dot(q[FIRST + n], tl.trans(k[n]), scores, PRECISION, UPCAST)
    return scores


@triton.jit
def _add_values(sums, probs, correction, v, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Corrected sums and what probabilities [M, N] make of values, part by part [M, V_PAD // STEP]."""
    added = ()
    for n in tl.static_range(len(v)):
        added = added + (softmax.dot(probs.to(v[n].dtype), v[n], sums[n] * correction[:, None], PRECISION, UPCAST),)
    return added


@triton.jit
def _sweep(sums, peak, total, bits, q, K, V, PAGES, first, splits, k_strides, v_strides, caps, scale, factor, batch, kv_head,
           head, q_idx, q_len, kv_len, KIND: tl.constexpr, SCORE_MOD: tl.constexpr, MASK_MOD: tl.constexpr, READS: tl.constexpr,
           QK_DIM: tl.constexpr, V_DIM: tl.constexpr, QK_PAD: tl.constexpr, QK_REST: tl.constexpr, V_PAD: tl.constexpr,
           V_IN_K: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, FOLD_SCALE: tl.constexpr, PRECISION: tl.constexpr,
           IS_EXACT: tl.constexpr, UPCAST: tl.constexpr):
    """Adds the tiles of a program whose bits are set to its running rows."""
    for _tile in tl.range(0, leaf_ops.count_bits(bits)):
        start = (first + _lowest(bits) * splits) * BLOCK_N
        bits = bits & (bits - 1)
        known = tiles.with_reads(batch, head, q_idx, start, caps, READS, BLOCK_N)
        kv_idx = (start + tl.arange(0, BLOCK_N))[None, :]
        wanted = None
        if KIND == tiles.PARTIAL:
            keep = tiles.keep_tile(batch, head, q_idx, kv_idx, q_len, kv_len, known, MASK_MOD)
            wanted = tl.max(keep.to(tl.int32), 0) != 0  # what nobody keeps may hold anything, and 0 times NaN is NaN
        place = batch
        if PAGE_SIZE > 0:
            place = tiles.pages_of(PAGES, start, wanted, BLOCK_N, PAGE_SIZE)
        k = tiles.load_keys(K, k_strides, place, kv_head, start, wanted, BLOCK_N, 0, QK_DIM, QK_PAD, PAGE_SIZE, UPCAST)  # [N, QK]
        scores = _add_scores(None, q, 0, k, PRECISION, UPCAST)  # [M, N]
        if QK_REST > 0:
            rest = tiles.load_keys(K, k_strides, place, kv_head, start, wanted, BLOCK_N, QK_PAD, QK_DIM, QK_REST, PAGE_SIZE, UPCAST)
            scores = _add_scores(scores, q, len(k), rest, PRECISION, UPCAST)
        scores = softmax.natural_scores(scores, scale, FOLD_SCALE)
        if SCORE_MOD is not None:
            scores = SCORE_MOD(scores, batch, head, q_idx, kv_idx, known)
        if KIND == tiles.PARTIAL:
            scores = tl.where(keep, scores, float("-inf"))
        if V_IN_K:
            v = k
        else:
            v = tiles.load_keys(V, v_strides, place, kv_head, start, wanted, BLOCK_N, 0, V_DIM, V_PAD, PAGE_SIZE, UPCAST)  # [N, V]
        probs, correction, peak, total = softmax.online_update(scores, factor, peak, total, IS_EXACT)
        sums = _add_values(sums, probs, correction, v, PRECISION, UPCAST)
    return sums, peak, total


@triton.jit
def _quotient(acc, total, IS_EXACT: tl.constexpr):
    """acc / total; an empty row is 0 / 1."""
    safe = tl.where(total == 0.0, 1.0, total)
    if IS_EXACT:
        return tl.div_rn(acc, safe)
    else:
        return acc * (1.0 / safe)


@triton.jit
def _write(OUT, LSE, MAX, out_strides, acc, peak, total, batch, kv_head, row, rows, q_heads, group, q_len, V_DIM: tl.constexpr,
           WANT_MAX: tl.constexpr, IS_EXACT: tl.constexpr):
    """Results of rows `row` [R] of a key head, those before `rows`, from their sums acc [R, V_PAD]."""
    dims = tl.arange(0, acc.shape[1])[None, :]
    real = tl.minimum(row, rows - 1)
    head, q_idx = kv_head * group + real % group, real // group
    inside = (row < rows)[:, None]
    if V_DIM < acc.shape[1]:
        inside = inside & (dims < V_DIM)
    start = OUT + batch.to(tl.int64) * out_strides[0]
    pointers = start + (head.to(tl.int64) * out_strides[1] + q_idx.to(tl.int64) * out_strides[2])[:, None] + dims
    tl.store(pointers, _quotient(acc, total[:, None], IS_EXACT).to(OUT.dtype.element_ty), mask=inside)
    spot = (batch * q_heads + head).to(tl.int64) * q_len + q_idx
    tl.store(LSE + spot, softmax.row_lse(peak, total, IS_EXACT), mask=row < rows)
    if WANT_MAX:
        tl.store(MAX + spot, softmax.natural_peak(peak, IS_EXACT), mask=row < rows)


@triton.jit
def attention_decode(Q, K, V, K_SCALE, V_SCALE, PAGES, PAGE_STARTS, OUT, LSE, MAX, PARTS, q_strides, k_strides, v_strides,
                     out_strides, caps, scale, q_heads, group, q_len, kv_len, lines, splits, SCORE_MOD: tl.constexpr,
                     MASK_MOD: tl.constexpr, READS: tl.constexpr, ZONES: tl.constexpr, BY_FORMULA: tl.constexpr,
                     KEPT: tl.constexpr, DROPPED: tl.constexpr, BY_HEAD: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr,
                     QK_PAD: tl.constexpr, QK_REST: tl.constexpr, V_PAD: tl.constexpr, V_IN_K: tl.constexpr, BLOCK_M: tl.constexpr,
                     BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, ASKED: tl.constexpr, ASKED_ALONE: tl.constexpr,
                     OF_HEADS: tl.constexpr, FOLD_SCALE: tl.constexpr, WANT_MAX: tl.constexpr, IS_CHAINED: tl.constexpr,
                     K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """One split of the keys for one tile of the rows that share a key head; grid: (batch, key head) pairs * splits * lines, where
    `lines` is how many tiles those rows fill. Row n is query n // group of the group's head n % group.

    Of several splits each gives PARTS its sums [BLOCK_M, V_PAD], then the rows' peaks and totals, which `merge_splits` adds up; a
    single one writes results.

    Wide queries and keys come in two parts, QK_PAD dimensions and the QK_REST behind them. V_IN_K: values are the first part of keys,
    which is read once for both products.

    Keys and values of 8 bits are read as they are, and multiplied in float16, even and odd dimensions apart. Their factors K_SCALE and
    V_SCALE, and the unit of queries that were bfloat16, go into the scale of scores and the sums: no number read is multiplied."""
    line = tl.program_id(0) % lines
    split = tl.program_id(0) // lines % splits
    pair = tl.program_id(0) // (lines * splits)
    kv_heads = q_heads // group
    batch = pair // kv_heads
    kv_head = pair % kv_heads
    rows = q_len * group
    row = line * BLOCK_M + tl.arange(0, BLOCK_M)
    real = tl.minimum(row, rows - 1)  # behind the last row it comes again, which keeps nothing more
    q_idx = (real // group)[:, None]
    head = (kv_head * group + real % group)[:, None]
    factor = softmax.factor_of(scale, FOLD_SCALE)
    IS_EXACT: tl.constexpr = Q.dtype.element_ty == tl.float32
    STEP: tl.constexpr = tiles.parts_of(K.dtype.element_ty)
    sums = ()
    for _part in tl.static_range(STEP):
        sums = sums + (tl.zeros([BLOCK_M, V_PAD // STEP], tl.float32),)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    q_lo = line * BLOCK_M // group
    q_hi = (tl.minimum(line * BLOCK_M + BLOCK_M, rows) - 1) // group
    first = split
    stop = (kv_len - 1) // BLOCK_N + 1
    if ZONES is None:
        own = _place_of(stop, first, splits)
        _begin(own, IS_CHAINED)
    else:
        _begin(pair, IS_CHAINED)
        ends = ZONES(batch, kv_head * group + real % group if BY_HEAD else kv_head, caps)
        q_least = q_lo + real * 0 if BY_HEAD else q_lo
        begin, stop = _hull(ends, q_least, q_hi, kv_len, BLOCK_N, KEPT, BY_HEAD)
        first = begin + split
        own = _place_of(stop, first, splits)
    if PAGE_SIZE > 0:
        PAGES += tl.load(PAGE_STARTS + batch)
    q = _load_rows(Q, q_strides, batch, head, q_idx, 0, QK_DIM, QK_PAD, STEP)
    if QK_REST > 0:
        q = q + _load_rows(Q, q_strides, batch, head, q_idx, QK_PAD, QK_DIM, QK_REST, STEP)
    if STEP > 1:
        scale *= _scale_of(K_SCALE, kv_head, K_SCALES)
        if Q.dtype.element_ty == tl.bfloat16:
            q, unit = _in_half(q)
            scale *= unit
    is_alone = (q_lo == q_hi) & (1 - OF_HEADS > 0)  # one query is asked for in place of all rows
    for at in range(0, own, STRIP):
        if BY_FORMULA:
            kept, partial = _by_formula(ends, at, own, first, splits, q_least, q_hi, kv_len, BLOCK_N, KEPT, DROPPED, BY_HEAD)
        elif MASK_MOD is not None:
            if is_alone:
                kept, partial = _by_asking(at, own, first, splits, batch, kv_head * group, tl.full([1, 1], 0, tl.int32) + q_lo,
                                           q_len, kv_len, caps, MASK_MOD, READS, BLOCK_N, ASKED_ALONE)
            else:
                kept, partial = _by_asking(at, own, first, splits, batch, head, q_idx, q_len, kv_len, caps, MASK_MOD, READS,
                                           BLOCK_N, ASKED)
        else:
            kept = _below(own - at)
            partial = _cut(at, own, first, splits, kv_len, BLOCK_N)
        queries = _awaited(q, kept)
        sums, peak, total = _sweep(sums, peak, total, kept & ~partial, queries, K, V, PAGES, first + at * splits, splits, k_strides,
                                   v_strides, caps, scale, factor, batch, kv_head, head, q_idx, q_len, kv_len, tiles.FULL,
                                   SCORE_MOD, MASK_MOD, READS, QK_DIM, V_DIM, QK_PAD, QK_REST, V_PAD, V_IN_K, BLOCK_N, PAGE_SIZE,
                                   FOLD_SCALE, PRECISION, IS_EXACT, UPCAST)
        sums, peak, total = _sweep(sums, peak, total, kept & partial, queries, K, V, PAGES, first + at * splits, splits, k_strides,
                                   v_strides, caps, scale, factor, batch, kv_head, head, q_idx, q_len, kv_len, tiles.PARTIAL,
                                   SCORE_MOD, MASK_MOD, READS, QK_DIM, V_DIM, QK_PAD, QK_REST, V_PAD, V_IN_K, BLOCK_N, PAGE_SIZE,
                                   FOLD_SCALE, PRECISION, IS_EXACT, UPCAST)
    acc = sums[0]
    if STEP > 1:
        acc = tl.reshape(tl.join(sums[0], sums[1]), (BLOCK_M, V_PAD)) * _scale_of(V_SCALE, kv_head, V_SCALES)
    if splits > 1:
        tile = pair * lines + line
        PART = PARTS + (tile.to(tl.int64) * splits + split) * (BLOCK_M * (V_PAD + 2))
        spots = tl.arange(0, BLOCK_M)
        tl.store(PART + (spots[:, None] * V_PAD + tl.arange(0, V_PAD)[None, :]), acc, mask=(row < rows)[:, None])
        tl.store(PART + BLOCK_M * V_PAD + spots, peak, mask=row < rows)
        tl.store(PART + BLOCK_M * (V_PAD + 1) + spots, total, mask=row < rows)
    else:
        _write(OUT, LSE, MAX, out_strides, acc, peak, total, batch, kv_head, row, rows, q_heads, group, q_len, V_DIM, WANT_MAX,
               IS_EXACT)


@triton.jit
def merge_splits(OUT, LSE, MAX, PARTS, out_strides, q_heads, group, q_len, lines, splits, V_DIM: tl.constexpr,
                 V_PAD: tl.constexpr, BLOCK_M: tl.constexpr, WANT_MAX: tl.constexpr, IS_CHAINED: tl.constexpr):
    """One row of the results from its sums over all splits; grid: (batch, key head) pairs * rows."""
    PART: tl.constexpr = BLOCK_M * (V_PAD + 2)
    AT_ONCE: tl.constexpr = min(max(MERGED_AT_ONCE // V_PAD, 1), 32)
    IS_EXACT: tl.constexpr = OUT.dtype.element_ty == tl.float32
    UNIT: tl.constexpr = softmax.LOG2E if IS_EXACT else 1.0
    rows = q_len * group
    pair = tl.program_id(0) // rows
    row = tl.program_id(0) % rows
    kv_heads = q_heads // group
    _begin(row, IS_CHAINED)
    first = PARTS + (pair * lines + row // BLOCK_M).to(tl.int64) * splits * PART
    spot = row % BLOCK_M
    dims = tl.arange(0, V_PAD)[None, :]
    lane = tl.arange(0, AT_ONCE)
    acc = tl.zeros([V_PAD], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    for start in range(0, splits, AT_ONCE):
        inside = start + lane < splits
        part = first + (start + lane) * PART
        peaks = tl.load(part + (BLOCK_M * V_PAD + spot), mask=inside, other=float("-inf"))
        totals = tl.load(part + (BLOCK_M * (V_PAD + 1) + spot), mask=inside, other=0.0)
        sums = tl.load(part[:, None] + (spot * V_PAD + dims), mask=inside[:, None], other=0.0)  # [splits, V]
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = softmax.power_of_two((peaks - safe) * UNIT, IS_EXACT)  # 0 of a split without a key
        correction = softmax.power_of_two((peak - safe) * UNIT, IS_EXACT)
        acc = acc * correction + tl.sum(sums * weights[:, None], 0)
        total = total * correction + tl.sum(weights * totals, 0)
        peak = new_peak
    _write(OUT, LSE, MAX, out_strides, acc[None, :], peak, total, pair // kv_heads, pair % kv_heads, row + tl.arange(0, 1), rows,
           q_heads, group, q_len, V_DIM, WANT_MAX, IS_EXACT)
