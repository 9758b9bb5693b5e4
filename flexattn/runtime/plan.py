"""One call becomes a Problem (its tensors and numbers) and a Plan (its structure, cached).

A Plan is found by what can change generated code: the programs' structure, dtypes, head dims, layout facts, the target
and the options. It holds no tensor, no number's value, no length and no batch size, so changing any of those finds the
same Plan and builds nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.errors import OptionError, UnsupportedError
from flexattn.runtime import settings, stats
from flexattn.runtime.options import DEFAULT, BackendError, KernelOptions
from flexattn.runtime.positions import without_rest
from flexattn.runtime.validate import InputDeviceError

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask
    from flexattn.frontend.program import Program, Traced
    from flexattn.runtime.pages import PagedKV

Needs = tuple[bool, bool, bool, tuple[bool, ...]]  # whether query, key, value and each capture need a gradient
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_DECODE_Q_LEN = 128  # torch's own limit for its decode kernel


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One call's tensors and values; mods and masks see scores of float32 (float64 for float64 inputs), scaled.

    Attributes:
        q: [batch, q_heads, q_len, qk_dim]
        k: [kv_batch, kv_heads, kv_len, qk_dim]; kv_batch is batch or 1, q_heads a multiple of kv_heads. Of paged keys `pages.k_pages`.
        v: [kv_batch, kv_heads, kv_len, v_dim], or `pages.v_pages`.
        scale: factor of the scores before score_mod; any float, 0 and negative included.
        score: the traced score_mod, None for the identity.
        mask: the traced mask partial tiles apply (`block_mask.traced`), None if there is nothing to apply.
        block_mask: which tiles to visit, None for all.
        needs_grad: an autograd node will be recorded.
        pages: where keys and values lie, if they are paged; mask and score hold their lengths.
        lengths: int tensor [batch], keys that count by batch, which the mask keeps to already; None where all do.
        want_lse, want_max: which extra outputs the caller needs; lse is always computed when a gradient may be.
        options: the checked kernel_options.
        tables: span tables that were made for this call and are kept nowhere else; shared with what `bind` makes.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score: Traced | None = None
    mask: Traced | None = None
    block_mask: BlockMask | None = None
    want_lse: bool = True
    want_max: bool = False
    options: KernelOptions = DEFAULT
    tables: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    needs_grad: bool = False
    pages: PagedKV | None = None
    lengths: Tensor | None = None

    @property
    def kv_len(self) -> int:
        """Keys of a batch entry, at most."""
        return self.k.shape[2] if self.pages is None else self.pages.max_length

    @property
    def kv_batch(self) -> int:
        """Batch entries that have keys of their own."""
        return self.k.shape[0] if self.pages is None else self.pages.batch

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """The tensors score_mod captured, in slot order: those that may need a gradient."""
        return self.score.binding.captures if self.score is not None else ()

    def bind(self, q: Tensor, k: Tensor, v: Tensor, captures: tuple[Tensor, ...]) -> Problem:
        """The same problem over other tensors of the same structure (autograd's saved ones)."""
        score = self.score
        if score is not None:
            score = score._replace(binding=score.binding._replace(captures=captures))
        rest = self.want_lse, self.want_max, self.options, self.tables, self.needs_grad, self.pages, self.lengths
        return Problem(q, k, v, self.scale, score, self.mask, self.block_mask, *rest)

    def dense(self) -> Problem:
        """The same problem over dense keys and values that are zeros behind each length: a copy, for kernels that read no pages."""
        if self.pages is not None:
            k, v = self.pages.gathered(self.q.dtype)
        elif self.lengths is not None:
            k, v = without_rest(self.k, self.lengths), without_rest(self.v, self.lengths)
        else:
            return self
        return replace(self, k=k, v=v, pages=None, lengths=None)


@dataclass(frozen=True, slots=True)
class Layout:
    """Facts about the tensors a plan rests on: nothing that changes with a length or a batch size.

    Strides, alignment and size classes are facts of a kernel, not of a plan: the backend keeps them in `Plan.memo`.
    """

    dtype: torch.dtype
    qk_dim: int
    v_dim: int

    @staticmethod
    def of(q: Tensor, v: Tensor) -> Layout:
        """Reads the facts off query and value."""
        return Layout(q.dtype, q.shape[-1], v.shape[-1])


@dataclass(frozen=True, slots=True)
class Device:
    """Where kernels will run: the device's type and, for CUDA, its compute capability."""

    type: str
    capability: tuple[int, int] = (0, 0)

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(device: torch.device) -> Device:
        """Looks the device up once."""
        if device.type != "cuda":
            return Device(device.type)
        return Device("cuda", torch.cuda.get_device_capability(device))


@dataclass(frozen=True)
class Plan:
    """How calls of one structure run; made once, kept for the life of the process.

    Attributes:
        backend: 'triton' (generated kernels) or 'torch' (block-sparse torch ops).
        reason: why that backend, for people.
        score, mask: the programs, None where there is none.
        layout, device, options: the facts the choice rests on.
        tf32: float32 products may use TF32, from torch.get_float32_matmul_precision().
        memo: what a backend remembers about this structure (kernel specs, derivatives); not part of equality.
    """

    backend: str
    reason: str
    score: Program | None
    mask: Program | None
    layout: Layout
    device: Device
    options: KernelOptions
    tf32: bool = False
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)


