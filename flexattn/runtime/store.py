"""Compiled kernels and tuned tiles on disk: finds a kernel by its content, keeps one, packs the folder up and unpacks it.

The idea: a kernel's name is a digest of all that it is made of: generated functions, skeletons, types, constants, options, target
and compiler. So nothing can be stale, and a folder that was filled elsewhere may be copied here. A kernel is a folder that appears by
one rename; who needs one that is being built waits for its builder, whose lock ends with its process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from flexattn import codegen
from flexattn.codegen.emit import KernelSource
from flexattn.errors import FlexError
from flexattn.runtime import settings

FORMAT = 1
_FOLDER, _TUNED, _FACTS, _METADATA = "kernels", "tuned", "facts.json", "kernel.json"
_BINARIES = ("cubin", "hsaco")  # what compilers make: of NVIDIA's and AMD's
_ABANDONED = 3600.0  # seconds after which a folder that never got its name is removed


# ---------------------------------------------------------------- names
@functools.lru_cache(maxsize=1)
def skeletons() -> str:
    """Names the text of all kernels' skeletons."""
    files = sorted((Path(codegen.__file__).parent / "skeletons").glob("*.py"))
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()[:20]


def compiler_version() -> str:
    """Triton's version, and what of the environment changes its code."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars

    variables = sorted((n, v) for n, v in get_cache_invalidating_env_vars().items() if v not in (None, "", "0"))
    assembler = os.environ.get("TRITON_PTXAS_PATH", "")
    return " ".join([str(triton.__version__), *(f"{n}={v}" for n, v in variables), assembler]).strip()


def facts_of(source: KernelSource) -> dict[str, Any]:
    """All that a kernel is made of, as JSON says it."""
    return {
        "format": FORMAT,
        "compiler": compiler_version(),
        "target": list(source.spec.target.triton_target),
        "skeletons": skeletons(),
        "skeleton": f"{source.module}.{source.function}",
        "leaves": source.leaves,
        "leaf text": source.leaf_text,
        "types": repr(sorted(source.signature.items())),
        "constants": repr(sorted(source.constexprs.items())),
        "aligned": repr(source.aligned),
        "options": repr(sorted(source.options.items())),
    }


def path_of(facts: dict[str, Any]) -> Path:
    """The folder of a kernel."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return settings.cache_dir() / _FOLDER / digest


