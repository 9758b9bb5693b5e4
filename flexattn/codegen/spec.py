"""Everything that can change a kernel's text or binary, frozen: reads layouts and programs, makes hashable cache keys.

The idea: if something is no field here it cannot change the kernel. Lengths, batch and head counts, strides, captured
sizes and the values of numbers are therefore absent; only classes of them (32 or 64 bit, aligned or not, stride 1 or not) are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from flexattn.codegen.target import GFX942, Target
from flexattn.codegen.tile_config import TileConfig, captured_reads
from flexattn.errors import DTypeError, UnsupportedError
from flexattn.frontend.box_bounds import box_bounds

if TYPE_CHECKING:
    from flexattn.frontend.program import Program

HOPPER_GRADIENTS = (
    "hopper_backward",
    "hopper_query_gradient",
    "hopper_key_gradients",
)  # kernels in Gluon with a score's derivative
BY_COLUMN = ("dkdv", "hopper_backward", "hopper_key_gradients")  # kernels that walk the queries of a tile of keys
SMALL_INDEX = 1 << 24  # lengths and integer numbers below this need no 64-bit sums, and float32 holds them exactly
LIMIT_32 = (1 << 31) - 1
_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "u8",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint16: "u16", torch.uint32: "u32",
}  # fmt: skip

NARROW = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}  # of pages alone


def type_name(dtype: torch.dtype) -> str:
    """Triton's name of a captured tensor's storage type; truth values are read as bytes."""
    name = _NAMES.get(dtype)
    if name is None:
        raise DTypeError(
            "kernels cannot read a captured tensor's data type",
            given=dtype,
            hint="convert it, for example with .float()",
        )
    return name


class TensorLayout(NamedTuple):
    """Facts about one of q, k, v, d_out that a kernel is compiled for.

    Args:
        dtype: 'bf16', 'fp16' or 'fp32'; of keys and values in pages 'fp8e4nv' and 'fp8e5' too.
        is_aligned: The pointer and all strides but the last, which is 1, are multiples of 16 bytes.
        is_wide: Offsets inside one tile may pass 2^31 elements, of paged keys those of pages too.
        is_expanded: A dimension has stride 0, which a tensor descriptor cannot say.
    """

    dtype: str
    is_aligned: bool
    is_wide: bool
    is_expanded: bool = False


class CaptureLayout(NamedTuple):
    """Facts about one captured tensor.

    Args:
        dtype: Its storage type.
        rank: Its number of dimensions.
        is_wide: Offsets in it need 64 bits.
        is_unit: The last stride is 1, or is never multiplied with anything but 0.
    """

    dtype: str
    rank: int
    is_wide: bool
    is_unit: bool = True


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel. See the fields' comments for units and meaning."""

    # 'forward', 'hopper_forward', 'decode', 'merge', 'delta', 'dq', 'dkdv', 'hopper_backward', 'hopper_dq', 'hopper_query_gradient',
    # 'hopper_key_gradients'; of masks 'ranges', 'block_map', 'fill', 'order'; of pages 'append_pages' and 'cut_values'
    kernel: str
    target: Target
    config: TileConfig
    qk_dim: int
    v_dim: int
    # q, k, v, d_out (the last one also in the forward, equal to q's); or none; of append_pages k, v and the pages of both; v of
    # cut_values
    layouts: tuple[TensorLayout, ...]
    score: Program | None = None
    mask: Program | None = None
    captures: tuple[CaptureLayout, ...] = ()  # of the score program, then of the mask program
    wide_numbers: tuple[bool, ...] = ()  # the same order; False for floats
    capture_grads: tuple[int, ...] = ()  # score program slots whose gradient the dq kernel sums
    fold_scale: bool = True  # scale * log2(e) in one factor: no score_mod, scale > 0, half types
    precision: str = "ieee"  # of float32 dots: 'ieee' or 'tf32'
    page_size: int = 0  # of keys and values in pages, 0 where they are not
    scales: tuple[int, int] = (0, 0)  # of keys and of values in pages: none, one of all heads, one of each head (2)
    v_in_k: bool = False  # of the decode kernel: values are the first dims of keys, in the same memory, and not loaded
    wide_lengths: bool = False  # a length, batch or head count of SMALL_INDEX or more
    want_max: bool = False
    want_dq: bool = True
    want_dk: bool = True
    want_dv: bool = True
    has_d_lse: bool = False

    @property
    def number_kinds(self) -> tuple[str, ...]:
        """'int' or 'float' for each number of the score program, then of the mask program."""
        return tuple(kind for program in (self.score, self.mask) if program is not None for kind in program.numbers)

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of captured gradients, whose terms are added one by one: thousands of them cost float32 two of its digits."""
        return torch.float64 if self.layouts[0].dtype == "fp32" else torch.float32

    @property
    def described(self) -> tuple[bool, ...]:
        """Whether each of q, k, v and d_out is loaded by the hardware, through a tensor descriptor.

        Not for products by registers (fewer than 64 rows) at the widest head dims: rows that come by way of shared memory
        then take all registers, and the assembler spills thousands of bytes."""
        rows = self.config.BLOCK_N if self.kernel == "dkdv" else self.config.BLOCK_M
        by_registers = rows < 64 and max(self.qk_dim, self.v_dim) > 256
        by_pointer = by_registers or self.kernel in ("delta", "decode", "merge")
        has_descriptors = self.target.has_descriptors and not by_pointer
        return tuple(has_descriptors and x.dtype != "fp32" and x.is_aligned and not x.is_expanded for x in self.layouts)

    @property
    def ranged(self) -> tuple[int, ...]:
        """Slots of the mask program's captures that the mask builder reads over ranges."""
        return box_bounds(self.mask).ranged if self.mask is not None else ()

    @property
    def valued(self) -> tuple[int, ...]:
        """Slots of those whose sets of values over ranges it reads."""
        return box_bounds(self.mask).valued if self.mask is not None else ()

    @property
    def is_gluon(self) -> bool:
        """Whether the kernel says where each element lies: its skeleton is written in Gluon."""
        return self.kernel == "hopper_forward" or self.kernel in HOPPER_GRADIENTS

    @property
    def is_queued(self) -> bool:
        """Whether as many programs run as there are multiprocessors, and each takes tiles by a counter until none is left.

        In the fused backward where the mask alone says what counts, by what it reads for each query, as one of documents does: columns
        are then short and differ, and the start and the end of a program show."""
        if self.kernel == "hopper_backward":
            return self.score is None and self.mask is not None and captured_reads(self.mask).query > 0
        return self.kernel == "hopper_forward"

    @property
    def is_chained(self) -> bool:
        """Whether the kernel can be started before the one in front of it has ended, for whose results it waits by itself: decoding is
        short, and a launch takes as long as reading a thousand keys."""
        return self.kernel in ("decode", "merge") and 90 <= self.target.arch < GFX942

    @property
    def dialect(self) -> str:
        """Whose spelling of an operation the leaves use."""
        return "gluon" if self.is_gluon else "triton_interpret" if self.target.is_interpreter else "triton"

    @property
    def math(self) -> str:
        """Which form of a function a leaf takes: 'hardware' for bfloat16, 'exp2' for float16 and on AMD, else 'exact'."""
        if self.target.is_interpreter or not self.layouts:
            return "exact"
        half = "exp2" if self.target.is_amd else "hardware"
        return {"bf16": half, "fp16": "exp2"}.get(self.layouts[0].dtype, "exact")


