"""Autotuning: which tiles are timed, who wins, what is stored and when a stored answer is not trusted; times are made up here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import flexattn
from flexattn import create_block_mask, flex_attention
from flexattn.codegen import tile_config
from flexattn.codegen.spec import KernelSpec, TensorLayout
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import TileConfig, TileProblem, candidates, is_legal, trials
from flexattn.errors import OptionError, StaleMaskError
from flexattn.runtime import autotune, choose, settings
from flexattn.runtime import device as devices
from flexattn.runtime.attention import prepare
from flexattn.runtime.options import TileOptions, parse_options
from tests.helpers import causal, make_qkv
from tests.runtime import kernel_cases
from tests.runtime.kernel_cases import Case, plain

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
BF16 = TensorLayout("bf16", is_aligned=True, is_wide=False)
DEFAULT, SECOND, THIRD = TileConfig(128, 64, 4, 3), TileConfig(64, 64, 4, 2), TileConfig(64, 32, 4, 2)
QUESTION = autotune.Question(
    KernelSpec("forward", target_of(90), DEFAULT, 64, 64, layouts=(BF16,) * 4),
    (DEFAULT, SECOND, THIRD),
    autotune.size_class(1000, 1000, 8),
    CPU,
)
WARNING = settings.FlexPerformanceWarning


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder, a memory of winners and of warnings, and counters of this test's own."""
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("FLEXATTN_AUTOTUNE", raising=False)
    autotune.clear()
    settings.forget_warnings()
    flexattn.reset_stats()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Counter[TileConfig]:
    """How often each configuration was timed; they take 250, 200 and 400 microseconds."""
    seen: Counter[TileConfig] = Counter()

    def fake(run, device):
        config = run.args[0]
        seen[config] += 1
        return {DEFAULT: 250.0, SECOND: 200.0, THIRD: 400.0}[config]

    monkeypatch.setattr(autotune, "microseconds", fake)
    return seen


def same(config: TileConfig) -> tuple[torch.Tensor, None]:
    return torch.ones(4), None


def never(config: TileConfig) -> None:
    raise AssertionError(f"{config} was run")


def failing(*bad: TileConfig):
    def run(config):
        if config in bad:
            raise RuntimeError(f"no registers\nfor {config}")
        return torch.ones(4)

    return run


def only_file(folder: Path) -> Path:
    (path,) = folder.joinpath("tuned").iterdir()
    return path


# ---------------------------------------------------------------- who wins
def test_the_fastest_wins_and_every_trial_is_kept(timed, tmp_path):
    tuned = autotune.tune(QUESTION, same)
    assert tuned.winner == SECOND
    assert [(t.config, t.microseconds, t.error) for t in tuned.trials] == [
        (DEFAULT, 250.0, None), (SECOND, 200.0, None), (THIRD, 400.0, None),
    ]  # fmt: skip
    assert str(tuned) == "64x64, 4 warps, 2 stages: 200.0 us, the default 128x64, 4 warps, 3 stages: 250.0 us"
    assert flexattn.stats().tunings == {"forward": 1}
    assert f"tuned forward: {tuned}" in flexattn.stats().events
    assert tuned.path == only_file(tmp_path)


def test_who_is_far_behind_is_timed_once(timed):
    autotune.tune(QUESTION, same)
    assert timed[THIRD] == 1 and timed[DEFAULT] == timed[SECOND] > 2


def test_the_default_stays_where_others_are_hardly_faster(monkeypatch):
    times = {DEFAULT: 101.0, SECOND: 100.0, THIRD: 300.0}
    monkeypatch.setattr(autotune, "microseconds", lambda run, device: times[run.args[0]])
    tuned = autotune.tune(QUESTION, same)
    assert tuned.winner == DEFAULT and str(tuned).endswith("101.0 us, as is the default")


