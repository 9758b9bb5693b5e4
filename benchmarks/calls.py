"""What a call costs beside its kernel: the first call of a variant, cold, and the host's time for one of many small calls.

The idea: cold means a process of its own with empty caches. The first variant of that process also pays for what a library
loads and compiles once; the second one is what every later new variant costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import check, timing
from benchmarks.attention import forget_compiled
from benchmarks.peers import PEERS, Peer, said
from benchmarks.problems import Problem, Shape, make_variant
from benchmarks.results import ROOT
from benchmarks.session import Session, chosen, compare, prepare, status_of

HOST_SHAPE = Shape(1, 4, 128, 64)
HOST_VARIANTS = ("none", "causal", "softcap", "alibi")
FIRST_VARIANTS = ("softcap", "alibi")
FIRST = ("first_forward", "first_backward")
TIMEOUT = 150
_MARK = "first call: "
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "FLEXATTN_CACHE_DIR")


# ---------------------------------------------------------------- host time
def host(session: Session, shape: Shape = HOST_SHAPE) -> None:
    """Launch-only time of small forward calls: the device is never waited for between them."""
    for name in HOST_VARIANTS:
        if session.out_of_time():
            session.say(f"no time left for the host time of {name}")
            continue
        forget_compiled()
        problem = Problem(shape, make_variant(name, shape, session.device), session.device, session.dtype)
        tensors = problem.tensors()
        exact = check.exact(problem, tensors, None)
        candidates = {}
        with torch.no_grad():
            for peer in chosen(session.peers):
                try:
                    candidates[peer.name] = prepare(peer, problem, tensors, None, exact)
                except Exception as error:
                    session.failed(["host"], (shape, name), peer, error)
            runs = {key: c.forward for key, c in candidates.items()}
            calls = 200 if session.device.type == "cuda" else session.calls
            rows = compare(session, runs, lambda ms: {}, measure=timing.host_milliseconds, calls=calls)
        for key, row in rows.items():
            session.record("host", (shape, name), candidates[key].peer, **row, error=candidates[key].error)


# ---------------------------------------------------------------- first call
def first(session: Session, shape: str, sizes: Shape, variants: Sequence[str] = FIRST_VARIANTS) -> None:
    """Starts one process a peer, one after another, and records what they say."""
    for peer in chosen(session.peers):
        if session.out_of_time():
            session.say(f"no time left for the first call of {peer.name}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: str(Path(folder) / name.lower()) for name in _CACHES}
            command = [sys.executable, "-m", "benchmarks", "first-call", peer.name, shape, *variants]
            command += ["--device", session.device.type]
            no_disk = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0"}
            text = _output(command, {**os.environ, **caches, **no_disk})
        said_by = [json.loads(n[len(_MARK) :]) for n in text.splitlines() if n.startswith(_MARK)]
        for name in variants:
            found = next((n for n in said_by if n["variant"] == name), None)
            if found is None:
                last = " ".join(text.split())[-300:]
                _record(session, (sizes, name), peer, {"status": "failed", "reason": f"the process ended: {last}"})
            else:
                _record(session, (sizes, name), peer, found)


def _output(command: Sequence[str], variables: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, text=True, timeout=TIMEOUT, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return f"{text}\nnot ready after {TIMEOUT} s"
    return done.stdout


def _record(session: Session, where: tuple[Shape, str], peer: Peer, found: dict[str, Any]) -> None:
    for what, key in zip(FIRST, ("forward_ms", "backward_ms")):
        if found["status"] != "ok":
            values = {"status": found["status"], "reason": found["reason"]}
        elif key in found:
            values = {"ms": found[key], "order": found["order"]}
        else:
            values = {"status": found.get("backward_status", "unsupported"), "reason": found["backward_reason"]}
        session.record(what, where, peer, **values)


def first_call_child(name: str, shape: Shape, variants: Sequence[str], device: torch.device, dtype: torch.dtype) -> int:
    """What one process measures: the first call of each variant, mask included, forward and then backward."""
    peer = PEERS[name]
    warm_up = torch.randn(256, 256, device=device, dtype=dtype)
    (warm_up @ warm_up).sum().item()
    for order, variant in enumerate(variants):
        problem = Problem(shape, make_variant(variant, shape, device), device, dtype)
        row = {"variant": variant, "order": order, "status": "ok", **_first_calls(peer, problem)}
        print(_MARK + json.dumps(row), flush=True)
    return 0


def _first_calls(peer: Peer, problem: Problem) -> dict[str, Any]:
    tensors = problem.tensors()
    timing.synchronize(problem.device)
    begin = time.perf_counter()
    try:
        call = peer.prepare(problem)
        own = [x.detach().requires_grad_(call.has_backward) for x in call.own(problem, tensors)]
        out = call.run(*own)
        timing.synchronize(problem.device)
    except Exception as error:
        return dict(zip(("status", "reason"), status_of(error)))
    found: dict[str, Any] = {"forward_ms": (time.perf_counter() - begin) * 1e3}
    if not call.has_backward:
        return {**found, "backward_reason": "it has no backward"}
    grad = torch.randn_like(out)
    timing.synchronize(problem.device)
    begin = time.perf_counter()
    try:
        grads = torch.autograd.grad(out, own, grad)
        timing.synchronize(problem.device)
    except Exception as error:
        return {**found, "backward_status": "failed", "backward_reason": said(error)}
    found["backward_ms"] = (time.perf_counter() - begin) * 1e3
    results = [call.to_common(x.detach()) for x in (out, *grads)]
    try:
        exact = check.exact(problem, tensors, call.to_common(grad))
        check.errors(exact, results, problem.dtype != torch.float32)
    except check.WrongResult as error:
        return dict(zip(("status", "reason"), status_of(error)))
    return found


# ---------------------------------------------------------------- ceilings
def ceilings(session: Session) -> None:
    """What the card itself reaches at this moment: a large matrix product and a large copy."""
    device = session.device
    size = 8192 if device.type == "cuda" else 128
    peer = PEERS["torch_flex"]
    a, b = (torch.randn(size, size, device=device, dtype=session.dtype) for _ in range(2))
    source = torch.randn(size * size * (16 if device.type == "cuda" else 1), device=device)
    target = torch.empty_like(source)
    runs = {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}
    rates = {
        "matmul": lambda ms: {"tflops": 2 * size**3 / ms / 1e9},
        "copy": lambda ms: {"tbs": 2 * source.nbytes / ms / 1e9},
    }
    times = timing.alternate(runs, rounds=session.rounds, calls=session.calls, device=device)
    for name, paired in timing.summarise(times, "").items():
        session.record("ceiling", (str(size), name), peer, ms=paired.ms, **rates[name](paired.ms))