def tensor_layout(tensor: torch.Tensor, *, tile_rows: int = 128, is_paged: bool = False) -> TensorLayout:
    """Layout facts of a [batch, heads, length, dim] tensor, or of its contiguous copy where the last stride is not 1. A tile of paged
    keys, [pages, heads, length, dim], lies in any pages."""
    if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32, *(NARROW if is_paged else ())):
        hint = "convert query, key and value, or kernel_options={'BACKEND': 'TORCH'}"
        raise UnsupportedError("kernels take bfloat16, float16 and float32", given=tensor.dtype, hint=hint)
    rows = max(tile_rows, 256)
    return _tensor_layout(tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16, rows, is_paged)


@lru_cache(maxsize=4096)
def _tensor_layout(
    dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], offset: int, tile_rows: int, is_paged: bool
) -> TensorLayout:
    if strides[3] != 1 and shape[3] > 1:  # a launch copies it
        return fresh_layout(dtype, shape[3])
    aligned = offset == 0 and all(s % (16 // dtype.itemsize) == 0 for s in strides[:3])
    reach = tile_rows * strides[2] + 2 * shape[3] * strides[3] + (shape[0] * strides[0] if is_paged else 0)
    expanded = any(s <= 0 and n > 1 for s, n in zip(strides, shape))
    return TensorLayout((_NAMES | NARROW)[dtype], aligned, reach > LIMIT_32, expanded)


def fresh_layout(dtype: torch.dtype, dim: int) -> TensorLayout:
    """Layout of a tensor this library allocates itself."""
    return TensorLayout(_NAMES[dtype], dim * dtype.itemsize % 16 == 0, False)


def capture_layout(tensor: torch.Tensor) -> CaptureLayout:
    """Layout facts of a captured tensor."""
    return _capture_layout(tensor.dtype, tensor.shape, tensor.stride())


@lru_cache(maxsize=4096)
def _capture_layout(dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...]) -> CaptureLayout:
    reach = sum((n - 1) * abs(s) for n, s in zip(shape, strides) if n > 0)
    is_unit = not shape or shape[-1] <= 1 or strides[-1] == 1
    return CaptureLayout(type_name(dtype), len(shape), max(reach, shape.numel()) > LIMIT_32, is_unit)


def wide_number(value: Any) -> bool:
    """Whether an integer number needs the 64-bit class."""
    return isinstance(value, int) and not -SMALL_INDEX < value < SMALL_INDEX


def any_wide(sizes: Sequence[int]) -> bool:
    """Whether index sums over these lengths could pass 32 bits."""
    return max(sizes, default=0) >= SMALL_INDEX
