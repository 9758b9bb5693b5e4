"""flex_attention where somebody watches torch's operators: a call becomes the operator `flexattn::attention` and its text.

Reads the arguments of flex_attention; calls the operator. Two ways lead here. torch.compile traces `in_graph` as it traces the code
around it: mods run on values without content (frontend/record.py), and the text is put together while it traces. And an eager call
whose operators are watched, by a mode (selective checkpoints, a FLOP counter, torch.export) or by its tensors (fake ones), is traced
by our own tracer as ever and then made as the operator.

Dynamo must follow each line of `in_graph` and of what it calls: plain Python over lists and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, OptionError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.graph_mask import GraphMask
from flexattn.frontend.program import Traced
from flexattn.frontend.program_text import program_text
from flexattn.frontend.record import Recorded, is_static, record
from flexattn.frontend.torch_lists import is_torchs
from flexattn.frontend.trace import trace
from flexattn.runtime import operators  # noqa: F401  registers the operators


class Writer:
    """Puts a call's text together.

    Attributes:
        tensors, ints, floats: what the text names, in order of first use.
    """

    def __init__(self, query: Tensor) -> None:
        self.query = query
        self.tensors: list[Tensor] = []
        self.ints: list[int | torch.SymInt] = []
        self.floats: list[Tensor] = []

    def number(self, x: Any) -> str:
        """None or a number: in the text if it is the same in every run of the graph, else an argument."""
        if x is None or isinstance(x, bool) or is_static(x):
            return repr(x)
        if isinstance(x, (int, torch.SymInt)):
            self.ints.append(x)
            return f"i{len(self.ints) - 1}"
        # graphs keep a float that changes as a tensor alone
        self.floats.append(torch.ones((), dtype=torch.float64) * x)
        return f"f{len(self.floats) - 1}"

    def tensor(self, x: Tensor) -> str:
        """A tensor; one of a single number follows query to its device."""
        if x.dim() == 0 and x.device != self.query.device:
            x = x.to(self.query.device)
        self.tensors.append(x)
        return f"t{len(self.tensors) - 1}"

    def mod(self, mod: Callable[..., Any] | None, kind: str) -> str:
        """A mod, by its text."""
        if mod is None:
            return "None"
        wide = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        if not torch.compiler.is_dynamo_compiling():
            return self.traced(trace(mod, kind, score_dtype=wide))
        found = record(mod, kind, wide)
        return self.written(kind, found.text, found.captures, found.numbers)

    def traced(self, traced: Traced | None) -> str:
        """A mod that has been traced."""
        if traced is None:
            return "None"
        program, (captures, numbers) = traced
        return self.written(program.kind, program_text(program), list(captures), list(numbers))

    def written(self, kind: str, text: str, captures: list[Tensor], numbers: list[int | float]) -> str:
        """A mod's text with what it names."""
        named = "".join([f"{self.tensor(x)}, " for x in captures])
        counted = "".join([f"{self.number(x)}, " for x in numbers])
        return f"Mod({kind!r}, {text!r}, ({named}), ({counted}))"

    def mask(self, mask: Any) -> str:
        """A block mask: in the process that made it its number, in a graph that goes elsewhere its function."""
        if mask is None:
            return "None"
        if isinstance(mask, GraphMask):
            return self.made_here(mask._recorded, mask._sizes, mask._options["device"])
        if not isinstance(mask, BlockMask):
            return self.torchs(mask)
        if not torch.compiler._is_exporting_flag:  # is_exporting() is always true where Dynamo of torch 2.11 traces
            return f"Made({self.number(mask._number)})"
        predicate = mask.as_predicate()._mask
        sizes = [f"({self.number(a)}, {self.number(b)})" for a, b in (predicate.sizes, predicate.lengths)]
        return f"Mask({self.traced(predicate.traced)}, {', '.join(sizes)}, {str(predicate.device)!r})"

    def torchs(self, mask: Any) -> str:
        """A mask of torch's, by its lists."""
        if not is_torchs(mask):
            hint = "create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)"
            raise CallError("block_mask must be a BlockMask", given=type(mask).__name__, hint=hint)
        q_len, kv_len, q_block, kv_block = [self.number(x) for x in (*mask.seq_lengths, *mask.BLOCK_SIZE)]
        mod = "None" if mask.mask_mod.__name__ == "noop_mask" else self.mod(mask.mask_mod, "mask")
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
        named = ", ".join(["None" if x is None else self.tensor(x) for x in lists])
        return f"Lists({mod}, ({q_len}, {kv_len}), ({q_block}, {kv_block}), {named})"

    def made_here(self, found: Recorded, sizes: Any, device: Any) -> str:
        """A mask that this graph has made."""
        batch, heads, q_len, kv_len = [self.number(1 if x is None else x) for x in sizes]
        mod = self.written("mask", found.text, found.captures, found.numbers)
        place = self.query.device if device is None else torch.device(device)
        return f"Mask({mod}, ({batch}, {heads}), ({q_len}, {kv_len}), {str(place)!r})"


def in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    mask_mod: Callable[..., Any] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """flex_attention as an operator.

    Args: as of flex_attention.
    Returns: out, lse and max_scores; what is not asked for may be empty.
    """
    if return_aux is not None and return_lse:
        raise OptionError(
            "Cannot specify both return_lse and return_aux", given="both", hint="return_aux=AuxRequest(lse=True) alone"
        )
    if torch._C._are_functorch_transforms_active():
        torch._dynamo.graph_break("flex_attention has no operator under torch.func: such a transform runs eagerly")
    query, key, value = [_autocast(x) for x in (query, key, value)]
    writer = Writer(query)
    score = writer.mod(score_mod, "score")
    inputs = [query, key, value, *writer.tensors]
    placed = [writer.tensor(x) if isinstance(x, Tensor) else writer.number(x) for x in (q_offset, kv_lengths)]
    options = ", ".join([f"{k!r}: {v!r}" for k, v in kernel_options.items()]) if kernel_options else ""
    lse, peaks = (return_lse, False) if return_aux is None else (return_aux.lse, return_aux.max_scores)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    said = [
        f"scale={writer.number(scale)}, enable_gqa={bool(enable_gqa)}",
        f"q_offset={placed[0]}, kv_lengths={placed[1]}",
        f"options={{{options}}}, lse={bool(lse)}, max_scores={bool(peaks)}, needs_grad={needs_grad}",
        f"score={score}, mask={writer.mod(mask_mod, 'mask')}, block_mask={writer.mask(block_mask)}",
    ]
    call = f"Call({', '.join(said)})"
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.flexattn.attention(
        query, key, value, writer.tensors, writer.ints, writer.floats, call
    )
    return found


def _autocast(x: Tensor) -> Tensor:
    """An input in autocast's dtype, where autocast is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))
