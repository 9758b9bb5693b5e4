"""An order of tokens from a graph: cut in two where few edges cross, and each part again, down to the size of a block.

Reads a pattern of attention, [n, n]; makes a permutation. The one idea: the vectors that change least along the edges of a
connected graph are its coordinates, so halving at a mixture of two of them halves an image along a row or a column; all parts
are cut at once, as edges between them do not count.
"""

from __future__ import annotations

import itertools
import math
import warnings

import torch
from torch import Tensor

_ANGLES = 8
_ROUNDS, _STEPS = 8, 20


def cluster_order(pattern: Tensor, *, size: int, least: float) -> Tensor:
    """The old position of the token at each new one: int64 [n]; see `flexattn.ordering.clustered`."""
    ends, weights = _edges(pattern, least)
    order, starts = torch.arange(len(pattern)), [0, len(pattern)]
    while max(b - a for a, b in itertools.pairwise(starts)) > size:
        order, starts = _halved(ends, weights, order, starts, size)
    return order


def _halved(ends: Tensor, weights: Tensor, order: Tensor, starts: list[int], size: int) -> tuple[Tensor, list[int]]:
    """The order and the starts of its groups after those larger than `size` were cut in two, where few edges cross."""
    begin, stop = torch.tensor(starts[:-1]), torch.tensor(starts[1:])
    middle = begin + (stop - begin + 2 * size - 1) // (2 * size) * size
    group = torch.empty_like(order)
    group[order] = torch.bucketize(torch.arange(len(order)), stop[:-1], right=True)
    inside = group[ends[0]] == group[ends[1]]
    ends, weights = ends[:, inside], weights[inside]
    slow = _slowest(ends, weights, group, len(begin))
    best, fewest = order, torch.full((len(begin),), math.inf)
    for angle in torch.arange(_ANGLES) * (math.pi / _ANGLES):  # of equally slow vectors any mix may cut best
        turned = (slow @ torch.stack((angle.cos(), angle.sin()))).argsort(stable=True)
        turned = turned[group[turned].argsort(stable=True)]
        later = torch.empty_like(order)
        later[turned] = torch.arange(len(order))
        side = later >= middle[group]
        crossing = weights * (side[ends[0]] != side[ends[1]])
        cut = torch.zeros(len(begin)).index_add_(0, group[ends[0]], crossing)
        best = torch.where((cut < fewest)[group[turned]], turned, best)
        fewest = torch.minimum(cut, fewest)
    cuts = middle[(middle < stop) & (stop - begin > size)].tolist()
    return best, sorted({*starts, *cuts})


def _edges(pattern: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """(ends [2, m], weights [m]) of the graph: the entries that count, in both directions."""
    sparse = pattern.detach().cpu().to(torch.float32).to_sparse().coalesce()
    ends, weights = sparse.indices(), sparse.values().abs()
    largest = torch.zeros(len(pattern)).scatter_reduce_(0, ends[0], weights, "amax")
    counts = (weights > 0) & (weights >= least * largest[ends[0]])
    ends, weights = ends[:, counts], weights[counts]
    return torch.cat((ends, ends.flip(0)), 1), torch.cat((weights, weights))


def _slowest(ends: Tensor, weights: Tensor, group: Tensor, groups: int) -> Tensor:
    """For each group of tokens, two vectors that change least along its edges, beside the constant one: [n, 2].

    They are the second and third eigenvector of the group's scaled weights. A Chebyshev polynomial damps all between -1 and
    what the vectors have reached, and lets the rest grow; groups share the steps and have each their own interval.
    """
    n = len(group)
    root = torch.zeros(n).index_add_(0, ends[0], weights).clamp(min=1e-12).sqrt()
    scaled = weights / (root[ends[0]] * root[ends[1]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        matrix = torch.sparse_coo_tensor(ends, scaled, (n, n), check_invariants=False).coalesce().to_sparse_csr()
    now = _apart(torch.randn(n, 2, generator=torch.Generator().manual_seed(0)), root, group, groups)
    for _ in range(_ROUNDS):
        reached = _sums(now * (matrix @ now), group, groups).amin(1).clamp(-0.5, 1 - 1e-6)
        center, half = ((reached - 1) / 2)[group, None].float(), ((reached + 1) / 2)[group, None].float()
        before, now = now, (matrix @ now - center * now) / half
        for _ in range(_STEPS):
            before, now = now, (matrix @ now - center * now) * 2 / half - before
        now = _apart(now, root, group, groups)
    return now / root[:, None]


def _sums(x: Tensor, group: Tensor, groups: int) -> Tensor:
    """Over the tokens of each group: float64 [groups, ...]."""
    return torch.zeros(groups, *x.shape[1:], dtype=torch.float64).index_add_(0, group, x.double())


def _apart(x: Tensor, root: Tensor, group: Tensor, groups: int) -> Tensor:
    """Vectors [n, 2] without the constant part of each group, at right angles there and of length 1."""
    found: list[Tensor] = []
    for y in x.unbind(1):
        for _ in range(2):  # what rounding left of the first time
            for other in (root, *found):
                share = _sums(y * other, group, groups) / _sums(other * other, group, groups).clamp(min=1e-30)
                y = y - share[group].float() * other
            y = y / _sums(y * y, group, groups).sqrt().clamp(min=1e-20)[group].float()
        found.append(y)
    return torch.stack(found, 1)
