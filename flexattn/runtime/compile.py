"""KernelSource -> something that can be launched: writes leaf files, compiles what is neither in memory nor on disk, counts builds.

The idea: triton.jit's own argument binder is bypassed. The compiled kernel is started directly with a flat argument list,
so nothing about the values of the arguments can trigger another build. What will be asked for soon is compiled ahead, in threads.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from flexattn.codegen.emit import KernelSource, emit
from flexattn.codegen.spec import KernelSpec
from flexattn.errors import CompileError
from flexattn.runtime import driver, settings, stats, store
from flexattn.runtime.device import stream_of

_KERNELS: dict[tuple[KernelSpec, int], Kernel] = {}
_FAILED: dict[KernelSpec, Exception] = {}
_AHEAD: dict[KernelSpec, Future[Any]] = {}  # compiled, or being compiled, and not asked for yet
_LOCK = threading.Lock()
_LEAF_LOCK = threading.Lock()  # a thread that compiles ahead takes it while _LOCK's holder waits for that thread
T = TypeVar("T")


class Starts(Protocol):
    """Something that starts a kernel on the current stream, given the arguments that change."""

    def __call__(self, arguments: dict[str, Any], *, device: torch.device) -> None: ...


class Kernel:
    """A compiled kernel on one device; call it with the grid and a dict of runtime arguments."""

    def __init__(self, source: KernelSource, compiled: Any) -> None:
        self.source, self.compiled, self.run = source, compiled, compiled.run
        self.name = source.spec.kernel
        names = jit_function(source).arg_names
        self.kinds = tuple((at, n, source.signature[n]) for at, n in enumerate(names) if n in source.signature)
        self.blank = [None] * len(names)  # an argument for each parameter: what was compiled in is not looked at
        self._any = Launch(self, 0, self.blank, [(at, n, _marshal(kind)) for at, n, kind in self.kinds], self.run)

    def __call__(self, programs: int, arguments: dict[str, Any], *, device: torch.device) -> None:
        """Launches `programs` programs on the current stream; the caller has made `device` current."""
        self._any._replace(programs=programs)(arguments, device=device)

    def fix(
        self, programs: int, arguments: dict[str, Any], *, changing: Collection[str] = (), chained: bool = True
    ) -> Starts:
        """A launch that keeps the grid and every argument but tensors and those named in `changing`. With `chained`, a kernel that
        can be is started before the one in front of it has ended."""
        values, open_ones = self.blank.copy(), []
        for at, name, kind in self.kinds:
            if name in changing or _holds_tensor(kind):
                open_ones.append((at, name, _marshal(kind, arguments.get(name))))
            else:
                values[at] = arguments[name]
        run = self.run
        if not chained:
            run = copy.copy(run)
            run.launch_pdl = False
        names = {name for _, name, _ in open_ones}
        direct = driver.launch_of(self.compiled, self.kinds, programs, arguments, names, chained=chained)
        return Launch(self, programs, values, open_ones, run, direct)


class Launch(NamedTuple):
    """A kernel, its grid and what stays of its arguments; call it with the others, as often as they change. Where somebody hooked
    Triton's launches, or the driver cannot be asked directly, Triton's launcher runs."""

    kernel: Kernel
    programs: int
    values: list[Any]
    changing: list[tuple[int, str, Callable[[Any], Any]]]  # position, name, what makes the launcher's argument of it
    run: Callable[..., None]  # Triton's launcher
    direct: driver.DirectLaunch | None = None

    def __call__(self, arguments: dict[str, Any], *, device: torch.device) -> None:
        """Launches on the current stream; the caller has made `device` current."""
        kernel, programs, values, changing, run, direct = self
        if programs <= 0:
            return
        compiled, (enter, leave) = kernel.compiled, _hooks()
        if direct is not None and enter is leave is None:
            direct(arguments, device=device)
            stats.record_launch(kernel.name)
            return
        values = values.copy()
        for position, name, marshal in changing:
            values[position] = marshal(arguments[name])
        stream = stream_of(device)
        metadata = compiled.launch_metadata((programs, 1, 1), stream, *values) if enter or leave else None
        run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, metadata, enter, leave, *values)
        stats.record_launch(kernel.name)


class InterpretedKernel:
    """The same interface over Triton's interpreter, for CPU tensors."""

    def __init__(self, source: KernelSource) -> None:
        self.source, self.name = source, source.spec.kernel
        self.function = jit_function(source)
        self.constants = {**source.constexprs, **leaf_arguments(source)}

    def __call__(self, programs: int, arguments: dict[str, Any], *, device: torch.device) -> None:
        """Runs `programs` programs one after the other."""
        if programs <= 0:
            return
        typed = {name: _typed(arguments[name], kind) for name, kind in self.source.signature.items()}
        self.function[(programs,)](**typed, **self.constants)
        stats.record_launch(self.name)

    def fix(
        self, programs: int, arguments: dict[str, Any], *, changing: Collection[str] = (), chained: bool = True
    ) -> Starts:
        """As of `Kernel.fix`."""
        kinds = self.source.signature
        fixed = {n: x for n, x in arguments.items() if n in kinds and n not in changing and not _holds_tensor(kinds[n])}
        return lambda others, *, device: self(programs, {**others, **fixed}, device=device)


