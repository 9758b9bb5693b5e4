"""One random problem from one number: sizes, memory layout, tensors, functions and options of a call.

The one idea: everything follows from the seed. `seed % 48` is the structure, `seed // 48` goes through its variants, and the rest is
drawn from a generator that starts at the seed, so that a failure is reproduced alone. All memory around a tensor's own is NaN. A
backward problem is a smaller one with a wish: which gradients, by which kind of run, from the gradients of which outputs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest
from tests.fuzz.structures import MASKS, SCORES, STRUCTURES, Draw, Mask, Score, Sizes, Structure, Variant

CROWDED = 5  # programs that share all tiles of a crowded problem
_PAIRS = 6_000_000  # of queries and keys of all heads, at most
_BACKWARD_PAIRS = 1_000_000
_SMALL_PAIRS = 150_000
_ORDERS = ((0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 0, 2))  # of batch, head and position in memory
_UNIT = 8  # elements of 16 bytes, which the hardware's copies ask for
_TOO_LARGE = ("smooth | stripes",)  # the fused backward spills in all of its tiles: it gives way, announced


class Wish(NamedTuple):
    """What a backward problem asks for, as far as kernels are built for it.

    Attributes:
        q, k, v: whether these need gradients.
        captures: whether the score's captured tensors do, where it has some.
        is_deterministic: the same bits in every run.
    """

    q: bool = True
    k: bool = True
    v: bool = True
    captures: bool = True
    is_deterministic: bool = False

    def __str__(self) -> str:
        wanted = " ".join(f"d{name}" for name in ("q", "k", "v", "captures") if getattr(self, name))
        return f"{wanted}{', deterministic' if self.is_deterministic else ''}"


_ALL, _IN_ORDER = Wish(), Wish(captures=False, is_deterministic=True)
_PARTS = [  # one of these for each variant
    Wish(q=True, k=False, v=False, captures=False), Wish(q=False, k=True, v=False, captures=False),
    Wish(q=False, k=False, v=True, captures=False), Wish(q=False, k=True, v=True, captures=True),
    Wish(q=True, k=False, v=True, captures=False), Wish(q=True, k=True, v=False, captures=True),
    Wish(q=True, k=True, v=True, captures=False),
]  # fmt: skip


class Upstream(NamedTuple):
    """Gradients of the outputs: [batch, q_heads, q_len, v_dim] in the inputs' type, and float32 [batch, q_heads, q_len] or None."""

    d_out: Tensor
    d_lse: Tensor | None


@dataclass
class Problem:
    """A call, and what is needed to say what it should give."""

    seed: int
    structure: Structure
    variant: Variant
    sizes: Sizes
    scale: float | None
    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    mask: Mask
    layouts: str

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has kernels of its own: structure and variant, and of block lists their block size and which of them there are."""
        blocks = self.mask.blocks
        lists: tuple[Any, ...] = ()
        if blocks is not None and blocks.predicate is None:
            lists = (blocks.BLOCK_SIZE, tuple(blocks.kv_num_blocks.shape[:2]), blocks.full_kv_num_blocks is None)
        return self.structure.name, self.variant, lists, self.wish

    @property
    def leaves(self) -> list[Tensor]:
        """What needs a gradient, in order: q, k, v, captured tensors."""
        return [x for x in (self.q, self.k, self.v, *self.captured) if x.requires_grad]

    @property
    def is_fused(self) -> bool:
        """Whether the fused kernel for Hopper must make these gradients."""
        wish, dims = self.wish, self.variant.dims
        if wish is None or not (wish.q and wish.k and wish.v) or wish.is_deterministic:
            return False
        pads = {64 if 32 < n <= 64 else 128 if 64 < n <= 128 else 0 for n in dims}
        is_served = len(pads) == 1 and 0 not in pads and not any(n % _UNIT for n in dims)
        return is_served and self.structure.name not in _TOO_LARGE

    def call(self, **options: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """out, lse and, if this problem asks for them, maxima."""
        mask = {"mask_mod": self.mask.mod} if self.mask.blocks is None else {"block_mask": self.mask.blocks}
        aux = AuxRequest(lse=True, max_scores=self.variant.want_max)
        with torch.set_grad_enabled(self.wish is not None):
            out, found = flexattn.flex_attention(
                self.q, self.k, self.v, self.score.mod, scale=self.scale, enable_gqa=True, return_aux=aux,
                kernel_options=options or None, **mask,
            )  # fmt: skip
        return out, found.lse, found.max_scores

    def differentiate(self, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the leaves; where the same bits are asked for, those of a second run behind them."""
        assert self.upstream is not None and self.wish is not None
        pairs = [(x, d) for x, d in zip((out, lse), self.upstream) if d is not None]
        outputs, upstream = zip(*pairs)
        runs = 2 if self.wish.is_deterministic else 1
        grads = [torch.autograd.grad(outputs, self.leaves, upstream, retain_graph=n + 1 < runs) for n in range(runs)]
        return tuple(g for run in grads for g in run)

    @contextmanager
    def manner(self) -> Iterator[None]:
        """Inside, torch's algorithms are deterministic if this problem asks for that."""
        if self.wish is None or not self.wish.is_deterministic:
            yield
            return
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def to(self, device: torch.device) -> Problem:
        """The same call with everything on another device; seeds make the same captured tensors anywhere."""
        other = make(self.seed, device, is_small=self.is_small, is_empty=True, is_backward=self.wish is not None)
        moved: dict[str, Any] = {n: getattr(self, n).detach().to(device) for n in ("q", "k", "v")}
        for name in "qkv":
            moved[name].requires_grad_(getattr(self, name).requires_grad)
        if self.upstream is not None:
            moved["upstream"] = Upstream(*(None if x is None else x.to(device) for x in self.upstream))
        return Problem(**{**vars(other), **moved})

    def exact(self) -> Problem:
        """The same call with captured tensors of the score in float64."""
        if not self.captured:
            return self
        other = make(self.seed, self.q.device, is_small=self.is_small, is_empty=True, is_backward=True, is_exact=True)
        return replace(self, score=other.score, captured=other.captured)

    is_small: bool = False
    wish: Wish | None = None
    upstream: Upstream | None = None
    captured: tuple[Tensor, ...] = ()

    def __str__(self) -> str:
        v, dims = self.variant, self.variant.dims
        scale = "default" if self.scale is None else f"{self.scale:.4g}"
        return (
            f"seed {self.seed}: {self.structure.name}; {str(v.dtype)[6:]}, dims {dims[0]}/{dims[1]}, batch {self.sizes.batch} "
            f"(keys {self.k.shape[0]}), heads {self.sizes.q_heads}/{self.sizes.kv_heads}, lengths {self.sizes.q_len}/"
            f"{self.sizes.kv_len}, scale {scale}, {self.layouts}{', maxima' if v.want_max else ''}"
            f"{'' if self.upstream is None else f', {self.wish}' + (', of lse too' if self.upstream.d_lse is not None else '')}"
        )


