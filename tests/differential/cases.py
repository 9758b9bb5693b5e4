"""The mods that torch tests its flex_attention with, as a table: a row is a case, and every test of this folder runs the rows.

A row makes a score_mod and a mask_mod from `Sizes` and from the tensors they capture. The functions are written here as a user writes
them; torch, the float64 oracle and flexattn each get the very same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Mod = Callable[..., Any]
INF = float("inf")


@dataclass(frozen=True)
class Sizes:
    """One problem: sizes, block size of the mask, dtype of query, key and value."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int
    v_dim: int
    block: int | tuple[int, int] = 128
    kv_batch: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def longest(self) -> int:
        """Length of a table that is read by query and by key positions."""
        return max(self.q_len, self.kv_len)

    def __str__(self) -> str:
        kv = self.batch if self.kv_batch is None else self.kv_batch
        name = str(self.dtype).removeprefix("torch.")
        shapes = f"q[{self.batch},{self.q_heads},{self.q_len},{self.qk_dim}] kv[{kv},{self.kv_heads},{self.kv_len},{self.v_dim}]"
        return f"{shapes} block {self.block} {name}"


@dataclass(frozen=True)
class Case:
    """A row.

    Attributes:
        name: the test's id.
        torch_names: what torch's own test groups call it.
        score: (sizes, *captured) -> score_mod; None for the identity.
        mask: (sizes, *captured) -> mask_mod; None keeps every pair.
        captured: sizes -> tensors; those that require grad are compared by their gradients too.
        mask_by: "b", "h" or "bh" where the mask tells batches or heads apart.
        torch_cannot: words of torch's error where its compiled form cannot do the case; then only the oracle judges.
        torch_static: torch compiles the case for constant sizes only; it is compared at the first sizes.
        in_all_dtypes: compared with torch's kernels in float32 and float16 as well as in bfloat16.
    """

    name: str
    torch_names: tuple[str, ...]
    score: Callable[..., Mod] | None = None
    mask: Callable[..., Mod] | None = None
    captured: Callable[[Sizes], Sequence[Tensor]] = lambda z: ()
    mask_by: str = ""
    torch_cannot: str = ""
    torch_static: bool = False
    in_all_dtypes: bool = False


