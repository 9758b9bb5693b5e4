"""Orders of tokens are permutations that can be undone; masks and scores mean the same tokens in them; reports measure."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import flexattn
from flexattn import create_block_mask, ordering
from flexattn.errors import FlexError, OptionError, ShapeError, TraceError

SHAPES = [(7,), (4, 4), (5, 9), (1, 6), (3, 4, 5), (2, 3, 2, 2)]


def near(shape, radius):
    """Pairs of tokens of a grid whose coordinates differ by at most `radius` along every axis."""
    strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]

    def mask_mod(b, h, q_idx, kv_idx):
        kept = q_idx >= 0
        for size, stride in zip(shape, strides):
            kept = kept & ((q_idx // stride % size - kv_idx // stride % size).abs() <= radius)
        return kept

    return mask_mod


def dense(mask_mod, n, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, n, n, "cpu").to_mask()


@pytest.mark.parametrize("shape", SHAPES)
def test_orders_of_grids_are_permutations(shape) -> None:
    n = math.prod(shape)
    for found in (ordering.raster(shape), ordering.morton(shape), ordering.tiles(shape, (2,) * len(shape))):
        assert torch.equal(found.order.sort().values, torch.arange(n))
        assert torch.equal(found.order[found.position], torch.arange(n))
        assert len(found) == n
    assert torch.equal(ordering.raster(shape).order, torch.arange(n))


def test_tiles_hold_patches() -> None:
    order = ordering.tiles((6, 8), (3, 4)).order.view(4, 12)
    for number, (top, left) in enumerate(itertools.product((0, 3), (0, 4))):
        patch = [8 * (top + y) + left + x for y in range(3) for x in range(4)]
        assert order[number].tolist() == patch
    ragged = ordering.tiles((5, 3), (2, 2)).order.tolist()
    assert ragged == [0, 1, 3, 4, 2, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14]


def test_morton_interleaves_bits() -> None:
    codes = [
        sum((y >> b & 1) << 2 * b + 1 | (x >> b & 1) << 2 * b for b in range(3)) for y in range(5) for x in range(6)
    ]
    assert ordering.morton((5, 6)).order.tolist() == sorted(range(30), key=codes.__getitem__)
    cube = ordering.morton((4, 4, 4)).order.view(8, 8)
    for part in cube:  # every aligned run of 8 is a cube of 2 x 2 x 2
        for stride in (16, 4, 1):
            at = part // stride % 4
            assert at.max() - at.min() == 1


def test_apply_and_invert() -> None:
    found = ordering.Ordering("any", torch.randperm(10))
    x = torch.randn(2, 3, 10, 4, requires_grad=True)
    moved = found.apply(x)
    assert torch.equal(moved[:, :, 3], x[:, :, found.order[3]])
    assert torch.equal(found.invert(moved), x)
    assert torch.equal(found.invert(found.apply(x[..., 0], dim=-1), dim=2), x[..., 0])
    weight = torch.randn_like(x)
    (found.apply(x) * weight).sum().backward()
    assert torch.equal(x.grad, found.invert(weight))


IDS = torch.arange(60) // 7 % 3
WIDE = torch.arange(60) * (1 << 33)
MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "a captured tensor": lambda b, h, q, k: (IDS[q] == IDS[k]) | (k < 3),
    "by batch and head": lambda b, h, q, k: (q + b * 3 >= k) & (IDS[k] != h),
    "wide numbers": lambda b, h, q, k: WIDE[q] - (1 << 34) <= WIDE[k],
    "floats": lambda b, h, q, k: (q * 0.5 - k * 0.25).abs() < 3.5,
    "everything": lambda b, h, q, k: q >= 0,
    "numbers": lambda b, h, q, k: (q // 6 - k // 6).abs() + (q % 6 - k % 6).abs() <= len("abc"),
    "out of range where it is dropped": lambda b, h, q, k: (q < 20) & (IDS[q * 3] == IDS[k]),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_the_same_tokens(name: str) -> None:
    first, second = (ordering.Ordering("any", torch.randperm(60)) for _ in range(2))
    plain = dense(MASKS[name], 60, 2, 3)
    assert torch.equal(dense(first.mask_mod(MASKS[name]), 60, 2, 3), plain[:, :, first.order][..., first.order])
    mixed = dense(first.mask_mod(MASKS[name], keys=second), 60, 2, 3)
    assert torch.equal(mixed, plain[:, :, first.order][..., second.order])
    twice = dense(second.mask_mod(first.mask_mod(MASKS[name])), 60, 2, 3)
    both = first.order[second.order]
    assert torch.equal(twice, plain[:, :, both][..., both])


def test_a_permuted_mask_is_decided_by_bounds() -> None:
    """Coordinates become tables, so no pair is evaluated; of the order's entries alone, bounds would leave most blocks open."""
    found = ordering.tiles((128, 128), (8, 16))
    mask = create_block_mask(found.mask_mod(near((128, 128), 8)), None, None, 16384, 16384, "cpu")
    decided = mask.tile_map(128, 128).decided
    assert not any(n for name, n in decided.items() if name.endswith("by_evaluation"))
    assert "cap" in str(mask.traced.program)
    assert len(mask.traced.binding.captures) == 2  # a row and a column of each token, for queries and keys alike
    assert {t.dtype for t in mask.traced.binding.captures} == {torch.int32}


