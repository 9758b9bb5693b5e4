"""Which calls take the decode kernel, into how many parts they split keys, and what explain() says: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import BlockMask, create_block_mask, explain
from flexattn.codegen.target import target_of
from flexattn.runtime import decode
from flexattn.runtime.attention import AuxRequest, prepare

H100 = target_of(90)


def inputs(
    q_len: int = 1, kv_len: int = 4096, batch: int = 1, heads: tuple[int, int] = (8, 2)
) -> tuple[torch.Tensor, ...]:
    sizes = ((heads[0], q_len), (heads[1], kv_len), (heads[1], kv_len))
    return tuple(torch.zeros(batch, *size, 64, dtype=torch.bfloat16) for size in sizes)


def problem(qkv: tuple[torch.Tensor, ...], options: Any = None, mask: Any = None, mask_mod: Any = None) -> Any:
    return prepare(qkv, None, (mask, mask_mod), enable_gqa=True, aux=AuxRequest(), options=options)[0]


@pytest.mark.parametrize(
    "qkv, options, is_decode, words",
    [
        (inputs(), None, True, "few queries"),
        (inputs(16), None, True, "few queries"),
        (inputs(64, heads=(8, 8)), None, True, "few queries"),
        (inputs(64, heads=(24, 2)), None, True, "few queries"),
        (inputs(64, heads=(24, 2), batch=16), None, False, "heads for all processors"),
        (inputs(65), None, False, "at most 64 queries"),
        (inputs(1, 255), None, False, "at least 256 keys"),
        (inputs(), {"BLOCK_N": 64}, False, "fixes tiles"),
        (inputs(), {"warp_specialized": False}, False, "given by kernel_options"),
        (inputs(), {"FORCE_USE_FLEX_ATTENTION": True}, False, "given by kernel_options"),
        (inputs(), {"FORCE_USE_FLEX_ATTENTION": False}, True, "few queries"),
    ],
)
def test_by_sizes_and_options(qkv: tuple[torch.Tensor, ...], options: Any, is_decode: bool, words: str) -> None:
    found, why = decode.decode_choice(problem(qkv, options), H100)
    assert found == is_decode and words in why


def test_a_gradient_and_lists_of_blocks_are_for_the_forward_kernel() -> None:
    q, k, v = inputs()
    found, why = decode.decode_choice(problem((q.requires_grad_(), k, v)), H100)
    assert not found and "gradient" in why
    with torch.no_grad():
        assert decode.decode_choice(problem((q, k, v)), H100)[0]
    causal = lambda b, h, q_idx, kv_idx: q_idx + 4095 >= kv_idx
    mask = create_block_mask(causal, None, None, 1, 4096, device="cpu")
    assert decode.decode_choice(problem(inputs(), mask=mask), H100)[0]
    lists = BlockMask.from_kv_blocks(*(x.clone() for x in (mask.kv_num_blocks, mask.kv_indices)), seq_lengths=(1, 4096))
    found, why = decode.decode_choice(problem(inputs(), mask=lists), H100)
    assert not found and "lists of blocks" in why


def test_splits_follow_lengths_and_the_callers_word() -> None:
    config = decode.TileConfig(16, 64, 4, 3)
    count = lambda qkv, options=None: decode.splits_of(problem(qkv, options), config, H100)
    assert count(inputs(kv_len=65536)) == 64 and count(inputs(kv_len=64)) == 1
    assert count(inputs(kv_len=65536, batch=8)) == 8
    assert count(inputs(kv_len=65536), {"SPLIT_KV": 5}) == 5
    assert count(inputs(17, kv_len=65536)) == 13, "68 rows of a key head are five tiles"


def test_explain_says_what_a_gpu_would_run() -> None:
    text = explain(*inputs(), enable_gqa=True, mask_mod=lambda b, h, q_idx, kv_idx: q_idx + 4095 >= kv_idx)
    for words in (
        "attention_decode",
        "the decode kernel: few queries",
        "keys in 32 parts",
        "by formula",
        "zones(b, h, caps)",
    ):
        assert words in text, words
    text = explain(*inputs(kv_len=128), enable_gqa=True)
    assert "attention_forward" in text and "not the decode kernel: it takes at most 64 queries" in text
    assert "decode kernel" not in explain(*inputs(q_len=65), enable_gqa=True)


def test_latent_attention_reads_keys_once_whatever_the_strides_of_dimensions_of_one_entry() -> None:
    """Many heads too: the forward kernel has small tiles at such dimensions."""
    from flexattn.runtime.choose import v_in_k

    q, k = torch.zeros(2, 128, 1, 576, dtype=torch.bfloat16), torch.zeros(2, 1, 512, 576, dtype=torch.bfloat16)
    values = k.as_strided((2, 1, 512, 512), (512 * 576, 7, 576, 1))
    for v in (k[..., :512], values):
        assert v_in_k(problem((q, k, v)), H100)
        assert decode.decode_choice(problem((q, k, v)), H100)[0]
    assert not v_in_k(problem((q, k, k[..., 64:])), H100)
    assert not v_in_k(problem((q, k, k.clone()[..., :512])), H100)
