"""Interval proofs: sound on random masks and boxes, tables exact where promised."""

import time

import pytest
import torch

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.interval import Table, Tables, bounds
from flexattn.frontend.ops import OPS
from flexattn.frontend.trace import trace

ZERO = torch.zeros((), dtype=torch.int64)


def check_sound(mask, q_len, kv_len, block, sets=False):
    """Every block's proof agrees with brute force; returns how many blocks were decided."""
    traced = trace(mask, "mask")
    q, k = torch.arange(q_len), torch.arange(kv_len)
    dense = evaluate(*traced, b=ZERO, h=ZERO, q_idx=q[:, None], kv_idx=k[None]).expand(q_len, kv_len)
    ql, kl = q[::block], k[::block]
    qb = ql[:, None], torch.clamp(ql + block, max=q_len)[:, None] - 1
    kb = kl[None], torch.clamp(kl + block, max=kv_len)[None] - 1
    must, may = bounds(
        traced.program, Tables(traced.binding), b=(ZERO, ZERO), h=(ZERO, ZERO), q_idx=qb, kv_idx=kb, sets=sets
    )
    must, may = must.expand(len(ql), len(kl)), may.expand(len(ql), len(kl))
    for i in range(len(ql)):
        for j in range(len(kl)):
            cell = dense[i * block : (i + 1) * block, j * block : (j + 1) * block]
            assert not must[i, j] or cell.all(), (i, j)
            assert may[i, j] or not cell.any(), (i, j)
    return int((must | ~may).sum()), must.numel()


def test_usual_masks_are_decided_off_the_diagonal():
    ids = torch.arange(100) // 23
    for mask in (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q >= k) & (q - k < 9),
        lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        lambda b, h, q, k: (k < 13) | (q >= k),
        lambda b, h, q, k: q // 16 == k // 16,
    ):
        decided, total = check_sound(mask, 100, 100, 8)
        assert decided >= total // 2


def test_reads_below_a_table_of_two_dimensions_are_not_proved_inside():
    ones = torch.ones(1, 16, dtype=torch.int32)
    check_sound(lambda b, h, q, k: ones[b, q - 2 * k - 4] != 0, 8, 8, 8)  # -18 to 3, and below -16 a read gives 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=str)
def test_reads_on_either_side_of_a_table_are_not_proved_inside(dtype):
    """Such a read gives 0 or NaN, which a table of ones does not hold."""
    ones = torch.ones(10, dtype=dtype)
    for mask in (
        lambda b, h, q, k: ones[k] == 1,
        lambda b, h, q, k: ones[q - k] == 1,
        lambda b, h, q, k: ones[k - 25] == 1,
        lambda b, h, q, k: ones[q - 25] == ones[k],
        lambda b, h, q, k: (ones[k] == 1) & (k < 10) & (q >= k),
    ):
        check_sound(mask, 40, 40, 8)
        check_sound(mask, 40, 40, 3)


@pytest.mark.parametrize("far", [2**63 - 1, -(2**63), 2**62, -(2**62), 2**31, 0])
def test_integers_that_wrap_around_prove_nothing(far):
    for mask in (
        lambda b, h, q, k: q + far > k,
        lambda b, h, q, k: far - q > k,
        lambda b, h, q, k: k * far <= q,
        lambda b, h, q, k: (q - k).abs() * far >= 0,
        lambda b, h, q, k: q - k < far,
        lambda b, h, q, k: (q + far) - (k - far) > 0,
        lambda b, h, q, k: (q + far) + (k + far) > 0,
    ):
        check_sound(mask, 40, 40, 8)


FAR_IDS = torch.tensor([2**63 - 1, -(2**63), 2**62, -1, 0, 2**62 + 1, -(2**62), 5]).repeat_interleave(5)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: FAR_IDS[q] - FAR_IDS[k] > 0,
        lambda b, h, q, k: FAR_IDS[q] + k > FAR_IDS[k],
        lambda b, h, q, k: -FAR_IDS[q] > FAR_IDS[k],
        lambda b, h, q, k: abs(FAR_IDS[q]) > k,
        lambda b, h, q, k: ~FAR_IDS[q] + k > 0,
        lambda b, h, q, k: FAR_IDS[q] * 3 > k,
        lambda b, h, q, k: FAR_IDS[q] << 1 > k,
        lambda b, h, q, k: FAR_IDS[q] // 3 > FAR_IDS[k] // (k - 4 + (k == 4).long()),
        lambda b, h, q, k: (FAR_IDS[q] ^ FAR_IDS[k]) + k > 0,
    ],
    ids=["difference", "sum", "negated", "absolute", "complement", "multiple", "shifted", "quotient", "bits"],
)
def test_captured_integers_may_wrap_around_too(mask):
    """Hashes as ids: arithmetic on values of 64 bits wraps, and then bounds prove nothing."""
    check_sound(mask, 40, 40, 8)
    check_sound(mask, 40, 40, 5, sets=True)


def test_small_captured_integers_still_prove():
    """64-bit tensors whose values are small are told apart from those that may wrap."""
    first = torch.arange(100) // 23 * 23
    decided, total = check_sound(
        lambda b, h, q, k: (first[q] == first[k]) & (q - first[q] >= k - first[k]), 100, 100, 8
    )
    assert decided >= total // 2


