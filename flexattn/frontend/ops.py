"""The op table: one row per operation, read by every pass (evaluation, interval proof, differentiation, code generation).

A row's arguments always have one data type (`expr.make` inserts casts), so a cell never promotes. Adding an operation is
adding a row; a missing cell fails a test. Cells are plain functions of whatever they are given:

    eval      torch tensors -> torch tensor, with torch's own semantics
    bounds    (lo, hi) pairs of torch tensors -> such a pair that contains every value the operation can take on the boxes;
              for truth values lo is "must be true" and hi is "may be true"; NaN in a float pair means "anything, NaN included"
    vjp       (F, g, y, *args) -> the gradient of each argument, or None; F offers functions by name (F.where, F.exp)
    spelling  how the operation is written in a kernel
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Pair = tuple[Any, Any]
LN2 = math.log(2.0)


class Spelling(NamedTuple):
    """Format strings over the arguments' names, by kind of data; `exact` is for the interpreter and for float32 inputs."""

    floating: str
    integer: str
    boolean: str
    exact: str | None = None


def spell(text: str | None = None, *, floating: str = "", integer: str = "", boolean: str = "", exact: str | None = None) -> Spelling:
    text = text or ""
    return Spelling(floating or text, integer or text, boolean or text, exact)


class Op(NamedTuple):
    """One row of the table."""

    name: str
    domain: str  # "arith", "float", "compare", "logic", "int", "where", "round", "predicate", "cast": how `make` types it
    eval: Callable[..., Any]
    bounds: Callable[..., Pair]
    vjp: Callable[..., tuple[Any, ...]] | None  # None: piecewise constant, contributes no gradient
    spelling: Spelling
    text: str
    precedence: int = 100  # of `text`; 100 is a call, never parenthesised
    arity: int = 2


# ---------------------------------------------------------------- bounds, shared pieces
def widened(lo: Any, hi: Any) -> Pair:
    """Two units in the last place outward: library functions are monotone only up to rounding."""
    for _ in range(2):
        lo = torch.nextafter(lo, torch.full_like(lo, -math.inf))
        hi = torch.nextafter(hi, torch.full_like(hi, math.inf))
    return lo, hi




def rising(f: Callable[[Any], Any], low: float = -math.inf, high: float = math.inf) -> Callable[[Pair], Pair]:
    """A monotone library function with values in [low, high]."""

    def bounds(a: Pair) -> Pair:
        lo, hi = _widen_any(f(a[0]), f(a[1]))
        return lo.clamp(low, high), hi.clamp(low, high)

    return bounds


def _widen_any(lo: Any, hi: Any) -> Pair:
    """`widened`, also for half types, which have no nextafter: there a relative step."""
    if lo.dtype in (torch.float32, torch.float64):
        return widened(lo, hi)
    eps = 2 * torch.finfo(lo.dtype).eps
    tiny = torch.finfo(lo.dtype).tiny
    return lo - lo.abs() * eps - tiny, hi + hi.abs() * eps + tiny


def corners(f: Callable[[Any, Any], Any]) -> Callable[[Pair, Pair], Pair]:
    """Least and greatest over the four corners of a rectangle; a NaN corner makes both NaN."""

    def bounds(a: Pair, b: Pair) -> Pair:
        values = [f(x, y) for x in a for y in b]
        lo = hi = values[0]
        for v in values[1:]:
            lo, hi = torch.minimum(lo, v), torch.maximum(hi, v)
        return lo, hi

    return bounds


def _add_bounds(a: Pair, b: Pair) -> Pair:
    if a[0].is_floating_point():
        return corners(torch.add)(a, b)
    return a[0] + b[0], a[1] + b[1]


def _sub_bounds(a: Pair, b: Pair) -> Pair:
    if a[0].is_floating_point():
        return corners(torch.sub)(a, b)
    return a[0] - b[1], a[1] - b[0]


def _spoil(pair: Pair, bad: Any) -> Pair:
    """NaN, "anything", where `bad`."""
    nan = torch.full((), math.nan, dtype=pair[0].dtype, device=pair[0].device)
    return torch.where(bad, nan, pair[0]), torch.where(bad, nan, pair[1])


def _has_zero(a: Pair) -> Any:
    return (a[0] <= 0) & (a[1] >= 0)


def _has_infinity(a: Pair) -> Any:
    return torch.isinf(a[0]) | torch.isinf(a[1])


def _mul_bounds(a: Pair, b: Pair) -> Pair:
    out = corners(torch.mul)(a, b)
    if not a[0].is_floating_point():
        return out
    return _spoil(out, (_has_zero(a) & _has_infinity(b)) | (_has_zero(b) & _has_infinity(a)))


