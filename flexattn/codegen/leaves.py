"""The generated functions of one kernel: reads its programs, makes the text of a small importable module.

The idea: the text is canonical. It names captures and numbers by position, holds no user name, file or value, and so is
byte for byte the same for the same structure; the file it is written to is named by its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flexattn.codegen.decode_tiles import hull_of
from flexattn.codegen.printer import Arguments, CaptureSlots, Printer, Value, materialise
from flexattn.codegen.regrouped import ends_by_key, ends_of, in_base_2, one_index_a_side, slope_of
from flexattn.codegen.spec import BY_COLUMN, HOPPER_GRADIENTS, KernelSpec
from flexattn.codegen.tile_config import gathers_of, padded
from flexattn.frontend.box_bounds import box_bounds
from flexattn.frontend.expr import DEP_KV, DEP_Q, DEP_SCORE, Expr, make, topological
from flexattn.frontend.gradient import is_bounded, passes_gradient, score_gradient, score_slope
from flexattn.frontend.program import Program
from flexattn.frontend.zones import FAR, Zones, zones

HEADER = """import triton
import triton.language as tl

from flexattn.codegen.skeletons import leaf_ops
"""
# Functions that Triton compiles are inlined in kernels of Gluon as they are, where a tensor's layout follows from its operands.
_OTHER_WORDS = {"gluon": {"tl.full([], ": "leaf_ops.scalar("}}  # a number has none
_INDICES = "b, h, q_idx, kv_idx"
_TILE = DEP_Q | DEP_KV | DEP_SCORE


def arguments_of(spec: KernelSpec) -> tuple[Arguments, Arguments]:
    """Where the score and the mask program find their captures and numbers in the flat tuple `caps`."""
    slots, at = [], 0
    for layout in spec.captures:
        slots.append(CaptureSlots(at, *layout))
        at += 1 + 2 * layout.rank
    scores = len(spec.score.captures) if spec.score else 0
    numbers = tuple((at + i, kind, spec.wide_numbers[i]) for i, kind in enumerate(spec.number_kinds))
    split = len(spec.score.numbers) if spec.score else 0
    return Arguments(tuple(slots[:scores]), numbers[:split]), Arguments(tuple(slots[scores:]), numbers[split:])


def leaf_functions(spec: KernelSpec) -> dict[str, str]:
    """Text of each function the kernel needs, by the skeleton's parameter name (SCORE_MOD, MASK_MOD, ...)."""
    words = _OTHER_WORDS.get(spec.dialect, {})
    return {parameter: _spelled(text, words) for parameter, text in _functions(spec).items()}


def _spelled(text: str, words: dict[str, str]) -> str:
    for word, other in words.items():
        text = text.replace(word, other)
    return text


def _functions(spec: KernelSpec) -> dict[str, str]:
    if spec.kernel in ("delta", "hopper_dq", "merge", "ranges", "order"):
        return {}
    score_arguments, mask_arguments = arguments_of(spec)
    texts: dict[str, str] = {}
    if spec.mask is not None and spec.kernel == "fill":
        found_zones = zones(spec.mask)
        assert found_zones is not None
        return {"ZONES": _zones(spec, found_zones, mask_arguments)}
    of_score, of_mask = dict[Expr, Value](), dict[Expr, Value]()  # what is read beforehand
    if spec.is_gluon:
        of_score, of_mask = _read_before(spec, (score_arguments, mask_arguments), texts)
    elif spec.kernel in ("forward", "decode"):
        of_score, of_mask = _read_tiles(spec, (score_arguments, mask_arguments), texts)
    if spec.score is not None:
        texts["SCORE_MOD"] = _score(spec, spec.score, score_arguments, of_score)
    if spec.mask is not None and spec.kernel == "hopper_forward":
        texts |= _ends_and_rest(spec, spec.mask, mask_arguments, of_mask)
    elif spec.mask is not None:
        texts["MASK_MOD"] = _mask(spec, spec.mask, mask_arguments, of_mask)
    if spec.kernel == "decode" and (hull := hull_of(spec.mask, spec.wide_numbers)) is not None:
        texts["ZONES"] = _zones(spec, hull, mask_arguments)
    if spec.mask is not None and spec.kernel == "block_map":
        found = box_bounds(spec.mask)
        texts["MASK_BOUNDS"] = _bounds(spec, "mask_bounds", (found.must, found.may), mask_arguments)
        if found.sharper is not None:
            texts["SHARPER_BOUNDS"] = _bounds(spec, "sharper_bounds", found.sharper, mask_arguments)
    if spec.score is not None and spec.kernel in ("dq", "dkdv") and not passes_gradient(spec.score):
        texts["SCORE_GRAD"] = _score_grad(spec, spec.score, score_arguments)
    if spec.score is not None and spec.kernel == "dq" and spec.capture_grads:
        texts["CAPTURE_GRAD"] = _capture_grad(spec, spec.score, score_arguments)
    return texts


