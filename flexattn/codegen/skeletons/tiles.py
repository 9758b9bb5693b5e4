"""Where a program works and what it loads: reads the span table and tensors by row, makes tiles [ROWS, PAD].

The idea: a table row lists half-open runs of tiles ("spans"), the first run inline and the others in EXTRA, so that a
kernel walks contiguous keys and never an index list. Row ints: 0 tile, 1 full tiles, 2 partial tiles, 3 full spans,
4 partial spans, 5:7 first full span, 7:9 first partial span, 9 and 10 offsets of further full and partial spans.
"""

import triton
import triton.language as tl

ROW_INTS = tl.constexpr(12)
FULL = tl.constexpr(0)
PARTIAL = tl.constexpr(1)


@triton.jit
def locate(program, pairs, lines, swizzle):
    """Program number -> (pair, rank): `swizzle` (batch, head) pairs are worked on together, so that their K and V stay
    in the L2 cache; among them the costly ranks come first."""
    group = program // (lines * swizzle)
    within = program - group * (lines * swizzle)
    size = tl.minimum(pairs - group * swizzle, swizzle)
    return group * swizzle + within % size, within // size


@triton.jit
def table_line(ROWS, batch, head, rank, lines, batch_step, head_step):
    """Pointer to the table row of one program; steps are 0 where the mask does not depend on batch or head."""
    return ROWS + ((batch * batch_step + head * head_step).to(tl.int64) * lines + rank) * ROW_INTS


@triton.jit
def first_span(line, KIND: tl.constexpr):
    """(spans, start, stop, offset of further spans) of one kind in a table row."""
    return tl.load(line + 3 + KIND), tl.load(line + 5 + 2 * KIND), tl.load(line + 6 + 2 * KIND), tl.load(line + 9 + KIND)


