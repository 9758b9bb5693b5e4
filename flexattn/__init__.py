"""flexattn: two Python functions, a score and a mask, become fused attention kernels, forward and backward.

A drop-in for torch.nn.attention.flex_attention that needs no torch.compile, builds masks from their predicates without
looking at every pair, and compiles one kernel per structure of a mod. Importing it needs neither triton nor a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flexattn import errors
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.create import create_block_mask, create_mask
from flexattn.frontend.mask_functions import and_masks, noop_mask, or_masks
from flexattn.runtime.attention import AuxOutput, AuxRequest, flex_attention
from flexattn.runtime.settings import FlexPerformanceWarning
from flexattn.runtime.stats import reset_stats, stats

if TYPE_CHECKING:
    from flexattn import mods, ordering
    from flexattn.frontend.check import MaskCheck, check
    from flexattn.frontend.stack import stack_masks
    from flexattn.runtime.explain import explain
    from flexattn.runtime.merge import merge_states
    from flexattn.runtime.options import FlexKernelOptions
    from flexattn.runtime.paged_attention import paged_attention
    from flexattn.runtime.paged_cache import PagedKVCache
    from flexattn.runtime.pages import PagedKV
    from flexattn.runtime.prepared import PreparedAttention, prepare_attention
    from flexattn.runtime.torch_paged import PagedAttention

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "FlexKernelOptions",
    "FlexPerformanceWarning",
    "MaskCheck",
    "PagedAttention",
    "PagedKV",
    "PagedKVCache",
    "PreparedAttention",
    "__version__",
    "and_masks",
    "check",
    "create_block_mask",
    "create_mask",
    "errors",
    "explain",
    "flex_attention",
    "merge_states",
    "mods",
    "noop_mask",
    "or_masks",
    "ordering",
    "paged_attention",
    "prepare_attention",
    "reset_stats",
    "stack_masks",
    "stats",
]


# What not every program needs is imported when it is first asked for: names, and modules (None).
_LATER = {
    "FlexKernelOptions": "flexattn.runtime.options",
    "MaskCheck": "flexattn.frontend.check",
    "PagedAttention": "flexattn.runtime.torch_paged",
    "PagedKV": "flexattn.runtime.pages",
    "PagedKVCache": "flexattn.runtime.paged_cache",
    "PreparedAttention": "flexattn.runtime.prepared",
    "check": "flexattn.frontend.check",
    "explain": "flexattn.runtime.explain",
    "merge_states": "flexattn.runtime.merge",
    "mods": None,
    "ordering": None,
    "paged_attention": "flexattn.runtime.paged_attention",
    "prepare_attention": "flexattn.runtime.prepared",
    "stack_masks": "flexattn.frontend.stack",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'flexattn' has no attribute {name!r}")
    home = _LATER[name]
    module = importlib.import_module(home or f"flexattn.{name}")
    found = globals()[name] = getattr(module, name) if home else module
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