def leaf_text(functions: dict[str, str]) -> str:
    """One module of leaf functions; empty when there are none."""
    return "\n\n".join([HEADER, *functions.values()]) if functions else ""


def leaf_name(parameter: str) -> str:
    """Name of the function behind a skeleton parameter."""
    return parameter.lower()


def _function(name: str, parameters: str, lines: Sequence[str]) -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"@triton.jit\ndef {name}({parameters}):\n{body}\n"


# How the score's and the mask's function name what was read before.
_Known = tuple[dict[Expr, Value], dict[Expr, Value]]


def _read_before(spec: KernelSpec, arguments: tuple[Arguments, Arguments], texts: dict[str, str]) -> _Known:
    """Adds functions that read what need not be read for each pair: what is the same for all that a program walks (keys, or queries in
    the backward), once; and runs of rows along those, once a tile, as far as registers are left."""
    walked, other, own = (DEP_Q, "q_idx", "kv_idx") if spec.kernel in BY_COLUMN else (DEP_KV, "kv_idx", "q_idx")
    lines, known = _reads(spec, arguments, "known", lambda deps: not deps & (walked | DEP_SCORE))
    if any(known):
        texts["KNOWN"] = _function("known", f"b, h, {own}, caps", lines)
    lines, seen = _reads(spec, arguments, "seen", lambda deps: deps & _TILE == walked, known, run=other)
    if any(seen):
        texts["SEEN"] = _function("seen", "b, h, first, columns, caps, known", lines)
    return known[0] | seen[0], known[1] | seen[1]


def _read_tiles(spec: KernelSpec, arguments: tuple[Arguments, Arguments], texts: dict[str, str]) -> _Known:
    """Adds a function that reads what each pair has its own of, for a kernel to call before it multiplies; the tiles follow `caps`."""
    is_wanted = lambda deps: deps & _TILE == DEP_Q | DEP_KV
    captured = sum(1 + 2 * layout.rank for layout in spec.captures) + len(spec.number_kinds)
    lines, known = _reads(spec, arguments, "caps", is_wanted, first=captured)
    if any(known):
        texts["READS"] = _function("reads", f"{_INDICES}, caps", lines)
    return known


def _reads(
    spec: KernelSpec, arguments: tuple[Arguments, Arguments], name: str, is_wanted: Callable[[int], bool],
    known: _Known = ({}, {}), *, run: str | None = None, first: int = 0,
) -> tuple[list[str], _Known]:  # fmt: skip
    """Lines of a function that does the loads with some dependencies, and how others name what it found, in the tuple `name` from
    place `first` on: by program, as one expression reads another tensor in each."""
    lines: list[str] = []
    results: list[str] = []
    found: list[dict[Expr, Value]] = []
    left = _registers_left(spec)
    for program, slots, before in zip((spec.score, spec.mask), arguments, known):
        nodes = topological([program.body]) if program is not None else []
        reads = [n for n in nodes if n.op == "load" and is_wanted(n.deps)]
        printer = Printer(spec, slots, before, run=run)
        if run is not None:
            reads, left = _that_fit([n for n in reads if printer.is_run(n)], spec, left)
        values = printer.print(reads)
        at = len(results)
        results += [f"k{at + n}" for n in range(len(reads))]
        lines += printer.lines + [f"{result} = {value.text}" for result, value in zip(results[at:], values)]
        found.append(
            {r: v._replace(text=f"{name}[{first + at + n}]", depth=0) for n, (r, v) in enumerate(zip(reads, values))}
        )
    return [*lines, f"return ({', '.join(results)},)"], (found[0], found[1])


