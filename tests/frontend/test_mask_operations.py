"""Masks made of masks: shifted, transposed, xor, stacked, longer; each against every pair, on odd lengths."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

from flexattn import BlockMask, create_block_mask, create_mask, flex_attention, stack_masks
from flexattn.errors import (
    DeviceError,
    FlexError,
    MaskTypeError,
    OptionError,
    ShapeError,
    StaleMaskError,
    UnsupportedError,
)
from flexattn.frontend.box_bounds import box_bounds
from flexattn.frontend.expr import topological
from tests.frontend.mask_families import BATCH, HEADS, brute, families
from tests.frontend.test_row import check

pytestmark = pytest.mark.usefixtures("one_thread")
Q, K = 157, 201
N = 330  # tokens that the functions know of
MASKS = families(N)
SOME = ["causal", "window", "documents per batch", "window per head", "sink and window", "all", "none", "padding"]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make(name: str, q_len: int = Q, kv_len: int = K, batch: int = BATCH, heads: int = HEADS) -> BlockMask:
    return create_block_mask(MASKS[name], batch, heads, q_len, kv_len, "cpu", BLOCK_SIZE=(16, 32))


def listed(name: str) -> BlockMask:
    return BlockMask.from_torch(
        torch_flex.create_block_mask(MASKS[name], BATCH, HEADS, Q, K, "cpu", BLOCK_SIZE=(16, 32))
    )


def same(mask: BlockMask, want: torch.Tensor) -> None:
    """The program, the tile map, a row and the Python function all keep what is wanted."""
    assert mask.shape == tuple(want.shape)
    assert torch.equal(mask.to_mask(), want)
    tiles = mask.tile_map(16, 32)
    scale = want.shape[0] * want.shape[1] // tiles.grid.groups
    assert tiles.kept_pairs() * scale == int(want.sum())
    blocks = torch.nn.functional.pad(want, (0, -want.shape[3] % 32, 0, -want.shape[2] % 16))
    blocks = blocks.unflatten(3, (-1, 32)).unflatten(2, (-1, 16)).any(5).any(3)
    assert torch.equal((tiles.dense() > 0).expand_as(blocks), blocks)
    check(mask.row(-1), want[:, :, -1])
    assert torch.equal(create_mask(mask.mask_mod, *mask.shape, device="cpu"), want)


@pytest.mark.parametrize("name", MASKS)
def test_shifted_rows_and_keys(name: str) -> None:
    want = brute(MASKS[name], BATCH, HEADS, Q, K)
    same(make(name).shifted(q=37, kv=50), want[:, :, 37:, 50:])
    further = brute(MASKS[name], BATCH, HEADS, N, N)[:, :, 100:129, 20:105]
    same(make(name).shifted(q=100, kv=20, lengths=(29, 85)), further)


def test_shifts_build_nothing_and_go_backwards() -> None:
    mask = make("causal", batch=1, heads=1)
    assert mask.shifted(q=3).traced.program == mask.shifted(q=140).traced.program
    same(mask.shifted(kv=-40), brute(lambda b, h, q, k: q >= k - 40, 1, 1, Q, K + 40))
    assert mask.shifted(q=200, kv=300).shape == (1, 1, 0, 0)
    assert torch.equal(mask.shifted().to_mask(), mask.to_mask())


def test_shifted_lists_stay_within_them() -> None:
    want = brute(MASKS["documents per batch"], BATCH, HEADS, Q, K)
    mask = listed("documents per batch")
    assert torch.equal(mask.shifted(q=37, kv=50).to_mask(), want[:, :, 37:, 50:])
    assert torch.equal(mask.shifted(q=37, kv=50, lengths=(1, 7)).to_mask(), want[:, :, 37:38, 50:57])
    for words in ({"q": -1}, {"kv": -1}, {"q": 37, "lengths": (Q - 36, K)}, {"lengths": (Q, K + 1)}):
        with pytest.raises(ShapeError, match="nothing of pairs outside"):
            mask.shifted(**words)


@pytest.mark.parametrize("name", MASKS)
def test_transposed(name: str) -> None:
    mask = make(name).transposed()
    assert mask.BLOCK_SIZE == (32, 16)
    same(mask, brute(MASKS[name], BATCH, HEADS, Q, K).transpose(2, 3))
    assert torch.equal(mask.transposed().to_mask(), make(name).to_mask())


def test_transposed_lists() -> None:
    want = brute(MASKS["sink and window"], BATCH, HEADS, Q, K)
    assert torch.equal(listed("sink and window").transposed().to_mask(), want.transpose(2, 3))


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(SOME, 2)))
def test_xor(one: str, other: str) -> None:
    x, y = (brute(MASKS[n], BATCH, HEADS, Q, K) for n in (one, other))
    same(make(one) ^ make(other), x ^ y)


def test_xor_of_lists_and_of_what_is_no_mask() -> None:
    x, y = (brute(MASKS[n], BATCH, HEADS, Q, K) for n in ("window", "documents per batch"))
    assert torch.equal((listed("documents per batch") ^ make("window", batch=1)).to_mask(), x ^ y)
    with pytest.raises(MaskTypeError, match="masks combine with masks"):
        make("window") ^ causal
    with pytest.raises(ShapeError, match="different sizes"):
        make("window") ^ make("window", q_len=Q - 1)


@pytest.mark.parametrize("dim", ["heads", "batch"])
@pytest.mark.parametrize("names", [SOME, SOME[::-1], ["dense"], ["causal", "causal", "window", "documents, shuffled"]])
def test_stacks(dim: str, names: list[str]) -> None:
    sizes = {"batch": 1, "heads": HEADS} if dim == "batch" else {"batch": BATCH, "heads": 1}
    own = [{**sizes, dim: 1 + n % 2} for n in range(len(names))]
    want = torch.cat([brute(MASKS[n], *s.values(), Q, K) for n, s in zip(names, own)], ["batch", "heads"].index(dim))
    same(stack_masks([make(n, **s) for n, s in zip(names, own)], dim=dim), want)


def test_a_stack_broadcasts_and_takes_lists() -> None:
    parts = [make("causal", batch=1, heads=1), make("documents per batch", heads=2), listed("sink and window")]
    want = [brute(MASKS["causal"], BATCH, 1, Q, K), brute(MASKS["documents per batch"], BATCH, 2, Q, K)]
    want.append(brute(MASKS["sink and window"], BATCH, HEADS, Q, K))
    stack = stack_masks(parts, dim="heads")
    assert torch.equal(stack.to_mask(), torch.cat(want, 1))
    assert torch.equal(copy.deepcopy(stack).to_mask(), torch.cat(want, 1))


def test_a_stack_reads_each_tensor_only_for_its_own_heads() -> None:
    """Neither mask's tensor is long enough for the other one's head."""
    short, long = torch.arange(2) * 9, torch.arange(5) * 7
    rules = [lambda b, h, q, k: q - k < short[h], lambda b, h, q, k: k - q < long[h]]
    masks = [create_block_mask(r, None, n, Q, K, "cpu") for r, n in zip(rules, (2, 5))]
    want = torch.cat([brute(r, 1, n, Q, K) for r, n in zip(rules, (2, 5))], 1)
    same(stack_masks(masks, dim="heads"), want)
    short.add_(1)
    with pytest.raises(StaleMaskError):
        stack_masks(masks, dim="heads")


def test_a_kernel_bounds_each_head_of_a_stack_as_its_own_mask() -> None:
    """What only the head decides is no range: nothing of a stack's bounds is asked twice."""
    sizes = torch.tensor([7, 90])
    parts = [
        make("causal", batch=1, heads=1),
        create_block_mask(lambda b, h, q, k: q - k < sizes[h], 1, 2, Q, K, "cpu"),
    ]
    stack = stack_masks([*parts, make("window", batch=1, heads=1)], dim="heads")
    found = box_bounds(stack.traced.program)
    assert found.ranged == ()
    for end in (found.must, found.may):
        assert len(topological([end])) <= len(topological([stack.traced.program.body])) + 8