def test_scores_mean_the_same_tokens() -> None:
    found = ordering.Ordering("any", torch.randperm(40))
    table = torch.randn(40, requires_grad=True)
    bias = lambda s, b, h, q, k: s + table[q] - 2 * table[k]
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind()
    plain = flexattn.flex_attention(q, k, v, score_mod=bias)
    moved = found.invert(flexattn.flex_attention(*map(found.apply, (q, k, v)), score_mod=found.score_mod(bias)))
    assert torch.allclose(moved, plain, atol=1e-6)
    grads = [torch.autograd.grad(x.square().sum(), table)[0] for x in (plain, moved)]
    assert torch.allclose(*grads, atol=1e-5)


def test_a_volume() -> None:
    """Frames of 32 x 32: patches over frames need fewer blocks than any patch within a frame."""
    report = ordering.propose(near((8, 32, 32), 3), (8, 32, 32), device="cpu")
    assert report.best.name == "tiles 8 x 4 x 4"
    assert report.kept["tiles 8 x 4 x 4"] < report.kept["raster"] < report.kept["tiles 2 x 8 x 8"]
    mask = create_block_mask(report.best.mask_mod(near((8, 32, 32), 3)), None, None, 8192, 8192, "cpu")
    assert report.kept["tiles 8 x 4 x 4"] == pytest.approx(1 - mask.sparsity() / 100)


def test_clusters_of_a_shuffled_image() -> None:
    """The pattern alone tells which tokens are neighbours."""
    shuffle = ordering.Ordering("shuffled", torch.randperm(1024))
    mask_mod = shuffle.mask_mod(near((32, 32), 4))
    pattern = dense(mask_mod, 1024)[0, 0]
    for given in (pattern, pattern.float() * torch.rand(1024, 1024).clamp(min=0.5), pattern.to_sparse()):
        report = ordering.propose(mask_mod, (1024,), block=32, pattern=given, device="cpu")
        assert not report.raster_wins
        best = ordering.propose(near((32, 32), 4), (32, 32), block=32, device="cpu")
        assert report.kept["raster"] > 0.95
        assert report.kept["clustered"] < 1.5 * min(best.kept.values())


def test_clusters_without_edges() -> None:
    for n in (0, 1, 5):
        found = ordering.clustered(torch.zeros(n, n), size=2)
        assert sorted(found.order.tolist()) == list(range(n))


def test_raster_order_may_win() -> None:
    report = ordering.propose(lambda b, h, q, k: (q - k).abs() < 100, (64, 64), device="cpu")
    assert report.raster_wins
    assert report.best.name == "raster"
    assert str(report).splitlines()[-1] == "raster order wins: keep the tokens as they are"
    assert torch.equal(report.best.order, torch.arange(4096))


def test_candidates_of_ones_own() -> None:
    mask_mod, shape = near((32, 48), 3), (32, 48)
    own = ordering.tiles(shape, (4, 16))
    report = ordering.propose(mask_mod, shape, B=2, H=3, block=(64, 32), orderings=[own], device="cpu")
    assert list(report.kept) == ["raster", "tiles 4 x 16"]
    mask = create_block_mask(own.mask_mod(mask_mod), 2, 3, 1536, 1536, "cpu", BLOCK_SIZE=(64, 32))
    assert report.kept["tiles 4 x 16"] == pytest.approx(1 - mask.sparsity() / 100)
    assert report.block == (64, 32)


def test_errors() -> None:
    for order in (torch.tensor([0, 0]), torch.tensor([[0]]), torch.tensor([0.0, 1.0]), torch.tensor([1, 2])):
        with pytest.raises(ShapeError, match="permutation"):
            ordering.Ordering("wrong", order)
    found = ordering.raster((4, 4))
    for x, dim in ((torch.zeros(2, 15, 3), -2), (torch.zeros(16), 1), (torch.zeros(3, 16), 0)):
        with pytest.raises(ShapeError, match="of 16 tokens"):
            found.apply(x, dim=dim)
    for make in (
        lambda: ordering.raster(()),
        lambda: ordering.morton((4, 0)),
        lambda: ordering.tiles((4, 4), (2,)),
        lambda: ordering.tiles((4, 4), (2, 0)),
        lambda: ordering.clustered(torch.zeros(3, 4)),
        lambda: ordering.propose(MASKS["causal"], (4, 4), orderings=[ordering.raster((5,))], device="cpu"),
    ):
        with pytest.raises(ShapeError):
            make()
    with pytest.raises(OptionError):
        ordering.clustered(torch.zeros(3, 3), size=0)
    with pytest.raises(TraceError):
        found.mask_mod(lambda b, h, q, k: bool(q > k))


def test_arguments_of_the_wrong_kind_are_told() -> None:
    rule = lambda b, h, q, k: q >= k
    mask = create_block_mask(rule, None, None, 70, 70, "cpu")
    order = ordering.morton((7, 10))
    wrong = {
        "a sequence of integers": (
            lambda: ordering.propose(rule, 70), lambda: ordering.propose(rule, (7.5, 10)), lambda: ordering.raster(5),
            lambda: ordering.tiles((7, 10), 7),
        ),
        "must be callable": (
            lambda: ordering.propose(mask, (7, 10)), lambda: ordering.propose(5, (7, 10)), lambda: order.mask_mod(mask),
        ),
        "BLOCK_SIZE must be": (lambda: ordering.propose(rule, (7, 10), block="a"),),
        "is a tensor": (lambda: ordering.propose(rule, (7, 10), pattern=5), lambda: ordering.clustered(5)),
        "is a list of orderings": (lambda: ordering.propose(rule, (7, 10), orderings=order),),
        "must be a tensor": (lambda: ordering.Ordering("mine", [0, 1]), lambda: order.apply(5)),
        "size must be an integer": (lambda: ordering.clustered(torch.eye(4), size=1.5),),
    }  # fmt: skip
    for text, asks in wrong.items():
        for ask in asks:
            with pytest.raises(FlexError, match=text):
                ask()