def _typed(value: Any, kind: Any) -> Any:
    """A number as the interpreter's scalar of the signature's type, which its own conversion would guess from the value."""
    if isinstance(kind, tuple):
        return tuple(_typed(v, k) for v, k in zip(value, kind))
    if kind.startswith("*") or isinstance(value, torch.Tensor):
        return value
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    types = {"i32": (tl.int32, np.int32), "i64": (tl.int64, np.int64), "fp32": (tl.float32, np.float32)}
    scalar, numpy_type = types[kind]
    return tl.tensor(TensorHandle(np.array([value], dtype=numpy_type), scalar), scalar)


def _holds_tensor(kind: Any) -> bool:
    """Whether an argument of a signature's type is, or has in it, a tensor."""
    if isinstance(kind, tuple):
        return any(k.startswith("*") for k in kind)
    return bool(kind.startswith(("*", "tensordesc")))


def _marshal(kind: Any, example: Any = None) -> Callable[[Any], Any]:
    """What turns an argument of a signature's type into what the launcher takes; given an example, a tensor descriptor is
    for tensors of its sizes and strides."""
    if isinstance(kind, tuple):
        return driver.addresses if _holds_tensor(kind) else driver.unchanged
    if kind.startswith("tensordesc"):  # as in 'tensordesc<bf16[1, 1, 64, 128]>'
        block = [int(n) for n in kind[kind.index("[") + 1 : kind.index("]")].split(",")]
        if example is None:
            return lambda tensor: _descriptor(_descriptor_class(), _descriptor_facts(block, tensor), tensor)
        return functools.partial(_descriptor, _descriptor_class(), _descriptor_facts(block, example))
    return torch.Tensor.data_ptr if kind.startswith("*") else driver.unchanged


def _descriptor_facts(block: list[int], tensor: torch.Tensor) -> dict[str, Any]:
    """All of a tensor descriptor but its tensor."""
    shape, strides = driver.descriptor_sizes(tensor)
    return {"shape": list(shape), "strides": list(strides), "block_shape": block, "padding": "zero"}


def _descriptor(kind: Any, facts: dict[str, Any], tensor: torch.Tensor) -> Any:
    """A tensor descriptor. Its own constructor checks again what the layout facts have promised, which takes longer than the
    launch: it is skipped."""
    new = kind.__new__(kind)
    new.__dict__.update(facts, base=tensor)
    return new


@functools.lru_cache(maxsize=1)
def _descriptor_class() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


