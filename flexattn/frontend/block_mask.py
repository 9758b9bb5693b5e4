"""BlockMask: which blocks of the score matrix attention visits, with torch's attribute names, and the functions that make one.

Reads a mask function (or block lists) and lengths; makes tile maps for kernels and torch's lists for whoever asks. The one
idea: a mask made from a function *is* that function, traced once, and can be cut into tiles of any size; a mask made from
lists is the lists, and its function counts in the partial blocks alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from flexattn.errors import (
    DeviceError,
    MaskFunctionError,
    MaskTypeError,
    OptionError,
    ShapeError,
    StaleMaskError,
    UnsupportedError,
)
from flexattn.frontend import algebra, display
from flexattn.frontend.block_lists import (
    crop_blocks,
    cuts_full_block,
    merge,
    read_lists,
    retile,
    write_lists,
    write_order,
)
from flexattn.frontend.eager import eager_only
from flexattn.frontend.expr import DEP_B, DEP_H
from flexattn.frontend.mask_functions import (
    MaskMod,
    and_masks,
    noop_mask,
    not_mask,
    or_masks,
    shifted_function,
    with_tensors,
)
from flexattn.frontend.picks import Pick, RowPick, pick, picked_length, positions
from flexattn.frontend.program import Binding, Traced
from flexattn.frontend.snapshot import (
    dense,
    device_for,
    indexed,
    packed,
    rebound,
    trace_mask,
    unpacked,
    version,
    versions,
)
from flexattn.frontend.source import function_name
from flexattn.frontend.spans import cover
from flexattn.frontend.tile_map import TileMap, build_tile_map
from flexattn.frontend.trace import mod_kind, trace

__all__ = ["BlockMask", "and_masks", "create_block_mask", "create_mask", "noop_mask", "not_mask", "or_masks"]

DEFAULT_BLOCK_SIZE = 128
_LIST_NAMES = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
    "dq_write_order",
    "dq_write_order_full",
)
SMALLEST_TILE = 16  # of the kernels: a list mask whose blocks are no multiple runs as a predicate


class _List:
    """One of torch's list attributes: written when first read; assigning one makes the mask a list mask."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, mask: BlockMask | None, owner: type) -> Any:
        return self if mask is None else mask._list(self.name)

    def __set__(self, mask: BlockMask, value: Any) -> None:
        mask._replace_list(self.name, value)


