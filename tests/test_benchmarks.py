"""The benchmarks, without a GPU: what they count, check, merge, refuse and print; the same code then runs on one."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import __main__ as command_line
from benchmarks import (
    attention,
    calls,
    check,
    cpu,
    masks,
    peers,
    problems,
    report,
    results,
    session,
    sweep,
    timing,
    warm,
)
from benchmarks.problems import Problem, Shape, Variant

CPU = torch.device("cpu")
TINY = Shape(2, 2, 96, 16)
Row = dict[str, Any]


def _all_pairs(variant: Variant, q_len: int, kv_len: int) -> Tensor:
    """The mask of one head, evaluated pair by pair."""
    if variant.mask_mod is None:
        return torch.ones(q_len, kv_len, dtype=torch.bool)
    zero = torch.tensor(0)
    return variant.mask_mod(zero, zero, torch.arange(q_len)[:, None], torch.arange(kv_len)[None]) * torch.ones(
        q_len, kv_len, dtype=torch.bool
    )


def _problem(name: str, shape: Shape = TINY) -> Problem:
    return Problem(shape, problems.make_variant(name, shape, CPU), CPU, torch.float32)


def _row(**values: Any) -> Row:
    row: Row = {"device": "NVIDIA H200", "what": "forward", "shape": "1x16x16384x128", "variant": "causal"}
    row |= {"impl": "flexattn", "dtype": "bfloat16", "version": "0.1.0", "status": "ok", "ms": 2.0, "tflops": 500.0}
    row |= {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12", "commit": "abc1234", "date": "2026-11-30"}
    return {**row, **values}


def _session(*names: str, deadline: float | None = None) -> session.Session:
    return session.Session(CPU, torch.float32, results.Recorder(None, {"device": "X"}), names, 1, 1, deadline)


# ---------------------------------------------------------------- problems
@pytest.mark.parametrize("length", [96, 200])
@pytest.mark.parametrize("name", problems.VARIANTS)
def test_kept_pairs_are_those_of_the_mask(name: str, length: int) -> None:
    variant = problems.make_variant(name, Shape(1, 2, length, 16), CPU)
    pairs = _all_pairs(variant, length, length)
    keys = torch.arange(length)
    assert variant.kept == int(pairs.sum())
    assert torch.equal(pairs, (keys >= variant.first[:, None]) & (keys <= variant.last[:, None]))


@pytest.mark.parametrize("length", [16, 300])
@pytest.mark.parametrize("name", cpu.VARIANTS)
def test_kept_pairs_of_the_cpu_lines(name: str, length: int) -> None:
    variant = cpu.make_variant(name, length)
    assert variant.kept == int(_all_pairs(variant, length, length).sum())


@pytest.mark.parametrize("name", problems.DECODE_VARIANTS)
def test_decoding_keeps_every_key_but_for_a_near_window(name: str) -> None:
    keys = problems.WINDOW + 40
    variant = problems.decode_variant(name, Shape(2, 4, 1, 16, 2, keys))
    wanted = problems.WINDOW if name == "near" else keys
    assert variant.kept == wanted == int(_all_pairs(variant, 1, keys).sum())


def test_no_such_variant_of_decoding() -> None:
    with pytest.raises(ValueError, match="there are none, causal"):
        problems.decode_variant("documents", problems.DECODE_SHAPES["tiny"])


@pytest.mark.parametrize("shape", ["tiny", "tiny_mla"])
@pytest.mark.parametrize("name", problems.DECODE_VARIANTS)
def test_dense_and_paged_decoding_are_checked(shape: str, name: str) -> None:
    """Values within keys stay there in the peer's own layout."""
    sizes = problems.DECODE_SHAPES[shape]
    problem = Problem(sizes, problems.decode_variant(name, sizes), CPU, torch.float32)
    for peer in ("flexattn", "flexattn_paged"):
        found = _prepared(peer, problem, gradients=False)
        assert found.error["out"] < 1e-5
        shares = found.tensors[1].untyped_storage().data_ptr() == found.tensors[2].untyped_storage().data_ptr()
        assert shares == sizes.shares


