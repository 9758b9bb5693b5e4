"""The device kernels run on: reads torch's device properties, makes a Target and makes a device current."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from flexattn.codegen.target import INTERPRETER, Target, target_of
from flexattn.errors import DeviceError


@functools.lru_cache(maxsize=64)
def target_for(device: torch.device) -> Target:
    """What the device of the inputs offers; the interpreter for CPU tensors.

    Args:
        device: A CUDA device with an index, or the CPU.

    Raises:
        DeviceError: Neither.
    """
    if device.type == "cpu":
        return INTERPRETER
    if device.type != "cuda" or torch.version.hip is not None:
        raise DeviceError("kernels run on NVIDIA GPUs", given=str(device), hint="kernel_options={'BACKEND': 'TORCH'}")
    properties = torch.cuda.get_device_properties(device)
    known = target_of(properties.major * 10 + properties.minor)
    return Target(
        arch=known.arch,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", known.shared_bytes),
        processors=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", known.l2_bytes),
    )


def is_capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the device's current stream: what runs now is recorded, not done. So too while torch's
    compiler warms a graph up: memory that is allocated then is the graph's, and nothing in it may be kept."""
    if device.type != "cuda":
        return False
    with current(device):
        return torch.cuda.is_current_stream_capturing() or _warms_up(device)


_WITHIN = threading.local()


@contextlib.contextmanager
def within_operator() -> Iterator[None]:
    """What runs inside is an operator of a graph, and not an eager call."""
    before = getattr(_WITHIN, "operator", False)
    _WITHIN.operator = True
    try:
        yield
    finally:
        _WITHIN.operator = before


def _warms_up(device: torch.device) -> bool:
    """Whether an operator runs in the memory of a CUDA graph that torch's compiler is about to capture."""
    if not getattr(_WITHIN, "operator", False):
        return False
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    manager = None if trees is None else trees.get_manager(device.index or 0, create_if_none_exists=False)
    return manager is not None and bool(manager.in_warmup)


def stream_of(device: torch.device) -> int:
    """The address of the device's current CUDA stream, 0 on a CPU; torch's own Stream object takes ten times as long."""
    return torch._C._cuda_getCurrentRawStream(device.index or 0) if device.type == "cuda" else 0


class Queue(NamedTuple):
    """The current stream of a device, asked for once: to ask takes the host as long as to use it.

    Attributes:
        device: whose.
        stream: the stream's address, 0 on a CPU.
        is_capturing: what runs now is recorded in a CUDA graph, not done, or is warmed up for one.
    """

    device: torch.device
    stream: int
    is_capturing: bool

    def torch_stream(self) -> torch.cuda.Stream:
        """The stream as torch's object."""
        return _torch_stream(self.device, self.stream)


def queue_of(device: torch.device) -> Queue:
    """The current stream of a device that is the current one."""
    if device.type != "cuda":
        return Queue(device, 0, False)
    return Queue(device, stream_of(device), torch.cuda.is_current_stream_capturing() or _warms_up(device))


@functools.lru_cache(maxsize=256)
def _torch_stream(device: torch.device, address: int) -> torch.cuda.Stream:
    """The current stream, whose address is given: streams of one address are the same."""
    return torch.cuda.current_stream(device)


_COUNTERS: dict[tuple[int | None, int], torch.Tensor] = {}
_ZEROS: dict[int | None, torch.Tensor] = {}  # for graphs, as far as none has them yet
_ZEROS_OF_GRAPHS: list[torch.Tensor] = []  # all that graphs may have, for ever: nobody says when a graph is gone
_ZEROS_AT_ONCE = 1 << 12


def counter_of(device: torch.device) -> torch.Tensor:
    """A zero, int32 [1], that a kernel counts with and leaves as a zero: the same for all kernels of a stream, which run one after the
    other. A call in a CUDA graph, which may be replayed on any stream, gets a zero of its own, made beforehand: to make it there would
    be one kernel more in the graph."""
    if is_capturing(device):
        return _counter_of_graph(device)
    key = (device.index, stream_of(device))
    counter = _COUNTERS.get(key)
    if counter is None:
        counter = _COUNTERS[key] = _zeros(device, 1)
    if device.index not in _ZEROS and device.type == "cuda":
        _ZEROS[device.index] = _zeros(device, _ZEROS_AT_ONCE)
        _ZEROS_OF_GRAPHS.append(_ZEROS[device.index])
        torch.cuda.current_stream(device).synchronize()  # a graph may use them on another one
    return counter


def _counter_of_graph(device: torch.device) -> torch.Tensor:
    zeros = _ZEROS.pop(device.index, None)
    if zeros is None:
        return _zeros(device, 1)
    if len(zeros) > 1:  # else the next call outside of a graph makes more
        _ZEROS[device.index] = zeros[1:]
    return zeros[:1]


def _zeros(device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


_AS_IT_IS = contextlib.nullcontext()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes the inputs' device the current one, if it is not."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)
