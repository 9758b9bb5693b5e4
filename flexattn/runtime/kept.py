"""What a device has made for a mask, kept with the mask: reads a maker, makes its result, once.

The idea: a result belongs to the stream it was made on. Another stream waits for it on the device, never the host; a CUDA
graph that uses it keeps it alive, and what is made while a graph is captured belongs to that graph and is not kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.runtime.device import Queue

_IN_GRAPHS = "in graphs"


class _Made(NamedTuple):
    """A result, the stream it was made on, and the event after which it is there; a CPU has neither."""

    what: Any
    stream: int
    done: torch.cuda.Event | None


def find(predicate: PredicateMask, key: Hashable, queue: Queue) -> Any:
    """What is kept under a key, for use on the current stream, which is given; None if nothing is."""
    made: _Made | None = predicate.tables.get(key)
    if made is None:
        return None
    if made.done is None:
        return made.what
    if queue.is_capturing:  # it begins when the work before it is done, and may wait for nothing outside
        predicate.tables.setdefault(_IN_GRAPHS, []).append(made)
        return made.what
    if queue.stream != made.stream:
        stream = queue.torch_stream()
        stream.wait_event(made.done)
        for tensor in _tensors(made.what):
            tensor.record_stream(stream)
    return made.what


def keep(predicate: PredicateMask, made: Mapping[Any, Any], queue: Queue) -> None:
    """Keeps what the current stream has just made, by its key, if it may be used again."""
    if queue.is_capturing or not predicate.reusable:
        return
    done = None
    if queue.device.type == "cuda":
        done = torch.cuda.Event()
        done.record(queue.torch_stream())
    predicate.tables.update({key: _Made(what, queue.stream, done) for key, what in made.items()})


def _tensors(what: Any) -> Iterator[Tensor]:
    if isinstance(what, Tensor):
        yield what
    elif isinstance(what, tuple):
        for item in what:
            yield from _tensors(item)


__all__ = ["find", "keep"]
