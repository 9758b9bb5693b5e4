"""Bounds of a mask over a box of indices, as expressions: what a kernel evaluates to skip whole strips of blocks.

Reads a mask program; makes two truth expressions over the box's ends (q_lo, q_hi, kv_lo, kv_hi, b, h): the mask must hold
everywhere, and may hold somewhere. The one idea: the table's `bounds` cells are run on traced values instead of tensors, so
that the proof the CPU does with numbers and the one a kernel does are the same cells. A captured tensor enters through its
least and greatest element over a range of flat positions, and where two reads are compared for equality (documents in any
order) through the set of its values there, operations of their own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flexattn.frontend.expr import DEP_KV, DEP_Q, Expr, const, convert, fold, intern, make, rebuild, topological, var
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Program
from flexattn.frontend.proxy import Proxy, Trace
from flexattn.frontend.simplify import simplify

Ends = tuple[Expr, Expr]
_ENDS = {"b": ("b", "b"), "h": ("h", "h"), "q_idx": ("q_lo", "q_hi"), "kv_idx": ("kv_lo", "kv_hi")}
_ROW_ENDS = _ENDS | {"q_idx": ("q_idx", "q_idx")}
_UNKNOWN: Ends = (const(False, torch.bool), const(True, torch.bool))


class BoxBounds(NamedTuple):
    """The bounds of a mask program.

    Attributes:
        must, may: truth expressions over q_lo, q_hi, kv_lo, kv_hi (both ends inclusive), b and h.
        sharper: both once more, by sets of values instead of extremes where two reads are compared; what either proves holds.
            None for a mask that compares no two reads.
        ranged: slots of the captured tensors whose least and greatest elements over ranges are read.
        valued: slots of those whose sets of values over ranges are read.
    """

    must: Expr
    may: Expr
    sharper: Ends | None
    ranged: tuple[int, ...]
    valued: tuple[int, ...]


@lru_cache(maxsize=1024)
def box_bounds(program: Program, *, of_rows: bool = False) -> BoxBounds:
    """Bounds of a mask over boxes, as expressions.

    Args:
        program: a mask program.
        of_rows: boxes are one query high, and its index is q_idx.

    Returns:
        must and may; both are sound for every box, and `must` false with `may` true is undecided. Float arithmetic and reads
        whose index moves along both axes in different dimensions are not followed (but for those of a table of blocks, as
        in table[q_idx // 64, kv_idx // 64]): what depends on them is undecided.

    Example:
        >>> causal = trace(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, "mask").program
        >>> str(box_bounds(causal).must), str(box_bounds(causal).may)
        ('Expr(kv_hi <= q_lo)', 'Expr(~(q_hi < kv_lo))')

    Source: interval arithmetic (R. E. Moore, Interval Analysis, 1966), on symbolic ends.
    """
    variables = _ROW_ENDS if of_rows else _ENDS
    must, may = _bounded(program.body, variables, sets=False)
    sharper = (
        _bounded(program.body, variables, sets=True) if any(map(_compares_reads, topological([program.body]))) else None
    )
    nodes = topological([must, may, *(sharper or ())])
    ranged = {n.attr[0] for n in nodes if n.op in ("least", "greatest")}
    valued = {n.attr[0] for n in nodes if n.op == "values"}
    return BoxBounds(must, may, sharper if valued else None, tuple(sorted(ranged)), tuple(sorted(valued)))


def _bounded(body: Expr, variables: dict[str, tuple[str, str]], *, sets: bool) -> Ends:
    """(must, may), by extremes, or where two reads are compared by sets of values."""
    tracer = Trace(_AllLiteral(), remember=False)  # type: ignore[arg-type]
    reads: dict[Expr, _Range] = {}

    def visit(node: Expr, args: list[Ends | None]) -> Ends | None:
        if any(a is None for a in args) or node.dtype.is_floating_point:
            return _UNKNOWN if node.dtype == torch.bool else None
        known = [a for a in args if a is not None]
        if node.op == "var":
            first, last = variables[str(node.attr)]
            return var(first), var(last)
        if node.op in ("const", "num"):
            return node, node
        if node.op == "load":
            return _load_bounds(node, known, reads)
        if all(a is z for a, z in known):  # of b and h alone: the value itself
            point = rebuild(node, [a for a, _ in known])
            return point, point
        if node.op == "where" and known[0][0] is known[0][1]:
            (kind, _), (a_low, a_high), (z_low, z_high) = known
            return rebuild(node, [kind, a_low, z_low]), rebuild(node, [kind, a_high, z_high])
        if _is_rising_division(node):
            return rebuild(node, [known[0][0], node.args[1]]), rebuild(node, [known[0][1], node.args[1]])
        if node.op == "cast":
            return _cast_bounds(known[0], node.dtype)
        if sets and _compares_reads(node) and all(a in reads for a in node.args):
            return _apart(node, [reads[a] for a in node.args])
        pairs = [tuple(Proxy(end, tracer) for end in ends) for ends in known]
        low, high = OPS[node.op].bounds(*pairs)
        return _expr(low, node.dtype), _expr(high, node.dtype)

    must, may = fold([body], visit)[0] or _UNKNOWN
    return simplify(convert(must, torch.bool)), simplify(convert(may, torch.bool))


class _AllLiteral:
    """Numbers inside a bounds cell belong to the cell."""

    def is_literal(self, x: object) -> bool:
        return True


def _expr(value: Any, dtype: torch.dtype) -> Expr:
    return value.expr if isinstance(value, Proxy) else const(value, dtype)


def _cast_bounds(ends: Ends, dtype: torch.dtype) -> Ends:
    """To int64 a cast is monotone; as a truth value only zero is false."""
    if dtype != torch.bool:
        return convert(ends[0], dtype), convert(ends[1], dtype)
    above, below = make("lt", 0, ends[0]), make("lt", ends[1], 0)
    zero = make("and", make("eq", ends[0], 0), make("eq", ends[1], 0))
    return make("or", above, below), make("not", zero)


# ---------------------------------------------------------------- captured tensors
class _Range(NamedTuple):
    """Flat positions first .. last of a captured tensor of `length` elements; `outside`: some may lie beyond, and give 0."""

    first: Expr
    last: Expr
    length: Expr
    outside: Expr


def _load_bounds(node: Expr, index: list[Ends], reads: dict[Expr, _Range]) -> Ends | None:
    """Least and greatest element over the flat positions from the index's low ends to its high ends."""
    if all(a is z for a, z in index):
        point = intern("load", tuple(a for a, _ in index), node.attr, node.dtype)
        return point, point
    moving = [(a.deps | z.deps) & (DEP_Q | DEP_KV) for a, z in index if a is not z]
    of_blocks = all(_is_of_blocks(a) for a in node.args if a.deps & (DEP_Q | DEP_KV))
    is_spread = len(set(moving)) > 1 or moving[0] == DEP_Q | DEP_KV and len(index) > 1
    if is_spread and not of_blocks:
        return _UNKNOWN if node.dtype == torch.bool else None
    reads[node] = found = _flat_range(node, index)
    ends = [intern(op, found[:3], node.attr, torch.int64) for op in ("least", "greatest")]
    if of_blocks:  # one element for a whole block is read itself; around it there are others
        point = convert(intern("load", tuple(a for a, _ in index), node.attr, node.dtype), torch.int64)
        ends = [make("where", make("eq", found.first, found.last), point, end) for end in ends]
    low = make("where", found.outside, make("minimum", ends[0], 0), ends[0])  # such a read gives 0
    high = make("where", found.outside, make("maximum", ends[1], 0), ends[1])
    return (convert(low, torch.bool), convert(high, torch.bool)) if node.dtype == torch.bool else (low, high)


def _is_of_blocks(index: Expr) -> bool:
    """Whether an index is the same for many neighbours, by its form."""
    return index.op in ("floordiv", "rshift") or index.op in ("add", "sub", "mul", "minimum", "maximum") and all(
        _is_of_blocks(a) for a in index.args if a.deps & (DEP_Q | DEP_KV)
    )  # fmt: skip


def _is_rising_division(node: Expr) -> bool:
    """Whether a node divides by a positive constant: then it is monotone."""
    if node.op not in ("floordiv", "rshift") or node.args[1].op != "const" or node.dtype != torch.int64:
        return False
    by = int(node.args[1].attr)
    return by > 0 and (node.op == "floordiv" or by < 64)


def _compares_reads(node: Expr) -> bool:
    """Whether two reads of captured whole numbers are compared for equality."""
    return node.op in ("eq", "ne") and all(a.op == "load" and a.args and a.dtype == torch.int64 for a in node.args)


def _apart(node: Expr, ranges: list[_Range]) -> Ends:
    """Bounds of a comparison by sets: ranges that have no value in common are unequal everywhere."""
    sets = []
    for read, found in zip(node.args, ranges, strict=True):
        values = intern("values", found[:3], read.attr, torch.int64)
        sets.append(make("where", found.outside, -1, values))  # such a read gives 0
    common = make("ne", make("and", *sets), 0)
    return (_UNKNOWN[0], common) if node.op == "eq" else (make("not", common), _UNKNOWN[1])


def _flat_range(node: Expr, index: list[Ends]) -> _Range:
    slot, rank, storage = node.attr
    first = last = length = None
    outside: Expr = const(False, torch.bool)
    for axis, (a, z) in enumerate(index):
        size = intern("size", (), (slot, rank, axis, storage), torch.int64)
        a, z, beyond = _wrapped(a, z, size)
        first = a if first is None else make("add", make("mul", first, size), a)
        last = z if last is None else make("add", make("mul", last, size), z)
        length = size if length is None else make("mul", length, size)
        outside = make("or", outside, beyond)
    assert first is not None and last is not None and length is not None  # rank 0 is a point
    return _Range(first, last, length, outside)


def _wrapped(a: Expr, z: Expr, size: Expr) -> tuple[Expr, Expr, Expr]:
    """(low, high, some position may be outside) of one dimension: a range across zero wraps, so covers it whole."""
    last = make("sub", size, 1)
    if _is_natural(a):
        return make("minimum", a, last), make("minimum", z, last), make("le", size, z)
    below, crossing = make("lt", a, 0), make("and", make("lt", a, 0), make("le", 0, z))
    beyond = make("or", make("lt", a, make("neg", size)), make("le", size, z))
    low = make("where", below, make("add", a, size), a)
    high = make("where", make("lt", z, 0), make("add", z, size), z)
    low = make("where", crossing, 0, low)
    high = make("where", crossing, make("maximum", high, last), high)
    low, high = (make("minimum", make("maximum", x, 0), last) for x in (low, high))
    return low, high, beyond


def _is_natural(x: Expr) -> bool:
    """Whether an expression cannot be negative, by its form."""
    if x.op == "var":
        return True
    if x.op == "const":
        return bool(x.attr >= 0)
    if x.op in ("add", "mul", "floordiv", "rshift", "minimum"):
        return all(_is_natural(a) for a in x.args)
    if x.op in ("maximum", "where"):
        return all(_is_natural(a) for a in x.args[-2:])
    return x.op == "mod" and _is_natural(x.args[1])
