"""Tracing: what programs look like, what is a number and what a constant, captures, control flow, and every error."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from flexattn.errors import CallError, CaptureIndexError, FlexError, MaskTypeError, TraceError
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.trace import mod_kind, trace

ZERO = torch.zeros((), dtype=torch.int64)
WINDOW = 5


def text(fn, kind="score"):
    return str(trace(fn, kind).program)


def run(fn, kind="score", q_len=9, kv_len=13, batch=2, heads=3, dtype=torch.float32, reference=None):
    """Our value and torch's, on the same broadcasting tensors."""
    torch.manual_seed(0)
    b, h, q, k = (
        torch.arange(n).view([-1 if d == a else 1 for d in range(4)])
        for a, n in enumerate((batch, heads, q_len, kv_len))
    )
    score = torch.randn(batch, heads, q_len, kv_len, dtype=dtype)
    args = (score, b, h, q, k) if kind == "score" else (b, h, q, k)
    traced = trace(fn, kind, score_dtype=dtype)
    got = evaluate(*traced, score=score, b=b, h=h, q_idx=q, kv_idx=k)
    expected = (reference or fn)(*args)
    shape = score.shape
    return got.expand(shape), torch.as_tensor(expected).to(got.dtype).expand(shape)


SCORE_MODS = {
    "identity": lambda s, b, h, q, k: s,
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s + s**3 - s**2.0,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "relative": lambda s, b, h, q, k: s + (q - k),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 8)),
    "softcap": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "reversed operators": lambda s, b, h, q, k: 2 - s + 1 / (2 + s.abs()) - (7 // (k + 1)) + 9 % (q + 1),
    "floor": lambda s, b, h, q, k: (
        s + (q - k) // 4 + (q - k) % 4 + torch.div(q - k, 3, rounding_mode="floor") + torch.remainder(q - k, 5)
    ),
    "trunc division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc") + torch.fmod(q - k, 4),
    "float floor": lambda s, b, h, q, k: s // 0.37 + s % 0.37,
    "functions": lambda s, b, h, q, k: (
        s.exp() + s.abs().log1p() + torch.sqrt(s.abs() + 1) + torch.rsqrt(s * s + 1) + s.sin() + s.cos() + torch.erf(s)
    ),
    "rounding": lambda s, b, h, q, k: (
        (s * 3).floor() + (s * 3).ceil() + torch.round(s * 3) + torch.trunc(s * 3) + torch.sign(s)
    ),
    "activations": lambda s, b, h, q, k: (
        F.silu(s) + F.gelu(s) + F.gelu(s, approximate="tanh") + F.relu(s) + F.softplus(s) + F.elu(s) + F.leaky_relu(s)
    ),
    "more activations": lambda s, b, h, q, k: (
        F.mish(s) + F.hardswish(s) + F.logsigmoid(s) + F.softsign(s) + F.selu(s) + F.relu6(s) + F.hardtanh(s)
    ),
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5) + (q - k).clamp(0, 3) + s.clamp(min=0.1) + s.clip(max=0.2),
    "casts": lambda s, b, h, q, k: (
        s.to(torch.float16).float() + (q > k).to(torch.int64) + q.float() / 3 + (s > 0).float()
    ),
    "tests": lambda s, b, h, q, k: (
        torch.where(torch.isinf(s / 0.0 * (q > 3)) | torch.isnan(s), 0.0, s) + torch.isfinite(s)
    ),
    "logic": lambda s, b, h, q, k: torch.where(
        torch.logical_and(q > 2, k) | torch.logical_not(k < 4) ^ (q == k), s, 1.0
    ),
    "bits": lambda s, b, h, q, k: s + ((q & 3) | (k << 1)) + (k >> 1) + (~q) + (q ^ k),
    "min max": lambda s, b, h, q, k: torch.minimum(s, q * 0.1) + torch.maximum(s, k * 0.1),
    "int division": lambda s, b, h, q, k: s + q / (k + 1),
    "pow": lambda s, b, h, q, k: (
        (s.abs() + 0.1) ** 2.5 + torch.pow(s.abs() + 1, 0.5) + 2.0**s + (q + 1) ** 2 + s**-1 + s**0
    ),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_programs_compute_what_torch_computes(name):
    got, expected = run(SCORE_MODS[name])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["softcap", "alibi", "functions", "pow"])
