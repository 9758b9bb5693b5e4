"""Traced mods evaluated on tiles of scores with torch operations: masks, scores, and the derivatives of scores.

Reads a Traced program and the positions of a tile (four index tensors that broadcast); makes a tile. The one idea: a program is
flattened once into steps, and a step writes over an operand nobody reads again, so a soft-cap needs no memory besides its scores.
The backward pass shares the values the score needed: steps after the first program start from the values it kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError
from flexattn.frontend.expr import DEP_B, DEP_H, Expr, fold, to_text, topological
from flexattn.frontend.gradient import score_gradient
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Traced

# Rows of the table whose result may be written over an operand: torch functions with `out=` that keep the data type.
_OVERWRITES = frozenset(
    (
        "add",
        "sub",
        "mul",
        "truediv",
        "neg",
        "abs",
        "minimum",
        "maximum",
        "where",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log2",
        "log1p",
        "sqrt",
        "rsqrt",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "erf",
        "floor",
        "ceil",
        "round",
        "trunc",
    )
)


class Positions(NamedTuple):
    """Indices of a tile: b `[batches, 1, 1, 1]`, h `[1, heads, 1, 1]`, q_idx `[1, 1, queries, 1]`, kv_idx `[1, 1, 1, keys]`."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor

    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the tile."""
        return (self.b.shape[0], self.h.shape[1], self.q_idx.shape[2], self.kv_idx.shape[3])


# ---------------------------------------------------------------- a program as steps
class Step(NamedTuple):
    """One node: where its operands are, which of them die here, and how to compute it."""

    node: Expr
    args: tuple[int, ...]
    dying: tuple[int, ...]  # operands this step may write over
    eval: Callable[..., Tensor] | None


class Steps(NamedTuple):
    """Straight-line form of some expressions; `given` are values another program has computed."""

    given: tuple[Expr, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]


@lru_cache(maxsize=4096)
def _flatten(roots: tuple[Expr, ...], given: tuple[Expr, ...] = ()) -> Steps:
    """Steps for `roots`, starting from `given`, sharing every common part."""
    nodes = [*given, *_below(roots, frozenset(given))]
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {place[a]: i for i, node in enumerate(nodes) if i >= len(given) for a in node.args}
    viewed = {place[a] for node in nodes[len(given) :] if node.op == "detach" for a in node.args}
    kept = {place[r] for r in roots} | viewed
    steps = []
    for i in range(len(given), len(nodes)):
        node = nodes[i]
        args = tuple(place[a] for a in node.args)
        dying: tuple[int, ...] = ()
        if node.op in _OVERWRITES:
            dying = tuple(
                a for a, expr in zip(args, node.args) if last_use[a] == i and a not in kept and expr.dtype == node.dtype
            )
        steps.append(Step(node, args, dying, OPS[node.op].eval if node.op in OPS else None))
    return Steps(given, tuple(steps), tuple(place[r] for r in roots))


def _below(roots: Iterable[Expr], stop: frozenset[Expr]) -> list[Expr]:
    """Nodes under `roots`, operands first, without descending into `stop`."""
    order: dict[Expr, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if node in stop or node in order:
            continue
        if expanded:
            order[node] = None
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in node.args)
    return list(order)


class _Reads:
    """Out-of-range reads of captured tensors met while evaluating one tile."""

    def __init__(self) -> None:
        self.outside: list[tuple[Tensor, Expr]] = []

    def check(self, kept: Tensor, traced: Traced) -> None:
        """Raises where a read out of range happened at a kept position."""
        for outside, load in self.outside:
            if bool((outside & kept).any()):
                slot = load.attr[0]
                raise CaptureIndexError(
                    f"{traced.program.capture_name(slot)} is read out of range at a kept position in `{traced.program}`",
                    given=f"index [{', '.join(map(to_text, load.args))}] for sizes {tuple(traced.binding.captures[slot].shape)}",
                    hint="mask those positions, clamp the index, or make the tensor longer",
                    where=_where(traced, load),
                )


def _where(traced: Traced, node: Expr) -> str | None:
    source = traced.program.sources.get(node, traced.program.where)
    return None if source is None else str(source)


class _Evaluator:
    """Runs Steps with one call's captured tensors and numbers."""

    def __init__(self, traced: Traced, device: torch.device) -> None:
        self.traced, self.device = traced, device
        self.captures = [c.detach().to(device) for c in traced.binding.captures]
        self.constants: dict[Expr, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}

    def run(
        self, code: Steps, positions: Positions, given: Sequence[Tensor], reads: _Reads, **leaves: Tensor
    ) -> list[Tensor]:
        """Values of the code's results; `leaves` are score and grad, which may be written over."""
        self.leaves = {**positions._asdict(), **leaves}
        shape = positions.shape()
        values: list[Any] = list(given)
        own = [False] * len(values)
        for step in code.steps:
            node = step.node
            args = [values[a] for a in step.args]
            owned = node.op != "detach"
            if node.op in ("var", "const", "num", "load"):
                value = self._leaf(node, args, reads)
                owned = node.op == "var" and node.attr in leaves
            elif node.op == "cast":
                value = args[0].to(node.dtype)
                owned = value is not args[0] or own[step.args[0]]
            else:
                out = next((values[a] for a in step.dying if own[a] and values[a].shape == shape), None)
                if out is not None and all(a.dtype == out.dtype or a.dtype == torch.bool for a in args):
                    value = step.eval(*args, out=out)  # type: ignore[misc]
                else:
                    value = step.eval(*args)  # type: ignore[misc]
            values.append(value)
            own.append(owned)
        return [values[i] for i in code.results]

    def _leaf(self, node: Expr, args: list[Tensor], reads: _Reads) -> Tensor:
        if node.op == "var":
            return self.leaves[node.attr]
        if node.op == "load":
            return self._load(node, args, reads)
        value = self.constants.get(node)
        if value is None:
            number = self.traced.binding.numbers[node.attr] if node.op == "num" else node.attr
            value = torch.tensor(number, dtype=node.dtype, device=self.device)
            self.constants[node] = value
        return value

    def _load(self, node: Expr, index: list[Tensor], reads: _Reads) -> Tensor:
        """A gather; positions out of range read something harmless and are remembered."""
        capture = self.captures[node.attr[0]]
        outside: Tensor | None = None
        for d, (i, size) in enumerate(zip(index, capture.shape)):
            low, high = torch.aminmax(i)
            if int(low) >= -size and int(high) < size:
                continue
            wrong = (i < -size) | (i >= size)
            index[d] = torch.where(wrong, 0, i)
            outside = wrong if outside is None else outside | wrong
        if outside is not None:
            reads.outside.append((outside, node))
        if index and capture.numel() == 0:
            value = capture.new_zeros(torch.broadcast_shapes(*(i.shape for i in index)))
        else:
            value = capture[tuple(index)] if index else capture
        if (
            outside is not None and self.device.type != "cpu"
        ):  # on a GPU a kept read out of range is NaN or 0, not an error
            value = torch.where(outside, math.nan if capture.is_floating_point() else 0, value)
        return value.to(node.dtype)


