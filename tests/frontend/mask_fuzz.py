"""Random mask functions as Python source, and what they keep by plain torch: the two sides of the fuzz test.

`predicate(rng, ...)` writes a function over the op table: arithmetic, floor division and remainder, bits, comparisons, selection, and
reads of captured tensors with every kind of index. The one idea: both sides call the same function. To torch it is given tables
that stand in for the captured tensors, know the contract for reads out of range (0 or NaN) and note where one happened.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Mask = Callable[..., Any]
FAR = (
    1 << 24
)  # what may be larger is not multiplied or shifted, so that int32 values do not wrap: the project reads them as int64
HUGE = [2**63 - 1, -(2**63), 2**62, 2**31, -(2**31), 2**40 + 1]


class Sizes(NamedTuple):
    batch: int
    heads: int
    q_len: int
    kv_len: int


# ------------------------------------------------------------------------------------------------ plain torch
class StandIn:
    """A captured tensor for the brute force: reads out of range give 0 or NaN and are noted."""

    def __init__(self, tensor: Tensor, misread: list[Tensor], index: tuple[Tensor, ...] = ()) -> None:
        self.tensor, self.misread, self.index = tensor, misread, index

    def __getitem__(self, index: Any) -> Any:
        index = self.index + (index if isinstance(index, tuple) else (index,))
        if len(index) < self.tensor.ndim:
            return StandIn(self.tensor, self.misread, index)
        outside, where = torch.zeros((), dtype=torch.bool), []
        for i, n in zip(torch.broadcast_tensors(*map(torch.as_tensor, index)), self.tensor.shape, strict=True):
            i = torch.where(i < 0, i + n, i)
            outside = outside | (i < 0) | (i >= n)
            where.append(i.clamp(0, n - 1).long())
        self.misread.append(outside)
        found = self.tensor[tuple(where)]
        lost = torch.full_like(found, float("nan") if found.is_floating_point() else 0)
        return torch.where(outside, lost, found)


@dataclass
class Predicate:
    """A random mask function: its text, and what it captures."""

    lines: list[str]
    tables: dict[str, Tensor]
    numbers: dict[str, int | float]
    result: str

    @property
    def text(self) -> str:
        captured = ", ".join([*self.tables, *self.numbers])
        body = "".join(f"        {line}\n" for line in self.lines)
        head, tail = f"def make({captured}):\n    def mask_mod(b, h, q_idx, kv_idx):\n", "    return mask_mod\n"
        return f"{head}{body}        return {self.result}\n{tail}"

    def function(self, tables: dict[str, Any] | None = None) -> Mask:
        """The function, over its own tensors or over stand-ins."""
        space: dict[str, Any] = {"torch": torch}
        exec(compile(self.text, "<random mask>", "exec"), space)
        mask: Mask = space["make"](**(tables or self.tables), **self.numbers)
        return mask

    def brute(self, sizes: Sizes) -> tuple[Tensor, Tensor]:
        """Every pair in plain torch: (kept, captured tensors are read out of range)."""
        index = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(sizes)]
        misread: list[Tensor] = []
        tables = {n: t if t.ndim == 0 else StandIn(t, misread) for n, t in self.tables.items()}
        kept = torch.as_tensor(self.function(tables)(*index)).to(torch.bool).expand(sizes)
        bad = torch.zeros((), dtype=torch.bool)
        for outside in misread:
            bad = bad | outside
        return kept, bad.expand(sizes)

    def __str__(self) -> str:
        tables = "".join(f"    {n}: {t.dtype} {tuple(t.shape)}\n" for n, t in self.tables.items())
        return f"{self.text}{tables}    {self.numbers}"


# ------------------------------------------------------------------------------------------------ writing a function
class Term(NamedTuple):
    """A name or an expression of the function: its text and a bound of its size."""

    text: str
    size: int = 1 << 12


@dataclass
class Writer:
    """Writes one function, a line for each shared value."""

    rng: random.Random
    sizes: Sizes
    floating: torch.dtype
    lines: list[str] = field(default_factory=list)
    tables: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, int | float] = field(default_factory=dict)
    known: dict[str, list[Term]] = field(default_factory=lambda: {"int": [], "bool": [], "float": []})

    def named(self, kind: str, term: Term) -> Term:
        """The term under a name of its own, for others to share."""
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {term.text}")
        self.known[kind].append(term._replace(text=name))
        return term._replace(text=name)

    def number(self, *choices: int | float) -> str:
        """A literal, or a number that the function captures."""
        value = self.rng.choice(choices)
        if self.rng.random() < 0.6:
            return f"({value})" if value < 0 else str(value)
        name = f"n{len(self.numbers)}"
        self.numbers[name] = value
        return name

    def table(self, *shape: int, kind: str) -> str:
        """A captured tensor: sorted, constant in stretches, small, random or huge; int32, int64, bool or floats."""
        rng, name = self.rng, f"T{len(self.tables)}"
        g = torch.Generator().manual_seed(rng.randrange(1 << 30))
        low, high = rng.choice([(0, 2), (0, 9), (-5, 60), (0, 130), (-300, 300), (-1, 1)])
        data = torch.randint(low, high, shape, generator=g)
        way = rng.random()
        if shape and way < 0.3:
            data = data.sort(-1).values
        elif shape and way < 0.5:
            data = data.repeat_interleave(rng.choice([2, 7, 32]), -1)[..., : shape[-1]]
        elif shape and way < 0.6:
            data = torch.arange(shape[-1]).expand(shape) // rng.choice([1, 5, 30]) + low
        if kind == "bool":
            data = (
                torch.rand(shape, generator=g) < rng.choice([0.02, 0.5, 0.97])
                if way > 0.5
                else data > (low + high) // 2
            )
        elif kind == "huge":
            data = torch.randint(-(2**62), 2**62, shape, generator=g) * rng.choice([1, 2])
        elif kind == "float":
            data = data * rng.choice([0.25, 0.3, 1e-3]) + torch.rand(shape, generator=g) * rng.choice([0.0, 1.0])
            if rng.random() < 0.2 and data.numel():
                data.view(-1)[rng.randrange(data.numel())] = rng.choice([float("nan"), float("inf"), float("-inf")])
            data = data.to(self.floating)
        else:
            data = data.to(rng.choice([torch.int64, torch.int64, torch.int32]))
        if rng.random() < 0.15 and data.ndim:  # not contiguous
            data = torch.stack((data, data), -1)[..., 0]
        self.tables[name] = data
        return name

    def pick(self, *makers: Callable[[], Any]) -> Any:
        """What one of the makers makes; the others are not called."""
        return self.rng.choice(makers)()

    def index(self, size: int, depth: int) -> str:
        """A position in a dimension of `size`: in range, negative, wrapping, guarded or anything."""
        plain = self.rng.choice(["q_idx", "kv_idx", "(q_idx - kv_idx)"])
        x = self.integer(depth).text if self.rng.random() < 0.6 else plain
        return self.rng.choice(
            [
                f"({x}) % {size}",
                f"({x}) % {size}",
                f"torch.clamp({x}, 0, {size - 1})",
                f"({x}) % {size} - {size}",
                f"({x}) % {2 * size} - {size}",
                f"torch.where((({x}) >= 0) & (({x}) < {size}), {x}, 0)",
                f"torch.clamp({x}, {-size}, {size - 1})",
                x,
            ]
        )

    def read(self, kind: str, depth: int) -> str:
        """An element of a new table, or a scalar one."""
        q, k, b, h = self.sizes.q_len, self.sizes.kv_len, self.sizes.batch, self.sizes.heads
        way = self.rng.randrange(12)
        if way < 3:
            return f"{self.table(q + self.rng.randrange(3), kind=kind)}[q_idx]"
        if way < 6:
            return f"{self.table(k + self.rng.randrange(3), kind=kind)}[kv_idx]"
        if way == 6:
            return f"{self.table(b, kind=kind)}[b]" if self.rng.random() < 0.5 else f"{self.table(h, kind=kind)}[h]"
        if way == 7:
            index = self.rng.choice(["[b, kv_idx]", "[b][kv_idx]", "[b - 2, kv_idx]"])
            return f"{self.table(max(b, 2), k, kind=kind)}{index}"
        if way == 8:
            rows, cols = self.rng.randint(1, 40), self.rng.randint(1, 40)
            return f"{self.table(rows, cols, kind=kind)}[{self.index(rows, depth)}, {self.index(cols, 0)}]"
        if way == 9 and kind not in ("bool", "huge"):
            return self.table(kind=kind)
        size = self.rng.choice([1, 5, 64, 65, 200])
        return f"{self.table(size, kind=kind)}[{self.index(size, depth)}]"

    def integer(self, depth: int) -> Term:
        if self.known["int"] and self.rng.random() < 0.2:
            return self.rng.choice(self.known["int"])
        if depth <= 0:
            return self.pick(self._leaf, self._leaf, self._table_leaf)
        made = self.rng.choice([self._arithmetic, self._arithmetic, self._bits, self._chosen, self._table_leaf])(depth)
        return self.named("int", made) if self.rng.random() < 0.3 else made

    def _leaf(self) -> Term:
        text = self.rng.choice(
            ["q_idx", "kv_idx", "(q_idx - kv_idx)", "(kv_idx - q_idx)", "(q_idx + kv_idx)", "b", "h", "far", "number"]
        )
        if text == "far":
            far = self.rng.choice(HUGE)
            return Term(f"({self.rng.choice(['q_idx', 'kv_idx'])} + ({far}))", abs(far) + (1 << 12))
        if text == "number":
            return Term(f"({self.number(0, 1, 5, 63, 64, 130, -7)} + 0 * q_idx)", 130)
        return Term(text, 1 << 10)

    def _table_leaf(self, depth: int = 0) -> Term:
        if self.rng.random() < 0.05:
            return Term(self.read("huge", depth - 1), 1 << 63)
        return Term(self.read("int", depth - 1), 300)

    def _arithmetic(self, depth: int) -> Term:
        rng, number, x, y = self.rng, self.number, self.integer(depth - 1), self.integer(depth - 1)
        both, divisors = x.size + y.size, (1, 2, 3, 7, 16, 64, 100, -1, -5, -64)
        nonzero = lambda: f"torch.where({y.text} == 0, {rng.choice([3, -2])}, {y.text})"
        choices = [
            lambda: Term(f"({x.text} + {y.text})", both),
            lambda: Term(f"({x.text} - {y.text})", both),
            lambda: Term(f"({number(5, 63, -9)} - {x.text})", x.size + 63),
            lambda: Term(f"torch.minimum({x.text}, {y.text})", both),
            lambda: Term(f"torch.maximum({x.text}, {y.text})", both),
            lambda: Term(f"torch.clamp({x.text}, {rng.randint(-64, 3)}, {rng.randint(4, 200)})", 200),
            lambda: Term(f"torch.clamp({x.text}, max={rng.randint(-9, 200)})", x.size + 200),
        ]
        if max(x.size, y.size) <= FAR:
            choices += [
                lambda: Term(f"({x.text} * {number(2, 3, -1, -4, 0)})", 4 * x.size),
                lambda: Term(f"({x.text} // {number(*divisors)})", x.size),
                lambda: Term(f"({x.text} % {number(*divisors)})", 100),
                lambda: Term(f"({x.text} // {nonzero()})", x.size),
                lambda: Term(f"({x.text} % {nonzero()})", y.size + 3),
                lambda: Term(f"({number(7, 100, -50)} // torch.where({y.text} == 0, 1, {y.text}))", 100),
                lambda: Term(
                    f"torch.div({x.text}, {number(*divisors)}, rounding_mode={rng.choice(['floor', 'trunc'])!r})",
                    x.size,
                ),
                lambda: Term(f"torch.fmod({x.text}, {number(*divisors)})", 100),
                lambda: Term(f"torch.remainder({x.text}, {number(*divisors)})", 100),
                lambda: Term(f"abs({x.text})", x.size),
                lambda: Term(f"(-{x.text})", x.size),
                lambda: Term(f"torch.sign({x.text})", 1),
            ]
        if x.size * y.size <= FAR:
            choices.append(lambda: Term(f"({x.text} * {y.text})", x.size * y.size))
        return self.pick(*choices)

    def _bits(self, depth: int) -> Term:
        number, x, y = self.number, self.integer(depth - 1), self.integer(depth - 1)
        size = 2 * max(x.size, y.size, 1)
        choices = [
            lambda: Term(f"({x.text} & {number(1, 3, 31, 64, -8)})", size + 64),
            lambda: Term(f"({x.text} | {y.text})", size),
            lambda: Term(f"({x.text} ^ {y.text})", size),
            lambda: Term(f"({x.text} & {y.text})", size),
            lambda: Term(f"(~{x.text})", size),
            lambda: Term(f"({x.text} >> {number(0, 1, 3, 6)})", x.size),
            lambda: Term(f"({x.text} >> ({y.text} & 7))", x.size),
            lambda: Term(f"({x.text} >> ({y.text} % 90 - 20))", x.size),
            lambda: Term(
                f"torch.clamp({self.real(0)} * {number(1.0, 1e3, 1e12)}, -1e17, 1e17).to(torch.int64)", 1 << 60
            ),
            lambda: Term(f"({self.real(depth - 1)}).floor().clamp(-99, 99).long()", 100),
            lambda: Term(f"({self.condition(depth - 1)}).to(torch.int64)", 1),
        ]
        if x.size <= FAR:
            choices.append(lambda: Term(f"({x.text} << {number(0, 1, 4)})", x.size << 4))
            choices.append(lambda: Term(f"({x.text} << ({y.text} & 3))", x.size << 3))
            choices.append(lambda: Term(f"({x.text} << torch.clamp({y.text}, -2, 2))", x.size << 2))
        return self.pick(*choices)

    def _chosen(self, depth: int) -> Term:
        x, y = self.integer(depth - 1), self.integer(depth - 1)
        if self.rng.random() < 0.3:
            y = Term(self.number(0, 1, -1, 64), 64)
        return Term(f"torch.where({self.condition(depth - 1)}, {x.text}, {y.text})", max(x.size, y.size))

    def real(self, depth: int) -> str:
        """A float: a table's, or an integer that became one."""
        number, read = self.number, lambda: self.read("float", 0)
        if depth <= 0:
            return self.pick(read, lambda: f"({self.integer(0).text} * {number(0.5, 0.1, -1.5)})")
        less = lambda: self.real(depth - 1)
        return self.pick(
            lambda: f"({less()} + {less()})",
            lambda: f"({less()} - {less()})",
            lambda: f"({less()} * {less()})",
            lambda: f"({less()} / {less()})",
            lambda: f"({less()} * {number(0.5, 3.0, -1.0, 0.0)})",
            lambda: f"({self.integer(depth - 1).text} / {number(3, 7, -2)})",
            lambda: f"({less()} // {number(0.5, 2.0, -3.0)})",
            lambda: f"({less()} % {number(0.5, 7.0, -3.0)})",
            lambda: f"abs({less()})",
            lambda: f"torch.floor({less()})",
            lambda: f"torch.maximum({less()}, {less()})",
            lambda: f"torch.clamp({less()}, -1.5, 9.0)",
            lambda: f"torch.where({self.condition(depth - 1)}, {less()}, {less()})",
        )

    def condition(self, depth: int) -> str:
        rng = self.rng
        if self.known["bool"] and rng.random() < 0.15:
            return rng.choice(self.known["bool"]).text
        if depth <= 0 or rng.random() < 0.35:
            made = self._comparison(depth)
        else:
            x, y = self.condition(depth - 1), self.condition(depth - 1)
            made = self.pick(
                lambda: f"({x} & {y})",
                lambda: f"({x} | {y})",
                lambda: f"({x} ^ {y})",
                lambda: f"({x} & ~{y})",
                lambda: f"torch.logical_and({x}, {y})",
                lambda: f"torch.logical_or({x}, ~{y})",
                lambda: f"torch.logical_not({x} | {y})",
                lambda: f"torch.where({self.condition(0)}, {x}, {y})",
                lambda: f"({x} {rng.choice(['==', '!=', '<', '<=', '>', '>='])} {y})",
            )
        return self.named("bool", Term(made)).text if rng.random() < 0.25 else made

    def _comparison(self, depth: int) -> str:
        """A truth value made of numbers; half of the time one that people write."""
        number, q, k = self.number, self.sizes.q_len, self.sizes.kv_len
        sign = self.rng.choice(["<", "<=", ">", ">=", "==", "!="])
        integer, c = lambda: self.integer(depth - 1).text, self.rng.choice([16, 7, 50])

        def same_document() -> str:
            table = self.table(max(q, k), kind="int")
            return f"({table}[q_idx] == {table}[kv_idx])"

        return self.pick(
            lambda: f"(q_idx >= kv_idx + {number(0, 0, 1, -9, k - q)})",
            lambda: f"(q_idx - kv_idx <= {number(0, 5, 40, 2**40)})",
            same_document,
            lambda: self.read("bool", depth - 1),
            lambda: f"(kv_idx // {c} == q_idx // {c})",
            lambda: f"({self.real(min(depth, 2))} {sign} {self.real(self.rng.randint(0, 1))})",
            lambda: f"({integer()} {sign} {number(0.5, 17.25, -3.0, 40.0)})",
            lambda: f"({integer()} & {number(1, 6, 64)}).to(torch.bool)",
            lambda: f"({self.integer(depth).text} {sign} {self.integer(0).text})",
            lambda: f"({self.integer(depth).text} {sign} {integer()})",
            lambda: f"({self.integer(depth).text} {sign} {integer()})",
            lambda: f"({self.integer(depth).text} {sign} {number(0, 1, 30, 64, -5)})",
        )


def predicate(rng: random.Random, sizes: Sizes) -> Predicate:
    """A random mask function for sequences of these sizes."""
    writer = Writer(rng, sizes, rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    result = writer.condition(rng.randint(0, 4))
    return Predicate(writer.lines or ["pass"], writer.tables, writer.numbers, result)