def make_plan(problem: Problem) -> Plan:
    """Finds the Plan of a problem, or makes it.

    Args:
        problem: the call; only its structure is looked at.
    Returns: the same Plan object for the same structure.
    Raises:
        BackendError: kernel_options asks for a backend that cannot run this call.
        OptionError: kernel_options fixes tiles that do not divide the blocks of a list mask.
        UnsupportedError: max_scores with BACKEND='FLASH'.
    """
    options = problem.options
    if options.backend not in ("AUTO", "TORCH", "TRITON"):
        _check_special_backend(problem)
    plan = _plan(
        problem.score.program if problem.score is not None else None,
        problem.mask.program if problem.mask is not None else None,
        Layout.of(problem.q, problem.v),
        Device.of(problem.q.device),
        options,
        problem.q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest",
        settings.interpreting(),
    )
    if plan.backend == "triton" and problem.block_mask is not None:
        _check_tiles(problem.block_mask, options)
    return plan


def _check_tiles(mask: BlockMask, options: KernelOptions) -> None:
    """Tiles the caller fixed must divide the blocks of a mask made from lists; other masks can be cut anywhere."""
    tile_m, tile_n = options.forward.BLOCK_M, options.forward.BLOCK_N
    if (tile_m or tile_n) and not mask.legal_tile(tile_m or mask.BLOCK_SIZE[0], tile_n or mask.BLOCK_SIZE[1]):
        raise OptionError(
            "Q and KV block size must be divisible by BLOCK_M and BLOCK_N",
            given=f"BLOCK_SIZE={mask.BLOCK_SIZE}, BLOCK_M={tile_m}, BLOCK_N={tile_n}",
            hint="tiles that divide BLOCK_SIZE, or create_block_mask from a mask_mod",
        )


@functools.lru_cache(maxsize=4096)
def _plan(
    score: Program | None,
    mask: Program | None,
    layout: Layout,
    device: Device,
    options: KernelOptions,
    tf32: bool,
    interpret: bool,
) -> Plan:
    backend, reason = choose_backend(layout.dtype, device, options.backend, interpret=interpret)
    stats.record_plan(backend, reason)
    tiles = {*options.forward.given(), *options.backward.given(), *(["autotune"] if options.autotune else [])}
    tiles |= {"warp_specialized"} if options.warp_specialized else set()
    if backend == "torch" and tiles:
        keys = ", ".join(sorted(tiles))
        settings.warn_once(f"torch path {keys}", f"kernel_options {keys}: no effect on the torch-ops path ({reason})")
    plan = Plan(backend, reason, score, mask, layout, device, options, tf32)
    if settings.debug():
        print(f"flexattn: {plan}", file=sys.stderr)
    return plan


def choose_backend(dtype: torch.dtype, device: Device, wanted: str, *, interpret: bool) -> tuple[str, str]:
    """Which backend runs, and the reason; every departure from the fast one is announced, none is silent.

    Args:
        dtype: of query, key and value.
        device: where they are.
        wanted: kernel_options["BACKEND"].
        interpret: TRITON_INTERPRET=1 is set.
    Returns: ('triton' | 'torch', reason).
    Raises: BackendError where `wanted` cannot run, InputDeviceError for tensors without data.
    """
    if device.type == "meta":
        raise InputDeviceError(
            "FlexAttention is only supported on devices that compute", given="meta tensors", hint="the CPU"
        )
    if wanted == "TORCH":
        return "torch", "BACKEND='TORCH' was asked for"
    obstacle = _triton_obstacle(dtype, device, interpret=interpret and wanted != "AUTO")
    if wanted != "AUTO":
        if obstacle is not None:
            hint = "BACKEND='AUTO'" + (", or TRITON_INTERPRET=1 in the environment" if device.type == "cpu" else "")
            raise BackendError(
                f"BACKEND={wanted!r} was specified but cannot be used for this input", given=obstacle, hint=hint
            )
        return "triton", f"BACKEND={wanted!r} was asked for"
    if obstacle is None:
        return "triton", f"{device.type} {device.capability[0]}.{device.capability[1]}, {_name(dtype)}"
    if device.type != "cpu":
        settings.warn_once(
            f"slow {obstacle}",
            f"flex_attention runs in torch ops instead of a fused kernel: {obstacle}",
            settings.FlexPerformanceWarning,
        )
    return "torch", obstacle


