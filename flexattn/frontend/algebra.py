"""Masks out of masks: conjunction, disjunction, complement, other rows, block lists; and the Python functions that say the same.

Reads traced masks and makes traced masks. The one idea: a traced mask is a snapshot, its numbers and captures are settled, so
a mask made of others is put together from their programs and never by calling the user's functions a second time.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import MaskFunctionError
from flexattn.frontend.expr import Expr, const, fold, load, make, num, rebuild, var
from flexattn.frontend.simplify import simplify
from flexattn.frontend.source import Source
from flexattn.frontend.program import Binding, CaptureInfo, Program, Traced

MaskMod = Callable[..., Any]


class Pick(NamedTuple):
    """Which positions of an axis a slice takes: `start + x`, or `table[x]` where there is a table."""

    start: int = 0
    table: Tensor | None = None

    def of(self, index: Any) -> Any:
        """The original index of `index`, for tensors and traced values."""
        if self.table is not None:
            return self.table[index]
        return index + self.start if self.start else index


class RowPick(NamedTuple):
    """The same for query rows, taken by whole blocks; `limit` drops rows of a ragged block that is not the last one."""

    pick: Pick
    block: int
    limit: int | None = None

    def of(self, index: Any) -> Any:
        if self.pick.table is None:
            return index + self.pick.start * self.block if self.pick.start else index
        return self.pick.table[index // self.block] * self.block + index % self.block


class _Composer:
    """Collects the captures and numbers of several programs and renumbers their slots."""

    def __init__(self) -> None:
        self.captures: list[Tensor] = []
        self.infos: list[CaptureInfo] = []
        self.numbers: list[int | float] = []
        self.kinds: list[str] = []
        self.sources: dict[Expr, Source] = {}

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

    def body(self, traced: Traced, replace: Mapping[Expr, Expr] | None = None) -> Expr:
        """The program's expression over this composer's slots, with some variables replaced."""
        program, binding = traced
        slots = [self.capture(t, i) for t, i in zip(binding.captures, program.captures, strict=True)]
        numbers = [self.number(v, k) for v, k in zip(binding.numbers, program.numbers, strict=True)]
        swap = replace or {}

        def visit(node: Expr, args: list[Expr]) -> Expr:
            if node in swap:
                return swap[node]
            if node.op == "load":
                slot, _, name = node.attr  # type: ignore[misc]
                new = load(slots[slot], getattr(torch, name), args)
            elif node.op == "num":
                new = num(numbers[node.attr], node.dtype)  # type: ignore[index]
            else:
                new = rebuild(node, args)
            if node in program.sources:
                self.sources.setdefault(new, program.sources[node])
            return new

        return fold([program.body], visit)[0]

    def traced(self, body: Expr, name: str) -> Traced:
        infos, kinds = tuple(self.infos), tuple(self.kinds)
        program = Program("mask", simplify(body), infos, kinds, sources=self.sources, name=name)
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


def moved(traced: Traced | None, *, b: Pick, h: Pick, q: RowPick) -> Traced | None:
    """The mask of the picked batches, heads and rows: its indices count from 0 again."""
    parts = _Composer()
    swap = {var("b"): _picked(parts, b, var("b")), var("h"): _picked(parts, h, var("h"))}
    swap[var("q_idx")] = row = _picked_row(parts, q)
    body = parts.body(traced, swap) if traced is not None else const(True, torch.bool)
    if q.limit is not None:
        body = make("and", body, make("lt", row, num(parts.number(q.limit), torch.int64)))
    out = parts.traced(body, traced.program.name if traced is not None else "rows")
    return None if keeps_all(out) else out


def _picked(parts: _Composer, pick: Pick, index: Expr) -> Expr:
    if pick.table is not None:
        return parts.read(pick.table, index)
    return make("add", index, num(parts.number(pick.start), torch.int64)) if pick.start else index


def _picked_row(parts: _Composer, q: RowPick) -> Expr:
    row = var("q_idx")
    if q.pick.table is None:
        return make("add", row, num(parts.number(q.pick.start * q.block), torch.int64)) if q.pick.start else row
    block = parts.read(q.pick.table, make("floordiv", row, q.block))
    return make("add", make("mul", block, q.block), make("mod", row, q.block))


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
    if inner is not None:
        body = make("and", body, parts.body(inner))
    return parts.traced(make("or", parts.read(full, *index), body), "block list")


def keeps_all(traced: Traced | None) -> bool:
    """Whether the program is the constant True."""
    if traced is None:
        return True
    body = traced.program.body
    return body.op == "const" and bool(body.attr)


# ------------------------------------------------------------------------------------------------- Python functions
# Made with functools.partial of functions of this module, so that they pickle wherever their parts do.
def shifted_function(mask_mod: MaskMod, b: Pick, h: Pick, q: RowPick) -> MaskMod:
    """`mask_mod` seen from a slice: position 0 is the slice's first batch, head and row."""
    return functools.partial(_sliced_mask, mask_mod, b, h, q)


