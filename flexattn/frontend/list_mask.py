"""A mask as block lists: full blocks are kept whole, and partial ones where the mask function says so.

Reads torch's lists, or a tile map of blocks, and a mask function; makes tile maps. The one idea: tiles must divide the blocks.
Where none can, or where a length cuts a full block, the lists become two bool tables and the whole a predicate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexattn.errors import DeviceError, ShapeError
from flexattn.frontend import algebra
from flexattn.frontend.block_lists import crop_blocks, cuts_full_block, read_lists, retile
from flexattn.frontend.contents import version, versions
from flexattn.frontend.mask_functions import MaskMod
from flexattn.frontend.predicate_mask import PredicateMask, portable, trace_mask
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import cover
from flexattn.frontend.tile_map import TileMap

SMALLEST_TILE = 16  # of the kernels: a list mask whose blocks are no multiple runs as a predicate
T = TypeVar("T")


class KvLists:
    """Torch's four lists by row, read when first asked for and again after a write to one of them.

    Args:
        lists: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices; the last two may be None.
    """

    def __init__(self, lists: Sequence[Any]) -> None:
        self.counts, self.indices, self.full_counts, self.full_indices = lists
        self._read: tuple[Hashable, TileMap] | None = None

    def blocks(self, block: tuple[int, int], kv_len: int) -> TileMap:
        """The listed blocks, as tiles that are whole blocks."""
        lists = (self.counts, self.indices, self.full_counts, self.full_indices)
        cols = max(-(-kv_len // block[1]), self.indices.shape[-1])
        stamp = (*(version(t) for t in lists if t is not None), block, cols)
        if self._read is None or self._read[0] != stamp or None in stamp:
            self._read = (stamp, read_lists(*lists, block=block, cols=cols))
        return self._read[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": None}


class ListMask:
    """The pairs in full blocks, and those in partial blocks that a function keeps; follows its lists and the function.

    Args:
        source: lists, or the blocks themselves as a tile map whose tiles are blocks.
        function: the mask function of partial blocks, traced anew whenever the mask is used.
        sizes: leading dimensions, (batch, heads) of every mask but lists that came without.
        lengths: (q_len, kv_len).
        block: tokens of a block, (q, kv).
    """

    def __init__(
        self,
        source: KvLists | TileMap,
        function: MaskMod,
        *,
        sizes: tuple[int, ...],
        lengths: tuple[int, int],
        block: tuple[int, int],
    ) -> None:
        self.source, self.function = source, function
        self.sizes, self.lengths, self.block = sizes, lengths, block
        self._blocks: TileMap | None = None  # what the cache is made of
        self._cache: dict[Hashable, tuple[Hashable, Any]] = {}

    @property
    def device(self) -> torch.device:
        lists = self.source
        device: torch.device = lists.counts.device if isinstance(lists, KvLists) else lists.full.start.device
        return device

    @property
    def inner(self) -> Traced | None:
        """The function with what it captures now; None if it keeps every pair."""
        return trace_mask(self.function)

    @property
    def traced(self) -> Traced | None:
        """The mask that partial tiles apply."""
        inner = self.inner
        return self._listed(inner) if self._runs_as_predicate(inner) else inner

    def legal_tile(self, q_tile: int, kv_tile: int) -> bool:
        """Whether `tile_map` can cut the mask into such tiles."""
        return self._divides(q_tile, kv_tile) or self._runs_as_predicate(self.inner)

    def _divides(self, q_tile: int, kv_tile: int) -> bool:
        return self.block[0] % q_tile == 0 and self.block[1] % kv_tile == 0

    def tile_map(self, q_tile: int, kv_tile: int) -> TileMap:
        """The tiles to visit; cached until the lists, or what the function captures, are written to.

        Raises:
            ShapeError: the tile does not divide the blocks, or the lists are too short for the lengths.
        """
        inner, blocks, (q_len, kv_len) = self.inner, self.block_map(), self.lengths
        if blocks.rows * self.block[0] < q_len:
            raise ShapeError(
                "seq_lengths reach past the block lists",
                given=f"q_len {q_len} and {blocks.rows} rows of {self.block[0]}",
                hint="seq_lengths within the lists, or a row of blocks for every query",
            )
        if self._runs_as_predicate(inner):
            return self._predicate(inner).tile_map(q_tile, kv_tile)
        if not self._divides(q_tile, kv_tile):
            raise ShapeError(
                "Q and KV block size must be divisible by BLOCK_M and BLOCK_N",
                given=f"BLOCK_SIZE {self.block} and a tile of ({q_tile}, {kv_tile})",
                hint="a tile that divides BLOCK_SIZE, or block_mask.as_predicate()",
            )
        cut = lambda: retile(blocks, q_len=q_len, kv_len=kv_len, q_tile=q_tile, kv_tile=kv_tile, mask=inner)
        return self._once(("map", q_tile, kv_tile), _stamp(inner), cut)

    def block_map(self) -> TileMap:
        """The listed blocks, whatever the lengths."""
        if self.device.type == "meta":
            raise DeviceError("a mask on the meta device has no blocks", given="meta", hint='mask.to("cpu") before')
        source = self.source
        blocks = source if isinstance(source, TileMap) else source.blocks(self.block, self.lengths[1])
        if blocks is not self._blocks:
            self._blocks, self._cache = blocks, {}
        return blocks

    def _once(self, key: Hashable, stamp: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What was made of the present blocks under this stamp; a stamp with None in it is never the same."""
        known = self._cache.get(key)
        if known is None or known[0] != stamp or None in stamp:
            known = self._cache[key] = (stamp, make())
        found: T = known[1]
        return found

    # ----------------------------------------------------------------------------------------------- as a predicate
    def _runs_as_predicate(self, inner: Traced | None) -> bool:
        """Whether tiles will not do: none divides the blocks, or a full block is cut, where the function must not count."""
        if any(b % SMALLEST_TILE and n > b for b, n in zip(self.block, self.lengths, strict=True)):
            return True
        ragged = any(n % b for b, n in zip(self.block, self.lengths, strict=True))
        if inner is None or not ragged:
            return False
        blocks, (q_len, kv_len) = self.block_map(), self.lengths
        return self._once("cut", (), lambda: cuts_full_block(blocks, q_len=q_len, kv_len=kv_len))

    def _listed(self, inner: Traced | None) -> Traced:
        """The whole mask as a predicate over two bool tables."""
        blocks = self.block_map()
        shape = (blocks.batch, blocks.heads, blocks.rows, blocks.cols)
        tables = lambda: tuple(cover(s, blocks.cols).reshape(shape) for s in (blocks.full, blocks.partial))
        full, partial = self._once("tables", (), tables)
        return algebra.listed(full, partial, block=self.block, inner=inner)

    def _predicate(self, inner: Traced | None) -> PredicateMask:
        sizes, lengths, block, device = two_sizes(self.sizes), self.lengths, self.block, self.device
        make = lambda: PredicateMask(
            self._listed(inner), self.function, sizes=sizes, lengths=lengths, block=block, device=device
        )
        self.block_map()
        return self._once("predicate", _stamp(inner), make)

    def as_predicate(self) -> PredicateMask:
        """The same pairs as a snapshot, for any tile size."""
        return self._predicate(self.inner)

    def kept(self) -> Tensor:
        """Every pair: bool [batch, heads, q_len, kv_len]."""
        return self.as_predicate().kept()

    # ---------------------------------------------------------------------------------------------- others made of it
    def changed(self, **changes: Any) -> ListMask:
        """The mask with other arguments."""
        names = ("source", "function", "sizes", "lengths", "block")
        return ListMask(**{n: getattr(self, n) for n in names} | changes)

    def expanded(self, batch: int, heads: int) -> ListMask:
        """The mask for other sizes, of the same lists."""
        return self.changed(sizes=(batch, heads))

    def cropped(self, q_len: int, kv_len: int) -> ListMask:
        """The upper left corner."""
        rows, cols = -(-q_len // self.block[0]), -(-kv_len // self.block[1])
        return self.changed(source=crop_blocks(self.block_map(), rows, cols), lengths=(q_len, kv_len))

    def __getstate__(self) -> dict[str, Any]:
        """With a function that another process can have."""
        return self._lasting() | {"function": portable(self.function, self.inner)}

    def __deepcopy__(self, memo: dict[int, Any]) -> ListMask:
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(copy.deepcopy(self._lasting(), memo))
        return new

    def _lasting(self) -> dict[str, Any]:
        return self.__dict__ | {"_blocks": None, "_cache": {}}


def two_sizes(sizes: tuple[int, ...]) -> tuple[int, int]:
    """(batch, heads) of a mask whose lists may have come without."""
    return (sizes[0], sizes[1]) if len(sizes) == 2 else (1, math.prod(sizes))


def _stamp(traced: Traced | None) -> tuple[Any, ...]:
    """Changes whenever a traced function does, or what it has captured."""
    if traced is None:
        return ()
    return (traced.program, traced.binding.numbers, *map(id, traced.binding.captures), *versions(traced))
