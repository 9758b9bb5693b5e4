"""A mask as its function: traced once, a snapshot of what it captured, cut into tiles of any size.

Reads a traced mask, sizes and lengths; makes tile maps and further masks. The one idea: torch counts the writes to every
tensor, so a mask can tell that it is out of date without looking at any value (contents.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from flexattn.errors import CaptureIndexError, DeviceError, OptionError, ShapeError, StaleMaskError
from flexattn.frontend import algebra
from flexattn.frontend.arguments import device_of, integer
from flexattn.frontend.contents import contents, versions
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import DEP_B, DEP_H
from flexattn.frontend.interval import Tables
from flexattn.frontend.mask_functions import (
    MaskMod,
    and_masks,
    noop_mask,
    not_mask,
    or_masks,
    shifted_function,
    sliced_function,
    stacked_function,
    transposed_function,
    with_tensors,
    xor_masks,
)
from flexattn.frontend.program import Binding, Traced
from flexattn.frontend.slices import Slice
from flexattn.frontend.spans import Grid, Spans
from flexattn.frontend.tile_map import TileMap, build_tile_map
from flexattn.frontend.trace import trace

if TYPE_CHECKING:
    from flexattn.frontend.row import RowFinder


class PredicateMask:
    """The pairs that a traced function keeps. Immutable; raises StaleMaskError once a captured tensor was written to.

    Args:
        traced: the function, or None where every pair is kept.
        function: what `traced` is the trace of.
        sizes: (batch, heads), 1 where the mask is the same for all.
        lengths: (q_len, kv_len).
        block: tokens of a block of torch's lists, (q, kv); tiles may be of any size.
        device: where tile maps are made.
        follows: nobody asked for that device, nor is a captured tensor there: the mask serves inputs on any other.
    """

    def __init__(
        self,
        traced: Traced | None,
        function: MaskMod,
        *,
        sizes: tuple[int, int],
        lengths: tuple[int, int],
        block: tuple[int, int],
        device: torch.device,
        follows: bool = False,
    ) -> None:
        if not all(isinstance(n, (int, torch.SymInt)) and n >= 0 for n in (*sizes, *lengths)):
            given, hint = (*sizes, *lengths), "None for B or H where the mask is the same in all of them"
            raise OptionError("B, H, Q_LEN and KV_LEN must be integers of at least 0", given=given, hint=hint)
        self.traced = None if algebra.keeps_all(traced) else traced
        self.function, self.device, self.follows = function, device, follows
        self.sizes, self.lengths, self.block = sizes, lengths, block
        self._versions, self._contents = versions(self.traced), contents(self.traced)
        self._maps: dict[tuple[int, int], TileMap] = {}
        self._finder: RowFinder | None = None  # of rows
        self._tables: Tables | None = None  # its ranges of captured tensors, which no length changes
        self.tables: dict[Hashable, Any] = {}  # what the device has made of this mask; whoever makes it keeps it here

    @property
    def reusable(self) -> bool:
        """False if a captured tensor was made in inference mode: it counts no writes, so nothing of it may be kept."""
        return None not in self._versions

    @property
    def shared_sizes(self) -> tuple[int, int]:
        """(batch, heads) with 1 where the function does not read that index: groups that have a table of their own."""
        deps = self.traced.program.body.deps if self.traced is not None else 0
        batch, heads = self.sizes
        return batch if deps & DEP_B else min(batch, 1), heads if deps & DEP_H else min(heads, 1)

    def check_current(self) -> None:
        """Raises StaleMaskError if a captured tensor has been written to; in debug mode also if that went around torch."""
        was, now = self._versions, versions(self.traced)
        if was != now:
            slot = next(n for n, (before, after) in enumerate(zip(was, now, strict=True)) if before != after)
            self._raise_stale(slot, f"version {was[slot]} then, {now[slot]} now")
        held = contents(self.traced) if self._contents is not None else None
        for slot, (before, after) in enumerate(zip(self._contents or (), held or (), strict=False)):
            if None not in (before, after) and before != after:
                self._raise_stale(slot, "other contents now, by a write that torch did not see")

    def _raise_stale(self, slot: int, how: str) -> NoReturn:
        assert self.traced is not None
        shape = tuple(self.traced.binding.captures[slot].shape)
        raise StaleMaskError(
            f"a tensor captured by mask_mod {self.traced.program.name} has changed since the BlockMask was created",
            given=f"{self.traced.program.capture_name(slot)} of shape {shape}, {how}",
            hint="create_block_mask again, or pass mask_mod= to flex_attention, which rebuilds the mask",
        )

    def legal_tile(self, q_tile: int, kv_tile: int) -> bool:
        """Whether `tile_map` can cut the mask into such tiles: always."""
        return True

    def tile_map(self, q_tile: int, kv_tile: int) -> TileMap:
        """The tiles to visit; cached."""
        self.check_current()
        found = self._maps.get((q_tile, kv_tile)) or self._build(q_tile, kv_tile)
        if self.reusable:
            self._maps[q_tile, kv_tile] = found
        return found

    def _build(self, q_tile: int, kv_tile: int) -> TileMap:
        if self.device.type == "meta":
            raise DeviceError("a mask on the meta device has no blocks", given="meta", hint='mask.to("cpu") before')
        (batch, heads), (q_len, kv_len) = self.sizes, self.lengths
        sizes = {"batch": batch, "heads": heads, "q_len": q_len, "kv_len": kv_len}
        return build_tile_map(self.traced, **sizes, q_block=q_tile, kv_block=kv_tile, device=self.device)

    def row(self, position: int) -> Spans:
        """The kept keys of one query as runs of tokens, a line for each of batch * heads."""
        from flexattn.frontend.row import RowFinder, repeated, whole_row

        self.check_current()
        position = integer(position, "position", hint="a query's number; one call for each of several")
        (batch, heads), (q_len, kv_len), shared = self.sizes, self.lengths, self.shared_sizes
        if not -q_len <= position < q_len:
            given, hint = f"{position} for {q_len} queries", "a position of the mask, or appended() for a longer one"
            raise CaptureIndexError("position out of range for a BlockMask", given=given, hint=hint)
        if self.traced is None:
            return repeated(whole_row(kv_len, self.device), (1, 1), (batch, heads))
        finder = self._finder
        if finder is None:
            self._tables = self._tables or Tables(self.traced.binding)
            finder = RowFinder(self.traced, Grid(*shared, q_len, kv_len, 1, 1), self.device, self._tables)
        if self.reusable:
            self._finder = finder
        else:
            self._tables = None
        found = finder.find(position % q_len)
        return found if shared == self.sizes else repeated(found, shared, self.sizes)

    def block_map(self) -> TileMap:
        """The tiles that torch's lists name."""
        return self.tile_map(*self.block)

    def kept(self) -> Tensor:
        """Every pair: bool [batch, heads, q_len, kv_len]."""
        self.check_current()
        return dense(self.traced, self.sizes, self.lengths, self.device)

    # ---------------------------------------------------------------------------------------------- others made of it
    def as_predicate(self) -> PredicateMask:
        """Itself."""
        return self

    def changed(self, **changes: Any) -> PredicateMask:
        """The mask with other arguments."""
        self.check_current()
        names = ("traced", "function", "sizes", "lengths", "block", "device", "follows")
        new = PredicateMask(**{n: getattr(self, n) for n in names} | changes)
        if new.traced is self.traced:
            new._tables = self._tables
        return new

    def expanded(self, batch: int, heads: int) -> PredicateMask:
        """The mask for other sizes; what was made of this one serves it too where the function does not read their indices."""
        new = self.changed(sizes=(batch, heads))
        if new.shared_sizes == self.shared_sizes:
            new._maps, new._finder, new.tables = self._maps, self._finder, self.tables
        return new

    def cropped(self, q_len: int, kv_len: int) -> PredicateMask:
        """The upper left corner."""
        return self.changed(lengths=(q_len, kv_len))

    def sliced(self, part: Slice) -> PredicateMask:
        """The picked batches, heads and rows, counted from 0."""
        batches, heads, _ = part.at
        return self.changed(
            traced=algebra.moved(self.traced, part),
            function=sliced_function(self.function, part),
            sizes=(len(batches), len(heads)),
            lengths=(part.q_len, self.lengths[1]),
        )

    def shifted(self, q: int, kv: int, lengths: tuple[int, int]) -> PredicateMask:
        """The mask from query `q` and key `kv` on."""
        function = shifted_function(self.function, q, kv)
        return self.changed(traced=algebra.shifted(self.traced, q, kv), function=function, lengths=lengths)

    def transposed(self) -> PredicateMask:
        """Queries and keys in each other's place."""
        lengths, block = self.lengths[::-1], self.block[::-1]
        traced, function = algebra.transposed(self.traced), transposed_function(self.function)
        return self.changed(traced=traced, function=function, lengths=lengths, block=block)

    def to(self, device: torch.device | str) -> PredicateMask:
        """The mask, and the tensors that its function captures, on another device."""
        device = device_of(device)
        move = lambda t: t.to(device)
        function = with_tensors(self.function, move)
        return self.changed(traced=_rebound(self.traced, move), function=function, device=device, follows=False)

    def following(self, device: torch.device) -> PredicateMask:
        """The mask on `device` if its own was nobody's choice; else itself."""
        return self.changed(device=device) if self.follows and device != self.device else self

    # ------------------------------------------------------------------------------------------------------- algebra
    def __and__(self, other: PredicateMask) -> PredicateMask:
        return self._with(other, algebra.both(self.traced, other.traced), and_masks(self.function, other.function))

    def __or__(self, other: PredicateMask) -> PredicateMask:
        return self._with(other, algebra.either(self.traced, other.traced), or_masks(self.function, other.function))

    def __xor__(self, other: PredicateMask) -> PredicateMask:
        return self._with(other, algebra.one_of(self.traced, other.traced), xor_masks(self.function, other.function))

    def __invert__(self) -> PredicateMask:
        return self.changed(traced=algebra.opposite(self.traced), function=not_mask(self.function))

    def _with(self, other: PredicateMask, traced: Traced | None, function: MaskMod) -> PredicateMask:
        """A mask of this one and another, which must be as long; a size of 1 broadcasts."""
        (mine, _), sizes = _aligned((self, other), None)
        return mine.changed(traced=traced, function=function, sizes=sizes, follows=self.follows and other.follows)

    # ------------------------------------------------------------------------------------------------- moving around
    def __getstate__(self) -> dict[str, Any]:
        """Without what can be made again, and with a function that another process can have."""
        return self._lasting() | {"function": portable(self.function, self.traced)}

    def __deepcopy__(self, memo: dict[int, Any]) -> PredicateMask:
        new = memo[id(self)] = object.__new__(type(self))
        new.__setstate__(copy.deepcopy(self._lasting(), memo))
        return new

    def _lasting(self) -> dict[str, Any]:
        self.check_current()
        return self.__dict__ | {"_maps": {}, "tables": {}, "_finder": None, "_tables": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions, self._contents = versions(self.traced), contents(self.traced)


def stacked(masks: Sequence[PredicateMask], axis: int) -> PredicateMask:
    """Masks side by side along batch (axis 0) or heads (1), which must agree in all else; a size of 1 broadcasts."""
    masks, sizes = _aligned(masks, axis)
    traced = algebra.stacked([(m.traced, m.sizes[axis]) for m in masks], "bh"[axis])
    stops = list(itertools.accumulate(m.sizes[axis] for m in masks))
    parts = tuple((m.function, stop - m.sizes[axis], stop) for m, stop in zip(masks, stops, strict=True))
    follows = all(m.follows for m in masks)
    return masks[0].changed(traced=traced, function=stacked_function(parts, axis), sizes=sizes, follows=follows)


def _aligned(masks: Sequence[PredicateMask], axis: int | None) -> tuple[tuple[PredicateMask, ...], tuple[int, int]]:
    """The masks on one device, and (batch, heads) of all together: added along the axis, else the same or 1."""
    sizes = [tuple({m.sizes[n] for m in masks} - {1}) or (1,) for n in (0, 1)]
    if len({m.lengths for m in masks}) > 1 or any(len(s) > 1 for n, s in enumerate(sizes) if n != axis):
        shapes = " and ".join(str(m.sizes + m.lengths) for m in masks)
        hint = "one Q_LEN and KV_LEN for all, and B and H of 1 or the same"
        raise ShapeError("masks of different sizes cannot be combined", given=shapes, hint=hint)
    device = next((m.device for m in masks if not m.follows), masks[0].device)
    masks = tuple(m.following(device) for m in masks)
    if any(m.device != device for m in masks):
        given = tuple(str(m.device) for m in masks)
        raise DeviceError("masks on different devices cannot be combined", given=given, hint="mask.to(device)")
    for mask in masks:
        mask.check_current()
    batch, heads = (sum(m.sizes[n] for m in masks) if n == axis else s[0] for n, s in enumerate(sizes))
    return masks, (batch, heads)


def portable(function: MaskMod, traced: Traced | None) -> MaskMod:
    """The function itself if pickle can write it, by its name and with what it holds; else its trace, as a function."""
    if _pickles(function):
        return function
    from flexattn.frontend.saved import replayed  # which reads masks

    return noop_mask if traced is None else functools.partial(replayed, traced.program, *traced.binding)


def _pickles(value: Any) -> bool:
    """Whether pickle can write a value; functions are written by their names."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, functools.partial):
        return all(map(_pickles, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, (tuple, list)):
        return all(map(_pickles, value))
    try:
        pickle.dumps(value)
    except Exception:  # whatever an object's own way of pickling stumbles over
        return False
    return True


def trace_mask(mask_mod: MaskMod) -> Traced | None:
    """A mask function, traced; None if it keeps every pair."""
    traced = None if _is_noop(mask_mod) else trace(mask_mod, "mask")
    return None if algebra.keeps_all(traced) else traced


def _is_noop(mask_mod: MaskMod) -> bool:
    """Our noop_mask or torch's, recognised without importing torch's module."""
    name = (getattr(mask_mod, "__module__", None), getattr(mask_mod, "__name__", None))
    return mask_mod is noop_mask or name == ("torch.nn.attention.flex_attention", "noop_mask")


def _rebound(traced: Traced | None, replace: Callable[[Tensor], Tensor]) -> Traced | None:
    if traced is None:
        return None
    return Traced(traced.program, Binding(tuple(map(replace, traced.binding.captures)), traced.binding.numbers))


def dense(
    traced: Traced | None,
    sizes: tuple[int, int],
    lengths: tuple[int, int],
    device: torch.device,
    *,
    score: bool = False,
) -> Tensor:
    """Every pair of a mask, or of a score mod (kept: not -inf): bool [batch, heads, q_len, kv_len]."""
    shape = (*sizes, *lengths)
    if traced is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    index = (torch.arange(n, device=device).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(shape))
    b, h, q_idx, kv_idx = index
    outside: list[Tensor] = []
    zero = torch.zeros((), device=device) if score else None
    kept = evaluate(
        traced.program, traced.binding, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx, score=zero, out_of_range=outside
    )
    kept = ~torch.isneginf(kept) if score else kept
    if any(bool((bad & kept).any()) for bad in outside):
        raise CaptureIndexError(
            f"{traced.program.name} reads a captured tensor out of range at a pair it keeps",
            given=f"such a pair within q_len={shape[2]} and kv_len={shape[3]}",
            hint="longer captured tensors, or a condition that drops such pairs",
            where=str(traced.program.where) if traced.program.where else None,
        )
    return kept.to(device).expand(shape).contiguous()
