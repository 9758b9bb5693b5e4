"""Torch's list attributes of a block mask: kv_num_blocks, kv_indices and the eight others.

Reads the block map of a mask; makes the lists, each when it is first read. The one idea: a list is a view of the mask until
somebody assigns one; from then on the lists are the mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, DTypeError, MaskFunctionError, MaskTypeError, OptionError
from flexattn.frontend.block_lists import merge, write_lists, write_order
from flexattn.frontend.list_mask import KvLists, ListMask, two_sizes
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.source import function_name

KV_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
Q_LISTS = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
LIST_NAMES = (*KV_LISTS, *Q_LISTS, "dq_write_order", "dq_write_order_full")


DEFAULT_BLOCK_SIZE = 128


class ListStyle(NamedTuple):
    """Which of the lists exist; the others are None."""

    separate_full: bool = True  # else full blocks are listed among the partial ones
    transposes: bool = True  # the lists by column, without which torch has no backward
    orders_writes: bool = False  # dq_write_order


class ListAttribute:
    """One of torch's list attributes: written when first read; assigning one makes the mask a list mask."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, mask: TorchLists | None, owner: type) -> Any:
        return self if mask is None else mask._list(self.name)

    def __set__(self, mask: TorchLists, value: Any) -> None:
        if value is not None and not isinstance(value, Tensor):
            hint = "int32 lists, as create_block_mask makes them"
            raise CallError(f"{self.name} must be a tensor or None", given=type(value).__name__, hint=hint)
        mask._assign({self.name: value})


