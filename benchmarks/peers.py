"""Who is compared: each peer turns one problem into a call in its own conventions, or says why it cannot.

The idea: a peer gets the same values in its own layout, so that none pays for another's; whatever it raises becomes the
reason of its row. Peers are imported only when they are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.results import package_version


class Unsupported(Exception):
    """The peer has no way to say this problem."""


class Absent(Exception):
    """The peer cannot be imported here."""


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Call:
    """One problem in one peer's conventions.

    Attributes:
        run: run(q, k, v) in the peer's layout -> out in that layout.
        to_own: [batch, heads, length, dim] -> the peer's layout, a contiguous copy.
        to_common: The way back, a view.
        has_backward: Whether gradients can be asked for.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    to_own: Callable[[Tensor], Tensor] = _same
    to_common: Callable[[Tensor], Tensor] = _same
    has_backward: bool = True

    def own(self, problem: Problem, tensors: Sequence[Tensor]) -> list[Tensor]:
        """query, key and value in the peer's layout; values that share memory with keys do so there too."""
        q, k, v = tensors
        key = self.to_own(k)
        return [self.to_own(q), key, key[..., : v.shape[3]] if problem.shape.shares else self.to_own(v)]


@dataclass(frozen=True)
class Peer:
    """A way to compute attention.

    Attributes:
        name: Key of the result rows.
        title: For people.
        package: Whose version its rows state.
        prepare: Problem -> Call; raises Unsupported or Absent, or anything.
    """

    name: str
    title: str
    package: str
    prepare: Callable[[Problem], Call]

    @property
    def version(self) -> str:
        if self.package == "flexattn":
            import flexattn

            return flexattn.__version__
        return torch.__version__ if self.package == "torch" else package_version(self.package)


# ---------------------------------------------------------------- ours
def flexattn_call(problem: Problem, *, in_the_call: bool = False) -> Call:
    """flexattn with a block mask made beforehand, or with mask_mod= in every call."""
    import flexattn

    variant, shape = problem.variant, problem.shape
    options: dict[str, Any] = {"score_mod": variant.score_mod, "enable_gqa": shape.key_heads != shape.heads}
    if variant.mask_mod is not None and in_the_call:
        options["mask_mod"] = variant.mask_mod
    elif variant.mask_mod is not None:
        options["block_mask"] = flexattn.create_block_mask(
            variant.mask_mod, None, None, shape.length, shape.keys, device=problem.device
        )
    return Call(lambda q, k, v: flexattn.flex_attention(q, k, v, **options))


def flexattn_paged_call(problem: Problem, *, page: int = 16, gathers: bool = False) -> Call:
    """flexattn over pages that a table names, in order as FlashInfer's are; mods in logical positions. `gathers`: over a dense copy
    that each call makes of them."""
    import flexattn

    variant, shape, device = problem.variant, problem.shape, problem.device
    if shape.keys % page:
        raise Unsupported(f"its keys fill pages of {page}")
    count = -(-shape.keys // page)
    table = torch.arange(shape.batch * count, dtype=torch.int32, device=device).view(shape.batch, count)
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device)
    known: dict[int, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = known.get(k.data_ptr())
        if pages is None:
            pools = k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:])
            pages = known[k.data_ptr()] = flexattn.PagedKV.from_table(*pools, table, lengths, layout="NHD")
        q, mods = q.transpose(1, 2), {"score_mod": variant.score_mod, "mask_mod": variant.mask_mod}
        if gathers:
            return flexattn.flex_attention(q, *pages.gathered(q.dtype), **mods, enable_gqa=True).transpose(1, 2)
        return flexattn.paged_attention(q, pages, **mods, q_offset=0).transpose(1, 2)

    return Call(run, _swapped_copy, _swap, has_backward=False)


# ---------------------------------------------------------------- torch
@functools.lru_cache(maxsize=4)
def compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """torch.compile of one function for fixed sizes. Without a GPU only Dynamo runs, for the tests of this package."""
    return torch.compile(function, dynamic=False, backend="inductor" if device_type == "cuda" else "eager")


def torch_flex_call(problem: Problem, *, backend: str | None = None, compile: bool = True) -> Call:
    """torch's flex_attention, compiled, with its own block mask; `backend` is its kernel_options' BACKEND."""
    from torch.nn.attention import flex_attention as module

    if backend == "FLASH":
        _flash_attention()  # its kernels; without them torch raises in the middle of a compilation
    variant, shape = problem.variant, problem.shape
    mask = None
    if variant.mask_mod is not None:
        mask = module.create_block_mask(
            variant.mask_mod, None, None, shape.length, shape.keys, device=problem.device.type
        )
    options: dict[str, Any] = {"score_mod": variant.score_mod, "block_mask": mask}
    options["enable_gqa"] = shape.key_heads != shape.heads
    if backend is not None:
        options["kernel_options"] = {"BACKEND": backend}
    function = compiled(module.flex_attention, problem.device.type) if compile else module.flex_attention
    return Call(lambda q, k, v: function(q, k, v, **options))