# ---------------------------------------------------------------- one kernel
def find(source: KernelSource, start: Callable[[], Any]) -> Any:
    """A kernel that was kept, as Triton's CompiledKernel, or None. A folder that is not what it says is removed, and that is said.

    Args:
        source: the kernel.
        start: makes what Triton's compiler would start from; its launcher reads types there.
    """
    facts = facts_of(source)
    folder = path_of(facts)
    try:
        stored = json.loads((folder / _FACTS).read_text())
        files = {name: folder / name for name in stored["files"]}
        sums = {name: _sum(path.read_bytes()) for name, path in files.items()}
        if stored["facts"] != facts or sums != stored["files"]:
            raise ValueError("its content is not what was kept")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        _say(f"read {folder}", f"the stored kernel {folder} is not used and will be built again", error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    from triton.compiler import CompiledKernel

    with contextlib.suppress(OSError):
        os.utime(folder)  # the least recently used ones are the first to go
    return CompiledKernel(start(), {name: str(path) for name, path in files.items()}, folder.name)


def keep(source: KernelSource, compiled: Any) -> None:
    """Stores a compiled kernel; a folder that cannot be written is announced once, and nothing else changes."""
    facts = facts_of(source)
    folder = path_of(facts)
    ending = next(n for n in _BINARIES if n in compiled.asm)
    metadata = next(Path(p) for n, p in compiled.metadata_group.items() if n.endswith(".json")).read_bytes()
    files = {_METADATA: metadata, f"kernel.{ending}": compiled.asm[ending]}
    about = {"kernel": source.spec.kernel, "score": str(source.spec.score), "mask": str(source.spec.mask)}
    sums = {name: _sum(data) for name, data in files.items()}
    files[_FACTS] = json.dumps({"about": about, "files": sums, "facts": facts}, indent=1).encode()
    try:
        _place(folder, files)
        bound_size()
    except OSError as error:
        _say(f"write {folder.parent}", f"kernels are kept in memory only, {folder} cannot be written", error)


def _place(folder: Path, files: dict[str, bytes]) -> None:
    """Writes a folder that others see whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        for name, data in files.items():
            (made / name).write_bytes(data)
        made.chmod(0o755)
        if not folder.exists():
            with contextlib.suppress(FileExistsError):  # another process was quicker
                made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def alone(source: KernelSource) -> Iterator[None]:
    """Within it no other process or thread builds this kernel. The lock ends with its process; where there are none, nobody waits."""
    path = path_of(facts_of(source))
    lock = path.parent / f".{path.name}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _locked(lock)
    except OSError:  # a file system without locks, or that nobody may write to: two may build the same kernel
        yield
        return
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _locked(path: Path) -> int:
    """A handle whose lock is that of the file now at this path: the holder before removes its own."""
    import fcntl

    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if path.exists() and os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _say(key: str, what: str, error: Exception) -> None:
    text = f"flexattn: {what} ({type(error).__name__}: {error}); FLEXATTN_CACHE_DIR names another folder"
    settings.warn_once(key, text, settings.FlexPerformanceWarning)


# ---------------------------------------------------------------- the folder
def bound_size(most: int | None = None) -> int:
    """Removes the least recently used kernels until the rest takes at most `most` bytes (`FLEXATTN_CACHE_MIB`, 1,024 MiB unless
    set), and what a process that was killed left behind.

    Returns: bytes that stay.
    """
    most = settings.cache_bytes() if most is None else most
    root, found, now = settings.cache_dir() / _FOLDER, [], time.time()
    for folder in root.iterdir() if root.is_dir() else ():
        with contextlib.suppress(OSError):
            used = folder.stat().st_mtime
            if not folder.name.startswith("."):
                found.append((used, sum(f.stat().st_size for f in folder.iterdir()), folder))
            elif folder.is_dir() and now - used > _ABANDONED:
                shutil.rmtree(folder, ignore_errors=True)
    total = sum(size for _, size, _ in found)
    for _, size, folder in sorted(found):
        if total <= most:
            break
        shutil.rmtree(folder, ignore_errors=True)
        total -= size
    return total


def pack(file: Path) -> tuple[int, int]:
    """Writes all kept kernels and tuned tiles to one archive (.tar.gz), for `unpack` elsewhere: on the same kind of GPU under the
    same version of Triton they are found as if they had been built there.

    Returns: how many kernels, and how many tuned tiles.
    """
    root = settings.cache_dir()
    kernels = sorted(p.parent for p in (root / _FOLDER).glob(f"*/{_FACTS}") if not p.parent.name.startswith("."))
    tuned = sorted((root / _TUNED).glob("*.json"))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for path in [*(f for folder in kernels for f in sorted(folder.iterdir())), *tuned]:
            archive.add(path, path.relative_to(root).as_posix(), recursive=False)
    settings.write_whole(file, data.getvalue())
    return len(kernels), len(tuned)


def unpack(file: Path) -> tuple[int, int]:
    """Puts an archive's kernels and tuned tiles into the cache folder, those that are not there; each is checked when it is used.

    Returns: how many kernels, and how many tuned tiles it holds.

    Raises:
        FlexError: it is no such archive; nothing is changed.
    """
    folders: dict[str, dict[str, bytes]] = {}
    tuned: dict[str, bytes] = {}
    try:
        with tarfile.open(file, "r:gz") as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or ".." in parts or member.name.startswith("/"):
                    raise ValueError(f"{member.name} does not belong there")
                if len(parts) == 3 and parts[0] == _FOLDER and not parts[1].startswith("."):
                    folders.setdefault(parts[1], {})[parts[2]] = content.read()
                elif len(parts) == 2 and parts[0] == _TUNED and parts[1].endswith(".json"):
                    tuned[parts[1]] = content.read()
                else:
                    raise ValueError(f"{member.name} does not belong there")
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise FlexError(
            f"{file} holds no kernels of flexattn", given=f"{type(error).__name__}: {error}",
            hint="a file that `flexattn export-cache` wrote",
        ) from error  # fmt: skip
    root = settings.cache_dir()
    for name, files in folders.items():
        _place(root / _FOLDER / name, files)
    for name, text in tuned.items():
        if not (root / _TUNED / name).exists():
            settings.write_whole(root / _TUNED / name, text)
    return len(folders), len(tuned)


__all__ = ["alone", "bound_size", "compiler_version", "find", "keep", "pack", "skeletons", "unpack"]