def _truediv_bounds(a: Pair, b: Pair) -> Pair:
    return _spoil(corners(torch.true_divide)(a, b), _has_zero(b) | torch.isnan(b[0]))


def _floor_div(a: Any, b: Any) -> Any:
    """torch's floor division; an integer division by zero, which torch refuses, gives 0 (a kept one is the user's error)."""
    if b.is_floating_point():
        return torch.floor_divide(a, b)
    return torch.where(b == 0, 0, torch.floor_divide(a, torch.where(b == 0, 1, b)))


def _floor_mod(a: Any, b: Any) -> Any:
    if b.is_floating_point():
        return torch.remainder(a, b)
    return torch.where(b == 0, 0, torch.remainder(a, torch.where(b == 0, 1, b)))


def _floordiv_bounds(a: Pair, b: Pair) -> Pair:
    """Corners; where the divisor may be zero only |x // y| <= |x| is known."""
    zero = _has_zero(b)
    if a[0].is_floating_point():
        lo, hi = corners(torch.floor_divide)(a, b)
        return _spoil((lo - 1, hi + 1), zero | torch.isnan(b[0]) | torch.isinf(a[0]) | torch.isinf(a[1]))
    lo, hi = corners(_floor_div)(a, b)
    size = torch.maximum(a[0].abs(), a[1].abs())
    return torch.where(zero, -size, lo), torch.where(zero, size, hi)


def _mod_bounds(a: Pair, b: Pair) -> Pair:
    """One quotient over the whole rectangle: x - m*quotient is monotone; otherwise any remainder of the divisor's sign."""
    if a[0].is_floating_point():
        wide = torch.minimum(b[0], torch.zeros_like(b[0])), torch.maximum(b[1], torch.zeros_like(b[1]))
        bad = _has_zero(b) | torch.isnan(a[0]) | torch.isinf(a[0]) | torch.isinf(a[1]) | torch.isinf(b[0]) | torch.isinf(b[1])
        return _spoil((wide[0] + 0 * a[0], wide[1] + 0 * a[0]), bad)
    m = torch.where(b[0] == 0, 1, b[0])
    first = torch.floor_divide(a[0], m)
    same = (first == torch.floor_divide(a[1], m)) & (b[0] == b[1]) & (b[0] != 0)
    lo = torch.where(same, a[0] - first * m, torch.clamp(b[0] + 1, max=0))
    return lo, torch.where(same, a[1] - first * m, torch.clamp(b[1] - 1, min=0))


def _all_bits(*values: Any) -> Any:
    """The smallest 2**n - 1 that no value exceeds and of which none is below the complement."""
    bits = values[0] ^ (values[0] >> 63)
    for v in values[1:]:
        bits = bits | v ^ (v >> 63)
    for shift in (1, 2, 4, 8, 16, 32):
        bits = bits | bits >> shift
    return bits


def _bits(name: str) -> Callable[[Pair, Pair], Pair]:
    """Of integers: x & y is within a side that is not negative; otherwise all numbers of as many bits."""

    def bounds(a: Pair, b: Pair) -> Pair:
        if a[0].dtype == torch.bool:
            if name == "xor":
                return (a[0] & ~b[1]) | (~a[1] & b[0]), ~((a[0] & b[0]) | (~a[1] & ~b[1]))
            f = torch.logical_and if name == "and" else torch.logical_or
            return f(a[0], b[0]), f(a[1], b[1])
        size, a_wild, b_wild = _all_bits(*a, *b), a[0] < 0, b[0] < 0
        if name == "and":
            hi = torch.where(a_wild, torch.where(b_wild, size, b[1]), torch.where(b_wild, a[1], torch.minimum(a[1], b[1])))
            return torch.where(a_wild & b_wild, ~size, 0), hi
        return torch.where(a_wild | b_wild, ~size, 0 if name == "xor" else torch.maximum(a[0], b[0])), size

    return bounds


def _not_bounds(a: Pair) -> Pair:
    return (~a[1], ~a[0])


def _abs_bounds(a: Pair) -> Pair:
    lo, hi = a[0].abs(), a[1].abs()
    return torch.where(_has_zero(a), torch.zeros_like(lo), torch.minimum(lo, hi)), torch.maximum(lo, hi)


def _lt_bounds(a: Pair, b: Pair) -> Pair:
    return a[1] < b[0], ~(a[0] >= b[1])


