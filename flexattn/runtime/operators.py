"""flex_attention as an operator of torch's: what torch.compile, torch.export, checkpoint policies and other watchers see of a call.

Reads the tensors of a call and one text that says the rest; runs the same road as an eager call. The one idea: a call is data. Its
mods are texts (frontend/program_text.py), its tensors and the numbers that change are arguments, and whatever is the same in every
run of a graph stands in the call's text. So one graph serves all values, and any process can run it.

Two operators: `flexattn::attention` and `flexattn::attention_backward`, which is its gradient.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, UnsupportedError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.evaluate import without_autocast
from flexattn.frontend.mask_functions import noop_mask
from flexattn.frontend.mask_operations import MASKS
from flexattn.frontend.program_text import replay
from flexattn.runtime import transforms
from flexattn.runtime.autograd import as_it_runs, make_tile_maps, run_backward, run_forward
from flexattn.runtime.device import within_operator
from flexattn.runtime.plan import Needs, Plan, Problem, stride_order_of
from flexattn.runtime.validate import validate
from flexattn.runtime.value_masks import exactly, value_mask


class Mod(NamedTuple):
    """A mod by its text, and what it names."""

    kind: str
    text: str
    captures: tuple[Tensor, ...]
    numbers: tuple[int | float, ...]

    @property
    def function(self) -> Callable[..., Any]:
        """What the tracer reads."""
        return replay(self.text, self.captures, self.numbers, self.kind)


class Call(NamedTuple):
    """What a call's text says.

    Attributes:
        scale, q_offset, kv_lengths, enable_gqa: as in flex_attention.
        options: kernel_options.
        lse, max_scores: the extra outputs wanted; lse is made for a gradient too.
        needs_grad: a gradient will be asked for.
        score, mask: mods, or None.
        block_mask: or None.
    """

    scale: float | None
    enable_gqa: bool
    q_offset: int | Tensor | None
    kv_lengths: Tensor | None
    options: dict[str, Any]
    lse: bool
    max_scores: bool
    needs_grad: bool
    score: Mod | None
    mask: Mod | None
    block_mask: BlockMask | None


@torch.library.custom_op("flexattn::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], ints: list[int], floats: list[Tensor], call: str
) -> tuple[Tensor, Tensor, Tensor]:
    """flex_attention of a call as data.

    Args:
        query, key, value: as in flex_attention, in one dtype.
        tensors: what the call's text names t0, t1, ...: captured tensors, of which score_mod's may need gradients, and tables.
        ints: numbers that it names i0, i1, ...
        floats: those it names f0, f1, ...: float64 of no dimension, on the CPU.
        call: the text; see runtime/in_graph.py, which writes it.
    Returns: out, lse and max_scores, empty where they are not asked for.
    """
    with within_operator():
        problem, plan = _problem((query, key, value), tensors, ints, floats, call)
        out, lse, peaks = run_forward(problem, plan)
    return out, _dense(lse if problem.want_lse else None, query), _dense(peaks if problem.want_max else None, query)


@torch.library.custom_op("flexattn::attention_backward", mutates_args=())
def attention_backward(
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    ints: list[int],
    floats: list[Tensor],
    call: str,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients of `attention`.

    Args:
        d_out, d_lse: gradients of its outputs, None for zeros.
        needs: of query, key, value and each of `tensors`, whether its gradient is wanted.
    Returns: the gradients that are, in that order, each laid out as `torch.empty_like` of its tensor.
    """
    with within_operator():
        problem, plan = _problem((query, key, value), tensors, ints, floats, call)
        found = _gradients(problem, plan, (d_out, d_lse, out, lse), tensors, needs)
        return [_like(g, x) for g, x, need in zip(found, (query, key, value, *tensors), needs) if need]


