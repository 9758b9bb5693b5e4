"""Every row of the op table, cell by cell: eval against torch, bounds under fuzz, vjp against finite differences."""

import math

import pytest
import torch

from flexattn.frontend import expr as ex
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import make
from flexattn.frontend.gradient import score_gradient
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Binding, CaptureInfo, Program

FLOAT_ROWS = [n for n, r in OPS.items() if r.domain in ("arith", "float", "round", "compare", "predicate", "where")]
INT_ROWS = [n for n, r in OPS.items() if r.domain in ("arith", "compare", "logic", "int", "where")]
BOOL_ROWS = ["and", "or", "xor", "not", "where", "eq", "ne", "lt", "le"]


def boxes(dtype, n, generator):
    """Random (lo, hi) pairs, some of them points, some crossing zero, some huge."""
    if dtype == torch.bool:
        lo = torch.rand(n, generator=generator) < 0.4
        return lo, lo | (torch.rand(n, generator=generator) < 0.4)
    if dtype == torch.int64:
        scale = 10 ** torch.randint(0, 6, (n,), generator=generator)
        lo = torch.randint(-9, 10, (n,), generator=generator) * scale // 3
        return lo, lo + torch.randint(0, 5, (n,), generator=generator) * torch.randint(0, 40, (n,), generator=generator)
    lo = torch.randn(n, generator=generator) * 10 ** torch.randint(-2, 3, (n,), generator=generator).float()
    return lo, lo + torch.rand(n, generator=generator) * torch.randint(0, 4, (n,), generator=generator)


def inside(lo, hi, samples, generator):
    """Points of each box, its ends included: [samples, n]."""
    if lo.dtype == torch.bool:
        pick = torch.rand(samples, len(lo), generator=generator) < 0.5
        return torch.where(lo == hi, lo, pick)
    t = torch.rand(samples, len(lo), generator=generator, dtype=torch.float64)
    t[0], t[1] = 0.0, 1.0
    x = lo + t * (hi - lo)
    if lo.dtype == torch.int64:
        return torch.minimum(torch.maximum(x.floor().to(torch.int64), lo), hi)
    return torch.minimum(torch.maximum(x.to(lo.dtype), lo), hi)


def contains(pair, values):
    """Whether every value lies in its pair; a NaN pair allows anything."""
    lo, hi = pair
    if lo.dtype == torch.bool:
        return (~lo | values).all() and (hi | ~values).all()
    free = torch.isnan(lo) if lo.is_floating_point() else torch.zeros_like(lo, dtype=torch.bool)
    return bool((free | ((values >= lo) & (values <= hi))).all())


def typed_args(name, dtype):
    row = OPS[name]
    return [torch.bool, dtype, dtype] if row.domain == "where" else [dtype] * row.arity


ROWS = {torch.float32: FLOAT_ROWS, torch.int64: INT_ROWS, torch.bool: BOOL_ROWS}


@pytest.mark.parametrize("name, dtype", [(n, d) for d, names in ROWS.items() for n in names], ids=str)
def test_bounds_contain_every_value(name, dtype):
    generator = torch.Generator().manual_seed(len(name))
    row, n = OPS[name], 600
    pairs = [boxes(d, n, generator) for d in typed_args(name, dtype)]
    if row.domain == "int":
        pairs[1] = tuple(p.abs() % 20 for p in pairs[1])
        pairs[1] = torch.minimum(*pairs[1]), torch.maximum(*pairs[1])
    out = row.bounds(*pairs)
    out = tuple(torch.broadcast_to(x, (n,)) for x in out)
    values = row.eval(*(inside(*p, 60, generator) for p in pairs))
    assert contains(out, values), name


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "minimum", "maximum", "lt", "le", "eq", "abs", "neg", "floordiv", "mod"]
)
def test_bounds_of_points_are_exact(name):
    """A point is a box whose ends are equal; bounds may not lose anything there."""
    generator = torch.Generator().manual_seed(1)
    args = [torch.randint(-50, 50, (500,), generator=generator) for _ in range(OPS[name].arity)]
    if name in ("floordiv", "mod"):
        args[1] = torch.where(args[1] == 0, 7, args[1])
    lo, hi = OPS[name].bounds(*((a, a) for a in args))
    expected = OPS[name].eval(*args)
    assert torch.equal(lo, expected) and torch.equal(hi, expected)


