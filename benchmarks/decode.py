"""One query a request: every peer checked, then timed twice, call by call and in a CUDA graph.

The idea: keys and values of a small problem stay in the L2 cache if one asks twice, so calls go round several copies that
together are four times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import check
from benchmarks.attention import forget_compiled
from benchmarks.problems import DECODE_VARIANTS, Problem, Shape, decode_variant
from benchmarks.results import OURS
from benchmarks.session import Candidate, Session, chosen, compare, prepare

WHAT = ("decode_eager", "decode")
_MOST_SETS = 16


def run(session: Session, shapes: Sequence[Shape], variants: Sequence[str] = DECODE_VARIANTS) -> None:
    """All shapes and variants."""
    for shape in shapes:
        for name in variants:
            if session.out_of_time():
                session.say(f"no time left for decode {shape} {name}")
                continue
            run_case(session, shape, name)


def run_case(session: Session, shape: Shape, name: str) -> None:
    """One shape and variant."""
    forget_compiled()
    problem = Problem(shape, decode_variant(name, shape, session.device), session.device, session.dtype)
    where = (shape, name)
    inputs = [problem.tensors(seed) for seed in range(sets_needed(problem))]
    exact = check.exact(problem, inputs[0], None)
    sets = len(inputs)
    kept = shape.batch * shape.key_heads * problem.variant.kept * shape.key_columns
    size = (kept + shape.batch * shape.heads * (shape.dim + shape.value_dim)) * session.dtype.itemsize
    with torch.no_grad():
        ready: dict[str, Candidate] = {}
        for peer in chosen(session.peers):
            try:
                ready[peer.name] = prepare(peer, problem, inputs[0], None, exact)
            except Exception as error:
                session.failed(WHAT, where, peer, error)
        calls = {key: [_bind(candidate, problem, tensors) for tensors in inputs] for key, candidate in ready.items()}
        _record(session, "decode_eager", where, ready, {key: _all(found) for key, found in calls.items()}, size, sets)
        _record(session, "decode", where, ready, _graphs(session, where, ready, calls), size, sets)
    session.say(f"decode {shape} {name}: {sets} sets of tensors")


def _graphs(
    session: Session,
    where: tuple[Shape, str],
    ready: dict[str, Candidate],
    calls: dict[str, list[Callable[[], Tensor]]],
) -> dict[str, Callable[[], Any]]:
    """A graph's replay for each candidate; a capture that fails is a row, and ours comes last, lest it spoil others."""
    graphs: dict[str, Callable[[], Any]] = {}
    for name in sorted(ready, key=lambda n: n == OURS):
        if session.device.type != "cuda":
            session.record("decode", where, ready[name].peer, status="skipped", reason="CUDA graphs need CUDA")
            continue
        try:
            graphs[name] = _graph(calls[name])
        except Exception as error:
            session.failed(["decode"], where, ready[name].peer, error)
    return graphs


def _record(
    session: Session, what: str, where: tuple[Shape, str], ready: dict[str, Candidate],
    runs: dict[str, Callable[[], Any]], size: int, sets: int,
) -> None:  # fmt: skip
    """Times runs that each go once round all sets, and records the time of one call."""
    for name, row in compare(session, runs, lambda ms: {}).items():
        row |= {key: row[key] / sets for key in ("ms", "ours_ms") if key in row}
        session.record(what, where, ready[name].peer, **row, tbs=size / row["ms"] / 1e9, error=ready[name].error)


def sets_needed(problem: Problem) -> int:
    """How many copies of keys and values are four times the L2 cache; one without a GPU."""
    if problem.device.type != "cuda":
        return 1
    shape = problem.shape
    size = problem.dtype.itemsize * shape.batch * shape.key_heads * problem.variant.kept * shape.key_columns
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    return max(1, min(_MOST_SETS, -(-4 * cache // size)))


def _bind(candidate: Candidate, problem: Problem, tensors: Sequence[Tensor]) -> Callable[[], Tensor]:
    own = candidate.call.own(problem, tensors)
    return lambda: candidate.call.run(*own)


def _all(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def _graph(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], None]:
    """All calls as one CUDA graph; returns its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept: list[Tensor] = []
    with torch.cuda.graph(graph):
        kept.extend(call() for call in calls)
    replay = lambda: graph.replay()
    replay.kept = kept  # type: ignore[attr-defined]  # results live as long as the graph
    return replay