class BlockMask:
    """A block-sparse attention mask.

    Two kinds. A *predicate* mask comes from `create_block_mask`: the traced mask function, two lengths and the captured tensors
    as they were then; kernels cut it into whatever tiles they like, and BLOCK_SIZE only fixes torch's list attributes, which
    are written when somebody reads them. A *list* mask comes from `from_kv_blocks`, from torch, or from assigning `mask_mod`,
    `seq_lengths` or a list of a predicate mask: it keeps its full blocks, and in its partial blocks what `mask_mod` keeps.

    A predicate mask is a snapshot: after a captured tensor has been written to, it raises StaleMaskError. A list mask, as in
    torch, follows its lists and the tensors its function captures.

    Args:
        seq_lengths: (q_len, kv_len).
        kv_num_blocks, kv_indices: int32 `[B, H, rows]` and `[B, H, rows, n]`, the partial blocks of each row.
        full_kv_num_blocks, full_kv_indices: the same for blocks kept whole, or None.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the transposed lists, or None.
        BLOCK_SIZE: tokens of a block, (q, kv).
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, for partial blocks.

    Raises:
        MaskFunctionError: kv_indices has fewer than two dimensions.
        MaskTypeError: only one of a pair of lists is given.

    Example:
        >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024, device="cpu")
        >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
        ([[[1, 1, 1, 1, 1, 1, 1, 1]]], [[[0, 1, 2, 3, 4, 5, 6, 7]]])

    Source: the attributes are those of torch.nn.attention.flex_attention.BlockMask.
    """

    kv_num_blocks, kv_indices = _List(), _List()
    full_kv_num_blocks, full_kv_indices = _List(), _List()
    q_num_blocks, q_indices = _List(), _List()
    full_q_num_blocks, full_q_indices = _List(), _List()
    dq_write_order, dq_write_order_full = _List(), _List()
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    _sizes: tuple[int, ...]  # leading dimensions: (B, H) of every mask but lists that came without

    def __init__(
        self,
        seq_lengths: tuple[int, int],
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        q_num_blocks: Tensor | None = None,
        q_indices: Tensor | None = None,
        full_q_num_blocks: Tensor | None = None,
        full_q_indices: Tensor | None = None,
        BLOCK_SIZE: tuple[int, int] = (DEFAULT_BLOCK_SIZE, DEFAULT_BLOCK_SIZE),
        mask_mod: MaskMod = noop_mask,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | None = None,
        dq_kv_order_spt: bool | None = None,
    ) -> None:
        if kv_num_blocks is None or kv_indices is None:
            raise MaskTypeError("kv_num_blocks and kv_indices must be provided")
        if kv_indices.dim() < 2:
            raise MaskFunctionError(
                "BlockMask must have at least 2 dimensions", given=f"kv_indices of shape {tuple(kv_indices.shape)}"
            )
        for name, count, index in (
            ("kv", full_kv_num_blocks, full_kv_indices),
            ("q", full_q_num_blocks, full_q_indices),
        ):
            if (count is None) != (index is None):
                raise MaskTypeError(f"full_{name}_num_blocks and full_{name}_indices must be both provided or omitted")
        if dq_write_order_full is not None and dq_write_order is None:
            raise OptionError("dq_write_order_full requires dq_write_order")
        self._start(mask_mod, seq_lengths, _pair(BLOCK_SIZE), is_list=True)
        self._sizes = tuple(kv_indices.shape[:-2])
        self._lists |= {
            "kv_num_blocks": kv_num_blocks,
            "kv_indices": kv_indices,
            "full_kv_num_blocks": full_kv_num_blocks,
            "full_kv_indices": full_kv_indices,
            "q_num_blocks": q_num_blocks,
            "q_indices": q_indices,
            "full_q_num_blocks": full_q_num_blocks,
            "full_q_indices": full_q_indices,
            "dq_write_order": dq_write_order,
            "dq_write_order_full": dq_write_order_full,
        }
        self.dq_kv_order, self.dq_kv_order_spt = dq_kv_order, dq_kv_order_spt

    def _start(self, mask_mod: MaskMod, seq_lengths: Sequence[int], block: tuple[int, int], *, is_list: bool) -> None:
        self._function, self._block, self._is_list = mask_mod, block, is_list
        self._lengths = (seq_lengths[0], seq_lengths[1])
        self._sizes = (1, 1)
        self._device: torch.device | None = None
        self._traced: Traced | None = None  # of a predicate mask; None keeps everything
        self._versions: tuple[int | None, ...] = ()
        self._separate_full = self._transposes = True
        self._orders_writes = False  # whether dq_write_order exists
        self._lists: dict[str, Tensor | None] = {}
        self._blocks: TileMap | None = None  # of a list mask made from a predicate
        self._cache: dict[Any, Any] = {}
        self.dq_kv_order, self.dq_kv_order_spt = None, None

    # ------------------------------------------------------------------------------------------------ making one
    @classmethod
    def _predicate(
        cls,
        traced: Traced | None,
        mask_mod: MaskMod,
        *,
        sizes: tuple[int, int],
        lengths: tuple[int, int],
        device: torch.device,
        block: tuple[int, int],
    ) -> BlockMask:
        if min(*sizes, *lengths) < 0 or min(block) < 1:
            raise OptionError(
                "sizes must not be negative and BLOCK_SIZE must be positive", given=(sizes, lengths, block)
            )
        self = cls.__new__(cls)
        self._start(mask_mod, lengths, block, is_list=False)
        self._sizes, self._device = sizes, device
        self._traced = None if algebra.keeps_all(traced) else traced
        self._versions = versions(self._traced)
        return self

    def _derived(self, traced: Traced | None, mask_mod: MaskMod, **changes: Any) -> BlockMask:
        """A predicate mask like this one, with another predicate or other sizes."""
        assert len(self._sizes) == 2
        options: dict[str, Any] = {
            "sizes": self._sizes,
            "lengths": self._lengths,
            "device": self.device,
            "block": self._block,
        }
        new = type(self)._predicate(traced, mask_mod, **(options | changes))
        new._separate_full, new._transposes = self._separate_full, self._transposes
        new._orders_writes, new.dq_kv_order_spt = self._orders_writes, self.dq_kv_order_spt
        return new

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: MaskMod,
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """The predicate mask of a function, as `mask_mod=` in a call makes it."""
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device)

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> BlockMask:
        """A list mask.

        Args:
            kv_num_blocks: int32 [B, H, rows], partial blocks per row.
            kv_indices: int32 [B, H, rows, n], which ones; n may be less than all of them if seq_lengths is given.
            full_kv_num_blocks, full_kv_indices: the same for blocks that need no mask function.
            BLOCK_SIZE: tokens of a block, one number or (q, kv).
            mask_mod: applied in partial blocks; None keeps them whole.
            seq_lengths: (q_len, kv_len); by default what the lists span.
            compute_q_blocks: False leaves q_indices None: such a mask has no backward.

        Returns:
            The mask; the transposed lists are written when read.
        """
        if not isinstance(dq_kv_order, (bool, Tensor, type(None))):
            raise OptionError("dq_kv_order must be a bool, Tensor, or None", given=type(dq_kv_order).__name__)
        block = _pair(BLOCK_SIZE)
        if seq_lengths is None and kv_indices.dim() >= 2:
            seq_lengths = (kv_indices.shape[-2] * block[0], kv_indices.shape[-1] * block[1])
        mask = cls(
            seq_lengths or (0, 0),
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            BLOCK_SIZE=block,
            mask_mod=noop_mask if mask_mod is None else mask_mod,
            dq_write_order=dq_write_order,
            dq_write_order_full=dq_write_order_full,
            dq_kv_order=dq_kv_order if isinstance(dq_kv_order, Tensor) else None,
            dq_kv_order_spt=dq_kv_order if isinstance(dq_kv_order, bool) else None,
        )
        mask._transposes = compute_q_blocks
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            del mask._lists[name]
        return mask

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """torch's BlockMask as a list mask that shares its tensors.

        Raises:
            MaskFunctionError: it was sliced, so torch has replaced its mask function by one that only raises.
        """
        if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
            raise MaskFunctionError(
                "Cannot use mask_mod from a sliced BlockMask",
                hint="sliced.mask_mod = a function made from the unsliced mask's mask_mod",
            )
        names = [n for n in _LIST_NAMES if hasattr(block_mask, n)]
        lists: dict[str, Any] = {n: getattr(block_mask, n) for n in names}
        lists |= {n: getattr(block_mask, n, None) for n in ("dq_kv_order", "dq_kv_order_spt")}
        lists |= {"BLOCK_SIZE": tuple(block_mask.BLOCK_SIZE), "mask_mod": block_mask.mask_mod}
        return cls(tuple(block_mask.seq_lengths), **lists)

    # ------------------------------------------------------------------------------------------------ what it is
    @property
    def is_list(self) -> bool:
        """Whether block lists, not the function alone, say what is kept."""
        return self._is_list

    @property
    def mask_mod(self) -> MaskMod:
        """The mask function. Assigning one keeps the present blocks and makes this a list mask, as in torch."""
        return self._function

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod) -> None:
        self._become_list()
        self._function = mask_mod

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(q_len, kv_len). Assigning keeps the present blocks and makes this a list mask, as in torch."""
        return self._lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._become_list()
        self._lengths = (lengths[0], lengths[1])

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """Tokens of a block of the lists, (q, kv)."""
        return self._block

    @BLOCK_SIZE.setter
    def BLOCK_SIZE(self, block: int | tuple[int, int]) -> None:
        self._become_list()
        self._block = _pair(block)

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, q_len, kv_len)."""
        return self._sizes + self._lengths

    @property
    def device(self) -> torch.device:
        """Where the lists are, or will be."""
        if self._device is None:
            counts = self._lists["kv_num_blocks"]
            assert counts is not None
            return counts.device
        return self._device

    @property
    def traced(self) -> Traced | None:
        """The mask that partial tiles must apply; None if there is nothing to apply."""
        if not self._is_list:
            return self._traced
        inner = self._inner()
        return self._listed(inner) if self._runs_as_predicate(inner) else inner

    def legal_tile(self, q_tile: int, kv_tile: int) -> bool:
        """Whether `tile_map` can cut this mask into such tiles: any if it is (or runs as) a predicate, else divisors."""
        if not self._is_list or self._runs_as_predicate(self._inner()):
            return True
        return self._block[0] % q_tile == 0 and self._block[1] % kv_tile == 0

    def tile_map(self, q_block: int, kv_block: int) -> TileMap:
        """The tiles to visit, for tiles of q_block x kv_block tokens; cached.

        Raises:
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.
            ShapeError: the tile does not divide a list mask's BLOCK_SIZE, or its lists are too short for its lengths.
        """
        if self._is_list:
            return self._list_tile_map(q_block, kv_block)
        self._check_current()
        key = ("map", q_block, kv_block)
        if key in self._cache:
            found: TileMap = self._cache[key]
            return found
        built = self._build(self._traced, q_block, kv_block)
        if None not in self._versions:  # tensors made in inference mode have no version: nothing of theirs is reused
            self._cache[key] = built
        return built

    def _build(self, traced: Traced | None, q_block: int, kv_block: int) -> TileMap:
        batch, heads = self._sizes if len(self._sizes) == 2 else (1, 1)
        q_len, kv_len = self._lengths
        return build_tile_map(
            traced,
            batch=batch,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len,
            q_block=q_block,
            kv_block=kv_block,
            device=self.device,
        )

    def _check_current(self) -> None:
        for slot, (was, now) in enumerate(zip(self._versions, versions(self._traced), strict=True)):
            if was != now:
                assert self._traced is not None
                shape = tuple(self._traced.binding.captures[slot].shape)
                raise StaleMaskError(
                    f"a tensor captured by mask_mod {self._traced.program.name} has changed since the BlockMask was created",
                    given=f"captured tensor {slot} of shape {shape}, version {was} then, {now} now",
                    hint="create_block_mask again, or pass mask_mod= to flex_attention, which rebuilds the mask",
                )

    # ------------------------------------------------------------------------------------------------ list masks
    def _inner(self) -> Traced | None:
        """The function of a list mask, traced with what it captures now."""
        return trace_mask(self._function)

    def _become_list(self) -> None:
        if not self._is_list:
            self._blocks = self.tile_map(*self._block)
            self._is_list = True
            self._traced, self._versions = None, ()
            self._cache.clear()

    def _block_map(self) -> TileMap:
        """The listed blocks, as tiles that are whole blocks."""
        if self._blocks is not None:
            return self._blocks
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        lists = [self._lists[n] for n in names]
        cols = -(-self._lengths[1] // self._block[1])
        stamp = (tuple(version(t) for t in lists if t is not None), tuple(map(id, lists)), self._block, cols)
        if self._cache.get("blocks_of") != stamp or None in stamp[0]:
            counts, indices, full_counts, full_indices = lists
            assert counts is not None and indices is not None
            cols = max(cols, indices.shape[-1])
            self._cache = {
                "blocks_of": stamp,
                "blocks": read_lists(counts, indices, full_counts, full_indices, block=self._block, cols=cols),
            }
        found: TileMap = self._cache["blocks"]
        return found

    def _runs_as_predicate(self, inner: Traced | None) -> bool:
        """Whether tiles of lists will not do: no tile divides the blocks, or a full block is cut, where `mask_mod` must not count."""
        if any(b % SMALLEST_TILE and n > b for b, n in zip(self._block, self._lengths, strict=True)):
            return True
        if inner is None:
            return False
        blocks, (q_len, kv_len) = self._block_map(), self._lengths
        key = ("cut", q_len, kv_len)
        if key not in self._cache:
            ragged = q_len % self._block[0] or kv_len % self._block[1]
            self._cache[key] = bool(ragged) and cuts_full_block(blocks, q_len=q_len, kv_len=kv_len)
        return bool(self._cache[key])

    def _listed(self, inner: Traced | None) -> Traced:
        """The whole list mask as a predicate over two bool tables."""
        blocks = self._block_map()
        if "tables" not in self._cache:
            shape = (blocks.batch, blocks.heads, blocks.rows, blocks.cols)
            self._cache["tables"] = tuple(cover(s, blocks.cols).reshape(shape) for s in (blocks.full, blocks.partial))
        full, partial = self._cache["tables"]
        return algebra.listed(full, partial, block=self._block, inner=inner)

    def _list_tile_map(self, q_block: int, kv_block: int) -> TileMap:
        inner, blocks = self._inner(), self._block_map()
        if blocks.rows * self._block[0] < self._lengths[0]:
            raise ShapeError(
                "seq_lengths reach past the block lists",
                given=f"q_len {self._lengths[0]} and {blocks.rows} rows of {self._block[0]}",
            )
        as_predicate = self._runs_as_predicate(inner)
        if not as_predicate and (self._block[0] % q_block or self._block[1] % kv_block):
            raise ShapeError(
                "Q and KV block size must be divisible by BLOCK_M and BLOCK_N",
                given=f"BLOCK_SIZE {self._block} and a tile of ({q_block}, {kv_block})",
                hint="a tile that divides BLOCK_SIZE, or block_mask.as_predicate()",
            )
        traced = self._listed(inner) if as_predicate else inner
        key = ("map", q_block, kv_block, self._lengths)
        stamp = (
            (traced.program, traced.binding.numbers, tuple(map(id, traced.binding.captures)), versions(traced))
            if traced
            else ()
        )
        if self._cache.get((key, "of")) != stamp or stamp and None in stamp[3]:
            q_len, kv_len = self._lengths
            self._cache[key] = (
                self._build(traced, q_block, kv_block)
                if as_predicate
                else retile(blocks, q_len=q_len, kv_len=kv_len, q_tile=q_block, kv_tile=kv_block, mask=traced)
            )
            self._cache[key, "of"] = stamp
        found: TileMap = self._cache[key]
        return found

    def as_predicate(self) -> BlockMask:
        """The same mask as a predicate mask, for any tile size; lists become two captured bool tables."""
        if not self._is_list:
            return self
        return BlockMask._predicate(
            self._listed(self._inner()),
            self._function,
            sizes=self._full_sizes(),
            lengths=self._lengths,
            device=self.device,
            block=self._block,
        )

    # ------------------------------------------------------------------------------------------------ torch's lists
    def _list(self, name: str) -> Tensor | None:
        if name in self._lists:
            return self._lists[name]
        if name.startswith("dq_"):
            self._lists.update(self._write_orders())
        else:
            self._lists.update(self._written(transposed="q_" in name.replace("kv_", ""), full=name.startswith("full")))
        found = self._lists[name]
        if not self._is_list and None in self._versions:
            self._lists.clear()
        return found

    def _written(self, *, transposed: bool, full: bool) -> dict[str, Tensor | None]:
        """A pair of lists from the block map."""
        side, kind = "q" if transposed else "kv", "full_" if full else ""
        names = f"{kind}{side}_num_blocks", f"{kind}{side}_indices"
        stored = self._is_list and self._blocks is None
        no_full = self._lists.get("full_kv_num_blocks") is None if stored else not self._separate_full
        if (full and no_full) or (transposed and not self._transposes):
            return dict.fromkeys(names)
        if not self._is_list:
            self._check_current()
        blocks = self._block_map() if self._is_list else self.tile_map(*self._block)
        if not self._separate_full and not stored:
            blocks = merge(blocks)
        spans = getattr(blocks, ("full" if full else "partial") + ("_t" if transposed else ""))
        lines, cells = (blocks.cols, blocks.rows) if transposed else (blocks.rows, blocks.cols)
        groups, shape = (blocks.batch, blocks.heads), self._full_sizes()
        pair = write_lists(spans, groups=groups, lines=lines, cells=cells, shape=shape)
        drop = 2 - len(self._sizes)
        return dict(zip(names, (x[(0,) * drop] if drop > 0 else x for x in pair), strict=True))

    def _write_orders(self) -> dict[str, Tensor | None]:
        if not self._orders_writes:
            return {"dq_write_order": None, "dq_write_order_full": None}
        visited, orders = self.to_dense(), {}
        for kind, name in (("", "dq_write_order"), ("full_", "dq_write_order_full")):
            rows = self._list(f"{kind}q_indices")
            orders[name] = None if rows is None else write_order(visited, rows, descending=bool(self.dq_kv_order_spt))
        return orders

    def _replace_list(self, name: str, value: Tensor | None) -> None:
        for each in _LIST_NAMES:
            self._list(each)
        self._become_list()
        self._blocks, self._device = None, None
        self._lists[name] = value

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The attributes as a tuple: lengths, lists, orders, BLOCK_SIZE, mask_mod; lengths and sizes apart if `flatten`."""
        lists = tuple(getattr(self, n) for n in _LIST_NAMES)
        middle = (*lists, self.dq_kv_order, self.dq_kv_order_spt)
        if flatten:
            return (*self._lengths, *middle, *self._block, self.mask_mod)
        return (self._lengths, *middle, self._block, self.mask_mod)

    def numel(self) -> int:
        """Pairs of the whole mask, kept or not."""
        return math.prod(self.shape)

    def to_dense(self) -> Tensor:
        """1 for every block that is visited, else 0: int32 `[B, H, rows, cols]`, blocks and not tokens."""
        blocks = self._present()
        visited = (blocks.dense() > 0).to(torch.int32)
        visited = visited.expand(*self._full_sizes(), -1, -1).contiguous()
        return visited.reshape(*self._sizes, blocks.rows, blocks.cols)

    def to_mask(self) -> Tensor:
        """The kept pairs: bool `[B, H, q_len, kv_len]`. Every pair is evaluated; for small masks and for tests."""
        mask = self if not self._is_list else self.as_predicate()
        kept = dense(mask._traced, self._full_sizes(), self._lengths, self.device)
        return kept.reshape(self.shape)

    def sparsity(self) -> float:
        """Percentage of blocks that are skipped, between 0 and 100."""
        blocks = self._present()
        total = blocks.grid.groups * blocks.rows * blocks.cols
        visited = blocks.full.tiles() + blocks.partial.tiles()
        return 100.0 * (1.0 - visited / total) if total else 0.0

    def density(self) -> float:
        """The share of pairs that is kept, between 0 and 1, exactly; counted on first use."""
        return self._present().density()

    def _full_sizes(self) -> tuple[int, int]:
        return (self._sizes[0], self._sizes[1]) if len(self._sizes) == 2 else (1, math.prod(self._sizes))

    def _present(self) -> TileMap:
        """The map at BLOCK_SIZE, within the lengths."""
        return self.tile_map(*self._block)

    # ------------------------------------------------------------------------------------------------ other masks
    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some batches, heads and rows of blocks.

        An int keeps its dimension (of size 1); slices, integer and bool tensors and lists work too, each axis by itself.
        Unlike torch's, the result keeps its mask function, moved with the rows: row r of `mask[:, :, i:]` is row
        `i * BLOCK_SIZE[0] + r` of `mask`, and its `mask_mod` counts from 0. To decode one query at position p from a mask
        over the whole sequence, torch's idiom works too, with the unsliced mask's function:

            row = mask[:, :, p // mask.BLOCK_SIZE[0]]
            row.mask_mod = lambda b, h, q_idx, kv_idx: mask.mask_mod(b, h, q_idx + p, kv_idx)
            row.seq_lengths = (1, mask.seq_lengths[1])

        Raises:
            CaptureIndexError: a position is out of range.
            ShapeError: more than three indices, or lists without batch and head dimensions.
        """
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3 or len(self._sizes) != 2:
            raise ShapeError(
                "a BlockMask [B, H, rows] takes up to three indices",
                given=f"{len(index)} for {len(self._sizes)} leading dimensions",
            )
        if self.dq_kv_order is not None:
            raise UnsupportedError(
                "Slicing BlockMask with tensor dq_kv_order is not supported yet", hint="a mask without it"
            )
        rows = -(-self._lengths[0] // self._block[0])
        if self._is_list:
            rows = self._list("kv_num_blocks").shape[-1]  # type: ignore[union-attr]
        at = [positions(i, n) for i, n in zip((*index, *(slice(None),) * 3)[:3], (*self._sizes, rows), strict=True)]
        q_len, limit = picked_length(at[2], self._block[0], self._lengths[0])
        b, h, block = (pick(x, self.device) for x in at)
        q = RowPick(block, self._block[0], limit)
        function = shifted_function(self._function, b, h, q)
        if self._is_list:
            return self._sliced_lists(at, function, (q_len, self._lengths[1]))
        self._check_current()
        traced = self._traced
        deps = traced.program.body.deps if traced is not None else 0
        traced = algebra.moved(traced, b=b if deps & DEP_B else Pick(), h=h if deps & DEP_H else Pick(), q=q)
        return self._derived(traced, function, sizes=(len(at[0]), len(at[1])), lengths=(q_len, self._lengths[1]))

    def _sliced_lists(self, at: list[Sequence[int]], function: MaskMod, lengths: tuple[int, int]) -> BlockMask:
        def cut(name: str) -> Tensor | None:
            tensor = self._list(name)
            for dim, wanted in enumerate(at):
                if tensor is not None:
                    tensor = tensor.index_select(dim, torch.tensor(list(wanted), device=tensor.device).long())
            return tensor

        options: dict[str, Any] = {n: cut(n) for n in _LIST_NAMES[:4]}
        options |= {"BLOCK_SIZE": self._block, "mask_mod": function, "seq_lengths": lengths}
        mask = BlockMask.from_kv_blocks(**options, compute_q_blocks=self._has_transposed())
        mask._orders_writes, mask.dq_kv_order_spt = self._orders_writes, self.dq_kv_order_spt
        return mask

    def _has_transposed(self) -> bool:
        return self._transposes and not ("q_indices" in self._lists and self._lists["q_indices"] is None)

    def crop(self, q_len: int, kv_len: int) -> BlockMask:
        """The upper left corner of the mask; its function is the same. `_adjust` is torch's name for it.

        Raises:
            ShapeError: a length is larger than the mask's: a mask cannot grow.
        """
        if q_len > self._lengths[0] or kv_len > self._lengths[1]:
            raise ShapeError(
                "a BlockMask can only be cropped",
                given=f"({q_len}, {kv_len}) from {self._lengths}",
                hint="create_block_mask",
            )
        if self.dq_kv_order is not None:
            raise UnsupportedError(
                "Adjusting BlockMask with tensor dq_kv_order is not supported yet", hint="a mask without it"
            )
        if not self._is_list:
            self._check_current()
            return self._derived(self._traced, self._function, lengths=(q_len, kv_len))
        rows, cols = -(-q_len // self._block[0]), -(-kv_len // self._block[1])
        blocks = self._block_map()
        corner = crop_blocks(blocks, rows, cols)
        new = BlockMask.__new__(BlockMask)
        new._start(self._function, (q_len, kv_len), self._block, is_list=True)
        new._sizes, new._device, new._blocks = self._sizes, self.device, corner
        new._separate_full = self._list("full_kv_num_blocks") is not None
        new._transposes, new._orders_writes, new.dq_kv_order_spt = (
            self._has_transposed(),
            self._orders_writes,
            self.dq_kv_order_spt,
        )
        return new

    _adjust = crop

    def expand(self, batch: int, heads: int) -> BlockMask:
        """The mask for sizes that its own broadcast to; needed where a function reads b or h and the mask was made for one.

        Raises:
            ShapeError: a size of the mask is neither 1 nor the one asked for.
        """
        sizes = self._full_sizes()
        if any(have not in (1, want) for have, want in zip(sizes, (batch, heads), strict=True)):
            raise ShapeError("a BlockMask's batch and heads must be 1 or equal", given=f"{sizes} for {(batch, heads)}")
        deps = self._traced.program.body.deps if self._traced is not None else 0
        grows = (deps & DEP_B and batch != sizes[0]) or (deps & DEP_H and heads != sizes[1])
        if self._is_list or not grows:
            return self
        self._check_current()
        key = ("expanded", batch, heads)
        if key not in self._cache:
            self._cache[key] = self._derived(self._traced, self._function, sizes=(batch, heads))
        found: BlockMask = self._cache[key]
        return found

    def combine(self, mask_mod: MaskMod) -> BlockMask:
        """The pairs that both this mask and a further mask function keep, as a predicate mask."""
        extra, mask = trace_mask(mask_mod), self.as_predicate()
        mask._check_current()
        return mask._derived(algebra.both(mask._traced, extra), and_masks(self._function, mask_mod))

    def __and__(self, other: BlockMask) -> BlockMask:
        """Pairs that both masks keep."""
        a, b, sizes = self._aligned(other)
        return a._derived(algebra.both(a._traced, b._traced), and_masks(a._function, b._function), sizes=sizes)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Pairs that at least one of the masks keeps."""
        a, b, sizes = self._aligned(other)
        return a._derived(algebra.either(a._traced, b._traced), or_masks(a._function, b._function), sizes=sizes)

    def __invert__(self) -> BlockMask:
        """Pairs that the mask drops."""
        mask = self.as_predicate()
        mask._check_current()
        return mask._derived(algebra.opposite(mask._traced), not_mask(self._function))

    def _aligned(self, other: BlockMask) -> tuple[BlockMask, BlockMask, tuple[int, int]]:
        if not isinstance(other, BlockMask):
            raise MaskTypeError(
                "masks combine with masks", given=type(other).__name__, hint="mask.combine(mask_mod) for a function"
            )
        a, b = self.as_predicate(), other.as_predicate()
        pairs = list(zip(a._full_sizes(), b._full_sizes(), strict=True))
        if a._lengths != b._lengths or any(1 not in p and p[0] != p[1] for p in pairs):
            raise ShapeError("masks of different sizes cannot be combined", given=(a.shape, b.shape))
        if a.device != b.device:
            raise DeviceError(
                "masks on different devices cannot be combined", given=(a.device, b.device), hint="mask.to(device)"
            )
        a._check_current()
        b._check_current()
        return a, b, (_larger(pairs[0]), _larger(pairs[1]))

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask with its lists, and the tensors its function captures, on another device."""
        move = lambda t: t.to(device)
        function = with_tensors(self._function, move)
        if not self._is_list:
            self._check_current()
            return self._derived(rebound(self._traced, move), function, device=indexed(torch.device(device)))
        options: dict[str, Any] = {n: None if (x := self._list(n)) is None else x.to(device) for n in _LIST_NAMES}
        options["dq_kv_order"] = self.dq_kv_order.to(device) if self.dq_kv_order is not None else None
        options |= {"BLOCK_SIZE": self._block, "mask_mod": function, "dq_kv_order_spt": self.dq_kv_order_spt}
        return BlockMask(self._lengths, **options)

    # ------------------------------------------------------------------------------------------------ as text
    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The visited blocks as characters, at most grid_size of them (-1: one per block), of the first `limit` heads."""
        return display.block_text(self._present(), sizes=self._sizes, grid_size=grid_size, limit=limit)

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%, \n{self.to_string().strip()}\n)"

    def __repr__(self) -> str:
        shapes = (f"    {n}={_shape(self, n)},\n" for n in _LIST_NAMES[:8])
        name = getattr(self.mask_mod, "__name__", None) or function_name(self.mask_mod)
        return (
            f"BlockMask(\n{''.join(shapes)}    BLOCK_SIZE={self._block},\n    shape={self.shape},\n"
            f"    sparsity={self.sparsity():.2f}%,\n    mask_mod={name}\n)"
        )

    def _repr_html_(self) -> str:
        return display.html(self)

    # ------------------------------------------------------------------------------------------------ moving around
    def __getstate__(self) -> dict[str, Any]:
        """Everything but what can be made again: tile maps, and the lists of a predicate mask."""
        state = dict(self.__dict__)
        if not self._is_list:
            self._check_current()
            state["_lists"] = {}
            state["_traced"] = packed(self._traced)
        state["_cache"] = {}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._is_list:
            self._traced = unpacked(state["_traced"])
            self._versions = versions(self._traced)

    def _flatten(self) -> tuple[list[Any], Any]:
        """pytree: the leaves are the lists of a list mask, or a marker of a predicate mask's device; then the captures."""
        inner = self._inner() if self._is_list else self._traced
        captures = inner.binding.captures if inner is not None else ()
        lists = {n: x for n in _LIST_NAMES if (x := self._list(n)) is not None} if self._is_list else {}
        head = list(lists.values()) or [torch.empty(0, device=self.device)]
        return [*head, *captures], _Context(self, tuple(lists), inner)

    def _flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = self._flatten()
        names = context.names or ("device",)
        names = (*names, *(f"capture_{n}" for n in range(len(leaves) - len(names))))
        return [(pytree.GetAttrKey(n), x) for n, x in zip(names, leaves, strict=True)], context

    @classmethod
    def _unflatten(cls, leaves: Any, context: Any) -> BlockMask:
        return context.rebuild(list(leaves))  # type: ignore[no-any-return]


class _Context:
    """What a mask is apart from its tensors. Two are equal if they have the same structure, numbers and sizes."""

    def __init__(self, mask: BlockMask, names: tuple[str, ...], inner: Traced | None) -> None:
        self.mask, self.names, self.inner = mask, names, inner
        program = (inner.program, inner.binding.numbers) if inner is not None else None
        order = (mask._separate_full, mask._transposes, mask._orders_writes, mask.dq_kv_order_spt)
        self.key = (mask.is_list, mask._lengths, mask._block, mask._sizes, order, names, program)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def rebuild(self, leaves: list[Any]) -> BlockMask:
        """The mask with other leaves, which need not be tensors."""
        mask, count = self.mask, max(len(self.names), 1)
        captures = tuple(leaves[count:])
        old = self.inner.binding.captures if self.inner is not None else ()
        new = {id(a): b for a, b in zip(old, captures, strict=True) if isinstance(b, Tensor)}
        function = with_tensors(mask._function, lambda t: new.get(id(t), t))
        if mask.is_list:
            lists = dict.fromkeys(_LIST_NAMES) | dict(zip(self.names, leaves, strict=False))
            out = BlockMask.__new__(BlockMask)
            out._start(function, mask._lengths, mask._block, is_list=True)
            out._lists, out._sizes = lists, mask._sizes
        else:
            traced = (
                None
                if self.inner is None
                else Traced(self.inner.program, Binding(captures, self.inner.binding.numbers))
            )
            device = leaves[0].device if isinstance(leaves[0], Tensor) else mask.device
            out = mask._derived(traced, function, device=device)
        out._transposes, out.dq_kv_order, out.dq_kv_order_spt = mask._transposes, mask.dq_kv_order, mask.dq_kv_order_spt
        return out


pytree.register_pytree_node(
    BlockMask,
    BlockMask._flatten,
    BlockMask._unflatten,
    flatten_with_keys_fn=BlockMask._flatten_with_keys,
    serialized_type_name="flexattn.BlockMask",
)


# ------------------------------------------------------------------------------------------------------ small parts
def _pair(block: int | Sequence[int] | None) -> tuple[int, int]:
    """BLOCK_SIZE as (q, kv)."""
    block = DEFAULT_BLOCK_SIZE if block is None else block
    q, kv = (block, block) if isinstance(block, int) else block
    if q < 1 or kv < 1:
        raise OptionError("BLOCK_SIZE must be positive", given=(q, kv))
    return int(q), int(kv)


def _larger(pair: tuple[int, int]) -> int:
    return pair[1] if pair[0] == 1 else pair[0]


def _shape(mask: BlockMask, name: str) -> torch.Size | None:
    """The shape of a list, without writing it."""
    if mask.is_list or not mask._separate_full and name.startswith("full"):
        found = mask._list(name)
        return None if found is None else found.shape
    rows, cols = (-(-n // b) for n, b in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True))
    lines, cells = (cols, rows) if "q_" in name.replace("kv_", "") else (rows, cols)
    return torch.Size((*mask._sizes, lines) if name.endswith("num_blocks") else (*mask._sizes, lines, cells))


# ---------------------------------------------------------------------------------------------------------- makers
@eager_only
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

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, True where a pair is kept; pointwise torch operations on scalars.
        B, H: batch size and query heads, or None where the mask is the same for all.
        Q_LEN, KV_LEN: lengths in tokens.
        device: by default that of the captured tensors, else the current accelerator, else the CPU.
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
        DeviceError: a captured tensor is on another device.

    Example:
        >>> create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, 4, None, 300, 300, device="cpu").shape
        (4, 1, 300, 300)
    """
    make = torch.compiler.disable(_create) if torch.compiler.is_compiling() else _create  # type: ignore[no-untyped-call]
    sizes = (1 if B is None else B, 1 if H is None else H)
    return make(
        mask_mod, sizes, (Q_LEN, KV_LEN), device, BLOCK_SIZE, separate_full_blocks, compute_dq_write_order, dq_kv_order
    )


def _create(
    mask_mod: MaskMod,
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device | str | None,
    block: int | tuple[int, int] | None,
    separate_full: bool,
    orders_writes: bool,
    descending: bool,
) -> BlockMask:
    if mod_kind(mask_mod) != "mask":
        raise MaskTypeError(
            "create_block_mask requires a mask_mod function (b, h, q_idx, kv_idx)", given=function_name(mask_mod)
        )
    if not isinstance(descending, bool):
        raise OptionError("dq_kv_order must be a bool when using create_block_mask", given=type(descending).__name__)
    traced = trace_mask(mask_mod)
    mask = BlockMask._predicate(
        traced, mask_mod, sizes=sizes, lengths=lengths, device=device_for(traced, device), block=_pair(block)
    )
    mask._separate_full, mask._orders_writes = separate_full, orders_writes
    mask.dq_kv_order_spt = descending if orders_writes else None
    return mask


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
    make = torch.compiler.disable(_create_dense) if torch.compiler.is_compiling() else _create_dense  # type: ignore[no-untyped-call]
    return make(mod_fn, (1 if B is None else B, 1 if H is None else H), (Q_LEN, KV_LEN), device)


def _create_dense(
    mod_fn: MaskMod, sizes: tuple[int, int], lengths: tuple[int, int], device: torch.device | str | None
) -> Tensor:
    is_score = mod_kind(mod_fn) == "score"
    traced = trace(mod_fn, "score") if is_score else trace_mask(mod_fn)
    return dense(traced, sizes, lengths, device_for(traced, device), score=is_score)
