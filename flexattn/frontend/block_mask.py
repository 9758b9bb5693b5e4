"""BlockMask: which pairs attention keeps, and which blocks of the score matrix it visits for them, with torch's names.

Reads block lists, or what `create_block_mask` made of a function; makes tile maps for kernels and further masks. The one idea:
a mask made from a function *is* that function and can be cut into tiles of any size; a mask made from lists is the lists.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, MaskFunctionError, OptionError
from flexattn.frontend.arguments import lengths_of, mask_function
from flexattn.frontend.list_mask import KvLists, ListMask
from flexattn.frontend.mask_functions import MaskMod, noop_mask
from flexattn.frontend.mask_operations import MaskOperations
from flexattn.frontend.mask_pytree import register
from flexattn.frontend.mask_views import MaskViews
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Traced
from flexattn.frontend.spans import Spans
from flexattn.frontend.torch_lists import DEFAULT_BLOCK_SIZE, LIST_NAMES, Q_LISTS, ListStyle, block_pair, check_lists

NO_MASK_BLOCK = (1 << 30, 1 << 30)  # BLOCK_SIZE by which torch says that no mask was given


class BlockMask(MaskOperations, MaskViews):
    """A block-sparse attention mask.

    Two kinds. A *predicate* mask comes from `create_block_mask`: the traced mask function, two lengths and the captured tensors
    as they were then; kernels cut it into whatever tiles they like, and BLOCK_SIZE only fixes torch's list attributes, which
    are written when somebody reads them. A *list* mask comes from `from_kv_blocks`, from torch, or from assigning `mask_mod`,
    `seq_lengths` or a list of a predicate mask: it keeps its full blocks, and in its partial blocks what `mask_mod` keeps.

    A predicate mask is a snapshot: after a captured tensor has been written to, it raises StaleMaskError. Torch counts the
    writes; those that it does not see (`tensor.data.copy_`, an array that shares memory) are noticed with FLEXATTN_DEBUG=1
    only, which compares contents. A list mask, as in torch, follows its lists and the tensors its function captures.

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
        lists: tuple[Any, ...] = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
        lists += (q_num_blocks, q_indices, full_q_num_blocks, full_q_indices, dq_write_order, dq_write_order_full)
        check_lists(lists)
        mask = ListMask(
            KvLists(lists[:4]),
            mask_mod,
            sizes=tuple(kv_indices.shape[:-2]),
            lengths=(seq_lengths[0], seq_lengths[1]),
            block=block_pair(BLOCK_SIZE),
        )
        self._start(mask, ListStyle(full_kv_num_blocks is not None, q_indices is not None), dq_kv_order_spt)
        self._lists |= dict(zip(LIST_NAMES, lists, strict=True))
        self.dq_kv_order = dq_kv_order

    # ------------------------------------------------------------------------------------------------ making one
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
            compute_q_blocks: False leaves q_indices None, as in torch; the backward, which torch then lacks, does not need them.

        Returns:
            The mask; the transposed lists are written when read.
        """
        if not isinstance(dq_kv_order, (bool, Tensor, type(None))):
            given, hint = type(dq_kv_order).__name__, "leaving it out: it changes no result"
            raise OptionError("dq_kv_order must be a bool, Tensor, or None", given=given, hint=hint)
        block = block_pair(BLOCK_SIZE)
        if seq_lengths is None and isinstance(kv_indices, Tensor) and kv_indices.dim() >= 2:
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
        mask._style = mask._style._replace(transposes=compute_q_blocks)
        mask._lists = {n: x for n, x in mask._lists.items() if n not in Q_LISTS}
        return mask

    @classmethod
    def from_torch(cls, block_mask: Any) -> BlockMask:
        """torch's BlockMask as a list mask that shares its tensors.

        Raises:
            MaskFunctionError: it was sliced, so torch has replaced its mask function by one that only raises.
            CallError: it is no BlockMask.
        """
        if not isinstance(block_mask, BlockMask) and not hasattr(block_mask, "kv_num_blocks"):
            hint = "create_block_mask of torch or of flexattn"
            raise CallError("from_torch takes a BlockMask of torch's", given=type(block_mask).__name__, hint=hint)
        if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
            raise MaskFunctionError(
                "Cannot use mask_mod from a sliced BlockMask",
                given="a BlockMask of torch's, sliced",
                hint="sliced.mask_mod = a function made from the unsliced mask's mask_mod",
            )
        names = (*LIST_NAMES, "dq_kv_order", "dq_kv_order_spt")
        options: dict[str, Any] = {n: getattr(block_mask, n, None) for n in names}
        options |= {"BLOCK_SIZE": tuple(block_mask.BLOCK_SIZE), "mask_mod": block_mask.mask_mod}
        return cls(tuple(block_mask.seq_lengths), **options)

    # ------------------------------------------------------------------------------------------------ what it is
    @property
    def predicate(self) -> PredicateMask | None:
        """The function behind a mask that is not made of lists."""
        return self._mask if isinstance(self._mask, PredicateMask) else None

    @property
    def is_list(self) -> bool:
        """Whether block lists, not the function alone, say what is kept."""
        return isinstance(self._mask, ListMask)

    @property
    def mask_mod(self) -> MaskMod:
        """The mask function. Assigning one keeps the present blocks and makes this a list mask, as in torch."""
        return self._mask.function

    @mask_mod.setter
    def mask_mod(self, mask_mod: MaskMod) -> None:
        self._mask = self._as_list().changed(function=mask_function(mask_mod))

    @property
    def seq_lengths(self) -> tuple[int, int]:
        """(q_len, kv_len). Assigning keeps the present blocks and makes this a list mask, as in torch."""
        return self._mask.lengths

    @seq_lengths.setter
    def seq_lengths(self, lengths: tuple[int, int]) -> None:
        self._mask = self._as_list().changed(lengths=lengths_of(lengths))

    def _as_list(self) -> ListMask:
        mask = self._mask
        if isinstance(mask, ListMask):
            return mask
        blocks = replace(mask.block_map(), traced=None, _cache={})
        return ListMask(blocks, mask.function, sizes=mask.sizes, lengths=mask.lengths, block=mask.block)

    @property
    def device(self) -> torch.device:
        """Where the lists are, or will be."""
        return self._mask.device

    @property
    def traced(self) -> Traced | None:
        """The mask that partial tiles must apply; None if there is nothing to apply."""
        return self._mask.traced

    @property
    def says_no_mask(self) -> bool:
        """Whether this is what torch makes where no mask is given: one kept block of 2**30 tokens, lengths of 1.

        Such a mask stands for every pair of any lengths.
        """
        whole = self.BLOCK_SIZE == NO_MASK_BLOCK and self.seq_lengths == (1, 1)
        return whole and self.traced is None and self.density() == 1.0

    def legal_tile(self, q_tile: int, kv_tile: int) -> bool:
        """Whether `tile_map` can cut this mask into such tiles: any if it is (or runs as) a predicate, else divisors."""
        return self._mask.legal_tile(q_tile, kv_tile)

    def as_predicate(self) -> BlockMask:
        """The same mask as a predicate mask, for any tile size; lists become two captured bool tables."""
        return self._made(self._mask.as_predicate()) if self.is_list else self

    def to_mask(self) -> Tensor:
        """The kept pairs: bool `[B, H, q_len, kv_len]`. Every pair is evaluated; for small masks and for tests."""
        return self._mask.kept().reshape(self.shape)

    def row(self, position: int) -> Spans:
        """The kept keys of one query, as runs of tokens; no table of the other rows is made. What decoding reads.

        Args:
            position: of the query, from 0; negative ones count from the end.

        Returns:
            (indptr, start, stop), int32: line `b * H + h` keeps the tokens `start[n] : stop[n]` for each n in
            `indptr[line] : indptr[line + 1]`, in order, no run touching the next.

        Raises:
            CallError: position is no integer.
            CaptureIndexError: there is no such position, or a kept key reads a captured tensor out of range.
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.

        Example:
            >>> rule = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 100))
            >>> _, start, stop = create_block_mask(rule, None, None, 1 << 20, 1 << 20, device="cpu").row(700_000)
            >>> start.tolist(), stop.tolist()
            ([0, 699901], [4, 700001])
        """
        return self._mask.as_predicate().row(position)

    # ------------------------------------------------------------------------------------------------ moving around
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the mask to a file as it was traced, with the tensors it captures: plain data, and no code.

        A list mask is written as the predicate that it also is. Pickling (and so torch.save) keeps a mask as it is, with its
        function by its name if it has one in a module, else as it was traced; reading a pickle can run code, `load` runs none.

        Args:
            path: of a file, written by torch.save.

        Raises:
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.

        Example:
            >>> import tempfile
            >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 2, 3, device="cpu")
            >>> with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            ...     causal.save(file.name)
            ...     BlockMask.load(file.name).to_mask().int().tolist()
            [[[[1, 0, 0], [1, 1, 0]]]]
        """
        from flexattn.frontend import saved

        style = ListStyle() if self.is_list else self._style
        saved.write(path, self._mask.as_predicate(), (*style, self.dq_kv_order_spt))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str | None = None) -> BlockMask:
        """A mask that `save` has written, in any process: the function's source is not needed, and nothing is run.

        Args:
            path: of the file.
            device: for the mask and the tensors it captures; by default that of the saved mask, or if it had been given none
                the current accelerator, else the CPU.

        Returns:
            A predicate mask. Its `mask_mod` computes what was traced.

        Raises:
            FileError: the file holds something else, is damaged, or was written by another version of the format.
            DeviceError: the device is not there.
        """
        from flexattn.frontend import saved

        mask, (*style, order) = saved.read(path, device)
        return cls._of(mask, ListStyle(*style), order)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what can be made again."""
        return self.__dict__ | {"_expanded": {}} | ({} if self.is_list else {"_lists": {}})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or what a file held, has a number of its own."""
        self.__dict__ |= state
        self._numbered()


register(BlockMask)
