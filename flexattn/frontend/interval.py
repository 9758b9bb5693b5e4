"""Bounds of a mask over boxes of (b, h, q_idx, kv_idx): must be true everywhere, may be true somewhere.

Reads a program, a binding and pairs of index tensors; makes a (must, may) pair per box. The one idea: captured tensors enter
through their minimum and maximum over an index range (`Table`), so a fold over the table's `bounds` cells is a proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flexattn.frontend.expr import Expr, fold
from flexattn.frontend.ops import OPS, Pair
from flexattn.frontend.program import Binding, Program

_GROUPS = 1 << 14  # a table's range structure has at most this many groups, whatever its length


class Table:
    """A captured tensor that answers least and greatest value over ranges of flat positions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        data = tensor.detach()
        self.shape, self.is_bool = tuple(data.shape), data.dtype == torch.bool
        self.data = (data.view(torch.uint8) if self.is_bool else data).reshape(-1)
        if data.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations on them
            self.data = self.data.to(torch.int64)
        self.dtype = data.dtype if data.dtype.is_floating_point else torch.int64  # of what is read
        self._sorted: bool | None = None
        self._levels: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sets: Sets | None = None
        self._order: tuple[Any, Any] | None = None  # NumPy: positions by value, and their values

    def flat_range(self, index: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(lo, hi, some position may be out of range) of the flat positions; a range across zero wraps, so covers its dimension."""
        lo: torch.Tensor | None = None
        hi: torch.Tensor | None = None
        outside: torch.Tensor | None = None
        for n, (a, z) in zip(self.shape, index):
            if not _lies_within(a, z, n):
                a, z, beyond = _wrapped(a, z, n)
                outside = beyond if outside is None else outside | beyond
            if lo is None or hi is None:
                lo, hi = a, z
            else:
                lo, hi = lo * n + a, hi * n + z
        assert lo is not None and hi is not None  # a scalar has no positions
        return lo, hi, outside

    @property
    def is_sorted(self) -> bool:
        """Whether no row of the tensor falls anywhere."""
        if self._sorted is None:
            rows = self.data.reshape(-1, self.shape[-1]) if self.shape else self.data.reshape(1, -1)
            self._sorted = _rise(rows)
        return self._sorted

    def range(self, lo: torch.Tensor, hi: torch.Tensor) -> Pair:
        """(least, greatest) of data[lo..hi]: exact for points, sorted rows and short ranges, else over whole groups."""
        if lo is hi:
            value = self._at(lo)
            return value, value
        width = self.shape[-1] if self.shape else 1
        if self.is_sorted and (len(self.shape) == 1 or bool((lo // width == hi // width).all())):
            return self._at(lo), self._at(hi)
        shift = max(0, (len(self.data) - 1).bit_length() - _GROUPS.bit_length() + 1)
        span = int((hi - lo).max()) if lo.numel() and hi.numel() else 0
        if span < 1 << shift:
            return self._read(lo, hi, span)
        least, most = self._tables(shift)
        a, z = lo >> shift, hi >> shift
        level = torch.frexp((z - a + 1).to(torch.float64))[1].to(torch.int64) - 1
        right = z - (1 << level) + 1
        least = torch.minimum(least[level, a], least[level, right])
        return least.to(self.dtype), torch.maximum(most[level, a], most[level, right]).to(self.dtype)

    def _at(self, position: torch.Tensor) -> torch.Tensor:
        if self.data.device.type != "cpu" or self.data.dtype == torch.bfloat16:
            return self.data[position].to(self.dtype)
        found = torch.from_numpy(np.asarray(self.data.numpy().take(position.numpy())))  # faster than torch's
        return found.to(self.dtype)

    def _read(self, lo: torch.Tensor, hi: torch.Tensor, span: int) -> Pair:
        least = most = self._at(lo)
        for t in range(1, span + 1):
            value = self._at(torch.minimum(lo + t, hi))
            least, most = torch.minimum(least, value), torch.maximum(most, value)
        return least, most

    def _tables(self, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sparse tables: row k holds the extremes over 2**k groups from each group on."""
        if self._levels is None:
            groups = self._groups(1 << shift)
            self._levels = (_doubling(groups.amin(1), torch.minimum), _doubling(groups.amax(1), torch.maximum))
        return self._levels

    def _groups(self, size: int) -> torch.Tensor:
        """The elements in rows of a size, the last one repeated at the end."""
        pad = -len(self.data) % size
        padded = torch.cat([self.data, self.data[-1:].expand(pad)]) if pad else self.data
        return padded.reshape(-1, size)

    def positions(self, value: int, length: int) -> Any:
        """Where among the first `length` elements of a CPU tensor a whole number is, in order (a NumPy array)."""
        if self._order is None or len(self._order[0]) != length:
            data = self.data[:length].numpy()
            order = np.argsort(data, kind="stable")
            self._order = (order if length > _GROUPS << 16 else order.astype(np.int32), data[order])
        order, values = self._order
        if not np.iinfo(values.dtype).min <= value <= np.iinfo(values.dtype).max:
            return order[:0]
        sought = values.dtype.type(value)  # a wider type would copy all values
        return order[values.searchsorted(sought) : values.searchsorted(sought, "right")]

    def values(self, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        """64-bit sets of the values (modulo 64) in the groups of 64 that [lo, hi] touches; disjoint sets prove inequality."""
        if self._sets is None:
            groups = self._groups(64)
            sets = groups.new_empty(
                len(groups), dtype=torch.int64
            )  # small tensors kept one by one would scatter the heap
            for at in range(0, len(groups), 256):
                sets[at : at + 256] = _set_of_each(groups[at : at + 256])
            self._sets = Sets(sets)
        return self._sets.over(lo >> 6, hi >> 6)


class Sets:
    """Sets of values as bits, of groups, of pairs of groups, of pairs of those and so on: twice the groups' memory."""

    def __init__(self, of_groups: torch.Tensor) -> None:
        levels = [of_groups]
        while len(levels[-1]) > 1:
            last = levels[-1]
            last = torch.cat([last, last[-1:]]) if len(last) % 2 else last
            levels.append(last[::2] | last[1::2])
        starts = [0, *itertools.accumulate(map(len, levels))]
        self._nodes, self._starts = torch.cat(levels), torch.tensor(starts[:-1], device=of_groups.device)

    def over(self, a: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """What groups a to z hold, by at most three nodes: exactly where the range begins and ends as nodes of half its size
        do, else with a part of its neighbours."""
        level = (torch.frexp((z - a).to(torch.float64))[1].to(torch.int64) - 1).clamp(min=0)
        first, last = self._starts[level] + (a >> level), self._starts[level] + (z >> level)
        return self._nodes[first] | self._nodes[torch.minimum(first + 1, last)] | self._nodes[last]


def _set_of_each(groups: torch.Tensor) -> torch.Tensor:
    """The values (modulo 64) of each row of 64 as bits."""
    bits = torch.bitwise_left_shift(1, groups.to(torch.int64) & 63)
    while bits.shape[1] > 1:
        half = bits.shape[1] // 2
        bits = bits[:, :half] | bits[:, half:]
    return bits[:, 0]


def _rise(rows: torch.Tensor) -> bool:
    """Whether no row falls anywhere. (NumPy compares many times faster than torch here.)"""
    if rows.device.type != "cpu" or rows.dtype == torch.bfloat16:
        return bool((rows[:, 1:] >= rows[:, :-1]).all())
    values, many = rows.numpy(), max(1, (1 << 16) // max(len(rows), 1))
    parts = (values[:, at : at + many + 1] for at in range(0, values.shape[1], many))  # each with the next one's first
    return all(bool((x[:, 1:] >= x[:, :-1]).all()) for x in parts)


def _lies_within(a: torch.Tensor, z: torch.Tensor, size: int) -> bool:
    """Whether no position from a to z is negative or past the end; a GPU is not asked."""
    if a.device.type != "cpu" or not a.numel() or not z.numel():
        return False
    return int(a.min()) >= 0 and int(z.max()) < size


def _wrapped(a: torch.Tensor, z: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(low, high, some position may be out of range) within a dimension of n; a range across zero covers it whole."""
    crossing, below = (a < 0) & (z >= 0), a < -n
    a, z = torch.where(a < 0, a + n, a), torch.where(z < 0, z + n, z)
    a, z = torch.where(crossing, 0, a), torch.where(crossing, torch.clamp(z, min=n - 1), z)
    return a.clamp(0, n - 1), z.clamp(0, n - 1), below | (z < 0) | (z >= n)


def _doubling(first: torch.Tensor, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Row k: what 2**k elements from each one on are together."""
    rows = first.new_empty(max(len(first).bit_length(), 1), len(first))
    rows[0] = first
    for k in range(1, len(rows)):
        step, last = 1 << (k - 1), rows[k - 1]
        rows[k, :-step] = join(last[:-step], last[step:])
        rows[k, -step:] = last[-step:]
    return rows


class Tables:
    """The range structures of a binding's captures, built when first asked for."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self._tables: dict[int, Table] = {}
        self._wraps: dict[Expr, bool] = {}

    def __getitem__(self, slot: int) -> Table:
        if slot not in self._tables:
            self._tables[slot] = Table(self.binding.captures[slot])
        return self._tables[slot]

    def may_wrap(self, body: Expr) -> bool:
        """Whether integers may wrap around; the captured values are looked at only where that could make them."""
        if body not in self._wraps:
            numbers = self.binding.numbers
            self._wraps[body] = may_wrap(body, numbers) and may_wrap(body, numbers, self._sizes())
        return self._wraps[body]

    def _sizes(self) -> tuple[int, ...]:
        """Powers of two, at least 2**31, that no value of a capture exceeds."""
        bits = []
        for tensor in self.binding.captures:
            wide = tensor.dtype == torch.int64 and tensor.numel()
            ends = torch.stack(torch.aminmax(tensor)).tolist() if wide else (0,)
            bits.append(max(31, *(abs(x).bit_length() for x in ends)))
        return tuple(1 << n for n in bits)


def _load_bounds(table: Table, node: Expr, index: list[Pair]) -> Pair:
    if not table.shape:
        value = table.data[0].to(table.dtype)
        lo = hi = value
    elif not table.data.numel():
        zero = torch.zeros_like(index[0][0], dtype=table.dtype)
        lo = hi = zero
        if node.dtype.is_floating_point:
            lo = hi = torch.full_like(zero, torch.nan)
    else:
        first, last, outside = table.flat_range(index)
        if all(a is z for a, z in index):
            last = first
        lo, hi = table.range(first, last)
        if outside is not None:  # such a read gives 0 or NaN
            if node.dtype.is_floating_point:
                lo, hi = (torch.where(outside, torch.nan, x) for x in (lo, hi))
            else:
                lo, hi = torch.where(outside, lo.clamp(max=0), lo), torch.where(outside, hi.clamp(min=0), hi)
    return (lo.to(torch.bool), hi.to(torch.bool)) if table.is_bool else (lo, hi)


def bounds(
    program: Program, tables: Tables, *, b: Pair, h: Pair, q_idx: Pair, kv_idx: Pair, sets: bool = False
) -> Pair:
    """Whether the mask must hold at every point of each box, and whether it may hold at some.

    Args:
        program: A mask program.
        tables: Range structures of its captures; made once per binding.
        b, h, q_idx, kv_idx: (lowest, highest) int64 tensors, both inclusive, that broadcast against each other.
        sets: Also compare value sets where two captured reads are compared for equality (unsorted document ids).

    Returns:
        (must, may): truth tensors. `must` false and `may` true is undecided; both are always sound.

    Raises:
        Nothing: a range that cannot be bounded is undecided.
    """
    variables = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
    device = q_idx[0].device
    if tables.may_wrap(program.body):
        return torch.zeros_like(q_idx[0], dtype=torch.bool), torch.ones_like(q_idx[0], dtype=torch.bool)
    reads: dict[Expr, list[Pair]] = {}
    unknown: list[torch.Tensor] = []

    def visit(node: Expr, args: list[Pair]) -> Pair:
        if node.op == "var":
            return variables[node.attr]
        if node.op in ("const", "num"):
            value = node.attr if node.op == "const" else tables.binding.numbers[node.attr]
            leaf = torch.tensor(value, dtype=node.dtype, device=device)
            return leaf, leaf
        if node.op == "load":
            reads[node] = args
            return _load_bounds(tables[node.attr[0]], node, args)
        if node.op == "cast":
            lo, hi = OPS["cast"].bounds(args[0], node.dtype)
            if node.dtype == torch.int64 and node.args[0].dtype.is_floating_point:
                unknown.append(~((args[0][0] > -_TAME) & (args[0][1] < _TAME)))
        else:
            lo, hi = OPS[node.op].bounds(*args)
        if node.dtype.is_floating_point:  # one NaN end means nothing is known
            bad = torch.isnan(lo) | torch.isnan(hi)
            lo, hi = torch.where(bad, torch.nan, lo), torch.where(bad, torch.nan, hi)
        elif (
            sets
            and node.op in ("eq", "ne")
            and all(a.op == "load" and a.args and a.dtype == torch.int64 for a in node.args)
        ):
            lo, hi = _set_bounds(node, reads, tables, (lo, hi))
        return lo, hi

    must, may = fold([program.body], visit)[0]
    for wild in unknown:
        must, may = must & ~wild, may | wild
    return must, may


_LIMIT = (1 << 63) - 1
_TAME = 1 << 40  # a float that may be larger, infinite or NaN has no known integer
_GROWTH: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "lshift": lambda a, b: a << min(b, 64),
    "neg": lambda a: a,
    "abs": lambda a: a,
    "floordiv": lambda a, b: a,
}
_BITS: dict[str, Callable[..., int]] = {name: lambda a, b: min(2 * max(a, b), _LIMIT) for name in ("and", "or", "xor")}
_SIZES = _GROWTH | _BITS | {"not": lambda a: a + 1}


@lru_cache(maxsize=4096)
def may_wrap(body: Expr, numbers: tuple[int | float, ...], sizes: tuple[int, ...] | None = None) -> bool:
    """Whether 64-bit integers may wrap around, as in `q_idx + window` for a window of 2**63 - 1: then no order is known.

    Indices count as below 2**31, captured integers of fewer than 64 bits as the most that they can hold. `sizes` bounds the
    values of each captured tensor; without it those of 64 bits may be anything.
    """
    wraps = False

    def visit(node: Expr, args: list[int]) -> int:
        nonlocal wraps
        if node.dtype != torch.int64:
            return 1
        if node.op in ("const", "num"):
            return abs(int(node.attr if node.op == "const" else numbers[node.attr]))
        if node.op == "load" and node.attr[2] == "int64":
            return 1 << 63 if sizes is None else sizes[node.attr[0]]
        if node.op in ("var", "load", "cast"):
            is_unsigned = node.op == "load" and node.attr[2] == "uint32"
            return _TAME if node.op == "cast" else 1 << 32 if is_unsigned else 1 << 31
        size = _SIZES[node.op](*args) if node.op in _SIZES else max(args)
        wraps = wraps or size > _LIMIT and node.op in _GROWTH
        return min(size, 1 << 63)

    fold([body], visit)
    return wraps


def _set_bounds(node: Expr, reads: dict[Expr, list[Pair]], tables: Tables, pair: Pair) -> Pair:
    """Sharper bounds of table[a] == table[b]: ranges with no value in common are unequal."""
    found = []
    for side in node.args:
        table = tables[side.attr[0]]
        lo, hi, outside = table.flat_range(reads[side])
        values = table.values(lo, hi)
        found.append(values if outside is None else torch.where(outside, -1, values))
    disjoint = (found[0] & found[1]) == 0
    return (pair[0], pair[1] & ~disjoint) if node.op == "eq" else (pair[0] | disjoint, pair[1])