def test_equal_neighbours_are_one_mask() -> None:
    parts = [make("causal", batch=1, heads=1) for _ in range(31)]
    assert stack_masks(parts, dim="heads").traced.program.body is parts[0].traced.program.body
    mixed = stack_masks([*parts, make("window", batch=1, heads=1)], dim="heads")
    assert str(mixed.traced.program).count("where") == 1
    assert mixed.shape == (1, 32, Q, K)


def test_what_cannot_be_stacked() -> None:
    mask = make("causal")
    for given, dim, kind, text in (
        ([], "heads", MaskTypeError, "got none"),
        ([mask, causal], "heads", MaskTypeError, "got BlockMask, function"),
        ([mask], "rows", OptionError, "got 'rows'"),
        ([mask, make("causal", q_len=Q + 1)], "heads", ShapeError, "different sizes"),
        ([mask, make("causal", batch=3)], "heads", ShapeError, "different sizes"),
        ([mask, create_block_mask(causal, BATCH, 1, Q, K, "meta")], "heads", DeviceError, "different devices"),
    ):
        with pytest.raises(kind, match=text):
            stack_masks(given, dim=dim)


@pytest.mark.parametrize("name", MASKS)
def test_appended_tokens(name: str) -> None:
    mask = make(name)
    mask.row(-1)
    for _ in range(3):
        mask = mask.appended()
    mask = mask.appended(n=14)
    same(mask, brute(MASKS[name], BATCH, HEADS, Q + 17, K + 17))


