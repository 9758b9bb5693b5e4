"""The fuzz test itself: its problems are what they say, right results pass, wrong ones do not, and processes that fail are told of."""

from __future__ import annotations

import functools
import json
import queue
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.runtime import choose, launch
from flexattn.runtime import compile as compiling
from flexattn.runtime import device as devices
from flexattn.runtime.attention import prepare
from flexattn.runtime.reference import oracle
from tests.fuzz import ahead, runner
from tests.fuzz.judge import judge, right
from tests.fuzz.problems import Problem, is_crowded, make
from tests.fuzz.runner import Outcome, Way, run_group, run_processes, share_of
from tests.fuzz.structures import STRUCTURES, Sizes

CPU = torch.device("cpu")
SMALL = Way("cpu", is_small=True)
ALL = range(len(STRUCTURES))


# ---------------------------------------------------------------- problems
def test_at_most_48_structures_meet_all_head_dims_types_and_signs() -> None:
    assert len({s.name for s in STRUCTURES}) == len(STRUCTURES) <= 48
    variants = [v for s in STRUCTURES for v in s.variants]
    assert {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)} <= {v.dims for v in variants}
    kinds = {(v.dtype, v.want_max, v.is_positive) for v in variants}
    assert len(kinds) == 8


def test_a_seed_is_one_problem() -> None:
    for seed in (3, 52, 4711):
        a, b = (make(seed, CPU, is_small=True) for _ in range(2))
        assert str(a) == str(b)
        assert torch.equal(a.q, b.q) and torch.equal(a.v, b.v)
        assert all(torch.equal(x, y) for x, y in zip(a.call()[:2], b.call()[:2]))