# ---------------------------------------------------------------- captured tensors
def fixed(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that need no gradient."""
    return torch.randn(shape).to(dtype)


def learnt(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers that need a gradient."""
    return fixed(*shape, dtype=dtype).requires_grad_()


def documents(length: int, width: int = 29) -> Tensor:
    """Document of each token, int32; none ends at a block's edge."""
    return (torch.arange(length) // width).to(torch.int32)


def offsets_of(ids: Tensor) -> Tensor:
    """First token of each document and the end, as a jagged tensor stores them."""
    return F.pad(torch.bincount(ids).cumsum(0), (1, 0))


def lengths(z: Sizes) -> Tensor:
    """A number of keys for each batch entry, at least 1."""
    return torch.tensor([max(1, z.kv_len * (n + 1) // (z.batch + 1)) for n in range(z.batch)])


# ---------------------------------------------------------------- masks
def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def within(size: int, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx <= size) & (kv_idx - q_idx <= size)


def neighbourhood(width: int, reach: int) -> Mod:
    """Two-dimensional windows of (2 reach + 1)^2 on a canvas `width` wide, both axes clamped at the left and the top."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_y, q_x, kv_y, kv_x = q_idx // width, q_idx % width, kv_idx // width, kv_idx % width
        centre_y, centre_x = torch.clamp(q_y, reach), torch.clamp(q_x, reach, width - 1 - reach)
        return ((centre_x - kv_x).abs() <= reach) & ((centre_y - kv_y).abs() <= reach)

    return mask


class Window:
    """A mask_mod that is an object."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.size)


def jagged(z: Sizes, ids: Tensor, offsets: Tensor) -> Mod:
    """Causal inside each document, by positions counted from its first token."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        q_local, kv_local = q_idx - offsets[ids[q_idx]], kv_idx - offsets[ids[kv_idx]]
        return (ids[q_idx] == ids[kv_idx]) & (q_local >= kv_local)

    return mask


def ending_together(z: Sizes) -> Mod:
    """Causal, the last query at the last key."""
    ahead = z.kv_len - z.q_len
    return lambda b, h, i, j: i + ahead >= j


def causal_after_a_third(z: Sizes) -> Mod:
    """Causal; the first third of the rows keeps nothing."""
    first = z.q_len // 3
    return lambda b, h, i, j: (i >= j) & (i > first)


def all_masks(*masks: Mod) -> Mod:
    return lambda b, h, i, j: functools.reduce(lambda x, y: x & y, [mask(b, h, i, j) for mask in masks])


# ---------------------------------------------------------------- scores
def kept_score(mask: Mod, score: Mod = lambda s, b, h, i, j: s) -> Mod:
    """A mask spelled in the score: -inf where it drops."""
    return lambda s, b, h, i, j: torch.where(mask(b, h, i, j), score(s, b, h, i, j), -INF)


def relative(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s + (q_idx - kv_idx)


def alibi(z: Sizes) -> Mod:
    return lambda s, b, h, i, j: s + (j - i) * torch.exp2(-(h + 1) * 2.0)


def composed(z: Sizes) -> Mod:
    def first(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + q_idx * 0.01

    def second(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.where(q_idx >= kv_idx, s, -INF)

    return lambda s, b, h, i, j: second(first(s, b, h, i, j), b, h, i, j)


def decomposed(z: Sizes, rows: Tensor, columns: Tensor) -> Mod:
    """Relative positions of an image in two tables, stored flat and captured as views."""
    by_row, by_column = (x.view(z.batch, z.q_heads, z.q_len, -1) for x in (rows, columns))
    return lambda s, b, h, i, j: s + by_row[b, h, i, j // 8] + by_column[b, h, i, j % 8]


def by_distance(z: Sizes, table: Tensor) -> Mod:
    """A table of relative positions."""
    reach = z.kv_len
    return lambda s, b, h, i, j: s + table[i - j + reach]


def by_head_and_distance(z: Sizes, table: Tensor) -> Mod:
    """A table of relative positions, one row a head."""
    reach = z.kv_len
    return lambda s, b, h, i, j: s + table[h, i - j + reach]


def local(z: Sizes, table: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + table[torch.clamp(i - j, -8, 8) + 8]


def global_tokens(z: Sizes, table: Tensor) -> Mod:
    return lambda s, b, h, i, j: torch.where(j < 4, s + table[h, torch.clamp(j, max=3)], s)


def gated(z: Sizes, gate: Tensor) -> Mod:
    return lambda s, b, h, i, j: s * torch.sigmoid(gate[h])


# Words of torch's errors.
DOUBLE_INDEX = "Using multiple indexing operations on the same tensor that requires gradients"
NO_BUFFERS = "Buffers cannot be created while lowering a pointwise subgraph"
TOO_MUCH_SHARED_MEMORY = "No valid triton configs. OutOfMemoryError: out of resource"


# fmt: off
_SCORES = [
    Case("identity", ("builtin_score_mods", "inputs_are_realized"), lambda z: lambda s, b, h, i, j: s, in_all_dtypes=True),
    Case("times two", ("builtin_score_mods",), lambda z: lambda s, b, h, i, j: s * 2),
    Case("squared", ("builtin_score_mods",), lambda z: lambda s, b, h, i, j: s * s),
    Case("causal score", ("builtin_score_mods",), lambda z: kept_score(causal), in_all_dtypes=True),
    Case("inverse causal score", ("builtin_score_mods",), lambda z: kept_score(lambda b, h, i, j: i <= j)),
    Case("relative bias", ("builtin_score_mods",), lambda z: relative),
    Case("relative causal bias", ("builtin_score_mods",), lambda z: kept_score(causal, relative)),
    Case("alibi", ("builtin_score_mods",), alibi, in_all_dtypes=True),
    Case("alibi and causal mask", ("builtin_score_mods",), alibi, lambda z: causal),
    Case("windowed score", ("windowed_no_mask_vs_sdpa",), lambda z: kept_score(functools.partial(within, 40))),
    Case("soft cap", ("builtin_score_mods",), lambda z: lambda s, b, h, i, j: 2 * torch.tanh(s / 2), lambda z: causal,
         in_all_dtypes=True),
    Case("trigonometric", ("fw_bw_graph_correctness",), lambda z: lambda s, b, h, i, j: torch.cos(s) * torch.sin(s) + b),
    Case("silu", ("silu",), lambda z: lambda s, b, h, i, j: F.silu(s)),
    Case("function composition", ("function_composition",), composed),
    Case("skip odd keys", ("skip_odd_keys",), lambda z: kept_score(lambda b, h, i, j: j % 2 == 0)),
    Case("neighbourhood score", ("natten_2d",), lambda z: kept_score(neighbourhood(12, 3))),
    Case("padded dense causal", ("padded_dense_causal",),
         lambda z, n: kept_score(lambda b, h, i, j: (i >= j) & (j < n[b])), captured=lambda z: [lengths(z)]),
    Case("jagged offsets", ("njt_causal",), lambda z, ids, starts: kept_score(jagged(z, ids, starts)),
         captured=lambda z: [documents(z.longest), offsets_of(documents(z.longest))]),
    Case("sequence masking", ("seq_masking",), lambda z, seq: kept_score(lambda b, h, i, j: seq[i] == seq[j]),
         captured=lambda z: [torch.arange(z.longest) > z.longest // 2]),
    Case("causal by batch, else both ways", ("dependent_causal_bidirectional",),
         lambda z, n: kept_score(lambda b, h, i, j: (i >= j) | (i <= n[b]) & (j <= n[b])), captured=lambda z: [lengths(z)]),
    Case("poisonous", ("poison",), lambda z: lambda s, b, h, i, j: s + torch.log((i - j).float()) + 1.0 / (i - j),
         lambda z: lambda b, h, i, j: i > j),
    # captured tensors
    Case("captured scale", ("captured_scale",), lambda z, scale: lambda s, b, h, i, j: s * scale, captured=lambda z: [torch.tensor(3)]),
    Case("captured scale of shape 1", ("captured_scale",), lambda z, t: lambda s, b, h, i, j: s * t[0], captured=lambda z: [learnt(1)]),
    Case("buffer by head", ("captured_buffers",), lambda z, t: lambda s, b, h, i, j: s * t[h], captured=lambda z: [fixed(z.q_heads)]),
    Case("buffers of every rank", ("captured_buffers_all_dims",),
         lambda z, t0, t1, t2, t3, t4: lambda s, b, h, i, j: s * t0 + t1[b] + t2[b, h] + t3[h, i, j] * t4[b, h, i, j],
         captured=lambda z: [fixed(), fixed(z.batch), fixed(z.batch, z.q_heads), fixed(z.q_heads, z.q_len, z.kv_len),
                             fixed(z.batch, z.q_heads, z.q_len, z.kv_len)]),
    Case("bias by sequence", ("load_from_bias_seq_only",), lambda z, t: lambda s, b, h, i, j: s + t[i, j],
         captured=lambda z: [fixed(z.q_len, z.kv_len, dtype=z.dtype)], in_all_dtypes=True),
    Case("bias by sequence and batch", ("load_from_bias_seq_batch",), lambda z, t: lambda s, b, h, i, j: s + t[b, i, j],
         captured=lambda z: [fixed(z.batch, z.q_len, z.kv_len, dtype=z.dtype)]),
    Case("bias by head, sequence and batch", ("load_from_bias_head_seq_batch",),
         lambda z, t: lambda s, b, h, i, j: s + t[b, h, i, j],
         captured=lambda z: [fixed(z.batch, z.q_heads, z.q_len, z.kv_len, dtype=z.dtype)]),
    Case("relative table", ("load_rel_bias",), by_distance,
         captured=lambda z: [fixed(z.q_len + z.kv_len, dtype=z.dtype)]),
    Case("view buffer", ("load_from_view_buffer",), decomposed,
         captured=lambda z: [fixed(z.batch * z.q_heads, z.q_len, -(-z.kv_len // 8)), fixed(z.batch * z.q_heads, z.q_len, 8)],
         torch_cannot=TOO_MUCH_SHARED_MEMORY),
    Case("index of an index", ("index_multiple",), lambda z, t: lambda s, b, h, i, j: s + t[b][i],
         captured=lambda z: [fixed(z.batch, z.q_len)]),
    Case("constant, then pair, then query", ("index_weird1",), lambda z, t: lambda s, b, h, i, j: s + t[0][b, h][i],
         captured=lambda z: [fixed(4, z.batch, z.q_heads, z.q_len)]),
    Case("a tensor that says which", ("index_weird2",), lambda z, t, which: lambda s, b, h, i, j: s + t[b][h][which, i],
         captured=lambda z: [fixed(z.batch, z.q_heads, 4, z.q_len), torch.tensor(2)]),
    Case("indirect index", ("index_multiple",), lambda z, t, ids: lambda s, b, h, i, j: s + t[ids[i], ids[j]],
         captured=lambda z: [fixed(9, 9), torch.randint(0, 9, (z.longest,))]),
    Case("sum of a short row", ("reduction_unrolled",), lambda z, t: lambda s, b, h, i, j: s + t[i].sum() * 0.5,
         captured=lambda z: [fixed(z.q_len, 3)], torch_static=True),
    Case("dot of short rows", ("reduction_unrolled",), lambda z, x, y: lambda s, b, h, i, j: s + torch.dot(x[i], y[j]),
         captured=lambda z: [fixed(z.q_len, 3), fixed(z.kv_len, 3)], torch_static=True),
    Case("sum of a whole table", ("captured_reduction",), lambda z, t: lambda s, b, h, i, j: s + t.sum() * 0.01,
         captured=lambda z: [fixed(64)], torch_cannot=NO_BUFFERS, torch_static=True),
]

_MASKS = [
    Case("causal mask", ("causal_block", "causal_block_paged"), None, lambda z: causal, in_all_dtypes=True),
    Case("causal mask ending together",
         ("causal_block_non_divisible", "non_divisible_offset_mask", "decode_at_different_input_position"), None, ending_together),
    Case("offset in a tensor", ("non_divisible_offset_mask_with_captured_buffer",), None, lambda z, n: lambda b, h, i, j: i + n >= j,
         captured=lambda z: [torch.tensor(z.kv_len - z.q_len)]),
    Case("offset by batch in a tensor",
         ("non_divisible_multi_token_offset_mask", "non_divisible_multi_token_offset_mask_with_captured_buffer"), None,
         lambda z, n: lambda b, h, i, j: i + n[b] >= j, captured=lambda z: [lengths(z)], mask_by="b"),
    Case("window mask", ("windowed_full_mask_vs_sdpa",), None, lambda z: lambda b, h, i, j: (i >= j) & (i - j < 40)),
    Case("window half in mask, half in score", ("windowed_partial_block_vs_sdpa",), lambda z: kept_score(lambda b, h, i, j: i - j < 40),
         lambda z: causal),
    Case("documents", ("doc_mask_sparse",), None, lambda z, ids: lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j),
         captured=lambda z: [documents(z.longest)]),
    Case("documents by batch", ("document_masking_edge_case", "doc_mask_clamped"), None,
         lambda z, ids: lambda b, h, i, j: ids[b, i] == ids[b, j],
         captured=lambda z: [torch.stack([documents(z.longest, 17 + 20 * n) for n in range(z.batch)])], mask_by="b"),
    Case("jagged offsets in the mask", ("njt_causal",), None, jagged,
         captured=lambda z: [documents(z.longest), offsets_of(documents(z.longest))]),
    Case("first rows empty", ("fully_masked_out_rows", "fully_masked_out_rows_0_check", "lse_masked_output"),
         lambda z: lambda s, b, h, i, j: s * 2, causal_after_a_third, in_all_dtypes=True),
    Case("rows of half the batch empty", ("fully_masked_out_rows_gqa",), None, lambda z, n: lambda b, h, i, j: (j < n[b]) & (b != 0),
         captured=lambda z: [lengths(z)], mask_by="b"),
    Case("nothing kept", ("fully_masked_out_rows",), None, lambda z: lambda b, h, i, j: j - i > 10000),
    Case("modular indexing", ("modular_indexing",), None, lambda z: lambda b, h, i, j: (i % 17 == j % 17) | (i // 40 == j // 40)),
    Case("modular indexing below zero", ("modular_indexing",),
         lambda z: lambda s, b, h, i, j: s + ((i - j) % 7) * 0.3 - (i - j) // 5 * 0.1,
         lambda z: lambda b, h, i, j: (j - i) // 16 != -1),
    Case("neighbourhood", ("natten_2d",), None, lambda z: neighbourhood(12, 3)),
    Case("head-dependent window", ("head_dependent_mask_mod", "broadcasted_head_block_mask"), None,
         lambda z, w: lambda b, h, i, j: (i >= j) & (i - j < w[h]), captured=lambda z: [torch.arange(z.q_heads) * 11 + 9], mask_by="h"),
    Case("batch and head decide", ("mask_mod_combiners", "multiple_mask_calls"), None,
         lambda z: lambda b, h, i, j: (i >= j) & (((b + h) % 2 == 0) | (j % 3 != 1)), mask_by="bh"),
    Case("masks combined", ("mask_mod_combiners",), None,
         lambda z: all_masks(causal, Window(60), lambda b, h, i, j: (i // 25 == j // 25) | (j < 9))),
    Case("partial function", ("mask_mod_functools_partial",), None, lambda z: functools.partial(within, 33)),
    Case("callable object", ("callable_class_mask_mod",), None, lambda z: Window(41)),
    Case("boolean table", ("small_q_kv_len", "make_block_mask"), None, lambda z, t: lambda b, h, i, j: t[b, i, j],
         captured=lambda z: [torch.rand(z.batch, z.q_len, z.kv_len) < 0.2], mask_by="b"),
    Case("index made in the mod", ("new_empty_mask_mod",), lambda z, t: lambda s, b, h, i, j: s + t[b, h.new_zeros(h.shape), i, j],
         lambda z, t: lambda b, h, i, j: t[b, h.new_zeros(h.shape), i, j],
         captured=lambda z: [torch.rand(z.batch, 1, z.q_len, z.kv_len) < 0.5], mask_by="b"),
    Case("score and mask share a table", ("seq_masking",), lambda z, ids: lambda s, b, h, i, j: s + ids[j] * 0.1,
         lambda z, ids: lambda b, h, i, j: ids[i] >= ids[j], captured=lambda z: [documents(z.longest)]),
]

_BIASES = [
    Case("relative 1-D", ("relative_1d_bias",), by_distance,
         captured=lambda z: [learnt(z.q_len + z.kv_len)], in_all_dtypes=True),
    Case("absolute 2-D", ("absolute_2d_bias", "comparison_vs_sdpa"), lambda z, t: lambda s, b, h, i, j: s + t[i, j],
         captured=lambda z: [learnt(z.q_len, z.kv_len)], in_all_dtypes=True),
    Case("relative by head", ("head_specific_bias",), by_head_and_distance, captured=lambda z: [learnt(z.q_heads, z.q_len + z.kv_len)]),
    Case("by batch and head", ("batch_head_bias",), lambda z, t: lambda s, b, h, i, j: s + t[b, h, i, j],
         captured=lambda z: [learnt(z.batch, z.q_heads, z.q_len, z.kv_len, dtype=z.dtype)]),
    Case("multiplicative", ("multiplicative_bias",), lambda z, t: lambda s, b, h, i, j: s * t[i], captured=lambda z: [learnt(z.q_len)]),
    Case("local window", ("local_window_bias",), local, captured=lambda z: [learnt(17)]),
    Case("global tokens", ("global_tokens_bias",), global_tokens, captured=lambda z: [learnt(z.q_heads, 4)]),
    Case("constant, pair and query", ("weird_bias",), lambda z, t: lambda s, b, h, i, j: s + t[b, h, 0, i],
         captured=lambda z: [learnt(z.batch, z.q_heads, 4, z.q_len)]),
    Case("indirect", ("indirect_bias",), lambda z, t, ids: lambda s, b, h, i, j: s + t[ids[i]],
         captured=lambda z: [learnt(z.longest), torch.randint(0, z.longest, (z.longest,))]),
    Case("symmetric", ("symmetric_bias", "backprop_error_case"), lambda z, t: lambda s, b, h, i, j: s + t[i] + t[j],
         captured=lambda z: [learnt(z.longest)], torch_cannot=DOUBLE_INDEX),
    Case("flipped", ("flipped_indexed_bias",), lambda z, t: lambda s, b, h, i, j: s + t[j, i],
         captured=lambda z: [learnt(z.kv_len, z.q_len)]),
    Case("head gate", ("head_specific_gate",), gated, captured=lambda z: [learnt(z.q_heads)]),
    Case("two tables", ("distinct_biases",), lambda z, x, y: lambda s, b, h, i, j: s + x[i] + y[j],
         captured=lambda z: [learnt(z.q_len), learnt(z.kv_len)]),
    Case("bias under a mask", ("bias_global_compiled",), lambda z, t: lambda s, b, h, i, j: s + t[i, j], lambda z, t: causal,
         captured=lambda z: [learnt(z.q_len, z.kv_len, dtype=z.dtype)]),
    Case("bias by head", ("head_bias_req_grad",), lambda z, t: lambda s, b, h, i, j: s + t[h], captured=lambda z: [learnt(z.q_heads)]),
    Case("learnt cap", ("captured_scale",), lambda z, t: lambda s, b, h, i, j: t[h] * torch.tanh(s / t[h]),
         captured=lambda z: [(torch.rand(z.q_heads) + 1).requires_grad_()], torch_cannot=DOUBLE_INDEX),
]
# fmt: on

CASES: dict[str, Case] = {case.name: case for case in (*_SCORES, *_MASKS, *_BIASES)}
