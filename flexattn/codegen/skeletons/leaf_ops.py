"""Operations that generated leaves call: each reads tensors of one type and follows torch where Triton differs.

The idea: Triton's integer division truncates, its `tanh` needs a library the interpreter lacks, and a captured tensor may
be read out of range. Everything here also runs in the interpreter, except what is in assembly and
`tanh`, the hardware instruction.
"""

import triton
import triton.language as tl


# ---------------------------------------------------------------- integers
@triton.jit
def floor_div(a, b):
    """a // b rounded down; 0 where b is 0."""
    safe = tl.where(b == 0, 1, b)
    quotient = a // safe
    down = (a - quotient * safe != 0) & ((a < 0) != (safe < 0))
    quotient = tl.where(down, quotient - 1, quotient)
    return tl.where(b == 0, 0, quotient)


@triton.jit
def floor_mod(a, b):
    """Remainder with the sign of b; 0 where b is 0."""
    safe = tl.where(b == 0, 1, b)
    rest = a - (a // safe) * safe
    rest = tl.where((rest != 0) & ((rest < 0) != (safe < 0)), rest + safe, rest)
    return tl.where(b == 0, 0, rest)


@triton.jit
def count_bits(bits):
    """How many bits of 64 are set: a dozen operations of one thread, where a sum over lanes waits for five shuffles."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    bits += bits >> 8
    bits += bits >> 16
    bits += bits >> 32
    return (bits & 127).to(tl.int32)


@triton.jit
def floor_div_by(a, b: tl.constexpr):
    """a // b rounded down for a constant b > 0, without a branch on its sign."""
    quotient = a // b
    return quotient - (a - quotient * b < 0).to(a.dtype)


@triton.jit
def floor_mod_by(a, b: tl.constexpr):
    """a % b for a constant b > 0, in [0, b)."""
    rest = a % b
    return tl.where(rest < 0, rest + b, rest)


@triton.jit
def clamped(a, MOST: tl.constexpr):
    """a as 64 bits, brought to [-MOST, MOST]."""
    return tl.minimum(tl.maximum(a.to(tl.int64), -MOST), MOST)


@tl.core.builtin
def scalar(value, dtype, _semantic=None):
    """A number of a type in a kernel of Gluon, whose `full` asks for a layout."""
    return _semantic.scalar_constant(tl.core._unwrap_if_constexpr(value), tl.core._unwrap_if_constexpr(dtype))


@triton.jit
def logical_not(a):
    return a == 0


# ---------------------------------------------------------------- floats
@triton.jit
def floor_div_float(a, b):
    """torch.floor_divide: the quotient of a minus its remainder, so exact multiples do not round down by one."""
    rest = floor_mod_float(a, b)
    return tl.where(b == 0.0, a / b, tl.floor((a - rest) / b + 0.5))


@triton.jit
def floor_mod_float(a, b):
    """Remainder with the sign of b."""
    quotient = trunc(a / b)
    rest = a - quotient * b
    rest = tl.where((rest != 0.0) & ((rest < 0.0) != (a < 0.0)), rest + tl.where((a < 0.0) == (b < 0.0), b, -b), rest)
    rest = tl.where(tl.abs(rest) >= tl.abs(b), rest * 0.0, rest)
    return tl.where((rest != 0.0) & ((rest < 0.0) != (b < 0.0)), rest + b, rest)


@triton.jit
def trunc(a):
    return tl.where(a < 0.0, tl.ceil(a), tl.floor(a))


@triton.jit
def round_even(a):
    """Nearest integer, ties to even."""
    low = tl.floor(a)
    part = a - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    return tl.where((part > 0.5) | ((part == 0.5) & (odd == 1.0)), low + 1.0, low)


@triton.jit
def sign(a):
    """-1, 0 or 1, as torch.sign, for integers and floats (NaN gives 0)."""
    return (a > 0).to(a.dtype) - (a < 0).to(a.dtype)


@triton.jit
def isinf(a):
    return tl.abs(a) == float("inf")


@triton.jit
def sqrt(a):
    return tl.sqrt(a)


@triton.jit
def rsqrt(a):
    return 1.0 / tl.sqrt(a)


@triton.jit
def sigmoid(a):
    return 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def expm1(a):
    """exp(a) - 1; a series near 0, where the difference would lose every digit."""
    series = a * (1.0 + a * (0.5 + a * (0.16666667 + a * (0.041666668 + a * (0.008333334 + a * 0.0013888889)))))
    return tl.where(tl.abs(a) < 0.35, series, tl.exp(a) - 1.0)


@triton.jit
def log1p(a):
    """log(1 + a); the rounding of 1 + a is divided out again."""
    u = 1.0 + a
    exact = u == 1.0
    ratio = a / tl.where(exact, 1.0, u - 1.0)
    value = tl.log(u) * tl.where(tl.abs(u) == float("inf"), 1.0, ratio)
    return tl.where(exact, a, value)


@triton.jit
def power(a, b):
    """torch.pow on floats; a negative base works with an integral exponent."""
    b = tl.where(a == a, b, b)  # the shape of a, for a constant exponent
    whole = tl.floor(b) == b
    odd = whole & (b - 2.0 * tl.floor(b * 0.5) == 1.0)
    size = tl.exp2(b * tl.log2(tl.abs(a)))
    value = tl.where((a < 0.0) & odd, -size, size)
    value = tl.where((a < 0.0) & (whole == 0), float("nan"), value)
    return tl.where((b == 0.0) | (a == 1.0), 1.0, value)


@triton.jit
def tanh(a):
    """The hardware instruction: relative error 2^-11, enough for bfloat16."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh_exp2(a):
    """1 - 2 / (exp(2a) + 1): absolute error of a float32 rounding, for float16."""
    return 1.0 - 2.0 / (tl.exp2(a * 2.8853900817779268) + 1.0)


@triton.jit
def tanh_exact(a):
    """tanh to float32 precision: an odd polynomial near 0, the exponential form elsewhere."""
    s = a * a
    p = s * (-0.33333332 + s * (0.13333079 + s * (-0.0539025 + s * (0.02126713 + s * -0.00653151))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(a)) + 1.0)
    far = tl.where(a < 0.0, -far, far)
    return tl.where(tl.abs(a) < 0.55, a + a * p, far)


# ---------------------------------------------------------------- captured tensors
@triton.jit
def wrap(index, size):
    """A negative index counts from the end, once."""
    return tl.where(index < 0, index + size, index)


@triton.jit
def inside(index, size):
    """Whether a wrapped index may be read."""
    return (index >= 0) & (index < size)


@triton.jit
def read_run(row, first, columns, size, is_inside, OTHER: tl.constexpr):
    """Elements first + columns [1, N] of a row of a tensor, of which OTHER stands for those past its end, and for all where the row
    is none of the tensor's. A run that lies within its row is read without asking so of each element, and in pairs."""
    COLUMNS: tl.constexpr = columns.shape[1]
    PAIR: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 4  # bytes
    if is_inside & (first <= size - COLUMNS) & ((row + first).to(tl.int64) % PAIR == 0):
        values = tl.load(tl.multiple_of(row + first, PAIR) + columns)
    else:
        held = (is_inside & (columns < size - first)) != 0  # the interpreter widens a scalar truth value when it meets a tile
        values = tl.load(row + first + columns, mask=held, other=OTHER)
    return values


@triton.jit
def spread(value, like):
    """`value` with the full shape of `like`, and in a kernel of Gluon with its layout."""
    return tl.where(like == like, value, value)


@triton.jit
def opaque(values):
    """The same values of 32 bits, of which the compiler knows nothing: otherwise it packs the comparisons of a thread into bits and
    takes them out again, a third of a masked tile's instructions."""
    KIND: tl.constexpr = "f" if values.dtype == tl.float32 else "r"
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", f"={KIND},{KIND}", [values], dtype=values.dtype, is_pure=True, pack=1)


@triton.jit
def again(index):
    """The same index, of which nothing is known from one step of a loop to the next: what is made of it takes no registers around
    the loop."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def within(index, lower, upper):
    """lower <= index < upper, of an index that is not negative: one subtraction and one comparison without signs, of which the
    compiler knows nothing (see `opaque`)."""
    first = tl.maximum(lower, 0)
    width = opaque(tl.where(upper > first, upper - first, 0))
    apart = tl.inline_asm_elementwise("sub.s32 $0, $1, $2;", "=r,r,r", [index, first], dtype=tl.uint32, is_pure=True, pack=1)
    return apart < width.to(tl.uint32, bitcast=True)


@triton.jit
def row_end(value, index):
    """An end of each row's keys as an int32 that is not negative, of the shape of an index."""
    value = value + index * 0
    return tl.minimum(tl.maximum(value, 0), 2147483647).to(tl.int32)


@triton.jit
def total(value, AXIS: tl.constexpr):
    """Sum over one tile axis, which stays with size 1."""
    return tl.expand_dims(tl.sum(value, AXIS), AXIS)


@triton.jit
def tree_width(length):
    """How many nodes the lowest level of a tree over `length` elements has place for: a power of 4."""
    count = tl.maximum((length - 1) >> 6, 0) + 1
    width = count * 0 + 1
    for _level in tl.static_range(13 if count.dtype == tl.int32 else 24):
        width = tl.where(width < count, width << 2, width)
    return width


@triton.jit
def tree_level(width, twice_level):
    """First node of a level, as the levels below it have width, width / 4, ... nodes."""
    return (width - (width >> twice_level)) // 3 * 4


@triton.jit
def covering_nodes(first, last, length):
    """(first node of a level, the first and the last of its nodes that hold flat positions first .. last).

    A tree has a node for every 64 elements, then for every 4 of those, and so on (skeletons/block_map.py); the lowest level
    is taken at which at most four nodes cover the range: from 192 elements on the second, from 768 the third."""
    times = (last - first) // 192
    exponent = (times.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    twice_level = tl.where(times > 0, (exponent >> 1 << 1) + 2, 0)
    left = tl.maximum(first >> (twice_level + 6), 0)  # an empty tensor has one node
    right = tl.maximum(last >> (twice_level + 6), 0)
    return tree_level(tree_width(length), twice_level), left, right


@triton.jit
def values_over_range(SETS, first, last, length):
    """The elements at flat positions first .. last, or of a few more around them, as a set of 64 bits: element modulo 64."""
    level, left, right = covering_nodes(first, last, length)
    nodes = SETS + level
    found = tl.load(nodes + left)
    for step in tl.static_range(1, 4):
        found = found | tl.load(nodes + tl.minimum(left + step, right))
    return found


@triton.jit
def over_range(TREE, first, last, length, IS_LEAST: tl.constexpr):
    """Least or greatest element at flat positions first .. last, or of a few more around them; TREE holds both of each node."""
    level, left, right = covering_nodes(first, last, length)
    nodes = TREE + 2 * level + (0 if IS_LEAST else 1)
    value = tl.load(nodes + 2 * left)
    for step in tl.static_range(1, 4):
        other = tl.load(nodes + 2 * tl.minimum(left + step, right))
        value = tl.minimum(value, other) if IS_LEAST else tl.maximum(value, other)
    return value
