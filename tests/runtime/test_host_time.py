"""What tables of a new mask ask of the host and the driver, counted on a device that only says it is a GPU.

Times of a few microseconds cannot be tested on a shared machine; how often torch, the driver and Triton are called can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import create_block_mask
from flexattn.codegen.target import target_of
from flexattn.runtime import block_map, kept, table_builder
from flexattn.runtime import compile as compiling
from flexattn.runtime.block_map import Cut
from flexattn.runtime.device import Queue
from flexattn.runtime.table_builder import build_tables

CPU, SM90 = torch.device("cpu"), target_of(90)
CUTS = (Cut(128, 64, False), Cut(64, 64, True))
N = 16384
Mask = Callable[..., Any]


class Driver:
    """Counts what is asked of it; kernels do nothing but say that all rows fit."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.stream, self.capturing = 0, False

    def kernel_of(self, source: Any, translated: Any = None) -> Any:
        names = compiling.jit_function(source).arg_names
        told = names.index("TOLD") if "TOLD" in names else None

        def run(*arguments: Any) -> None:
            metadata, enter, leave, *values = arguments[6:]
            assert (metadata, enter, leave) == (None, None, None)  # Triton would call them
            assert len(values) == len(names) and (told is None or isinstance(values[told], int))
            self.asked[f"launch {source.spec.kernel}"] += 1

        return SimpleNamespace(run=run, function=1, packed_metadata=(), launch_metadata=None)

    def queue_of(self, device: torch.device) -> Queue:
        self.asked["stream"] += 1
        return Queue(device, self.stream, self.capturing)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, empty, zeros = Driver(), torch.empty, torch.zeros

    def counted_empty(*size: Any, **options: Any) -> Tensor:
        if options.get("device") != "meta":
            made.asked["allocation"] += 1
        return empty(*size, **options)

    def unpinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made.asked["zeros"] += 1
        return zeros(*size, **options)

    def keep(predicate: Any, what: Any, queue: Queue) -> None:
        made.asked["event"] += 1
        keep_it(predicate, what, queue)

    keep_it = kept.keep
    monkeypatch.setattr(kept, "keep", keep)
    monkeypatch.setattr(torch, "empty", counted_empty)
    monkeypatch.setattr(torch, "zeros", unpinned)
    monkeypatch.setattr(compiling, "found_or_built", lambda *of: (made.kernel_of(*of), False))
    monkeypatch.setattr(compiling, "_loaded", lambda compiled: compiled)
    monkeypatch.setattr(compiling, "_KERNELS", {})
    monkeypatch.setattr(compiling, "_knobs", lambda: SimpleNamespace(runtime=_Hooks()))
    monkeypatch.setattr(table_builder, "_READY", {})
    monkeypatch.setattr(table_builder, "_ZEROS_OF", {})
    monkeypatch.setattr(block_map, "_ROOMS", {})
    for module in (block_map.devices, table_builder):
        monkeypatch.setattr(module, "queue_of", made.queue_of)
    monkeypatch.setattr(block_map.devices, "target_for", lambda device: SM90)
    for places in (block_map._FREE, block_map._LEFT):
        places.clear()
    return made


class _Hooks:
    """Triton's, when nobody has added one: chains that are there and empty."""

    launch_enter_hook = SimpleNamespace(calls=[])
    launch_exit_hook = SimpleNamespace(calls=[])


def tables_of(mask_mod: Mask, cuts: tuple[Cut, ...] = CUTS) -> Any:
    mask = create_block_mask(mask_mod, None, None, N, N, device=CPU)
    assert mask.predicate is not None
    return mask.predicate, block_map._tables_on_device(mask.predicate, cuts)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def documents(ids: Tensor) -> Mask:
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def test_a_new_mask_of_known_structure_costs_two_launches_two_allocations_and_one_event(driver: Driver) -> None:
    tables_of(causal)
    driver.asked.clear()
    _, tables = tables_of(causal)
    assert [t.rows.shape for t in tables] == [(1, N // 128, 12), (1, N // 64, 12)]
    assert driver.asked == {"launch fill": 1, "launch order": 1, "allocation": 2, "event": 1, "stream": 1}


def test_a_tree_comes_under_the_same_event_and_serves_later_tables(driver: Driver) -> None:
    tables_of(documents(torch.arange(N) // 100))
    driver.asked.clear()
    predicate, _ = tables_of(documents(torch.arange(N) // 70))
    expected = {"launch ranges": 1, "launch block_map": 1, "launch order": 1, "allocation": 4, "event": 1, "stream": 1}
    assert driver.asked == expected
    tree = predicate.tables["tree", 0].what
    driver.asked.clear()
    block_map._tables_on_device(predicate, (*CUTS, Cut(32, 32, False)))
    assert driver.asked == {"launch block_map": 1, "launch order": 1, "allocation": 2, "event": 1, "stream": 1}
    assert predicate.tables["tree", 0].what is tree


def test_each_stream_and_each_graph_has_zeros_of_its_own(driver: Driver) -> None:
    mask = create_block_mask(documents(torch.arange(N) // 70), None, None, N, N, device=CPU).predicate
    assert mask is not None
    first, second, graph = Queue(CPU, 1, False), Queue(CPU, 2, False), Queue(CPU, 1, True)
    pools = {id(table_builder._zeros_of(q)) for q in (first, second, first)}
    assert len(pools) == 2 and id(table_builder._zeros_of(graph)) not in pools
    zeros = table_builder._zeros_of(first)
    taken = [zeros.lasting, *(zeros.fresh() for _ in range(3 * table_builder._ZEROS_AT_ONCE))]
    assert len({x.data_ptr() for x in taken}) == len(taken)
    driver.asked.clear()
    build_tables(mask, CUTS, SM90, room=8, queue=graph)
    assert driver.asked["zeros"] == 1  # which every replay sets to 0


def test_what_a_graph_records_is_not_kept(driver: Driver) -> None:
    driver.capturing = True
    predicate, tables = tables_of(documents(torch.arange(N) // 70))
    assert len(tables) == 2 and not predicate.tables


def test_another_stream_waits_for_tables_and_trees(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    predicate, _ = tables_of(documents(torch.arange(N) // 70))
    waited: list[Any] = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(Queue, "torch_stream", lambda queue: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: waited.append(tensor.shape))
    for key, made in list(predicate.tables.items()):
        predicate.tables[key] = made._replace(done="done")
        waited.clear()
        assert kept.find(predicate, key, Queue(CPU, 0, False)) is made.what and not waited
        assert kept.find(predicate, key, Queue(CPU, 5, False)) is made.what
        assert waited[0] == "done" and len(waited) > 2
    assert kept.find(predicate, ("tree", 0), Queue(CPU, 5, True)) is predicate.tables["tree", 0].what
    assert predicate.tables["in graphs"] == [predicate.tables["tree", 0]]


def test_hooks_that_somebody_added_are_called() -> None:
    calls: list[Any] = []
    run = lambda *arguments: calls.append(arguments[6:9])
    compiled = SimpleNamespace(run=run, function=1, packed_metadata=(), launch_metadata=lambda *of: "facts")
    kernel = SimpleNamespace(compiled=compiled, run=run, name="order")
    hooks = SimpleNamespace(
        launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=SimpleNamespace(calls=[print])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_knobs", lambda: SimpleNamespace(runtime=hooks))
        compiling.Launch(kernel, 1, [], [], kernel.run)({}, device=CPU)  # type: ignore[arg-type]
    assert calls == [("facts", hooks.launch_enter_hook, hooks.launch_exit_hook)]