def test_division_by_an_interval_around_zero_is_wide():
    one, zero = torch.tensor([5]), (torch.tensor([-2]), torch.tensor([3]))
    lo, hi = OPS["floordiv"].bounds((one, one), zero)
    assert lo.item() <= -5 and hi.item() >= 5
    lo, hi = OPS["truediv"].bounds((one.float(), one.float()), tuple(z.float() for z in zero))
    assert math.isnan(lo.item()) and math.isnan(hi.item())


def test_infinities_that_cancel_are_unknown():
    inf = torch.tensor([math.inf])
    for name in ("add", "sub"):
        lo, _ = OPS[name].bounds((-inf, inf), (-inf, inf))
        assert math.isnan(lo.item())
    zero = torch.tensor([0.0])
    assert math.isnan(OPS["mul"].bounds((zero, zero), (inf, inf))[0].item())


@pytest.mark.parametrize("name", [n for n, r in OPS.items() if r.vjp is not None and n not in ("cast",)])
def test_vjp_against_finite_differences(name):
    """Each argument in turn is the score; the others are captured numbers. Central differences in float64."""
    row = OPS[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(200, generator=generator, dtype=torch.float64) * 1.7 + 0.2
    if name not in ("log", "log2", "log1p", "sqrt", "rsqrt", "pow", "truediv", "mod"):
        x = x - 1.0
    others = [torch.rand(200, generator=generator, dtype=torch.float64) + 0.3 for _ in range(row.arity)]
    score = ex.var("score", torch.float64)
    positions = range(1, 3) if row.domain == "where" else range(row.arity)
    for position in positions:
        loads = [ex.load(i, torch.float64, (ex.var("kv_idx"),)) for i in range(row.arity)]
        operands = [score if i == position else loads[i] for i in range(row.arity)]
        if row.domain == "where":
            operands[0] = make("lt", loads[0], 0.8)
        program = Program(
            "score", make(name, *operands), tuple(CaptureInfo(torch.float64, 1) for _ in range(row.arity))
        )
        binding, zero = Binding(tuple(others), ()), torch.zeros((), dtype=torch.int64)
        index = {"b": zero, "h": zero, "q_idx": zero, "kv_idx": torch.arange(200)}
        run = lambda s: evaluate(program, binding, score=s, **index).expand(200)
        step = 1e-6
        numeric = (run(x + step) - run(x - step)) / (2 * step)
        smooth = (run(x + step) - 2 * run(x) + run(x - step)).abs() < 1e-7  # away from kinks and jumps
        grad = torch.ones(200, dtype=torch.float64)
        analytic = evaluate(program, binding, score=x, grad=grad, body=score_gradient(program).d_score, **index).expand(
            200
        )
        assert smooth.sum() > 150
        torch.testing.assert_close(analytic[smooth], numeric[smooth], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "minimum", "maximum", "lt", "eq", "floordiv", "mod"])
def test_types_promote_as_in_torch(name):
    """All pairs of 0-d tensors of the dtypes an expression can have, and Python numbers on either side."""
    dtypes = [torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for left in dtypes:
        for right in [*dtypes, 2, 3.5]:
            a = torch.tensor(1).to(left)
            b = torch.tensor(2).to(right) if isinstance(right, torch.dtype) else right
            if not isinstance(right, torch.dtype) and name in ("minimum", "maximum"):
                continue  # torch has no minimum with a number
            if (
                torch.bool in (left, right)
                and name == "sub"
                or left == right == torch.bool
                and name in ("floordiv", "mod")
            ):
                continue  # torch refuses these
            expected = getattr(
                torch, {"truediv": "true_divide", "floordiv": "floor_divide", "mod": "remainder"}.get(name, name)
            )(a, b)
            node = make(name, ex.load(0, left, ()), ex.load(1, right, ()) if isinstance(right, torch.dtype) else right)
            assert node.dtype == expected.dtype, (name, left, right)
            captures = (a, b) if isinstance(right, torch.dtype) else (a,)
            zero = torch.zeros((), dtype=torch.int64)
            got = evaluate(Program("score", node), Binding(captures, ()), b=zero, h=zero, q_idx=zero, kv_idx=zero)
            assert got.dtype == expected.dtype and torch.equal(got, expected), (name, left, right)


def test_table_is_complete():
    for name, row in OPS.items():
        assert callable(row.eval) and callable(row.bounds) and row.text and row.name == name
        assert row.spelling.floating or row.spelling.integer
        assert row.vjp is None or row.domain in ("arith", "float", "where", "cast")
        assert row.arity == 1 or "{1}" in row.text