def test_a_failure_is_recorded_and_announced(timed, tmp_path):
    with pytest.warns(WARNING, match="BLOCK_N=64, num_warps=4, num_stages=2.*RuntimeError: no registers"):
        tuned = autotune.tune(QUESTION, failing(SECOND))
    assert tuned.winner == DEFAULT
    assert tuned.trials[1] == autotune.Trial(SECOND, None, "RuntimeError: no registers")
    assert json.loads(only_file(tmp_path).read_text())["trials"][1]["error"] == "RuntimeError: no registers"


def test_a_default_that_fails_loses(timed):
    with pytest.warns(WARNING):
        tuned = autotune.tune(QUESTION, failing(DEFAULT))
    assert tuned.winner == SECOND and str(tuned).endswith("the default 128x64, 4 warps, 3 stages: failed")


def test_a_failure_while_timing_is_one_too(monkeypatch):
    def fake(run, device):
        if run.args[0] == SECOND:
            raise torch.OutOfMemoryError("full")
        return 10.0

    monkeypatch.setattr(autotune, "microseconds", fake)
    with pytest.warns(WARNING, match="OutOfMemoryError: full"):
        assert autotune.tune(QUESTION, same).trials[1].error == "OutOfMemoryError: full"


def test_nothing_is_stored_where_nothing_runs(timed, tmp_path):
    with pytest.warns(WARNING):
        assert autotune.tune(QUESTION, failing(DEFAULT, SECOND, THIRD)) is None
    assert not (tmp_path / "tuned").exists() and flexattn.stats().tunings == {}


def test_a_stale_mask_is_the_callers_error_not_a_configurations(timed):
    def run(config):
        raise StaleMaskError("changed")

    with pytest.raises(StaleMaskError):
        autotune.tune(QUESTION, run)


def test_results_that_differ_rule_out_where_other_tiles_agree(timed):
    wrong = lambda config: torch.full((4,), 2.0 if config == SECOND else 1.0)
    with pytest.warns(WARNING, match="results differ from the default's by 100%"):
        tuned = autotune.tune(QUESTION, wrong)
    assert tuned.winner == DEFAULT and "differ" in tuned.trials[1].error


@pytest.mark.filterwarnings("error")
def test_results_that_are_rounding_alone_rule_nobody_out(timed):
    noise = {DEFAULT: 1.0, SECOND: -1.0, THIRD: 2.0}
    assert autotune.tune(QUESTION, lambda config: torch.full((4,), noise[config])).winner == SECOND


def test_difference_of_results():
    inf = float("inf")
    a, b = torch.tensor([3.0, -inf, 4.0]), torch.tensor([3.0, -inf, 4.5])
    assert autotune.difference((a, None), (a, None)) == 0
    assert autotune.difference((a, (b,)), (a, (a,))) == pytest.approx(0.1)
    assert autotune.difference((a * float("nan"),), (a,)) == inf


def test_progress_is_said(timed, monkeypatch, capsys):
    monkeypatch.setattr(autotune, "_SAY_AFTER", -1.0)
    autotune.tune(QUESTION, same)
    assert "flexattn: autotuning the forward kernel: 2 of 3 configurations built after" in capsys.readouterr().err


def test_two_threads_time_once(timed):
    runs, barrier, found = Counter(), threading.Barrier(2), []

    def run(config):
        runs[config] += 1
        return torch.ones(2)

    def work():
        barrier.wait()
        found.append(autotune.tune(QUESTION, run))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == dict.fromkeys(QUESTION.candidates, 1)
    assert found[0] is found[1]
    assert flexattn.stats().tunings == {"forward": 1}


def test_nothing_is_timed_while_a_cuda_graph_is_captured(timed, monkeypatch):
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    with pytest.warns(WARNING, match="not autotuned while a CUDA graph is captured"):
        assert autotune.tune(QUESTION, never) is None
    monkeypatch.setattr(devices, "is_capturing", lambda device: False)
    assert autotune.tune(QUESTION, same).winner == SECOND
    monkeypatch.setattr(devices, "is_capturing", lambda device: True)
    assert autotune.tune(QUESTION, never).winner == SECOND


