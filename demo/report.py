"""What the demo shows in a terminal: headings, a progress bar, a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType


def heading(text: str) -> None:
    """A numbered step of the demo."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


class Progress:
    """A bar that redraws itself on a terminal, and elsewhere (a log) prints a line every few seconds."""

    WIDTH = 30
    LOG_EVERY = 5.0

    def __init__(self, label: str, total: float) -> None:
        self.label, self.total = label, total
        self.live = sys.stdout.isatty()
        self.last = float("-inf")
        self.note = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.last = float("-inf")
            self.show(self.total, self.note)
        if self.live:
            print()

    def show(self, done: float, note: str = "") -> None:
        """done: of `total`, in its unit; drawn at most ten times a second."""
        self.note, now = note, time.perf_counter()
        if now - self.last < (0.1 if self.live else self.LOG_EVERY):
            return
        self.last = now
        share = min(1.0, done / self.total)
        filled = round(self.WIDTH * share)
        line = f"{self.label} [{'#' * filled}{'.' * (self.WIDTH - filled)}] {100 * share:3.0f} %  {note}"
        print("\r\x1b[K" + line if self.live else line, end="" if self.live else "\n", flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, the first to the left and the others to the right."""
    width = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width)))
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