def test_appending_traces_nothing() -> None:
    mask = make("documents per batch")
    assert mask.appended().traced is mask.traced
    assert mask.appended(0).shape == mask.shape
    with pytest.raises(OptionError, match="at least 0"):
        mask.appended(-1)
    with pytest.raises(UnsupportedError, match="cannot grow"):
        listed("causal").appended()


def test_attention_over_a_stack_of_shifted_masks() -> None:
    """What a step of decoding does: one query a request, each at its own position."""
    positions = [3, 40, 156]
    base = create_block_mask(MASKS["sink and window"], None, None, K, K, "cpu")
    stack = stack_masks([base.shifted(q=p, lengths=(1, K)) for p in positions], dim="batch")
    q, k, v = torch.randn(3, 2, 1, 16), torch.randn(3, 2, K, 16), torch.randn(3, 2, K, 16)
    kept = torch.stack([brute(MASKS["sink and window"], 1, 1, K, K)[0, :, p : p + 1] for p in positions])
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=kept)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=stack).double(), want, atol=1e-5, rtol=1e-5)


def test_torchs_masks_combine_with_ours() -> None:
    ours = make("window")
    theirs = torch_flex.create_block_mask(causal, None, None, Q, K, "cpu")
    want, other = ours.to_mask(), create_mask(causal, None, None, Q, K, "cpu")
    for found, expected in (
        (ours & theirs, want & other),
        (theirs & ours, want & other),
        (ours | theirs, want | other),
        (theirs | ours, want | other),
        (ours ^ theirs, want ^ other),
        (theirs ^ ours, want ^ other),
        (stack_masks([theirs, ours], dim="heads"), torch.cat((other.expand(BATCH, 1, Q, K), want), 1)),
    ):
        assert torch.equal(found.to_mask(), expected)


def test_arguments_of_the_wrong_kind_are_told() -> None:
    mask = make("causal", batch=1, heads=1)
    lists = BlockMask.from_torch(torch_flex.create_block_mask(causal, None, None, Q, K, "cpu"))
    absent = "xpu" if not torch.xpu.is_available() else "mtia"
    wrong = {
        "position must be an integer": (lambda: mask.row(1.5), lambda: mask.row("a"), lambda: mask.row(True)),
        "a position of a window must be": (lambda: mask.window(0.5, 2, 0, 2), lambda: mask.window(0, 2, 0, 2, head="a")),
        "a length must be an integer": (lambda: mask.crop(1.5, 2), lambda: mask.shifted(lengths=(None, 2))),
        "lengths must be a pair": (lambda: mask.shifted(lengths=5), lambda: setattr(mask, "seq_lengths", 5)),
        "an offset must be": (lambda: mask.shifted(q=1.5),),
        "a mask function must be callable": (
            lambda: mask.combine(5), lambda: mask.combine(mask), lambda: setattr(mask, "mask_mod", 5),
            lambda: create_block_mask(mask, None, None, 9, 9), lambda: create_block_mask(None, None, None, 9, 9),
        ),
        "grid_size must be at least 1": (
            lambda: mask.to_string(0), lambda: mask.to_string((0, 3)), lambda: mask.to_string("a"),
        ),
        "from_torch takes a BlockMask": (lambda: BlockMask.from_torch(5), lambda: BlockMask.from_torch(None)),
        "masks combine with masks": (lambda: mask & 5, lambda: mask | causal, lambda: None ^ mask),
        "takes a list of block masks": (lambda: stack_masks(mask, dim="heads"), lambda: stack_masks(5, dim="heads")),
        "must be a tensor or None": (lambda: setattr(mask, "kv_indices", 5),),
        "the mask's device is not here": (
            lambda: mask.to(absent), lambda: mask.to(f"{absent}:0"), lambda: lists.to(absent), lambda: mask.to("cdua"),
            lambda: create_block_mask(causal, None, None, 9, 9, absent), lambda: create_mask(causal, 1, 1, 9, 9, absent),
        ),
        "meta device has no blocks": (lambda: mask.to("meta").tile_map(16, 16), lambda: lists.to("meta").density()),
    }  # fmt: skip
    for text, asks in wrong.items():
        for ask in asks:
            with pytest.raises(FlexError, match=text):
                ask()
    assert mask.to(None).device == lists.to(None).device == mask.device
    assert torch.equal(mask.row(torch.tensor(3)).stop, mask.row(3).stop)