def flat_arguments(captures: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> tuple[Any, ...]:
    """The tuple `caps` that generated functions index: pointer, sizes and strides of each capture, then the numbers."""
    flat: list[Any] = []
    for c in captures:
        c = c.detach() if c.requires_grad else c
        flat += (c.view(torch.uint8) if c.dtype == torch.bool else c, *c.shape, *c.stride())
    return (*flat, *numbers) or (0,)


@functools.lru_cache(maxsize=1)
def _knobs() -> Any:
    from triton import knobs

    return knobs


def _hooks() -> tuple[Any, Any]:
    """What Triton is to call before and after a launch; None for chains of no hook, whose calls cost as much as the launch."""
    runtime = _knobs().runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if not getattr(enter, "calls", enter) and not getattr(leave, "calls", leave):
        return None, None
    return enter, leave


# ---------------------------------------------------------------- launches that are ready
_READY_AT_MOST = 1024  # each holds numbers, no tensor


def keep_ready(known: dict[Any, T], key: Any, what: T) -> T:
    """Keeps a launch that is ready, or several, by what they rest on; few enough that no one's memory fills."""
    if len(known) >= _READY_AT_MOST:
        known.clear()
    known[key] = what
    return what


# ---------------------------------------------------------------- source to functions
def jit_function(source: KernelSource) -> Any:
    """The skeleton's function."""
    return getattr(importlib.import_module(f"flexattn.codegen.skeletons.{source.module}"), source.function)


def leaf_arguments(source: KernelSource) -> dict[str, Any]:
    """Skeleton parameter -> generated function."""
    if not source.leaf_text:
        return {}
    module = leaf_module(source.leaf_text, source.leaf_hash)
    return {parameter: getattr(module, name) for parameter, name in source.leaves.items()}


def leaf_module(text: str, digest: str) -> ModuleType:
    """The generated module, written once to the cache folder (by a rename, so that readers never see half a file)."""
    name = f"flexattn_leaves_{digest}"
    with _LEAF_LOCK:
        if name in sys.modules:
            return sys.modules[name]
        path = _write_leaf(text, f"{name}.py")
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _write_leaf(text: str, filename: str) -> Path:
    path = settings.cache_dir() / "leaves" / filename
    if not path.exists() or path.read_text() != text:
        settings.write_whole(path, text)
    return path


# ---------------------------------------------------------------- compiling
def build(source: KernelSource, translated: Callable[[], None] | None = None) -> Any:
    """Compiles for the spec's target with Triton; needs no GPU. Calls `translated` once the source is the compiler's own.

    Returns: triton's CompiledKernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget(*source.spec.target.triton_target)
    start = ast_source(source)
    if translated is not None:
        start.make_ir = _and_then(start.make_ir, translated)
    return triton.compile(start, target=target, options=dict(source.options))


def found_or_built(source: KernelSource, translated: Callable[[], None] | None = None) -> tuple[Any, bool]:
    """A kernel from disk, or else compiled and kept there for others; of several processes one compiles, and the others wait.

    Returns: triton's CompiledKernel, and whether it was found.
    """
    compiled = store.find(source, lambda: ast_source(source))
    if compiled is not None:
        return compiled, True
    with store.alone(source):
        compiled = store.find(source, lambda: ast_source(source))
        if compiled is not None:
            return compiled, True
        compiled = build(source, translated)
        store.keep(source, compiled)
        return compiled, False


def _and_then(function: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        call()
        return result

    return both


def ast_source(source: KernelSource) -> Any:
    """What Triton's compiler starts from: the skeleton, with the type or the value of every argument."""
    if source.spec.is_gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    else:
        from triton.compiler import ASTSource

    function = jit_function(source)
    constants = {**source.constexprs, **leaf_arguments(source)}
    signature = {name: source.signature.get(name, "constexpr") for name in function.arg_names}
    attrs = {_path(function.arg_names.index(name), at): [["tt.divisibility", d]] for name, at, d in source.aligned}
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)


def _path(argument: int, position: int | None) -> tuple[int, ...]:
    return (argument,) if position is None else (argument, position)


_AHEAD_AT_ONCE = 4


def build_ahead(spec: KernelSpec, device: torch.device) -> threading.Event:
    """Starts compiling a kernel in a thread, unless it is there, for `kernel_for` to wait for: the compiler's passes and the
    assembler leave Python to others. What fails there fails when the kernel is asked for.

    Returns: what is set once the source is translated, which does need Python: whoever waits for it does not slow it down.
    """
    translated = threading.Event()
    with _LOCK:
        is_known = (spec, device.index or 0) in _KERNELS or spec in _FAILED or spec in _AHEAD
        if is_known or spec.target.is_interpreter:
            translated.set()
        else:
            _AHEAD[spec] = _threads().submit(_build_ahead, spec, translated)
    return translated


