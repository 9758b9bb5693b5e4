"""What a device has made for a mask, kept with the mask: reads a maker, makes its result, once.

The idea: a result belongs to the stream it was made on. Another stream waits for it on the device, never the host; a CUDA
graph that uses it keeps it alive, and what is made while a graph is captured belongs to that graph and is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.runtime.device import is_capturing, stream_of

T = TypeVar("T")
_IN_GRAPHS = "in graphs"


class _Made(NamedTuple):
    """A result, the stream it was made on, and the event after which it is there; a CPU has neither."""

    what: Any
    stream: int
    done: torch.cuda.Event | None


def find(predicate: PredicateMask, key: Hashable) -> Any:
    """What is kept under a key, for use on the current stream; None if nothing is."""
    made: _Made | None = predicate.tables.get(key)
    if made is None:
        return None
    if made.done is None:
        return made.what
    if is_capturing(predicate.device):  # it begins when the work before it is done, and may wait for nothing outside
        predicate.tables.setdefault(_IN_GRAPHS, []).append(made)
        return made.what
    if stream_of(predicate.device) != made.stream:
        stream = torch.cuda.current_stream(predicate.device)
        stream.wait_event(made.done)
        for tensor in _tensors(made.what):
            tensor.record_stream(stream)
    return made.what


def keep(predicate: PredicateMask, made: Mapping[Any, Any]) -> None:
    """Keeps what the current stream has just made, by its key, if it may be used again."""
    device = predicate.device
    if not predicate.reusable or is_capturing(device):
        return
    stream, done = stream_of(device), None
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
    predicate.tables.update({key: _Made(what, stream, done) for key, what in made.items()})


def once(predicate: PredicateMask, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of a mask, made once where that is safe."""
    found = find(predicate, key)
    if found is None:
        found = make()
        keep(predicate, {key: found})
    return cast(T, found)


def _tensors(what: Any) -> Iterator[Tensor]:
    if isinstance(what, Tensor):
        yield what
    elif isinstance(what, tuple):
        for item in what:
            yield from _tensors(item)


__all__ = ["find", "keep", "once"]
