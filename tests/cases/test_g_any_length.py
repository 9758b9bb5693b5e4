"""Masks at any length: caches whose lengths change in place, building a million tokens, the order of an image's tokens."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, create_block_mask, flex_attention, ordering
from tests.cases.bounds import assert_each_within
from tests.helpers import exact, make_qkv, on_devices, run

MILLION = 1 << 20


# ---------------------------------------------------------------- C41: a static cache
@on_devices
@pytest.mark.parametrize("q_len", [1, 9])
def test_c41_static_cache(device, q_len, fresh_stats) -> None:
    """Keys behind each request's length are NaN; the lengths are written in place between calls, and nothing is built again."""
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    q, k, v = make_qkv(3, (4, 2), (q_len, 2048), (32, 24), device=device, requires_grad=False)
    filled = lambda b, h, i, j: j < lengths[b]
    builds = plans = None
    for now in ((100, 2048, 1), (101, 2047, 2), (1, 1, 1), (2048, 128, 129)):
        lengths.copy_(torch.tensor(now))
        behind = torch.arange(2048, device=device)[None, :] >= lengths[:, None]
        keys, values = (x.masked_fill(behind[:, None, :, None], math.nan) for x in (k, v))
        out = flex_attention(q, keys, values, mask_mod=filled, enable_gqa=True, kernel_options={"strict_nan": True})
        for b, n in enumerate(now):
            want = exact([q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n]]).out
            assert_each_within(f"{n} keys", out[b : b + 1], want)
        stats = flexattn.stats()
        if builds is not None:
            assert (stats.builds.total(), stats.plans.total()) == (builds, plans)
        builds, plans = stats.builds.total(), stats.plans.total()


@on_devices
def test_c41_static_cache_of_finite_numbers(device) -> None:
    """What lies behind the lengths changes no bit, without any option."""
    lengths = torch.tensor([100, 2048, 1], dtype=torch.int32, device=device)
    q, k, v = make_qkv(3, (4, 2), (1, 2048), (32, 24), device=device, requires_grad=False)
    behind = (torch.arange(2048, device=device)[None, :] >= lengths[:, None])[:, None, :, None]
    results = []
    for junk in (0.0, 1e4):
        keys, values = (x.masked_fill(behind, junk) for x in (k, v))
        results.append(flex_attention(q, keys, values, mask_mod=lambda b, h, i, j: j < lengths[b], enable_gqa=True))
    assert torch.equal(*results)


# ---------------------------------------------------------------- C50: what building costs
def starts_of(lengths: Tensor, total: int) -> Tensor:
    """The first token of each token's document."""
    ends = lengths.cumsum(0)
    return torch.repeat_interleave(ends - lengths, lengths)[:total]


