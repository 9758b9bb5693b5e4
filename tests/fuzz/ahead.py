"""Kernels of all structures, built on a machine without a GPU and used on another one.

Reads the structures; writes a folder with a binary and its metadata for each kernel. The one idea: Triton's own cache is keyed by the
bytes of its library, which differ between Python versions, so a kernel is found here by what it is made from: generated functions,
skeletons, argument types, constants, options, and Triton's version. Where the folder has no kernel, it is compiled as always, and
counted.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flexattn.codegen.emit import KernelSource
from flexattn.codegen.target import target_of
from flexattn.runtime import choose, launch
from flexattn.runtime import compile as compiling
from flexattn.runtime import device as devices
from flexattn.runtime.attention import AuxRequest, prepare
from flexattn.runtime.table_builder import Cut, DeviceTable, build_tables
from tests.fuzz.problems import make
from tests.fuzz.structures import STRUCTURES

FOLDER = Path("build") / "fuzz_kernels"
ASKED = {"warp_specialized": True}
_NUMBERS_TRIED = 8  # drawn for each structure: some choose between two kernels that build a mask's table


# ---------------------------------------------------------------- a folder of kernels
def key_of(source: KernelSource) -> str:
    """Names a kernel by everything it is made from."""
    import triton

    facts = (
        triton.__version__, source.spec.target.arch, source.module, source.function, source.leaf_text,
        sorted(source.leaves.items()), sorted(source.signature.items()), sorted(source.constexprs.items()),
        source.aligned, sorted(source.options.items()), _skeletons(source.module),
    )  # fmt: skip
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=16)
def _skeletons(module: str) -> str:
    """Of the text of a skeleton and of what skeletons share."""
    from flexattn.codegen import skeletons

    files = [Path(skeletons.__path__[0]) / f"{name}.py" for name in ("softmax", "tiles", "leaf_ops", module)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def store(folder: Path, key: str, compiled: Any) -> None:
    """Writes the binary last, so that a kernel that is there is whole."""
    metadata = next(Path(path) for name, path in compiled.metadata_group.items() if name.endswith(".json"))
    (folder / f"{key}.json").write_text(metadata.read_text())
    part = folder / f"{key}.part"
    part.write_bytes(gzip.compress(compiled.kernel, 6))
    part.replace(folder / f"{key}.cubin.gz")


def load(folder: Path, source: KernelSource) -> Any:
    """Triton's CompiledKernel, or None where the folder has none of this source."""
    key = key_of(source)
    binary, metadata = folder / f"{key}.cubin.gz", folder / f"{key}.json"
    if not binary.exists():
        return None
    from triton.compiler.compiler import CompiledKernel

    with tempfile.TemporaryDirectory() as temporary:
        name = f"{source.function}.cubin"
        path = Path(temporary) / name
        path.write_bytes(gzip.decompress(binary.read_bytes()))
        return CompiledKernel(compiling.ast_source(source), {name: str(path), metadata.name: metadata}, key)


def use(folder: Path) -> Counter[str]:
    """From now on kernels come from a folder where it has them; counts what was 'loaded' and what was 'compiled'."""
    counts: Counter[str] = Counter()
    compile_now = compiling.build

    def found(source: KernelSource, translated: Callable[[], None] | None = None) -> Any:
        kernel = load(folder, source)
        counts["compiled" if kernel is None else "loaded"] += 1
        return compile_now(source, translated) if kernel is None else kernel

    compiling.build = found
    return counts


# ---------------------------------------------------------------- building
def build_all(folder: Path, processes: int, say: Callable[[str], None]) -> int:
    """Builds every kernel for sm_90 that the structures need and the folder lacks.

    Returns: how many structures failed.
    """
    names = {n: structure.name for n, structure in enumerate(STRUCTURES)}
    return in_processes(_build, names, folder, processes, say)


def in_processes(
    work: Callable[[int, Path], object], names: dict[int, str], folder: Path, processes: int, say: Callable[[str], None]
) -> int:
    """work(n, folder) for every n, told of in lines; returns how many raised an error."""
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {pool.submit(work, n, folder): name for n, name in names.items()}
        for done, job in enumerate(as_completed(jobs)):
            problem = job.exception()
            failures += problem is not None
            said = job.result() if problem is None else f"FAILED: {problem}"
            say(f"[{done + 1}/{len(jobs)}] {jobs[job]}: {said}")
    return failures