def is_crowded(seed: int) -> bool:
    """Whether few programs shall work on all tiles of the problem, one after the other, and not each on one or two."""
    return seed // (len(STRUCTURES) * len(STRUCTURES[0].variants)) % 2 == 1


def wish_of(seed: int) -> Wish:
    """What the backward problem of a seed asks for: mostly all gradients; sometimes the same bits in each run, or some of the
    gradients, the same ones for all problems of a variant."""
    kinds = len(STRUCTURES[0].variants)
    variant = seed % len(STRUCTURES) * kinds + seed // len(STRUCTURES) % kinds
    return random.Random(f"wish {seed}").choice([_ALL] * 4 + [_IN_ORDER] * 2 + [_PARTS[variant % len(_PARTS)]])


def make(
    seed: int, device: torch.device, *, is_small: bool = False, is_empty: bool = False, is_backward: bool = False,
    is_exact: bool = False,
) -> Problem:  # fmt: skip
    """The problem of a seed.

    Args:
        seed: Any integer from 0.
        device: Where its tensors lie.
        is_small: At most 150,000 pairs of queries and keys instead of 6 million, or a million with gradients.
        is_empty: Queries, keys and values are left out.
        is_backward: It asks for gradients.
        is_exact: Captured tensors of the score are float64.
    """
    rng = random.Random(seed)
    structure = STRUCTURES[seed % len(STRUCTURES)]
    variant = structure.variants[seed // len(STRUCTURES) % len(structure.variants)]
    sizes = _sizes(rng, _SMALL_PAIRS if is_small else _BACKWARD_PAIRS if is_backward else _PAIRS)
    scale = _scale(rng, variant, structure.score == "same")
    wish = wish_of(seed) if is_backward else None
    draw = Draw(rng, sizes, variant.dtype, device, wish is not None and wish.captures, is_exact)
    score, mask = SCORES[structure.score](draw), MASKS[structure.mask](draw)
    q, k, v, layouts = _tensors(random.Random(seed + 1), sizes, variant, device, is_empty)
    problem = Problem(seed, structure, variant, sizes, scale, q, k, v, score, mask, layouts, is_small, wish)
    if wish is not None:
        for x, need in zip((q, k, v), wish):
            x.requires_grad_(need)
        problem.captured = tuple(draw.captured)
        problem.upstream = _upstream(random.Random(f"upstream {seed}"), problem, device, is_empty)
    return problem


def _sizes(rng: random.Random, most: int) -> Sizes:
    while True:
        kv_heads = rng.choice([1, 1, 2, 3, 5, 16])
        group = rng.choice([1, 1, 2, 3, 4, 8])
        batch = rng.choice([1, 1, 2, 3, 7])
        sizes = Sizes(batch, kv_heads * group, kv_heads, _length(rng, 33), _length(rng, 1))
        if rng.random() < 0.25:
            sizes = sizes._replace(kv_len=sizes.q_len)
        if math.prod((sizes.batch, sizes.q_heads, sizes.q_len, sizes.kv_len)) <= most:
            return sizes


def _length(rng: random.Random, least: int) -> int:
    """From 33 (queries) or 1 (keys) to 1500, often beside a multiple of 64."""
    way = rng.random()
    if way < 0.15:
        return rng.randint(least, 129)
    if way < 0.5:
        return max(least, 64 * rng.randint(1, 20) + rng.choice([-1, 0, 0, 1]))
    return rng.randint(least, rng.choice([300, 600, 1500]))


def _scale(rng: random.Random, variant: Variant, is_plain: bool) -> float | None:
    """Where no function changes the score, the sign is a fact that kernels are built for."""
    usual = variant.dims[0] ** -0.5
    if is_plain and not variant.is_positive:
        return rng.choice([0.0, -usual, -usual * rng.uniform(0.1, 4.0)])
    choices = [None, None, usual * rng.uniform(0.1, 4.0), usual * 10, 1e-3]
    return rng.choice(choices if is_plain else [*choices, 0.0, -usual])


# ---------------------------------------------------------------- tensors
def _upstream(rng: random.Random, problem: Problem, device: torch.device, is_empty: bool) -> Upstream:
    """Gradients of the outputs, of out in any order of dimensions or one number for all, as that of a sum is; of lse or not."""
    batch, heads, _, q_len, _ = problem.sizes
    shape = (batch, heads, q_len, problem.variant.dims[1])
    has_d_lse, is_expanded = rng.random() < 0.5, rng.random() < 0.1
    order = rng.choice(_ORDERS)
    if is_empty:
        shell = torch.empty(shape, dtype=problem.variant.dtype, device="meta")
        return Upstream(shell, torch.empty(shape[:3], device="meta") if has_d_lse else None)
    generator = torch.Generator(device).manual_seed(rng.randrange(1 << 40))
    draw = lambda *sizes: torch.randn(sizes, generator=generator, device=device)
    if is_expanded:
        d_out = draw(1, 1, 1, 1).to(problem.variant.dtype).expand(shape)
    else:
        d_out = _strided(shape, order, rng, problem.variant.dtype, device).copy_(draw(*shape))
    return Upstream(d_out, draw(*shape[:3]) if has_d_lse else None)


def _tensors(
    rng: random.Random, sizes: Sizes, variant: Variant, device: torch.device, is_empty: bool
) -> tuple[Tensor, Tensor, Tensor, str]:
    """query, key, value [batch, heads, length, dim], and in words how they lie in memory."""
    dims, (batch, q_heads, kv_heads, q_len, kv_len) = variant.dims, sizes
    kv_batch = 1 if batch > 1 and rng.random() < 0.15 else batch
    shapes = [(batch, q_heads, q_len, dims[0]), *((kv_batch, kv_heads, kv_len, n) for n in dims)]
    if is_empty:
        q, k, v = (torch.empty(s, dtype=variant.dtype, device="meta") for s in shapes)
        return q, k, v, ""
    generator = torch.Generator(device).manual_seed(rng.randrange(1 << 40))
    can_share = q_len == kv_len and kv_batch == batch and not any(n % _UNIT for n in dims)
    if can_share and rng.random() < 0.6:
        views = _slices_of_one(shapes, variant.dtype, device)
        layouts = "slices of one tensor"
    else:
        orders = [rng.choice(_ORDERS) for _ in shapes]
        views = [_strided(s, o, rng, variant.dtype, device) for s, o in zip(shapes, orders)]
        layouts = " ".join("".join("bhs"[d] for d in o) + "d" for o in orders)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator, device=device))
    return views[0], views[1], views[2], layouts


def _slices_of_one(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """[batch, length, all heads of all three], as one projection makes them."""
    widths = [s[1] * s[3] for s in shapes]
    memory = torch.full((shapes[0][0], shapes[0][2], sum(widths)), math.nan, dtype=dtype, device=device)
    return [part.unflatten(-1, (s[1], s[3])).transpose(1, 2) for part, s in zip(memory.split(widths, -1), shapes)]


def _strided(
    shape: tuple[int, ...], order: tuple[int, ...], rng: random.Random, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """In the middle of NaN, dimensions in a given order, rows wider than they need to be or not."""
    room = -(-shape[3] // _UNIT) * _UNIT + _UNIT * rng.choice([0, 0, 1, 5])
    before, after = (_UNIT * rng.randint(1, 20) for _ in range(2))
    outer = [shape[d] for d in order]
    size = math.prod(outer) * room
    memory = torch.full((before + size + after,), math.nan, dtype=dtype, device=device)
    whole = memory[before : before + size].view(*outer, room)[..., : shape[3]]
    return whole.permute(*(order.index(d) for d in range(3)), 3)