@pytest.mark.parametrize("name", ["causal", "window", "documents"])
def test_blocks_are_counted_as_torch_counts_them(name: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    variant = problems.make_variant(name, Shape(1, 1, 2048, 1), CPU)
    torchs = create_block_mask(variant.mask_mod, None, None, 2048, 2048, device="cpu")
    assert problems.count_blocks(variant, 128) == masks.counts(torchs)
    assert masks.counts(masks.build_ours(variant, 2048, CPU)) == masks.counts(torchs)


def test_flops_and_names_of_the_shapes_in_the_tables() -> None:
    problem = Problem(
        problems.SHAPES["d128"], problems.make_variant("causal", problems.SHAPES["d128"], CPU), CPU, torch.float32
    )
    assert problem.flops == 4 * 16 * 128 * (16384 * 16385 // 2)
    assert [str(problems.SHAPES[n]) for n in command_line.DEFAULT_SHAPES] == [
        "1x16x16384x128",
        "4x16x4096x128",
        "1x32x16384x64",
    ]
    assert str(problems.DECODE_SHAPES["4x64k"]) == "4x32/4x1/65536x128"
    assert str(problems.SHAPES["d192"]) == "1x16x16384x192/128"
    uneven = replace(problem, shape=problems.SHAPES["d192"])
    assert uneven.flops == 2 * 16 * (192 + 128) * (16384 * 16385 // 2)
    assert [x.shape[-1] for x in replace(problem, shape=problems.SHAPES["tiny"]._replace(v_dim=8)).tensors()] == [
        16,
        16,
        8,
    ]
    sizes = problems.document_starts(16384).diff()
    assert len(sizes) == problems.DOCUMENTS and int(sizes.min()) > 0


# ---------------------------------------------------------------- checking
def _right(problem: Problem, tensors: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """out, dq, dk, dv of dense float32 attention."""
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    bias = torch.zeros(problem.shape.length, problem.shape.length)
    bias.masked_fill_(~_all_pairs(problem.variant, *bias.shape), float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


@pytest.mark.parametrize("name", ["none", "window", "documents"])
def test_a_right_result_passes_the_check(name: str) -> None:
    problem = _problem(name)
    tensors, grad = problem.tensors(), torch.randn(2, 2, 96, 16)
    found = check.errors(check.exact(problem, tensors, grad), _right(problem, tensors, grad), half=False)
    assert list(found) == ["out", "dq", "dk", "dv"]
    assert 0 < max(found.values()) < 1e-5


def _spoil(results: list[Tensor], part: int, place: tuple[Any, ...], value: float) -> list[Tensor]:
    spoilt = [x.clone() for x in results]
    spoilt[part][place] = value
    return spoilt


@pytest.mark.parametrize(
    "part, place, value, said",
    [
        (0, (0, 1, 3, 2), float("nan"), "out is not finite"),
        (0, (1, 0, 0), 3.0, "out is"),  # a row of a head that is not compared whole
        (1, (1, 1, slice(40, 50)), 0.0, "dq is"),
        (2, (0, 0, 17), 1.0, "dk is"),
        (3, (1, 1, slice(60, 96)), 0.0, "dv is"),
    ],
)
def test_a_wrong_result_is_found(part: int, place: tuple[Any, ...], value: float, said: str) -> None:
    problem = _problem("causal")
    tensors, grad = problem.tensors(), torch.randn(2, 2, 96, 16)
    exact = check.exact(problem, tensors, grad)
    spoilt = _spoil(_right(problem, tensors, grad), part, place, value)
    with pytest.raises(check.WrongResult, match=said):
        check.errors(exact, spoilt, half=False)


def test_grouped_heads_are_checked() -> None:
    shape = Shape(2, 4, 1, 16, 2, 40)
    problem = Problem(shape, problems.decode_variant("causal", shape), CPU, torch.float32)
    q, k, v = problem.tensors()
    exact = check.exact(problem, (q, k, v), None)
    out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert check.errors(exact, [out], half=False)["out"] < 1e-5
    with pytest.raises(check.WrongResult):
        check.errors(exact, [F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))], half=False)


# ---------------------------------------------------------------- timing
def test_ratios_are_taken_round_by_round() -> None:
    spent = {"flexattn": iter([1.0, 2.0, 4.0]), "torch_flex": iter([3.0, 6.0, 4.0])}
    runs = {name: (lambda name=name: name) for name in spent}
    measure = lambda run, count, device: next(spent[run()])
    times = timing.alternate(runs, rounds=3, calls=1, device=CPU, measure=measure)
    found = timing.summarise(times, "flexattn")
    assert found["torch_flex"] == (4.0, 3.0)  # medians 4 and 2, but the card was slow in the last round
    assert found["flexattn"] == (2.0, 1.0)
    assert timing.summarise({"torch_flex": [1.0]}, "flexattn")["torch_flex"].ratio is None


def test_clocks_measure_a_call() -> None:
    ran: list[int] = []
    for measure in (timing.milliseconds, timing.host_milliseconds, timing.wall_milliseconds):
        assert measure(lambda: ran.append(1), 5, CPU) > 0
    assert len(ran) == 15


# ---------------------------------------------------------------- results
def test_merge_takes_the_newer_row_and_keeps_other_keys() -> None:
    old = [_row(ms=2.0), _row(what="backward", ms=9.0)]
    merged = results.merge(old, [_row(ms=1.0), _row(device="NVIDIA H100", ms=3.0)])
    assert sorted((r["device"], r["what"], r["ms"]) for r in merged) == [
        ("NVIDIA H100", "forward", 3.0),
        ("NVIDIA H200", "backward", 9.0),
        ("NVIDIA H200", "forward", 1.0),
    ]
    sweeps = [_row(what="sweep_dq", config=[64, 64, 4, n]) for n in (1, 2)]
    assert len(results.merge(sweeps, sweeps)) == 2


def test_an_absent_peer_does_not_erase_what_was_measured() -> None:
    measured, absent = _row(impl="fa4"), _row(impl="fa4", status="absent", reason="no module")
    wrong = _row(impl="fa4", status="wrong", reason="out is 1 from float64")
    assert results.merge([measured], [absent]) == [measured]
    assert results.merge([absent], [measured]) == [measured]
    assert results.merge([measured], [wrong]) == [wrong]
    assert results.merge([], [absent]) == [absent]


def test_every_row_is_saved_at_once(tmp_path: Path) -> None:
    recorder = results.Recorder(tmp_path / "new" / "rows.json", {"device": "X", "commit": "abc"})
    row = {"what": "forward", "shape": "1", "variant": "none", "impl": "flexattn", "status": "ok", "ms": 1.0}
    for count, variant in enumerate(("none", "causal", "none"), 1):
        recorder.add({**row, "variant": variant, "ms": float(count)})
        assert len(results.load(recorder.path)) == min(count, 2)  # type: ignore[arg-type]
    assert [r["ms"] for r in results.load(tmp_path / "new" / "rows.json")] == [2.0, 3.0]
    assert results.load(tmp_path / "none.json") == []
    (tmp_path / "other.json").write_text('{"rows": [{"what": "forward"}]}')
    with pytest.raises(ValueError, match="lacks device"):
        results.load(tmp_path / "other.json")


def test_committed_results_are_rows() -> None:
    files = sorted(results.RESULTS.glob("*.json"))
    assert files
    for file in files:
        rows = results.load(file)
        assert results.merge([], rows) == rows, file
        assert {r["status"] for r in rows} <= set(results.STATUSES)
        assert {r["impl"] for r in rows} <= set(peers.PEERS)
        assert all("reason" in r for r in rows if r["status"] != "ok")


# ---------------------------------------------------------------- peers
def test_peers_say_why_they_cannot() -> None:
    absent = pytest.raises(peers.Absent, match=r"import flash_attn.cute: ModuleNotFoundError")
    for name in ("fa4", "torch_flex_flash"):
        if "flash_attn" not in sys.modules:
            with absent:
                peers.PEERS[name].prepare(_problem("causal"))
    with pytest.raises(peers.Unsupported, match="documents: scaled_dot_product_attention has no argument for it"):
        peers.PEERS["sdpa_cudnn"].prepare(_problem("documents"))
    with pytest.raises(peers.Unsupported, match="a score_mod is not a dense mask"):
        peers.PEERS["sdpa_dense"].prepare(_problem("alibi"))


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, cap: float | None) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def _keep(q_len: int, kv_len: int, causal: bool, left: int | None) -> Tensor:
    """FlashAttention's and FlashInfer's masks: aligned to the last key; `left` keys before the query."""
    distance = torch.arange(q_len)[:, None] + (kv_len - q_len) - torch.arange(kv_len)
    keep = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return keep if left is None or left < 0 else keep & (distance <= left)


def _fake_flash_attention() -> types.ModuleType:
    """What the benchmarks call of flash_attn.cute, in its conventions, densely."""

    def packed(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
        pieces = zip(cu_seqlens_q.tolist()[:-1], cu_seqlens_q.tolist()[1:])
        return torch.cat(
            [_dense(q[a:b], k[a:b], v[a:b], _keep(b - a, b - a, causal, window_size[0]), softcap) for a, b in pieces]
        ), None

    def plain(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softcap: float = 0.0,
        window_size: tuple[int | None, int | None] = (None, None),
    ) -> tuple[Tensor, None]:  # fmt: skip
        mask = _keep(q.shape[1], k.shape[1], causal, window_size[0])
        return torch.stack([_dense(*x, mask, softcap) for x in zip(q, k, v)]), None

    module = types.ModuleType("flash_attn.cute")
    module.flash_attn_func, module.flash_attn_varlen_func = plain, packed  # type: ignore[attr-defined]
    return module


def _prepared(name: str, problem: Problem, *, gradients: bool = True) -> session.Candidate:
    tensors = problem.tensors()
    grad = torch.randn_like(tensors[0]) if gradients else None
    exact = check.exact(problem, tensors, grad)
    return session.prepare(peers.PEERS[name], problem, tensors, grad, exact, training=gradients)


@pytest.mark.parametrize("name", ["none", "causal", "window", "documents", "softcap"])
def test_flash_attention_is_called_in_its_conventions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _fake_flash_attention()
    parent = types.ModuleType("flash_attn")
    parent.cute = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", parent)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    candidate = _prepared("fa4", _problem(name))
    assert set(candidate.error) == {"out", "dq", "dk", "dv"}
    assert len(candidate.backward()) == 3
    with pytest.raises(peers.Unsupported, match="CuTe function"):
        peers.PEERS["fa4"].prepare(_problem("alibi"))


class _FakeFlashInfer(types.ModuleType):
    """The two wrappers of FlashInfer that the benchmarks use, densely."""

    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, workspace: Tensor) -> None:
            self.options: Row = {}

        def plan(self, qo: Tensor, kv: Tensor, heads: int, kv_heads: int, dim: int, **options: Any) -> None:
            self.ends, self.options = qo.tolist(), options

        def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            masked = lambda n: _keep(n, n, self.options["causal"], self.options["window_left"])
            pieces = zip(self.ends[:-1], self.ends[1:])
            cap = self.options["logits_soft_cap"]
            return torch.cat([_dense(q[a:b], k[a:b], v[a:b], masked(b - a), cap) for a, b in pieces])

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace: Tensor, layout: str, use_tensor_cores: bool) -> None:
            assert layout == "NHD"

        def plan(
            self,
            ends: Tensor,
            pages: Tensor,
            last: Tensor,
            heads: int,
            kv_heads: int,
            dim: int,
            page: int,
            **types: Any,
        ) -> None:
            assert last.tolist() == [page] * (len(ends) - 1)
            self.ends, self.pages, self.group = ends.tolist(), pages.tolist(), heads // kv_heads

        def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
            out = []
            for i, (a, b) in enumerate(zip(self.ends[:-1], self.ends[1:])):
                k, v = (x[self.pages[a:b]].flatten(0, 1).repeat_interleave(self.group, 1) for x in cache)
                out.append(_dense(q[i : i + 1], k, v, _keep(1, len(k), False, None), None))
            return torch.cat(out)


def test_flashinfer_is_called_in_its_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", _FakeFlashInfer("flashinfer"))
    monkeypatch.setattr(peers, "_workspace", lambda device: torch.zeros(1))
    for name in ("none", "window", "documents", "softcap"):
        assert _prepared("flashinfer", _problem(name)).out is None  # it has no backward
    shape = Shape(3, 4, 1, 16, 2, 48)
    problem = Problem(shape, problems.decode_variant("none", shape), CPU, torch.float32)
    for name in ("flashinfer_paged", "flashinfer_paged_tc"):
        assert _prepared(name, problem, gradients=False).error["out"] < 1e-5
    with pytest.raises(peers.Unsupported, match="one query a request"):
        peers.PEERS["flashinfer_paged"].prepare(_problem("none"))


# ---------------------------------------------------------------- the command line
def _run(*arguments: str) -> int:
    return command_line.main(arguments)


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["gpu", "--what", "speed"], ["gpu", "--peers", "nobody"], ["merge", "a.json"], []):
        with pytest.raises(SystemExit) as caught:
            _run(*wrong)
        assert caught.value.code == 2
    if not torch.cuda.is_available():
        assert _run("gpu") == 2
        assert "no CUDA device here" in capsys.readouterr().err


