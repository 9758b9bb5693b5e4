"""PagedAttention: torch's class of that name over flexattn's masks and mods.

Reads lengths, new tokens, masks and mods in logical positions; makes a page table and the same in physical positions. The idea, which
is torch's: all requests share one long cache, whose blocks a mask names and whose positions a mod translates back. `PagedKVCache` is
faster and holds more kinds of caches; this is for programs written for torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import OutOfPagesError, PageShapeError, UnsupportedError
from flexattn.frontend.block_mask import BlockMask
from flexattn.frontend.mask_functions import noop_mask


class PagedAttention:
    """A page table of up to max_batch_size requests over caches [1, heads, n_pages * page_size, dim] that the caller owns.

    Has the methods and attributes of torch's class and does what it does, but for this: `erase` also forgets `physical_to_logical`;
    `convert_logical_block_mask` looks pages up under `batch_idx` in its mask function too; masks are flexattn's.

    Args:
        n_pages: pages of the caches.
        page_size: tokens of a page, the block size of masks' keys.
        max_batch_size: requests.
        device: of the tables.

    Attributes:
        page_table: int64 [max_batch_size, n_pages], physical page of each logical one; -1: none.
        physical_to_logical: int64 [max_batch_size, n_pages], the other way round.
        capacity: int64 [max_batch_size], tokens that a request's pages hold.
        empty_pages: pages that nobody has, the next one last.

    Example:
        >>> paged, cache = flexattn.PagedAttention(4, 16, 2, device="cpu"), torch.zeros(1, 1, 64, 8)
        >>> paged.reserve(torch.tensor([1]), torch.tensor([20]))
        >>> k = torch.ones(1, 1, 20, 8)
        >>> paged.assign(torch.tensor([1]), torch.arange(20)[None], k, k, cache, cache)
        >>> paged.page_table.tolist(), paged.capacity.tolist(), int(cache[0, 0, :, 0].sum())
        ([[-1, -1, -1, -1], [1, 0, -1, -1]], [0, 32], 20)

    Source: torch.nn.attention.experimental._paged_attention.PagedAttention.
    """

    def __init__(self, n_pages: int, page_size: int, max_batch_size: int, device: str | torch.device = "cuda") -> None:
        self.n_pages, self.page_size = n_pages, page_size
        self.page_table = torch.full((max_batch_size, n_pages), -1, dtype=torch.int64, device=device)
        self.physical_to_logical = self.page_table.clone()
        self.capacity = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.empty_pages = list(range(n_pages))[::-1]

    def reserve(self, batch_idx: Tensor, seq_len: Tensor) -> None:
        """Gives a request pages for at least `seq_len` tokens. Waits for the device.

        Args:
            batch_idx, seq_len: integers [1].
        Raises: OutOfPagesError, and changes nothing.
        """
        request, wanted = int(batch_idx), int(seq_len)
        first = int(self.capacity[request]) // self.page_size
        count = -(-wanted // self.page_size) - first
        if count <= 0:
            return
        if count > len(self.empty_pages):
            given = f"{count} needed, {len(self.empty_pages)} of {self.n_pages} empty"
            raise OutOfPagesError("there are too few pages", given=given, hint="erase a request first")
        pages = torch.tensor(self.empty_pages[-count:], device=self.page_table.device)
        del self.empty_pages[-count:]
        self.page_table[request, first : first + count] = pages
        self.physical_to_logical[request, pages] = torch.arange(first, first + count, device=pages.device)
        self.capacity[request] += count * self.page_size

    def erase(self, batch_idx: Tensor) -> None:
        """Takes all pages from a request. Waits for the device.

        Args:
            batch_idx: an integer [1].
        """
        request = int(batch_idx)
        pages = self.page_table[request]
        self.empty_pages += pages[pages >= 0].tolist()
        self.capacity[request] = 0
        self.physical_to_logical[request] = -1
        self.page_table[request] = -1

    def assign(
        self, batch_idx: Tensor, input_pos: Tensor, k_val: Tensor, v_val: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Writes keys and values of some positions, whose pages are reserved, into the caches.

        Args:
            batch_idx: integers [B], requests.
            input_pos: integers [B, S], positions in them.
            k_val, v_val: [B, heads, S, dim].
            k_cache, v_cache: [1, heads, n_pages * page_size, dim].
        Raises: PageShapeError; UnsupportedError for a k_val with a gradient.
        """
        if k_val.requires_grad:
            raise UnsupportedError("k_val must not require a gradient", given="one that does", hint=".detach()")
        batch, heads, count, k_dim = k_val.shape
        _same("k_val's batch must be batch_idx's", batch, batch_idx.shape[0])
        _same("k_val must have the cache's heads", heads, k_cache.shape[1])
        _same("k_val must have input_pos's length", count, input_pos.shape[1])
        _same("k_val must have k_cache's head dimension", k_dim, k_cache.shape[3])
        _same("v_val must have v_cache's head dimension", v_val.shape[3], v_cache.shape[3])
        position = input_pos.long()
        pages = torch.gather(self.page_table[batch_idx], 1, position // self.page_size)
        address = (pages * self.page_size + position % self.page_size).flatten()
        for cache, new in ((k_cache, k_val), (v_cache, v_val)):
            cache[0, :, address] = new.transpose(0, 1).flatten(1, 2)

    def convert_logical_block_mask(
        self, block_mask: Any, batch_idx: Tensor | None = None, kv_len: Tensor | None = None
    ) -> BlockMask:
        """A mask over logical positions as one over the caches.

        Args:
            block_mask: with blocks of page_size keys; torch's or flexattn's.
            batch_idx: integers [B], the requests of the mask's batch entries; None: the first ones.
            kv_len: integers [B], tokens of each: keys behind them are dropped in partial blocks.
        Returns: a mask of blocks, [B, H, q_len, n_pages * page_size].
        Raises: PageShapeError.
        """
        _same("block_mask must have blocks of page_size keys", block_mask.BLOCK_SIZE[1], self.page_size)
        batch, _, _, width = block_mask.kv_indices.shape
        if width > self.n_pages:
            hint = "as many pages as a request has blocks"
            raise PageShapeError(f"block_mask must have at most {self.n_pages} blocks a row", given=width, hint=hint)
        requests = torch.arange(batch, device=self.page_table.device) if batch_idx is None else batch_idx
        table = self.page_table[requests]

        def physical(blocks: Tensor | None) -> Tensor | None:
            if blocks is None:
                return None
            found = blocks.new_zeros((*blocks.shape[:3], self.n_pages))
            found[..., :width] = torch.gather(table, 1, blocks.flatten(1).long()).view(blocks.shape)
            return found

        partial = physical(block_mask.kv_indices)
        assert partial is not None
        full_counts = block_mask.full_kv_num_blocks
        return BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks.clone(),
            partial,
            None if full_counts is None else full_counts.clone(),
            physical(block_mask.full_kv_indices),
            block_mask.BLOCK_SIZE,
            self._mask_mod(block_mask.mask_mod, kv_len, None if batch_idx is None else requests),
            seq_lengths=(block_mask.seq_lengths[0], self.n_pages * self.page_size),
        )

    def get_mask_mod(self, mask_mod: Callable[..., Any] | None, kv_len: Tensor | None = None) -> Callable[..., Any]:
        """A mask function of logical positions as one of physical ones, False where a request has no token.

        Args:
            mask_mod: or None, which keeps all.
            kv_len: integers [batch], tokens of each request; None: as many as its pages hold.
        """
        return self._mask_mod(mask_mod, kv_len, None)

    def get_score_mod(self, score_mod: Callable[..., Any] | None, kv_len: Tensor | None = None) -> Callable[..., Any]:
        """A score function of logical positions as one of physical ones, -inf where a request has no token.

        Args:
            score_mod: or None, which changes nothing.
            kv_len: as in `get_mask_mod`.
        """

        def physical_score_mod(score: Any, b: Any, h: Any, q_idx: Any, physical_kv_idx: Any) -> Any:
            kv_idx, is_there = self._logical(b, b, physical_kv_idx, kv_len)
            new = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
            return torch.where(is_there, new, float("-inf"))

        return physical_score_mod

    def _mask_mod(
        self, mask_mod: Callable[..., Any] | None, kv_len: Tensor | None, requests: Tensor | None
    ) -> Callable[..., Any]:
        """`get_mask_mod` for a batch of certain requests."""
        inner = noop_mask if mask_mod is None else mask_mod

        def physical_mask_mod(b: Any, h: Any, q_idx: Any, physical_kv_idx: Any) -> Any:
            request = b if requests is None else requests[b]
            kv_idx, is_there = self._logical(b, request, physical_kv_idx, kv_len)
            return torch.where(is_there, inner(b, h, q_idx, kv_idx), False)

        return physical_mask_mod

    def _logical(self, b: Any, request: Any, physical: Any, kv_len: Tensor | None) -> tuple[Any, Any]:
        """The logical position of a physical one, and whether the request has a token there."""
        block = self.physical_to_logical[request, physical // self.page_size]
        position = block * self.page_size + physical % self.page_size
        is_there = block >= 0
        return position, is_there if kv_len is None else is_there & (position < kv_len[b])


def _same(what: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise PageShapeError(what, given=f"{given} and {wanted}", hint="tensors of the same caches and requests")


__all__ = ["PagedAttention"]
