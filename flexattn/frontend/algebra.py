"""Masks out of masks: conjunction, disjunction, complement, other rows, shifts, orders of tokens, stacks, block lists.

Reads traced masks and makes traced masks. The one idea: a traced mask is a snapshot, its numbers and captures are settled, so
a mask made of others is put together from their programs and never by calling the user's functions a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import (
    DEP_B,
    DEP_H,
    DEP_KV,
    DEP_Q,
    Expr,
    const,
    fold,
    load,
    make,
    num,
    rebuild,
    topological,
    var,
)
from flexattn.frontend.program import Binding, CaptureInfo, Program, Traced
from flexattn.frontend.simplify import simplify
from flexattn.frontend.slices import Pick, RowPick, Slice
from flexattn.frontend.source import Source


class _Composer:
    """Collects the captures and numbers of several programs and renumbers their slots."""

    def __init__(self) -> None:
        self.captures: list[Tensor] = []
        self.infos: list[CaptureInfo] = []
        self.numbers: list[int | float] = []
        self.kinds: list[str] = []
        self.sources: dict[Expr, Source] = {}
        self.where: Source | None = None  # of the first program

    def capture(self, tensor: Tensor, info: CaptureInfo | None = None) -> int:
        for slot, known in enumerate(self.captures):
            if known is tensor:
                return slot
        self.captures.append(tensor)
        self.infos.append(info or CaptureInfo(tensor.dtype, tensor.dim()))
        return len(self.captures) - 1

    def number(self, value: int | float, kind: str = "int") -> int:
        self.numbers.append(value)
        self.kinds.append(kind)
        return len(self.numbers) - 1

    def read(self, tensor: Tensor, *index: Expr) -> Expr:
        return load(self.capture(tensor), tensor.dtype, index)

    def body(self, traced: Traced, replace: Mapping[Expr, Expr] | None = None, *, where: Expr | None = None) -> Expr:
        """The program's expression over this composer's slots, with some variables replaced.

        Where the condition `where` does not hold the value does not count, and captured tensors are read at 0 instead.
        """
        self.where = self.where or traced.program.where
        program, binding = traced
        slots = [self.capture(t, i) for t, i in zip(binding.captures, program.captures, strict=True)]
        numbers = [self.number(v, k) for v, k in zip(binding.numbers, program.numbers, strict=True)]
        swap = replace or {}

        def visit(node: Expr, args: list[Expr]) -> Expr:
            if node in swap:
                return swap[node]
            if node.op == "load":
                slot, _, name = node.attr
                args = args if where is None else [make("where", where, index, 0) for index in args]
                new = load(slots[slot], getattr(torch, name), args)
            elif node.op == "num":
                new = num(numbers[node.attr], node.dtype)
            else:
                new = rebuild(node, args)
            if node in program.sources:
                self.sources.setdefault(new, program.sources[node])
            return new

        return fold([program.body], visit)[0]

    def traced(self, body: Expr, name: str) -> Traced:
        infos, kinds = tuple(self.infos), tuple(self.kinds)
        program = Program("mask", simplify(body), infos, kinds, sources=self.sources, name=name, where=self.where)
        return Traced(program, Binding(tuple(self.captures), tuple(self.numbers)))


# ------------------------------------------------------------------------------------------------- traced masks
# None stands for the mask that keeps everything.
def both(a: Traced | None, b: Traced | None) -> Traced | None:
    """Pairs that both masks keep."""
    if a is None or b is None:
        return b if a is None else a
    parts = _Composer()
    body = make("and", parts.body(a), parts.body(b))
    return parts.traced(body, f"{a.program.name} & {b.program.name}")


def either(a: Traced | None, b: Traced | None) -> Traced | None:
    """Pairs that at least one mask keeps."""
    if a is None or b is None:
        return None
    parts = _Composer()
    body = make("or", parts.body(a), parts.body(b))
    return parts.traced(body, f"{a.program.name} | {b.program.name}")


def opposite(a: Traced | None) -> Traced:
    """Pairs that the mask drops."""
    parts = _Composer()
    if a is None:
        return parts.traced(const(False, torch.bool), "nothing")
    return parts.traced(make("not", parts.body(a)), f"~{a.program.name}")


def one_of(a: Traced | None, b: Traced | None) -> Traced | None:
    """Pairs that exactly one mask keeps."""
    if a is None or b is None:
        return opposite(b if a is None else a)
    parts = _Composer()
    body = make("xor", parts.body(a), parts.body(b))
    return parts.traced(body, f"{a.program.name} ^ {b.program.name}")


def shifted(traced: Traced | None, q: int, kv: int) -> Traced | None:
    """The mask seen from query q and key kv: its indices count from there."""
    if traced is None:
        return None
    parts, swap = _Composer(), {}
    for name, offset in (("q_idx", q), ("kv_idx", kv)):
        if offset:
            swap[var(name)] = make("add", var(name), num(parts.number(offset), torch.int64))
    return parts.traced(parts.body(traced, swap), traced.program.name)


def transposed(traced: Traced | None) -> Traced | None:
    """The mask with queries and keys in each other's place."""
    if traced is None:
        return None
    parts = _Composer()
    body = parts.body(traced, {var("q_idx"): var("kv_idx"), var("kv_idx"): var("q_idx")})
    return parts.traced(body, f"{traced.program.name}, transposed")


