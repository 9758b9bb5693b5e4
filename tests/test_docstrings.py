"""Every example in a docstring is true, and every public name has one that a newcomer can run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch

import flexattn
from flexattn import create_block_mask, mods
from flexattn.codegen.target import target_of
from flexattn.codegen.tile_config import TileConfig
from flexattn.frontend.trace import trace

MODULES = sorted(m.name for m in pkgutil.walk_packages(flexattn.__path__, "flexattn.") if "skeletons" not in m.name)
NAMES: dict[str, Any] = {  # what an example may use beside its own module
    "torch": torch, "flexattn": flexattn, "create_block_mask": create_block_mask, "mods": mods, "trace": trace,
    "target_of": target_of, "TileConfig": TileConfig,
}  # fmt: skip
SHOWN_ELSEWHERE = {"or_masks", "noop_mask"}  # by and_masks
OBJECTS = [getattr(flexattn, n) for n in flexattn.__all__ if n not in SHOWN_ELSEWHERE]
MODS = [x for n, x in vars(mods).items() if inspect.isfunction(x) and x.__module__ == mods.__name__ and n[0] != "_"]
PUBLIC = [x for x in OBJECTS if inspect.isclass(x) or inspect.isfunction(x)] + MODS


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=NAMES, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0


@pytest.mark.parametrize("public", PUBLIC, ids=lambda x: x.__name__)
def test_public_names_have_an_example(public: Any) -> None:
    text = inspect.getdoc(public) or ""
    assert "Example:" in text
    parameters = inspect.signature(public).parameters if inspect.isfunction(public) else {}
    if any(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()):
        assert "Args:" in text