class TorchLists:
    """What BlockMask has of torch's lists: the attributes, and what is written out of them."""

    kv_num_blocks, kv_indices = ListAttribute(), ListAttribute()
    full_kv_num_blocks, full_kv_indices = ListAttribute(), ListAttribute()
    q_num_blocks, q_indices = ListAttribute(), ListAttribute()
    full_q_num_blocks, full_q_indices = ListAttribute(), ListAttribute()
    dq_write_order, dq_write_order_full = ListAttribute(), ListAttribute()
    dq_kv_order: Tensor | None
    dq_kv_order_spt: bool | None
    _mask: PredicateMask | ListMask
    _style: ListStyle
    _lists: dict[str, Tensor | None]  # those that were given or have been written
    _narrow: dict[str, Tensor | None]  # those given to the mask that this one is an expansion of

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, H, q_len, kv_len)."""
        return self._mask.sizes + self._mask.lengths

    @property
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """Tokens of a block of the lists, (q, kv). Assigning keeps the lists, whose blocks then mean other tokens."""
        return self._mask.block

    @BLOCK_SIZE.setter
    def BLOCK_SIZE(self, block: int | tuple[int, int]) -> None:
        self._assign({})
        self._mask = self._mask.changed(block=block_pair(block))

    def numel(self) -> int:
        """Pairs of the whole mask, kept or not."""
        return math.prod(self.shape)

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """The attributes as a tuple: lengths, lists, orders, BLOCK_SIZE, mask_mod; lengths and sizes apart if `flatten`."""
        mask = self._mask
        middle = (*(self._list(n) for n in LIST_NAMES), self.dq_kv_order, self.dq_kv_order_spt)
        if flatten:
            return (*mask.lengths, *middle, *mask.block, mask.function)
        return (mask.lengths, *middle, mask.block, mask.function)

    def to_dense(self) -> Tensor:
        """1 for every block that is visited, else 0: int32 `[B, H, rows, cols]`, blocks and not tokens."""
        blocks, sizes = self._mask.tile_map(*self._mask.block), self._mask.sizes
        visited = (blocks.dense() > 0).to(torch.int32)
        visited = visited.expand(*two_sizes(sizes), -1, -1).contiguous()
        return visited.reshape(*sizes, blocks.rows, blocks.cols)

    def sparsity(self) -> float:
        """Percentage of blocks that are skipped, between 0 and 100."""
        blocks = self._mask.tile_map(*self._mask.block)
        total = blocks.grid.groups * blocks.rows * blocks.cols
        visited = blocks.full.tiles() + blocks.partial.tiles()
        return 100.0 * (1.0 - visited / total) if total else 0.0

    def _list(self, name: str) -> Tensor | None:
        if isinstance(self._mask, PredicateMask):
            self._mask.check_current()
        if name in self._lists:
            return self._lists[name]
        if name in self._narrow:
            given = self._narrow[name]
            own = 1 if name.endswith("num_blocks") else 2  # dimensions besides batch and heads
            self._lists[name] = None if given is None else given.expand(*self._mask.sizes, *given.shape[-own:])
            return self._lists[name]
        written = self._orders() if name.startswith("dq_") else self._written(name)
        if isinstance(self._mask, ListMask) or self._mask.reusable:
            self._lists |= written
        return written[name]

    def _written(self, name: str) -> dict[str, Tensor | None]:
        """A list and its partner, from the block map."""
        full, transposed = name.startswith("full_"), name in Q_LISTS
        stem = name.removesuffix("_num_blocks").removesuffix("_indices")
        names = f"{stem}_num_blocks", f"{stem}_indices"
        if (full and not self._style.separate_full) or (transposed and not self._style.transposes):
            return dict.fromkeys(names)
        blocks, sizes = self._mask.block_map(), self._mask.sizes
        blocks = blocks if self._style.separate_full else merge(blocks)
        spans = getattr(blocks, ("full" if full else "partial") + ("_t" if transposed else ""))
        lines, cells = (blocks.cols, blocks.rows) if transposed else (blocks.rows, blocks.cols)
        groups, shape = (blocks.batch, blocks.heads), two_sizes(sizes)
        pair = write_lists(spans, groups=groups, lines=lines, cells=cells, shape=shape)
        missing = (0,) * (2 - len(sizes))  # leading dimensions that the lists came without
        return dict(zip(names, (x[missing] if missing else x for x in pair), strict=True))

    def _orders(self) -> dict[str, Tensor | None]:
        orders: dict[str, Tensor | None] = {"dq_write_order": None, "dq_write_order_full": None}
        if self._style.orders_writes:
            visited, descending = self.to_dense(), bool(self.dq_kv_order_spt)
            for name, rows in zip(orders, (self._list("q_indices"), self._list("full_q_indices")), strict=True):
                orders[name] = None if rows is None else write_order(visited, rows, descending=descending)
        return orders

    def _assign(self, values: dict[str, Tensor | None]) -> None:
        """All lists as they are, some of them replaced, are the mask from now on."""
        self._lists = {n: self._list(n) for n in LIST_NAMES} | values
        mask, source = self._mask, KvLists([self._lists[n] for n in KV_LISTS])
        self._mask = ListMask(source, mask.function, sizes=mask.sizes, lengths=mask.lengths, block=mask.block)
        self._style = self._style._replace(
            separate_full=self._lists["full_kv_num_blocks"] is not None,
            transposes=self._lists["q_indices"] is not None,
        )

    def _shape_of(self, name: str) -> torch.Size | None:
        """The shape of a list, without writing it."""
        mask, style = self._mask, self._style
        absent = name.startswith("full_") and not style.separate_full or name in Q_LISTS and not style.transposes
        if isinstance(mask, ListMask) or absent:
            found = self._list(name)
            return None if found is None else found.shape
        rows, cols = (-(-n // b) for n, b in zip(mask.lengths, mask.block, strict=True))
        lines, cells = (cols, rows) if name in Q_LISTS else (rows, cols)
        return torch.Size((*mask.sizes, lines) if name.endswith("num_blocks") else (*mask.sizes, lines, cells))

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The visited blocks as characters, at most grid_size of them (-1: one per block), of the first `limit` heads.

        Raises:
            OptionError: another grid_size than -1, a number of at least 1, or a pair of those.
        """
        sides = grid_size if isinstance(grid_size, (tuple, list)) else (grid_size, grid_size)
        if grid_size != -1 and (len(sides) != 2 or not all(isinstance(n, int) and n >= 1 for n in sides)):
            hint = "20, (20, 40), or -1 for a character a block"
            raise OptionError("grid_size must be at least 1 along both sides", given=repr(grid_size), hint=hint)
        from flexattn.frontend import display

        return display.block_text(
            self._mask.tile_map(*self._mask.block), sizes=self._mask.sizes, grid_size=grid_size, limit=limit
        )

    def __repr__(self) -> str:
        shapes = (f"    {n}={self._shape_of(n)},\n" for n in (*KV_LISTS, *Q_LISTS))
        name = getattr(self._mask.function, "__name__", None) or function_name(self._mask.function)
        return (
            f"BlockMask(\n{''.join(shapes)}    BLOCK_SIZE={self._mask.block},\n    shape={self.shape},\n"
            f"    sparsity={self.sparsity():.2f}%,\n    mask_mod={name}\n)"
        )


