"""flex_attention: attention whose scores and mask are two small Python functions.

Reads query, key, value and the two functions; makes the output, and on request lse and row maxima. The road is four hops:
validate, trace, make_plan, attend. Tracing happens here, outside the autograd node and in the caller's grad mode, so a
tensor computed inside a mod keeps its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, MaskTypeError, OptionError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.eager import in_graphs_as
from flexattn.frontend.mask_functions import and_masks
from flexattn.frontend.program import Traced
from flexattn.frontend.trace import mod_kind, trace
from flexattn.runtime import settings, stats
from flexattn.runtime.autograd import attend
from flexattn.runtime.in_graph import in_graph
from flexattn.runtime.options import parse_options
from flexattn.runtime.pages import PagedKV
from flexattn.runtime.plan import Plan, Problem, make_plan
from flexattn.runtime.positions import Positions, positions
from flexattn.runtime.validate import (
    check_mask,
    check_placed_mask,
    paged_positions,
    place_captures,
    validate,
    validate_paged,
)
from flexattn.runtime.value_masks import exactly, value_mask


class AuxRequest(NamedTuple):
    """Which extra outputs to compute, as in torch.nn.attention.flex_attention.

    Attributes:
        lse: natural log of the softmax's denominator, [batch, q_heads, q_len].
        max_scores: the largest modified score of each row, [batch, q_heads, q_len].

    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> out, aux = flexattn.flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
        >>> aux.lse.shape, aux.max_scores
        (torch.Size([1, 1, 4]), None)
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The extra outputs that were asked for; None for the others.

    Attributes:
        lse: [batch, q_heads, q_len], natural log, float32 (float64 for float64 inputs), differentiable; -inf for a row
            without a key.
        max_scores: of the same shape and type, not differentiable; -inf for a row without a key.

    Example:
        >>> AuxOutput()
        AuxOutput(lse=None, max_scores=None)
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]


def _as_operator(*args: Any, **kwargs: Any) -> Result:
    """flex_attention by its operator, where its operators are watched."""
    return_lse, return_aux = (kwargs.get(n) for n in ("return_lse", "return_aux"))
    if len(args) > 7:
        return_lse = args[7]
    return asked_for(in_graph(*args, **kwargs), return_lse=bool(return_lse), return_aux=return_aux)


@in_graphs_as(_as_operator, also_watched=True)
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> Result:
    """softmax(score_mod(scale * query @ key^T) where the mask keeps) @ value, as fused kernels that skip empty tiles.

    Args:
        query: [batch, q_heads, q_len, qk_dim], float16, bfloat16, float32 or float64, any strides; kernels copy an input
            whose last dimension is not contiguous, at every call, and say so once.
        key: [batch or 1, kv_heads, kv_len, qk_dim], same dtype and device.
        value: [batch or 1, kv_heads, kv_len, v_dim], same dtype and device.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, on float32 scores; h is the query head. None: identity.
        block_mask: a BlockMask of create_block_mask, or torch's own; None keeps every pair.
        scale: factor of the scores before score_mod, any float; None for 1 / sqrt(qk_dim).
        enable_gqa: q_heads may be a multiple of kv_heads; query head h reads key head h // (q_heads // kv_heads).
        return_lse: deprecated, use return_aux=AuxRequest(lse=True).
        kernel_options: torch's keys, and BACKEND='TORCH' (torch ops), 'strict_nan', 'autotune' and 'deterministic'; see
            runtime/options.py.
        return_aux: which extra outputs to return.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, True keeps; with block_mask as well, both must keep.
        q_offset: position of the first query, which mods see as q_idx: an int, or an int tensor [batch] or [1], also on the device;
            None for 0. A block_mask is then made for positions from 0 on, and this call reads its rows from q_offset.
        kv_lengths: int tensor [batch] or [1]: keys behind it are dropped, whatever they hold. Calls that the decode kernel does
            not serve copy key and value then.
    Returns:
        out [batch, q_heads, q_len, v_dim] in query's dtype and stride order; (out, lse) with return_lse; (out, AuxOutput)
        with return_aux. A row without a key has out 0, lse -inf and gives exactly 0 to every gradient.
        Under torch.autocast, float16, bfloat16 and float32 inputs in any mixture run in autocast's dtype, and gradients come
        back in the dtypes that were given; float64 runs as it is.
    Raises:
        ShapeError, DTypeError, DeviceError, OptionError: an argument does not fit, before anything is launched.
        TraceError: a mod does something that has no expression, with its file and line.
        CaptureIndexError, StaleMaskError, UnsupportedError: see flexattn.errors.
    Example:
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> x = torch.ones(1, 1, 4, 8)
        >>> flexattn.flex_attention(x, x, x, mask_mod=causal).shape
        torch.Size([1, 1, 4, 8])

    Source: Dong et al., Flex Attention (2024), arXiv:2412.05496; Dao, FlashAttention-2 (2023), arXiv:2307.08691.
    """
    aux = requested(return_lse, return_aux)
    problem, plan = prepare(
        (query, key, value),
        score_mod,
        (block_mask, mask_mod),
        scale=scale,
        enable_gqa=enable_gqa,
        aux=aux,
        options=kernel_options,
        placed=(q_offset, kv_lengths),
    )
    return deliver(problem, plan, return_lse=return_lse, return_aux=return_aux)