# ---------------------------------------------------------------- size classes
def test_size_classes_are_powers_of_two():
    assert autotune.size_class(1, 2, 3, 1024, 1025, 2048) == (1, 2, 4, 1024, 2048, 2048)


def test_lengths_of_one_class_ask_the_same_question(timed):
    autotune.tune(QUESTION, same)
    near = dataclasses.replace(QUESTION, sizes=autotune.size_class(513, 1024, 5))
    assert autotune.tune(near, never).winner == SECOND
    far = dataclasses.replace(QUESTION, sizes=autotune.size_class(1025, 1024, 5))
    assert autotune.find(far) is None


# ---------------------------------------------------------------- on disk
def test_the_file_is_readable_and_found_again(timed, tmp_path):
    autotune.tune(QUESTION, same)
    stored = json.loads(only_file(tmp_path).read_text())
    assert stored["winner"] == dataclasses.asdict(SECOND)
    assert [t["microseconds"] for t in stored["trials"]] == [250.0, 200.0, 400.0]
    asked = stored["question"]
    assert (asked["kernel"], asked["device"], asked["score"]) == ("forward", "interpreter", None)
    assert asked["sizes up to"] == {"q_len": 1024, "kv_len": 1024, "pairs": 8}
    assert asked["spec"]["qk_dim"] == 64 and asked["triton"]
    autotune.clear()
    assert autotune.tune(QUESTION, never).winner == SECOND
    assert flexattn.stats().tunings == {"forward": 1}
    assert flexattn.stats().events[-1].startswith("stored tiles forward: 64x64")


def test_a_fresh_process_finds_the_file(timed, tmp_path):
    autotune.tune(QUESTION, same)
    code = "from tests.runtime.test_autotune import QUESTION, autotune, never; print(autotune.tune(QUESTION, never))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.startswith("64x64, 4 warps, 2 stages: 200.0 us"), result.stderr


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda text: "", "JSONDecodeError"),
        (lambda text: "[1]", "TypeError"),
        (lambda text: text.replace('"winner"', '"loser"'), "KeyError: 'winner'"),
        (lambda text: text.replace('"triton": "', '"triton": "1'), "another question"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "another question"),
        (lambda text: text.replace('"num_stages": 2\n },', '"num_stages": 4\n },', 1), "winner is not legal here"),
        (lambda text: text.replace('"microseconds": 200.0', '"microseconds": null'), "winner was not timed"),
        (lambda text: text.replace('"microseconds": 200.0', '"microseconds": "fast"'), "TypeError"),
        (lambda text: text.replace('"BLOCK_M": 64', '"BLOCK_Q": 64', 1), "TypeError"),
    ],
)
def test_a_file_that_is_damaged_or_foreign_is_announced_and_timed_again(timed, tmp_path, damage, said):
    autotune.tune(QUESTION, same)
    autotune.clear()
    path = only_file(tmp_path)
    good = path.read_text()
    path.write_text(damage(good))
    assert path.read_text() != good
    with pytest.warns(WARNING, match=said):
        assert autotune.find(QUESTION) is None
    assert autotune.tune(QUESTION, same).winner == SECOND
    assert flexattn.stats().tunings == {"forward": 2}
    assert path.read_text() == good