def _gradients(
    problem: Problem, plan: Plan, saved: tuple[Any, Any, Tensor, Tensor], tensors: list[Tensor], needs: list[bool]
) -> list[Tensor | None]:
    """A gradient or None for query, key, value and each of the call's tensors."""
    d_out, d_lse, out, lse = saved
    places = {id(x): n for n, x in enumerate(tensors)}
    slots = [places[id(x)] for x in problem.captures]
    wanted: Needs = (needs[0], needs[1], needs[2], tuple(needs[3 + n] for n in slots))
    upstream = torch.zeros_like(out) if d_out is None else d_out
    make_tile_maps(problem, plan)
    found = run_backward(problem, plan, (out, lse), (upstream, d_lse), wanted)
    grads: list[Tensor | None] = [*found[:3], *([None] * len(tensors))]
    for slot, grad in zip(slots, found[3:]):
        grads[3 + slot] = grad
    return grads


@attention.register_fake
def _attention_shapes(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], ints: list[int], floats: list[Tensor], call: str
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = _wanted(call)
    validate(query, key, value, enable_gqa=wanted.enable_gqa, scale=None)
    shape = (*query.shape[:-1], value.shape[-1])
    out = torch.empty_permuted(shape, stride_order_of(query), dtype=query.dtype, device=query.device)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse, peaks = (
        query.new_empty(query.shape[:-1] if want else (0,), dtype=wide)
        for want in (wanted.lse or wanted.needs_grad, wanted.max_scores)
    )
    return out, lse, peaks


@attention_backward.register_fake
def _gradient_shapes(
    d_out: Any, d_lse: Any, out: Any, lse: Any, query: Any, key: Any, value: Any, tensors: Any, ints: Any, floats: Any,
    call: str, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(x) for x, need in zip((query, key, value, *tensors), needs) if need]


# ---------------------------------------------------------------- gradients
def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, tensors, ints, floats, call = inputs
    out, lse, peaks = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(peaks)
    ctx.save_for_backward(query, key, value, out, lse, *tensors, *floats)
    ctx.ints, ctx.call, ctx.tensors = ints, call, len(tensors)


def _differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, *rest = ctx.saved_tensors
    tensors, floats = rest[: ctx.tensors], rest[ctx.tensors :]
    need_q, need_k, need_v, need_tensors = ctx.needs_input_grad[:4]
    needs = [need_q, need_k, need_v, *(need_tensors or [False] * ctx.tensors)]
    nothing: tuple[Any, ...] = (None if ctx.ints else []), [None] * len(floats), None
    if d_out is None and d_lse is None:
        return None, None, None, [None] * len(tensors), *nothing
    found = iter(
        attention_backward(d_out, d_lse, out, lse, query, key, value, tensors, ctx.ints, floats, ctx.call, needs)
    )
    grads = [next(found) if n else None for n in needs]
    return *grads[:3], grads[3:], *nothing


attention.register_autograd(_differentiate, setup_context=_save)


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise transforms.no_batching()


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise transforms.no_further_derivatives("twice as an operator")


attention.register_vmap(_no_vmap)
attention_backward.register_vmap(_no_vmap)
attention_backward.register_autograd(_no_second_derivative)


# ---------------------------------------------------------------- a call as data
def _problem(
    inputs: tuple[Tensor, Tensor, Tensor], tensors: Any, ints: Any, floats: Any, call: str
) -> tuple[Problem, Plan]:
    from flexattn.runtime.attention import AuxRequest, prepare

    with torch.no_grad(), without_autocast(inputs[0].device.type):  # where it was on, its casts are in the graph
        made = _read(call, tensors, ints, floats)
        problem, plan = prepare(
            inputs,
            None if made.score is None else made.score.function,
            (made.block_mask, None if made.mask is None else made.mask.function),
            scale=made.scale,
            enable_gqa=made.enable_gqa,
            aux=AuxRequest(made.lse or made.needs_grad, made.max_scores),
            options=made.options,
            placed=(made.q_offset, made.kv_lengths),
            needs_grad=made.needs_grad,
        )
        return as_it_runs(problem, plan), plan