def test_problems_are_of_many_kinds() -> None:
    problems = [make(seed, CPU, is_small=True) for seed in range(300)]
    assert {p.sizes.q_heads // p.sizes.kv_heads for p in problems} >= {1, 2, 3, 4, 8}
    assert any(p.k.shape[0] < p.q.shape[0] for p in problems)
    assert any("one tensor" in p.layouts for p in problems)
    assert min(p.sizes.kv_len for p in problems) < 40 < 1000 < max(p.sizes.kv_len for p in problems)
    assert {p.scale is None for p in problems} == {True, False}
    assert min(p.scale for p in problems if p.scale is not None) < 0


@pytest.mark.parametrize("seed", [0, 2, 7, 11])
def test_memory_around_the_tensors_is_nan_and_rows_are_aligned(seed: int) -> None:
    p = make(seed, CPU, is_small=True)
    for x in (p.q, p.k, p.v):
        assert not x.isnan().any() and x.stride(3) == 1
        assert all(s % 8 == 0 for s in x.stride()[:3]) and x.storage_offset() % 8 == 0
        outside = x.untyped_storage().nbytes() // x.element_size() - x.numel()
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        if "one tensor" not in p.layouts:
            assert int(whole.isnan().sum()) == outside > 0


@pytest.mark.parametrize("index", ALL)
def test_what_is_right_is_what_the_oracle_says(index: int) -> None:
    p = _tiny(index)
    out, lse = oracle(p.q, p.k, p.v, p.mask.mod, p.score.mod, p.scale)
    found = right(p)
    torch.testing.assert_close(found.out, out, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.lse, lse, rtol=1e-9, atol=1e-9)


def _tiny(index: int) -> Problem:
    """The smallest of a few problems of a structure: the oracle may map its functions over every pair."""
    return min(
        (make(index + len(STRUCTURES) * n, CPU, is_small=True) for n in range(20)), key=lambda p: _pairs(p.sizes)
    )


def _pairs(sizes: Sizes) -> int:
    return sizes.batch * sizes.q_heads * sizes.q_len * sizes.kv_len


# ---------------------------------------------------------------- what passes
@pytest.mark.parametrize("first", ALL[::8])
def test_every_structure_is_right_on_the_cpu(first: int) -> None:
    outcomes = run_group([first + n + len(STRUCTURES) * v for n in range(8) for v in range(2)], SMALL)
    assert len(outcomes) == 16
    assert all(o.is_right for o in outcomes), [str(o) for o in outcomes if not o.is_right]


def _as_a_kernel(p: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Tile by tile; probabilities against a peak that stays until it has grown by 2**8, rounded once; a result that is rounded once."""
    wanted, dtype, tile = right(p), p.variant.dtype, 64
    peak = torch.full(wanted.lse.shape, -torch.inf, dtype=torch.float64)
    out, total = torch.zeros_like(wanted.out), torch.zeros_like(peak)
    for first in range(0, wanted.weights.shape[-1], tile):
        scores = wanted.weights[..., first : first + tile].log2()
        highest = scores.amax(-1)
        moved = torch.where((highest > peak + 8) | torch.isneginf(peak), torch.maximum(highest, peak), peak)
        safe = torch.where(torch.isneginf(moved), 0.0, moved)
        correction, peak = torch.exp2(peak - safe), moved
        probs = torch.exp2(scores - safe.unsqueeze(-1))
        total = total * correction + probs.sum(-1)
        values = wanted.values[..., first : first + tile, :]
        out = out * correction.unsqueeze(-1) + probs.to(dtype).double() @ values
    out = out / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return out.to(dtype), wanted.lse.float(), wanted.maxima.float()


@pytest.mark.parametrize("first", range(0, 192, 32))
def test_roundings_of_a_fused_kernel_pass(first: int) -> None:
    for seed in range(first, first + 32):
        p = make(seed, CPU, is_small=True)
        figures = judge(p, *_as_a_kernel(p))
        assert bool((figures <= 1).all()), (str(p), figures.tolist())


# ---------------------------------------------------------------- what does not
def _row(p: Problem) -> tuple[int, ...] | None:
    """A row that keeps two keys or more, of weights that matter."""
    weights = right(p).weights
    kept = ((weights > 2e-3).sum(-1) >= 2).nonzero()
    return tuple(kept[p.seed % len(kept)].tolist()) if len(kept) else None


def _in_a_row(corrupt: Callable[[Problem, Tensor, Tensor, tuple[int, ...]], None]) -> Callable[..., None]:
    """Corrupts a row of two keys or more, or anything where there is none."""

    @functools.wraps(corrupt)
    def corrupted(p: Problem, out: Tensor, lse: Tensor) -> None:
        row = _row(p)
        if row is None:
            _nan(p, out, lse)
        else:
            corrupt(p, out, lse, row)

    return corrupted


@_in_a_row
def _without_a_key(p: Problem, out: Tensor, lse: Tensor, row: tuple[int, ...]) -> None:
    """One row misses one key."""
    wanted = right(p)
    weights = wanted.weights[row].clone()
    key = (weights > 2e-3).nonzero()[-1]
    lse[row] += torch.log1p(-weights[key]).float().item()
    weights[key] = 0.0
    out[row] = (weights @ wanted.values[row[:2]] / weights.sum()).to(out.dtype)


@_in_a_row
def _values_of_another_key(p: Problem, out: Tensor, lse: Tensor, row: tuple[int, ...]) -> None:
    """One row takes its heaviest key's values from elsewhere; its sum is right."""
    wanted = right(p)
    weight, key = wanted.weights[row].max(-1)
    values = wanted.values[row[:2]]
    other = (int(key) + 1) % values.shape[0]
    out[row] += (weight * (values[other] - values[key])).to(out.dtype)


def _one_element(p: Problem, out: Tensor, lse: Tensor) -> None:
    out[-1, -1, p.seed % out.shape[2], 0] += 0.2


def _nan(p: Problem, out: Tensor, lse: Tensor) -> None:
    out[0, -1, -1, 0] = float("nan")


def _lse_in_base_2(p: Problem, out: Tensor, lse: Tensor) -> None:
    lse.copy_(torch.where(lse.abs() < 1e-2, lse + 1, lse * 1.4427))
    out[torch.isneginf(lse)] = 1.0


def _last_row_forgotten(p: Problem, out: Tensor, lse: Tensor) -> None:
    lse[:, :, -1] = 12345.0


def _results_of_neighbours(p: Problem, out: Tensor, lse: Tensor) -> None:
    """Rows moved by one."""
    lse.copy_(lse.roll(1, 2))
    out.copy_(out.roll(1, 2))
    if torch.isneginf(lse).all():
        lse.zero_()


@pytest.mark.parametrize(
    "corrupt",
    [_without_a_key, _values_of_another_key, _one_element, _nan, _lse_in_base_2, _last_row_forgotten, _results_of_neighbours],
)  # fmt: skip
def test_wrong_results_are_found(corrupt: Callable[[Problem, Tensor, Tensor], None]) -> None:
    """In every problem of both types, beside one wrong row or element of thousands."""
    outcomes = run_group(range(16), replace(SMALL, corrupt=corrupt))
    assert [o.seed for o in outcomes] == list(range(16))
    assert not any(o.is_right for o in outcomes), [str(o) for o in outcomes if o.is_right]


def test_a_mask_that_is_off_by_one_is_found() -> None:
    p = make(0, CPU, is_small=True)
    mod = p.mask.mod
    assert mod is not None
    wrong = replace(p, mask=p.mask._replace(mod=lambda b, h, i, j: mod(b, h, i + 1, j)))
    assert judge(p, *p.call()).max() <= 1 < judge(p, *wrong.call()).max()


def test_an_error_of_a_call_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "call", lambda self: 1 // 0)
    (outcome,) = run_group([0], SMALL)
    assert not outcome.is_right and "ZeroDivisionError" in str(outcome)


# ---------------------------------------------------------------- processes
class _Never:
    def query(self) -> bool:
        return False


def test_a_hang_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(runner, "HANGS_AFTER", 0.01)
    monkeypatch.setattr(runner, "_launch", lambda problem, way: (None, _Never(), ""))
    with pytest.raises(runner.Hang, match="seed 5 "):
        run_group([5, 6], SMALL)
    assert runner.work([5, 6], SMALL, {}) != 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == {"begun": [5, 6]} and "does not end" in said[1]["trouble"]


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_shares_are_whole_structures(count: int) -> None:
    seeds = list(range(1000))
    shares = [share_of(seeds, n, count) for n in range(count)]
    assert sorted(s for share in shares for s in share) == seeds
    if count > 1:
        assert sum(len({s % len(STRUCTURES) for s in share}) for share in shares) == 2 * len(STRUCTURES)
        assert all(is_crowded(s) == n % 2 for n, share in enumerate(shares) for s in share)


def test_a_process_that_dies_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    told: list[Outcome] = []
    assert run_processes([0, 1, 2], [], 2, 30.0, told.append) == []
    assert sorted(o.seed for o in told) == [0, 1, 2] and all("not run" in o.trouble for o in told)


def test_a_new_process_goes_on_behind_a_group_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    lines: queue.Queue[Any] = queue.Queue()
    worker = runner.Worker([0, 48, 96], [], 0, 1, lines)
    worker.begun, worker.missing = [0, 48], {48, 96}
    lost = worker.ended()
    assert [o.seed for o in lost] == [48] and "no answer" in lost[0].trouble
    assert not worker.is_done and "--after" in worker.process.args and "48" in worker.process.args  # type: ignore[operator]
    worker.process.wait()


@pytest.mark.slow
def test_the_command_says_what_it_saw(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    options = ["--problems", "4", "--processes", "2", "--device", "cpu", "--only", "same | c", "--out", str(out)]
    result = subprocess.run([sys.executable, "-m", "tests.fuzz", *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(out.read_text())
    assert report["problems"] == 4 and report["failures"] == 0
    assert set(report["by structure"]) == {"same | causal", "same | chunks"}
    assert "4 problems over 2 structures" in result.stdout


# ---------------------------------------------------------------- kernels built beforehand
def test_a_kernel_that_was_built_beforehand_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.experimental.gluon")
    from flexattn.codegen.emit import emit
    from flexattn.codegen.spec import KernelSpec
    from flexattn.codegen.target import target_of
    from flexattn.codegen.tile_config import TileConfig

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiling, "found_or_built", compiling.found_or_built)
    source = emit(KernelSpec("order", target_of(90), TileConfig(64, 64, 4, 1), 0, 0, layouts=()))
    other = emit(KernelSpec("order", target_of(90), TileConfig(32, 64, 4, 1), 0, 0, layouts=()))
    assert ahead.load(tmp_path, source) is None
    with ahead.no_gpu(tmp_path) as log:
        assert compiling.found_or_built(source)[0].n_spills == 0
        assert compiling.found_or_built(source)[0].n_spills == 0
    assert log.counts == {"built": 1, "already there": 1}
    used = ahead.use(tmp_path)
    kernel, _ = compiling.found_or_built(source)
    assert kernel.metadata.num_warps == 4 and kernel.kernel[:4] == b"\x7fELF"
    assert ahead.load(tmp_path, other) is None and used == {"loaded": 1}


def test_what_a_call_takes_first_is_built_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that a call would take, not the next ones in the list; and a kernel compiled ahead comes from the folder too."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiling, "found_or_built", compiling.found_or_built)
    for memory in ("_KERNELS", "_FAILED", "_AHEAD"):
        monkeypatch.setattr(compiling, memory, {})
    folder, drawn = tmp_path / "kernels", make(0, CPU, is_small=True)
    folder.mkdir()
    problem, plan = prepare((drawn.q, drawn.k, drawn.v), None, (None, None), enable_gqa=True, options=ahead.ASKED)
    with ahead.no_gpu(folder) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.forward(problem, plan)
        (first, *_), (spec,) = choose.likely_tiles(problem, plan, "hopper_forward"), [s for s, _ in compiling._KERNELS]
    assert (spec.kernel, spec.config) == ("hopper_forward", first)
    assert [(kernel, tiles) for kernel, tiles, _ in log.spilled] == [(spec.kernel, f"{first.BLOCK_M}x{first.BLOCK_N}")]
    compiling._KERNELS.clear()
    used = ahead.use(folder)
    assert compiling.build_ahead(spec, CPU).wait(60)
    assert compiling._AHEAD.pop(spec).result()[0].kernel[:4] == b"\x7fELF" and used == {"loaded": 1}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for sm_90"
)
@pytest.mark.parametrize("structures, programs", [((0, 1), None), ((4, 5), 5)])
def test_random_problems_on_the_kernel_for_hopper(
    structures: tuple[int, ...], programs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few structures, as each has kernels to build; as many programs as the device likes, or few that have many tiles each."""
    monkeypatch.setattr(compiling, "found_or_built", compiling.found_or_built)
    monkeypatch.setattr(devices, "target_for", devices.target_for)
    ahead.use(ahead.FOLDER)
    if programs is not None:
        runner.limit_programs(programs)
    way = Way("cuda", programs=programs)
    seeds = [s for s in range(48 * 36) if s % 48 in structures]
    outcomes = [o for first in range(0, len(seeds), 8) for o in run_group(seeds[first : first + 8], way)]
    assert len(outcomes) == 72
    assert all(o.is_right for o in outcomes), [f"{o.seed}: {o}" for o in outcomes if not o.is_right]
