"""kernel_options: torch's dictionary of keys becomes one frozen, checked KernelOptions.

Every key torch documents is known here. Keys that steer a kernel are honoured (with `fwd_` or `bwd_` in front, in one
direction only); keys that mean nothing for these kernels are accepted and named once in a warning; a key nobody knows is
an error, because a misspelt option that is silently ignored costs more than it saves.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import torch

from flexattn.codegen.decode_tiles import MOST_SPLITS
from flexattn.errors import CallError, OptionError
from flexattn.runtime import settings

TORCH_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")
BACKENDS = (*TORCH_BACKENDS, "TORCH")


class BackendError(OptionError, RuntimeError):
    """The backend that was asked for cannot run this call."""


class ReservedOptionError(OptionError, AssertionError):
    """An option that flex_attention sets by itself was passed."""


class FlexKernelOptions(TypedDict, total=False):
    """The keys of kernel_options for a type checker: torch's, and ours behind them.

    Example:
        >>> options: FlexKernelOptions = {"BLOCK_M": 64}
    """

    num_warps: int
    num_stages: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_M1: int
    BLOCK_N1: int
    BLOCK_M2: int
    BLOCK_N2: int
    PRESCALE_QK: bool
    ROWS_GUARANTEED_SAFE: bool
    BLOCKS_ARE_CONTIGUOUS: bool
    WRITE_DQ: bool
    FORCE_USE_FLEX_ATTENTION: bool
    USE_TMA: bool
    SPLIT_KV: int
    kpack: int
    matrix_instr_nonkdim: int
    waves_per_eu: int
    BACKEND: Literal["AUTO", "TRITON", "FLASH", "TRITON_DECODE", "TORCH"]
    strict_nan: bool
    autotune: bool
    warp_specialized: bool
    deterministic: bool


@dataclass(frozen=True, slots=True)
class TileOptions:
    """Tiles and launch sizes a caller fixed for one direction; None lets the plan choose."""

    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    BLOCK_M1: int | None = None
    BLOCK_N1: int | None = None
    BLOCK_M2: int | None = None
    BLOCK_N2: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def given(self) -> dict[str, int]:
        """The keys a caller did fix."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What `kernel_options` said, checked and hashable.

    Attributes:
        backend: 'AUTO', 'TRITON', 'FLASH', 'TRITON_DECODE' or 'TORCH'.
        forward, backward: tiles fixed for a direction (`fwd_`, `bwd_` prefixes; no prefix fixes both).
        strict_nan: a NaN or infinity at a masked position of a visited tile may not reach another row.
        autotune: time this call's legal tiles once and keep the fastest; `FLEXATTN_AUTOTUNE=1` where the call says nothing.
        warp_specialized: whether the forward runs the kernel for Hopper whose warps have roles; None leaves the choice, False the
            portable kernels in both directions.
        deterministic: gradients have the same bits in every run, as under `torch.use_deterministic_algorithms(True)`.
        force_flex: few queries, too, run in the forward kernel (FORCE_USE_FLEX_ATTENTION).
        split_kv: into how many parts the decode kernel splits the keys (SPLIT_KV); None leaves the choice.
    """

    backend: str = "AUTO"
    forward: TileOptions = TileOptions()
    backward: TileOptions = TileOptions()
    strict_nan: bool = False
    autotune: bool = False
    warp_specialized: bool | None = None
    deterministic: bool = False
    force_flex: bool = False
    split_kv: int | None = None


DEFAULT = KernelOptions()
_AUTOTUNED = KernelOptions(autotune=True)
_TILE_KEYS = tuple(f.name for f in fields(TileOptions))
_POWER_OF_TWO = frozenset(_TILE_KEYS) - {"num_stages"}
_SWITCHES = ("strict_nan", "autotune", "warp_specialized", "deterministic")  # True or False, for both directions
_OURS = ("BACKEND", *_SWITCHES)
# Known to torch, without an effect on these kernels; each reason ends up in a warning shown once.
_HARMLESS = {
    "PRESCALE_QK": "the scale is always folded into the softmax's own multiplication",
    "ROWS_GUARANTEED_SAFE": "rows without a key are always handled",
    "BLOCKS_ARE_CONTIGUOUS": "runs of blocks are found from the mask",
    "WRITE_DQ": "dQ and captured gradients have kernels of their own",
    "USE_TMA": "each kernel loads tiles the way measured fastest",
    "num_consumer_groups": "warps are assigned by the kernel",
    "num_buffers_warp_spec": "warps are assigned by the kernel",
    "PARTITION_SIZE": "the path without a GPU chooses its own blocks",
    "kpack": "it concerns ROCm",
    "matrix_instr_nonkdim": "it concerns ROCm",
    "waves_per_eu": "it concerns ROCm",
}
_RESERVED = ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
_OF_DECODE = (
    "FORCE_USE_FLEX_ATTENTION",
    "SPLIT_KV",
)  # torch's: not the decode kernel, and how many parts it makes of the keys
_KNOWN = (*_TILE_KEYS, *_OURS, *_OF_DECODE, *_HARMLESS)


def parse_options(kernel_options: Mapping[str, Any] | None) -> KernelOptions:
    """Checks a kernel_options dictionary.

    Args:
        kernel_options: torch's keys, and ours ('strict_nan', 'autotune', 'warp_specialized', 'deterministic', BACKEND='TORCH'); None
            means all defaults.
    Returns: KernelOptions.
    Raises:
        CallError: not a dictionary.
        OptionError: an unknown key or an illegal value.
        BackendError: BACKEND together with FORCE_USE_FLEX_ATTENTION.
        ReservedOptionError: OUTPUT_LOGSUMEXP or OUTPUT_MAX.
    Example:
        >>> parse_options({"fwd_BLOCK_M": 64}).forward.BLOCK_M
        64
    """
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise CallError(
            "kernel_options must be a dictionary", given=type(kernel_options).__name__, hint="{'BLOCK_M': 64}"
        )
    if not kernel_options:
        return _AUTOTUNED if settings.autotune() else DEFAULT
    forward: dict[str, int] = {}
    backward: dict[str, int] = {}
    for key, value in kernel_options.items():
        name, targets = _split(key, forward, backward)
        _check_known(key, name)
        if name in _TILE_KEYS:
            checked = _tile_value(key, name, value)
            for target in targets:
                if checked is not None and (key != name or name not in target):  # a prefixed key wins
                    target[name] = checked
        elif name in _HARMLESS:
            settings.warn_once(f"option {name}", f"kernel_options[{key!r}] has no effect here: {_HARMLESS[name]}")
    if "BACKEND" in kernel_options and kernel_options.get("FORCE_USE_FLEX_ATTENTION", False):
        raise BackendError(
            "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION",
            given=f"BACKEND={kernel_options['BACKEND']!r} and FORCE_USE_FLEX_ATTENTION=True",
            hint="drop FORCE_USE_FLEX_ATTENTION",
        )
    return KernelOptions(
        backend=_backend_value(kernel_options.get("BACKEND", "AUTO")),
        forward=TileOptions(**forward),
        backward=TileOptions(**backward),
        strict_nan=_switch(kernel_options, "strict_nan", default=False),
        autotune=_switch(kernel_options, "autotune", default=settings.autotune()),
        warp_specialized=_switch(kernel_options, "warp_specialized", default=False)
        if "warp_specialized" in kernel_options
        else None,
        deterministic=_switch(kernel_options, "deterministic", default=False),
        force_flex=_switch(kernel_options, "FORCE_USE_FLEX_ATTENTION", default=False),
        split_kv=_split_kv(kernel_options),
    )


def must_be_deterministic(options: KernelOptions) -> bool:
    """Whether a call's gradients must have the same bits in every run: by its own options, or torch's switch for everything."""
    return options.deterministic or torch.are_deterministic_algorithms_enabled()


def _split(key: Any, forward: dict[str, int], backward: dict[str, int]) -> tuple[str, tuple[dict[str, int], ...]]:
    if not isinstance(key, str):
        raise OptionError("kernel_options keys are strings", given=repr(key), hint="{'BLOCK_M': 64}")
    if key.startswith("fwd_"):
        return key[4:], (forward,)
    if key.startswith("bwd_"):
        return key[4:], (backward,)
    return key, (forward, backward)


def _check_known(key: str, name: str) -> None:
    if name in _RESERVED:
        raise ReservedOptionError(
            f"{name} must not be in kernel_options",
            given=repr(name),
            hint="return_aux=AuxRequest(lse=True, max_scores=True)",
        )
    if name in (*_SWITCHES, "FORCE_USE_FLEX_ATTENTION") and key != name:
        raise OptionError(
            f"kernel_options[{name!r}] is for both directions", given=repr(key), hint=f"{{{name!r}: True}}"
        )
    if key == "bwd_SPLIT_KV":
        raise OptionError("kernel_options['SPLIT_KV'] is of the forward", given=repr(key), hint="{'SPLIT_KV': 4}")
    if name in _KNOWN:
        return
    close = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)
    prefix = key[: len(key) - len(name)]
    known = ", ".join(sorted(_KNOWN, key=str.lower))
    hint = f"{prefix}{close[0]}" if close else f"one of {known}, with fwd_ or bwd_ in front for one direction"
    raise OptionError("kernel_options has an unknown key", given=repr(key), hint=hint)


def _tile_value(key: str, name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        hint = f"{{{key!r}: 64}}" if name.startswith("BLOCK") else f"{{{key!r}: 4}}"
        raise OptionError(f"kernel_options[{key!r}] must be an int", given=repr(value), hint=hint)
    if value < 1 or (name in _POWER_OF_TWO and value & (value - 1)) or (name.startswith("BLOCK") and value < 16):
        rule = {"num_stages": "at least 1", "num_warps": "a power of 2"}.get(name, "a power of 2 and at least 16")
        raise OptionError(
            f"kernel_options[{key!r}] must be {rule}", given=value, hint="leaving it out: tiles are chosen"
        )
    return value


def _switch(kernel_options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = kernel_options.get(name, default)
    if not isinstance(value, bool):
        what = f"kernel_options[{name!r}] must be True or False"
        raise OptionError(what, given=repr(value), hint=f"{{{name!r}: True}}")
    return value


def _split_kv(kernel_options: Mapping[str, Any]) -> int | None:
    key = "fwd_SPLIT_KV" if "fwd_SPLIT_KV" in kernel_options else "SPLIT_KV"
    value = kernel_options.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SPLITS:
        what = f"kernel_options[{key!r}] must be an int from 1 to {MOST_SPLITS}"
        raise OptionError(what, given=repr(value), hint="leaving it out: it is chosen by lengths, heads and device")
    return value


def _backend_value(value: Any) -> str:
    if not isinstance(value, str) or value not in BACKENDS:
        what = f"Invalid BACKEND value '{value}'. Must be one of {BACKENDS}"
        raise OptionError(what, given=repr(value), hint="leaving it out: the fastest that can run is chosen")
    return value


__all__ = [
    "BACKENDS",
    "DEFAULT",
    "BackendError",
    "FlexKernelOptions",
    "KernelOptions",
    "ReservedOptionError",
    "TileOptions",
    "must_be_deterministic",
    "parse_options",
]
