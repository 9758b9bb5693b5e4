"""The README's Python blocks run, in order and in one namespace, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_readme_examples_run() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    assert len(found) >= 3
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in found:
        line = text.count("\n", 0, block.start()) + 1
        source = "\n" * line + block.group(1)  # so that a traceback names the README's own line
        exec(compile(source, "README.md", "exec"), namespace)


def test_files_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:flexattn|demo|notebooks|tests|benchmarks)/[\w./]+)`", text))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
