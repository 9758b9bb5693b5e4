"""These tests run kernels in Triton's interpreter, which is chosen by TRITON_INTERPRET=1 before triton is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder where the process was not started for the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if HERE in Path(str(item.fspath)).parents:
                item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1 (make test-interpret)"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "leaves"))