def test_float64_scores_stay_float64(name):
    got, expected = run(SCORE_MODS[name], dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_captures_of_every_rank_dtype_and_stride():
    torch.manual_seed(1)
    scalar, one = torch.tensor(0.5), torch.tensor([2])
    table = torch.randn(3, 40)
    strided = torch.randn(13, 9).t()
    four = torch.randn(2, 3, 9, 13, dtype=torch.bfloat16)
    ids = torch.randint(0, 13, (9,), dtype=torch.int32)
    flags = torch.rand(13) < 0.5

    def mod(s, b, h, q, k):
        return (
            s * scalar
            + one
            + table[h, q - k + 20]
            + strided[q, k]
            + four[b, h, q, k]
            + torch.where(flags[k], ids[q], 0)
        )

    got, expected = run(mod)
    torch.testing.assert_close(got, expected)
    assert [c.rank for c in trace(mod, "score").program.captures] == [0, 0, 2, 2, 4, 1, 1]


def test_chained_partial_and_negative_indexing():
    torch.manual_seed(2)
    perm, table, cube = torch.randperm(13), torch.randn(3, 13), torch.randn(2, 3, 13)
    chained = lambda s, b, h, q, k: (
        s + table[h, perm[k]] + cube[b][h][k] + table[-1, -(k % 13) - 1] + cube[..., 0, 2][b] + cube[:, 1, 3:][b, k % 9]
    )
    plain = lambda s, b, h, q, k: (
        s + table[h, perm[k]] + cube[b, h, k] + table[-1, -(k % 13) - 1] + cube[b, 0, 2] + cube[b, 1, k % 9 + 3]
    )
    got, expected = run(chained, reference=plain)
    torch.testing.assert_close(got, expected)


def test_rows_reduce():
    torch.manual_seed(3)
    a, c = torch.randn(9, 5), torch.randn(13, 5)
    for mod, expected in (
        (lambda s, b, h, q, k: s + torch.dot(a[q], c[k]), a @ c.t()),
        (lambda s, b, h, q, k: s + (a[q] * c[k]).sum(-1), a @ c.t()),
        (lambda s, b, h, q, k: s + a[q] @ c[k], a @ c.t()),
        (
            lambda s, b, h, q, k: s + a[q].amax() - a[q, 1:3].mean(),
            (a.amax(1) - a[:, 1:3].mean(1))[:, None].expand(9, 13),
        ),
        (lambda s, b, h, q, k: s + sum(a[q][i] for i in range(5)), a.sum(1)[:, None].expand(9, 13)),
    ):
        traced = trace(mod, "score")
        got = evaluate(
            *traced,
            score=torch.zeros(9, 13),
            b=ZERO,
            h=ZERO,
            q_idx=torch.arange(9)[:, None],
            kv_idx=torch.arange(13)[None],
        )
        torch.testing.assert_close(got, expected)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor(0.3))
        self.window = 4

    def forward(self, s, b, h, q, k):
        return torch.where(q - k <= self.window, s + self.bias, -math.inf)


class Callable:
    def __init__(self, window):
        self.window = window

    def inner(self, q, k):
        return q - k < self.window

    def __call__(self, b, h, q, k):
        return self.inner(q, k)


def test_partials_objects_modules_and_methods():
    def windowed(s, b, h, q, k, *, w, bias=0.5):
        return torch.where(q - k < w, s + bias, -math.inf)

    for mod in (functools.partial(windowed, w=3), Module(), functools.partial(windowed, w=3, bias=1)):
        got, expected = run(mod)
        torch.testing.assert_close(got, expected)
    for mask in (Callable(3), Callable(3).__call__):
        got, expected = run(mask, "mask")
        assert torch.equal(got, expected)
    assert trace(Module(), "score").binding.captures[0].requires_grad


@pytest.mark.parametrize("value", [0, 1, 2, 16, 17, -1, 2**31])
def test_numbers_from_outside_never_change_the_program(value):
    """Closures, defaults, keyword defaults, partials, attributes, globals and containers; 1 and 2 are also literals of the code."""

    def build(w):
        settings = {"w": w}
        return (
            lambda b, h, q, k: (q - k < w) & (k % 2 == 1),
            lambda b, h, q, k, w=w: (q - k < w) & (k % 2 == 1),
            functools.partial(lambda w, b, h, q, k: (q - k < w) & (k % 2 == 1), w),
            Callable(w),
            lambda b, h, q, k: (q - k < settings["w"]) & (k % 2 == 1),
            lambda b, h, q, k: (q - k < [w][0] + 1) & (k % 2 == 1),
        )

    for ours, base in zip(build(value), build(1000)):
        assert trace(ours, "mask").program == trace(base, "mask").program
        assert value in (v := trace(ours, "mask").binding.numbers) or value + 1 in v


def test_globals_are_numbers_too():
    global WINDOW
    before = trace(lambda b, h, q, k: q - k < WINDOW, "mask")
    WINDOW, old = 11, WINDOW
    try:
        after = trace(lambda b, h, q, k: q - k < WINDOW, "mask")
    finally:
        WINDOW = old
    assert before.program == after.program and before.binding.numbers == (5,) and after.binding.numbers == (11,)


