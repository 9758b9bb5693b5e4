"""A block mask that create_block_mask makes inside a graph of torch.compile: what the function does, as text, and sizes.

Reads what was recorded; makes a BlockMask. The one idea: attention in the same graph needs no more than the text, and whoever meets
the mask outside of the graph finds a BlockMask like any other, made when he first looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.program_text import replay
from flexattn.frontend.record import Recorded


class GraphMask(BlockMask):
    """A BlockMask that is made when something but a graph asks for it.

    Args:
        recorded: the mask function.
        sizes: batch, heads, q_len and kv_len, as create_block_mask was given them.
        options: its further arguments by name.
        make: create_block_mask, as it is outside of graphs.
    """

    def __init__(  # Dynamo sets these attributes; no others are there until the mask is made
        self, recorded: Recorded, sizes: tuple[Any, ...], options: dict[str, Any], make: Callable[..., BlockMask]
    ) -> None:
        self._recorded, self._sizes, self._options, self._make = recorded, sizes, options, make

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_mask" in self.__dict__ or "_recorded" not in self.__dict__:
            raise AttributeError(name)
        found = self._recorded
        made = self._make(replay(found.text, found.captures, found.numbers, "mask"), *self._sizes, **self._options)
        self._start(made._mask, made._style, made.dq_kv_order_spt)
        return getattr(self, name)