def deliver(problem: Problem, plan: Plan, *, return_lse: bool, return_aux: Any) -> Result:
    """Runs a call that is prepared, and returns what was asked for."""
    return asked_for(attend(problem, plan), return_lse=return_lse, return_aux=return_aux)


def asked_for(results: tuple[Tensor, Tensor, Tensor | None], *, return_lse: bool, return_aux: Any) -> Result:
    """Of out, lse and max_scores what was asked for, in the form in which it was asked for."""
    out, lse, max_scores = results
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, max_scores if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def prepare(
    tensors: tuple[Any, Any, Any],
    score_mod: Callable[..., Any] | None,
    masks: tuple[Any, Callable[..., Any] | None],
    *,
    scale: Any = None,
    enable_gqa: bool = False,
    aux: AuxRequest = AuxRequest(),
    options: Mapping[str, Any] | None = None,
    placed: tuple[Any, Any] = (None, None),
    needs_grad: bool | None = None,
) -> tuple[Problem, Plan]:
    """The first three hops: validate, trace, make_plan; what explain() shows and flex_attention runs.

    Args:
        tensors: query, key, value; or query, a PagedKV and None.
        score_mod: or None.
        masks: (block_mask or None, mask_mod or None).
        scale, enable_gqa, options: as in flex_attention.
        aux: the extra outputs wanted.
        placed: q_offset and kv_lengths.
        needs_grad: whether a gradient will be asked for; None where the tensors say so.
    Returns: the call's Problem and its cached Plan.
    """
    pages = tensors[1] if isinstance(tensors[1], PagedKV) else None
    if pages is None:
        query, key, value, factor = validate(*tensors, enable_gqa=enable_gqa, scale=scale)
        where = positions(*placed, query)
    else:
        query, factor = validate_paged(tensors[0], pages, scale=scale)
        key, value, where = pages.k_pages, pages.v_pages, paged_positions(placed[0], pages, query)
    parsed = parse_options(options)
    kv_len = key.shape[2] if pages is None else pages.max_length
    score = _trace_score(score_mod, query, where)
    mask = _resolve_mask(masks, query, kv_len) if where is None else _placed_mask(masks, query, kv_len, where)
    captures = score.binding.captures if score is not None else ()
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *captures))
    problem = Problem(
        q=query,
        k=key,
        v=value,
        scale=factor,
        score=score,
        mask=_on_device(None if mask is None else mask.traced, query.device, "mask_mod"),
        block_mask=mask,
        want_lse=aux.lse or needs_grad,
        want_max=aux.max_scores,
        options=parsed,
        needs_grad=needs_grad,
        pages=pages,
        lengths=None if where is None else where.lengths,
    )
    return problem, make_plan(problem)


def requested(return_lse: bool, return_aux: Any) -> AuxRequest:
    """The extra outputs that a call asks for, in either way."""
    if return_aux is None:
        if return_lse:
            settings.warn_once(
                "return_lse",
                "return_lse is deprecated. Please use return_aux=AuxRequest(lse=True) instead.",
                FutureWarning,
            )
        return AuxRequest(lse=bool(return_lse))
    if return_lse:
        raise OptionError(
            "Cannot specify both return_lse and return_aux",
            given=f"return_lse={return_lse} and return_aux={return_aux}",
            hint="return_aux=AuxRequest(lse=True) alone; return_lse is deprecated",
        )
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        raise CallError(
            "return_aux must be an AuxRequest", given=type(return_aux).__name__, hint="AuxRequest(lse=True)"
        )
    return AuxRequest(bool(return_aux.lse), bool(return_aux.max_scores))


