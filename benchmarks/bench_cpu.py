"""Time of attention without a GPU beside what torch offers there: SDPA with a dense boolean mask, and eager flex_attention.

    python benchmarks/bench_cpu.py [--rounds 7] [--quick] [--json FILE]

Every line's outputs are compared first. Then all candidates of a line run in turn, round after round, so that a busy machine slows
all of them alike; medians and the ratio of medians are printed. Block masks are made beforehand for both sides; "mask_mod="
also counts tracing and looking the mask up.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

import flexattn

BATCH, HEADS, DIM, WINDOW = 1, 8, 64, 256
LENGTHS = (16, 128, 1024, 4096)
Call = Callable[[], torch.Tensor]


@dataclass
class Line:
    """One mask at one length: median milliseconds of each candidate, and how many times faster ours is than each other one."""

    name: str
    length: int
    milliseconds: dict[str, float]
    ratios: dict[str, float]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keys up to the query."""
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The last WINDOW keys up to the query."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WINDOW)


def soft_cap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Scores within (-20, 20)."""
    return 20 * torch.tanh(score / 20)


def documents(length: int) -> Callable[..., Any]:
    """Causal within documents of uneven length, about eight of them."""
    ends = (torch.tensor([0.07, 0.2, 0.26, 0.4, 0.55, 0.78, 0.9]) * length).long()
    ids = torch.bucketize(torch.arange(length), ends, right=True)
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def candidates(name: str, length: int) -> dict[str, Call]:
    """What runs on a line; the first one is the one the others are compared with."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, HEADS, length, DIM) for _ in range(3))
    mask = {"none": None, "causal": causal, "window": window, "documents": documents(length), "soft-cap": None}[name]
    score = soft_cap if name == "soft-cap" else None
    calls: dict[str, Call] = {}
    if mask is None:
        calls["flexattn"] = lambda: flexattn.flex_attention(q, k, v, score)
        calls["eager flex"] = lambda: torch_flex.flex_attention(q, k, v, score)
        if name == "none":
            calls["sdpa"] = lambda: F.scaled_dot_product_attention(q, k, v)
        return calls
    ours = flexattn.create_block_mask(mask, None, None, length, length)
    theirs = torch_flex.create_block_mask(mask, None, None, length, length, device="cpu")
    dense = torch_flex.create_mask(mask, None, None, length, length, device="cpu")
    calls["flexattn"] = lambda: flexattn.flex_attention(q, k, v, block_mask=ours)
    calls["flexattn mask_mod="] = lambda: flexattn.flex_attention(q, k, v, mask_mod=mask)
    calls["eager flex"] = lambda: torch_flex.flex_attention(q, k, v, block_mask=theirs)
    calls["sdpa dense mask"] = lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    return calls


def measure(name: str, length: int, rounds: int) -> Line:
    """Checks that the candidates agree, then times them in turn."""
    calls = candidates(name, length)
    expected = next(iter(calls.values()))()
    for other, call in calls.items():
        error = (call() - expected).abs().max().item()
        if not error < 2e-5:
            raise SystemExit(f"{name} {length}: {other} differs by {error}")
    repeat = max(1, min(50, 4096 // length))
    times: dict[str, list[float]] = {n: [] for n in calls}
    for _ in range(rounds):
        for other, call in calls.items():
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            times[other].append((time.perf_counter() - start) / repeat * 1e3)
    medians = {n: statistics.median(t) for n, t in times.items()}
    return Line(
        name, length, medians, {n: medians[n] / medians["flexattn"] for n in medians if not n.startswith("flexattn")}
    )


def show(line: Line) -> None:
    """One row of the table."""
    cells = [f"{n} {t:.3f}" for n, t in line.milliseconds.items()]
    ratios = [f"{r:.1f}x {n}" for n, r in line.ratios.items()]
    print(f"{line.name:<10} {line.length:>5}  {' | '.join(cells)}  -> {', '.join(ratios)}", flush=True)


def failures(lines: list[Line], quick: bool) -> list[str]:
    """The promises of this benchmark that a run does not keep."""
    wanted = {("window", "sdpa dense mask"): 6.0, ("window", "eager flex"): 20.0}
    wanted |= {("causal", "sdpa dense mask"): 1.3, ("causal", "eager flex"): 5.0}
    found = [
        f"{n.name} {n.length}: slower than eager flex ({n.ratios['eager flex']:.2f}x)"
        for n in lines
        if n.ratios["eager flex"] < 1
    ]
    for line in lines:
        for (name, other), least in wanted.items():
            if line.length == 4096 and line.name == name and line.ratios[other] < least:
                found.append(f"{name} 4096: {line.ratios[other]:.2f}x {other}, wanted {least}x")
    return found


def environment() -> dict[str, Any]:
    """Versions, commit and machine, for the JSON file."""
    root = Path(__file__).resolve().parent.parent
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flexattn": flexattn.__version__,
        "commit": git.stdout.strip(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "problem": {"batch": BATCH, "heads": HEADS, "dim": DIM, "window": WINDOW, "dtype": "float32"},
    }


def main() -> int:
    """Runs all lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only causal and window at 4096")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile.*")
    names = ("causal", "window") if options.quick else ("none", "causal", "window", "documents", "soft-cap")
    lengths = LENGTHS[-1:] if options.quick else LENGTHS
    lines = []
    print(
        f"milliseconds, medians of {options.rounds} alternating rounds, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    with torch.no_grad():
        for length in lengths:
            for name in names:
                lines.append(measure(name, length, options.rounds))
                show(lines[-1])
    if options.json:
        options.json.write_text(
            json.dumps({"environment": environment(), "lines": [asdict(n) for n in lines]}, indent=1) + "\n"
        )
    missed = failures(lines, options.quick)
    print("\n".join(["missed:", *missed]) if missed else "every promise kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