def blocks_of(start: Tensor) -> tuple[int, int]:
    """(partial, full) blocks of 128 of a mask that keeps start[q] <= k <= q, for starts that rise."""
    row = torch.arange(-(-len(start) // 128))
    first, last = start[row * 128], start[(row * 128 + 127).clamp(max=len(start) - 1)]
    whole = (row + 1) * 128 <= len(start)
    visited, full = row - first // 128 + 1, (row - (last + 127) // 128).clamp(min=0) * whole
    return int((visited - full).sum()), int(full.sum())


def _interval(total: int) -> tuple[object, Tensor]:
    start = starts_of(torch.full((total // 700 + 1,), 700), total)
    return (lambda b, h, i, j: (j >= start[i]) & (j <= i)), start


def _documents(lengths: Tensor, total: int) -> tuple[object, Tensor]:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:total]
    return (lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)), starts_of(lengths, total)


def _case(name: str) -> tuple[object, Tensor]:
    drawn = torch.randint(18_000, 33_000, (32,), generator=torch.Generator().manual_seed(50))
    return {
        "an interval of each query, 96,000 tokens": lambda: _interval(96_000),
        "window of 1024": lambda: (
            (lambda b, h, i, j: (j <= i) & (i - j < 1024)),
            (torch.arange(MILLION) - 1023).clamp(min=0),
        ),
        "32 documents of 18 to 33 thousand tokens": lambda: _documents(drawn, int(drawn.sum())),
        "a thousand windows of 1024": lambda: (
            (lambda b, h, i, j: (i // 1024 == j // 1024) & (j <= i)),
            torch.arange(MILLION) // 1024 * 1024,
        ),
        "a thousand documents of 1,000": lambda: _documents(torch.full((1049,), 1000), MILLION),
    }[name]()


NAMES = [
    "an interval of each query, 96,000 tokens",
    "window of 1024",
    "32 documents of 18 to 33 thousand tokens",
    "a thousand windows of 1024",
    "a thousand documents of 1,000",
]


@pytest.mark.parametrize("name", NAMES)
def test_c50_blocks_and_time(name: str) -> None:
    mask_mod, start = _case(name)
    partial, full = blocks_of(start)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        tiles = create_block_mask(mask_mod, None, None, len(start), len(start), "cpu").tile_map(128, 128)
        seconds.append(time.perf_counter() - begin)
    assert (tiles.partial.tiles(), tiles.full.tiles()) == (partial, full)
    assert (tiles.partial_t.tiles(), tiles.full_t.tiles()) == (partial, full)
    assert min(seconds) < 0.5  # 10 to 30 ms where nobody else computes; torch evaluates 10**12 pairs
    kept = int((torch.arange(len(start)) - start + 1).sum())
    assert create_block_mask(mask_mod, None, None, len(start), len(start), "cpu").statistics().kept_pairs == (
        kept,
        kept,
    )


def test_c50_known_counts() -> None:
    """The window's blocks by hand: 9 a row but the first 8, of which the first and the last are partial."""
    assert blocks_of(_case("window of 1024")[1]) == (2 * 8192 - 8, 7 * 8192 - 28)
    assert blocks_of(_case("a thousand windows of 1024")[1]) == (8 * 1024, 28 * 1024)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux")
@pytest.mark.parametrize("name", NAMES[1:3])
def test_c50_peak_memory(name: str) -> None:
    """A process of its own, whose peak grows by no more than 64 MiB; the matrix of blocks alone would be 64 MiB of bytes."""
    code = f"""
import sys
import torch
from flexattn import create_block_mask
from tests.cases.test_g_any_length import _case
torch.set_num_threads(1)
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
near = lambda b, h, i, j: (i >= j) & (i - j < 99)
str(create_block_mask(near, None, None, 1000, 1000, "cpu"))
mask_mod, start = _case({name!r})
before = peak()
mask = create_block_mask(mask_mod, None, None, len(start), len(start), "cpu")
mask.tile_map(128, 128).table(), mask.tile_map(128, 128).table(True)
built = peak()
str(mask), mask._repr_html_(), mask.window(500_000, 500_100, 499_000, 500_100)
print(built - before, peak() - before)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    built, shown = map(int, done.stdout.split())
    assert built <= 64 << 10
    assert shown <= 128 << 10


# ---------------------------------------------------------------- C59: the order of an image's tokens
def near(width: int, radius: int):
    """Pairs of pixels whose rows and columns differ by at most `radius`."""
    return lambda b, h, i, j: ((i // width - j // width).abs() <= radius) & ((i % width - j % width).abs() <= radius)


@pytest.mark.parametrize(
    ("side", "radius", "raster", "tiled"), [(128, 8, 0.128, 0.062), (192, 6, 0.069, 0.029), (64, 2, 0.092, 0.215)]
)
def test_c59_kept_blocks(side: int, radius: int, raster: float, tiled: float) -> None:
    report = ordering.propose(near(side, radius), (side, side), device="cpu")
    assert round(report.kept["raster"], 3) == raster
    assert round(report.kept["tiles 8 x 16"], 3) == tiled
    assert report.raster_wins == (raster < tiled)
    shown = str(report)
    for share in (raster, tiled):
        assert any(line.split()[-1].startswith(str(share)[:4]) for line in shown.splitlines()), shown
    assert ("raster order wins" in shown) == report.raster_wins


@on_devices
@pytest.mark.parametrize("kind", ["tiles", "morton", "shuffled"])
def test_c59_results_after_inverting(device, kind) -> None:
    """Output, lse and gradients are those of raster order."""
    high, wide = 24, 40
    order = {
        "tiles": lambda: ordering.tiles((high, wide), (8, 16)),
        "morton": lambda: ordering.morton((high, wide)),
        "shuffled": lambda: ordering.Ordering("shuffled", torch.randperm(high * wide)),
    }[kind]().to(device)
    table = torch.randn(high * wide, device=device)
    bias = lambda s, b, h, i, j: s + table[i] * 0.1 - table[j] * (h + 1)
    qkv = make_qkv(2, (4, 2), (high * wide, high * wide), (16, 24), device=device)
    want = exact(qkv, near(wide, 3), bias)
    plain = run(qkv, near(wide, 3), bias)
    moved = [x.detach().requires_grad_() for x in qkv]
    weights = torch.Generator().manual_seed(17)
    out, aux = flex_attention(
        *map(order.apply, moved),
        score_mod=order.score_mod(bias),
        block_mask=create_block_mask(
            order.mask_mod(near(wide, 3)), None, None, high * wide, high * wide, device=device, BLOCK_SIZE=128
        ),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out, lse = order.invert(out), order.invert(aux.lse, dim=-1)
    assert_each_within("out", out, want.out)
    assert_each_within("lse", lse, want.lse)
    d_out, d_lse = (torch.randn(x.shape, generator=weights, dtype=torch.float64).to(x) for x in (out, lse))
    grads = torch.autograd.grad((out, lse), moved, (d_out, d_lse))
    reference = torch.autograd.grad(*_again(qkv, near(wide, 3), bias), (d_out, d_lse))
    for name, got, expected in zip(("dq", "dk", "dv"), grads, reference):
        assert_each_within(name, got, expected)
    assert (out - plain.out).abs().max() < 1e-5


def _again(qkv, mask_mod, score_mod):
    out, aux = flex_attention(
        *qkv, score_mod=score_mod, mask_mod=mask_mod, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return (out, aux.lse), list(qkv)