def test_derived_numbers_fold_into_one_argument_and_literals_stay_constants():
    cap = 30.0
    traced = trace(lambda s, b, h, q, k: torch.tanh(s * (1 / cap)) * 2.5, "score")
    assert str(traced.program) == "tanh(score*num0)*2.5" and traced.binding.numbers == (1 / 30.0,)
    assert text(lambda s, b, h, q, k: s * float("inf")) == "score*inf"


def test_control_flow_on_outside_numbers_specialises_by_path():
    def build(w):
        def mask(b, h, q, k):
            return q - k < w if w > 0 else q >= k

        return mask

    assert str(trace(build(3), "mask").program) == str(trace(build(7), "mask").program) == "q_idx - kv_idx < num0"
    assert str(trace(build(0), "mask").program) == "kv_idx <= q_idx"


def test_exponents_are_structural():
    assert text(lambda s, b, h, q, k, n=2: s**n) == "score*score"


def test_new_closures_and_new_tensors_are_the_same_program():
    def build(n):
        table = torch.randn(n)
        return lambda s, b, h, q, k: s + table[k]

    assert trace(build(5), "score").program == trace(build(900), "score").program
    assert hash(trace(build(5), "score").program) == hash(trace(build(900), "score").program)
    doubled = lambda s, b, h, q, k: s + torch.zeros(3, dtype=torch.float64)[k]
    assert trace(doubled, "score").program != trace(build(5), "score").program


def test_one_tensor_is_one_capture_and_unused_ones_vanish():
    t, unused = torch.arange(9), torch.arange(3)
    traced = trace(lambda b, h, q, k: (t[q] == t[k]) | (False & (unused[q] > 0)), "mask")
    assert len(traced.binding.captures) == 1 and traced.binding.captures[0] is t


def test_gradients_reach_what_a_mod_computes_itself():
    p = torch.randn(9, requires_grad=True)
    traced = trace(lambda s, b, h, q, k: s + (p * 2)[k], "score")
    assert traced.binding.captures[0].requires_grad and traced.binding.captures[0].grad_fn is not None


@pytest.mark.parametrize("result, expected", [(True, "True"), (False, "False"), (1, "True"), (0, "False")])
def test_masks_may_return_python_values(result, expected):
    assert text(lambda b, h, q, k: result, "mask") in (expected, "num0 != 0")


def test_masks_may_return_integers_and_one_element_tensors():
    off = torch.tensor([7])
    assert text(lambda b, h, q, k: q % 2, "mask") == "q_idx % 2 != 0"
    assert text(lambda b, h, q, k: q + off >= k, "mask") == "kv_idx <= q_idx + cap0"


