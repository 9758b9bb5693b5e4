"""PagedKVCache: keys and values of many requests in pages, of several layers over one page table.

Reads new tokens; makes PagedKV, what `paged_attention` reads. The idea: which page belongs to whom is decided on the host, once for
all layers; what is in the pages is written and read on the device, which is told of pages and lengths and never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import CallError, DeviceError, DTypeError, OptionError, ShapeError, UnsupportedError
from flexattn.runtime import device as devices
from flexattn.runtime.append_pages import TYPES, Side, Where, append_pages
from flexattn.runtime.page_table import PageTable, to_device
from flexattn.runtime.pages import LAYOUTS, PagedKV

Slots = Sequence[int] | Tensor


class Allocated(NamedTuple):
    """A request's slot, and how many of its tokens the cache has already."""

    slot: int
    cached: int


class PagedKVCache:
    """Keys and values of many requests in pages of one pool, which grow, shrink, fork and share prefixes.

    A step: `reserve` makes the requests longer by their new tokens, `append` writes those tokens' keys and values, once a layer, and
    `view` is what `paged_attention` reads. Slots are numbers of 0 .. max_requests - 1.

    In a CUDA graph, give `append` and `view` their slots as a tensor on the device: `reserve`, `free` and the others tell the device
    in place, and so may you write other slots into that tensor between replays. A slot that nobody has is an empty request.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page, at least 1.
        kv_heads, qk_dim: heads and dimensions of keys.
        v_dim: of values; None: qk_dim.
        layers: how many.
        dtype: of the pages: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        device: of the pages; None: torch's default.
        layout: 'HND' or 'NHD', of [page, kv_heads, page_size, dim] or [page, page_size, kv_heads, dim] in memory.
        max_requests: slots.
        max_length: tokens of a request at most.
        shared_layers: layer -> the layer whose keys and values it reads instead of having its own.
        v_in_k: values are the first v_dim dimensions of keys, and nothing beside them (MLA).
        k_scale, v_scale: what stored numbers are multiplied with to be keys and values: a number, or float32 [1], [kv_heads],
            [layers, 1] or [layers, kv_heads]. None: 1.

    Raises: OptionError, ShapeError, DTypeError; OutOfPagesError by allocate, fork and reserve.

    Example:
        >>> cache = flexattn.PagedKVCache(8, 16, kv_heads=2, qk_dim=32, dtype=torch.float32, max_requests=4, max_length=64)
        >>> slot, cached = cache.allocate()
        >>> cache.reserve([slot], [20])
        >>> k = v = torch.ones(1, 2, 20, 32)
        >>> cache.append(0, [slot], k, v)
        >>> flexattn.paged_attention(torch.ones(1, 4, 1, 32), cache.view([slot])).shape, cache.pages_used
        (torch.Size([1, 4, 1, 32]), 2)

    Source: Kwon et al., PagedAttention (2023), arXiv:2309.06180; Zheng et al., SGLang (2024), arXiv:2312.07104 (RadixAttention).
    """

    @torch.inference_mode(False)  # whoever writes to the pages next
    def __init__(
        self, num_pages: int, page_size: int, *, kv_heads: int, qk_dim: int, v_dim: int | None = None, layers: int = 1,
        dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None, layout: str = "HND", max_requests: int,
        max_length: int, shared_layers: Mapping[int, int] | None = None, v_in_k: bool = False,
        k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    ) -> None:  # fmt: skip
        v_dim = qk_dim if v_dim is None else v_dim
        _check_sizes(
            num_pages=num_pages, page_size=page_size, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim, layers=layers,
            max_requests=max_requests, max_length=max_length,
        )  # fmt: skip
        _check_kind(dtype, layout, v_dim > qk_dim and v_in_k)
        self.device = torch.empty(0, device=device).device
        self.page_size, self.max_length = page_size, max_length
        self._home = _homes(layers, dict(shared_layers or {}))
        self._place = {home: place for place, home in enumerate(dict.fromkeys(self._home))}  # in the pools
        tokens = (kv_heads, page_size) if layout == "HND" else (page_size, kv_heads)

        def pool(dim: int) -> Tensor:
            made = torch.empty(len(self._place), num_pages, *tokens, dim, dtype=dtype, device=self.device)
            return made if layout == "HND" else made.transpose(2, 3)

        self._k = pool(qk_dim)
        self._v = self._k[..., :v_dim] if v_in_k else pool(v_dim)
        self._is_v_in_k = v_in_k
        self._scales = [
            _scales(name, x, layers, kv_heads, self.device) for name, x in (("k_scale", k_scale), ("v_scale", v_scale))
        ]
        self._inverse = [torch.ones(layers, 1, device=self.device) if x is None else 1 / x for x in self._scales]
        self._table = PageTable(num_pages, page_size, max_requests, max_length, self.device)
        self._sent: tuple[Any, tuple[Tensor, Tensor]] | None = None  # the last step's, which every layer asks for
        self._seen: tuple[Any, tuple[Tensor, Tensor]] | None = None

    # ---------------------------------------------------------------- requests
    @property
    def pages_free(self) -> int:
        """Pages that `reserve` can have, those of known prefixes that no request has among them."""
        return self._table.pages_free

    @property
    def pages_used(self) -> int:
        """Pages that requests have."""
        return self._table.num_pages - self._table.pages_free

    def length(self, slot: int) -> int:
        """Tokens of a request."""
        return self._table.length(slot)

    def allocate(self, tokens: Sequence[int] | None = None) -> Allocated:
        """A slot for a new request.

        Args:
            tokens: ids of its first tokens. Whole pages of the longest prefix that `remember` was told are taken over; never the
                last token, of which a model needs the query.
        Returns: the slot, and how many of the tokens are in its pages, so that the next to be reserved is tokens[cached].
        Raises: OutOfPagesError: no slot is left.
        """
        return Allocated(*self._table.allocate([] if tokens is None else tokens))

    def reserve(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Makes room for new tokens behind the last ones of some requests, whose lengths grow; `append` then writes them.

        A last page that others have too is copied. Known prefixes that no request has make room, the least recently used first.

        Args:
            slots: different ones.
            counts: new tokens of each.
        Raises: OutOfPagesError, ShapeError beyond max_length, OptionError, CallError; nothing has changed then.
        """
        copies = self._table.reserve(slots, counts)
        if copies:
            source, target = to_device(list(zip(*copies)), torch.int64, self.device)
            for pool in (self._k,) if self._is_v_in_k else (self._k, self._v):
                plain = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                plain[:, target] = plain[:, source]

    def free(self, slot: int) -> None:
        """Ends a request. Raises: OptionError."""
        self._table.free(slot)

    def fork(self, slot: int) -> int:
        """A slot with the same tokens in the same pages, when every layer has been appended; the next of both to grow copies the last
        page, if it is not full.

        Raises: OptionError, OutOfPagesError: no slot is left.
        """
        return self._table.fork(slot)

    def truncate(self, slot: int, length: int) -> None:
        """Drops all tokens of a request but the first `length`: drafts that were not accepted. Raises: OptionError, ShapeError."""
        self._table.truncate(slot, length)

    def remember(self, slot: int, tokens: Sequence[int]) -> None:
        """Makes the whole pages of a request a prefix that `allocate` finds; call it when every layer has been appended.

        Args:
            slot: whose pages.
            tokens: ids of its first tokens, at most as many as it has.
        Raises: OptionError, ShapeError, CallError where its pages are known for other tokens.
        """
        self._table.remember(slot, tokens)

    def check(self) -> None:
        """Compares all records, also with the device's, for which it waits. Raises: PageTableError, which names what is wrong."""
        self._table.check()

    # ---------------------------------------------------------------- tokens
    def append(
        self, layer: int, slots: Slots, k: Tensor, v: Tensor | None = None, counts: Sequence[int] | Tensor | None = None
    ) -> None:
        """Writes keys and values of the tokens last reserved, as the last ones of each request, in one kernel.

        Args:
            layer: which has its own keys.
            slots: as in `reserve`; or an integer tensor [requests] on the device, whose requests nobody checks.
            k: [requests, kv_heads, n, qk_dim], n tokens of each; or with counts [all tokens, kv_heads, qk_dim], one request after
                the other. bfloat16, float16 or float32; divided by k_scale and rounded to the pages' type, the largest of 8 bits at
                most.
            v: the same of v_dim; None with v_in_k.
            counts: tokens of each request, as in `reserve`; or an integer tensor.
        Raises: CallError, ShapeError, DTypeError, DeviceError, OptionError, UnsupportedError.
        """
        if self._home_of(layer) != layer:
            hint = f"append to layer {self._home[layer]} alone"
            raise CallError("a layer that shares another's keys has none of its own", given=f"layer {layer}", hint=hint)
        self._check_new("k", k, self._k, counts)
        if (v is None) != self._is_v_in_k:
            given, hint = "none" if v is None else "values", "v, unless v_in_k=True"
            raise CallError("values must be given where they do not lie within keys", given=given, hint=hint)
        new_k = _in_heads(k)
        requests = len(slots)
        where = Where(*self._ends(slots, counts, k), self._table.table, self._table.lengths)
        if counts is None and new_k.shape[0] != requests:
            raise ShapeError(
                f"k must be [{requests}, kv_heads, n, qk_dim]", given=tuple(k.shape), hint="one entry a slot"
            )
        place, side = self._place[layer], None
        if v is not None:
            self._check_new("v", v, self._v, counts)
            if v.shape[:-1] != k.shape[:-1]:
                given = f"{tuple(k.shape)} and {tuple(v.shape)}"
                raise ShapeError("k and v must have the same tokens and heads", given=given, hint="only dim may differ")
            side = Side(_in_heads(v), self._v[place], self._inverse[1][layer])
        append_pages(Side(new_k, self._k[place], self._inverse[0][layer]), side, where)

    def view(self, slots: Slots, layer: int = 0) -> PagedKV:
        """What `paged_attention` reads of some requests. Lengths are those of now; with slots as a tensor, and in a CUDA graph, those
        of the replay.

        Args:
            slots: any, also one twice; or an integer tensor [batch] on the device.
            layer: whose keys and values; of one that shares, the other's.
        Raises: OptionError, CallError.
        """
        home = self._home_of(layer)
        place, scales = self._place[home], (None if x is None else x[home] for x in self._scales)
        most = self.max_length
        if not isinstance(slots, Tensor):
            longest = max((self.length(s) for s in slots), default=0)
            most = min(most, -(-longest // self.page_size) * self.page_size)
        starts, lengths = self._starts(slots)
        return PagedKV(self._k[place], self._v[place], self._table.table.view(-1), starts, lengths, most, *scales)

    def csr(self, slots: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """FlashInfer's form: indptr int32 [batch + 1], indices int32 [all pages], last_page_len int32 [batch], 0 of no token.

        Raises: OptionError.
        """
        pages = [self._table.pages_of(slot) for slot in slots]
        ends = list(accumulate(map(len, pages), initial=0))
        last = [self.length(slot) - max(len(p) - 1, 0) * self.page_size for slot, p in zip(slots, pages)]
        flat = to_device([[*ends, *(page for p in pages for page in p), *last]], torch.int32, self.device)[0]
        indptr, indices, last_page_len = flat.split((len(ends), ends[-1], len(last)))
        return indptr, indices, last_page_len

    # ---------------------------------------------------------------- parts of them
    def _home_of(self, layer: int) -> int:
        """The layer that has a layer's keys."""
        if not 0 <= layer < len(self._home):
            raise OptionError(f"layer must be from 0 to {len(self._home) - 1}", given=layer, hint="a larger layers=")
        return self._home[layer]

    def _ends(self, slots: Slots, counts: Sequence[int] | Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
        """int32 slots, and behind which of all tokens each request's end."""
        each = k.shape[2] if counts is None else 0
        if isinstance(slots, Tensor) or isinstance(counts, Tensor):
            slots = self._on_device(slots)
            many = torch.full_like(slots, each) if counts is None else self._on_device(counts)
            return slots, many.cumsum(0, dtype=torch.int32)
        self._must_not_be_captured()
        given = [each] * len(slots) if counts is None else list(counts)
        fresh = [self._table.fresh(slot) for slot in slots]
        if given != fresh or len(set(slots)) != len(slots):
            hint = "reserve these slots for these counts, then append them once a layer"
            raise ShapeError(
                f"append must write the tokens last reserved, {fresh} of the slots {list(slots)}",
                given=given,
                hint=hint,
            )
        if counts is not None and sum(given) != k.shape[0]:
            raise ShapeError(
                f"k must have the {sum(given)} tokens of counts", given=tuple(k.shape), hint="[total, ...]"
            )
        key = (tuple(slots), tuple(given))
        if self._sent is None or self._sent[0] != key:
            rows = to_device([slots, accumulate(given)], torch.int32, self.device)
            self._sent = (key, (rows[0], rows[1]))
        return self._sent[1]

    def _starts(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Where each request's pages begin in the flat table, and its length."""
        if isinstance(slots, Tensor):
            at = self._on_device(slots)
            return at * self._table.table.shape[1], self._table.lengths[at.long()]
        self._must_not_be_captured()
        key = (self._table.version, tuple(slots))
        if self._seen is None or self._seen[0] != key:
            self._seen = (key, self._starts(to_device([slots], torch.int32, self.device)[0]))
        return self._seen[1]

    def _on_device(self, numbers: Sequence[int] | Tensor) -> Tensor:
        if not isinstance(numbers, Tensor):
            self._must_not_be_captured()
            return to_device([numbers], torch.int32, self.device)[0]
        if numbers.dim() != 1 or numbers.is_floating_point() or numbers.device != self.device:
            given = f"{numbers.dtype} {tuple(numbers.shape)} on {numbers.device}"
            raise DeviceError(
                "slots and counts must be integers [requests] on the cache's device",
                given=given,
                hint="a list of numbers",
            )
        return numbers.int()

    def _must_not_be_captured(self) -> None:
        if devices.is_capturing(self.device):
            hint = "torch.tensor(slots, device=...), made before the capture"
            raise CallError("a CUDA graph needs slots and counts as tensors", given="numbers of the host", hint=hint)

    def _check_new(self, name: str, x: Any, pool: Tensor, counts: Any) -> None:
        if not isinstance(x, Tensor):
            raise CallError(
                f"{name} must be a torch.Tensor", given=type(x).__name__, hint="the layer's new keys or values"
            )
        heads, dim = pool.shape[2], pool.shape[4]
        wanted = f"[requests, {heads}, n, {dim}]" if counts is None else f"[all tokens, {heads}, {dim}]"
        if x.dim() != (4 if counts is None else 3) or (x.shape[1], x.shape[-1]) != (heads, dim):
            hint = "counts, of requests one after the other; none, of a batch with as many tokens each"
            raise ShapeError(f"{name} must be {wanted}", given=tuple(x.shape), hint=hint)
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            hint = f"{name}.float(): the cache rounds by itself"
            raise DTypeError(f"{name} must be bfloat16, float16 or float32", given=x.dtype, hint=hint)
        if x.device != self.device:
            raise DeviceError(
                f"{name} must be on {self.device}", given=x.device, hint=f"{name}.to({str(self.device)!r})"
            )
        if x.requires_grad:
            raise UnsupportedError(
                "a paged cache has no gradient", given=f"{name} that requires grad", hint=".detach()"
            )


# ---------------------------------------------------------------- what a cache is made of
def _in_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] with a last stride of 1."""
    x = x.transpose(0, 1)[None] if x.dim() == 3 else x
    return x if x.stride(3) == 1 else x.contiguous()


def _check_sizes(**sizes: Any) -> None:
    for name, n in sizes.items():
        if not isinstance(n, int) or n < 1:
            raise OptionError(f"{name} must be an int of at least 1", given=repr(n), hint="a positive number")


def _check_kind(dtype: Any, layout: Any, is_too_wide: bool) -> None:
    if dtype not in TYPES:
        raise DTypeError("pages cannot have this data type", given=dtype, hint=f"one of {[str(t) for t in TYPES]}")
    if layout not in LAYOUTS:
        raise OptionError("layout must be 'HND' or 'NHD'", given=repr(layout), hint="'NHD' for tokens before heads")
    if is_too_wide:
        raise ShapeError(
            "values within keys have at most qk_dim dimensions", given="a larger v_dim", hint="v_in_k=False"
        )


def _homes(layers: int, shared: dict[int, int]) -> list[int]:
    """For each layer the one whose keys it reads."""
    for layer, other in shared.items():
        if not (0 <= layer < layers and 0 <= other < layers) or other in shared:
            hint = "the layer that has the keys itself"
            raise OptionError(f"shared_layers must name layers below {layers}", given=f"{layer}: {other}", hint=hint)
    return [shared.get(layer, layer) for layer in range(layers)]


def _scales(name: str, given: Any, layers: int, heads: int, device: torch.device) -> Tensor | None:
    """float32 [layers, 1 or heads]."""
    if given is None:
        return None
    x = torch.as_tensor(given, dtype=torch.float32, device=device)
    x = x.reshape(1, -1) if x.dim() < 2 else x
    if x.dim() != 2 or x.shape[0] not in (1, layers) or x.shape[1] not in (1, heads):
        hint = "a number, [kv_heads] or [layers, kv_heads]"
        raise ShapeError(f"{name} must be for {layers} layers of {heads} heads", given=tuple(x.shape), hint=hint)
    return x.expand(layers, -1).contiguous()


__all__ = ["Allocated", "PagedKVCache"]
