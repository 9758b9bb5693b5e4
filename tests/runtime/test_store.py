"""Kernels on disk: found again by their content, never half there, built by one process at a time, bounded, shipped."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import flexattn
from flexattn import FlexPerformanceWarning
from flexattn.__main__ import main
from flexattn.codegen.emit import KernelSource, emit
from flexattn.errors import FlexError
from flexattn.runtime import compile as compiling
from flexattn.runtime import settings, store
from tests.codegen.compiled import spec_of

pytest.importorskip("triton")
SPEC = spec_of("forward", arch=90, dim=16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "cache"))
    settings.forget_warnings()
    return tmp_path / "cache" / "kernels"


def start(source: KernelSource) -> Any:
    return compiling.ast_source(source)


class Made(SimpleNamespace):
    """Stands in for a compiled kernel of `size` bytes."""

    def __init__(self, path: Path, size: int = 100) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / "k.json").write_text(json.dumps({"name": "k"}))
        super().__init__(asm={"cubin": os.urandom(size)}, metadata_group={"k.json": str(path / "k.json")})


def sources(count: int) -> list[KernelSource]:
    return [replace(emit(SPEC), options={"number": n}) for n in range(count)]


def kept(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_kernel_is_found_again_as_it_was_compiled(folder: Path) -> None:
    source = emit(SPEC)
    compiled, was_found = compiling.found_or_built(source)
    assert not was_found and len(kept(folder)) == 1
    again, was_found = compiling.found_or_built(source)
    assert was_found and again.kernel == compiled.kernel and again.packed_metadata == compiled.packed_metadata
    assert again.metadata.shared == compiled.metadata.shared and again.name == compiled.name
    about = json.loads(next(folder.glob("*/facts.json")).read_text())["about"]
    assert about["kernel"] == "forward" and "q_idx" in about["mask"]


def test_whatever_it_is_made_of_gives_it_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    source = emit(SPEC)
    others = [
        emit(spec_of("forward", arch=80, dim=16)), emit(spec_of("forward", arch=90, dim=16, leaf="softcap")),
        emit(spec_of("forward", arch=90, dim=16, dtype="fp16")), replace(source, options={**source.options, "num_warps": 8}),
        replace(source, constexprs={**source.constexprs, "WANT_MAX": True}), replace(source, aligned=()),
    ]  # fmt: skip
    names = {store.path_of(store.facts_of(s)) for s in (source, *others)}
    assert len(names) == 1 + len(others)
    for name, value in (("skeletons", "changed"), ("compiler_version", "3.99.0")):
        with monkeypatch.context() as patch:
            patch.setattr(store, name, lambda value=value: value)
            assert store.path_of(store.facts_of(source)) not in names


@pytest.mark.parametrize("name", ["kernel.cubin", "kernel.json", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "changed"])
def test_a_damaged_kernel_is_not_used(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    (source,) = sources(1)
    store.keep(source, Made(tmp_path / "made"))
    file = next(folder.glob(f"*/{name}"))
    if damage == "gone":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else data.replace(data[:1], b"?"))
    if name == "facts.json" and damage == "gone":
        assert store.find(source, lambda: None) is None  # as if it had never been there
        return
    with pytest.warns(FlexPerformanceWarning, match="is not used and will be built again"):
        found = store.find(source, lambda: None) if damage != "gone" else _found_or_said(source, file)
    assert found is None and not kept(folder)


def _found_or_said(source: KernelSource, file: Path) -> Any:
    file.mkdir()  # what cannot be read as a file, whoever asks
    return store.find(source, lambda: None)


def test_a_folder_nobody_may_write_to_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(compiling, "build", lambda source, translated=None: Made(tmp_path / "made"))
    with pytest.warns(FlexPerformanceWarning, match="kept in memory only") as said:
        found = [compiling.found_or_built(source)[1] for source in sources(2)]
    assert found == [False, False]
    assert len(said) == 1


def test_one_builds_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def build(source: KernelSource, translated: Any = None) -> Any:
        built.append(threading.current_thread().name)
        time.sleep(0.3)
        return Made(tmp_path / f"made {len(built)}")

    monkeypatch.setattr(compiling, "build", build)
    monkeypatch.setattr("triton.compiler.CompiledKernel", lambda src, group, name: sorted(group))
    (source,), found = sources(1), []
    threads = [threading.Thread(target=lambda: found.append(compiling.found_or_built(source)[1])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(built) == 1 and sorted(found) == [False] + [True] * 5


def test_a_lock_ends_with_its_process(folder: Path, tmp_path: Path) -> None:
    """Killed in the middle of a build: nothing half made is seen, and the next one builds."""
    (source,) = sources(1)
    lock = folder / f".{store.path_of(store.facts_of(source)).name}.lock"
    folder.mkdir(parents=True)
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline().strip() == b"held"
    entered = threading.Event()

    def enter() -> None:
        with store.alone(source):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.3)
    holder.send_signal(signal.SIGKILL)
    assert entered.wait(20)
    thread.join(20)
    holder.wait(20)
    assert not lock.exists() and store.find(source, lambda: None) is None


def test_the_least_recently_used_go_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = sources(3)
    paths = [store.path_of(store.facts_of(s)) for s in three]
    for n, (source, path) in enumerate(zip(three, paths)):
        store.keep(source, Made(tmp_path / "made", 40_000))
        os.utime(path, (1000.0 + n, 1000.0 + n))
    monkeypatch.setattr("triton.compiler.CompiledKernel", lambda src, group, name: sorted(group))
    assert store.find(three[0], lambda: None) == ["kernel.cubin", "kernel.json"]  # used now
    left = store.bound_size(100_000)
    assert kept(folder) == {paths[0].name, paths[2].name} and 80_000 < left <= 100_000
    monkeypatch.setenv("FLEXATTN_CACHE_MIB", "0")
    assert store.bound_size() == 0 and not kept(folder)
    monkeypatch.setenv("FLEXATTN_CACHE_MIB", "many")
    with pytest.raises(FlexError, match="no whole number of MiB"):
        store.bound_size()


def test_what_a_killed_process_left_is_removed_later(folder: Path) -> None:
    old, new = folder / ".new-old", folder / ".new-new"
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "kernel.cubin").write_bytes(b"half")
    os.utime(old, (1000.0, 1000.0))
    store.bound_size()
    assert kept(folder) == {".new-new"}


def test_an_archive_fills_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = emit(SPEC)
    compiled, _ = compiling.found_or_built(source)
    tuned = folder.parent / "tuned" / "a.json"
    settings.write_whole(tuned, "{}\n")
    archive = tmp_path / "kernels.tar.gz"
    assert main(["export-cache", str(archive)]) == 0
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert store.find(source, lambda: start(source)) is None
    for _ in range(2):  # once more changes nothing
        assert main(["warm", str(archive)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.startswith("1 kernels and 1 tuned tiles of") for line in said] == [True] * 3
    assert store.find(source, lambda: start(source)).kernel == compiled.kernel
    assert (tmp_path / "elsewhere" / "tuned" / "a.json").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["../outside", "/outside", "kernels/../../outside/x", "kernels/a", "other/a.json", ""])
def test_an_archive_of_something_else_changes_nothing(folder: Path, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "bad.tar.gz"
    if name:
        with tarfile.open(archive, "w:gz") as tar:
            for member in ("kernels/abc/facts.json", name):
                info = tarfile.TarInfo(member)
                info.size = 2
                tar.addfile(info, io.BytesIO(b"{}"))
    else:
        archive.write_text("no archive")
    with pytest.raises(FlexError, match="holds no kernels of flexattn"):
        store.unpack(archive)
    assert not folder.exists() and main(["warm", str(archive)]) == 1


@pytest.mark.gpu
def test_another_process_builds_nothing(tmp_path: Path) -> None:
    code = """if True:
        import torch, flexattn
        q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        out = flexattn.flex_attention(q, k, v, mask_mod=flexattn.mods.causal())
        out.sum().backward()
        seen = flexattn.stats()
        print(seen.builds.total(), seen.disk_hits.total())"""
    variables = {
        **os.environ,
        "FLEXATTN_CACHE_DIR": str(tmp_path / "shared"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    run = lambda: subprocess.run(
        [sys.executable, "-c", code], env=variables, check=True, capture_output=True, text=True
    )
    counts = [[int(n) for n in run().stdout.split()] for _ in range(2)]
    assert counts[0][0] >= 2 and counts[0][1] == 0
    assert counts[1] == [0, counts[0][0]]


def test_counters_say_which(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_loaded", lambda compiled: compiled)
    monkeypatch.setattr(compiling, "build", lambda source, translated=None: _runnable(Made(tmp_path / "made")))
    monkeypatch.setattr("triton.compiler.CompiledKernel", lambda src, group, name: _runnable(SimpleNamespace()))
    flexattn.reset_stats()
    import torch

    for _ in range(2):
        for memory in ("_KERNELS", "_FAILED", "_AHEAD"):
            monkeypatch.setattr(compiling, memory, {})
        compiling.kernel_for(SPEC, torch.device("cpu"))
    seen = flexattn.stats()
    assert seen.builds["forward"] == 1 and seen.disk_hits["forward"] == 1
    assert [e.split(":")[0] for e in seen.events] == ["build forward", "from disk forward"]


def _runnable(compiled: Any) -> Any:
    compiled.run = None
    return compiled
