"""Expression -> Triton statements: reads an Expr, makes lines of text and the name of the result.

The idea: an expression means int64 and torch's types, a kernel wants 32-bit integers. Every integer node carries a range
proved from the index and number classes; it is computed in 32 bits only where operands and result fit. Half-precision
nodes are computed in float32 and rounded, as torch does. Shared nodes get one named temporary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from flexattn.codegen.spec import LIMIT_32, SMALL_INDEX, KernelSpec
from flexattn.errors import UnsupportedError
from flexattn.frontend.expr import DEP_KV, DEP_Q, DEP_SCORE, Expr, topological
from flexattn.frontend.ops import OPS

Range = tuple[int, int]
EVERYTHING: Range = (-(1 << 63), (1 << 63) - 1)
_FLOATS = {getattr(torch, name): f"tl.{name}" for name in ("float16", "bfloat16", "float32", "float64")}
_FP16_FORMS = {"leaf_ops.tanh({0})": "leaf_ops.tanh_exp2({0})"}
_DEEPEST = 6  # operators nested in one line before a temporary is named


class Value(NamedTuple):
    """Text of a node, its machine type, the range of an integer, and how deeply the text nests."""

    text: str
    type: str
    range: Range = EVERYTHING
    depth: int = 0


class CaptureSlots(NamedTuple):
    """Where a captured tensor lies in the flat argument tuple: pointer, then sizes, then strides."""

    pointer: int
    storage: str
    rank: int
    is_wide: bool
    is_unit: bool

    def size(self, axis: int) -> str:
        """Text of the size of a dimension."""
        return f"caps[{self.pointer + 1 + axis}]"

    def offset(self, axis: int, index: str) -> str:
        """Text of how many elements an index in a dimension lies from its first."""
        is_last = axis == self.rank - 1
        return index if self.is_unit and is_last else f"{index} * caps[{self.pointer + 1 + self.rank + axis}]"


class Arguments(NamedTuple):
    """One program's view of the flat tuple: its captures, and positions and classes of its numbers."""

    captures: tuple[CaptureSlots, ...]
    numbers: tuple[tuple[int, str, bool], ...]  # (position, 'int' or 'float', is_wide)


class Index(NamedTuple):
    """A load's index texts (wrapped), and a condition of each under which it may be read."""

    parts: tuple[Value, ...]
    checks: tuple[str, ...]
    inside: str | None  # all of them; None: rank 0


