"""Masks made of masks: slices, corners, shifts, transposes, longer masks, and, or, xor, not, other devices.

Reads a BlockMask; makes further ones. The one idea: what is made of functions is a function again, put together from traces, so
nothing here looks at a pair or calls the user's function.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from flexattn.errors import MaskTypeError, OptionError, ShapeError, UnsupportedError
from flexattn.frontend.arguments import device_of, integer, lengths_of, mask_function
from flexattn.frontend.list_mask import ListMask, two_sizes
from flexattn.frontend.mask_functions import MaskMod, sliced_function, with_tensors
from flexattn.frontend.predicate_mask import PredicateMask, trace_mask
from flexattn.frontend.slices import read_slice
from flexattn.frontend.torch_lists import KV_LISTS, LIST_NAMES, ListStyle, TorchLists, is_torchs

if TYPE_CHECKING:
    from typing_extensions import Self

_NUMBERS = itertools.count()
MASKS: weakref.WeakValueDictionary[int, MaskOperations] = weakref.WeakValueDictionary()  # every mask by its number
MOST_EXPANDED = 64  # sizes and devices for which a mask keeps what it made


class MaskOperations(TorchLists):
    """What BlockMask has of operations that make further masks."""

    from_kv_blocks: ClassVar[Callable[..., Any]]
    from_torch: ClassVar[Callable[..., Any]]

    def _start(self, mask: PredicateMask | ListMask, style: ListStyle, dq_kv_order_spt: bool | None) -> None:
        self._mask, self._style = mask, style
        self._numbered()
        self._lists: dict[str, Tensor | None] = {}
        self._narrow: dict[str, Tensor | None] = {}
        self._expanded: dict[object, tuple[Self, PredicateMask | ListMask]] = {}  # and what it was made of
        self.dq_kv_order, self.dq_kv_order_spt = None, dq_kv_order_spt

    def _numbered(self) -> None:
        """Gives the mask the number by which graphs of torch.compile know it."""
        self._number = next(_NUMBERS)
        MASKS[self._number] = self

    @classmethod
    def _of(cls, mask: PredicateMask | ListMask, style: ListStyle, dq_kv_order_spt: bool | None) -> Self:
        new = cls.__new__(cls)
        new._start(mask, style, dq_kv_order_spt)
        return new

    def _like(self, mask: PredicateMask | ListMask) -> Self:
        """Another mask whose lists are written as this one's are."""
        return type(self)._of(mask, self._style, self.dq_kv_order_spt)

    def _made(self, mask: PredicateMask) -> Self:
        """A predicate mask made of this one; of a list mask, all its lists exist."""
        return type(self)._of(mask, ListStyle(), None) if isinstance(self._mask, ListMask) else self._like(mask)

    # ------------------------------------------------------------------------------------------------ other masks
    def __getitem__(self, index: Any) -> Self:
        """The mask of some batches, heads and rows of blocks.

        An int keeps its dimension (of size 1); slices, integer and bool tensors and lists work too, each axis by itself. A
        block that the length cuts brings the rows that it has; where it is not the last one picked, the rows behind it move
        up, so that no block is left as it was and a list mask becomes a predicate mask.
        Unlike torch's, the result keeps its mask function, moved with the rows: row r of `mask[:, :, i:]` is row
        `i * BLOCK_SIZE[0] + r` of `mask`, and its `mask_mod` counts from 0. To decode one query at position p from a mask
        over the whole sequence, torch's idiom works too, with the unsliced mask's function:

            row = mask[:, :, p // mask.BLOCK_SIZE[0]]
            row.mask_mod = lambda b, h, q_idx, kv_idx: mask.mask_mod(b, h, q_idx + p, kv_idx)
            row.seq_lengths = (1, mask.seq_lengths[1])

        Raises:
            CaptureIndexError: a position is out of range.
            ShapeError: more than three indices, or lists without batch and head dimensions.
            CallError: an index of another kind.
        """
        index, mask = index if isinstance(index, tuple) else (index,), self._mask
        if len(mask.sizes) != 2:
            raise ShapeError(
                "slicing takes a BlockMask [B, H, rows]",
                given=f"{len(mask.sizes)} leading dimensions",
                hint="lists with batch and head dimensions",
            )
        self._check_movable("Slicing")
        rows = (
            self.kv_num_blocks.shape[-1] if isinstance(self._mask, ListMask) else -(-mask.lengths[0] // mask.block[0])
        )
        axes = (*two_sizes(mask.sizes), rows)
        part = read_slice(index, axes, block=mask.block[0], q_len=mask.lengths[0], device=mask.device)
        if isinstance(mask, PredicateMask):
            return self._like(mask.sliced(part))
        if part.q.block != mask.block[0]:
            return self._made(mask.as_predicate().sliced(part))
        options: dict[str, Any] = {n: part.cut(self._list(n)) for n in KV_LISTS}
        options |= {"BLOCK_SIZE": mask.block, "mask_mod": sliced_function(mask.function, part)}
        options |= {"seq_lengths": (part.q_len, mask.lengths[1]), "compute_q_blocks": self._style.transposes}
        new: Self = type(self).from_kv_blocks(**options)
        new._style = new._style._replace(orders_writes=self._style.orders_writes)
        new.dq_kv_order_spt = self.dq_kv_order_spt
        return new

    def _check_movable(self, what: str) -> None:
        if self.dq_kv_order is not None:
            raise UnsupportedError(
                f"{what} BlockMask with tensor dq_kv_order is not supported yet",
                given="dq_kv_order",
                hint="a mask without it",
            )

    def crop(self, q_len: int, kv_len: int) -> Self:
        """The upper left corner of the mask; its function is the same. `_adjust` is torch's name for it.

        Raises:
            ShapeError: a length is larger than the mask's: a mask cannot grow.
        """
        q_len, kv_len = lengths_of((q_len, kv_len))
        if q_len > self._mask.lengths[0] or kv_len > self._mask.lengths[1]:
            raise ShapeError(
                "a BlockMask can only be cropped",
                given=f"({q_len}, {kv_len}) from {self._mask.lengths}",
                hint="create_block_mask",
            )
        self._check_movable("Adjusting")
        return self._like(self._mask.cropped(q_len, kv_len))

    _adjust = crop

    def shifted(self, *, q: int = 0, kv: int = 0, lengths: tuple[int, int] | None = None) -> Self:
        """The mask seen from a further position, as a predicate mask: its pair (i, j) is this one's (q + i, kv + j).

        Args:
            q, kv: the offsets, which are arguments of kernels: another offset builds nothing. They may be negative; what a
                function says of positions below 0 is its own affair (captured tensors count them from their end).
            lengths: (q_len, kv_len) of the new mask, longer ones too; by default this mask's from the offsets on.

        Returns:
            The mask; its function is not called again.

        Raises:
            ShapeError: it is a list mask and the lists do not reach there.

        Example:
            >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 5, 5, device="cpu")
            >>> causal.shifted(q=2).to_mask().int().tolist()
            [[[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
        """
        q_len, kv_len = self._mask.lengths
        q, kv = (integer(n, "an offset", hint="shifted(q=700)") for n in (q, kv))
        q_new, kv_new = (max(0, q_len - q), max(0, kv_len - kv)) if lengths is None else lengths_of(lengths)
        if isinstance(self._mask, ListMask) and (min(q, kv) < 0 or q + q_new > q_len or kv + kv_new > kv_len):
            raise ShapeError(
                "block lists say nothing of pairs outside them",
                given=f"({q_new}, {kv_new}) from ({q}, {kv}) of {self._mask.lengths}",
                hint="offsets of at least 0 and lengths that end within the mask's",
            )
        return self._made(self._mask.as_predicate().shifted(q, kv, (q_new, kv_new)))

    def transposed(self) -> Self:
        """The mask with queries and keys in each other's place, as a predicate mask; BLOCK_SIZE turns with it.

        Example:
            >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3, device="cpu")
            >>> causal.transposed().to_mask().int().tolist()
            [[[[1, 1], [0, 1], [0, 0]]]]
        """
        return self._made(self._mask.as_predicate().transposed())

    def appended(self, n: int = 1) -> Self:
        """The mask with n further queries and keys at the end, of which its function decides: nothing is traced again.

        Args:
            n: how many tokens; the time does not depend on the mask's lengths.

        Returns:
            A predicate mask.

        Raises:
            UnsupportedError: it is a list mask, and lists say nothing of further tokens.
            OptionError: n is negative.

        Example:
            >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 100, 100, device="cpu")
            >>> longer = causal.appended()
            >>> longer.seq_lengths, longer.row(-1).stop.tolist()
            ((101, 101), [101])
        """
        mask = self._mask
        if isinstance(mask, ListMask):
            given, hint = f"a list mask of {self._mask.lengths}", "create_block_mask, whose function covers any length"
            raise UnsupportedError("block lists cannot grow", given=given, hint=hint)
        if not isinstance(n, int) or n < 0:
            raise OptionError("n must be an integer of at least 0", given=n, hint="crop for a shorter mask")
        return self._like(mask.changed(lengths=(mask.lengths[0] + n, mask.lengths[1] + n)))

    def expand(self, batch: int, heads: int) -> Self:
        """The mask for sizes that its own broadcast to. Lists and tables are shared where the function reads no b or h.

        Raises:
            ShapeError: a size of the mask is neither 1 nor the one asked for.
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.
        """
        mask, sizes = self._mask, two_sizes(self._mask.sizes)
        if any(have not in (1, want) for have, want in zip(sizes, (batch, heads), strict=True)):
            given, hint = f"{sizes} for {(batch, heads)}", "a mask made with B and H of 1, or of these sizes"
            raise ShapeError("a BlockMask's batch and heads must be 1 or equal", given=given, hint=hint)
        if isinstance(mask, PredicateMask):
            mask.check_current()
        if mask.sizes == (batch, heads):
            return self
        known, of = self._expanded.get((batch, heads), (None, None))
        if known is not None and of is mask:
            return known
        new = self._like(mask.expanded(batch, heads))
        if isinstance(mask, ListMask):
            new._narrow, new.dq_kv_order = self._narrow | self._lists, self.dq_kv_order
        return self._remembered((batch, heads), new)

    def _remembered(self, key: object, made: Self) -> Self:
        """What was made of the present mask, the latest few of it."""
        self._expanded[key] = made, self._mask
        if len(self._expanded) > MOST_EXPANDED:
            del self._expanded[next(iter(self._expanded))]
        return made

    def following(self, device: torch.device) -> Self:
        """The mask on `device` if `create_block_mask` was given none and had to choose one; else itself."""
        if isinstance(self._mask, ListMask) or not self._mask.follows or device == self._mask.device:
            return self
        known = self._expanded.get(device)
        return known[0] if known else self._remembered(device, self._like(self._mask.following(device)))

    def combine(self, mask_mod: MaskMod) -> Self:
        """The pairs that both this mask and a further mask function keep, as a predicate mask."""
        mask = self._mask.as_predicate()
        mask_mod = mask_function(mask_mod)
        return self._made(mask & mask.changed(traced=trace_mask(mask_mod), function=mask_mod))

    def __and__(self, other: Any) -> Self:
        """Pairs that both masks keep."""
        return self._made(self._mask.as_predicate() & self._other(other))

    def __or__(self, other: Any) -> Self:
        """Pairs that at least one of the masks keeps."""
        return self._made(self._mask.as_predicate() | self._other(other))

    def __xor__(self, other: Any) -> Self:
        """Pairs that exactly one of the masks keeps."""
        return self._made(self._mask.as_predicate() ^ self._other(other))

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__  # with torch's masks on the left

    def _other(self, other: object) -> PredicateMask:
        """Another mask, ours or torch's, as a predicate."""
        if is_torchs(other):
            other = self.from_torch(other)
        if not isinstance(other, MaskOperations):
            hint = "mask.combine(mask_mod) for a function"
            raise MaskTypeError("masks combine with masks", given=type(other).__name__, hint=hint)
        return other._mask.as_predicate()

    def __invert__(self) -> Self:
        """Pairs that the mask drops."""
        return self._made(~self._mask.as_predicate())

    def to(self, device: torch.device | str | None) -> Self:
        """The mask with its lists, and the tensors its function captures, on another device; None is where it is.

        Raises:
            DeviceError: there is no such device here.
        """
        device = self._mask.device if device is None else device_of(device)
        if isinstance(self._mask, PredicateMask):
            return self._like(self._mask.to(device))
        tensors = {n: self._list(n) for n in LIST_NAMES} | {"dq_kv_order": self.dq_kv_order}
        options: dict[str, Any] = {n: None if x is None else x.to(device) for n, x in tensors.items()}
        options |= {"dq_kv_order_spt": self.dq_kv_order_spt}
        function = with_tensors(self._mask.function, lambda t: t.to(device))
        make: Any = type(self)
        moved: Self = make(self._mask.lengths, **options, BLOCK_SIZE=self._mask.block, mask_mod=function)
        return moved