def _sliced_mask(mask_mod: MaskMod, b: Pick, h: Pick, q: RowPick, b_idx: Any, h_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = q.of(q_idx)
    kept = mask_mod(b.of(b_idx), h.of(h_idx), row, kv_idx)
    return kept if q.limit is None else kept & (row < q.limit)


def truth(like: Any, value: bool) -> Any:
    """A constant truth value: a tensor among tensors, as torch's masks return it, a Python bool while a mask is traced."""
    return like.new_full((), value, dtype=torch.bool) if isinstance(like, Tensor) else value


def noop_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Keeps every pair."""
    return truth(b, True)


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask that keeps what all of `mask_mods` keep; none given keeps everything.

    Raises:
        MaskFunctionError: an argument is not callable.

    Example:
        >>> mask = and_masks(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < 4)
        >>> bool(mask(*map(torch.tensor, (0, 0, 7, 3))))
        False
    """
    return functools.partial(_and_mask, _callables(mask_mods))


def _and_mask(mask_mods: tuple[MaskMod, ...], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = truth(b, True)
    for mask_mod in mask_mods:
        kept = kept & mask_mod(b, h, q_idx, kv_idx)
    return kept


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """The mask that keeps what at least one of `mask_mods` keeps; none given keeps nothing.

    Raises:
        MaskFunctionError: an argument is not callable.
    """
    return functools.partial(_or_mask, _callables(mask_mods))


def _or_mask(mask_mods: tuple[MaskMod, ...], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = truth(b, False)
    for mask_mod in mask_mods:
        kept = kept | mask_mod(b, h, q_idx, kv_idx)
    return kept


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """The mask that keeps what `mask_mod` drops."""
    return functools.partial(_not_mask, *_callables((mask_mod,)))


def _not_mask(mask_mod: MaskMod, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    kept = mask_mod(b, h, q_idx, kv_idx)
    return ~kept if getattr(kept, "dtype", None) == torch.bool else kept == 0


def _callables(mask_mods: tuple[MaskMod, ...]) -> tuple[MaskMod, ...]:
    if not all(callable(m) for m in mask_mods):
        raise MaskFunctionError("All inputs should be callable mask_mods", given=mask_mods)
    return mask_mods


def with_tensors(value: Any, replace: Callable[[Tensor], Any]) -> Any:
    """A function (or partial, or container) with the tensors in its closure and defaults replaced, functions inside it too.

    Callable objects and modules are returned as they are: what they hold is theirs.
    """
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, functools.partial):
        args = with_tensors(value.args, replace)
        words = {k: with_tensors(v, replace) for k, v in value.keywords.items()}
        func = with_tensors(value.func, replace)
        same = func is value.func and args is value.args and all(words[k] is v for k, v in value.keywords.items())
        if same:
            return value
        return functools.partial(func, *args, **words)
    if type(value) in (tuple, list, Pick, RowPick):
        new = [with_tensors(v, replace) for v in value]
        if all(a is b for a, b in zip(value, new, strict=True)):
            return value
        return type(value)(*new) if isinstance(value, (Pick, RowPick)) else type(value)(new)
    if isinstance(value, types.FunctionType):
        return _function_with(value, replace)
    return value


def _function_with(fn: types.FunctionType, replace: Callable[[Tensor], Any]) -> types.FunctionType:
    try:
        cells = [c.cell_contents for c in fn.__closure__ or ()]
    except ValueError:  # a cell that is not assigned yet
        return fn
    new = [c if c is fn else with_tensors(c, replace) for c in cells]
    old_defaults = fn.__defaults__ or ()
    defaults = tuple(with_tensors(d, replace) for d in old_defaults)
    if all(a is b for a, b in zip((*cells, *old_defaults), (*new, *defaults), strict=True)):
        return fn
    closure = tuple(types.CellType(c) for c in new)
    out = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults or None, closure)
    out.__kwdefaults__, out.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    out.__dict__.update(fn.__dict__)
    return out
