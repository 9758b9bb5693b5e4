"""PagedAttention beside torch's: the same operations give the same tables and caches, and attention is that of dense tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.experimental._paged_attention import PagedAttention as TorchPagedAttention

import flexattn
from flexattn import PagedAttention, create_block_mask, flex_attention
from flexattn.errors import OutOfPagesError, PageShapeError, UnsupportedError
from tests.helpers import assert_explains, causal, on_devices

PAGES, SIZE, BATCH = 12, 16, 4


def pair() -> tuple[PagedAttention, TorchPagedAttention]:
    return PagedAttention(PAGES, SIZE, BATCH, "cpu"), TorchPagedAttention(PAGES, SIZE, BATCH, "cpu")


def both(pages: tuple[Any, Any], name: str, *numbers: int) -> None:
    for paged in pages:
        getattr(paged, name)(*(torch.tensor([n]) for n in numbers))


def assert_same(ours: PagedAttention, theirs: TorchPagedAttention) -> None:
    assert ours.empty_pages == theirs.empty_pages
    assert torch.equal(ours.page_table, theirs.page_table) and torch.equal(ours.capacity, theirs.capacity)
    for b, pages in enumerate(ours.page_table.tolist()):  # torch's keeps what erased requests had
        for logical, page in enumerate(p for p in pages if p >= 0):
            assert ours.physical_to_logical[b, page] == theirs.physical_to_logical[b, page] == logical
    assert ((ours.physical_to_logical >= 0).sum(1) == (ours.page_table >= 0).sum(1)).all()


def near(b, h, q_idx, kv_idx):
    """The last 20 keys."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


def alibi(score, b, h, q_idx, kv_idx):
    """A slope over logical positions."""
    return score - 0.1 * (q_idx - kv_idx)


# ---------------------------------------------------------------- against torch's class
def test_the_same_operations_give_the_same_tables() -> None:
    pages = pair()
    for step in ((0, 20), (1, 16), (0, 30), (2, 100), (0, 33), (1, 1)):
        both(pages, "reserve", *step)
        assert_same(*pages)
    both(pages, "erase", 2)
    assert_same(*pages)
    both(pages, "reserve", 3, 100)
    both(pages, "reserve", 0, 49)
    assert_same(*pages)
    for paged in pages:
        with pytest.raises(AssertionError, match="pages"):
            paged.reserve(torch.tensor([2]), torch.tensor([65]))
    assert_same(*pages)


def test_assign_writes_the_same() -> None:
    pages, caches = pair(), []
    for n, b in ((33, 2), (20, 0)):
        both(pages, "reserve", b, n)
    k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 4)
    positions = torch.tensor([[0, 15, 16, 19, 3], [32, 1, 2, 17, 31]])
    for paged in pages:
        cache = [torch.zeros(1, 3, PAGES * SIZE, dim) for dim in (8, 4)]
        paged.assign(torch.tensor([0, 2]), positions, k, v, *cache)
        caches.append(cache)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(*caches))


@pytest.mark.parametrize("kv_len", [None, torch.tensor([40, 50, 5, 64])])
def test_masks_and_mods_are_the_same(kv_len) -> None:
    pages = pair()
    for b, n in enumerate((40, 50, 5, 33)):
        both(pages, "reserve", b, n)
    masks = (
        create_block_mask(near, BATCH, None, 32, 48, device="cpu", BLOCK_SIZE=SIZE),
        torch_flex.create_block_mask(near, BATCH, None, 32, 48, device="cpu", BLOCK_SIZE=SIZE),
    )
    ours, theirs = (paged.convert_logical_block_mask(mask, None, kv_len) for paged, mask in zip(pages, masks))
    assert isinstance(ours, flexattn.BlockMask) and ours.seq_lengths == theirs.seq_lengths
    for kind in ("kv", "full_kv"):
        counts, found = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
        used = torch.arange(PAGES) < counts[..., None]
        assert torch.equal(found[used], getattr(theirs, f"{kind}_indices")[used])
    b, q, kv = torch.meshgrid(torch.arange(BATCH), torch.arange(48), torch.arange(PAGES * SIZE), indexing="ij")
    for mod in (near, None):
        kept = [paged.get_mask_mod(mod, kv_len)(b, 0, q, kv) for paged in pages]
        assert torch.equal(*kept) and kept[0].any() and not kept[0].all()
    score = torch.randn(b.shape)
    for mod in (alibi, None):
        assert torch.equal(*(paged.get_score_mod(mod, kv_len)(score, b, 0, q, kv) for paged in pages))