def test_a_folder_that_cannot_be_written_is_announced(timed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(WARNING, match="kept in memory only.*FLEXATTN_CACHE_DIR names another folder"):
        assert autotune.tune(QUESTION, same).winner == SECOND
    assert autotune.tune(QUESTION, never).winner == SECOND


def test_programs_candidates_and_facts_have_files_of_their_own(timed, tmp_path):
    masks = (causal, lambda b, h, q_idx, kv_idx: q_idx > kv_idx)
    from flexattn.frontend.trace import trace

    specs = [dataclasses.replace(QUESTION.spec, mask=trace(m, "mask").program) for m in masks]
    specs += [dataclasses.replace(QUESTION.spec, qk_dim=63), dataclasses.replace(QUESTION.spec, kernel="dq")]
    asked = [QUESTION, *(dataclasses.replace(QUESTION, spec=s) for s in specs)]
    asked += [dataclasses.replace(QUESTION, candidates=(DEFAULT, SECOND))]
    for question in asked:
        assert autotune.find(question) is None
        autotune.tune(question, same)
    assert len(list((tmp_path / "tuned").iterdir())) == len(asked)


# ---------------------------------------------------------------- how it is asked for
def test_options_and_environment(monkeypatch):
    assert parse_options(None).autotune is False and parse_options({"autotune": True}).autotune is True
    assert parse_options({"autotune": True}) != parse_options({"num_warps": 4})
    assert hash(parse_options({"autotune": True})) == hash(parse_options({"autotune": True}))
    for value, expected in [("1", True), ("0", False), ("", False), ("on", True)]:
        monkeypatch.setenv("FLEXATTN_AUTOTUNE", value)
        assert settings.autotune() is expected
        assert parse_options(None).autotune is expected and parse_options({"num_warps": 4}).autotune is expected
        assert parse_options({"autotune": False}).autotune is False


@pytest.mark.parametrize("name", ["autotune", "strict_nan"])
def test_switches_are_checked(name):
    with pytest.raises(OptionError, match=f"kernel_options\\['{name}'\\] must be True or False; got 'yes'"):
        parse_options({name: "yes"})
    with pytest.raises(OptionError, match="is for both directions; got 'fwd_"):
        parse_options({f"fwd_{name}": True})
    with pytest.raises(OptionError, match=f"Try: {name}"):
        parse_options({name[:-1]: True})


def test_the_torch_path_says_that_there_is_nothing_to_time():
    x = torch.randn(1, 1, 8, 16)
    with pytest.warns(UserWarning, match="kernel_options autotune: no effect on the torch-ops path"):
        prepare((x, x, x), None, (None, None), options={"autotune": True, "BACKEND": "TORCH"})


# ---------------------------------------------------------------- what is timed
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
@pytest.mark.parametrize(
    ("dims", "size"), [((64, 64), 2), ((128, 128), 2), ((192, 128), 2), ((256, 256), 2), ((64, 64), 4)]
)
def test_trials_are_legal_and_start_with_the_defaults(kernel, arch, dims, size):
    target, sizes = target_of(arch), {"element_bytes": size, "qk_dim": dims[0], "v_dim": dims[1], "q_len": 4096}
    found, usual = trials(kernel, target, **sizes), candidates(kernel, target, **sizes)
    problem = TileProblem(kernel, target, size, *tile_config.tile_dims(*dims, target), False, 0)
    assert found[: len(usual)] == usual
    assert len(usual) < len(found) <= tile_config.TRIALS_AT_MOST and len(set(found)) == len(found)
    assert all(is_legal(c, problem) for c in found)


def test_tiles_a_caller_fixed_are_not_timed():
    sizes = {"element_bytes": 2, "qk_dim": 64, "v_dim": 64, "q_len": 4096}
    assert len(trials("forward", target_of(90), options=TileOptions(num_warps=4), **sizes)) == 1
    assert len(trials("dq", target_of(90), options=TileOptions(BLOCK_M2=64), **sizes)) == 1
    assert len(trials("dkdv", target_of(90), options=TileOptions(BLOCK_M2=64), **sizes)) > 3
    assert tile_config.is_fixed("dkdv", TileOptions(BLOCK_N1=64))
    assert not tile_config.is_fixed("dq", TileOptions(BLOCK_N1=64)) and not tile_config.is_fixed("dq", None)


def test_list_masks_are_timed_with_tiles_that_divide_their_blocks(monkeypatch):
    monkeypatch.setattr(devices, "target_for", lambda device: target_of(90))
    q, k, v = (torch.randn(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    lists = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=64).expand(1, 2)
    lists.mask_mod = causal  # assigning makes a list mask
    problem, plan = prepare((q, k, v), None, (lists, None), options={"autotune": True})
    for kernel in ("forward", "dq", "dkdv"):
        tiles = choose.likely_tiles(problem, plan, kernel)
        assert len(tiles) > 1 and tiles[0] == choose.legal_tiles(problem, plan, kernel)[0]
        assert all(64 % c.BLOCK_M == 0 and 64 % c.BLOCK_N == 0 for c in tiles)


def test_why_these_tiles(monkeypatch):
    monkeypatch.setattr(devices, "target_for", lambda device: target_of(90))
    x = torch.randn(1, 2, 256, 64, dtype=torch.bfloat16)
    why = lambda **options: choose.tiles_of(*prepare((x, x, x), None, (None, None), options=options), "forward")
    default = choose.tiles_of(*prepare((x, x, x), None, (None, None)), "forward")
    assert default[1] == "the default"
    assert why(BLOCK_M=32) == (dataclasses.replace(default[0], BLOCK_M=32), "given by kernel_options")
    assert why(BLOCK_M=32, autotune=True)[1] == "given by kernel_options"
    assert why(autotune=True) == (default[0], "the default; the first call times 10 configurations")
    problem, plan = prepare((x, x, x), None, (None, None))
    second = choose.legal_tiles(problem, plan, "forward")[1]
    taken = choose.Chosen(KernelSpec("forward", target_of(90), second, 64, 64, ()), kernel=None)
    monkeypatch.setitem(plan.memo, ("last", choose._group(problem, "forward")), taken)
    assert choose.tiles_of(problem, plan, "forward") == (second, f"the first that builds; {default[0]} does not")


# ---------------------------------------------------------------- on a GPU
SCRIPT = """
import torch, flexattn
from flexattn.codegen import tile_config
tile_config.TRIALS_AT_MOST = 4
q, k, v = (torch.randn(1, 4, 700, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
flexattn.flex_attention(q, k, v, mask_mod=causal).float().square().sum().backward()
seen = flexattn.stats()
stored = sum(event.startswith("stored tiles") for event in seen.events)
builds = seen.builds
forward, backward = builds["forward"] + builds["hopper_forward"], builds["dq"] + builds["dkdv"] + builds["hopper_backward"]
print(seen.tunings.total(), stored, forward, backward)
"""


@pytest.mark.gpu
def test_a_small_problem_is_tuned_and_a_second_process_uses_the_winners(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_config, "TRIALS_AT_MOST", 4)
    qkv = make_qkv(1, (4, 4), (700, 700), (64, 64), dtype=torch.bfloat16, device="cuda", guard=64)
    for _ in range(2):
        kernel_cases.check(Case(1, 4, 4, 700, 700, 64, 64, plain(causal)), qkv[0].device, torch.bfloat16, autotune=True)
    problem, plan = prepare(qkv, None, (None, causal), options={"autotune": True})
    kernels = [choose.forward_kernel(problem, plan)[0], *choose.likely_backward_kernels(problem, plan)[0]]
    assert flexattn.stats().tunings == dict.fromkeys(kernels, 1)
    files = list((tmp_path / "tuned").iterdir())
    assert len(files) == len(kernels)
    for file in files:
        stored = json.loads(file.read_text())
        assert all(t["error"] or 0 < t["microseconds"] < 1e5 for t in stored["trials"]), file.read_text()
    text = flexattn.explain(*qkv, mask_mod=causal, kernel_options={"autotune": True})
    assert text.count("(tuned; ") == len(kernels) and " us" in text
    environment = {**os.environ, "FLEXATTN_AUTOTUNE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert list(map(int, result.stdout.split())) == [0, len(kernels), 1, len(kernels) - 1], (
        result.stdout + result.stderr
    )


@pytest.mark.gpu
def test_a_captured_graph_runs_the_default():
    q, k, v = make_qkv(
        1, (2, 2), (100, 100), (64, 64), dtype=torch.bfloat16, device="cuda", requires_grad=False, guard=64
    )
    expected = flex_attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(WARNING, match="not autotuned while a CUDA graph is captured"), torch.cuda.graph(graph):
        out = flex_attention(q, k, v, kernel_options={"autotune": True})
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and flexattn.stats().tunings == {}