def _le_bounds(a: Pair, b: Pair) -> Pair:
    return a[1] <= b[0], ~(a[0] > b[1])


def _eq_bounds(a: Pair, b: Pair) -> Pair:
    return (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]), ~((a[0] > b[1]) | (b[0] > a[1]))


def _ne_bounds(a: Pair, b: Pair) -> Pair:
    must, may = _eq_bounds(a, b)
    return ~may, ~must


def _where_bounds(c: Pair, a: Pair, b: Pair) -> Pair:
    if a[0].dtype == torch.bool:
        low, high = a[0] & b[0], a[1] | b[1]
    else:
        low, high = torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])
    return (torch.where(c[0], a[0], torch.where(c[1], low, b[0])), torch.where(c[0], a[1], torch.where(c[1], high, b[1])))


def _minmax_bounds(f: Callable[[Any, Any], Any]) -> Callable[[Pair, Pair], Pair]:
    def bounds(a: Pair, b: Pair) -> Pair:
        return f(a[0], b[0]), f(a[1], b[1])

    return bounds


def _wave_bounds(a: Pair) -> Pair:
    one = torch.ones_like(a[0])
    return _spoil((-one, one), torch.isinf(a[0]) | torch.isinf(a[1]) | torch.isnan(a[0]))


def _shift_bounds(f: Callable[[Any, Any], Any]) -> Callable[[Pair, Pair], Pair]:
    """Corners; by less than 0 or more than 63 everything is shifted out, and the sign (or, to the left, 0) is left."""

    def bounds(a: Pair, b: Pair) -> Pair:
        out = (b[0] < 0) | (b[1] > 63)
        lo, hi = corners(f)(a, (b[0].clamp(0, 63), b[1].clamp(0, 63)))
        low, high = (torch.bitwise_right_shift(x, 63) if f is torch.bitwise_right_shift else 0 * x for x in a)
        return torch.where(out, torch.minimum(lo, low), lo), torch.where(out, torch.maximum(hi, high), hi)

    return bounds


def _pow_bounds(a: Pair, b: Pair) -> Pair:
    """Monotone in each argument for a base of at least zero; otherwise anything."""
    lo, hi = corners(torch.pow)(a, b)
    one = torch.ones_like(lo)
    lo, hi = _widen_any(torch.minimum(lo, one), torch.maximum(hi, one))
    return _spoil((lo, hi), (a[0] < 0) | torch.isnan(a[0]) | ((a[0] <= 0) & (b[0] <= 0)))


def _rsqrt_bounds(a: Pair) -> Pair:
    lo, hi = _widen_any(torch.rsqrt(a[1]), torch.rsqrt(a[0]))
    return _spoil((lo, hi), (a[0] <= 0) | torch.isnan(a[0]))


def _isnan_bounds(a: Pair) -> Pair:
    unknown = torch.isnan(a[0])
    return torch.zeros_like(unknown), unknown


def _isinf_bounds(a: Pair) -> Pair:
    same = (a[0] == a[1]) & torch.isinf(a[0])
    return same, torch.isinf(a[0]) | torch.isinf(a[1]) | torch.isnan(a[0])


def _cast_eval(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype)


def _cast_bounds(a: Pair, dtype: torch.dtype) -> Pair:
    """Casts are monotone; to bool only zero is false; a float that may be NaN or infinite has no known integer."""
    if dtype == torch.bool:
        must, may = _ne_bounds(a, (torch.zeros_like(a[0]), torch.zeros_like(a[0])))
        return must, may
    if dtype == torch.int64 and a[0].is_floating_point():
        big = 2.0**62
        wild = ~((a[0] > -big) & (a[1] < big))
        lo, hi = (torch.where(wild, torch.zeros_like(x), x).to(dtype) for x in a)
        return torch.where(wild, -(2**62), lo), torch.where(wild, 2**62, hi)
    return a[0].to(dtype), a[1].to(dtype)


