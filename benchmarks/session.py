"""One run of measurements: where, how often, what may be spent, and how a candidate is prepared, checked and timed.

The idea: whatever a peer raises becomes a row with the reason, never a missing row; but a device that no longer answers ends
the run, because every later figure would be false.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks import check, timing
from benchmarks.peers import PEERS, Absent, Call, Peer, Unsupported, said
from benchmarks.problems import Problem
from benchmarks.results import OURS, Recorder, Row


@dataclass
class Session:
    """What all measurements of a run share.

    Attributes:
        device, dtype: Where, and of what.
        recorder: Takes the rows.
        peers: Names, in the order they run; flexattn is what the others are compared with.
        rounds, calls: Of alternating timing.
        deadline: time.monotonic() after which no new case starts, or None.
    """

    device: torch.device
    dtype: torch.dtype
    recorder: Recorder
    peers: Sequence[str]
    rounds: int = 10
    calls: int = 4
    deadline: float | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def half(self) -> bool:
        return self.dtype != torch.float32

    def out_of_time(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def say(self, text: str) -> None:
        """A line about progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def record(self, what: str, where: tuple[Any, str], peer: Peer, *, quiet: bool = False, **values: Any) -> None:
        """One row; `where` is (shape, variant's name)."""
        row: Row = {"what": what, "shape": str(where[0]), "variant": where[1], "impl": peer.name}
        dtype = str(self.dtype).removeprefix("torch.")
        self.recorder.add({**row, "dtype": dtype, "version": peer.version, "status": "ok", **values}, quiet=quiet)

    def failed(self, whats: Iterable[str], where: tuple[Any, str], peer: Peer, error: Exception) -> None:
        """One row per measurement that a peer's exception prevented."""
        status, reason = status_of(error)
        lost = list(whats)
        for what in lost:
            self.record(what, where, peer, quiet=True, status=status, reason=reason)
        print(f"{', '.join(lost)}: {where[0]} {where[1]}: {peer.name} {status}: {reason}", flush=True)
        self.require_device()

    def require_device(self) -> None:
        """Ends the run if the device does not answer any more (an illegal access is not forgotten by a process)."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise SystemExit(f"the device does not answer after the last failure: {said(error)}") from error
        torch.cuda.empty_cache()


@dataclass
class Candidate:
    """A peer that computed a problem rightly, ready to be timed."""

    peer: Peer
    call: Call
    tensors: list[Tensor]  # in its own layout, requiring gradients where it has a backward
    out: Tensor | None  # with its graph, where the backward will be timed
    grad: Tensor | None  # of out, in its own layout
    error: dict[str, float]

    def forward(self) -> Tensor:
        return self.call.run(*self.tensors)

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.out, self.tensors, self.grad, retain_graph=True)


def prepare(
    peer: Peer,
    problem: Problem,
    tensors: Sequence[Tensor],
    grad: Tensor | None,
    exact: check.Exact,
    *,
    training: bool = False,
) -> Candidate:
    """Runs a peer once and checks what it computed, gradients too where `grad` is given.

    Args:
        training: The tensors require gradients where the peer has a backward, as in a training step.
    Raises: What the peer raises, or WrongResult.
    """
    call = peer.prepare(problem)
    training = training and call.has_backward
    own = [x.detach().requires_grad_(training) for x in call.own(problem, tensors)]
    out = call.run(*own)
    results = [call.to_common(out.detach())]
    own_grad = None
    if training and grad is not None:
        own_grad = call.to_own(grad).detach()
        results += [call.to_common(g) for g in torch.autograd.grad(out, own, own_grad, retain_graph=True)]
    error = check.errors(exact, results, problem.dtype != torch.float32)
    return Candidate(peer, call, own, None if own_grad is None else out, own_grad, error)


def compare(
    session: Session, candidates: Mapping[str, Callable[[], Any]], rates: Callable[[float], Row], **options: Any
) -> dict[str, Row]:
    """Times candidates in alternation; returns ms, speedup (theirs / ours) and rates of each."""
    settings = {"rounds": session.rounds, "calls": session.calls, "device": session.device, **options}
    times = timing.alternate(candidates, **settings)
    found = timing.summarise(times, OURS)
    rows: dict[str, Row] = {}
    for name, paired in found.items():
        rows[name] = {"ms": paired.ms, **rates(paired.ms), "rounds": settings["rounds"], "calls": settings["calls"]}
        if paired.ratio is not None:
            rows[name] |= {"speedup": paired.ratio, "ours_ms": found[OURS].ms}
    return rows


def status_of(error: Exception) -> tuple[str, str]:
    """An exception as a row's status and reason."""
    kinds = {Unsupported: "unsupported", Absent: "absent", check.WrongResult: "wrong"}
    status = kinds.get(type(error), "failed")
    return status, said(error) if status == "failed" else str(error)


def chosen(names: Iterable[str]) -> list[Peer]:
    """Peers by name."""
    return [PEERS[name] for name in names]
