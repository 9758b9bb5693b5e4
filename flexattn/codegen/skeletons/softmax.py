"""Softmax pieces every kernel shares: reads a tile of scores and the running row state, makes probabilities.

The idea: exp(x - max) is computed as exp2(x * factor - peak), where `peak` is kept in base 2 (but for float32 inputs) and
`factor` already holds log2(e) (and the softmax scale where no score_mod needs scores in natural units). A row that has seen no key has
peak -inf; subtracting 0 instead keeps its probabilities at exp2(-inf) = 0 and never NaN.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """a @ b + acc in float32; UPCAST widens the operands first, for the interpreter whose bf16 dot is wrong.

    float32 products are summed tile by tile: one chain of additions over a whole row would lose a digit more."""
    BY_TILE: tl.constexpr = a.dtype == tl.float32
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if BY_TILE and acc is not None:
        return acc + tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def power_of_two(x, IS_EXACT: tl.constexpr):
    """2**x: the hardware instruction, good to 2 units in the last place; IS_EXACT (float32 inputs) to half of one.

    There x is split into a whole part, which becomes the exponent, and a rest in [-0.5, 0.5] for exp's series."""
    if IS_EXACT:
        whole = tl.floor(x + 0.5)
        rest = (x - whole) * LN2
        series = tl.fma(rest, 1 / 5040, 1 / 720)
        series = tl.fma(rest, series, 1 / 120)
        series = tl.fma(rest, series, 1 / 24)
        series = tl.fma(rest, series, 1 / 6)
        series = tl.fma(rest, series, 1 / 2)
        series = tl.fma(rest, tl.fma(rest, series, 1.0), 1.0)
        exponent = tl.minimum(tl.maximum(whole, -126.0), 127.0).to(tl.int32)
        value = series * ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        return tl.where(x < -126.0, 0.0, tl.where(x > 127.0, float("inf"), value))
    else:
        return tl.math.exp2(x)


@triton.jit
def factor_of(scale, FOLD_SCALE: tl.constexpr):
    """What a score is multiplied with to become a power of two."""
    if FOLD_SCALE:
        return scale * LOG2E
    else:
        return scale * 0.0 + LOG2E


@triton.jit
def natural_scores(dots, scale, FOLD_SCALE: tl.constexpr):
    """Scaled scores in natural units; raw dot products where the scale is folded into the factor."""
    if FOLD_SCALE:
        return dots
    else:
        return dots * scale


@triton.jit
def online_update(scores, factor, peak, total, IS_EXACT: tl.constexpr):
    """One step of the online softmax over a tile [M, N]: probabilities, correction of what came before, new row state.

    IS_EXACT (float32 inputs): the peak is natural and the difference is taken before anything is rounded, so that the
    largest score has probability 1 and a row of one key gives back its value."""
    UNIT: tl.constexpr = LOG2E if IS_EXACT else 1.0
    in_unit = 1.0 if IS_EXACT else factor
    new_peak = tl.maximum(peak, tl.max(scores, 1) * in_unit)
    safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    if IS_EXACT:
        probs = power_of_two((scores - safe_peak[:, None]) * UNIT, True)
    else:
        probs = power_of_two(scores * factor - safe_peak[:, None], False)
    correction = power_of_two((peak - safe_peak) * UNIT, IS_EXACT)
    return probs, correction, new_peak, total * correction + tl.sum(probs, 1)


@triton.jit
def saved_lse(lse, IS_EXACT: tl.constexpr):
    """A row's natural log-sum in the unit that `probabilities` takes; +inf, which makes them 0, for an empty row."""
    value = lse if IS_EXACT else lse * LOG2E
    return tl.where(lse == float("-inf"), float("inf"), value)


@triton.jit
def probabilities(scores, factor, lse, IS_EXACT: tl.constexpr):
    """The forward's probabilities from its log-sums. IS_EXACT (float32 inputs): scores and log-sums are natural, and the
    difference is taken before anything is rounded; a log-sum of 80 in base 2 would cost three digits."""
    if IS_EXACT:
        return power_of_two((scores - lse) * LOG2E, True)
    else:
        return power_of_two(scores * factor - lse, False)


@triton.jit
def row_lse(peak, total, IS_EXACT: tl.constexpr):
    """Natural-log sum of exponentials of a row; -inf where no key was kept."""
    kept = total != 0.0  # also true for NaN, which must stay visible
    log_total = tl.math.log2(tl.where(kept, total, 1.0))
    lse = peak + log_total * LN2 if IS_EXACT else (peak + log_total) * LN2
    return tl.where(kept, lse, float("-inf"))


@triton.jit
def natural_peak(peak, IS_EXACT: tl.constexpr):
    """A row's largest modified score."""
    return peak if IS_EXACT else peak * LN2
