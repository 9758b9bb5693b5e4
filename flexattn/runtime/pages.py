"""Keys and values in pages: what one call reads of a paged cache, and the same as dense tensors.

Reads tensors that the caller owns, of this library's PagedKVCache or of any other server; makes PagedKV, which copies none of
them. The idea: one flat list of page numbers, and for each request where its part begins, describe a page table and FlashInfer's
CSR form alike. Nothing is read on the host, so that lengths and page numbers may change in place, also inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, DeviceError, DTypeError, OptionError, ShapeError, UnsupportedError

LAYOUTS = ("HND", "NHD")


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """Keys and values of a batch of requests in pages, as `paged_attention` reads them. Made by `from_table` or `from_csr`.

    Position p of request b lies in row p % page_size of page `page_indices[page_starts[b] + p // page_size]`.

    Attributes:
        k_pages: [num_pages, kv_heads, page_size, qk_dim], any strides with a last one of 1 (an NHD pool is its transpose).
        v_pages: [num_pages, kv_heads, page_size, v_dim]; may share storage with k_pages.
        page_indices: int32 [n], page numbers of all requests.
        page_starts: int32 [batch], where each request's page numbers begin.
        kv_lengths: int32 [batch], tokens of each request; 0 is an empty row.
        max_length: tokens that a request may have at most, known on the host: of its part of a table, or given.
        k_scale, v_scale: float32 [1] or [kv_heads] factors of 8-bit keys and values; None for 1.

    Example:
        >>> pool = torch.zeros(4, 1, 16, 8)
        >>> table = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> PagedKV.from_table(pool, pool, table, torch.tensor([20], dtype=torch.int32)).max_length
        32

    Source: Kwon et al., PagedAttention (2023), arXiv:2309.06180; Ye et al., FlashInfer (2025), arXiv:2501.01005.
    """

    k_pages: Tensor
    v_pages: Tensor
    page_indices: Tensor
    page_starts: Tensor
    kv_lengths: Tensor
    max_length: int
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        _check_pools(self.k_pages, self.v_pages)
        _check_lists(self)
        for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
            _check_scale(name, scale, self.k_pages)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_pages.shape[2]

    @property
    def batch(self) -> int:
        """Requests."""
        return self.kv_lengths.shape[0]

    @staticmethod
    def from_table(
        k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lengths: Tensor, *, layout: str = "HND",
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> PagedKV:  # fmt: skip
        """Pages that a table names, without a copy of anything: what is written to the table or the lengths later is seen.

        Args:
            k_pages: [num_pages, kv_heads, page_size, qk_dim] ('HND') or [num_pages, page_size, kv_heads, qk_dim] ('NHD'). K and V
                stacked in one tensor [num_pages, 2, ...] are `pool[:, 0], pool[:, 1]`.
            v_pages: the same with v_dim.
            page_table: int32 [batch, pages of a request at most], rows of stride 1; entries behind a request's length are not read.
            kv_lengths: int32 [batch], tokens.
            layout: 'HND' or 'NHD'.
            k_scale, v_scale: float32 [1] or [kv_heads], factors of 8-bit keys and values.
        Raises: CallError, ShapeError, DTypeError, DeviceError, OptionError.
        Example:
            >>> pool = torch.zeros(4, 2, 16, 1, 8)  # K and V of 4 pages of 16 tokens, NHD
            >>> table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
            >>> PagedKV.from_table(pool[:, 0], pool[:, 1], table, lengths, layout="NHD").page_size
            16
        """
        _check_tensors(page_table=page_table, kv_lengths=kv_lengths)
        if page_table.dim() != 2 or page_table.shape[1] > 1 and page_table.stride(1) != 1:
            given = f"shape {tuple(page_table.shape)}, strides {page_table.stride()}"
            raise ShapeError("page_table must be [batch, pages], rows of stride 1", given=given, hint=".contiguous()")
        batch, width = page_table.shape
        step = page_table.stride(0) if batch > 1 else width
        flat = page_table.as_strided(((batch - 1) * step + width if batch else 0,), (1,))
        starts = torch.arange(batch, dtype=torch.int32, device=page_table.device) * step
        k, v = _in_heads(layout, k_pages, v_pages)
        return PagedKV(k, v, flat, starts, kv_lengths, width * k.shape[2], k_scale, v_scale)

    @staticmethod
    def from_csr(
        k_pages: Tensor, v_pages: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, max_length: int | None = None,
        layout: str = "HND", k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> PagedKV:  # fmt: skip
        """Pages in FlashInfer's form: request b has pages indices[indptr[b] : indptr[b + 1]].

        Args:
            k_pages, v_pages, layout, k_scale, v_scale: as in `from_table`.
            indptr: int32 [batch + 1].
            indices: int32 [all pages], or longer.
            last_page_len: int32 [batch], tokens in each request's last page, 1 .. page_size.
            max_length: tokens that a request has at most; None: as many as all pages hold, which splits work less evenly.
        Raises: CallError, ShapeError, DTypeError, DeviceError, OptionError.
        Example:
            >>> pool, numbers = torch.zeros(4, 1, 16, 8), lambda *x: torch.tensor(x, dtype=torch.int32)
            >>> PagedKV.from_csr(pool, pool, numbers(0, 2), numbers(2, 0), numbers(4)).kv_lengths
            tensor([20], dtype=torch.int32)
        """
        _check_tensors(indptr=indptr, indices=indices, last_page_len=last_page_len)
        if indptr.dim() != 1 or last_page_len.dim() != 1 or indptr.shape[0] != last_page_len.shape[0] + 1:
            given, hint = f"{tuple(indptr.shape)} and {tuple(last_page_len.shape)}", "one entry a request, and one more"
            raise ShapeError("indptr must be [batch + 1] and last_page_len [batch]", given=given, hint=hint)
        k, v = _in_heads(layout, k_pages, v_pages)
        size = k.shape[2]
        counts = indptr[1:] - indptr[:-1]
        lengths = torch.where(counts > 0, (counts - 1) * size + last_page_len, 0).to(torch.int32)
        most = indices.shape[0] * size if max_length is None else max_length
        return PagedKV(k, v, indices, indptr[:-1], lengths, most, k_scale, v_scale)

    def gathered(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Dense keys [batch, kv_heads, max_length, qk_dim] and values, scaled; 0 behind a request's length. A copy of all that is used.

        Args:
            dtype: of the result.
        """
        width = -(-self.max_length // self.page_size)
        spot = self.page_starts[:, None] + torch.arange(width, device=self.k_pages.device)
        used = torch.arange(width, device=self.k_pages.device) * self.page_size < self.kv_lengths[:, None]
        spot = torch.where(used, spot, 0).clamp_(max=max(self.page_indices.shape[0] - 1, 0))
        pages = torch.where(used, self.page_indices[spot.long()], 0).long()
        rows = torch.arange(self.max_length, device=self.k_pages.device) < self.kv_lengths[:, None]

        def dense(pool: Tensor, scale: Tensor | None) -> Tensor:
            x = pool.view(torch.uint8)[pages].view(pool.dtype) if pool.dtype.itemsize == 1 else pool[pages]
            x = x.to(dtype).transpose(1, 2).flatten(2, 3)[:, :, : self.max_length]
            x = x if scale is None else (x * scale[:, None, None]).to(dtype)
            return torch.where(rows[:, None, :, None], x, 0.0)

        return dense(self.k_pages, self.k_scale), dense(self.v_pages, self.v_scale)


# ---------------------------------------------------------------- checks
def _in_heads(layout: str, k_pages: Any, v_pages: Any) -> tuple[Tensor, Tensor]:
    """Pools with heads before tokens."""
    if layout not in LAYOUTS:
        raise OptionError(
            "layout must be 'HND' or 'NHD'", given=repr(layout), hint="'NHD' for [pages, tokens, heads, dim]"
        )
    _check_tensors(k_pages=k_pages, v_pages=v_pages)
    if layout == "HND" or k_pages.dim() != 4 or v_pages.dim() != 4:
        return k_pages, v_pages
    return k_pages.transpose(1, 2), v_pages.transpose(1, 2)


def _check_tensors(**named: Any) -> None:
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise CallError(f"{name} must be a torch.Tensor", given=type(x).__name__, hint=f"torch.as_tensor({name})")


def _check_pools(k_pages: Tensor, v_pages: Tensor) -> None:
    _check_tensors(k_pages=k_pages, v_pages=v_pages)
    shapes = f"{tuple(k_pages.shape)} and {tuple(v_pages.shape)}"
    if k_pages.dim() != 4 or v_pages.dim() != 4 or k_pages.shape[:3] != v_pages.shape[:3]:
        hint = "[num_pages, kv_heads, page_size, dim] for both; only dim may differ, and layout='NHD' turns heads and tokens"
        raise ShapeError(
            "k_pages and v_pages must be 4-D and have the same pages, heads and page size", given=shapes, hint=hint
        )
    if 0 in k_pages.shape[1:] or v_pages.shape[3] == 0:
        raise ShapeError(
            "pages must hold something", given=shapes, hint="at least one head, one token and one dimension"
        )
    if k_pages.dtype != v_pages.dtype or k_pages.device != v_pages.device:
        given = f"{k_pages.dtype} on {k_pages.device} and {v_pages.dtype} on {v_pages.device}"
        raise DTypeError(
            "k_pages and v_pages must have one data type and device", given=given, hint="one pool for both"
        )
    if (k_pages.shape[3] > 1 and k_pages.stride(3) != 1) or (v_pages.shape[3] > 1 and v_pages.stride(3) != 1):
        given = f"strides {k_pages.stride()} and {v_pages.stride()}"
        raise ShapeError(
            "the last dimension of a page must have stride 1", given=given, hint="pages of [.., tokens, dim] in memory"
        )
    if k_pages.requires_grad or v_pages.requires_grad:
        raise UnsupportedError(
            "a paged cache has no gradient", given="pages that require grad", hint=".detach(), or dense keys"
        )


def _check_lists(kv: PagedKV) -> None:
    lists = {name: getattr(kv, name) for name in ("page_indices", "page_starts", "kv_lengths")}
    _check_tensors(**lists)
    for name, x in lists.items():
        if x.dim() != 1 or x.dtype != torch.int32 or x.shape[0] > 1 and x.stride(0) != 1:
            given = f"{x.dtype}, shape {tuple(x.shape)}, strides {x.stride()}"
            raise DTypeError(f"{name} must be int32, of one dimension, contiguous", given=given, hint=f"{name}.int()")
        if x.device != kv.k_pages.device:
            given, hint = f"{x.device} and {kv.k_pages.device}", f"{name}.to({str(kv.k_pages.device)!r})"
            raise DeviceError(f"{name} must be where the pages are", given=given, hint=hint)
    if kv.page_starts.shape != kv.kv_lengths.shape:
        given = f"{tuple(kv.page_starts.shape)} and {tuple(kv.kv_lengths.shape)}"
        raise ShapeError(
            "page_starts and kv_lengths must have one entry a request", given=given, hint="[batch] for both"
        )
    if not isinstance(kv.max_length, int) or kv.max_length < 0:
        raise OptionError(
            "max_length must be an int of at least 0", given=repr(kv.max_length), hint="tokens of a request at most"
        )


def _check_scale(name: str, scale: Any, k_pages: Tensor) -> None:
    if scale is None:
        return
    _check_tensors(**{name: scale})
    if scale.dtype != torch.float32 or scale.dim() != 1 or scale.shape[0] not in (1, k_pages.shape[1]):
        given = f"{scale.dtype}, shape {tuple(scale.shape)}"
        raise ShapeError(f"{name} must be float32, [1] or [kv_heads]", given=given, hint=f"{name}.float().reshape(-1)")
    if scale.device != k_pages.device:
        given = f"{scale.device} and {k_pages.device}"
        raise DeviceError(
            f"{name} must be where the pages are", given=given, hint=f"{name}.to({str(k_pages.device)!r})"
        )


__all__ = ["LAYOUTS", "PagedKV"]