class Printer:
    """Prints nodes into `lines`, but those that are `known`; one per generated function.

    The function's index `run`, if any, is `first + columns`: one row of a tensor at it is read by way of one address."""

    def __init__(
        self,
        spec: KernelSpec,
        arguments: Arguments,
        known: Mapping[Expr, Value] | None = None,
        *,
        run: str | None = None,
    ) -> None:
        self.spec, self.arguments, self.run = spec, arguments, run
        self.lines: list[str] = []
        self.values: dict[Expr, Value] = dict(known or {})
        self.indices: dict[Expr, Index] = {}
        self.uses: Counter[Expr] = Counter()
        self.named = 0

    def print(self, roots: Sequence[Expr]) -> list[Value]:
        """Values of the roots, after the statements they need."""
        order = topological(roots)
        for node in order:
            self.uses.update(node.args)
        self.uses.update(roots)
        for node in order:
            if node not in self.values:
                value = self._node(node)
                shared = self.uses[node] > 1 and value.depth > 0
                self.values[node] = self._name(value) if shared or value.depth > _DEEPEST else value
        return [self.values[r] for r in roots]

    def _name(self, value: Value) -> Value:
        name = f"t{self.named}"
        self.named += 1
        self.lines.append(f"{name} = {value.text}")
        return value._replace(text=name, depth=0)

    def _node(self, node: Expr) -> Value:
        if node.op == "var":
            return self._variable(str(node.attr))
        if node.op == "const":
            return _constant(node.attr, node.dtype)
        if node.op == "num":
            return self._number(node)
        if node.op == "load":
            return self._load(node)
        if node.op == "size":
            return self._size(node)
        if node.op in ("least", "greatest", "values"):
            return self._over_range(node)
        args = [self.values[a] for a in node.args]
        if node.op == "cast":
            if node.dtype == torch.float32 and self._is_exact_sum(node.args[0]):
                return self._float_sum(node.args[0])
            return _cast(args[0], node.args[0].dtype, node.dtype)
        return self._operation(node, args)

    def _variable(self, name: str) -> Value:
        if name in ("score", "grad", "scale"):
            return Value(name, "tl.float32")
        return Value(name, "tl.int32", (0, LIMIT_32 if self.spec.wide_lengths else SMALL_INDEX - 1))

    def _number(self, node: Expr) -> Value:
        position, kind, is_wide = self.arguments.numbers[node.attr]
        text = f"caps[{position}]"
        if kind == "float":
            return _to(Value(text, "tl.float32"), _machine_float(node.dtype))
        whole = Value(text, "tl.int64") if is_wide else Value(text, "tl.int32", (1 - SMALL_INDEX, SMALL_INDEX - 1))
        return whole if node.dtype == torch.int64 else _to(whole, _machine_float(node.dtype))

    # ---------------------------------------------------------------- captured tensors
    def index(self, node: Expr) -> Index:
        """Index of a load, printed once."""
        if node not in self.indices:
            self.indices[node] = self._index(node)
        return self.indices[node]

    def _index(self, node: Expr) -> Index:
        slots = self._slots(node)
        parts, checks = [], []
        for axis, arg in enumerate(node.args):
            value, size = materialise(self.values[arg], "tl.int32"), slots.size(axis)
            if value.range[0] < 0:
                value = self._name(value._replace(text=f"leaf_ops.wrap({value.text}, {size})", depth=1))
                checks.append(f"leaf_ops.inside({value.text}, {size})")
            else:
                value = self._name(value) if value.depth else value
                checks.append(f"({value.text} < {size})")
            parts.append(value if slots.is_wide or value.type == "tl.int32" else _to(value, "tl.int32"))
        inside = " & ".join(checks)
        if inside and self.spec.dialect == "triton_interpret":
            inside = f"({inside}) != 0"  # the interpreter widens a scalar truth value when it meets a tile
        return Index(tuple(parts), tuple(checks), inside or None)

    def _slots(self, node: Expr) -> CaptureSlots:
        slot: int = node.attr[0]
        return self.arguments.captures[slot]

    def _load(self, node: Expr) -> Value:
        slots, index = self._slots(node), self.index(node)
        if self.spec.dialect != "gluon" and node.deps & DEP_Q and node.deps & DEP_KV:
            slots = slots._replace(is_unit=False)  # or Triton lays the tile out anew and moves it through shared memory
        pointer = f"caps[{slots.pointer}]"
        other = "0" if slots.storage[0] in "iu" else 'float("nan")'
        if self.is_run(node):
            start = " + ".join([pointer, *(slots.offset(axis, p.text) for axis, p in enumerate(index.parts[:-1]))])
            size = slots.size(slots.rank - 1)
            text = (
                f"leaf_ops.read_run({start}, first, columns, {size}, {' & '.join(index.checks[:-1]) or True}, {other})"
            )
        elif index.checks:
            offset = " + ".join(slots.offset(axis, p.text) for axis, p in enumerate(index.parts))
            offset = offset if offset.isidentifier() else f"({offset})"
            text = f"tl.load({pointer} + {offset}, mask={index.inside}, other={other})"
        else:
            text = f"tl.load({pointer})"
        return self._name(_loaded(text, slots.storage, node.dtype))

    def is_run(self, node: Expr) -> bool:
        """Whether a load reads neighbours of one row, of which each other index is the same for all."""
        if self.run is None or not node.args or not self._slots(node).is_unit:
            return False
        *others, last = node.args
        return last.op == "var" and last.attr == self.run and not any(a.deps & (DEP_Q | DEP_KV) for a in others)

    def _size(self, node: Expr) -> Value:
        slots = self._slots(node)
        kind, most = ("tl.int64", (1 << 62)) if slots.is_wide else ("tl.int32", LIMIT_32)
        return Value(slots.size(node.attr[2]), kind, (0, most))

    def _over_range(self, node: Expr) -> Value:
        """The extreme of a captured tensor, or the set of its values, over flat positions; `trees` holds one tree for each
        ranged slot, then one of sets for each valued slot."""
        slots, kind = self._slots(node), "tl.int32"
        if slots.is_wide:
            kind = "tl.int64"
        first, last, length = (_to(materialise(self.values[a], kind), kind).text for a in node.args)
        if node.op == "values":
            tree = f"trees[{len(self.spec.ranged) + self.spec.valued.index(node.attr[0])}]"
            text = f"leaf_ops.values_over_range({tree}, {first}, {last}, {length})"
            return self._name(Value(text, "tl.int64", depth=1))
        tree = f"trees[{self.spec.ranged.index(node.attr[0])}]"
        value = _loaded(
            "", "i64" if slots.storage == "i64" else "i32" if slots.storage == "u8" else slots.storage, torch.int64
        )
        text = f"leaf_ops.over_range({tree}, {first}, {last}, {length}, {node.op == 'least'})"
        return self._name(value._replace(text=text, type="tl.int64" if slots.storage in ("i64", "u32") else "tl.int32"))

    # ---------------------------------------------------------------- operations
    def _operation(self, node: Expr, args: list[Value]) -> Value:
        operand_type = node.args[-1].dtype
        if operand_type == torch.int64:
            return self._integer(node, args)
        if operand_type == torch.bool:
            kind = "tl.int1"
        else:
            kind = _FLOATS[torch.float64 if operand_type == torch.float64 else torch.float32]
        first = args[:1] if node.op == "where" else []
        args = first + [_to(a, kind) for a in args[len(first) :]]
        form = self._form(node.op, operand_type)
        if node.op == "truediv" and self.spec.math != "exact" and not node.args[1].deps:
            form = "{0} * (1.0 / {1})"  # one reciprocal a program instead of a division an element
        value = _apply(form, args, "tl.int1" if node.dtype == torch.bool else kind)
        return value if node.dtype == torch.bool else _to(value, _FLOATS[node.dtype])

    def _is_exact_sum(self, node: Expr) -> bool:
        """Whether an integer sum over both tile axes has terms, and a value, that float32 holds exactly."""
        both, sides = DEP_Q | DEP_KV, [a.deps & (DEP_Q | DEP_KV) for a in node.args]
        if node.op not in ("add", "sub") or node.deps & both != both or DEP_SCORE & node.deps or both in sides:
            return False
        found = [integer_range(node.op, ranges := [self.values[a].range for a in node.args]), *ranges]
        return all(-SMALL_INDEX <= low and high <= SMALL_INDEX for low, high in found)

    def _float_sum(self, node: Expr) -> Value:
        """Its terms as floats: converted once a row and once a column instead of once an element, which is as slow as an
        exponential."""
        terms = [_to(materialise(self.values[a], "tl.int32"), "tl.float32") for a in node.args]
        return _apply(self._form(node.op, torch.float32), terms, "tl.float32")

    def _form(self, op: str, operand_type: torch.dtype) -> str:
        spelling = OPS[op].spelling
        if operand_type == torch.bool:
            return spelling.boolean
        if not operand_type.is_floating_point:
            return spelling.integer
        if spelling.exact is not None and (self.spec.math == "exact" or operand_type == torch.float64):
            return spelling.exact
        return _FP16_FORMS.get(spelling.floating, spelling.floating) if self.spec.math == "exp2" else spelling.floating

    def _integer(self, node: Expr, args: list[Value]) -> Value:
        condition = args[:1] if node.op == "where" else []
        operands = args[len(condition) :]
        result = EVERYTHING if node.dtype == torch.bool else integer_range(node.op, [a.range for a in operands])
        ranges = [a.range for a in operands] + ([] if node.dtype == torch.bool else [result])
        kind = "tl.int32" if all(_fits(r) for r in ranges) else "tl.int64"
        form = self._division(node, operands) or self._form(node.op, torch.int64)
        operands = [_to(a, kind) for a in operands]
        value = _apply(form, condition + operands, "tl.int1" if node.dtype == torch.bool else kind)
        return value._replace(range=result)

    def _division(self, node: Expr, operands: list[Value]) -> str | None:
        """Cheaper forms of // and % by a positive constant."""
        if node.op not in ("floordiv", "mod") or node.args[1].op != "const" or operands[1].range[0] <= 0:
            return None
        if operands[0].range[0] >= 0:
            return "{0} // {1}" if node.op == "floordiv" else "{0} % {1}"
        return "leaf_ops.floor_div_by({0}, {1})" if node.op == "floordiv" else "leaf_ops.floor_mod_by({0}, {1})"