def _mask(mod: Mod | None, sizes: tuple[int, int], lengths: tuple[int, int], device: str) -> BlockMask:
    """The mask of a function; one without captured tensors is a value, and is kept for the next call with its tables."""
    place = torch.device(device)
    make = lambda: create_block_mask(noop_mask if mod is None else mod.function, *sizes, *lengths, device=place)
    if mod is not None and mod.captures:
        return make()
    return value_mask((mod and (mod.text, exactly(mod.numbers)), sizes, lengths), place, make)


def _lists(mod: Mod | None, lengths: tuple[int, int], block: tuple[int, int], *lists: Tensor | None) -> BlockMask:
    """A mask of lists of blocks."""
    function = None if mod is None else mod.function
    options: dict[str, Any] = {"BLOCK_SIZE": block, "mask_mod": function, "seq_lengths": lengths}
    return BlockMask.from_kv_blocks(*lists, **options)  # type: ignore[arg-type]


def _made(number: int) -> BlockMask:
    """The mask of this process that has a number."""
    if (mask := MASKS.get(number)) is None:
        raise UnsupportedError(
            "a graph names a BlockMask that is gone",
            given=f"mask {number}",
            hint="keeping the mask while the graph runs",
        )
    return mask  # type: ignore[return-value]


def _dense(x: Tensor | None, query: Tensor) -> Tensor:
    """An output as it is promised: dense, and of no element if it is not wanted."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty(0, dtype=wide) if x is None else x.contiguous()


def _like(grad: Tensor | None, x: Tensor) -> Tensor:
    """A gradient as it is promised: zeros where there is none, laid out as `torch.empty_like(x)`."""
    if grad is None:
        return torch.zeros_like(x)
    promised = torch.empty_like(x)
    same = grad.stride() == promised.stride() and grad.dtype == x.dtype
    return grad if same else promised.copy_(grad)


@lru_cache(maxsize=1024)
def _parsed(call: str) -> ast.Call:
    """A call's text as a tree."""
    return ast.parse(call, mode="eval").body  # type: ignore[return-value]


def _read(call: str, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[Tensor]) -> Call:
    """What a call's text says of these arguments."""
    arguments: dict[str, Sequence[Any]] = {"t": tensors, "i": ints, "f": floats}

    def named(name: str) -> Any:
        found = arguments[name[0]][int(name[1:])]
        return found.item() if name[0] == "f" else found

    made: Call = _value(_parsed(call), named, {"Call": Call, "Mod": Mod, "Mask": _mask, "Lists": _lists, "Made": _made})
    return made


@lru_cache(maxsize=1024)
def _wanted(call: str) -> Call:
    """What a call's text says that its arguments do not change; None for all else."""
    nothing = lambda *args: None
    made: Call = _value(
        _parsed(call), nothing, {"Call": Call, "Mod": nothing, "Mask": nothing, "Lists": nothing, "Made": nothing}
    )
    return made


def _value(node: ast.expr, named: Callable[[str], Any], makers: dict[str, Callable[..., Any]]) -> Any:
    """The value of an expression of a call's text."""
    read = lambda node: _value(node, named, makers)
    match node:
        case ast.Name(id=name) if name[0] in "tif" and name[1:].isdigit():
            return named(name)
        case ast.Name(id=name) if name in ("inf", "nan"):
            return float(name)
        case ast.Tuple(elts=items):
            return tuple(map(read, items))
        case ast.Dict(keys=keys, values=values):
            return {read(k): read(v) for k, v in zip(keys, values) if k is not None}
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in makers:
            return makers[name](*map(read, args), **{k.arg: read(k.value) for k in keywords if k.arg})
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -read(operand)
        case ast.Constant(value=value):
            return value
    raise CallError("a call's text cannot be read", given=ast.unparse(node), hint="the version that wrote it")
