"""A compiled kernel, started through the CUDA driver: packs what stays of its arguments once, and at a call what changes.

The idea: Triton's launcher looks at every argument at every call, asks the driver about every address and encodes every tensor
descriptor. Here a launch is one packed buffer, laid out as the driver says the kernel reads it; a call writes addresses, captured
values and remembered descriptors into it. Where anything is not as it is expected, `launch_of` says None, and Triton's launcher runs.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from flexattn.runtime.device import stream_of

_MAP_BYTES, _MAP_ALIGNMENT, _MAPS_AT_MOST = 128, 64, 1024
_L2_128_BYTES = 2  # how much of a line the L2 cache fetches for a descriptor's reads
_NO_CONTEXT = 201
_CHAINED, _VALUE_BYTES = (
    6,
    64,
)  # the launch attribute by which a kernel may start before the one in front of it has ended
_BUFFER, _BUFFER_SIZE = 1, 2  # names of the entries by which a launch says where its packed arguments are
_FORMATS = {"i32": ("i", 4), "i64": ("q", 8), "fp32": ("f", 4)}
Kind = Any  # a type as a signature has it: a string, or a tuple of them


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * (_VALUE_BYTES // 4)))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """The driver's functions, called without giving Python's lock away: a launch takes a microsecond."""
    try:
        return ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None


# ---------------------------------------------------------------- parameters
class _Descriptor(NamedTuple):
    """How tiles of a tensor are read through a descriptor: the compiler's facts."""

    swizzle: int
    element_bytes: int
    element_type: int
    block: tuple[int, ...]


class _Slot(NamedTuple):
    """One argument in the list of values: its places, and what makes them; of a single place `stop` is None."""

    at: int
    stop: int | None
    convert: Callable[[Any], Any]


def _formats(kind: Kind) -> list[tuple[str, int]]:
    """(struct format, bytes) of each value of an argument.

    Raises: LookupError: a type that is not known here."""
    if isinstance(kind, tuple):
        return [form for part in kind for form in _formats(part)]
    if kind.startswith("*"):
        return [("Q", 8)]
    if kind.startswith("tensordesc"):
        rank = _rank(kind)
        return [(f"{_MAP_BYTES}s", _MAP_BYTES), *[("i", 4)] * rank, *[("q", 8)] * rank]
    return [_FORMATS[kind]]


def _rank(kind: str) -> int:
    return kind[kind.index("[") : kind.index("]")].count(",") + 1


def _address(value: Any) -> int:
    return 0 if value is None else value if isinstance(value, int) else value.data_ptr()