# ---------------------------------------------------------------- text
def _apply(form: str, args: Sequence[Value], kind: str) -> Value:
    is_call = form.split("(")[0].replace(".", "").replace("_", "").isalnum()
    if form.startswith("leaf_ops.") and "_by(" not in form:  # a literal would be a constexpr, without tensor methods
        args = [materialise(a, kind) for a in args]
    texts = [a.text if a.depth == 0 or is_call else f"({a.text})" for a in args]
    if form == "{0} != {0}" and args[0].depth:
        texts = [f"({args[0].text})"]
    return Value(form.format(*texts), kind, depth=1 + max((a.depth for a in args), default=0))


def _to(value: Value, kind: str) -> Value:
    """The value in another machine type; literals take the type of whatever they meet."""
    if value.type == kind or value.type == "literal":
        return value
    text = value.text if value.depth == 0 else f"({value.text})"
    if kind == "tl.int1":
        return value._replace(text=f"{text} != 0", type=kind, depth=value.depth + 1)
    return value._replace(text=f"{text}.to({kind})", type=kind, depth=value.depth + 1)


def materialise(value: Value, kind: str) -> Value:
    """A literal as a scalar tensor; any other value as it is."""
    if value.type != "literal":
        return value
    return value._replace(text=f"tl.full([], {value.text}, {kind})", type=kind)