def stacked(masks: Sequence[tuple[Traced | None, int]], axis: str) -> Traced | None:
    """Masks side by side.

    Args:
        masks: each with the number of positions it has on the axis.
        axis: "b" or "h".

    Returns:
        A mask that asks the position which of them it is. Equal neighbours that do not read the axis are one of them.
    """
    parts, index, spans = _Composer(), var(axis), _joined(masks, var(axis).deps)
    body: Expr | None = None
    for traced, start, stop in reversed(spans):
        first, end = (num(parts.number(n), torch.int64) for n in (start, stop))
        inside = make("and", make("le", first, index), make("lt", index, end))
        if len(spans) == 1:
            return traced
        own = make("sub", index, first) if start else index
        here = const(True, torch.bool) if traced is None else parts.body(traced, {index: own}, where=inside)
        body = here if body is None else make("where", make("lt", index, end), here, body)
    return opposite(None) if body is None else parts.traced(body, "stack")


def _joined(masks: Sequence[tuple[Traced | None, int]], deps: int) -> list[tuple[Traced | None, int, int]]:
    """(mask, start, stop) along an axis, without those of no positions."""
    spans: list[tuple[Traced | None, int, int]] = []
    at = 0
    for traced, size in masks:
        reads = traced is not None and traced.program.body.deps & deps
        if spans and not reads and _same(spans[-1][0], traced):
            spans[-1] = (traced, spans[-1][1], at + size)
        elif size:
            spans.append((traced, at, at + size))
        at += size
    return spans


def _same(a: Traced | None, b: Traced | None) -> bool:
    if a is None or b is None:
        return a is b
    same = all(x is y for x, y in zip(a.binding.captures, b.binding.captures, strict=False))
    return same and a.program == b.program and a.binding.numbers == b.binding.numbers


def moved(traced: Traced | None, part: Slice) -> Traced | None:
    """The mask of the picked batches, heads and rows: its indices count from 0 again."""
    if traced is None:
        return None
    parts, swap, deps = _Composer(), {}, traced.program.body.deps
    if deps & DEP_B:
        swap[var("b")] = _picked(parts, part.b, var("b"))
    if deps & DEP_H:
        swap[var("h")] = _picked(parts, part.h, var("h"))
    swap[var("q_idx")] = _picked_row(parts, part.q)
    out = parts.traced(parts.body(traced, swap), traced.program.name)
    return None if keeps_all(out) else out


def _picked(parts: _Composer, pick: Pick, index: Expr) -> Expr:
    if pick.table is not None:
        return parts.read(pick.table, index)
    return make("add", index, num(parts.number(pick.start), torch.int64)) if pick.start else index


def _picked_row(parts: _Composer, q: RowPick) -> Expr:
    row = var("q_idx")
    if q.pick.table is None:
        return make("add", row, num(parts.number(q.pick.start * q.block), torch.int64)) if q.pick.start else row
    if q.block == 1:
        return parts.read(q.pick.table, row)
    block = parts.read(q.pick.table, make("floordiv", row, q.block))
    return make("add", make("mul", block, q.block), make("mod", row, q.block))