# ---------------------------------------------------------------- derivatives that need more than a line
def _minmax_vjp(less: bool) -> Callable[..., tuple[Any, ...]]:
    def vjp(F: Any, g: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
        """The smaller (or greater) side takes the gradient; a tie shares it, as in torch."""
        first = F.lt(a, b) if less else F.lt(b, a)
        tie = F.eq(a, b)
        half = g * 0.5
        return F.where(tie, half, F.where(first, g, 0.0)), F.where(tie, half, F.where(first, 0.0, g))

    return vjp


def _pow_vjp(F: Any, g: Any, y: Any, a: Any, b: Any) -> tuple[Any, ...]:
    da = F.where(F.eq(b, 0.0), 0.0, g * b * F.pow(a, b - 1.0))
    db = F.where(F.eq(a, 0.0), 0.0, g * y * F.log(a))
    return da, db


_UNARY_PREC, _MUL, _ADD, _SHIFT, _AND, _XOR, _OR, _CMP = 90, 80, 70, 65, 60, 58, 56, 50


def _unary(name: str, f: Any, bounds: Any, vjp: Any, text: str | None = None, spelling: Spelling | None = None) -> Op:
    return Op(name, "float", f, bounds, vjp, spelling or spell(f"leaf_ops.{name}({{0}})"), text or f"{name}({{0}})", arity=1)


_ROWS = (
    # arithmetic
    Op("add", "arith", torch.add, _add_bounds, lambda F, g, y, a, b: (g, g), spell("{0} + {1}"), "{0} + {1}", _ADD),
    Op("sub", "arith", torch.sub, _sub_bounds, lambda F, g, y, a, b: (g, -g), spell("{0} - {1}"), "{0} - {1}", _ADD),
    Op("mul", "arith", torch.mul, _mul_bounds, lambda F, g, y, a, b: (g * b, g * a), spell("{0} * {1}"), "{0}*{1}", _MUL),
    Op("truediv", "float", torch.true_divide, _truediv_bounds, lambda F, g, y, a, b: (g / b, -(g * y) / b),
       spell("{0} / {1}"), "{0}/{1}", _MUL),
    Op("floordiv", "arith", _floor_div, _floordiv_bounds, None,
       spell(integer="leaf_ops.floor_div({0}, {1})", floating="leaf_ops.floor_div_float({0}, {1})"), "{0}//{1}", _MUL),
    Op("mod", "arith", _floor_mod, _mod_bounds, lambda F, g, y, a, b: (g, -(g * F.floordiv(a, b))),
       spell(integer="leaf_ops.floor_mod({0}, {1})", floating="leaf_ops.floor_mod_float({0}, {1})"), "{0} % {1}", _MUL),
    Op("pow", "float", torch.pow, _pow_bounds, _pow_vjp, spell("leaf_ops.power({0}, {1})"), "{0}**{1}", 95),
    Op("neg", "arith", torch.neg, lambda a: (-a[1], -a[0]), lambda F, g, y, a: (-g,), spell("-{0}"), "-{0}", _UNARY_PREC, arity=1),
    Op("abs", "arith", torch.abs, _abs_bounds, lambda F, g, y, a: (g * F.sign(a),), spell("tl.abs({0})"), "|{0}|", arity=1),
    Op("sign", "arith", torch.sign, lambda a: (torch.sign(a[0]), torch.sign(a[1])), None, spell("leaf_ops.sign({0})"), "sign({0})", arity=1),
    Op("minimum", "arith", torch.minimum, _minmax_bounds(torch.minimum), _minmax_vjp(True),
       spell(integer="tl.minimum({0}, {1})", floating="tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"), "min({0}, {1})"),
    Op("maximum", "arith", torch.maximum, _minmax_bounds(torch.maximum), _minmax_vjp(False),
       spell(integer="tl.maximum({0}, {1})", floating="tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)"), "max({0}, {1})"),
    # comparisons
    Op("lt", "compare", torch.lt, _lt_bounds, None, spell("{0} < {1}"), "{0} < {1}", _CMP),
    Op("le", "compare", torch.le, _le_bounds, None, spell("{0} <= {1}"), "{0} <= {1}", _CMP),
    Op("eq", "compare", torch.eq, _eq_bounds, None, spell("{0} == {1}"), "{0} == {1}", _CMP),
    Op("ne", "compare", torch.ne, _ne_bounds, None, spell("{0} != {1}"), "{0} != {1}", _CMP),
    # logic on truth values, bits on integers
    Op("and", "logic", torch.bitwise_and, _bits("and"), None, spell("{0} & {1}"), "{0} & {1}", _AND),
    Op("or", "logic", torch.bitwise_or, _bits("or"), None, spell("{0} | {1}"), "{0} | {1}", _OR),
    Op("xor", "logic", torch.bitwise_xor, _bits("xor"), None, spell("{0} ^ {1}"), "{0} ^ {1}", _XOR),
    Op("not", "logic", torch.bitwise_not, _not_bounds, None, spell("~{0}", boolean="leaf_ops.logical_not({0})"), "~{0}", _UNARY_PREC, arity=1),
    Op("lshift", "int", torch.bitwise_left_shift, _shift_bounds(torch.bitwise_left_shift), None, spell("{0} << {1}"), "{0} << {1}", _SHIFT),
    Op("rshift", "int", torch.bitwise_right_shift, _shift_bounds(torch.bitwise_right_shift), None, spell("{0} >> {1}"), "{0} >> {1}", _SHIFT),
    Op("where", "where", torch.where, _where_bounds, lambda F, g, y, c, a, b: (None, F.where(c, g, 0.0), F.where(c, 0.0, g)),
       spell("tl.where({0}, {1}, {2})"), "where({0}, {1}, {2})", arity=3),
    # functions
    _unary("exp", torch.exp, rising(torch.exp, low=0.0), lambda F, g, y, a: (g * y,), spelling=spell("tl.exp({0})")),
    _unary("exp2", torch.exp2, rising(torch.exp2, low=0.0), lambda F, g, y, a: (g * y * LN2,), spelling=spell("tl.exp2({0})")),
    _unary("expm1", torch.expm1, rising(torch.expm1, low=-1.0), lambda F, g, y, a: (g * (y + 1.0),)),
    _unary("log", torch.log, rising(torch.log), lambda F, g, y, a: (g / a,), spelling=spell("tl.log({0})")),
    _unary("log2", torch.log2, rising(torch.log2), lambda F, g, y, a: (g / (a * LN2),), spelling=spell("tl.log2({0})")),
    _unary("log1p", torch.log1p, rising(torch.log1p), lambda F, g, y, a: (g / (a + 1.0),)),
    _unary("sqrt", torch.sqrt, rising(torch.sqrt), lambda F, g, y, a: (g * 0.5 / y,), spelling=spell("leaf_ops.sqrt({0})")),
    _unary("rsqrt", torch.rsqrt, _rsqrt_bounds, lambda F, g, y, a: (g * -0.5 * y * y * y,), spelling=spell("leaf_ops.rsqrt({0})")),
    _unary("tanh", torch.tanh, rising(torch.tanh, -1.0, 1.0), lambda F, g, y, a: (g * (1.0 - y * y),),
           spelling=spell("leaf_ops.tanh({0})", exact="leaf_ops.tanh_exact({0})")),
    _unary("sigmoid", torch.sigmoid, rising(torch.sigmoid, 0.0, 1.0), lambda F, g, y, a: (g * y * (1.0 - y),)),
    _unary("sin", torch.sin, _wave_bounds, lambda F, g, y, a: (g * F.cos(a),), spelling=spell("tl.sin({0})")),
    _unary("cos", torch.cos, _wave_bounds, lambda F, g, y, a: (-(g * F.sin(a)),), spelling=spell("tl.cos({0})")),
    _unary("erf", torch.erf, rising(torch.erf, -1.0, 1.0), lambda F, g, y, a: (g * (2.0 / math.sqrt(math.pi)) * F.exp(-(a * a)),),
           spelling=spell("tl.erf({0})")),
    # rounding; of integers these are the identity and never reach the table
    Op("floor", "round", torch.floor, lambda a: (torch.floor(a[0]), torch.floor(a[1])), None, spell("tl.floor({0})"), "floor({0})", arity=1),
    Op("ceil", "round", torch.ceil, lambda a: (torch.ceil(a[0]), torch.ceil(a[1])), None, spell("tl.ceil({0})"), "ceil({0})", arity=1),
    Op("round", "round", torch.round, lambda a: (torch.round(a[0]), torch.round(a[1])), None, spell("leaf_ops.round_even({0})"), "round({0})", arity=1),
    Op("trunc", "round", torch.trunc, lambda a: (torch.trunc(a[0]), torch.trunc(a[1])), None, spell("leaf_ops.trunc({0})"), "trunc({0})", arity=1),
    Op("isnan", "predicate", torch.isnan, _isnan_bounds, None, spell("{0} != {0}"), "isnan({0})", arity=1),
    Op("isinf", "predicate", torch.isinf, _isinf_bounds, None, spell("leaf_ops.isinf({0})"), "isinf({0})", arity=1),
    Op("detach", "arith", lambda a: a.detach(), lambda a: a, None, spell("{0}"), "detach({0})", arity=1),
    Op("cast", "cast", _cast_eval, _cast_bounds, lambda F, g, y, a: (F.cast_like(g, a),), spell("leaf_ops.cast({0}, {1})"), "{0}", arity=1),
)

OPS: dict[str, Op] = {row.name: row for row in _ROWS}
LEAVES = ("var", "const", "num", "load")  # what an expression is made of besides rows of the table