def _trace_score(score_mod: Callable[..., Any] | None, query: Tensor, where: Positions | None) -> Traced | None:
    """The traced score_mod, None where it is the identity."""
    if score_mod is None:
        return None
    _check_kind(score_mod, "score", "score_mod(score, b, h, q_idx, kv_idx)")
    score_mod = score_mod if where is None else where.score(score_mod)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    traced = trace(score_mod, "score", score_dtype=wide)
    stats.record_trace("score")
    if traced.program.body.op == "var" and traced.program.body.attr == "score":
        return None
    return _on_device(traced, query.device, "score_mod")


def _check_kind(mod: Any, kind: str, form: str) -> None:
    if not callable(mod):
        raise CallError(f"{kind}_mod must be callable", given=type(mod).__name__, hint=form)
    if (found := mod_kind(mod, kind)) != kind:
        raise MaskTypeError(
            f"{kind}_mod must have the form {form}", given=f"a {found}_mod", hint=f"passing it as {found}_mod="
        )


def _on_device(traced: Traced | None, device: torch.device, name: str) -> Traced | None:
    """The same program, with 0-d captures of the CPU moved to the device of query."""
    if traced is None:
        return None
    placed = place_captures(traced, device, name)
    if all(a is b for a, b in zip(placed, traced.binding.captures)):
        return traced
    return traced._replace(binding=traced.binding._replace(captures=placed))


def _resolve_mask(masks: tuple[Any, Callable[..., Any] | None], query: Tensor, kv_len: int) -> BlockMask | None:
    """One BlockMask that says what block_mask and mask_mod say together; None where everything is kept."""
    block_mask, mask_mod = masks
    if block_mask is not None:
        block_mask = _our_block_mask(block_mask)
    if block_mask is not None:
        block_mask = block_mask.following(query.device)
        check_mask(block_mask, query, kv_len)
    if mask_mod is None:
        return block_mask and block_mask.expand(query.shape[0], query.shape[1])
    _check_kind(mask_mod, "mask", "mask_mod(b, h, q_idx, kv_idx)")
    if block_mask is not None:
        return block_mask.combine(mask_mod).expand(query.shape[0], query.shape[1])
    return _mask_from_mod(mask_mod, query, kv_len)


def _placed_mask(
    masks: tuple[Any, Callable[..., Any] | None], query: Tensor, kv_len: int, where: Positions
) -> BlockMask | None:
    """As `_resolve_mask`, with queries and keys that stand where `where` says: a block_mask counts as its function."""
    block_mask, mask_mod = masks
    block_mask = None if block_mask is None else _our_block_mask(block_mask)
    if mask_mod is not None:
        _check_kind(mask_mod, "mask", "mask_mod(b, h, q_idx, kv_idx)")
    if block_mask is not None:
        check_placed_mask(block_mask, query, kv_len, where)
        function = block_mask.mask_mod
        mask_mod = function if mask_mod is None else and_masks(function, mask_mod)
    placed = where.mask(mask_mod)
    return None if placed is None else _mask_from_mod(placed, query, kv_len)


def _our_block_mask(block_mask: Any) -> BlockMask | None:
    """A BlockMask, ours or torch's, as ours; None for the one by which torch says that there is none."""
    kind = type(block_mask)
    if kind.__name__ == "BlockMask" and kind.__module__.startswith("torch."):
        block_mask = BlockMask.from_torch(block_mask)
    if isinstance(block_mask, BlockMask):
        return None if block_mask.says_no_mask else block_mask
    hint = "mask_mod= for a function" if callable(block_mask) else "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
    raise CallError("block_mask must be a BlockMask", given=kind.__name__, hint=hint)


def _mask_from_mod(mask_mod: Callable[..., Any], query: Tensor, kv_len: int) -> BlockMask | None:
    """The BlockMask of a mask_mod in the call; one without captured tensors is a value, and is kept for the next call."""
    traced = trace(mask_mod, "mask")
    stats.record_trace("mask")
    place_captures(traced, query.device, "mask_mod")
    if query.numel() == 0 or kv_len == 0:
        return None
    sizes = (query.shape[0], query.shape[1], query.shape[2], kv_len)
    make = lambda: create_block_mask(mask_mod, *sizes, query.device)
    if traced.binding.captures:
        return make()
    return value_mask((traced.program, exactly(traced.binding.numbers), sizes), query.device, make)
