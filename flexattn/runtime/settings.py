"""Process-wide switches: debug mode, autotuning, the cache folder, and warnings that are shown once.

Reads the environment (`FLEXATTN_DEBUG`, `FLEXATTN_AUTOTUNE`, `FLEXATTN_CACHE_DIR`, `FLEXATTN_CACHE_MIB`) when asked, not at
import, so that a test or a notebook may change it. Nothing here changes a result; it changes what is checked or timed, where
files go and what is said.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from flexattn.errors import OptionError
from flexattn.frontend.contents import debugging

_LOCAL = threading.local()
_FALSE = frozenset({"", "0", "false", "no", "off"})
_WARNED: set[str] = set()
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_TORCHS = os.path.join(os.path.dirname(torch.__file__), "")


class FlexPerformanceWarning(UserWarning):
    """A call takes a road that is right but slower than the one a user would expect, and why; shown once a reason.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", FlexPerformanceWarning)  # never slow: such a call now raises
    """


def debug() -> bool:
    """True when `FLEXATTN_DEBUG` is set: reads out of range in kernels and unseen writes to what a BlockMask captured become
    errors, and new plans go to stderr."""
    return debugging()


def autotune() -> bool:
    """True when `FLEXATTN_AUTOTUNE` is set: calls whose kernel_options say nothing else time their tiles once."""
    return os.environ.get("FLEXATTN_AUTOTUNE", "").strip().lower() not in _FALSE


def is_deterministic() -> bool:
    """Whether what is made now must not depend on when the device gets to it: by torch's switch, or within `deterministic()`."""
    return getattr(_LOCAL, "deterministic", False) or torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """A call that asks for it by its kernel_options, on this thread."""
    before, _LOCAL.deterministic = getattr(_LOCAL, "deterministic", False), True
    try:
        yield
    finally:
        _LOCAL.deterministic = before


def interpreting() -> bool:
    """True when Triton kernels run in its interpreter (`TRITON_INTERPRET=1`), the way tests run them without a GPU."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() not in _FALSE


def cache_dir() -> Path:
    """The folder generated kernels and tuned tiles go to: `FLEXATTN_CACHE_DIR`, else `$XDG_CACHE_HOME/flexattn`.

    Returns: a path which need not exist yet.
    """
    if chosen := os.environ.get("FLEXATTN_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(base).expanduser() / "flexattn"


def cache_bytes() -> int:
    """How much the kernels in `cache_dir()` may take: `FLEXATTN_CACHE_MIB` MiB, 1,024 unless set.

    Raises:
        OptionError: it is no number of at least 0.
    """
    text = os.environ.get("FLEXATTN_CACHE_MIB", "").strip() or "1024"
    if not text.isdecimal():
        raise OptionError("FLEXATTN_CACHE_MIB is no whole number of MiB", given=text, hint="FLEXATTN_CACHE_MIB=1024")
    return int(text) << 20


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file by a rename, so that readers see the old one or the new one, never half of it; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def warn_once(key: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Shows `message` the first time `key` is seen in this process, at the line that called this package."""
    if key in _WARNED:
        return
    _WARNED.add(key)
    warnings.warn(message, category, stacklevel=_users_level())


def _users_level() -> int:
    """The stacklevel, for a warning of the caller, of the first frame outside this package and, below it, of torch."""
    files: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    entry = max((n for n, file in enumerate(files) if file.startswith(_OURS)), default=0)
    return 1 + next((n for n in range(entry + 1, len(files)) if not files[n].startswith(_TORCHS)), entry)


def forget_warnings() -> None:
    """Lets every once-only warning be shown again (for tests)."""
    _WARNED.clear()