# ---------------------------------------------------------------- masks and scores
@lru_cache(maxsize=4096)
def shift_invariant(body: Expr) -> bool:
    """Whether moving q_idx and kv_idx together provably changes nothing, as in every window: tiles along a diagonal are equal.

    Each node's value must move by a known multiple of the shift (0 at the root): q_idx by 1, q_idx - kv_idx by 0, and a
    comparison by 0 if both sides move alike.
    """

    def visit(node: Expr, moved: list[int | None]) -> int | None:
        if node.op == "var":
            return 1 if node.attr in ("q_idx", "kv_idx") else 0
        if None in moved:
            return None
        by = [m for m in moved if m is not None]
        if node.op == "add":
            return by[0] + by[1]
        if node.op == "sub":
            return by[0] - by[1]
        if node.op == "neg":
            return -by[0]
        if node.op in ("lt", "le", "eq", "ne"):
            return 0 if by[0] == by[1] else None
        return 0 if not any(by) else None

    return fold([body], visit)[0] == 0


class MaskMod:
    """A traced mask on tiles."""

    def __init__(self, traced: Traced, device: torch.device) -> None:
        self.evaluator = _Evaluator(traced, device)
        self.code = _flatten((traced.program.body,))
        self.moves = shift_invariant(traced.program.body)
        self.per_head = bool(traced.program.body.deps & (DEP_B | DEP_H))

    def dropped(self, positions: Positions) -> Tensor:
        """Truth values of four dimensions that broadcast to the tile: True where the pair is not kept."""
        reads = _Reads()
        (kept,) = self.evaluator.run(self.code, positions, (), reads)
        kept = kept.to(torch.bool)
        kept = kept if kept.dim() == 4 else kept.reshape(1, 1, 1, 1)  # of a constant, or a captured scalar alone
        if reads.outside and kept.device.type == "cpu":
            reads.check(kept, self.evaluator.traced)
        return ~kept


