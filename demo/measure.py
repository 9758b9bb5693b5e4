"""Attention on the packed text, by flexattn and by dense attention doing the same work: time and peak memory of each.

Peak memory of a process only ever grows, so every measurement has a process of its own, `python -m demo.measure`, which
prints one line of JSON. Runs alternate between the rivals, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import flexattn
from demo.attention import alibi_slopes, causal_documents, dense_attention, soft_cap_and_alibi
from demo.model import CAP
from demo.text import pack_topics


class Work(NamedTuple):
    """One layer's attention over the first `tokens` of the packed text."""

    tokens: int
    heads: int
    dim: int
    repeats: int

    @classmethod
    def of(cls, device: torch.device, *, short: bool) -> Work:
        """What a device does in a few seconds, the dense rival included."""
        if device.type == "cuda":
            roomy = torch.cuda.get_device_properties(device).total_memory > 60e9
            return cls(tokens=16384 if roomy and not short else 8192, heads=8, dim=64, repeats=10)
        return cls(tokens=2048 if short else 4096, heads=8, dim=64, repeats=3)


class Cost(NamedTuple):
    """Medians in seconds, and the peak memory beyond the inputs in bytes; `failure` says why there is none."""

    mask: float = 0.0
    forward: float = 0.0
    both: float = 0.0
    memory: float = 0.0
    failure: str = ""


def dense_mask(document: Tensor) -> Tensor:
    """The mask as a boolean matrix [length, length]."""
    index = torch.arange(len(document), device=document.device)
    return causal_documents(document)(0, 0, index.view(-1, 1), index)


# Each rival: document -> mask, and (q, k, v, mask, slope) -> output. The first pair keeps scores as they are, so that
# scaled_dot_product_attention can take part; the second pair bends them.
RIVALS: dict[str, tuple[Callable[..., object], Callable[..., Tensor]]] = {
    "flexattn": (
        lambda document: flexattn.create_block_mask(
            causal_documents(document), None, None, len(document), len(document), device=document.device
        ),
        lambda q, k, v, mask, slope: flexattn.flex_attention(q, k, v, block_mask=mask),
    ),
    "sdpa": (
        dense_mask,
        lambda q, k, v, mask, slope: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ),
    "flexattn-softcap": (
        lambda document: flexattn.create_block_mask(
            causal_documents(document), None, None, len(document), len(document), device=document.device
        ),
        lambda q, k, v, mask, slope: flexattn.flex_attention(
            q, k, v, score_mod=soft_cap_and_alibi(CAP, slope), block_mask=mask
        ),
    ),
    "dense-softcap": (
        dense_mask,
        lambda q, k, v, mask, slope: dense_attention(q, k, v, mask, soft_cap_and_alibi(CAP, slope)),
    ),
}


def compare(
    names: Sequence[str], work: Work, device: torch.device, *, rounds: int, tick: Callable[[str], None]
) -> dict[str, Cost]:
    """The cost of each rival: the median over `rounds` processes, which alternate between the rivals."""
    costs: dict[str, list[Cost]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            tick(name)
            costs[name].append(_in_process(name, work, device))
    return {name: _median(found) for name, found in costs.items()}


def _in_process(name: str, work: Work, device: torch.device) -> Cost:
    command = [sys.executable, "-m", "demo.measure", name, *map(str, work), device.type]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode == 0:
        return Cost(**json.loads(done.stdout.splitlines()[-1]))
    if "out of memory" in done.stderr or done.returncode < 0:
        return Cost(failure="out of memory")
    raise RuntimeError(f"demo.measure {name} failed:\n{done.stderr}")


def _median(costs: list[Cost]) -> Cost:
    for cost in costs:
        if cost.failure:
            return cost
    return Cost(*(statistics.median(getattr(c, field) for c in costs) for field in Cost._fields[:4]))


def _inputs(work: Work, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, work.heads, work.tokens, work.dim)
    qkv = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]
    slope = alibi_slopes(work.heads).to(device).requires_grad_()
    return qkv, slope, pack_topics().document[: work.tokens].to(device)


def _run(name: str, work: Work, device: torch.device) -> Cost:
    """Mask, forward and backward, `work.repeats` times, in this process, after a small warm-up that loads the code."""
    make_mask, attend = RIVALS[name]
    _rounds(make_mask, attend, _inputs(work._replace(tokens=256), device), repeats=1)
    inputs = _inputs(work, device)
    if device.type == "cuda":
        _rounds(make_mask, attend, inputs, repeats=1)  # builds the kernels of this size
    before = _peak_memory(device, reset=True)
    mask, forward, both = _rounds(make_mask, attend, inputs, repeats=work.repeats)
    return Cost(mask, forward, both, _peak_memory(device) - before)


def _rounds(
    make_mask: Callable[..., object],
    attend: Callable[..., Tensor],
    inputs: tuple[list[Tensor], Tensor, Tensor],
    *,
    repeats: int,
) -> tuple[float, float, float]:
    (q, k, v), slope, document = inputs
    times: list[tuple[float, float, float]] = []
    for _ in range(repeats):
        q.grad = k.grad = v.grad = slope.grad = None
        start = _now(q)
        mask = make_mask(document)
        masked = _now(q)
        out = attend(q, k, v, mask, slope)
        forwarded = _now(q)
        out.backward(torch.ones_like(out))
        times.append((masked - start, forwarded - masked, _now(q) - masked))
        del mask, out
    return tuple(map(statistics.median, zip(*times)))  # type: ignore[return-value]


def _now(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_memory(device: torch.device, *, reset: bool = False) -> float:
    """Bytes: on a GPU what torch allocated at most since the last reset, else the most the process had resident.

    Linux can forget the peak of a process, as a GPU's allocator can: what importing torch needed must not hide what
    attention needs. (getrusage would even count what the parent had before it started this process.)
    """
    if device.type == "cuda":
        if reset:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.max_memory_allocated())
    if sys.platform != "linux":
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return float(line.split()[1]) * 1024


def main() -> None:
    """One measurement, printed as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", choices=sorted(RIVALS))
    for field in Work._fields:
        parser.add_argument(field, type=int)
    parser.add_argument("device", choices=("cpu", "cuda"))
    given = parser.parse_args()
    work = Work(*(getattr(given, field) for field in Work._fields))
    print(json.dumps(_run(given.name, work, torch.device(given.device))._asdict()))


if __name__ == "__main__":
    main()
