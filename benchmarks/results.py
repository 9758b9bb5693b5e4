"""Rows of measurements on disk: one JSON object a line, merged by key, written after every row.

The idea: a run may be cut off at any moment and pieces come from different processes, so a file is always whole, and a newer
row takes the place of an older one with the same key.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
KEY = ("device", "what", "shape", "variant", "impl")
OURS = "flexattn"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# What became of a row: measured; the peer cannot be imported; it has no way to say this variant; it raised; its result was
# wrong; or it was not tried because it would take too much memory or time.
STATUSES = ("ok", "absent", "unsupported", "failed", "wrong", "skipped")


def key_of(row: Row) -> tuple[str, ...]:
    """What identifies a measurement; a sweep has one row a configuration."""
    return (*(str(row[name]) for name in KEY), str(row.get("config", "")))


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows by key, the newer one wins; but a peer that is merely absent this time does not erase what was measured."""
    rows = {key_of(row): row for row in old}
    for row in new:
        known = rows.get(key_of(row))
        if known is None or row["status"] != "absent" or known["status"] == "absent":
            rows[key_of(row)] = row
    return sorted(rows.values(), key=key_of)


def load(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file.

    Raises:
        ValueError: The file is not one of results.
    """
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if missing := [name for name in (*KEY, "status") if name not in row]:
            raise ValueError(f"{path}: a row lacks {', '.join(missing)}: {row}")
    return list(rows)


def save(path: Path, rows: Iterable[Row]) -> None:
    """Writes all rows, one a line, so that a cut never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text('{"rows": [\n' + lines + "\n]}\n", encoding="utf-8")
    temporary.replace(path)


class Recorder:
    """Takes rows as they come: prints each, merges it into a file, and remembers whether one of ours went wrong."""

    def __init__(self, path: Path | None, environment: Row) -> None:
        self.path, self.environment = path, environment
        self.rows = load(path) if path is not None else []
        self.added: list[Row] = []

    def add(self, row: Row, *, quiet: bool = False) -> None:
        row = {**row, **self.environment}
        self.added.append(row)
        if not quiet:
            print(line(row), flush=True)
        self.rows = merge(self.rows, [row])
        if self.path is not None:
            save(self.path, self.rows)

    @property
    def bad(self) -> list[Row]:
        """Rows of flexattn itself that have no figure."""
        return [r for r in self.added if r["impl"].startswith(OURS) and r["status"] not in ("ok", "skipped")]


def line(row: Row) -> str:
    """One row for the terminal."""
    head = f"{row['what']:<14} {row['shape']:<18} {row['variant']:<11} {row['impl']:<20}"
    if row["status"] != "ok":
        return f"{head} {row['status']}: {row['reason']}"
    parts = [f"{row['ms']:.4g} ms"] if "ms" in row else []
    if "tflops" in row:
        parts.append(f"{row['tflops']:.4g} TFLOP/s" if row["tflops"] >= 1 else f"{1e3 * row['tflops']:.4g} GFLOP/s")
    parts += [f"{row[name]:.4g} {unit}" for name, unit in _UNITS if name in row]
    if "speedup" in row and row["impl"] != OURS:
        parts.append(f"flexattn is {row['speedup']:.3f}x as fast")
    if "error" in row:
        parts.append("error " + " ".join(f"{name} {error:.1e}" for name, error in row["error"].items()))
    return f"{head} {', '.join(parts)}"


_UNITS = (("tbs", "TB/s"), ("mib", "MiB"))


def environment(device: torch.device, commit: str | None = None) -> Row:
    """What every row says about where and when it was measured."""
    row: Row = {"device": device_name(device), "torch": torch.__version__, "python": platform.python_version()}
    row["triton"] = package_version("triton")
    row["commit"] = commit or os.environ.get("FLEXATTN_COMMIT") or _commit()
    row["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return row


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"


def package_version(name: str) -> str:
    """Of a distribution, or 'none'; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _commit() -> str:
    """The short hash, with a plus where the working tree differs; 'unknown' outside a git checkout."""
    git = ["git", "-C", str(ROOT)]
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    if found.returncode:
        return "unknown"
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "flexattn"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")