def _cast(value: Value, source: torch.dtype, dtype: torch.dtype) -> Value:
    """A torch cast; truth values and integers keep their proved range."""
    if dtype == torch.bool:
        return _to(value, "tl.int1")
    if dtype != torch.int64:
        return _to(value, _machine_float(dtype))._replace(range=EVERYTHING)
    if source == torch.bool:
        return _to(value, "tl.int32")._replace(range=(0, 1))
    return value if source == torch.int64 else _to(value, "tl.int64")._replace(range=EVERYTHING)


def _machine_float(dtype: torch.dtype) -> str:
    if dtype not in _FLOATS:
        raise UnsupportedError(
            "kernels cannot compute in this data type", given=dtype, hint="cast to a float or integer type"
        )
    return _FLOATS[dtype]


def _constant(value: object, dtype: torch.dtype) -> Value:
    if dtype == torch.bool:
        return Value(f"tl.full([], {int(bool(value))}, tl.int1)", "tl.int1")
    if dtype == torch.int64:
        number = int(value)  # type: ignore[call-overload]
        text = str(number) if number >= 0 else f"({number})"
        return Value(text, "literal", (number, number))
    real = float(value)  # type: ignore[arg-type]
    if math.isnan(real) or math.isinf(real):
        text = f'float("{real}")'
    else:
        text = repr(real) if real >= 0 else f"({real!r})"
    kind = _FLOATS[dtype]
    single = torch.finfo(torch.float32)
    is_normal = real == 0 or not math.isfinite(real) or single.tiny <= abs(real) <= single.max
    return Value(text, "literal") if is_normal and kind != "tl.float64" else Value(f"tl.full([], {text}, {kind})", kind)


def _loaded(text: str, storage: str, dtype: torch.dtype) -> Value:
    """What a load gives: small integers widened to 32 bits, bytes of truth values compared with 0."""
    if dtype == torch.bool:
        return Value(f"{text} != 0", "tl.int1", depth=1)
    if storage[0] in "iu":
        bits = int(storage[1:])
        low, high = (0, (1 << bits) - 1) if storage[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        kind = "tl.int64" if high > LIMIT_32 else "tl.int32"
        return Value(text if storage in ("i32", "i64") else f"{text}.to({kind})", kind, (low, high), 1)
    return Value(text, _FLOATS[dtype], depth=1)


# ---------------------------------------------------------------- ranges
def _fits(bounds: Range) -> bool:
    return -LIMIT_32 - 1 <= bounds[0] and bounds[1] <= LIMIT_32


def integer_range(op: str, args: Sequence[Range]) -> Range:
    """Range of an integer operation over ranges of its operands, saturating at 64 bits."""
    low, high = _integer_range(op, args)
    return (low, high) if EVERYTHING[0] <= low and high <= EVERYTHING[1] else EVERYTHING


def _integer_range(op: str, args: Sequence[Range]) -> Range:
    if any(a == EVERYTHING for a in args) and op not in ("mod", "and"):
        return EVERYTHING
    a, b = args[0], args[-1]
    if op == "add":
        return a[0] + b[0], a[1] + b[1]
    if op == "sub":
        return a[0] - b[1], a[1] - b[0]
    if op == "mul":
        products = [x * y for x in a for y in b]
        return min(products), max(products)
    if op == "neg":
        return -a[1], -a[0]
    if op == "abs":
        return (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))), max(abs(a[0]), abs(a[1]))
    if op == "sign":
        return -1, 1
    if op == "minimum":
        return min(a[0], b[0]), min(a[1], b[1])
    if op == "maximum":
        return max(a[0], b[0]), max(a[1], b[1])
    if op == "where":
        return min(a[0], b[0]), max(a[1], b[1])
    if op == "floordiv":
        size = max(abs(a[0]), abs(a[1]))
        return (0 if a[0] >= 0 and b[0] >= 0 else -size), size
    if op == "mod" and b != EVERYTHING:
        return min(b[0] + 1, 0), max(b[1] - 1, 0)
    if op == "and" and min(a[0], b[0]) >= 0:
        return 0, min(a[1], b[1])
    if op in ("or", "xor") and min(a[0], b[0]) >= 0:
        return 0, (1 << max(a[1], b[1]).bit_length()) - 1
    return (a[0], a[1]) if op == "detach" else EVERYTHING
