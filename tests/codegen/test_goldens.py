"""The generated text of a few well-known mods, kept as files that people can read and tests can import."""

from __future__ import annotations

import os

import pytest

from flexattn.codegen.leaves import leaf_functions
from tests.goldens_of import FOLDER, GOLDENS, golden_path
from tests.leaf_kernel import spec_of, text_of

UPDATE = os.environ.get("FLEXATTN_UPDATE_GOLDENS") == "1"


@pytest.mark.parametrize("name", GOLDENS)
def test_generated_text_is_the_golden_one(name):
    """FLEXATTN_UPDATE_GOLDENS=1 rewrites a stale file and still fails, so that nobody updates one by accident."""
    text, path = text_of(spec_of(GOLDENS[name](), interpreted=True)), golden_path(name)
    kept = path.read_text() if path.exists() else None
    if kept != text and UPDATE:
        path.write_text(text)
    assert kept == text, f"{path.name} is stale" + (
        "; rewritten, look at the difference and commit it" if UPDATE else ""
    )


def test_no_golden_is_left_over():
    assert {p.stem for p in FOLDER.glob("*.py")} == set(GOLDENS)


def test_goldens_hold_nothing_of_the_user():
    """Renaming everything and changing every value leaves the text as it is."""
    first = leaf_functions(spec_of(GOLDENS["soft_cap"](), interpreted=True))["SCORE_MOD"]
    assert "cap0" not in first and "20" not in first and "caps[0]" in first