def branch(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return True
    return q_idx == 0


ERRORS = {
    "if": (branch, "mask", TraceError, "torch.where"),
    "and": (lambda b, h, q, k: q > k and q > 3, "mask", TraceError, "&"),
    "item": (lambda b, h, q, k: q.item() > k, "mask", TraceError, "item"),
    "random": (lambda s, b, h, q, k: s + torch.rand_like(s), "score", TraceError, "outside the mod"),
    "random number": (lambda s, b, h, q, k: s + torch.rand(()), "score", TraceError, "outside the mod"),
    "random table": (lambda b, h, q, k: torch.randn(9, 9)[q, k] > 0, "mask", TraceError, "outside the mod"),
    "random in place": (lambda s, b, h, q, k: s + torch.zeros(()).normal_(), "score", TraceError, "outside the mod"),
    "random in a helper": (lambda s, b, h, q, k: s + noise(), "score", TraceError, "outside the mod"),
    "complex": (lambda s, b, h, q, k: s.to(torch.complex64), "score", TraceError, "real"),
    "in place": (lambda s, b, h, q, k: s.add_(1), "score", TraceError, "add"),
    "whole tensor": (lambda s, b, h, q, k: s + torch.zeros(4), "score", TraceError, "index"),
    "range": (lambda s, b, h, q, k: sum(i for i in range(q)), "score", TraceError, "Python value"),
    "float mask": (lambda b, h, q, k: q * 1.5, "mask", MaskTypeError, "torch.bool"),
    "float index": (lambda s, b, h, q, k: s + torch.zeros(4)[q * 0.5], "score", CaptureIndexError, "integer"),
    "too many indices": (lambda s, b, h, q, k: s + torch.zeros(4)[q, k], "score", CaptureIndexError, "too many"),
    "wide number": (lambda b, h, q, k: q - k < 2**70, "mask", TraceError, "64 bits"),
    "unknown": (lambda s, b, h, q, k: torch.cumsum(s, 0), "score", TraceError, "cumsum"),
    "returns nothing": (lambda s, b, h, q, k: None, "score", TraceError, "NoneType"),
    "returns a row": (lambda s, b, h, q, k: torch.zeros(4, 3)[q % 4], "score", TraceError, "one value"),
    "minus on truth": (lambda b, h, q, k: -(q > k), "mask", TraceError, "~"),
    "float bits": (lambda s, b, h, q, k: s & 1, "score", TraceError, "integers"),
    "string": (lambda s, b, h, q, k: s + "a", "score", TraceError, "str"),
    "long row": (lambda s, b, h, q, k: s + torch.zeros(4, 999)[q].sum(), "score", TraceError, "256"),
    "autograd function": (lambda s, b, h, q, k: Twice.apply(s), "score", TypeError, ""),
}


def noise():
    return torch.randint(0, 9, ())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("name", [n for n in ERRORS if n != "autograd function"])
def test_errors_name_the_users_line_and_what_to_try(name):
    fn, kind, cls, fragment = ERRORS[name]
    with pytest.raises(cls) as caught:
        trace(fn, kind)
    assert isinstance(caught.value, FlexError)
    assert fragment in str(caught.value)
    assert "test_trace.py:" in str(caught.value)


def test_autograd_function_in_a_mod_is_an_error():
    with pytest.raises(TraceError, match=r"autograd\.Function"):
        trace(ERRORS["autograd function"][0], "score")


def test_mod_kind_counts_parameters():
    assert mod_kind(lambda s, b, h, q, k: s) == "score" and mod_kind(branch) == "mask"
    assert mod_kind(Callable(3)) == "mask" and mod_kind(Module()) == "score"
    assert mod_kind(functools.partial(lambda w, b, h, q, k: q, 3)) == "mask"
    with pytest.raises(AssertionError, match="3"):
        mod_kind(lambda a, b, c: a)


def test_a_variadic_mod_is_what_the_caller_passes_it_as():
    def decorated(f):
        return lambda *a: f(*a)

    mod = decorated(lambda s, b, h, q, k: s * 2)
    assert mod_kind(mod, "score") == "score" and mod_kind(mod, "mask") == "mask"
    assert mod_kind(lambda s, *rest: s, "score") == "score"
    assert mod_kind(lambda s, b, h, q, k, *rest: s) == "score"
    with pytest.raises(MaskTypeError, match="j must be given by name"):
        mod_kind(lambda s, b, h, i, *, j: s, "score")
    with pytest.raises(CallError, match="callable; got NoneType"):
        mod_kind(None)


def test_captured_tensors_have_the_names_of_the_code():
    table, module = torch.rand(4), Module()
    for mod, name in (
        (lambda s, b, h, q, k: s * table[h], "table"),
        (lambda s, b, h, q, k: s * GLOBAL_TABLE[h], "GLOBAL_TABLE"),
        (functools.partial(lambda own, s, b, h, q, k: s * own[h], table), "own"),
        (module, "bias"),
    ):
        assert trace(mod, "score").program.capture_name(0) == f"captured tensor `{name}`"
    assert trace(lambda s, b, h, q, k: s * (table * 2)[h], "score").program.capture_name(0) == "captured tensor 0"


GLOBAL_TABLE = torch.rand(4)


def test_sources_join_nodes_to_lines():
    traced = trace(branchless, "mask", sources=True)
    lines = {str(s).rsplit(":", 1)[1] for s in traced.program.sources.values()}
    first = branchless.__code__.co_firstlineno
    assert {str(first + 1), str(first + 2)} <= lines


def branchless(b, h, q_idx, kv_idx):
    near = q_idx - kv_idx < 3
    return near & (q_idx >= kv_idx)


def test_out_of_range_reads_are_reported_and_harmless():
    buf = torch.arange(4.0)
    traced = trace(lambda s, b, h, q, k: s + buf[k], "score")
    seen = []
    got = evaluate(
        *traced,
        score=torch.zeros(1, 6),
        b=ZERO,
        h=ZERO,
        q_idx=ZERO.view(1, 1),
        kv_idx=torch.arange(-1, 5)[None],
        out_of_range=seen,
    )
    assert torch.equal(got[0, :5], torch.tensor([3.0, 0, 1, 2, 3])) and math.isnan(got[0, 5])
    assert seen[0].tolist() == [[False] * 5 + [True]]


class Bands(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.activations = torch.nn.ModuleList([torch.nn.GELU(), torch.nn.Tanh()])
        self.heads = torch.nn.ParameterDict({"slope": torch.nn.Parameter(torch.randn(4))})

    def forward(self, score, b, h, q_idx, kv_idx):
        for activation in self.activations:
            score = activation(score)
        return score * self.heads["slope"][h] if "slope" in self.heads and len(self.activations) == 2 else score


def test_modules_and_objects_that_are_containers():
    assert str(trace(Bands(), "score").program).startswith("tanh(")
    assert str(trace(Bands(), "score").program).endswith("*cap0[h]")
    acts = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
    assert str(trace(lambda s, b, h, q, k: acts(s), "score").program).startswith("tanh(")