def sdpa_call(problem: Problem, *, backend: str) -> Call:
    """scaled_dot_product_attention with one of its backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _only_plain(problem, "scaled_dot_product_attention has no argument for it but a dense mask or bias")
    choice, is_causal = getattr(SDPBackend, backend), problem.variant.causal and problem.shape.length > 1
    grouped = problem.shape.key_heads != problem.shape.heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(choice):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

    return Call(run)


def dense_sdpa_call(problem: Problem) -> Call:
    """scaled_dot_product_attention with the mask as a dense boolean tensor; without one where nothing is masked."""
    from torch.nn.attention.flex_attention import create_mask

    variant, shape = problem.variant, problem.shape
    if variant.score_mod is not None:
        raise Unsupported("a score_mod is not a dense mask")
    dense = None
    if variant.mask_mod is not None:
        dense = create_mask(variant.mask_mod, None, None, shape.length, shape.keys, device=problem.device.type)
    return Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense))


def _only_plain(problem: Problem, why: str) -> None:
    variant = problem.variant
    named = [variant.window, variant.soft_cap, variant.alibi, variant.starts]
    if any(x is not None for x in named):
        raise Unsupported(f"{variant.name}: {why}")


# ---------------------------------------------------------------- FlashAttention-4, FlashInfer
def _swap(x: Tensor) -> Tensor:
    """[batch, heads, length, dim] <-> [batch, length, heads, dim]."""
    return x.transpose(1, 2)


def _swapped_copy(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def fa4_call(problem: Problem) -> Call:
    """FlashAttention-4's CuTe kernels; documents as packed sequences."""
    library = _flash_attention()
    variant = problem.variant
    if variant.alibi is not None:
        raise Unsupported(
            "flash_attn_func takes a score_mod as a CuTe function; torch flex with BACKEND='FLASH' writes one"
        )
    options: dict[str, Any] = {"causal": variant.causal}
    if variant.window is not None:
        options["window_size"] = (variant.window - 1, 0)  # keys to the left of the query, and to the right
    if variant.soft_cap is not None:
        options["softcap"] = variant.soft_cap
    if variant.starts is None:
        return Call(lambda q, k, v: library.flash_attn_func(q, k, v, **options)[0], _swapped_copy, _swap)
    ends = packed_ends(problem)
    longest = int(variant.starts.diff().max())
    options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return _packed(problem, lambda q, k, v: library.flash_attn_varlen_func(q, k, v, **options)[0])


def _flash_attention() -> Any:
    try:
        import flash_attn.cute as library
    except Exception as error:  # its import loads libraries and asks for a device
        raise Absent(f"import flash_attn.cute: {said(error)}") from error
    return library


def packed_ends(problem: Problem) -> Tensor:
    """Where the documents of all batch entries end when they lie one after another, int32 [batch * documents + 1]."""
    starts = problem.variant.starts
    assert starts is not None
    length = problem.shape.length
    ends = [starts[:1], *(starts[1:] + i * length for i in range(problem.shape.batch))]
    return torch.cat(ends).to(problem.device, torch.int32)


def _packed(problem: Problem, run: Callable[[Tensor, Tensor, Tensor], Tensor], has_backward: bool = True) -> Call:
    """A call on [batch * length, heads, dim]."""
    batch = problem.shape.batch
    return Call(
        run,
        lambda x: x.transpose(1, 2).flatten(0, 1).contiguous(),
        lambda x: x.unflatten(0, (batch, -1)).transpose(1, 2),
        has_backward,
    )


def flashinfer_call(problem: Problem) -> Call:
    """FlashInfer's prefill on packed sequences; it has no backward."""
    flashinfer = _flashinfer()
    variant, shape = problem.variant, problem.shape
    if shape.length == 1:
        raise Unsupported("one query: see flashinfer_paged")
    if variant.starts is not None:
        ends = packed_ends(problem)
    else:
        ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=problem.device) * shape.length
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(problem.device))
    wrapper.plan(
        ends, ends, shape.heads, shape.key_heads, shape.dim,
        causal=variant.causal, window_left=-1 if variant.window is None else variant.window - 1,
        logits_soft_cap=variant.soft_cap, pos_encoding_mode="NONE" if variant.alibi is None else "ALIBI",
        q_data_type=problem.dtype, kv_data_type=problem.dtype,
    )  # fmt: skip
    return _packed(problem, wrapper.run, has_backward=False)


