"""check: whether the tiles of a mask function keep what the function keeps, pair by pair.

Reads a mask function and sizes; makes a report with a counter-example. The one idea: the function itself is called on every
pair, as torch does for a dense mask, so that neither the trace nor the proofs are believed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.errors import MaskFunctionError
from flexattn.frontend.arguments import mask_function
from flexattn.frontend.create import create_block_mask
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.mask_functions import MaskMod
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.source import function_name
from flexattn.frontend.tile_map import TileMap
from flexattn.frontend.torch_lists import DEFAULT_BLOCK_SIZE

PAIRS_AT_ONCE = 1 << 22


class MaskCheck(NamedTuple):
    """What `check` found; true where the two agree.

    Attributes:
        name: of the function.
        pairs: how many were compared.
        kept: how many of them the function keeps.
        wrong: for how many the tiles say something else.
        example: (b, h, q_idx, kv_idx) of the first such pair, None if there is none.
        expected: what the function says of it.

    Example:
        >>> report = check(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300, device="cpu")
        >>> bool(report), report.kept, report.example
        (True, 45150, None)
    """

    name: str
    pairs: int
    kept: int
    wrong: int
    example: tuple[int, int, int, int] | None
    expected: bool | None

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        if self:
            return f"{self.name}: tiles and function agree on {self.pairs:,} pairs, of which {self.kept:,} are kept"
        says = "keeps" if self.expected else "drops"
        return (
            f"{self.name}: tiles and function differ in {self.wrong:,} of {self.pairs:,} pairs; the first is "
            f"(b, h, q_idx, kv_idx) = {self.example}, which the function {says}"
        )


def check(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    *,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    raises: bool = False,
) -> MaskCheck:
    """Compares the tiles of a mask function with the function called on every pair: for tests, and where results surprise.

    They differ where a function does not say the same each time it is called, or not the same of a traced value as of a tensor.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)`, which torch.vmap must be able to map, as for torch's own masks.
        B, H, Q_LEN, KV_LEN, device: as in `create_block_mask`. The time follows B * H * Q_LEN * KV_LEN, the memory does not.
        BLOCK_SIZE: the tile to decide, one number or (q, kv).
        raises: Raise where they differ.

    Returns:
        A report, true where they agree; str() of it is a sentence.

    Raises:
        MaskFunctionError: they differ and `raises` is set.

    Example:
        >>> print(check(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 300, 300, device="cpu"))
        <lambda>: tiles and function agree on 90,000 pairs, of which 45,150 are kept
    """
    block_mask = create_block_mask(mask_function(mask_mod), B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    mask = block_mask.predicate
    assert mask is not None
    (batch, heads), (q_len, kv_len) = mask.sizes, mask.lengths
    tiles = block_mask.tile_map(*block_mask.BLOCK_SIZE)
    kept = wrong = 0
    example: tuple[int, int, int, int] | None = None
    expected: bool | None = None
    step = max(1, PAIRS_AT_ONCE // max(1, batch * heads * kv_len))
    for first in range(0, q_len, step):
        rows = torch.arange(first, min(first + step, q_len), device=mask.device)
        want, found = _asked(mask_mod, mask, rows), _tiled(tiles, mask, rows)
        kept, differs = kept + int(want.sum()), want != found
        count = int(differs.sum())
        if count and example is None:
            b, h, row, kv = differs.nonzero()[0].tolist()
            example, expected = (b, h, first + row, kv), bool(want[b, h, row, kv])
        wrong += count
    report = MaskCheck(function_name(mask_mod), batch * heads * q_len * kv_len, kept, wrong, example, expected)
    if raises and not report:
        hint = "a function of its indices and of captured tensors alone"
        raise MaskFunctionError(str(report), given=f"tiles of {block_mask.BLOCK_SIZE}", hint=hint)
    return report


def _asked(mask_mod: MaskMod, mask: PredicateMask, rows: Tensor) -> Tensor:
    """What the function says of each pair of some rows: bool [batch, heads, rows, kv_len]."""
    (batch, heads), kv_len = mask.sizes, mask.lengths[1]
    b, h, kv = (torch.arange(n, device=mask.device) for n in (batch, heads, kv_len))
    if not len(b) * len(h) * len(kv):
        return torch.zeros(batch, heads, len(rows), kv_len, dtype=torch.bool, device=mask.device)
    mapped: Any = lambda *index: torch.as_tensor(mask_mod(*index), device=mask.device)
    for axis in (3, 2, 1, 0):
        mapped = torch.vmap(mapped, in_dims=tuple(0 if n == axis else None for n in range(4)))
    kept: Tensor = mapped(b, h, rows, kv)
    return kept.to(torch.bool)


def _tiled(tiles: TileMap, mask: PredicateMask, rows: Tensor) -> Tensor:
    """What the tiles keep, with the program in partial ones: bool [batch, heads, rows, kv_len]."""
    (batch, heads), kv_len = mask.sizes, mask.lengths[1]
    b, h, kv = (torch.arange(n, device=mask.device) for n in (batch, heads, kv_len))
    state = tiles.dense()[:, :, rows // tiles.q_block][..., kv // tiles.kv_block].expand(batch, heads, -1, -1)
    if mask.traced is None:
        return state > 0
    program, binding = mask.traced
    shaped = (x.view([-1 if n == axis else 1 for n in range(4)]) for axis, x in enumerate((b, h, rows, kv)))
    b, h, q_idx, kv_idx = shaped
    return (state == 2) | ((state == 1) & evaluate(program, binding, b=b, h=h, q_idx=q_idx, kv_idx=kv_idx))


__all__ = ["MaskCheck", "check"]
