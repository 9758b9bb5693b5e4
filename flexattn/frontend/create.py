"""create_block_mask and create_mask: the mask of a function, as a BlockMask or as a dense tensor.

Reads a mask function and sizes. The one idea: creating a mask traces its function once and looks at no pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexattn.errors import DeviceError, MaskTypeError, OptionError
from flexattn.frontend.arguments import device_of, mask_function
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.eager import eager_only, in_graphs_as
from flexattn.frontend.graph_mask import GraphMask
from flexattn.frontend.mask_functions import MaskMod
from flexattn.frontend.predicate_mask import PredicateMask, dense, trace_mask
from flexattn.frontend.program import Traced
from flexattn.frontend.record import record
from flexattn.frontend.source import function_name
from flexattn.frontend.torch_lists import DEFAULT_BLOCK_SIZE, ListStyle, block_pair, whole
from flexattn.frontend.trace import mod_kind, trace


def _in_graph(
    mask_mod: MaskMod, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None, BLOCK_SIZE: Any = DEFAULT_BLOCK_SIZE,
    _compile: bool = False, separate_full_blocks: bool = True, compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """create_block_mask where Dynamo traces it."""
    options = {"device": device, "BLOCK_SIZE": BLOCK_SIZE, "separate_full_blocks": separate_full_blocks}
    options |= {"compute_dq_write_order": compute_dq_write_order, "dq_kv_order": dq_kv_order}
    return GraphMask(record(mask_mod, "mask"), (B, H, Q_LEN, KV_LEN), options, create_block_mask)


@in_graphs_as(_in_graph)
def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] | None = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The block mask of a mask function. Takes microseconds: blocks are decided when a kernel or a reader asks for them.

    The mask is a snapshot of the captured tensors. Once one was written to, every use of the mask raises StaleMaskError. Writes
    that torch does not count cannot be noticed so: `tensor.data.copy_(...)`, `tensor.numpy()[:] = ...` and other libraries that
    share the memory leave a mask that is out of date in silence. With the environment variable FLEXATTN_DEBUG=1 contents are
    compared at every use, which costs a pass over the tensors. `mask_mod=` in the call always sees the present contents.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, True where a pair is kept; pointwise torch operations on scalars.
        B, H: batch size and query heads, or None where the mask is the same for all.
        Q_LEN, KV_LEN: lengths in tokens; integers of any kind, numpy's and tensors of one element too.
        device: by default that of the captured tensors; where those do not say, the current accelerator, else the CPU, and a
            flex_attention call on another device takes the mask there.
        BLOCK_SIZE: tokens of a block of the list attributes, one number or (q, kv).
        _compile: accepted for torch's sake; there is nothing to compile.
        separate_full_blocks: False lists full blocks among the partial ones.
        compute_dq_write_order: Also offer dq_write_order and dq_write_order_full.
        dq_kv_order: True ranks kv blocks from the last to the first in those.

    Returns:
        A predicate mask.

    Raises:
        MaskTypeError: mask_mod is no mask function, or returns no truth value.
        TraceError: mask_mod does something that cannot be traced.
        DeviceError: a captured tensor is on another device, or there is no such device here.

    Example:
        >>> create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 4, None, 300, 300, device="cpu").shape
        (4, 1, 300, 300)
    """
    mask_function(mask_mod)
    if mod_kind(mask_mod, "mask") != "mask":
        raise MaskTypeError(
            "create_block_mask requires a mask_mod function (b, h, q_idx, kv_idx)",
            given=function_name(mask_mod),
            hint="lambda b, h, q_idx, kv_idx: q_idx >= kv_idx",
        )
    if not isinstance(dq_kv_order, bool):
        raise OptionError(
            "dq_kv_order must be a bool when using create_block_mask",
            given=type(dq_kv_order).__name__,
            hint="True or False; BlockMask.from_kv_blocks takes a tensor too",
        )
    traced = trace_mask(mask_mod)
    mask = PredicateMask(
        traced,
        mask_mod,
        sizes=(1 if B is None else whole(B), 1 if H is None else whole(H)),
        lengths=(whole(Q_LEN), whole(KV_LEN)),
        block=block_pair(BLOCK_SIZE),
        device=_device_for(traced, device),
        follows=device is None and _chosen_by(traced) is None,
    )
    style = ListStyle(separate_full=separate_full_blocks, orders_writes=compute_dq_write_order)
    return BlockMask._of(mask, style, dq_kv_order if compute_dq_write_order else None)


@eager_only
def create_mask(
    mod_fn: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: torch.device | str | None = None
) -> Tensor:
    """Every pair of a mask function, as a dense tensor; of a score function, the pairs that it does not send to -inf.

    Args:
        mod_fn: `mask_mod(b, h, q_idx, kv_idx)` or `score_mod(score, b, h, q_idx, kv_idx)`.
        B, H: batch size and query heads, None for 1.
        Q_LEN, KV_LEN: lengths in tokens.
        device: as in `create_block_mask`.

    Returns:
        bool [B, H, Q_LEN, KV_LEN].

    Example:
        >>> create_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3, "cpu").int().tolist()
        [[[[1, 0, 0], [1, 1, 0]]]]
    """
    is_score = mod_kind(mask_function(mod_fn)) == "score"
    traced = trace(mod_fn, "score") if is_score else trace_mask(mod_fn)
    sizes = (1 if B is None else whole(B), 1 if H is None else whole(H))
    return dense(traced, sizes, (whole(Q_LEN), whole(KV_LEN)), _device_for(traced, device), score=is_score)


def _device_for(traced: Traced | None, device: torch.device | str | None) -> torch.device:
    """The given device, else that of the captured tensors, else the accelerator, else the CPU."""
    captures = traced.binding.captures if traced is not None else ()
    tables = [t for t in captures if t.dim()]
    if device is None:
        device = _chosen_by(traced)
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = device_of(device)
    for t in tables:
        if t.device != device:
            raise DeviceError(
                "a tensor captured by mask_mod must be on the mask's device",
                given=f"{t.device} and {device}",
                hint=f"tensor.to({str(device)!r})",
            )
    return device


def _chosen_by(traced: Traced | None) -> torch.device | None:
    """The device that captured tensors ask for; None if there are none but scalars on the CPU, which go anywhere."""
    captures = traced.binding.captures if traced is not None else ()
    tables, elsewhere = (t.device for t in captures if t.dim()), (t.device for t in captures if t.device.type != "cpu")
    return next(tables, None) or next(elsewhere, None)