def _build_ahead(spec: KernelSpec, translated: threading.Event) -> tuple[Any, bool]:
    try:
        return found_or_built(emit(spec), translated.set)
    finally:
        translated.set()


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AHEAD_AT_ONCE, thread_name_prefix="flexattn compiles")


def kernel_for(spec: KernelSpec, device: torch.device) -> Kernel | InterpretedKernel:
    """The kernel of a spec on a device, compiled on first use and counted.

    Raises: whatever the compiler or the driver raised, the same again on later calls.
    """
    key = (spec, device.index or 0)
    kernel = _KERNELS.get(key)
    if kernel is None:
        with _LOCK:
            kernel = _KERNELS.get(key) or _make(key)
    return kernel


def _make(key: tuple[KernelSpec, int]) -> Any:
    spec, was_found = key[0], False
    if spec in _FAILED:
        raise _FAILED[spec]
    try:
        source, ahead = emit(spec), _AHEAD.pop(spec, None)
        if spec.target.is_interpreter:
            kernel: Any = InterpretedKernel(source)
        else:
            compiled, was_found = found_or_built(source) if ahead is None else ahead.result()
            kernel = Kernel(source, _loaded(compiled))
        if spec.is_gluon:
            _refuse_spills(kernel.compiled.n_spills)
    except Exception as error:
        _FAILED[spec] = error
        raise
    tiles, warps = f"tiles {spec.config.BLOCK_M}x{spec.config.BLOCK_N}", f"{spec.config.num_warps} warps"
    record = stats.record_disk_hit if was_found else stats.record_build
    record(spec.kernel, f"{tiles}, {warps}, {spec.config.num_stages} stages")
    _KERNELS[key] = kernel
    return kernel


def _loaded(compiled: Any) -> Any:
    """Loads the binary on the current device now, so that too large a kernel fails here and not at its launch."""
    compiled._init_handles()
    return compiled


# A thread may have spilled this many. Later versions of Triton than 3.6 spill up to 80 once a tile of queries, outside the loops.
SPILLED_REGISTERS = 96


def _refuse_spills(spilled: int) -> None:
    """A kernel whose registers are handed out by role has no slower form that still is the best: another one is taken."""
    if spilled > SPILLED_REGISTERS:
        raise CompileError(f"it spills {spilled} registers a thread", given=f"{spilled}", hint="smaller tiles")


def first_that_builds(
    specs: Sequence[KernelSpec], device: torch.device
) -> tuple[KernelSpec, Kernel | InterpretedKernel]:
    """The first spec of a preference list that compiles and fits; each failure is announced.

    Raises:
        CompileError: none does.
    """
    failure: Exception | None = None
    for spec in specs:
        try:
            return spec, kernel_for(spec, device)
        except Exception as error:  # compilers fail in many ways; the next configuration may still work
            failure = error
            announce(spec, error)
    raise CompileError(
        f"no configuration of the {specs[0].kernel} kernel could be built for sm_{specs[0].target.arch}",
        given=f"{type(failure).__name__}: {failure}",
        hint="kernel_options={'BACKEND': 'TORCH'}, or smaller tiles with kernel_options={'BLOCK_M': 16, 'BLOCK_N': 16}",
    ) from failure


def announce(spec: KernelSpec, error: Exception) -> None:
    """Says once that a configuration failed to build or to run, and why."""
    config, first_line = spec.config, (str(error).splitlines() or ["no message"])[0]
    settings.warn_once(
        f"build {spec.kernel} {config} {spec.target.arch}",
        f"flexattn: the {spec.kernel} kernel with {config} failed on sm_{spec.target.arch} "
        f"({type(error).__name__}: {first_line}); trying the next configuration",
        settings.FlexPerformanceWarning,
    )


def clear() -> None:
    """Forgets every compiled kernel (for tests)."""
    with _LOCK:
        _KERNELS.clear()
        _FAILED.clear()
        _AHEAD.clear()


__all__ = [
    "InterpretedKernel",
    "Kernel",
    "announce",
    "build",
    "build_ahead",
    "clear",
    "first_that_builds",
    "flat_arguments",
    "jit_function",
    "keep_ready",
    "kernel_for",
    "leaf_module",
]