def is_torchs(mask: object) -> bool:
    """Whether something is a BlockMask of torch's, recognised without importing its module."""
    kind = type(mask)
    return kind.__name__ == "BlockMask" and kind.__module__.startswith("torch.")


def whole(number: Any) -> Any:
    """An integer of any kind (numpy's, a tensor of one element) as Python's; anything else as it is, for the checks to refuse."""
    if isinstance(number, (int, torch.SymInt)):  # to ask a symbolic one would fix its value
        return number
    try:
        return operator.index(number)
    except (TypeError, RuntimeError):
        return number


def block_pair(block: int | Sequence[int] | None) -> tuple[int, int]:
    """BLOCK_SIZE as (q, kv)."""
    block = DEFAULT_BLOCK_SIZE if block is None else block
    pair = tuple(map(whole, block if isinstance(block, (tuple, list)) else (block, block)))
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
        raise OptionError(
            "BLOCK_SIZE must be a positive integer or a pair of them, (q, kv)", given=repr(block), hint="128"
        )
    return pair[0], pair[1]


def _check_pair(prefix: str, counts: Any, indices: Any) -> None:
    """Refuses lists that hold no integers."""
    if not isinstance(counts, Tensor) or not isinstance(indices, Tensor):
        return
    for name, values in ((f"{prefix}_num_blocks", counts), (f"{prefix}_indices", indices)):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise DTypeError(
                f"{name} must hold integers", given=values.dtype, hint="int32, as create_block_mask makes them"
            )


def check_lists(lists: Sequence[Any]) -> None:
    """Refuses lists, in the order of LIST_NAMES, of which one is missing or has too few dimensions, as torch does."""
    given = dict(zip(LIST_NAMES, lists, strict=True))
    indices = given["kv_indices"]
    if given["kv_num_blocks"] is None or indices is None:
        missing = "kv_num_blocks" if given["kv_num_blocks"] is None else "kv_indices"
        hint = "BlockMask.from_kv_blocks(kv_num_blocks, kv_indices), or create_block_mask"
        raise MaskTypeError("kv_num_blocks and kv_indices must be provided", given=f"{missing}=None", hint=hint)
    if indices.dim() < 2:
        shape = f"kv_indices of shape {tuple(indices.shape)}"
        raise MaskFunctionError("BlockMask must have at least 2 dimensions", given=shape, hint="[B, H, rows, columns]")
    for prefix in ("kv", "full_kv", "q", "full_q"):
        _check_pair(prefix, given[f"{prefix}_num_blocks"], given[f"{prefix}_indices"])
    for pair in (("full_kv_num_blocks", "full_kv_indices"), ("full_q_num_blocks", "full_q_indices")):
        if (given[pair[0]] is None) != (given[pair[1]] is None):
            missing = pair[0] if given[pair[0]] is None else pair[1]
            what = f"{pair[0]} and {pair[1]} must be both provided or omitted"
            raise MaskTypeError(what, given=f"{missing}=None", hint="both of them, or None for both")
    if given["dq_write_order_full"] is not None and given["dq_write_order"] is None:
        what, hint = "dq_write_order_full requires dq_write_order", "both of them, or None for both"
        raise OptionError(what, given="dq_write_order=None", hint=hint)
