"""Attention without a GPU beside what torch offers there: SDPA with a dense boolean mask, and eager flex_attention.

The idea: the same cases, check and alternation as on a GPU, with other peers, in float32 and forward only; the last lines say
which of the promises below a run does not keep.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from benchmarks import check
from benchmarks.peers import Unsupported
from benchmarks.problems import (
    Problem,
    Shape,
    Variant,
    causal,
    document_ids,
    document_mask,
    soft_cap,
    window_mask,
)
from benchmarks.results import OURS, Row
from benchmarks.session import Candidate, Session, chosen, compare, prepare

LENGTHS = (16, 128, 1024, 4096)
VARIANTS = ("none", "causal", "window", "documents", "softcap")
TITLES = {
    "none": "none",
    "causal": "causal",
    "window": "causal, window 256",
    "documents": "causal, 8 documents",
    "softcap": "soft-cap 20, no mask",
}
PEERS = (OURS, "flexattn_mask_mod", "torch_flex_eager", "sdpa_dense")
WINDOW, CAP, SHARES = 256, 20.0, (0.07, 0.2, 0.26, 0.4, 0.55, 0.78, 0.9)
# (variant, peer) -> how many times faster flexattn must be at 4,096; and never slower than eager flex at any length.
PROMISES = {
    ("window", "sdpa_dense"): 6.0,
    ("window", "torch_flex_eager"): 20.0,
    ("causal", "sdpa_dense"): 1.3,
    ("causal", "torch_flex_eager"): 5.0,
}


def shape_of(length: int) -> Shape:
    """The problem of one length."""
    return Shape(1, 8, length, 64)


def make_variant(name: str, length: int) -> Variant:
    """One of VARIANTS."""
    position = torch.arange(length)
    start, end = torch.zeros_like(position), torch.full_like(position, length - 1)
    if name == "none":
        return Variant(name, None, None, start, end)
    if name == "softcap":
        return Variant(name, soft_cap(CAP), None, start, end, soft_cap=CAP)
    if name == "causal":
        return Variant(name, None, causal, start, position, causal=True)
    if name == "window":
        first = (position - WINDOW + 1).clamp_min(0)
        return Variant(name, None, window_mask(WINDOW), first, position, causal=True, window=WINDOW)
    cuts = (torch.tensor(SHARES) * length).long()
    starts = torch.cat([torch.tensor([0]), cuts, torch.tensor([length])])
    ids = document_ids(starts).long()
    return Variant(name, None, document_mask(ids), starts[ids], position, causal=True, starts=starts)


def run(session: Session, lengths: Sequence[int], variants: Sequence[str]) -> list[str]:
    """All lines; returns the promises that were not kept."""
    warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
    with torch.no_grad():
        for length in lengths:
            for name in variants:
                _run_case(session, length, name)
    return missed(session.recorder.added)


def _run_case(session: Session, length: int, name: str) -> None:
    problem = Problem(shape_of(length), make_variant(name, length), session.device, session.dtype)
    where = (problem.shape, name)
    tensors = problem.tensors()
    exact = check.exact(problem, tensors, None)
    candidates: dict[str, Candidate] = {}
    for peer in chosen(session.peers):
        if peer.name == "flexattn_mask_mod" and problem.variant.mask_mod is None:
            continue  # the same call as flexattn's
        try:
            candidates[peer.name] = prepare(peer, problem, tensors, None, exact)
        except Unsupported as error:
            session.failed(["forward"], where, peer, error)
    calls = max(1, min(50, 4096 // length))
    rows = compare(
        session,
        {key: c.forward for key, c in candidates.items()},
        lambda ms: {"tflops": problem.flops / ms / 1e9},
        calls=calls,
        warm=1,
    )
    for key, row in rows.items():
        session.record("forward", where, candidates[key].peer, **row, error=candidates[key].error)


def missed(rows: Sequence[Row]) -> list[str]:
    """The promises that these rows break, in words."""
    found = []
    for row in rows:
        if row["what"] != "forward" or "speedup" not in row:
            continue
        case = f"{row['variant']} {row['shape']}: {row['speedup']:.2f}x as fast as {row['impl']}"
        if row["impl"] == "torch_flex_eager" and row["speedup"] < 1:
            found.append(f"{case}, slower")
        least = PROMISES.get((row["variant"], row["impl"]), 0.0)
        if row["shape"] == str(shape_of(4096)) and row["speedup"] < least:
            found.append(f"{case}, at least {least:g} is promised")
    return found