class CaptureTile(NamedTuple):
    """A tile's gradient of one captured read: which element of which tensor, and how much."""

    slot: int
    indices: list[Tensor]
    grad: Tensor

    def add_to(self, captures: Sequence[Tensor | None], dead: Tensor) -> None:
        """Adds the tile into the accumulator of its tensor, nothing where `dead`."""
        into = captures[self.slot]
        assert into is not None
        grad = self.grad.expand(dead.shape).masked_fill(dead, 0.0).to(into.dtype)
        shape = torch.broadcast_shapes((1, 1, 1, 1), *(i.shape for i in self.indices))
        summed = [d for d in range(4) if shape[d] == 1 and grad.shape[d] > 1]
        grad = grad.sum(summed, keepdim=True) if summed else grad
        if not self.indices:
            into += grad.sum()
            return
        flat = torch.zeros(shape, dtype=torch.int64, device=grad.device)
        for i, size, stride in zip(self.indices, into.shape, into.stride()):
            flat = flat + torch.where(i < 0, i + size, i).clamp_(0, max(size - 1, 0)) * stride
        if into.device.type == "cpu":
            into.view(-1).index_add_(0, flat.reshape(-1), grad.reshape(-1))
        elif into.numel():
            into.view(-1).index_put_(
                (flat.reshape(-1),), grad.reshape(-1), accumulate=True
            )  # in a fixed order, unlike index_add_


class ScoreMod:
    """A traced score on tiles and, when asked, its derivatives."""

    def __init__(self, traced: Traced, device: torch.device, needs: Sequence[bool] | None = None) -> None:
        self.traced = traced
        self.evaluator = _Evaluator(traced, device)
        body = traced.program.body
        self.captured: list[
            tuple[int, int]
        ] = []  # slot and number of indices of each captured read that needs a gradient
        self.kept: tuple[Expr, ...] = ()
        if needs is not None:
            self._differentiate(body, needs)
        self.code = _flatten((body, *self.kept))

    def _differentiate(self, body: Expr, needs: Sequence[bool]) -> None:
        gradient = score_gradient(self.traced.program)
        wanted = [entry for entry in gradient.d_captures if needs[entry.slot]]
        self.captured = [(entry.slot, len(entry.load.args)) for entry in wanted]
        grads = (entry.grad for entry in wanted)
        roots = (gradient.d_score, *grads, *(i for entry in wanted for i in entry.load.args))
        shared = frozenset(topological([body]))
        used = dict.fromkeys([*(a for node in _below(roots, shared) for a in node.args), *roots])
        self.kept = tuple(node for node in used if node in shared)
        self.derivative = _flatten(roots, self.kept)

    def apply(
        self, score: Tensor, spare: Callable[[], Tensor], positions: Positions, kept: Callable[[], Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The modified scores, in `score` or `spare()`, and the values the derivative starts from.

        Args:
            score: `[batches, heads, queries, keys]`, scaled, of which this function may change every element.
            spare: makes another tile of that shape; used where the derivative needs the scores themselves.
            positions: of the tile.
            kept: the tile's mask, only asked for if a read was out of range.
        """
        reads = _Reads()
        value, *saved = self.evaluator.run(self.code, positions, (), reads, score=score)
        if reads.outside and score.device.type == "cpu":
            reads.check(kept(), self.traced)
        used = {x.untyped_storage().data_ptr() for x in saved}
        if value is score and score.untyped_storage().data_ptr() not in used:
            return score, saved
        target = spare() if score.untyped_storage().data_ptr() in used else score
        return target.copy_(value), saved

    def differentiate(
        self, grad: Tensor, positions: Positions, saved: Sequence[Tensor]
    ) -> tuple[Tensor, list[CaptureTile]]:
        """From the gradient of the modified scores (which may be written over) to those of the scores and of captured reads."""
        d_score, *rest = self.evaluator.run(self.derivative, positions, saved, _Reads(), grad=grad)
        grads, indices = rest[: len(self.captured)], rest[len(self.captured) :]
        tiles = []
        for (slot, rank), d_capture in zip(self.captured, grads):
            tiles.append(CaptureTile(slot, indices[:rank], d_capture))
            indices = indices[rank:]
        return d_score, tiles