def flashinfer_paged_call(problem: Problem, *, tensor_cores: bool) -> Call:
    """FlashInfer's decode over pages of 16 keys that lie in order."""
    flashinfer = _flashinfer()
    shape, page, device, variant = problem.shape, 16, problem.device, problem.variant
    if shape.length != 1:
        raise Unsupported("it decodes: one query a request")
    if shape.dim != shape.value_dim:
        raise Unsupported("one head dimension for keys and values: see flashinfer_mla")
    pages = shape.keys // page
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(device), "NHD", use_tensor_cores=tensor_cores)
    wrapper.plan(
        torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * pages,
        torch.arange(shape.batch * pages, dtype=torch.int32, device=device),
        torch.full((shape.batch,), page, dtype=torch.int32, device=device),
        shape.heads, shape.key_heads, shape.dim, page, q_data_type=problem.dtype, kv_data_type=problem.dtype,
        window_left=-1 if variant.window is None else variant.window - 1, logits_soft_cap=variant.soft_cap,
        pos_encoding_mode="NONE" if variant.alibi is None else "ALIBI",
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        paged = (k.view(-1, page, *k.shape[2:]), v.view(-1, page, *v.shape[2:]))
        return wrapper.run(q.squeeze(1), paged).unsqueeze(1)

    return Call(run, _swapped_copy, _swap, has_backward=False)


def flashinfer_mla_call(problem: Problem) -> Call:
    """FlashInfer's multi-head latent attention: one key head whose first columns are the values; pages of 64 keys in order."""
    flashinfer = _flashinfer()
    shape, page, device = problem.shape, 64, problem.device
    if (
        not shape.shares
        or shape.length != 1
        or problem.variant.score_mod is not None
        or problem.variant.window is not None
    ):
        raise Unsupported("one query a request, values within keys, and no mod")
    pages, counts = -(-shape.keys // page), torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(device), backend="auto")
    wrapper.plan(
        counts, counts * pages, torch.arange(shape.batch * pages, dtype=torch.int32, device=device),
        torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=device), shape.heads, shape.value_dim,
        shape.dim - shape.value_dim, page, False, shape.dim**-0.5, problem.dtype, problem.dtype,
    )  # fmt: skip
    latent = shape.value_dim

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, paged = q.squeeze(1), k.view(-1, page, shape.dim)
        return wrapper.run(q[..., :latent], q[..., latent:], paged[..., :latent], paged[..., latent:]).unsqueeze(1)

    return Call(run, _swapped_copy, _swap, has_backward=False)


def _flashinfer() -> Any:
    try:
        import flashinfer
    except Exception as error:  # its import looks for libraries and a compiler
        raise Absent(f"import flashinfer: {said(error)}") from error
    return flashinfer


def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(256 << 20, dtype=torch.uint8, device=device)


def said(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


PEERS = {
    p.name: p
    for p in (
        Peer("flexattn", "flexattn", "flexattn", flexattn_call),
        Peer("flexattn_mask_mod", "flexattn, mask_mod=", "flexattn", functools.partial(flexattn_call, in_the_call=True)),
        Peer("flexattn_paged", "flexattn, pages of 16", "flexattn", flexattn_paged_call),
        Peer("flexattn_paged_64", "flexattn, pages of 64", "flexattn", functools.partial(flexattn_paged_call, page=64)),
        Peer("flexattn_paged_128", "flexattn, pages of 128", "flexattn", functools.partial(flexattn_paged_call, page=128)),
        Peer("flexattn_gathered", "flexattn, pages of 16 gathered", "flexattn",
             functools.partial(flexattn_paged_call, gathers=True)),
        Peer("torch_flex", "torch flex (Triton)", "torch", torch_flex_call),
        Peer("torch_flex_flash", "torch flex (FLASH)", "torch", functools.partial(torch_flex_call, backend="FLASH")),
        Peer("torch_flex_eager", "torch flex, eager", "torch", functools.partial(torch_flex_call, compile=False)),
        Peer("sdpa_cudnn", "SDPA cuDNN", "torch", functools.partial(sdpa_call, backend="CUDNN_ATTENTION")),
        Peer("sdpa_flash", "SDPA flash", "torch", functools.partial(sdpa_call, backend="FLASH_ATTENTION")),
        Peer("sdpa_dense", "SDPA, dense mask", "torch", dense_sdpa_call),
        Peer("fa4", "FlashAttention-4", "flash-attn-4", fa4_call),
        Peer("flashinfer", "FlashInfer", "flashinfer-python", flashinfer_call),
        Peer("flashinfer_paged", "FlashInfer, pages of 16", "flashinfer-python",
             functools.partial(flashinfer_paged_call, tensor_cores=False)),
        Peer("flashinfer_paged_tc", "FlashInfer, pages of 16, tensor cores", "flashinfer-python",
             functools.partial(flashinfer_paged_call, tensor_cores=True)),
        Peer("flashinfer_mla", "FlashInfer, MLA", "flashinfer-python", flashinfer_mla_call),
    )
}  # fmt: skip