def test_a_tiny_run_has_a_row_for_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    what, variants = ["forward", "backward", "memory"], ["causal", "window"]
    names = ["flexattn", "sdpa_flash", "sdpa_cudnn", "fa4"]
    status = _run("gpu", "--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--calls", "1", "--what", *what,
                  "--variants", *variants, "--peers", *names, "--out", str(out), "--commit", "abc")  # fmt: skip
    rows = {(r["what"], r["variant"], r["impl"]): r for r in results.load(out)}
    assert status == 0
    assert set(rows) == {
        (w, v, n) for w in ("forward", "backward", "memory_forward", "memory_backward") for v in variants for n in names
    }
    ours, theirs = rows["backward", "causal", "flexattn"], rows["backward", "causal", "sdpa_flash"]
    assert ours["tflops"] == pytest.approx(10 * 2 * 2 * 16 * (200 * 201 // 2) / ours["ms"] / 1e9)
    assert theirs["status"] == "ok" and theirs["speedup"] > 0 and set(theirs["error"]) == {"dq", "dk", "dv"}
    assert rows["forward", "window", "sdpa_flash"]["status"] == "unsupported"
    assert rows["forward", "causal", "fa4"]["status"] == "absent"
    assert rows["forward", "causal", "sdpa_cudnn"]["status"] == "failed"
    assert {r["commit"] for r in rows.values()} == {"abc"}
    assert "fa4 absent: import flash_attn.cute" in capsys.readouterr().out


def test_values_may_have_another_head_dimension(tmp_path: Path) -> None:
    out = tmp_path / "values.json"
    status = _run("gpu", "--device", "cpu", "--shapes", "tiny_values", "--rounds", "1", "--calls", "1", "--what", "forward",
                  "backward", "--variants", "causal", "--peers", "flexattn", "--out", str(out))  # fmt: skip
    rows = {r["what"]: r for r in results.load(out)}
    assert status == 0 and set(rows) == {"forward", "backward"}
    pairs = 2 * 2 * (200 * 201 // 2)
    assert rows["forward"]["tflops"] == pytest.approx(2 * (16 + 8) * pairs / rows["forward"]["ms"] / 1e9)


def test_a_chunk_of_a_prompt_over_pages(tmp_path: Path) -> None:
    """Its last query stands at the last key, whether keys are dense, in pages or gathered; what else there is says so."""
    out, names = tmp_path / "chunk.json", ("flexattn", "flexattn_paged", "flexattn_gathered")
    status = _run("gpu", "--device", "cpu", "--shapes", "tiny_chunk", "--rounds", "1", "--calls", "1", "--what", "forward",
                  "--variants", "none", "causal", "--peers", *names, "--out", str(out))  # fmt: skip
    rows = {(r["variant"], r["impl"]): r for r in results.load(out)}
    assert status == 0 and set(rows) == {(variant, name) for variant in ("none", "causal") for name in names}
    kept = 2 * 4 * sum(range(91, 161))
    for name in names:
        row = rows["causal", name]
        assert row["status"] == "ok" and row["tflops"] == pytest.approx(4 * 16 * kept / row["ms"] / 1e9)
    with pytest.raises(ValueError, match="as many keys as queries"):
        problems.make_variant("window", problems.SHAPES["tiny_chunk"], CPU)


def test_decode_host_masks_and_ceilings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(masks.BUILDERS, "torch_flex")  # its compilation takes seconds
    out = tmp_path / "rows.json"
    status = _run("gpu", "--device", "cpu", "--rounds", "1", "--calls", "1", "--what", "decode", "host", "masks", "ceilings",
                  "--peers", "sdpa_flash", "fa4", "--mask-lengths", "1024", "--mask-variants", "documents",
                  "--out", str(out))  # fmt: skip
    rows = {(r["what"], r["variant"], r["impl"]): r for r in results.load(out)}
    assert status == 0
    for key in (
        ("decode_eager", "causal", "sdpa_flash"), ("decode_eager", "none", "flexattn"), ("host", "alibi", "flexattn"),
        ("mask", "documents", "flexattn"), ("mask", "documents", "torch_flex_eager"), ("ceiling", "copy", "torch_flex"),
    ):  # fmt: skip
        assert rows[key]["status"] == "ok" and rows[key]["ms"] > 0
    assert rows["decode", "none", "flexattn"]["status"] == "skipped"


@pytest.mark.slow
def test_first_calls_come_from_processes_of_their_own(tmp_path: Path) -> None:
    run = _session("flexattn", "fa4")
    calls.first(run, "tiny", problems.SHAPES["tiny"], ["causal"])
    found = {(r["what"], r["impl"]): r for r in run.recorder.added}
    assert found["first_forward", "flexattn"]["ms"] > 0 and found["first_backward", "flexattn"]["order"] == 0
    assert found["first_forward", "fa4"]["status"] == "absent"


@pytest.mark.parametrize(
    "impl, error, status, code",
    [
        ("sdpa_flash", RuntimeError("out of memory"), "failed", 0),
        ("sdpa_flash", KeyError(), "failed", 0),
        ("flexattn", RuntimeError("a kernel failed"), "failed", 1),
    ],
)
def test_only_our_own_failures_fail_a_run(
    impl: str, error: Exception, status: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(problem: Problem) -> peers.Call:
        raise error

    monkeypatch.setitem(peers.PEERS, impl, peers.Peer(impl, impl, "torch", fails))
    out = tmp_path / "rows.json"
    assert code == _run("gpu", "--device", "cpu", "--shapes", "tiny", "--variants", "causal", "--peers", "flexattn", "sdpa_flash",
                        "--rounds", "1", "--out", str(out))  # fmt: skip
    rows = {(r["what"], r["impl"]): r for r in results.load(out)}
    for what in ("forward", "backward"):
        assert rows[what, impl]["status"] == status
        assert type(error).__name__ in rows[what, impl]["reason"]
    other = "flexattn" if impl != "flexattn" else "sdpa_flash"
    assert rows["backward", other]["status"] == "ok"


def test_a_wrong_result_of_ours_is_an_error_not_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda problem: peers.Call(lambda q, k, v: v + 0 * q * k)
    monkeypatch.setitem(peers.PEERS, "flexattn", peers.Peer("flexattn", "flexattn", "flexattn", wrong))
    run = _session("flexattn", "sdpa_flash")
    attention.run_case(run, TINY, problems.make_variant("causal", TINY, CPU), ["forward", "backward"])
    found = {(r["what"], r["impl"]): r for r in run.recorder.added}
    assert found["forward", "flexattn"]["status"] == "wrong" and "ms" not in found["forward", "flexattn"]
    assert "out is" in found["forward", "flexattn"]["reason"]
    assert found["forward", "sdpa_flash"]["status"] == "ok" and "speedup" not in found["forward", "sdpa_flash"]
    assert len(run.recorder.bad) == 2


def test_no_case_starts_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    run = _session("flexattn", deadline=0.0)
    attention.run(run, [TINY], ["none", "causal"], ["forward"])
    assert run.recorder.added == []
    assert "no time left for 2x2x96x16 causal" in capsys.readouterr().out


def test_pieces_merge_into_one_file(tmp_path: Path) -> None:
    results.save(tmp_path / "a.json", [_row(), _row(impl="fa4", status="absent", reason="no module")])
    results.save(tmp_path / "b.json", [_row(impl="fa4", speedup=1.1)])
    into = tmp_path / "all.json"
    assert _run("merge", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--into", str(into)) == 0
    assert {(r["impl"], r["status"]) for r in results.load(into)} == {("flexattn", "ok"), ("fa4", "ok")}


# ---------------------------------------------------------------- guards, promises, sweeps
def test_torchs_builder_is_not_tried_where_it_cannot_end() -> None:
    free = 139e9
    assert masks.too_much("flexattn", 1 << 20, None, 0.0) is None
    assert masks.too_much("torch_flex_eager", 65536, (16384, 0.01), free) is None
    assert "172 GB" in str(masks.too_much("torch_flex_eager", 131072, (65536, 0.04), free))
    assert masks.too_much("torch_flex", 1 << 20, (131072, 0.037), free) is None
    assert "about 64 s" in str(masks.too_much("torch_flex", 1 << 20, (131072, 1.0), free))
    assert "failed at 65536" in str(masks.too_much("torch_flex", 131072, (65536, float("inf")), free))


def test_torchs_builders_are_compiled_beforehand_and_then_always_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run_all(cases: list[list[str]], workers: int, **options: Any) -> list[str | None]:
        commands.extend(cases)
        assert (workers, options["seconds"]) == (8, 400.0)
        return [None, None, "it had not ended after 400 s and was stopped"]

    monkeypatch.setattr(masks, "run_all", run_all)
    monkeypatch.setitem(masks.BUILDERS, "torch_flex", masks.BUILDERS["torch_flex_eager"])
    monkeypatch.setattr(masks, "SECONDS", -1.0)
    run = _session("flexattn", deadline=0.0)  # all time is spent
    asked = ([2048, 1024, 131072], ["documents", "window", "random ids"])
    warmed = masks.run_warm(run, *asked, 8, 400.0)
    names = [
        ("documents", 1024),
        ("documents", 2048),
        ("documents", 131072),
        ("random ids", 1024),
        ("random ids", 2048),
    ]
    assert [(c[1], int(c[2])) for c in commands] == names  # window is not compared, random ids have no such length
    masks.run(run, [1024, 2048], asked[1], warmed)
    rows = [(r["variant"], r["shape"], r["status"]) for r in run.recorder.added]
    assert rows == [("documents", "1024", "ok"), ("documents", "2048", "ok")]
    warmed["documents", 1024] = "it had not ended after 400 s and was stopped"
    masks.run(run, [1024], ["documents"], warmed)
    assert run.recorder.added[-1]["reason"] == "compiling it beforehand: it had not ended after 400 s and was stopped"
    assert masks.run_warm(run, *asked, 0, None) == {}


def test_torchs_builder_is_not_compiled_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(masks.BUILDERS, "torch_flex", masks.BUILDERS["torch_flex_eager"])
    monkeypatch.delitem(masks.BUILDERS, "torch_flex_eager")
    monkeypatch.setattr(masks, "SECONDS", 0.0)
    run = _session("flexattn")
    masks.run(run, [1024, 2048], ["causal"])
    rows = [(r["shape"], r["impl"]) for r in run.recorder.added if r["status"] == "ok"]
    assert rows == [("1024", "flexattn"), ("2048", "flexattn"), ("1024", "torch_flex")]
    assert "no time left for the mask causal at 2048 of torch_flex" in capsys.readouterr().out


@pytest.mark.slow
def test_processes_that_compile_say_why_they_failed_and_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm.run_all([], 2) == []
    assert (warm.seconds_of(None), warm.seconds_of(90.0)) == (None, 60.0)
    monkeypatch.setattr(warm, "_AFTER_KILL", 0.0)
    good = ["compile-mask", "causal", "1024", "--device", "cpu"]
    failed = warm.run_all([good, ["compile-mask", "causal", "none"]], 2)
    assert failed[0] is None
    assert failed[1] is not None and "exit status 2" in failed[1] and "invalid int value" in failed[1]
    late = warm.run_all([good, good], 1, seconds=0.1)
    assert late == ["it had not ended after 0 s and was stopped", "it was not begun within 0 s"]


@pytest.mark.parametrize("name", masks.VARIANTS)
def test_masks_of_the_figures_are_what_torch_builds(name: str) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    variant = masks.mask_variant(name, 2048, CPU)
    torchs = create_block_mask(variant.mask_mod, None, None, 2048, 2048, device="cpu")
    ours = masks.build_ours(variant, 2048, CPU)
    assert masks.counts(ours) == masks.counts(torchs)
    assert masks._check(torchs, variant, 2048) == list(masks.counts(ours))


def test_a_wrong_block_mask_is_found() -> None:
    variant = problems.make_variant("causal", Shape(1, 1, 1024, 1), CPU)
    other = problems.make_variant("window", Shape(1, 1, 1024, 1), CPU)
    run = _session("flexattn")
    with pytest.raises(check.WrongResult, match="36 and 28"):
        masks._measure(run, lambda *_: masks.build_ours(other, 1024, CPU), variant, 1024)


def test_promises_of_the_cpu_path() -> None:
    line = lambda **values: _row(**{"shape": "1x8x4096x64", "device": "CPU", **values})
    kept = [line(impl="torch_flex_eager", speedup=12.0), line(impl="sdpa_dense", speedup=1.4)]
    assert cpu.missed(kept) == []
    broken = [line(impl="sdpa_dense", speedup=1.2), line(shape="1x8x16x64", impl="torch_flex_eager", speedup=0.9)]
    assert [text.split(", ")[-1] for text in cpu.missed(broken)] == ["at least 1.3 is promised", "slower"]


def test_a_sweep_fixes_the_tiles_of_one_kernel() -> None:
    assert sweep.options("forward", (64, 128, 4, 3)) == {
        "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 128, "fwd_num_warps": 4, "fwd_num_stages": 3,
    }  # fmt: skip
    assert sweep.options("dq", (64, 32, 8, 2)) == {
        "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32, "bwd_num_warps": 8, "bwd_num_stages": 2, "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32,
    }  # fmt: skip
    from flexattn.runtime.options import parse_options

    assert parse_options(sweep.options("dkdv", (32, 64, 4, 1))).backward.BLOCK_M1 == 32
    assert len(set(sweep.configurations("dq", (32, 64), (4,), (1, 2)))) == 6  # 32 x 32 is left out


@pytest.mark.filterwarnings("ignore:kernel_options")
def test_a_sweep_runs(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    assert 0 == _run("sweep", "--device", "cpu", "--shapes", "tiny", "--kernels", "dkdv", "--tiles", "64", "--warps", "4",
                     "--stages", "1", "2", "--workers", "0", "--rounds", "1", "--out", str(out))  # fmt: skip
    rows = results.load(out)
    assert [(r["what"], r["config"], r["status"]) for r in rows] == [
        ("sweep_dkdv", [64, 64, 4, n], "ok") for n in (1, 2)
    ]


# ---------------------------------------------------------------- reports
def test_readme_and_pictures_are_what_the_results_give() -> None:
    assert report.stale() == [], "run: python -m benchmarks report"
    assert "benchmarks/results/cpu.png" in report.README.read_text(encoding="utf-8")


def _gpu_rows() -> list[Row]:
    peer = {"impl": "torch_flex", "version": "2.11.0", "tflops": 400.0, "speedup": 1.25, "ms": 2.5}
    return [
        _row(), _row(**peer), _row(what="backward", tflops=300.0), _row(what="backward", **{**peer, "speedup": 0.876}),
        _row(impl="fa4", version="4.0", status="unsupported", reason="no such mask"),
        _row(what="decode", shape="1x32/8x1/8192x128", tbs=2.5, ms=0.014), _row(what="mask", shape="16384", mib=1.0),
        _row(what="first_forward", ms=4100.0, order=0), _row(what="memory_forward", mib=512.4),
        _row(what="host", ms=0.081),
        {k: v for k, v in _row(what="ceiling", impl="torch_flex", variant="copy", tbs=4.27).items() if k != "tflops"},
    ]  # fmt: skip


def test_a_gpus_tables_hold_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    results.save(path, results.merge([], [*_gpu_rows(), _row(what="sweep_dq", config=[1])]))
    text = report.readme_section([path])
    assert "### NVIDIA H200" in text and "abc1234, 2026-11-30" in text
    assert "| 1x16x16384x128 | causal | 500 / 300 | 1.25x / 0.88x |" in text
    assert "compared with each other" in text  # these rows carry no error
    tables = report.details([path])
    for cell in ("500, 2 ms", "400, 2.5 ms (1.25x)", "14 us, 2.50", "2 ms, 1 MiB", "4.10 (first of its process)", "512",
                 "81 us", "4.27 TB/s"):  # fmt: skip
        assert cell in tables
    assert "FlashAttention-4: unsupported: no such mask (forward 1x16x16384x128 causal)" in tables
    assert "sweep" not in tables


def test_a_picture_knows_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.chart import draw

    rows, path = _gpu_rows(), tmp_path / "gpu.png"
    draw(rows, path)
    assert report.picture_digest(path) == report.digest(rows)
    assert report.digest(rows) != report.digest([{**r, "tflops": 1.0} for r in rows if "tflops" in r])
    assert report.picture_digest(tmp_path / "none.png") is None


def test_the_section_goes_between_the_markers() -> None:
    text = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    assert report.placed(text, "new") == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    with pytest.raises(ValueError, match="must hold"):
        report.placed("no markers", "new")


@pytest.mark.parametrize(
    "ms, text", [(0.0141, "14.1 us"), (0.9999, "1000 us"), (2.345, "2.35 ms"), (999.7, "1000 ms"), (2540.0, "2.54 s")]
)
def test_times_are_readable(ms: float, text: str) -> None:
    assert report.milliseconds(ms) == text
