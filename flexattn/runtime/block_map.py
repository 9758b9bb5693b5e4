"""Span tables made on the device: a predicate mask and a tile size -> launches of the mask builder.

Reads a BlockMask; makes the table that an attention kernel walks, by row or by column. The one idea: nothing waits for the
device. A row that has more spans than its place in the table is kept as one partial span, which is right but slow; the device
counts such rows, and once that count has arrived by itself, the next call makes a larger table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.emit import tree_type
from flexattn.codegen.spec import KernelSpec, any_wide, capture_layout, wide_number
from flexattn.codegen.target import Target
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.expr import topological
from flexattn.frontend.interval import Tables, may_wrap
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Program
from flexattn.runtime import device as devices
from flexattn.runtime import stats
from flexattn.runtime.compile import first_that_builds, flat_arguments

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask

_GROWTH, _MOST_SPANS = 4, 1 << 12
_ORDER = TileConfig(64, 128, 4, 1)
_ROW = TileConfig(64, 64, 1, 1)  # a row's program works on vectors of 64 lanes; the tiles themselves are arguments


class DeviceTable(NamedTuple):
    """A span table, `rows` [batch * heads, lines, 12] and `extra` [n, 2], int32; batch and heads are 1 where all share it."""

    rows: Tensor
    extra: Tensor
    batch: int
    heads: int


class _Entry(NamedTuple):
    """A table that is kept: who made it and how many rows did not fit, known once `made` has passed."""

    table: DeviceTable
    spans: int
    overflow: Tensor | None  # pinned copy of the device's count; None on a CPU
    made: Any  # torch.cuda.Event


def device_table(mask: BlockMask, config: TileConfig, *, transposed: bool) -> DeviceTable:
    """The table of a block mask in tiles of one configuration.

    Args:
        mask: on the device of the call.
        config: BLOCK_M by BLOCK_N are the tiles.
        transposed: rows are tiles of keys.

    Returns:
        The table; made by the device for a function on a GPU, by the tile map for lists and on a CPU.

    Raises:
        StaleMaskError: a captured tensor has been written to since the mask was made.
    """
    predicate = mask.predicate
    if predicate is None or predicate.traced is None or predicate.device.type != "cuda" or 0 in predicate.lengths:
        tiles = mask.tile_map(config.BLOCK_M, config.BLOCK_N)
        rows, extra = tiles.table(transposed)
        return DeviceTable(rows, extra, tiles.batch, tiles.heads)
    predicate.check_current()
    key, spans = (config.BLOCK_M, config.BLOCK_N, transposed), usual_spans(predicate.traced.program)
    entry = predicate.tables.get(key)
    if entry is not None:
        torch.cuda.current_stream(predicate.device).wait_event(entry.made)
        if not _has_overflown(entry):
            return entry.table
        spans = entry.spans * _GROWTH
    entry = _built(predicate, config, transposed, spans)
    if predicate.reusable and not torch.cuda.is_current_stream_capturing():
        predicate.tables[key] = entry
    return entry.table


def _has_overflown(entry: _Entry) -> bool:
    """Whether rows did not fit, as far as the device has said; a deterministic run waits until it has."""
    if entry.overflow is None or entry.spans >= _MOST_SPANS or torch.cuda.is_current_stream_capturing():
        return False
    if torch.are_deterministic_algorithms_enabled():
        entry.made.synchronize()
    return bool(entry.made.query()) and int(entry.overflow) > 0


def _built(predicate: PredicateMask, config: TileConfig, transposed: bool, spans: int) -> _Entry:
    device = predicate.device
    with devices.current(device):
        table, overflow = build_table(predicate, config, devices.target_for(device), transposed=transposed, spans=spans)
        capturing, pinned = torch.cuda.is_current_stream_capturing(), None
        if not capturing:
            pinned = torch.empty(1, dtype=torch.int32, pin_memory=True)
            pinned.copy_(overflow, non_blocking=True)
        made = torch.cuda.Event()
        made.record()
        if torch.are_deterministic_algorithms_enabled() and not capturing:
            entry = _Entry(table, spans, pinned, made)
            return _built(predicate, config, transposed, spans * _GROWTH) if _has_overflown(entry) else entry
    return _Entry(table, spans, pinned, made)


def usual_spans(program: Program) -> int:
    """How many spans of a kind a row has room for at first: comparisons cut a row in few places, remainders in many."""
    ops = {n.op for n in topological([program.body])}
    return 32 if ops & {"mod", "floordiv", "rshift", "lshift"} else 8 if "load" in ops else 4


def build_table(
    predicate: PredicateMask, config: TileConfig, target: Target, *, transposed: bool, spans: int
) -> tuple[DeviceTable, Tensor]:
    """Launches the builder.

    Args:
        predicate: a mask with a function, of at least one query and one key.
        config: the tiles.
        target: where it runs; the interpreter takes CPU tensors.
        transposed: rows are tiles of keys.
        spans: room for spans of a kind in a row.

    Returns:
        (table, int32 [1] count of rows that had more spans than fit).
    """
    traced, device = predicate.traced, predicate.device
    assert traced is not None
    program, binding = traced
    (batch, heads), (q_len, kv_len) = predicate.shared_sizes, predicate.lengths
    own, other = (kv_len, q_len) if transposed else (q_len, kv_len)
    own_tile, other_tile = (config.BLOCK_N, config.BLOCK_M) if transposed else (config.BLOCK_M, config.BLOCK_N)
    lines = -(-own // own_tile)
    count = batch * heads * lines
    while count * 2 * spans >= 1 << 31:
        spans //= 2
    layouts = tuple(capture_layout(c) for c in binding.captures)
    spec = KernelSpec(
        kernel="block_map", target=target, config=_ROW, qk_dim=0, v_dim=0,
        layouts=(), mask=program, captures=layouts, wide_numbers=tuple(wide_number(n) for n in binding.numbers),
        wide_lengths=any_wide((batch, heads, q_len, kv_len)), is_transposed=transposed, spans=spans,
    )  # fmt: skip
    _, kernel = first_that_builds([spec], device)
    new = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    unsorted, rows, extra = (
        new(batch * heads, lines, 12),
        new(batch * heads, lines, 12),
        new(max(1, count * 2 * spans), 2),
    )
    overflow = torch.zeros(1, dtype=torch.int32, device=device)
    arguments = {
        "ROWS": unsorted, "EXTRA": extra, "OVERFLOW": overflow, "caps": flat_arguments(binding.captures, binding.numbers),
        "trees": tuple(_tree(predicate, slot, target) for slot in spec.ranged) or (0,), "heads": heads,
        "trusted": int(_is_trusted(predicate)), "own_tile": own_tile, "other_tile": other_tile,
        "own_len": own, "other_len": other, "lines": lines,
    }  # fmt: skip
    kernel(count, arguments, device=device)
    _order(unsorted, rows, target)
    stats.record_device_table()
    return DeviceTable(rows, extra, batch, heads), overflow


def _order(unsorted: Tensor, rows: Tensor, target: Target) -> None:
    """The rows of each group in falling order of cost."""
    groups, lines, _ = rows.shape
    spec = KernelSpec(kernel="order", target=target, config=_ORDER, qk_dim=0, v_dim=0, layouts=())
    _, kernel = first_that_builds([spec], rows.device)
    programs = groups * -(-lines // _ORDER.BLOCK_M)
    kernel(programs, {"UNSORTED": unsorted, "ROWS": rows, "lines": lines}, device=rows.device)


def _is_trusted(predicate: PredicateMask) -> bool:
    """Whether no integer of the mask may wrap around, so that bounds hold."""
    assert predicate.traced is not None
    (program, binding), device = predicate.traced, predicate.device
    if not may_wrap(program.body, binding.numbers):
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False  # the captured values cannot be looked at now
    return not Tables(binding).may_wrap(program.body)


def _tree(predicate: PredicateMask, slot: int, target: Target) -> Tensor:
    """Least and greatest elements over ranges of a captured tensor, made once a mask."""
    tree = predicate.tables.get(("tree", slot))
    if tree is None:
        assert predicate.traced is not None
        tree = build_tree(predicate.traced.binding.captures[slot], target)
        if predicate.reusable and not (tree.is_cuda and torch.cuda.is_current_stream_capturing()):
            predicate.tables["tree", slot] = tree
    return tree


def build_tree(tensor: Tensor, target: Target) -> Tensor:
    """(least, greatest) of every 64 elements, of every 4 of those and so on: int32 or int64 [nodes, 2]."""
    data = tensor.detach().contiguous().reshape(-1)
    data = data.view(torch.uint8) if data.dtype == torch.bool else data
    layout, length, nodes, count = capture_layout(data), data.numel(), 0, max(1, -(-data.numel() // 64))
    while count > 1:
        nodes, count = nodes + count, -(-count // 4)
    dtype = torch.int64 if tree_type(layout) == "*i64" else torch.int32
    tree = torch.empty(nodes + 1 + 4, 2, dtype=dtype, device=data.device)
    spec = KernelSpec("ranges", target, TileConfig(64, 64, 4, 1), 0, 0, layouts=(), captures=(layout,))
    _, kernel = first_that_builds([spec], data.device)
    programs = max(1, -(-length // 4096))
    kernel(programs, {"DATA": data, "TREE": tree, "length": length}, device=data.device)
    if programs > 1:
        spec = KernelSpec("ranges_above", target, TileConfig(256, 4, 4, 1), 0, 0, layouts=(), captures=(layout,))
        _, kernel = first_that_builds([spec], data.device)
        kernel(1, {"TREE": tree, "length": length}, device=data.device)
    return tree


__all__ = ["DeviceTable", "build_table", "build_tree", "device_table", "usual_spans"]