def _registers_left(spec: KernelSpec) -> int:
    """Of a thread, while scores are being multiplied, by what the assembler then spilled: 16 in the backward; in the forward all but
    scores, probabilities, the output's sums and 40 others, and no more than 32."""
    if spec.kernel in HOPPER_GRADIENTS:
        return 16
    given = 240 if spec.config.BLOCK_M == 128 else 160
    return min(given - spec.config.BLOCK_N // 2 - spec.config.BLOCK_N // 4 - padded(spec.v_dim) // 2 - 40, 32)


def _that_fit(reads: list[Expr], spec: KernelSpec, left: int) -> tuple[list[Expr], int]:
    """Those whose values fit in the registers that are left, and what is left then: a thread holds a quarter of a tile's columns."""
    columns = spec.config.BLOCK_M if spec.kernel in BY_COLUMN else spec.config.BLOCK_N
    fitting = []
    for read in reads:
        taken = max(getattr(torch, read.attr[2]).itemsize, 4) * columns // 16
        if taken <= left:
            fitting.append(read)
            left -= taken
    return fitting, left


def _score(spec: KernelSpec, program: Program, arguments: Arguments, known: dict[Expr, Value]) -> str:
    printer = Printer(spec, arguments, known)
    body = in_base_2(_regrouped(spec, program.body)) if spec.is_gluon else program.body
    roots = [body, slope_of(_regrouped(spec, score_slope(program)))] if has_slope(spec) else [body]
    values = printer.print(roots)
    result = ", ".join(_full(_as_float(value), root, "score") for value, root in zip(values, roots))
    given = "score, scale" if spec.is_gluon else "score"
    lines = [*_again(spec, gathers_of(program) > 0), *printer.lines, f"return {result}"]
    return _function("score_mod", f"{given}, {_INDICES}, {_captured(spec)}", lines)


def has_slope(spec: KernelSpec) -> bool:
    """Whether the score function of a kernel gives its derivative, as a factor, beside the score: what both need is computed once."""
    return spec.kernel in HOPPER_GRADIENTS and spec.score is not None and not passes_gradient(spec.score)


def slope_kind(spec: KernelSpec) -> int:
    """Of that derivative, as skeletons/hopper_backward.py has it: 0 it is 1, 1 it may be anything, 2 it times 0 is 0."""
    if spec.score is None or not has_slope(spec):
        return 0
    return 2 if is_bounded(score_slope(spec.score)) else 1


def _regrouped(spec: KernelSpec, body: Expr) -> Expr:
    """The body as kernels whose leaves cost as much as their products want it."""
    return one_index_a_side(body) if spec.is_gluon and not any(spec.wide_numbers) else body


def _captured(spec: KernelSpec) -> str:
    return "caps, known, seen" if spec.is_gluon else "caps"


def _mask(spec: KernelSpec, program: Program, arguments: Arguments, known: dict[Expr, Value]) -> str:
    printer = Printer(spec, arguments, known)
    if spec.is_gluon:
        return _mask_by_ends(_truth_of(program.body), spec, printer)
    (value,) = printer.print([program.body])
    text = value.text if program.body.dtype == torch.bool else f"({materialise(value, 'tl.int32').text}) != 0"
    return _function("mask_mod", f"{_INDICES}, caps", [*printer.lines, f"return {text}"])


def _ends_and_rest(
    spec: KernelSpec, program: Program, arguments: Arguments, known: dict[Expr, Value]
) -> dict[str, str]:
    """Which keys of each query a mask keeps at most, as two ends that no key moves, and what else it asks of them, if anything."""
    ends = ends_of(_regrouped(spec, _truth_of(program.body)))
    printer = Printer(spec, arguments, known)
    upper, *lower = (value.text for value in printer.print([e for e in (ends.upper, ends.lower) if e is not None]))
    both = f"leaf_ops.row_end({lower[0] if lower else 0}, q_idx), leaf_ops.row_end({upper}, q_idx)"
    texts = {"ENDS": _function("ends", "b, h, q_idx, kv_len, caps, known", [*printer.lines, f"return {both}"])}
    if ends.rest is not None:
        printer = Printer(spec, arguments, known)
        (value,) = printer.print([ends.rest])
        lines = [*printer.lines, f"return {_to_truth(value)}"]
        texts["MASK_MOD"] = _function("mask_mod", f"{_INDICES}, {_captured(spec)}", lines)
    return texts


def _truth_of(body: Expr) -> Expr:
    return body if body.dtype == torch.bool else make("ne", body, 0)


def _mask_by_ends(body: Expr, spec: KernelSpec, printer: Printer) -> str:
    """Of the keys before kv_len. A band is asked of the index that a kernel walks: the other's ends are found once a row of a tile."""
    may_turn = spec.kernel in BY_COLUMN and spec.score is None and not any(spec.wide_numbers)
    by_key = ends_by_key(body) if may_turn else None
    index, ends = ("q_idx", by_key) if by_key is not None else ("kv_idx", ends_of(_regrouped(spec, body)))
    upper, *others = printer.print([e for e in (ends.upper, ends.lower, ends.rest) if e is not None])
    text = f"{index} < {upper.text}"
    if ends.lower is not None:
        lower = others.pop(0)
        is_narrow = upper.type == lower.type == "tl.int32"
        text = (
            f"leaf_ops.within({index}, {lower.text}, {upper.text})"
            if is_narrow
            else f"({lower.text} <= {index}) & ({text})"
        )
    if others:
        text = f"({text}) & ({_to_truth(others[0])})"
    lines = [*_again(spec, by_key is not None), *printer.lines, f"return {text}"]
    return _function("mask_mod", f"{_INDICES}, kv_len, {_captured(spec)}", lines)


def _again(spec: KernelSpec, is_wanted: bool) -> list[str]:
    """Where a kernel walks queries: what a leaf makes of a key is made in each step, as a band's ends and what addresses are made of
    would else take registers that the steps need."""
    return ["kv_idx = leaf_ops.again(kv_idx)"] if is_wanted and spec.is_gluon and spec.kernel in BY_COLUMN else []


def _bounds(spec: KernelSpec, name: str, ends: tuple[Expr, Expr], arguments: Arguments) -> str:
    printer = Printer(spec, arguments)
    must, may = (_to_truth(value) for value in printer.print(ends))
    parameters = "b, h, q_lo, q_hi, kv_lo, kv_hi, caps, trees"
    return _function(name, parameters, [*printer.lines, f"return {must}, {may}"])


def _zones(spec: KernelSpec, found: Zones, arguments: Arguments) -> str:
    printer = Printer(spec, arguments)
    ends = [e for zone in (*found.kept, *found.dropped) for e in zone]
    values = [materialise(value, "tl.int64").text for value in printer.print(ends)]
    lines = [*printer.lines, *(f"e{n} = leaf_ops.clamped({text}, {FAR})" for n, text in enumerate(values))]
    return _function("zones", "b, h, caps", [*lines, f"return {', '.join(f'e{n}' for n in range(len(values)))}"])


def _to_truth(value: Value) -> str:
    return value.text if value.type == "tl.int1" else f"({value.text}) != 0"


def _score_grad(spec: KernelSpec, program: Program, arguments: Arguments) -> str:
    root = score_gradient(program).d_score
    printer = Printer(spec, arguments)
    (value,) = printer.print([root])
    result = _full(_as_float(value), root, "grad")
    return _function("score_grad", f"grad, score, {_INDICES}, caps", [*printer.lines, f"return {result}"])


def _capture_grad(spec: KernelSpec, program: Program, arguments: Arguments) -> str:
    """Adds each captured tensor's gradient to its sum: over the tile axes its index does not depend on, then atomically."""
    wanted = [g for g in score_gradient(program).d_captures if g[0] in spec.capture_grads]
    printer = Printer(spec, arguments)
    lines = printer.lines
    for number, (slot, load, grad) in enumerate(wanted):
        *_, value = printer.print([*load.args, grad])
        index = printer.index(load)
        name = f"g{number}"
        lines.append(f"{name} = tl.where(keep, {_full(_as_float(value), grad, 'grad')}, 0.0)")
        lines += [f"{name} = leaf_ops.total({name}, {axis})" for axis in _free_axes(load)]
        position = spec.capture_grads.index(slot)
        lines.append(f"{name} = {name}.to(sums[{position}].dtype.element_ty)")
        lines.append(_atomic(position, name, index.parts, index.inside, arguments.captures[slot]))
    if not wanted:
        lines.append("pass")
    return _function("capture_grad", f"grad, score, keep, {_INDICES}, caps, sums", lines)


def _free_axes(load: Expr) -> list[int]:
    """Tile axes (0: queries, 1: keys) on which the element a load reads does not depend."""
    deps = 0
    for arg in load.args:
        deps |= arg.deps
    if deps & DEP_SCORE:
        return []
    return [axis for axis, bit in enumerate((DEP_Q, DEP_KV)) if not deps & bit]


def _atomic(position: int, name: str, parts: Sequence[Value], inside: str | None, slots: CaptureSlots) -> str:
    """The sum's buffer is contiguous, so its offset follows from the sizes."""
    offset = "0"
    for axis, part in enumerate(parts):
        offset = part.text if axis == 0 else f"({offset}) * {slots.size(axis)} + {part.text}"
    if not parts:
        return f'tl.atomic_add(sums[{position}] + tl.zeros(({name}).shape, tl.int32), {name}, sem="relaxed")'
    if all(part.type == "literal" for part in parts):
        offset = f"({offset}) + tl.full([], 0, tl.int32)"
    where, mask = f"leaf_ops.spread({offset}, {name})", f"leaf_ops.spread({inside}, {name}) != 0"
    return f'tl.atomic_add(sums[{position}] + {where}, {name}, mask={mask}, sem="relaxed")'


def _as_float(value: Value) -> str:
    if value.type in ("tl.float32", "literal"):
        return materialise(value, "tl.float32").text
    return f"({value.text}).to(tl.float32)"


def _full(text: str, root: Expr, like: str) -> str:
    """A tile-shaped result even where the expression does not depend on both tile axes."""
    has_tile = root.deps & DEP_SCORE or (root.deps & DEP_Q and root.deps & DEP_KV)
    return text if has_tile else f"leaf_ops.spread({text}, {like})"