def addresses(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Addresses of the tensors among an argument's values, and the others as they are."""
    return tuple([x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values])


def layout_of(sizes: Sequence[int], places: Sequence[tuple[int, int]]) -> list[int] | None:
    """Where each value lies, if the kernel's parameters, (offset, size) each as the driver says, are these and two addresses of
    scratch memory behind them; None where they are not."""
    wanted = [*sizes, 8, 8]
    return [at for at, _ in places][:-2] if [size for _, size in places] == wanted else None


def _places(function: int) -> list[tuple[int, int]]:
    """(offset, size) of each of a kernel's parameters; nothing where the driver is too old to say."""
    ask = getattr(_library(), "cuFuncGetParamInfo", None)
    found: list[tuple[int, int]] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask is not None and not ask(
        ctypes.c_void_p(function), ctypes.c_size_t(len(found)), ctypes.byref(offset), ctypes.byref(size)
    ):
        found.append((offset.value, size.value))
    return found


# ---------------------------------------------------------------- tensor descriptors
class _Maps:
    """Descriptors of tensors by their address; of one shape if an example of them is given, else of any."""

    def __init__(self, facts: _Descriptor, example: torch.Tensor | None) -> None:
        self.facts = facts
        self.known: dict[Any, list[Any]] = {}
        self.sizes = None if example is None else descriptor_sizes(example)

    def __call__(self, tensor: torch.Tensor) -> list[Any]:
        address = tensor.data_ptr()
        sizes = self.sizes or descriptor_sizes(tensor)
        key = address if self.sizes is not None else (address, *sizes)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _MAPS_AT_MOST:
                self.known.clear()
            shape, strides = sizes
            found = self.known[key] = [_encoded(address, self.facts, shape, strides), *shape, *strides]
        return found


def descriptor_sizes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides for a descriptor; the stride of a dimension of one entry may be anything, so it gets one that the hardware
    takes."""
    unit = 16 // tensor.element_size()
    return tuple(tensor.shape), (*(unit if n == 1 else s for n, s in zip(tensor.shape[:-1], tensor.stride())), 1)


def _encoded(address: int, facts: _Descriptor, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    rank = len(shape)
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    skip = -ctypes.addressof(room) % _MAP_ALIGNMENT
    numbers = lambda kind, values: (kind * rank)(*values)
    steps = [facts.element_bytes * s for s in reversed(strides[:-1])]
    status = _library().cuTensorMapEncodeTiled(
        ctypes.byref(room, skip), ctypes.c_int(TMA_DTYPE_DEVICE_TO_HOST[facts.element_type]), ctypes.c_uint32(rank),
        ctypes.c_void_p(address), numbers(ctypes.c_uint64, reversed(shape)), numbers(ctypes.c_uint64, [*steps, 0][:rank]),
        numbers(ctypes.c_uint32, reversed(facts.block)), numbers(ctypes.c_uint32, [1] * rank), ctypes.c_int(0),
        ctypes.c_int(facts.swizzle), ctypes.c_int(_L2_128_BYTES), ctypes.c_int(0),
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"{_said(status)}: no tensor descriptor for shape {list(shape)}, strides {list(strides)} and tiles of {facts.block}"
        )
    return room.raw[skip : skip + _MAP_BYTES]


def _said(status: int) -> str:
    """The driver's words for what went wrong."""
    text = ctypes.c_char_p()
    _library().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
    return f"CUDA error {status} ({(text.value or b'unknown').decode()})"


# ---------------------------------------------------------------- launches
class DirectLaunch:
    """A kernel, its grid and its packed arguments; call it with the arguments that change, as often as they do."""

    def __init__(
        self,
        function: int,
        config: _Config,
        packing: struct.Struct,
        values: list[Any],
        changing: list[tuple[str, _Slot]],
    ) -> None:
        self.config, self.packing, self.values, self.changing = config, packing, values, changing
        self._buffer, size = ctypes.create_string_buffer(packing.size), ctypes.c_size_t(packing.size)
        entries = (_BUFFER, ctypes.addressof(self._buffer), _BUFFER_SIZE, ctypes.addressof(size), 0)
        self._size, self._extra = size, (ctypes.c_void_p * 5)(*entries)
        self._function, self._config = ctypes.c_void_p(function), ctypes.byref(config)
        self._launch = _library().cuLaunchKernelEx
        self._lock = threading.Lock()  # of the buffer

    def __call__(self, arguments: dict[str, Any], *, device: torch.device) -> None:
        """Launches on the current stream; the caller has made `device` current."""
        values = self.values.copy()
        for name, (at, stop, convert) in self.changing:
            if stop is None:
                values[at] = convert(arguments[name])
            else:
                values[at:stop] = convert(arguments[name])
        with self._lock:
            try:
                self.packing.pack_into(self._buffer, 0, *values)
            except OverflowError:  # a number beyond float32 is infinite there
                rounded = [ctypes.c_float(x).value if isinstance(x, float) else x for x in values]
                self.packing.pack_into(self._buffer, 0, *rounded)
            self.config.stream = stream_of(device)
            status = self._launch(self._config, self._function, None, self._extra)
            if status == _NO_CONTEXT:  # a thread that has not used this device
                torch.cuda.set_device(device)
                status = self._launch(self._config, self._function, None, self._extra)
        if status:
            raise RuntimeError(f"{_said(status)} at a launch of {self.config.grid_x} programs")


def launch_of(
    compiled: Any, kinds: Sequence[tuple[int, str, Kind]], programs: int, arguments: dict[str, Any],
    changing: Collection[str], *, chained: bool,
) -> DirectLaunch | None:  # fmt: skip
    """A launch that keeps every argument but those named in `changing`.

    Args:
        compiled: Triton's CompiledKernel, loaded on the current device.
        kinds: (position, name, type) of every runtime argument, in order.
        programs: the grid.
        arguments: values, and of changing tensors examples: descriptors are for their sizes.
        changing: names of arguments that a call brings.
        chained: whether a kernel that can be is started before the one in front of it has ended.

    Returns: None where the kernel is not started this way: not NVIDIA's, or its parameters are not what was expected.
    """
    if _library() is None:
        return None
    facts, described = compiled.metadata, list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if facts.target.backend != "cuda" or facts.num_ctas != 1 or facts.launch_cooperative_grid:
        return None
    if facts.global_scratch_size or facts.profile_scratch_size:
        return None
    try:
        forms = [form for _, _, kind in kinds for form in _formats(kind)]
    except LookupError:
        return None
    offsets = layout_of([size for _, size in forms], _places(compiled.function))
    if offsets is None or sum(_is_descriptor(kind) for _, _, kind in kinds) != len(described):
        return None
    values: list[Any] = []
    open_ones: list[tuple[str, _Slot]] = []
    for _, name, kind in kinds:
        convert, at, count = _converter(kind, described, arguments.get(name)), len(values), len(_formats(kind))
        is_single = isinstance(kind, str) and not _is_descriptor(kind)
        if name in changing:
            open_ones.append((name, _Slot(at, None if is_single else at + count, convert)))
            values += [0] * count
        else:
            values += [convert(arguments[name])] if is_single else convert(arguments[name])
    attributes = (_Attribute * 1)(_Attribute(_CHAINED, 0, (1,)))
    count = 1 if chained and facts.launch_pdl else 0
    config = _Config(programs, 1, 1, 32 * facts.num_warps, 1, 1, facts.shared, None, attributes, count)
    return DirectLaunch(compiled.function, config, packing_of(forms, offsets), [*values, 0, 0], open_ones)


def packing_of(forms: Sequence[tuple[str, int]], offsets: Sequence[int]) -> struct.Struct:
    """One format for all values at their places, and two addresses behind them."""
    text, end = "<", 0
    for (form, size), at in zip(forms, offsets):
        text += f"{at - end}x{form}" if at > end else form
        end = at + size
    return struct.Struct(f"{text}{-end % 8}xQQ")


def _is_descriptor(kind: Kind) -> bool:
    return isinstance(kind, str) and kind.startswith("tensordesc")


def _converter(kind: Kind, described: list[dict[str, Any]], example: Any) -> Callable[[Any], Any]:
    """What makes an argument's value, or list of values; takes the first of the compiler's facts for a descriptor."""
    if _is_descriptor(kind):
        meta = described.pop(0)
        block = tuple(meta["block_size"])
        facts = _Descriptor(meta["swizzle"], meta["elem_size"], meta["elem_type"], block)
        return _Maps(facts, example)
    if isinstance(kind, tuple):
        return addresses if any(k.startswith("*") for k in kind) else list
    return _address if kind.startswith("*") else unchanged


def unchanged(value: Any) -> Any:
    """A number is what it is."""
    return value


__all__ = ["DirectLaunch", "addresses", "descriptor_sizes", "launch_of", "layout_of", "packing_of", "unchanged"]
