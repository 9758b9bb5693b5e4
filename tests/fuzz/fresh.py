"""Structures that nobody has seen: random functions over the op table, compiled for Hopper without a GPU.

Reads a seed; makes a score and a mask function, and builds what a call with them would run: the kernel for Hopper, or, where its
registers do not suffice in any of its tiles, the portable one. The one idea: a fall-back hides a fault of code generation, so what a
build failed with is kept, and too many registers are the only thing that it may have failed with.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import flexattn
from flexattn.codegen.target import target_of
from flexattn.runtime import compile as compiling
from flexattn.runtime import launch
from flexattn.runtime.attention import AuxRequest, prepare
from flexattn.runtime.table_builder import Cut, build_tables
from tests.frontend.mask_fuzz import Sizes, Writer, predicate
from tests.fuzz.ahead import no_gpu

_DIMS = [(64, 64), (64, 64), (128, 128), (128, 128), (192, 128), (96, 96), (256, 256), (80, 64)]


class Functions(NamedTuple):
    """The mods of one call, None where it has none, and their text for people."""

    score: Callable[..., Any] | None
    mask: Callable[..., Any] | None
    text: str


class Fresh(NamedTuple):
    """What was built for a seed.

    Attributes:
        kernel: the forward kernel that a call would run.
        refused: why configurations of the kernel for Hopper were not taken.
        faults: errors of the compiler; there must be none.
    """

    seed: int
    kernel: str
    refused: tuple[str, ...]
    faults: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        said = "; ".join((*self.faults, *self.refused))
        return f"seed {self.seed}: {self.kernel}{f' ({said})' if said else ''}"


class ScoreWriter(Writer):
    """Writes a score function: as masks are written, and with the functions that only scores have."""

    def scored(self, depth: int) -> str:
        """An expression of the score."""
        if depth <= 0:
            return "score"
        x, number, real = self.scored(depth - 1), self.number, lambda: self.real(self.rng.randint(0, 1))
        positive = f"(abs({x}) + {number(0.5, 1.0)})"
        return self.pick(
            lambda: f"({x} + {real()})",
            lambda: f"({x} + {real()})",
            lambda: f"({x} * {real()})",
            lambda: f"({x} + {self.integer(depth - 1).text} * {number(0.1, -0.01)})",
            lambda: f"({number(3.0, 30.0)} * torch.tanh({x} / {number(3.0, 30.0)}))",
            lambda: f"torch.where({self.condition(depth - 1)}, {x}, {self.scored(depth - 1)})",
            lambda: f"torch.where({self.condition(1)}, {x}, float('-inf'))",
            lambda: f"({x} {self.rng.choice(['-', '/', '//', '%'])} {number(0.5, 2.0, -3.0)})",
            lambda: f"torch.{self.rng.choice(['log', 'log2', 'log1p', 'sqrt', 'rsqrt'])}({positive})",
            lambda: f"torch.{self.rng.choice(['exp', 'exp2', 'expm1'])}(torch.clamp({x}, -9.0, 9.0))",
            lambda: f"torch.{self.rng.choice(['sigmoid', 'erf', 'sin', 'cos', 'round', 'floor', 'abs', 'sign'])}({x})",
            lambda: f"torch.pow({positive}, {self.rng.choice([0.5, 2, 3, -1.5])})",
            lambda: f"torch.{self.rng.choice(['maximum', 'minimum'])}({x}, {self.scored(depth - 1)})",
            lambda: f"torch.where(torch.{self.rng.choice(['isnan', 'isinf'])}({x}), 0.0, {x})",
            lambda: f"({x}).to(torch.{self.rng.choice(['float16', 'bfloat16'])}) * {number(0.5, 2.0)}",
        )


def functions_of(seed: int, sizes: Sizes) -> Functions:
    """Random mods for sequences of these sizes; at least one of them."""
    rng = random.Random(seed)
    way, texts, score, mask = rng.random(), [], None, None
    if way < 0.75:
        writer = ScoreWriter(rng, sizes, rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
        result = writer.scored(rng.randint(1, 4))
        captured = ", ".join([*writer.tables, *writer.numbers])
        body = "".join(f"        {line}\n" for line in writer.lines)
        head = f"def make({captured}):\n    def score_mod(score, b, h, q_idx, kv_idx):\n"
        texts.append(f"{head}{body}        return {result}\n    return score_mod\n")
        space: dict[str, Any] = {"torch": torch}
        exec(compile(texts[0], "<random score>", "exec"), space)
        score = space["make"](**writer.tables, **writer.numbers)
    if way > 0.4:
        made = predicate(rng, sizes)
        mask = made.function()
        texts.append(str(made))
    return Functions(score, mask, "".join(texts))


def build_fresh(seed: int, folder: Path) -> Fresh:
    """Builds what a call with the functions of a seed runs: the forward kernel, and what makes its mask's table."""
    rng = random.Random(seed + 1)
    sizes = Sizes(2, 4, rng.randint(100, 300), rng.randint(40, 300))
    mods, dims = functions_of(seed, sizes), rng.choice(_DIMS)
    dtype = rng.choice([torch.bfloat16, torch.float16])
    shapes = [(2, 4, sizes.q_len, dims[0]), *((2, 4, sizes.kv_len, n) for n in dims)]
    qkv = tuple(torch.zeros(s, dtype=dtype) for s in shapes)
    compiling.clear()
    flexattn.reset_stats()
    with no_gpu(folder) as log, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aux = AuxRequest(lse=True, max_scores=rng.random() < 0.3)
        problem, plan = prepare((qkv[0], qkv[1], qkv[2]), mods.score, (None, mods.mask), aux=aux)
        launch.forward(problem, plan)
        ran = [n for n in ("hopper_forward", "forward") if flexattn.stats().launches[n]]
        predicate_mask = None if problem.block_mask is None else problem.block_mask.predicate
        if predicate_mask is not None:
            build_tables(predicate_mask, (Cut(128, 128, False),), target_of(90), room=4)
    compiling.clear()
    hopper = [(tiles, spilled) for kernel, tiles, spilled in log.spilled if kernel == "hopper_forward"]
    refused = tuple(f"{tiles} spills {n}" for tiles, n in (hopper[:-1] if ran[0] == "hopper_forward" else hopper))
    return Fresh(seed, ran[0], refused, tuple(log.faults), f"{mods.text}\ndims {dims}, {dtype}")


def check_fresh(seed: int, folder: Path) -> str:
    """What was built, for people.

    Raises:
        AssertionError: a compiler failed, or the kernel for Hopper was not taken though it spilled nothing.
    """
    torch.set_num_threads(1)
    made = build_fresh(seed, folder)
    assert not made.faults, f"{made}\n{made.text}"
    assert made.kernel == "hopper_forward" or made.refused, f"{made}\n{made.text}"
    assert all(not refused.endswith(" spills 0") for refused in made.refused), f"{made}\n{made.text}"
    return str(made)