def _build(index: int, folder: Path) -> str:
    """Every kernel of one structure, by the road of a call on a GPU, up to the launch."""
    torch.set_num_threads(1)
    cpu, cuts = torch.device("cpu"), set()
    structure = STRUCTURES[index]
    with no_gpu(folder) as log:
        for number, variant in enumerate(structure.variants):
            drawn = make(index + len(STRUCTURES) * number, cpu, is_small=True)
            mask = (None, drawn.mask.mod) if drawn.mask.blocks is None else (drawn.mask.blocks, None)
            aux = AuxRequest(lse=True, max_scores=variant.want_max)
            problem, plan = prepare(
                (drawn.q, drawn.k, drawn.v), drawn.score.mod, mask, scale=drawn.scale, enable_gqa=True, aux=aux, options=ASKED
            )  # fmt: skip
            launch.forward(problem, plan)
            tiles = choose.likely_tiles(problem, plan, "hopper_forward")[0]
            cuts.add(Cut(tiles.BLOCK_M, tiles.BLOCK_N, False))
        for number in range(_NUMBERS_TRIED):
            drawn = make(index + len(STRUCTURES) * number, cpu, is_small=True)
            problem, _ = prepare(
                (drawn.q, drawn.k, drawn.v), None, (drawn.mask.blocks, drawn.mask.mod), enable_gqa=True
            )
            predicate = None if problem.block_mask is None else problem.block_mask.predicate
            if predicate is not None and predicate.traced is not None and drawn.mask.blocks is None:
                build_tables(predicate, tuple(cuts), target_of(90), room=4)
    return ", ".join(f"{count} {what}" for what, count in sorted(log.counts.items()))


@dataclass
class Log:
    """What was built while there was no GPU.

    Attributes:
        counts: kernels 'built' and 'already there'.
        spilled: of each, in order: (kernel, its tiles, registers a thread that were put to memory).
        faults: what compilers failed with.
    """

    counts: Counter[str] = field(default_factory=Counter)
    spilled: list[tuple[str, str, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@contextmanager
def no_gpu(folder: Path) -> Iterator[Log]:
    """Inside, every device is a Hopper, kernels are built for one and kept in the folder, and a launch does nothing."""
    log, before = Log(), (compiling.build, devices.target_for, launch.table_of)

    def build(source: KernelSource, translated: Callable[[], None] | None = None) -> Any:
        try:
            spilled = _binary(source, folder, before[0], log.counts)
        except Exception as error:
            log.faults.append(f"{source.spec.kernel}: {type(error).__name__}: {str(error)[-500:]}")
            raise
        config = source.spec.config
        log.spilled.append((source.spec.kernel, f"{config.BLOCK_M}x{config.BLOCK_N}", spilled))
        return SimpleNamespace(
            n_spills=spilled, function=0, packed_metadata=None, run=lambda *given: None, _init_handles=lambda: None,
            launch_metadata=lambda *given: None,
        )  # fmt: skip

    nothing = torch.zeros(1, 1, 12, dtype=torch.int32)
    compiling.build, devices.target_for = build, lambda device: target_of(90)  # type: ignore[assignment]
    launch.table_of = lambda problem, cut: DeviceTable(nothing, nothing[0, :, :2], 1, 1)
    try:
        yield log
    finally:
        compiling.build, devices.target_for, launch.table_of = before


def _binary(
    source: KernelSource, folder: Path, compile_now: Callable[[KernelSource], Any], counts: Counter[str]
) -> int:
    """Puts a kernel into the folder where it is not there; returns what it spills, once it is known to fit the device."""
    from triton import knobs

    key = key_of(source)
    if (folder / f"{key}.cubin.gz").exists():
        counts["already there"] += 1
    else:
        with knobs.compilation.scope():
            knobs.compilation.disable_line_info = True
            store(folder, key, compile_now(source))
        counts["built"] += 1
    shared = json.loads((folder / f"{key}.json").read_text())["shared"]
    assert shared <= source.spec.target.shared_bytes, f"it takes {shared} bytes of shared memory"
    return _spills(gzip.decompress((folder / f"{key}.cubin.gz").read_bytes()))


def _spills(binary: bytes) -> int:
    """Registers a thread that the assembler has put to memory, as the driver would say it."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", said.stdout + said.stderr)
    assert stack, f"cuobjdump did not say what the kernel uses: {said.stdout}"
    return int(stack[1]) // 4
