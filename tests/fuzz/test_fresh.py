"""Random functions become kernels: each compiles for Hopper, and is refused for too many registers at most."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

from tests.frontend.mask_fuzz import Sizes
from tests.fuzz.fresh import check_fresh, functions_of

COUNT = int(os.environ.get("FLEXATTN_FRESH", "6"))
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter's functions do not compile"
)


def test_functions_are_many_and_their_own() -> None:
    sizes = Sizes(2, 4, 150, 130)
    texts = [functions_of(seed, sizes).text for seed in range(200)]
    assert len(set(texts)) > 190
    assert texts[7] == functions_of(7, sizes).text
    every = "".join(texts)
    names = [
        "tanh",
        "log1p",
        "rsqrt",
        "erf",
        "exp2",
        "pow",
        "floor",
        "where",
        "isnan",
        ">>",
        "//",
        "%",
        "float16",
        "[q_idx]",
    ]
    assert [n for n in names if n not in every] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_fresh_structures_compile(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLEXATTN_FRESH says how many; `python -m tests.fuzz --fresh N` takes any number, in several processes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(tmp_path / "leaves"))
    assert check_fresh(seed, tmp_path).startswith(f"seed {seed}: ")
    assert list(tmp_path.glob("*.cubin.gz"))
