"""The torch functions and tensor methods a mod may call, by name, each in terms of table operations.

A handler receives the trace and the call's arguments; plain numbers inside a handler are constants of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flexattn.frontend.expr import Expr, const, convert, is_floating, make, promote
from flexattn.frontend.mod_errors import error
from flexattn.frontend.proxy import FUNCTIONS, Handler, Proxy, Row, Trace, row_items


def _function(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            FUNCTIONS[name] = handler
        return handler

    return register


def _table(op: str) -> Handler:
    return lambda t, *args, **kwargs: t.call(op, *args, **kwargs)


_ALIASES = {
    "add": (),
    "mul": ("multiply",),
    "mod": ("remainder",),
    "floordiv": ("floor_divide",),
    "truediv": ("true_divide",),
    "neg": ("negative",),
    "abs": ("absolute",),
    "sign": ("sgn",),
    "minimum": (),
    "maximum": (),
    "lt": ("less",),
    "le": ("less_equal",),
    "gt": ("greater",),
    "ge": ("greater_equal",),
    "eq": (),
    "ne": ("not_equal",),
    "and": ("bitwise_and",),
    "or": ("bitwise_or",),
    "xor": ("bitwise_xor",),
    "not": ("bitwise_not", "invert"),
    "lshift": ("bitwise_left_shift",),
    "rshift": ("bitwise_right_shift",),
    "exp": (),
    "exp2": ("special_exp2",),
    "expm1": ("special_expm1",),
    "log": (),
    "log2": (),
    "log1p": ("special_log1p",),
    "sqrt": (),
    "rsqrt": (),
    "tanh": (),
    "sigmoid": ("special_expit",),
    "sin": (),
    "cos": (),
    "erf": ("special_erf",),
    "floor": (),
    "ceil": (),
    "round": (),
    "trunc": ("fix",),
    "isnan": (),
    "isinf": (),
    "detach": (),
}
for _op, _names in _ALIASES.items():
    for _name in (_op, *_names):
        FUNCTIONS[_name] = _table(_op)


@_function("where")
def _where(t: Trace, condition: Any, a: Any = None, b: Any = None, *, input: Any = None, other: Any = None) -> Any:
    if isinstance(condition, Proxy) and condition.expr.dtype != torch.bool:
        raise error(
            "the condition of torch.where must be a truth value", given=condition.expr.dtype, hint="a comparison"
        )
    return t.call("where", condition, a if a is not None else input, b if b is not None else other)


@_function("sub", "subtract")
def _sub(t: Trace, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return t.call("sub", a, b if alpha == 1 else t.call("mul", b, alpha))


@_function("add")
def _add(t: Trace, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return t.call("add", a, b if alpha == 1 else t.call("mul", b, alpha))


@_function("rsub")
def _rsub(t: Trace, a: Any, b: Any) -> Any:
    return t.call("sub", b, a)


@_function("div", "divide", "truediv", "true_divide")
def _div(t: Trace, a: Any, b: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return t.call("truediv", a, b)
    if rounding_mode == "floor":
        return t.call("floordiv", a, b)
    quotient = t.call("truediv", a, b)
    if isinstance(quotient, Proxy) and all(not _is_float(t, x) for x in (a, b)):  # integers: truncate exactly
        down, exact = t.call("floordiv", a, b), t.call("eq", t.call("mod", a, b), 0)
        return t.call("where", t.call("or", exact, t.call("ge", down, 0)), down, t.call("add", down, 1))
    return t.call("trunc", quotient)


def _is_float(t: Trace, x: Any) -> bool:
    return is_floating(promote([t.operand(x)]))


@_function("fmod")
def _fmod(t: Trace, a: Any, b: Any) -> Any:
    return t.call("sub", a, t.call("mul", _div(t, a, b, rounding_mode="trunc"), b))


@_function("reciprocal")
def _reciprocal(t: Trace, x: Any) -> Any:
    return t.call("truediv", 1.0, x)


@_function("square")
def _square(t: Trace, x: Any) -> Any:
    return t.call("mul", x, x)


@_function("pow", "float_power")
def _pow(t: Trace, base: Any, exponent: Any) -> Any:
    """Small constant exponents are multiplications, as in torch; an exponent's value is part of the structure."""
    if issubclass(type(exponent), (int, float)) and type(exponent) is not bool and isinstance(base, (Proxy, Row)):
        return _constant_power(t, base, exponent)
    if isinstance(base, (int, float)) and base == 2 and type(base) in (int, float) and type(exponent) is not Row:
        return (
            t.call("exp2", exponent)
            if _is_float(t, exponent) or not isinstance(base, int)
            else t.call("lshift", 1, exponent)
        )
    return t.call("pow", base, exponent)