def permuted(traced: Traced | None, q_order: Tensor, kv_order: Tensor) -> Traced | None:
    """The mask of permuted tokens: its query i is the old query `q_order[i]`, its key j the old key `kv_order[j]`.

    Whatever is computed of one index alone, as a coordinate is, becomes a table in the new order, so that bounds over a block
    of neighbours are as tight as its coordinates; of an order's entries alone they would span all that lies between two of them.
    """
    if traced is None:
        return None
    parts, swap = _Composer(), {}
    orders = {"q_idx": q_order, "kv_idx": kv_order}
    made: dict[tuple[Expr, int], Tensor] = {}
    for node in _of_one_index(traced.program.body):
        name = "q_idx" if node.deps == DEP_Q else "kv_idx"
        same = fold([node], lambda e, args: var("q_idx") if e is var("kv_idx") else rebuild(e, args))[0]
        key = same, id(orders[name])
        if key not in made:
            found = _tabulated(traced, same, orders[name])
            if found is None:  # reads a captured tensor out of range somewhere, which matters only at kept pairs
                swap = {var(n): parts.read(order, var(n)) for n, order in orders.items()}
                break
            made[key] = found
        table = made[key]
        same_for_all = table.dtype == torch.bool and len(table) and bool((table == table[0]).all())
        swap[node] = const(bool(table[0]), torch.bool) if same_for_all else parts.read(table, var(name))
    body = parts.body(traced, swap)
    return _pruned(parts.traced(body, f"{traced.program.name}, permuted"))


def _of_one_index(body: Expr) -> list[Expr]:
    """The largest parts that depend on q_idx alone or on kv_idx alone."""
    found, todo = [], [body]
    while todo:
        node = todo.pop()
        if node.deps in (DEP_Q, DEP_KV):
            found.append(node)
        else:
            todo += node.args
    return list(dict.fromkeys(found))


def _tabulated(traced: Traced, node: Expr, order: Tensor) -> Tensor | None:
    """What a part of q_idx alone is for each token of an order; None if it reads a captured tensor out of range."""
    lost: list[Tensor] = []
    zero = torch.zeros((), dtype=torch.int64, device=order.device)
    values = evaluate(*traced, b=zero, h=zero, q_idx=order, kv_idx=zero, body=node, out_of_range=lost)
    values = values.to(order.device).expand(len(order)).contiguous()
    if lost:
        return None
    narrow = values.dtype == torch.int64 and (not len(values) or int(values.abs().max()) < 1 << 31)
    return values.to(torch.int32) if narrow else values


def _pruned(traced: Traced) -> Traced:
    """Without captured tensors and numbers that nothing reads any more."""
    (program, (captures, numbers)), parts = traced, _Composer()
    nodes = topological([program.body])
    slots = {n: parts.capture(captures[n], program.captures[n]) for n in _slots(nodes, "load")}
    places = {n: parts.number(numbers[n], program.numbers[n]) for n in _slots(nodes, "num")}

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "load":
            return load(slots[node.attr[0]], getattr(torch, node.attr[2]), args)
        return num(places[node.attr], node.dtype) if node.op == "num" else rebuild(node, args)

    parts.where = program.where
    return parts.traced(fold([program.body], visit)[0], program.name)


def _slots(nodes: Sequence[Expr], op: str) -> list[int]:
    return sorted({n.attr[0] if op == "load" else n.attr for n in nodes if n.op == op})


def listed(full: Tensor, partial: Tensor, *, block: tuple[int, int], inner: Traced | None) -> Traced:
    """A block list as a predicate: the pair's block is full, or it is partial and the mask keeps the pair.

    Args:
        full, partial: bool [B or 1, H or 1, rows, cols], contents of the lists.
        block: tokens of a block (q, kv).
        inner: the mask of partial blocks.

    Returns:
        A mask that any tile size can run.
    """
    parts = _Composer()
    zero = const(0, torch.int64)
    b, h = (var(name) if full.shape[n] > 1 else zero for n, name in enumerate(("b", "h")))
    index = (b, h, make("floordiv", var("q_idx"), block[0]), make("floordiv", var("kv_idx"), block[1]))
    body = parts.read(partial, *index)
    if inner is not None:  # whose reads in full blocks may be out of range
        body = make("and", body, parts.body(inner, where=body))
    return parts.traced(make("or", parts.read(full, *index), body), "block list")


def keeps_all(traced: Traced | None) -> bool:
    """Whether the program is the constant True."""
    if traced is None:
        return True
    body = traced.program.body
    return body.op == "const" and bool(body.attr)