EDGES = torch.tensor([0, 1, -1, 7, 8, -8, -9, 100, 2**31, -(2**31), 2**62 - 1, 2**62, -(2**62), 2**63 - 1, -(2**63)])


@pytest.mark.parametrize("op", ["and", "or", "xor", "rshift", "lshift"])
def test_bounds_of_bits_hold_every_value(op):
    """All pairs of intervals between the edges, against all their points; by far too much, and by less than nothing, too."""
    few = torch.tensor([-70, -1, 0, 1, 5, 62, 63, 64, 90])
    left, right = EDGES.sort().values, (few if "shift" in op else EDGES).sort().values
    if op == "lshift":
        left = left[(left >= -100) & (left <= 100)]  # the others may wrap, which `may_wrap` finds
    row = OPS[op]
    for i in range(len(left)):
        for j in range(len(right)):
            a, b = (left[i], left[i:]), (right[j], right[j:])
            lo, hi = row.bounds((a[0], a[1][:, None]), (b[0], b[1][None]))
            lo, hi = lo.expand(len(a[1]), len(b[1])), hi.expand(len(a[1]), len(b[1]))
            values = row.eval(a[1][:, None], b[1][None])
            if op == "lshift":
                values, lo, hi = (x[:, : int((b[1] < 55).sum())] for x in (values, lo, hi))
            if values.numel():
                assert bool((values.cummin(0).values.cummin(1).values >= lo).all()), (left[i], right[j])
                assert bool((values.cummax(0).values.cummax(1).values <= hi).all()), (left[i], right[j])


def test_floats_too_large_for_an_integer_prove_nothing():
    values = torch.tensor([1e10, -1e10, 3.0, 4.6e18, 9.2e18, -9.2e18, 1e13, -7.0]).repeat_interleave(5)
    for mask in (
        lambda b, h, q, k: values[q].to(torch.int64) > values[k].to(torch.int64),
        lambda b, h, q, k: values[q].long() + values[k].long() > 0,
        lambda b, h, q, k: values[q].long() > 4 * 2**60,
    ):
        check_sound(mask, 40, 40, 8)
    decided, total = check_sound(lambda b, h, q, k: (q * 0.5).long() >= (k * 0.5).long() + 1, 40, 40, 5)
    assert decided >= total // 2


def test_value_sets_decide_unsorted_documents():
    ids = torch.tensor([3, 1, 3, 2, 0]).repeat_interleave(64)
    mask = lambda b, h, q, k: ids[q] == ids[k]
    assert check_sound(mask, 320, 320, 64, sets=True)[0] == 25


def random_mask(generator):
    """A random predicate over indices, tables, division, bits and selection."""

    def r(n):
        return int(torch.randint(0, n, (), generator=generator))

    table = torch.randint(-5, 60, (50,), generator=generator)
    flags = torch.rand(50, generator=generator) < 0.3
    values = torch.randn(50, generator=generator)
    plan = [(r(12), r(100) - 50, r(7) + 1) for _ in range(4)]

    def integer(q, k, step):
        kind, c, d = step
        return [
            q,
            k,
            q - k,
            q + k,
            q // d,
            k % d,
            (q - k) // d,
            (q - k) % -d,
            table[q],
            table[k % 50],
            (q ^ k),
            q * d - k,
        ][kind] + (c if kind % 3 else 0)

    def mask(b, h, q, k):
        a, c, d, e = (integer(q, k, s) for s in plan)
        m = torch.where(flags[q], a > c, d <= e)
        m = m | (values[k] * 0.5 > values[q]) if plan[0][0] % 2 else m & ((a & 7) != (c & 3))
        return m ^ flags[k] if plan[1][0] % 3 == 0 else m

    return mask


def test_random_masks_within_a_time_budget():
    seed = int(time.time())
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    end, count = time.time() + 4, 0
    while time.time() < end or count < 3:
        check_sound(random_mask(generator), 50, 50, 7, sets=count % 2 == 0)
        count += 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("n", [1, 2, 63, 1000, 40_000])
def test_table_ranges(n, dtype):
    torch.manual_seed(n)
    data = torch.randint(0, 200, (n,)).to(dtype)
    for values in (data, data.sort().values):
        table = Table(values)
        lo = torch.randint(0, n, (200,))
        hi = torch.maximum(lo, torch.clamp(lo + torch.randint(0, n, (200,)), max=n - 1))
        least, most = table.range(lo, hi)
        for a, z, x, y in zip(lo.tolist(), hi.tolist(), least.tolist(), most.tolist()):
            piece = values[a : z + 1]
            if n <= 1000 or table.is_sorted:
                assert x == piece.min().item() and y == piece.max().item()
            assert x <= piece.min().item() and y >= piece.max().item()


def test_nan_in_a_table_proves_nothing():
    data = torch.tensor([1.0, float("nan"), 2.0, 3.0])
    mask = lambda b, h, q, k: data[k] < 10
    check_sound(mask, 4, 4, 2)