@triton.jit
def load_tile(TENSOR, strides, batch, head, first, length, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
              IS_DESCRIBED: tl.constexpr, IS_MASKED: tl.constexpr):
    """Rows first .. first + ROWS of one head of a [batch, heads, length, DIM] tensor -> [ROWS, PAD], zeros outside it.

    The last stride is 1. TENSOR is a pointer, or where IS_DESCRIBED a tensor descriptor of blocks [1, 1, ROWS, PAD], which
    the hardware copies to shared memory by itself, zeros included; a batch stride of 0 is a batch of 1 that serves all."""
    if IS_DESCRIBED:
        return TENSOR.load([tl.where(strides[0] == 0, 0, batch), head, first, 0]).reshape(ROWS, PAD)
    else:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, PAD)
        start = TENSOR + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        start += first.to(tl.int64) * strides[2]
        pointers = start + (rows[:, None] * strides[2] + dims[None, :])
        if IS_MASKED:
            inside = (first + rows)[:, None] < length
            if DIM < PAD:
                inside = inside & (dims[None, :] < DIM)
            return tl.load(pointers, mask=inside, other=0.0)
        elif DIM < PAD:
            return tl.load(pointers, mask=dims[None, :] < DIM, other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def pages_of(PAGES, first, wanted, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages of keys first .. first + ROWS of a request whose list of pages begins at PAGES: a number where they lie in one page,
    else [ROWS], of which those are looked up that are wanted. Few pages are few numbers that all threads look up, and a key's own
    is found by where it lies in the tile: a look-up a key takes as long as reading the key."""
    MOST: tl.constexpr = 1 if PAGE_SIZE % ROWS == 0 else ROWS // PAGE_SIZE if ROWS % PAGE_SIZE == 0 else (ROWS - 2) // PAGE_SIZE + 2
    rows = tl.arange(0, ROWS)
    if MOST == 1:
        pages = tl.load(PAGES + first // PAGE_SIZE)
    elif MOST <= 8:
        within = rows if ROWS % PAGE_SIZE == 0 else first % PAGE_SIZE + rows
        last = first + (ROWS - 1 if wanted is None else tl.max(tl.where(wanted, rows, 0), 0))
        at = first // PAGE_SIZE
        pages = tl.load(PAGES + at) + rows * 0
        for n in tl.static_range(1, MOST):
            page = tl.load(PAGES + tl.minimum(at + n, last // PAGE_SIZE))
            pages = tl.where(within >= n * PAGE_SIZE, page, pages)
    elif wanted is None:
        pages = tl.load(PAGES + (first + rows).to(tl.uint32) // PAGE_SIZE)
    else:
        pages = tl.load(PAGES + (first + rows).to(tl.uint32) // PAGE_SIZE, mask=wanted, other=0)
    return pages


@triton.constexpr_function
def parts_of(element):
    """In how many parts keys of an element type are multiplied: of 8 bits in two."""
    return 2 if element.primitive_bitwidth == 8 else 1


@triton.jit
def load_keys(TENSOR, strides, place, head, first, wanted, ROWS: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr,
              PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """Rows first .. first + ROWS of one head of keys or values, dimensions FIRST .. FIRST + PAD, as a tuple of one tile [ROWS, PAD], or
    where they have 8 bits of their even and their odd dimensions [ROWS, PAD // 2] in float16. Zeros outside them, behind DIM and where
    `wanted` [ROWS] does not hold; None for all.

    PAGE_SIZE 0: TENSOR is [batch, heads, length, DIM] and `place` the batch. Else [pages, heads, PAGE_SIZE, DIM], and `place` is what
    `pages_of` says. Of 8 bits all strides, FIRST and DIM are even."""
    STEP: tl.constexpr = parts_of(TENSOR.dtype.element_ty)
    if STEP == 1:
        return (_load_keys(TENSOR + FIRST, strides, place, head, first, wanted, ROWS, DIM - FIRST, PAD, PAGE_SIZE),)
    else:
        pairs = (TENSOR + FIRST).to(tl.pointer_type(tl.int16), bitcast=True)
        in_pairs = (strides[0] // 2, strides[1] // 2, strides[2] // 2)
        pairs = _load_keys(pairs, in_pairs, place, head, first, wanted, ROWS, (DIM - FIRST) // 2, PAD // 2, PAGE_SIZE)
        return apart(pairs, TENSOR.dtype.element_ty, UPCAST)


@triton.jit
def apart(pairs, TYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Pairs of numbers of 8 bits -> (the first ones, the second ones) in float16. They lie as products of 16 bits want them: single
    bytes would be moved one by one. UPCAST: in the interpreter, which has no instructions of a processor."""
    if TYPE == tl.float8e5:  # the upper half of a float16
        first = (pairs << 8).to(tl.float16, bitcast=True)
        second = (pairs & -256).to(tl.int16).to(tl.float16, bitcast=True)
    elif UPCAST:
        first = pairs.to(tl.int8).to(TYPE, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.int8).to(TYPE, bitcast=True).to(tl.float16)
    else:  # two pairs at once: three instructions
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted;"
            " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def _load_keys(TENSOR, strides, place, head, first, wanted, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
               PAGE_SIZE: tl.constexpr):
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PAD)[None, :]
    start = TENSOR + head.to(tl.int64) * strides[1]
    if PAGE_SIZE % ROWS == 0:
        within = first % PAGE_SIZE if PAGE_SIZE > 0 else first
        start += place * strides[0] + within.to(tl.int64) * strides[2]
        pointers = start + (rows[:, None] * strides[2] + dims)
    else:
        within = ((first + rows).to(tl.uint32) % PAGE_SIZE).to(tl.int32)
        pointers = start + (place * strides[0] + within * strides[2])[:, None] + dims
    if wanted is None:
        if DIM < PAD:
            return tl.load(pointers, mask=dims < DIM, other=0)
        else:
            return tl.load(pointers)
    elif DIM < PAD:
        return tl.load(pointers, mask=wanted[:, None] & (dims < DIM), other=0)
    else:
        return tl.load(pointers, mask=wanted[:, None], other=0)


@triton.jit
def store_tile(TENSOR, strides, batch, head, first, length, values, ROWS: tl.constexpr, DIM: tl.constexpr,
               PAD: tl.constexpr):
    """Writes values [ROWS, PAD] to rows first .. first + ROWS of one head of a [batch, heads, length, DIM] tensor whose
    last stride is 1, in that tensor's dtype."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PAD)
    start = TENSOR + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + first.to(tl.int64) * strides[2]
    inside = (first + rows)[:, None] < length
    if DIM < PAD:
        inside = inside & (dims[None, :] < DIM)
    pointers = start + (rows[:, None] * strides[2] + dims[None, :])
    tl.store(pointers, values.to(TENSOR.dtype.element_ty), mask=inside)


@triton.jit
def with_reads(batch, head, q_idx, first, caps, READS: tl.constexpr, BLOCK_N: tl.constexpr):
    """`caps`, followed by a tile of every captured tensor that is read at query and key at once, for BLOCK_N keys.

    To be called before the product: Triton starts from the layout of such a tile as from that of a product, and the first of them
    takes the row maxima. Where it is the tile, all scores move through shared memory to its layout and back in every step."""
    if READS is None:
        return caps
    else:
        kv_idx = (first + tl.arange(0, BLOCK_N))[None, :]
        return caps + READS(batch, head, q_idx, kv_idx, caps)


@triton.jit
def keep_tile(batch, head, q_idx, kv_idx, q_len, kv_len, caps, MASK_MOD: tl.constexpr):
    """Which scores of a partial tile count: inside both lengths and kept by the mask."""
    keep = (q_idx < q_len) & (kv_idx < kv_len)
    if MASK_MOD is not None:
        keep = keep & MASK_MOD(batch, head, q_idx, kv_idx, caps)
    return keep
