"""Forward, backward and peak memory of prefill problems: every peer on the same tensors, checked, then in alternation.

The idea: what costs time here is compiling, so one compilation of a peer serves all three measurements. The forward is that
of training: its tensors require gradients (not those of a peer that has no gradients to give).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks import check
from benchmarks.peers import Absent, Peer, Unsupported
from benchmarks.problems import Problem, Shape, Variant, make_variant
from benchmarks.results import Row
from benchmarks.session import Candidate, Session, chosen, compare, prepare
from benchmarks.warm import run_all

WHAT = ("forward", "backward", "memory")
_NO_BACKWARD = "it has no backward"
_MEMORY = ("memory_forward", "memory_backward")


def run(session: Session, shapes: Sequence[Shape], variants: Sequence[str], what: Sequence[str]) -> None:
    """All cases, one after another, until the time is spent."""
    for shape in shapes:
        for name in variants:
            if session.out_of_time():
                session.say(f"no time left for {shape} {name}")
                continue
            run_case(session, shape, make_variant(name, shape, session.device), what)


def run_case(session: Session, shape: Shape, variant: Variant, what: Sequence[str]) -> None:
    """One shape and variant: checks every peer, then times those that are right."""
    forget_compiled()
    problem = Problem(shape, variant, session.device, session.dtype)
    where = (shape, variant.name)
    tensors = problem.tensors()
    needs_grad = "backward" in what or "memory" in what
    grad = torch.randn_like(tensors[0][..., : shape.value_dim]) if needs_grad else None
    begin = time.perf_counter()
    exact = check.exact(problem, tensors, grad)
    phases = [f"reference {time.perf_counter() - begin:.1f}"]
    whats = [w for w in what if w != "memory"] + (list(_MEMORY) if "memory" in what else [])
    candidates: dict[str, Candidate] = {}
    for peer in chosen(session.peers):
        begin = time.perf_counter()
        try:
            candidates[peer.name] = prepare(peer, problem, tensors, grad, exact, training=True)
        except (Unsupported, Absent) as error:
            session.failed(whats, where, peer, error)
        except Exception as error:
            candidate = _inference(problem, peer, tensors, exact)
            session.failed([w for w in whats if candidate is None or "backward" in w], where, peer, error)
            if candidate is not None:
                candidates[peer.name] = candidate
        phases.append(f"{peer.name} {time.perf_counter() - begin:.1f}")
    begin = time.perf_counter()
    if "forward" in what:
        _time_forward(session, problem, candidates)
    if "backward" in what:
        _time_backward(session, problem, candidates)
    if "memory" in what:
        for candidate in candidates.values():
            _memory(session, where, candidate)
    session.say(f"{shape} {variant.name}: seconds: {', '.join(phases)}, measuring {time.perf_counter() - begin:.1f}")


def _inference(problem: Problem, peer: Peer, tensors: Sequence[torch.Tensor], exact: check.Exact) -> Candidate | None:
    """The peer without gradients, after it failed with them; None if that fails too."""
    try:
        return prepare(peer, problem, tensors, None, exact)
    except Exception:
        return None  # the first failure says why; its row is written by the caller


def _time_forward(session: Session, problem: Problem, candidates: dict[str, Candidate]) -> None:
    rates = lambda ms: {"tflops": problem.flops / ms / 1e9}
    rows = compare(session, {name: c.forward for name, c in candidates.items()}, rates)
    for name, row in rows.items():
        error = {"out": candidates[name].error["out"]}
        session.record(
            "forward", (problem.shape, problem.variant.name), candidates[name].peer, **row, **_extra(problem, error)
        )


def _time_backward(session: Session, problem: Problem, candidates: dict[str, Candidate]) -> None:
    where = (problem.shape, problem.variant.name)
    able = {name: c for name, c in candidates.items() if c.out is not None}
    for name, candidate in candidates.items():
        if name not in able and not candidate.call.has_backward:
            session.record("backward", where, candidate.peer, status="unsupported", reason=_NO_BACKWARD)
    rates = lambda ms: {"tflops": 2.5 * problem.flops / ms / 1e9}
    rows = compare(session, {name: c.backward for name, c in able.items()}, rates)
    for name, row in rows.items():
        error = {k: e for k, e in able[name].error.items() if k != "out"}
        session.record("backward", where, able[name].peer, **row, **_extra(problem, error))


def _extra(problem: Problem, error: dict[str, float]) -> Row:
    return {"error": error, "kept": problem.variant.kept}


def _memory(session: Session, where: tuple[Shape, str], candidate: Candidate) -> None:
    """Peak of the allocator above what was there before, of a forward, and of a forward and its backward."""
    peer = candidate.peer
    if session.device.type != "cuda":
        for what in _MEMORY:
            session.record(what, where, peer, status="skipped", reason="peaks are read from CUDA's allocator")
        return
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    peak = lambda: (torch.cuda.max_memory_allocated() - before) / 2**20
    out = candidate.forward()
    torch.cuda.synchronize()
    session.record("memory_forward", where, peer, mib=peak())
    if candidate.out is None:
        return
    torch.autograd.grad(out, candidate.tensors, candidate.grad)
    torch.cuda.synchronize()
    session.record("memory_backward", where, peer, mib=peak())


def forget_compiled() -> None:
    """Drops what torch.compile knows, so that a case never meets the recompile limit or guards of earlier ones."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward is timed many times on one graph
    torch.compiler.reset()


# ---------------------------------------------------------------- filling caches
def warm(
    arguments: Sequence[str], shapes: Sequence[str], variants: Sequence[str], workers: int, seconds: float | None
) -> int:
    """Compiles every case in processes of their own, `workers` at a time, so that this one finds the kernels on disk.

    Args:
        arguments: Options of `python -m benchmarks gpu` that the children get too.
        seconds: After which those that have not ended are killed.
    Returns: How many of them did not end well, whose errors this process will then meet itself.
    """
    common = ["gpu", "--what", "forward", "backward", *arguments, "--rounds", "1", "--calls", "1"]
    cases = [[*common, "--shapes", shape, "--variants", variant] for shape in shapes for variant in variants]
    return sum(reason is not None for reason in run_all(cases, workers, seconds=seconds))