def _triton_obstacle(dtype: torch.dtype, device: Device, *, interpret: bool) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and interpret):
        return f"{device.type} tensors"
    if dtype not in _KERNEL_DTYPES:
        return f"{_name(dtype)} has no kernel"
    if not _has_triton():
        return "triton is not installed"
    return None


def _check_special_backend(problem: Problem) -> None:
    backend = problem.options.backend
    if backend == "FLASH" and problem.want_max:
        raise UnsupportedError(
            "Returning max scores is not supported with BACKEND='FLASH'",
            given="return_aux=AuxRequest(max_scores=True)",
            hint="BACKEND='AUTO', or omit max_scores",
        )
    if backend == "FLASH":
        raise BackendError(
            "BACKEND='FLASH' but flash attention cannot be used: flexattn generates its own kernels",
            given="kernel_options={'BACKEND': 'FLASH'}",
            hint="BACKEND='AUTO'",
        )
    if problem.q.shape[-2] > _DECODE_Q_LEN:
        raise BackendError(
            "BACKEND='TRITON_DECODE' was specified but flex_decoding cannot be used for this input",
            given=f"q_len={problem.q.shape[-2]}, more than {_DECODE_Q_LEN}",
            hint="BACKEND='AUTO'",
        )
    obstacle = why_no_decode(problem)
    if obstacle is not None:
        settings.warn_once(
            f"TRITON_DECODE {obstacle}", f"BACKEND='TRITON_DECODE': the forward kernel runs, as {obstacle}"
        )


def why_dense(problem: Problem) -> str | None:
    """Why no kernel can serve a call over keys where they lie, or None where one may."""
    if problem.needs_grad:
        return "a gradient is needed"
    if problem.pages is None:
        return None
    if problem.options.strict_nan:
        return "strict_nan looks at dense keys"
    if problem.k.dtype.itemsize > 1 and (problem.pages.k_scale is not None or problem.pages.v_scale is not None):
        return "pages of more than 8 bits have scales"
    return None


def why_no_decode(problem: Problem) -> str | None:
    """Why the decode kernel cannot serve a call, or None where it can."""
    obstacle = why_dense(problem)
    if obstacle is None and problem.pages is not None and problem.k.dtype.itemsize == 1:
        obstacle = _why_not_converted(problem)
    if obstacle is not None:
        return obstacle
    if problem.block_mask is not None and problem.block_mask.predicate is None:
        return "the mask is made of lists of blocks"
    return None


def _why_not_converted(problem: Problem) -> str | None:
    """Why the decode kernel cannot read pages of 8 bits as they are."""
    if problem.q.dtype == torch.float32:
        return "pages hold numbers of 8 bits, and query those of 32"
    if any(n % 2 for x in (problem.k, problem.v) for n in (x.shape[3], x.storage_offset(), *x.stride()[:3])):
        return "pages of 8 bits are read in pairs, and a dimension or a stride is odd"
    device = Device.of(problem.q.device)
    if device.type == "cpu" or problem.k.dtype == torch.float8_e5m2 or device.capability >= (8, 9):
        return None
    return "pages hold e4m3, which this GPU does not convert"


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def output_like(q: Tensor, v_dim: int) -> Tensor:
    """An uninitialised output [batch, q_heads, q_len, v_dim] in query's dtype and stride order, as torch lays it out.

    Args:
        q: query, [batch, q_heads, q_len, qk_dim].
        v_dim: last dimension of value.
    Returns: a dense tensor; for q permuted from [batch, q_len, q_heads, qk_dim] it has that order in memory too.
    """
    return torch.empty_permuted((*q.shape[:-1], v_dim), stride_order(q), dtype=q.dtype, device=q.device)


def stride_order(x: Tensor) -> tuple[int, ...]:
    """The dimensions of x from the slowest to the fastest in memory; expanded and size-1 ones keep their usual place."""
    return _stride_order(x.shape, x.stride())


def stride_order_of(x: Tensor) -> tuple[int, ...]:
    """`stride_order` of a tensor whose sizes are symbols."""
    return _stride_order.__wrapped__(x.shape, x.stride())


@functools.lru_cache(maxsize=4096)
def _stride_order(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    natural = [0] * len(shape)
    size = 1
    for d in reversed(range(len(shape))):
        natural[d] = size
        size *= max(shape[d], 1)
    steps = [s if s > 0 and n > 1 else usual for s, n, usual in zip(strides, shape, natural)]
    return tuple(sorted(range(len(shape)), key=lambda d: (-steps[d], d)))


@functools.lru_cache(maxsize=4096)
def dense_strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in that order, the slowest first.

    Example:
        >>> dense_strides((2, 3, 5, 7), (0, 2, 1, 3))
        (105, 7, 21, 1)
    """
    strides: tuple[int, ...] = torch.empty_permuted(shape, order, device="meta").stride()
    return strides
