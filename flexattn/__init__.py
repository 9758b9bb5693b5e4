"""flexattn: two Python functions, a score and a mask, become fused attention kernels, forward and backward.

A drop-in for torch.nn.attention.flex_attention that needs no torch.compile, builds masks from their predicates without
looking at every pair, and compiles one kernel per structure of a mod. Importing it needs neither triton nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "errors": "flexattn.errors",
    "mods": "flexattn.mods",
    "BlockMask": "flexattn.frontend.block_mask",
    "and_masks": "flexattn.frontend.block_mask",
    "noop_mask": "flexattn.frontend.block_mask",
    "or_masks": "flexattn.frontend.block_mask",
    "create_block_mask": "flexattn.frontend.block_mask",
    "create_mask": "flexattn.frontend.block_mask",
    "AuxOutput": "flexattn.runtime.attention",
    "AuxRequest": "flexattn.runtime.attention",
    "flex_attention": "flexattn.runtime.attention",
    "explain": "flexattn.runtime.explain",
    "FlexPerformanceWarning": "flexattn.runtime.settings",
    "reset_stats": "flexattn.runtime.stats",
    "stats": "flexattn.runtime.stats",
}

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexPerformanceWarning",
    "__version__",
    "and_masks",
    "create_block_mask",
    "create_mask",
    "errors",
    "explain",
    "flex_attention",
    "mods",
    "noop_mask",
    "or_masks",
    "reset_stats",
    "stats",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'flexattn' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = home if _HOMES[name] == f"flexattn.{name}" else getattr(home, name)
    if name in ("create_block_mask", "create_mask"):
        from flexattn.runtime.eager import eager_only

        value = eager_only(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
