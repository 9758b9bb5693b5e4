"""What FLEXATTN_DEBUG=1 adds to a call that runs in kernels: captured reads out of range become errors.

Reads a Problem and evaluates its mods in torch over all pairs. A kernel answers such a read with NaN or 0 because it cannot
raise; here the user learns which function did it. Slow on purpose, and off unless asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError
from flexattn.runtime.pairs import kept, parts
from flexattn.runtime.plan import Problem


def check_reads(problem: Problem) -> None:
    """Evaluates both mods everywhere and raises if a kept pair reads a captured tensor out of range.

    Args:
        problem: one call, on any device.
    Raises: CaptureIndexError naming the function.
    """
    if not any(t is not None and t.binding.captures for t in (problem.score, problem.mask)):
        return
    for part in parts(problem):
        outside: list[Tensor] = []
        keep = kept(problem, part, outside)
        _raise_if("mask_mod", problem, outside, keep)
        if problem.score is not None:
            outside = []
            score = torch.zeros((), dtype=torch.float32, device=problem.q.device)
            part.evaluate(problem.score, outside, score=score)
            _raise_if("score_mod", problem, outside, keep)


def _raise_if(name: str, problem: Problem, outside: list[Tensor], keep: Tensor) -> None:
    traced = problem.mask if name == "mask_mod" else problem.score
    if traced is not None and any(bool((bad & keep).any()) for bad in outside):
        raise CaptureIndexError(
            f"{name} {traced.program.name} reads a captured tensor out of range at a pair that is kept",
            given=f"captured shapes {[tuple(c.shape) for c in traced.binding.captures]}",
            hint="a longer tensor, or a mask_mod that drops those pairs",
            where=traced.program.where and str(traced.program.where),
        )