def _constant_power(t: Trace, x: Any, n: int | float) -> Any:
    integral = float(n).is_integer()
    if integral and 0 <= n <= 8:
        if n == 0:
            return _ones_like(t, x)
        result, square, k = None, x, int(n)
        while k:
            if k & 1:
                result = square if result is None else t.call("mul", result, square)
            k >>= 1
            square = t.call("mul", square, square) if k else square
        return result
    special = {
        0.5: lambda: t.call("sqrt", x),
        -0.5: lambda: t.call("rsqrt", x),
        -1: lambda: _reciprocal(t, x),
        -2: lambda: _reciprocal(t, t.call("mul", x, x)),
    }
    if n in special and (not integral or _is_float(t, x)):
        return special[n]()
    if integral and type(x) is not Row and not _is_float(t, x):
        if n < 0:
            raise error("integers to negative powers are not defined", hint="convert to float first")
        return t.call("mul", _constant_power(t, x, 8), _constant_power(t, x, int(n) - 8))
    return t.wrap(make("pow", t.operand(x), float(n)))


def _ones_like(t: Trace, x: Any) -> Any:
    dtype = promote([t.operand(x)])
    return t.wrap(const(1, torch.int64 if dtype == torch.bool else dtype))


@_function("clamp", "clip", "hardtanh")
def _clamp(t: Trace, x: Any, min: Any = None, max: Any = None, *, min_val: Any = None, max_val: Any = None) -> Any:
    """Integers clamp by minimum and maximum (tight bounds); floats by selection, which has torch's gradient at the limits."""
    low, high = (min if min is not None else min_val), (max if max is not None else max_val)
    integral = not _is_float(t, x) if type(x) is not Row else False
    if low is not None:
        x = (
            t.call("maximum", x, low)
            if integral and not _is_float(t, low)
            else t.call("where", t.call("lt", x, low), low, x)
        )
    if high is not None:
        x = (
            t.call("minimum", x, high)
            if integral and not _is_float(t, high)
            else t.call("where", t.call("gt", x, high), high, x)
        )
    return x


@_function("clamp_min")
def _clamp_min(t: Trace, x: Any, min: Any) -> Any:
    return _clamp(t, x, min)


@_function("clamp_max")
def _clamp_max(t: Trace, x: Any, max: Any) -> Any:
    return _clamp(t, x, None, max)


@_function("logical_and")
def _logical_and(t: Trace, a: Any, b: Any) -> Any:
    return t.call("and", _truth(t, a), _truth(t, b))


@_function("logical_or")
def _logical_or(t: Trace, a: Any, b: Any) -> Any:
    return t.call("or", _truth(t, a), _truth(t, b))


@_function("logical_xor")
def _logical_xor(t: Trace, a: Any, b: Any) -> Any:
    return t.call("xor", _truth(t, a), _truth(t, b))


@_function("logical_not")
def _logical_not(t: Trace, a: Any) -> Any:
    return t.call("not", _truth(t, a))


def _truth(t: Trace, x: Any) -> Any:
    node = t.operand(x)
    return x if isinstance(node, Expr) and node.dtype == torch.bool or isinstance(node, bool) else t.call("ne", x, 0)


@_function("isfinite")
def _isfinite(t: Trace, x: Any) -> Any:
    return t.call("not", t.call("or", t.call("isnan", x), t.call("isinf", x)))


@_function("isneginf")
def _isneginf(t: Trace, x: Any) -> Any:
    return t.call("eq", x, -math.inf)


@_function("isposinf")
def _isposinf(t: Trace, x: Any) -> Any:
    return t.call("eq", x, math.inf)