def test_attention_is_that_of_torch_over_its_own_class() -> None:
    lengths = [40, 50, 5, 33]
    outs = []
    for paged, mask_of, attend in zip(
        pair(), (create_block_mask, torch_flex.create_block_mask), (flex_attention, torch_flex.flex_attention)
    ):
        torch.manual_seed(0)
        k_cache, v_cache = fill(paged, lengths)
        mask = mask_of(near, BATCH, None, 50, 64, device="cpu", BLOCK_SIZE=SIZE)
        kv_len = torch.tensor(lengths)
        q = torch.randn(BATCH, 4, 50, 16)
        score = paged.get_score_mod(alibi, kv_len)
        outs.append(
            attend(q, k_cache, v_cache, score, paged.convert_logical_block_mask(mask, None, kv_len), enable_gqa=True)
        )
    for b, n in enumerate(lengths):
        assert torch.allclose(outs[0][b, :, :n], outs[1][b, :, :n], atol=1e-5)


def fill(paged: Any, lengths: list[int], device: str = "cpu") -> list[torch.Tensor]:
    """Caches with random tokens of all requests."""
    cache = [torch.zeros(1, 2, PAGES * SIZE, dim, device=device) for dim in (16, 8)]
    for b, n in enumerate(lengths):
        at = torch.tensor([b], device=device)
        paged.reserve(at, torch.tensor([n], device=device))
        new = (torch.randn(1, 2, n, dim, device=device) for dim in (16, 8))
        paged.assign(at, torch.arange(n, device=device)[None], *new, *cache)
    return cache


# ---------------------------------------------------------------- against dense tensors
@on_devices
def test_attention_over_some_requests_is_that_of_dense_keys(device) -> None:
    """Also after pages were given back and others took them, and of other requests than the first ones."""
    paged = PagedAttention(PAGES, SIZE, BATCH, device)
    fill(paged, [40, 50, 5, 33], device)
    for b in (1, 2):
        paged.erase(torch.tensor([b], device=device))
    lengths, requests = [36, 60], torch.tensor([3, 1], device=device)
    k, v = (torch.randn(2, 2, 60, dim, device=device) for dim in (16, 8))
    cache = [torch.full((1, 2, PAGES * SIZE, dim), 7.0, device=device) for dim in (16, 8)]
    for i, n in enumerate(lengths):
        at = requests[i : i + 1]
        paged.reserve(at, torch.tensor([n], device=device))
        positions = torch.arange(n, device=device)[None]
        paged.assign(at, positions, k[i : i + 1, :, :n], v[i : i + 1, :, :n], *cache)
    kv_len, q = torch.tensor(lengths, device=device), torch.randn(2, 4, 60, 16, device=device)
    mask = create_block_mask(causal, 2, None, 60, 64, device=device, BLOCK_SIZE=SIZE)
    out = flex_attention(
        q, *cache, block_mask=paged.convert_logical_block_mask(mask, requests, kv_len), enable_gqa=True
    )
    for i, n in enumerate(lengths):
        dense = k[i : i + 1, :, :n], v[i : i + 1, :, :n]
        alone = flex_attention(q[i : i + 1, :, :n], *dense, mask_mod=causal, enable_gqa=True)
        assert torch.allclose(out[i : i + 1, :, :n], alone, atol=1e-5)


# ---------------------------------------------------------------- errors
def test_errors_are_of_torchs_kind_too() -> None:
    """Every call that torch's class refuses is refused with an error that `except` of torch's catches."""
    pages = pair()
    one, new = torch.tensor([0]), torch.randn(1, 3, 2, 8)
    cache, at = torch.zeros(1, 3, PAGES * SIZE, 8), torch.arange(2)[None]
    both(pages, "reserve", 0, 2)
    bad = [
        (torch.tensor([0, 1]), at, new, new, cache, cache), (one, at, new[:, :2], new, cache, cache),
        (one, at[:, :1], new, new, cache, cache), (one, at, new[..., :4], new, cache, cache),
        (one, at, new, new[..., :4], cache, cache), (one, at, new.clone().requires_grad_(), new, cache, cache),
    ]  # fmt: skip
    for arguments in bad:
        for paged, kind in zip(pages, ((PageShapeError, UnsupportedError), RuntimeError)):
            with pytest.raises(kind) as caught:
                paged.assign(*arguments)
            assert isinstance(caught.value, RuntimeError)
            if paged is pages[0]:
                assert_explains(caught.value)
    mask = create_block_mask(causal, 1, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(PageShapeError) as shape:
        pages[0].convert_logical_block_mask(mask)
    assert_explains(shape.value, "page_size", "32 and 16")
    mask = create_block_mask(causal, 1, None, 64, 13 * 16, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(PageShapeError) as shape:
        pages[0].convert_logical_block_mask(mask)
    assert_explains(shape.value, "12 blocks")
    with pytest.raises(OutOfPagesError) as pages_left:
        pages[0].reserve(one, torch.tensor([1000]))
    assert_explains(pages_left.value, "62 needed", "11 of 12")
