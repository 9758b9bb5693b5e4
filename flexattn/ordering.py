"""Orders of tokens in which attention between neighbours of an image, a volume or a graph touches fewer blocks.

Reads the shape of a grid, or a measured pattern of attention, and a mask; makes an `Ordering` and measures what it saves. The one
idea: a block of tokens should be a compact patch, not a stripe; but whether that pays depends on the mask, so every candidate's
blocks are counted, and raster order may win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, OptionError, ShapeError
from flexattn.frontend import algebra
from flexattn.frontend.arguments import device_of, integer, mask_function
from flexattn.frontend.clusters import cluster_order
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.mask_functions import MaskMod, noop_mask
from flexattn.frontend.predicate_mask import trace_mask
from flexattn.frontend.saved import replayed
from flexattn.frontend.torch_lists import block_pair

__all__ = ["Ordering", "OrderingReport", "clustered", "morton", "propose", "raster", "tiles"]


@dataclass(frozen=True, eq=False)
class Ordering:
    """A permutation of tokens, and how to bring tensors, masks and results into it and back.

    Args:
        name: for reports.
        order: int64 [n], the old position of the token at each new position; every one of 0 to n - 1 once.

    Raises:
        ShapeError: `order` is not a permutation.

    Example:
        >>> image = flexattn.ordering.tiles((4, 4), (2, 2))
        >>> image.order.tolist()
        [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
        >>> near = lambda b, h, q_idx, kv_idx: ((q_idx // 4 - kv_idx // 4).abs() <= 1) & ((q_idx % 4 - kv_idx % 4).abs() <= 1)
        >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
        >>> out = flexattn.flex_attention(*map(image.apply, (q, k, v)), mask_mod=image.mask_mod(near))
        >>> torch.allclose(image.invert(out), flexattn.flex_attention(q, k, v, mask_mod=near), atol=1e-6)
        True
    """

    name: str
    order: Tensor

    def __post_init__(self) -> None:
        order = self.order
        if not isinstance(order, Tensor):
            hint = "torch.tensor(order)"
            raise CallError("order must be a tensor, int64 [n]", given=type(order).__name__, hint=hint)
        if order.dim() != 1 or order.dtype != torch.int64 or not torch.equal(order.sort().values, _positions(order)):
            given, hint = (
                f"{tuple(order.shape)}, {order.dtype}",
                "each position from 0 on once, as torch.randperm gives them",
            )
            raise ShapeError("order must be a permutation, int64 [n]", given=given, hint=hint)

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def position(self) -> Tensor:
        """int64 [n]: the new position of each old one."""
        found = torch.empty_like(self.order)
        found[self.order] = _positions(self.order)
        return found

    def to(self, device: torch.device | str) -> Ordering:
        """The same on another device, where the masks and tensors are."""
        return Ordering(self.name, self.order.to(device_of(device)))

    def apply(self, x: Tensor, *, dim: int = -2) -> Tensor:
        """A tensor with its tokens in the new order; gradients flow back.

        Args:
            x: query, key, value, or anything else with a token axis of n; [batch, heads, n, head size] for the default `dim`.
            dim: the token axis.

        Returns:
            A tensor of the same shape.

        Raises:
            ShapeError: the axis has another length.
        """
        return self._selected(x, self.order, dim)

    def invert(self, x: Tensor, *, dim: int = -2) -> Tensor:
        """A tensor in the new order (attention's output; its lse with dim=-1) with its tokens in the old one again.

        Args:
            x, dim: as in `apply`.

        Returns:
            A tensor of the same shape.

        Raises:
            ShapeError: the axis has another length.
        """
        return self._selected(x, self.position, dim)

    def _selected(self, x: Tensor, index: Tensor, dim: int) -> Tensor:
        if not isinstance(x, Tensor):
            hint = "query, key, value, or anything else with an axis of the tokens"
            raise CallError("what is put in order must be a tensor", given=type(x).__name__, hint=hint)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != len(self):
            given, hint = f"{tuple(x.shape)} at dim={dim}", f"dim= the axis of the {len(self)} tokens"
            raise ShapeError(f"ordering {self.name!r} is of {len(self)} tokens", given=given, hint=hint)
        return x.index_select(dim, index.to(x.device))

    def mask_mod(self, mask_mod: MaskMod, *, keys: Ordering | None = None) -> MaskMod:
        """A mask function for tokens in the new order: it keeps the pairs that `mask_mod` keeps of the same tokens.

        What the function computes of one index alone, such as a coordinate, is looked up in a table of n entries in the new
        order, so blocks are still decided by bounds. It is a snapshot of what `mask_mod` captures now.

        Args:
            mask_mod: `mask_mod(b, h, q_idx, kv_idx)` of old positions. Tensors that it captures are where `order` is.
            keys: the order of the keys; by default that of the queries.

        Returns:
            A mask function of new positions.

        Raises:
            TraceError, MaskTypeError: as from `create_block_mask`.
        """
        traced = algebra.permuted(
            trace_mask(mask_function(mask_mod)), self.order, self.order if keys is None else keys.order
        )
        return noop_mask if traced is None else partial(replayed, traced.program, *traced.binding)

    def score_mod(self, score_mod: Callable[..., Any], *, keys: Ordering | None = None) -> Callable[..., Any]:
        """A score function for tokens in the new order; it calls `score_mod` with the old positions.

        Args:
            score_mod: `score_mod(score, b, h, q_idx, kv_idx)` of old positions.
            keys: the order of the keys; by default that of the queries.

        Returns:
            A score function of new positions; gradients of what `score_mod` captures flow.
        """
        return partial(_permuted_score, score_mod, self.order, self.order if keys is None else keys.order)


def _permuted_score(
    score_mod: Callable[..., Any],
    q_order: Tensor,
    kv_order: Tensor,
    score: Any,
    b: Any,
    h: Any,
    q_idx: Any,
    kv_idx: Any,
) -> Any:
    return score_mod(score, b, h, q_order[q_idx], kv_order[kv_idx])


def _positions(like: Tensor) -> Tensor:
    return torch.arange(len(like), device=like.device)


# ------------------------------------------------------------------------------------------------------- orders of grids
def raster(shape: Sequence[int]) -> Ordering:
    """The order in which the last axis runs fastest: that of a flattened tensor.

    Args:
        shape: of the grid, (height, width) or (frames, height, width).

    Returns:
        The ordering that changes nothing.

    Raises:
        ShapeError: an axis is shorter than 1.
    """
    return Ordering("raster", torch.arange(_size(shape)))


def tiles(shape: Sequence[int], tile: Sequence[int]) -> Ordering:
    """Tile after tile, and in raster order within each: a tile of as many tokens as a block makes each block a patch.

    Args:
        shape: of the grid.
        tile: its size along every axis; it need not divide the grid, but then blocks do not lie on tiles.

    Returns:
        The ordering of the flattened grid.

    Raises:
        ShapeError: shape and tile have not the same number of axes, or an axis is shorter than 1.

    Example:
        >>> flexattn.ordering.tiles((2, 4), (2, 2)).order.tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]

    Source: Zhang et al., Fast Video Generation with Sliding Tile Attention, 2025, section 3.
    """
    _size(shape)
    if not isinstance(tile, Sequence) or not all(isinstance(n, int) for n in tile):
        raise CallError("a tile is a sequence of integers", given=repr(tile), hint="(8, 16), a size for every axis")
    if len(tile) != len(shape) or min(tile, default=1) < 1:
        hint = "a tile size of at least 1 for every axis"
        raise ShapeError("a tile has as many axes as the grid", given=f"{tuple(tile)} for {tuple(shape)}", hint=hint)
    counts = [-(-n // t) for n, t in zip(shape, tile, strict=True)]
    coordinates = _coordinates(shape)
    outer = _mixed([c // t for c, t in zip(coordinates, tile, strict=True)], counts)
    inner = _mixed([c % t for c, t in zip(coordinates, tile, strict=True)], tile)
    return Ordering(f"tiles {' x '.join(map(str, tile))}", (outer * math.prod(tile) + inner).argsort())


def morton(shape: Sequence[int]) -> Ordering:
    """Along a Z-shaped curve, which is compact at every scale: the bits of the coordinates, interleaved, are the position.

    Args:
        shape: of the grid; sides need not be powers of two.

    Returns:
        The ordering of the flattened grid.

    Raises:
        ShapeError: an axis is shorter than 1.

    Example:
        >>> flexattn.ordering.morton((2, 4)).order.tolist()
        [0, 1, 4, 5, 2, 3, 6, 7]

    Source: G. M. Morton, A Computer Oriented Geodetic Data Base, 1966.
    """
    code = torch.zeros(_size(shape), dtype=torch.int64)
    for bit in range(max(shape).bit_length()):
        for axis, c in enumerate(reversed(_coordinates(shape))):
            code |= (c >> bit & 1) << (bit * len(shape) + axis)
    return Ordering("Morton", code.argsort(stable=True))


def _size(shape: Sequence[int]) -> int:
    if not isinstance(shape, Sequence) or not all(isinstance(n, int) for n in shape):
        hint = "(length,), (height, width) or (frames, height, width)"
        raise CallError("the shape of a grid is a sequence of integers", given=repr(shape), hint=hint)
    if not shape or min(shape) < 1:
        raise ShapeError("a grid has axes of at least 1", given=tuple(shape), hint="(height, width)")
    return math.prod(shape)


def _coordinates(shape: Sequence[int]) -> list[Tensor]:
    """Of every token in raster order, int64 [n] for each axis."""
    return [x.reshape(-1) for x in torch.meshgrid(*map(torch.arange, shape), indexing="ij")]


def _mixed(digits: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """A number out of its digits, the last one least."""
    total = torch.zeros_like(digits[0])
    for digit, size in zip(digits, sizes, strict=True):
        total = total * size + digit
    return total


# ------------------------------------------------------------------------------------------------------- order of a pattern
def clustered(pattern: Tensor, *, size: int = 128, least: float = 1e-3) -> Ordering:
    """Tokens that attend to each other together, from attention that was measured: the graph is cut in two again and again.

    Args:
        pattern: floats or bool [n, n], dense or sparse: how much each query attends to each key, e.g. weights of one layer
            summed over heads and samples.
        size: tokens of a block, at which cutting ends.
        least: entries below this share of their row's largest do not count.

    Returns:
        The ordering; within a block the order is that of the last cut.

    Raises:
        ShapeError: the pattern is not square.
        OptionError: size is below 1.

    Example:
        >>> ids = torch.arange(12) % 3  # three groups of tokens, interleaved
        >>> found = flexattn.ordering.clustered(ids[:, None] == ids, size=4)
        >>> ids[found.order].view(3, 4).unique(dim=1).shape
        torch.Size([3, 1])

    Source: Pothen, Simon and Liou, Partitioning Sparse Matrices with Eigenvectors of Graphs, 1990, section 2; eigenvectors by
        Chebyshev filters, Zhou and Saad, A Chebyshev-Davidson Algorithm for Large Symmetric Eigenproblems, 2007, section 2.
    """
    if not isinstance(pattern, Tensor):
        hint = "attention that was measured, [n, n]"
        raise CallError("an attention pattern is a tensor", given=type(pattern).__name__, hint=hint)
    size = integer(size, "size", hint="the block size of the mask")
    if pattern.dim() != 2 or pattern.shape[0] != pattern.shape[1]:
        hint = "[n, n]: queries by keys of the same tokens"
        raise ShapeError("an attention pattern is square", given=tuple(pattern.shape), hint=hint)
    if size < 1:
        raise OptionError("size must be at least 1", given=size, hint="the block size of the mask")
    return Ordering("clustered", cluster_order(pattern, size=size, least=least))


# ------------------------------------------------------------------------------------------------------- which one pays
@dataclass(frozen=True)
class OrderingReport:
    """What each order of tokens costs; str() is a table that says which is best.

    Attributes:
        kept: share of the blocks that attention visits, by the name of the ordering, raster order first.
        orderings: all of them, by name.
        block: tokens of a block, (q, kv).

    Example:
        >>> near = lambda b, h, q_idx, kv_idx: ((q_idx // 64 - kv_idx // 64).abs() <= 2) & ((q_idx % 64 - kv_idx % 64).abs() <= 2)
        >>> report = flexattn.ordering.propose(near, (64, 64), device="cpu")
        >>> report.raster_wins, report.best.name, round(report.kept["raster"], 3), round(report.kept["tiles 8 x 16"], 3)
        (True, 'raster', 0.092, 0.215)
    """

    kept: Mapping[str, float]
    orderings: Mapping[str, Ordering] = field(repr=False)
    block: tuple[int, int]

    @property
    def best(self) -> Ordering:
        """The ordering with the fewest blocks; raster order if none has fewer than it."""
        return self.orderings[min(self.kept, key=lambda name: self.kept[name])]

    @property
    def raster_wins(self) -> bool:
        """Whether the tokens should stay as they are."""
        return self.best.name == "raster"

    def __str__(self) -> str:
        before, after = self.kept["raster"], self.kept[self.best.name]
        verdict = "raster order wins: keep the tokens as they are"
        if not self.raster_wins:
            verdict = (
                f"{self.best.name}: {before / after:.2f} times fewer blocks than in raster order"
                if after
                else self.best.name
            )
        width = max(map(len, self.kept))
        ranked = sorted(self.kept.items(), key=lambda item: item[1])
        lines = [f"blocks of {self.block[0]} x {self.block[1]} tokens that are kept, by order of tokens"]
        return "\n".join([*lines, *(f"  {name:<{width}}  {share:.4f}" for name, share in ranked), verdict])


def propose(
    mask_mod: MaskMod,
    shape: Sequence[int],
    *,
    B: int | None = None,
    H: int | None = None,
    block: int | tuple[int, int] = 128,
    device: torch.device | str | None = None,
    pattern: Tensor | None = None,
    orderings: Sequence[Ordering] | None = None,
) -> OrderingReport:
    """Measures how many blocks a mask keeps in several orders of its tokens, raster order among them.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` of positions in raster order.
        shape: of the grid of tokens: (length,), (height, width) or (frames, height, width).
        B, H: batch and heads, None where the mask is the same for all.
        block: tokens of a block, one number or (q, kv).
        device: where the mask's captured tensors are.
        pattern: [n, n], attention that was measured; adds the order of `clustered`.
        orderings: candidates, instead of tiles of as many tokens as a block, Morton order and the measured one.

    Returns:
        A report; `report.best` is the ordering to use, and raster order where that wins.

    Raises:
        ShapeError: an ordering is of another number of tokens than the grid.
        TraceError, MaskTypeError: as from `create_block_mask`.

    Example:
        >>> near = lambda b, h, q_idx, kv_idx: ((q_idx // 128 - kv_idx // 128).abs() <= 8) & ((q_idx % 128 - kv_idx % 128).abs() <= 8)
        >>> report = flexattn.ordering.propose(near, (128, 128), device="cpu")
        >>> report.best.name, round(report.kept["raster"], 3), round(report.kept[report.best.name], 3)
        ('tiles 8 x 16', 0.128, 0.062)
    """
    size, pair, mask_mod = _size(shape), block_pair(block), mask_function(mask_mod)
    if orderings is None:
        orderings = [tiles(shape, tile) for tile in _tile_shapes(shape, pair[0])]
        orderings += [morton(shape)] if len(shape) > 1 else []
        orderings += [clustered(pattern, size=pair[0])] if pattern is not None else []
    if isinstance(orderings, Ordering) or not all(isinstance(o, Ordering) for o in orderings):
        hint = "[flexattn.ordering.morton(shape)]"
        raise CallError("orderings is a list of orderings", given=type(orderings).__name__, hint=hint)
    kept, named = {}, {}
    for ordering in (raster(shape), *orderings):
        if len(ordering) != size:
            given, hint = f"{ordering.name!r} of {len(ordering)} for {size}", "orderings of this grid"
            raise ShapeError("an ordering has as many tokens as the grid", given=given, hint=hint)
        kept[ordering.name], named[ordering.name] = _kept(mask_mod, ordering, (B, H), pair, device), ordering
    return OrderingReport(kept, named, pair)


def _kept(
    mask_mod: MaskMod,
    ordering: Ordering,
    sizes: tuple[int | None, int | None],
    block: tuple[int, int],
    device: torch.device | str | None,
) -> float:
    """The share of blocks that are not empty."""
    if ordering.name != "raster":
        mask_mod = (ordering if device is None else ordering.to(device)).mask_mod(mask_mod)
    found = create_block_mask(mask_mod, *sizes, len(ordering), len(ordering), device, block).tile_map(*block)
    total = found.grid.groups * found.rows * found.cols
    return (found.full.tiles() + found.partial.tiles()) / total if total else 0.0


def _tile_shapes(shape: Sequence[int], tokens: int) -> list[tuple[int, ...]]:
    """Patches of so many tokens with sides that are powers of two and differ at most fourfold."""
    if len(shape) < 2 or tokens & (tokens - 1):
        return []
    found: list[tuple[int, ...]] = [()]
    for _ in shape[:-1]:
        found = [(*t, 1 << n) for t in found for n in range(tokens.bit_length())]
    whole = [(*t, tokens // math.prod(t)) for t in found if tokens % math.prod(t) == 0]
    return [t for t in whole if max(t) <= 4 * min(t) and all(a <= n for a, n in zip(t, shape, strict=True))]
