"""Kept pairs of masks that are another formula in each head or batch entry, as stacks of masks are.

Reads a traced mask and a grid; makes a number. The one idea: with b and h written in as numbers most of such a mask folds away,
what is left has a closed form of its own, and equal ones are counted once.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexattn.frontend.closed_form import ClosedForm, closed_form
from flexattn.frontend.expr import DEP_B, DEP_H, Expr, const, fold, rebuild, topological
from flexattn.frontend.program import Program, Traced
from flexattn.frontend.simplify import simplify
from flexattn.frontend.spans import Grid

MOST_NODES = 1 << 18  # of all groups together: a second


def count_by_group(traced: Traced, grid: Grid, device: torch.device, *, most_ends: int) -> int | None:
    """Kept pairs of all groups, exactly.

    Args:
        traced: a mask.
        grid: its groups and lengths.
        device: where to count.
        most_ends: rows times runs, of the formulas that differ, that may be evaluated.

    Returns:
        The number; None if the mask of a group has no closed form, or if that would take long.
    """
    body, (program, binding) = traced.program.body, traced
    if not body.deps & (DEP_B | DEP_H) or grid.groups * len(topological([body])) > MOST_NODES:
        return None
    one, known, total = replace(grid, batch=1, heads=1), dict[Expr, int](), 0
    for group in range(grid.groups):
        own = _of_group(traced, group // grid.heads, group % grid.heads)
        if own not in known:
            form: ClosedForm | None = closed_form(Traced(Program("mask", own, program.captures), binding))
            ends = len(form.runs) * grid.q_len if form is not None else 0
            counted = None if form is None or ends > most_ends else form.count(one, device)
            if counted is None:
                return None
            most_ends -= ends
            known[own] = counted
        total += known[own]
    return total


def _of_group(traced: Traced, b: int, h: int) -> Expr:
    """The mask of one group: its numbers, batch entry and head written in."""
    index, numbers = {"b": b, "h": h}, traced.binding.numbers

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "num":
            return const(numbers[node.attr], node.dtype)
        if node.op == "var" and node.attr in index:
            return const(index[node.attr], node.dtype)
        return rebuild(node, args)

    return simplify(fold([traced.program.body], visit)[0])


__all__ = ["count_by_group"]