@_function("masked_fill")
def _masked_fill(t: Trace, x: Any, mask: Any, value: Any) -> Any:
    return t.call("where", mask, value, x)


@_function("lerp")
def _lerp(t: Trace, a: Any, b: Any, weight: Any) -> Any:
    return a + weight * (b - a)


@_function("addcmul")
def _addcmul(t: Trace, x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return t.call("add", x, t.call("mul", t.call("mul", a, b), value))


@_function("positive", "clone", "contiguous", "squeeze", "alias", "cpu", "cuda")
def _identity(t: Trace, x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


# ---------------------------------------------------------------- casts
@_function("to", "type")
def _to(t: Trace, x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    wanted = next((d for d in (dtype, kwargs.get("dtype"), *args) if isinstance(d, torch.dtype)), None)
    if wanted is None and isinstance(dtype, Proxy):
        wanted = dtype.expr.dtype
    return x if wanted is None else _cast(t, x, wanted)


def _constant(t: Trace, like: Any, value: Any, size: Any, dtype: Any) -> Any:
    """A constant scalar, as torch's own and_masks and noop_mask make it; the device is the mod's anyway."""
    if tuple(size) not in ((), (1,)):
        raise error(
            "a mod can only make scalars", given=f"size {tuple(size)}", hint="capture a tensor made outside the mod"
        )
    made = t.wrap(convert(t.operand(value), promote([t.operand(like)])))
    return made if dtype is None else _cast(t, made, dtype)


@_function("new_ones")
def _new_ones(t: Trace, x: Any, size: Any = (), *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, 1, size, dtype)


@_function("new_zeros")
def _new_zeros(t: Trace, x: Any, size: Any = (), *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, 0, size, dtype)


@_function("new_full")
def _new_full(t: Trace, x: Any, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, fill_value, size, dtype)


@_function("ones_like")
def _ones_like_scalar(t: Trace, x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, 1, (), dtype)


@_function("zeros_like")
def _zeros_like_scalar(t: Trace, x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, 0, (), dtype)


@_function("full_like")
def _full_like_scalar(t: Trace, x: Any, fill_value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _constant(t, x, fill_value, (), dtype)


def _cast(t: Trace, x: Any, dtype: torch.dtype) -> Any:
    if type(x) is Row:
        return Row(t, [_cast(t, i, dtype) for i in x.items])
    if dtype.is_complex:
        raise error(
            "complex numbers are not supported in a mod",
            given=dtype,
            hint="the real and the imaginary part by themselves",
        )
    target = dtype if dtype.is_floating_point or dtype == torch.bool else torch.int64
    if target not in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.int64):
        raise error("a mod cannot cast to this type", given=dtype, hint="torch.float32 or torch.int64")
    return t.wrap(convert(t.operand(x), target))


for _name, _dtype in {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int": torch.int64,
    "long": torch.int64,
    "short": torch.int64,
    "bool": torch.bool,
}.items():
    FUNCTIONS[_name] = lambda t, x, *a, _d=_dtype, **k: _cast(t, x, _d)
FUNCTIONS["type_as"] = lambda t, x, like: _cast(t, x, like.dtype)


# ---------------------------------------------------------------- activations, from their definitions
@_function("relu")
def _relu(t: Trace, x: Any, *args: Any) -> Any:
    return t.call("where", t.call("le", x, 0), 0, x)


@_function("relu6")
def _relu6(t: Trace, x: Any) -> Any:
    return _clamp(t, _relu(t, x), None, 6.0)


@_function("leaky_relu")
def _leaky_relu(t: Trace, x: Any, negative_slope: Any = 0.01) -> Any:
    return t.call("where", t.call("gt", x, 0), x, t.call("mul", x, negative_slope))


@_function("silu", "swish")
def _silu(t: Trace, x: Any) -> Any:
    return t.call("mul", x, t.call("sigmoid", x))


@_function("logsigmoid", "log_sigmoid")
def _logsigmoid(t: Trace, x: Any) -> Any:
    return t.call("sub", _clamp(t, x, None, 0.0), t.call("log1p", t.call("exp", t.call("neg", t.call("abs", x)))))


@_function("softplus")
def _softplus(t: Trace, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = t.call("mul", x, beta)
    safe = _clamp(t, scaled, None, threshold)
    soft = t.call("truediv", t.call("log1p", t.call("exp", safe)), beta)
    return t.call("where", t.call("gt", scaled, threshold), x, soft)


@_function("softsign")
def _softsign(t: Trace, x: Any) -> Any:
    return t.call("truediv", x, t.call("add", t.call("abs", x), 1.0))


@_function("tanhshrink")
def _tanhshrink(t: Trace, x: Any) -> Any:
    return t.call("sub", x, t.call("tanh", x))


@_function("mish")
def _mish(t: Trace, x: Any) -> Any:
    return t.call("mul", x, t.call("tanh", _softplus(t, x)))


@_function("hardsigmoid")
def _hardsigmoid(t: Trace, x: Any) -> Any:
    return t.call("truediv", _clamp(t, t.call("add", x, 3.0), 0.0, 6.0), 6.0)


@_function("hardswish")
def _hardswish(t: Trace, x: Any) -> Any:
    return t.call("mul", x, _hardsigmoid(t, x))


@_function("elu")
def _elu(t: Trace, x: Any, alpha: Any = 1.0) -> Any:
    low = t.call("mul", t.call("expm1", _clamp(t, x, None, 0.0)), alpha)
    return t.call("where", t.call("gt", x, 0), x, low)


@_function("selu")
def _selu(t: Trace, x: Any) -> Any:
    return t.call("mul", _elu(t, x, 1.6732632423543772), 1.0507009873554805)


@_function("gelu")
def _gelu(t: Trace, x: Any, *, approximate: str = "none") -> Any:
    half = t.call("mul", x, 0.5)
    if approximate == "tanh":
        inner = t.call(
            "mul",
            t.call("add", x, t.call("mul", t.call("mul", t.call("mul", x, x), x), 0.044715)),
            math.sqrt(2 / math.pi),
        )
        return t.call("mul", half, t.call("add", t.call("tanh", inner), 1.0))
    return t.call("mul", half, t.call("add", t.call("erf", t.call("mul", x, math.sqrt(0.5))), 1.0))


@_function("threshold")
def _threshold(t: Trace, x: Any, threshold: Any, value: Any) -> Any:
    return t.call("where", t.call("gt", x, threshold), x, value)


# ---------------------------------------------------------------- reductions of a short row
def _row(t: Trace, x: Any) -> Row:
    if type(x) is Row:
        return x
    items = row_items(t, x)
    if items is None:
        raise error(
            "a reduction needs a row of a captured tensor",
            given="a scalar",
            hint="table[h].sum(), or torch.dot(a[q_idx], b[kv_idx])",
        )
    return Row(t, items)


@_function("sum")
def _sum(t: Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    row = _row(t, x)
    return (row if dtype is None else _cast(t, row, dtype)).reduce("add")


@_function("mean")
def _mean(t: Trace, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    return t.call("truediv", _sum(t, x, dim, dtype=dtype), float(len(_row(t, x))))


@_function("prod")
def _prod(t: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("mul")


@_function("any")
def _any(t: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return Row(t, [_truth(t, i) for i in _row(t, x).items]).reduce("or")


@_function("all")
def _all(t: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return Row(t, [_truth(t, i) for i in _row(t, x).items]).reduce("and")


@_function("amax")
def _amax(t: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("maximum")


@_function("amin")
def _amin(t: Trace, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _row(t, x).reduce("minimum")


@_function("max")  # not fmax and fmin: they ignore NaN, which maximum and minimum do not
def _max(t: Trace, x: Any, other: Any = None) -> Any:
    return t.call("maximum", x, other) if other is not None else _amax(t, x)


@_function("min")
def _min(t: Trace, x: Any, other: Any = None) -> Any:
    return t.call("minimum", x, other) if other is not None else _amin(t, x)


@_function("dot", "inner", "vdot", "matmul")
def _dot(t: Trace, a: Any, b: Any) -> Any:
    return t.call("mul", _row(t, a), _row(t, b)).reduce("add")
