"""What a BlockMask shows of itself: text, numbers, pictures, and single pairs of a window.

Reads a mask; makes statistics and pictures, by files that are imported when somebody looks. The one idea: everything is summed
from runs of blocks, or evaluated for the pairs that are shown, so a million tokens are looked at as cheaply as a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexattn.errors import UnsupportedError
from flexattn.frontend.list_mask import ListMask, two_sizes
from flexattn.frontend.tile_map import TileMap
from flexattn.frontend.torch_lists import TorchLists

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flexattn.frontend.closed_form import ClosedForm
    from flexattn.frontend.mask_window import MaskWindow
    from flexattn.frontend.statistics import MaskStatistics


class MaskViews(TorchLists):
    """What BlockMask has of pictures and numbers."""

    def tile_map(self, q_block: int, kv_block: int) -> TileMap:
        """The tiles to visit, for tiles of q_block x kv_block tokens; cached.

        Raises:
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.
            ShapeError: the tile does not divide a list mask's BLOCK_SIZE, or its lists are too short for its lengths.
        """
        return self._mask.tile_map(q_block, kv_block)

    def statistics(self, *, most_counted: int = 10**9) -> MaskStatistics:
        """The mask in numbers: blocks by kind and how each was decided, kept pairs, work saved, the closed form.

        Args:
            most_counted: pairs that may be counted one by one, or ends of the runs of a formula; 10**9 take seconds. What
                print() and pictures show is counted up to 10**7.

        Returns:
            Numbers over the whole batch and all heads. Kept pairs are exact where a formula gives them or the partial blocks
            hold at most `most_counted` pairs, and otherwise a bracket; nothing of size q_len x kv_len is made.

        Example:
            >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1024, 1024, device="cpu")
            >>> print(causal.statistics())
            blocks of 128 x 128 tokens
              empty   28 (43.8%): by formula
              partial  8 (12.5%): by formula
              full    28 (43.8%): by formula
            density 50.05% of pairs: 524,800 of 1,048,576 kept, exact, by formula
            FLOPs saved 43.8%; lanes wasted in partial blocks 49.6%
            keys of a query: kv_idx <= q_idx
        """
        from flexattn.frontend.statistics import statistics

        tiles = self.tile_map(*self.BLOCK_SIZE)
        sizes = two_sizes(self._mask.sizes)
        return statistics(tiles, sizes=sizes, formula=self._closed_form(), most_counted=most_counted)

    def _closed_form(self) -> ClosedForm | None:
        from flexattn.frontend.closed_form import closed_form

        mask = self._mask
        return None if isinstance(mask, ListMask) or mask.traced is None else closed_form(mask.traced)

    def density(self) -> float:
        """The share of pairs that is kept, between 0 and 1, exactly: by formula, or counted on first use.

        Raises:
            UnsupportedError: there is no formula, and partial blocks hold more than 10**9 pairs.
        """
        from flexattn.frontend.statistics import COUNTED_PAIRS, kept_pairs

        tiles = self.tile_map(*self.BLOCK_SIZE)
        pairs = tiles.grid.groups * tiles.q_len * tiles.kv_len
        kept = kept_pairs(tiles, self._closed_form(), most_counted=COUNTED_PAIRS)
        if kept.source == "bracket":
            given = (
                f"partial blocks of more than {COUNTED_PAIRS:,} pairs, {kept.low:,} to {kept.high:,} of {pairs:,} kept"
            )
            hint = "statistics().density, a bracket, or statistics(most_counted=...), which takes its time"
            raise UnsupportedError("the exact density of this mask would take long to count", given=given, hint=hint)
        return kept.low / pairs if pairs else 0.0

    def window(
        self, q_start: int, q_stop: int, kv_start: int, kv_stop: int, *, batch: int = 0, head: int = 0
    ) -> MaskWindow:
        """The pairs of some queries and keys, one by one; nothing else is evaluated.

        Args:
            q_start, q_stop: the queries, half-open.
            kv_start, kv_stop: the keys.
            batch, head: of which batch entry and head.

        Returns:
            `kept`, bool [q_stop - q_start, kv_stop - kv_start]; print() shows a character a pair, a notebook a picture.

        Raises:
            CaptureIndexError: it does not lie within the mask.
            OptionError: it has more than 4,194,304 pairs.
            StaleMaskError: a tensor that a predicate mask captures has changed since it was created.

        Example:
            >>> rule = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 3)
            >>> print(create_block_mask(rule, None, None, 1 << 20, 1 << 20, "cpu").window(524288, 524292, 524284, 524292))
            queries 524,288 to 524,291 (down) x keys 524,284 to 524,291 (right); 12 of 32 pairs kept
            524288 │· · █ █ │█ · · ·
            524289 │· · · █ │█ █ · ·
            524290 │· · · · │█ █ █ ·
            524291 │· · · · │· █ █ █
        """
        from flexattn.frontend.mask_window import read_window

        return read_window(self._mask, (q_start, q_stop), (kv_start, kv_stop), (batch, head))

    def figure(self, *, batch: int = 0, head: int = 0, title: str | None = None, max_cells: int = 128) -> Figure:
        """The block map as a matplotlib figure, with token axes, a legend and the statistics.

        Args:
            batch, head: which one to draw.
            title: above the picture; by default the lengths.
            max_cells: along a side, at most; larger masks are summed into cells of several blocks.

        Returns:
            A matplotlib.figure.Figure that belongs to no window; `figure.savefig(path)` writes it.

        Raises:
            UnsupportedError: matplotlib is not installed.
            CaptureIndexError: the mask has no such batch entry or head.
        """
        from flexattn.frontend import figures

        return figures.block_figure(self, batch=batch, head=head, title=title, max_cells=max_cells)

    def __str__(self) -> str:
        from flexattn.frontend import display

        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{display.heads_text(self)}\n)"

    def _repr_html_(self) -> str:
        from flexattn.frontend import display

        return display.html(self)


__all__ = ["MaskViews"]
