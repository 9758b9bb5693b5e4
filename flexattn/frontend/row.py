"""The kept keys of one query, as runs: what a step of decoding reads, without a table of all rows.

Reads a traced mask, sizes and a position; makes runs of tokens. The one idea: bounds over some sqrt(kv_len) stretches of keys
leave few stretches open, and only in those is the mask evaluated key by key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.interval import Tables, bounds
from flexattn.frontend.program import Traced
from flexattn.frontend.refine import POINTS_AT_ONCE
from flexattn.frontend.spans import Grid, Spans
from flexattn.frontend.tile_map import misread, raise_misread

LEAST_STRETCH = 64
Edges = tuple[Any, Any]  # starts and stops of runs, int64 arrays


class RowFinder:
    """Finds rows of a mask; what it knows of captured tensors serves all of them.

    Args:
        traced: the mask.
        grid: its groups and lengths; tiles do not matter.
        device: where the mask is evaluated; runs are put together by the host.
        tables: ranges of the captured tensors.
    """

    def __init__(self, traced: Traced, grid: Grid, device: torch.device, tables: Tables) -> None:
        self.traced, self.grid, self.device, self.tables = traced, grid, device, tables
        self.lost = misread(traced, grid) if device.type == "cpu" else None
        self.stretch = max(LEAST_STRETCH, 1 << (grid.kv_len.bit_length() // 2))
        group = torch.arange(grid.groups, device=device)[:, None]
        self.b, self.h = group // max(grid.heads, 1), group % max(grid.heads, 1)
        self.first = torch.arange(0, grid.kv_len, self.stretch, device=device)
        self.last = (self.first + (self.stretch - 1)).clamp(max=grid.kv_len - 1)
        self.step = torch.arange(self.stretch, device=device)

    @torch.no_grad()
    def find(self, position: int) -> Spans:
        """The kept keys of a query, a line for each group.

        Raises:
            CaptureIndexError: for a kept key a captured tensor is read out of range.
        """
        if self.lost is not None and len(self._runs(self.lost, position)[0]):
            raise_misread(self.traced, self.grid)
        start, stop = self._runs(self.traced, position)
        width = self.grid.kv_len + 1
        indptr = np.searchsorted(start, np.arange(self.grid.groups + 1) * width)
        parts = (indptr, start % width, stop % width)
        return Spans(*(torch.from_numpy(x.astype(np.int32)).to(self.device) for x in parts))

    def _runs(self, traced: Traced, position: int) -> Edges:
        """(starts, stops), each group * (kv_len + 1) + token, in order, none touching the next."""
        groups, kv_len, stretch = self.grid.groups, self.grid.kv_len, self.stretch
        if not groups or not kv_len:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        q = torch.full((1, 1), position, device=self.device)
        index: dict[str, Any] = {"b": (self.b, self.b), "h": (self.h, self.h), "q_idx": (q, q)}
        index["kv_idx"], shape = (self.first, self.last), (groups, len(self.first))
        must, may = (x.expand(shape).cpu().numpy() for x in bounds(traced.program, self.tables, **index))
        group, start, stop = _edges(must)
        origin = group * (kv_len + 1)
        found = [(origin + start * stretch, origin + np.minimum(stop * stretch, kv_len))]
        undecided = np.flatnonzero(may & ~must)
        at_once = max(1, POINTS_AT_ONCE // stretch)
        for at in range(0, len(undecided), at_once):
            found.append(self._evaluated(traced, q, undecided[at : at + at_once]))
        return _joined(found)

    def _evaluated(self, traced: Traced, q: Tensor, undecided: Any) -> Edges:
        """Runs in stretches, counted through all groups, key by key."""
        kv_len, many = self.grid.kv_len, self.first.shape[0]
        group, begin = undecided // many, undecided % many * self.stretch
        at = torch.from_numpy(np.stack((group, begin))).to(self.device)
        keys = (at[1][:, None] + self.step).clamp_(max=kv_len - 1)
        b, h = (x[at[0]] if self.grid.groups > 1 else x for x in (self.b, self.h))
        kept = evaluate(*traced, b=b, h=h, q_idx=q, kv_idx=keys).to(self.device)
        line, start, stop = _edges(kept.expand(keys.shape).cpu().numpy())
        origin = (group * (kv_len + 1) + begin)[line]
        end = (group * (kv_len + 1) + kv_len)[line]  # past it the last key was evaluated again
        return np.minimum(origin + start, end), np.minimum(origin + stop, end)


def _edges(kept: Any) -> tuple[Any, Any, Any]:
    """(line, start, stop) of the runs of kept cells in the lines of a bool array."""
    lines, cells = kept.shape
    padded = np.zeros((lines, cells + 2), np.bool_)
    padded[:, 1:-1] = kept
    at = np.flatnonzero(padded[:, 1:] != padded[:, :-1])
    line, cell = np.divmod(at, cells + 1)
    return line[::2], cell[::2], cell[1::2]


def _joined(found: list[Edges]) -> Edges:
    """Disjoint runs in order; those that touch are one."""
    start, stop = (np.sort(np.concatenate([runs[n] for runs in found])) for n in (0, 1))
    gap = start[1:] != stop[:-1]
    return start[np.concatenate(([True], gap))[: len(start)]], stop[np.concatenate((gap, [True]))[: len(stop)]]


def whole_row(kv_len: int, device: torch.device) -> Spans:
    """The row of a mask that keeps every key, one line."""
    stop = torch.full((min(kv_len, 1),), kv_len, dtype=torch.int32, device=device)
    return Spans(torch.tensor([0, len(stop)], dtype=torch.int32, device=device), torch.zeros_like(stop), stop)


def repeated(spans: Spans, have: tuple[int, int], want: tuple[int, int]) -> Spans:
    """Lines for (batch, heads) of `want`, from those of `have`, where 1 stands for all."""
    device = spans.indptr.device
    batch, heads = (torch.arange(n, device=device) * (m > 1) for n, m in zip(want, have, strict=True))
    line = (batch[:, None] * have[1] + heads).flatten()
    counts = spans.indptr.diff()[line]
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    owner = torch.repeat_interleave(torch.arange(len(line), device=device), counts)
    at = torch.arange(len(owner), device=device) - indptr[owner] + spans.indptr[line[owner]]
    return Spans(indptr, spans.start[at], spans.stop[at])
