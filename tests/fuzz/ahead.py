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
from tests.fuzz.problems import Problem, make
from tests.fuzz.structures import STRUCTURES

FOLDER = Path("build") / "fuzz_kernels"
ASKED = {"warp_specialized": True}
_ROUNDS = 60  # of seeds in which every wish of a variant comes
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
    """Of the text of a skeleton, of those it imports from, and of what skeletons share."""
    from flexattn.codegen import skeletons

    folder = Path(skeletons.__path__[0])
    text = (folder / f"{module}.py").read_text()
    shared = [
        "softmax",
        "tiles",
        "leaf_ops",
        module,
        *re.findall(r"^from flexattn\.codegen\.skeletons\.(\w+) import", text, re.M),
    ]
    return hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in shared)).hexdigest()


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
    otherwise = compiling.found_or_built

    def found(source: KernelSource, translated: Callable[[], None] | None = None) -> tuple[Any, bool]:
        kernel = load(folder, source)
        counts["compiled" if kernel is None else "loaded"] += 1
        return otherwise(source, translated) if kernel is None else (kernel, True)

    compiling.found_or_built = found
    return counts


# ---------------------------------------------------------------- building
def build_all(folder: Path, processes: int, say: Callable[[str], None], *, is_backward: bool = False) -> int:
    """Builds every kernel for sm_90 that the structures, with gradients or without, need and the folder lacks.

    Returns: how many structures failed.
    """
    names = {n: structure.name for n, structure in enumerate(STRUCTURES)}
    return in_processes(functools.partial(build_structure, is_backward=is_backward), names, folder, processes, say)


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


def build_structure(index: int, folder: Path, *, is_backward: bool = False) -> str:
    """Every kernel of one structure, by the road of a call on a GPU, up to the launch; returns what was built, for people."""
    torch.set_num_threads(1)
    with no_gpu(folder) as log:
        for seed in _different(index, is_backward):
            run_without_gpu(make(seed, torch.device("cpu"), is_small=True, is_backward=is_backward))
        for number in range(_NUMBERS_TRIED):
            drawn = make(index + len(STRUCTURES) * number, torch.device("cpu"), is_small=True)
            problem, plan = _prepared(drawn)
            predicate = None if problem.block_mask is None else problem.block_mask.predicate
            if predicate is not None and predicate.traced is not None and drawn.mask.blocks is None:
                tiles = choose.likely_tiles(problem, plan, "hopper_forward")[0]  # of any: a kernel is told of them
                build_tables(predicate, (Cut(tiles.BLOCK_M, tiles.BLOCK_N, False),), target_of(90), room=4)
    return ", ".join(f"{count} {what}" for what, count in sorted(log.counts.items()))


def _different(index: int, is_backward: bool) -> list[int]:
    """Seeds of a structure with every variant, and with every wish of each variant with and without a gradient of lse."""
    seeds: dict[Any, int] = {}
    for number in range(_ROUNDS * len(STRUCTURES[index].variants) if is_backward else len(STRUCTURES[index].variants)):
        seed = index + len(STRUCTURES) * number
        drawn = make(seed, torch.device("cpu"), is_small=True, is_empty=True, is_backward=is_backward)
        has_d_lse = drawn.upstream is not None and drawn.upstream.d_lse is not None
        seeds.setdefault((drawn.variant, drawn.wish, has_d_lse), seed)
    return sorted(seeds.values())


def run_without_gpu(drawn: Problem) -> None:
    """What a call of a problem does, inside `no_gpu`."""
    with drawn.manner():
        problem, plan = _prepared(drawn)
        if drawn.upstream is not None:
            launch.make_tile_maps(problem, plan)
        out, lse, _ = launch.forward(problem, plan)
        if drawn.upstream is not None:
            needs = (
                *(x.requires_grad for x in (problem.q, problem.k, problem.v)),
                tuple(c.requires_grad for c in problem.captures),
            )
            launch.backward(problem, plan, out, lse, *drawn.upstream, needs)


def _prepared(drawn: Problem) -> tuple[Any, Any]:
    mask = (None, drawn.mask.mod) if drawn.mask.blocks is None else (drawn.mask.blocks, None)
    aux = AuxRequest(lse=True, max_scores=drawn.variant.want_max)
    tensors = (drawn.q, drawn.k, drawn.v)
    return prepare(tensors, drawn.score.mod, mask, scale=drawn.scale, enable_gqa=True, aux=aux, options=ASKED)


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
    log, before = Log(), (compiling.found_or_built, devices.target_for, launch.table_of, launch.prepare_tables)

    def build(source: KernelSource, translated: Callable[[], None] | None = None) -> tuple[Any, bool]:
        try:
            spilled = _binary(source, folder, compiling.build, log.counts)
        except Exception as error:
            log.faults.append(f"{source.spec.kernel}: {type(error).__name__}: {str(error)[-500:]}")
            raise
        config = source.spec.config
        log.spilled.append((source.spec.kernel, f"{config.BLOCK_M}x{config.BLOCK_N}", spilled))
        kernel = SimpleNamespace(
            n_spills=spilled, function=0, packed_metadata=None, run=lambda *given: None, _init_handles=lambda: None,
            launch_metadata=lambda *given: None,
        )  # fmt: skip
        return kernel, False

    nothing = torch.zeros(1, 1, 12, dtype=torch.int32)
    compiling.found_or_built, devices.target_for = build, lambda device: target_of(90)  # type: ignore[assignment]
    launch.table_of = lambda problem, cut: DeviceTable(nothing, nothing[0, :, :2], 1, 1)
    launch.prepare_tables = lambda problem, mask, cuts: None
    try:
        yield log
    finally:
        compiling.found_or_built, devices.target_for, launch.table_of, launch.prepare_tables = before


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
