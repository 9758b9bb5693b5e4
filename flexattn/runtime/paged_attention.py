"""paged_attention: flex_attention over keys and values in pages.

Reads query, a PagedKV and the two functions; makes what flex_attention makes. The idea: mods see logical positions, so the same
functions serve a dense cache and a paged one, and only the kernel's loads know of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from flexattn.errors import CallError
from flexattn.frontend.eager import eager_only
from flexattn.runtime.attention import AuxRequest, Result, deliver, prepare, requested
from flexattn.runtime.pages import PagedKV

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask


@eager_only
def paged_attention(
    query: Tensor,
    pages: PagedKV,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_offset: int | Tensor | None = None,
) -> Result:
    """softmax(score_mod(scale * query @ key^T) where the mask keeps) @ value over keys and values that lie in pages.

    Up to 64 queries run in the decode kernel, which reads pages as they are; more are a prefill. The forward kernel for Hopper reads
    pages of a multiple of 8 tokens of half types too; for any other prefill they are gathered once into dense tensors of
    [batch, kv_heads, max_length, dim] in front of the forward kernel. `explain` says which, and why.

    Args:
        query: [batch, q_heads, q_len, qk_dim], of the pages' dtype (of any half or single type over pages of 8 bits); q_heads is a
            multiple of kv_heads.
        pages: of `PagedKVCache.view`, `PagedKV.from_table` or `PagedKV.from_csr`. Lengths and page numbers may be written to between
            replays of a CUDA graph.
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, in logical positions. None: identity.
        block_mask: a BlockMask of create_block_mask for all positions of the cache.
        scale: factor of the scores before score_mod; None for 1 / sqrt(qk_dim).
        kernel_options: as in flex_attention.
        return_aux: which extra outputs to return.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, True keeps.
        q_offset: position of the first query, an int or an int tensor [batch] or [1]; None: the last query stands at the request's
            last key, position kv_lengths[b] - 1.
    Returns: out [batch, q_heads, q_len, v_dim] in query's dtype; (out, AuxOutput) with return_aux. Keys behind a request's length
        are dropped, whatever their slots hold; a request without a key has out 0, lse -inf.
    Raises: what flex_attention raises.
    Example:
        >>> pool, numbers = torch.ones(4, 1, 16, 8), lambda *x: torch.tensor(x, dtype=torch.int32)
        >>> pages = PagedKV.from_table(pool, pool, numbers([2, 0]).reshape(1, 2), numbers(20))
        >>> flexattn.paged_attention(torch.ones(1, 1, 1, 8), pages).shape
        torch.Size([1, 1, 1, 8])

    Source: Kwon et al., PagedAttention (2023), arXiv:2309.06180; Ye et al., FlashInfer (2025), arXiv:2501.01005.
    """
    if not isinstance(pages, PagedKV):
        hint = "cache.view(slots), PagedKV.from_table or PagedKV.from_csr; flex_attention for dense keys"
        raise CallError("pages must be a PagedKV", given=type(pages).__name__, hint=hint)
    aux, placed = requested(False, return_aux), (q_offset, None)
    tensors, masks = (query, pages, None), (block_mask, mask_mod)
    problem, plan = prepare(tensors, score_mod, masks, scale=scale, aux=aux, options=kernel_options, placed=placed)
    return deliver(problem, plan, return_lse=False, return_aux=return_aux)


__all__ = ["paged_attention"]
