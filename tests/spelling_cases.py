"""One small program per row of the op table and kind of data, to be run as a leaf wherever leaves run."""

from __future__ import annotations

import math

import torch

from flexattn.frontend import expr as ex
from flexattn.frontend.ops import OPS
from flexattn.frontend.program import Binding, CaptureInfo, Program, Traced
from tests.leaf_kernel import KEYS, ROWS

_FLOAT = [n for n, r in OPS.items() if r.domain in ("arith", "float", "round", "compare", "predicate", "where", "cast")]
_INTEGER = [n for n, r in OPS.items() if r.domain in ("arith", "compare", "logic", "int", "where", "cast")]
_TRUTH = ["and", "or", "xor", "not", "where", "eq", "ne", "lt", "le", "cast"]
CASES = [(n, "float") for n in _FLOAT] + [(n, "integer") for n in _INTEGER] + [(n, "truth") for n in _TRUTH]
_POSITIVE = {"log", "log2", "log1p", "sqrt", "rsqrt", "pow"}


def case(name: str, kind: str, device: torch.device) -> tuple[Traced, torch.Tensor]:
    """(a score program that applies the row to the score or to captured values, scores)."""
    generator = torch.Generator().manual_seed(len(name))
    score = torch.randn(ROWS, KEYS, generator=generator) * 3
    if name in _POSITIVE:
        score = score.abs() + 0.1
    if name in ("isnan", "isinf"):
        score[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    captures = _captures(kind, generator, name)
    dtype = {"float": torch.float32, "integer": torch.int64, "truth": torch.bool}[kind]
    loads = [ex.load(i, c.dtype, (ex.var("kv_idx" if i else "q_idx"),)) for i, c in enumerate(captures)]
    first: ex.Expr = ex.var("score") if kind == "float" else loads[0]
    row = OPS[name]
    if row.domain == "where":
        node = ex.make(name, ex.make("lt", loads[2], 0), first, loads[1])
    elif row.domain == "cast":
        node = ex.convert(first, torch.int64 if kind == "float" else torch.float32)
    else:
        node = ex.make(name, first, *loads[1 : row.arity])
    assert kind == "float" or first.dtype == dtype
    program = Program("score", ex.convert(node, torch.float32), tuple(CaptureInfo(c.dtype, 1) for c in captures))
    return Traced(program, Binding(tuple(c.to(device) for c in captures), ())), score.to(device)


def _captures(kind: str, generator: torch.Generator, name: str) -> list[torch.Tensor]:
    """Values by query, values by key, and signs by key, each of KEYS elements; division meets both signs and zero."""
    if kind == "float":
        values = [torch.randn(KEYS, generator=generator) for _ in range(2)]
        if name == "pow":
            values = [v.abs() + 0.5 for v in values]
    elif kind == "integer":
        values = [torch.randint(-40, 40, (KEYS,), generator=generator) for _ in range(2)]
        if name in ("lshift", "rshift"):
            values[1] = values[1].abs() % 8
    else:
        values = [torch.rand(KEYS, generator=generator) < 0.5 for _ in range(2)]
    signs = torch.randint(-1, 2, (KEYS,), generator=generator)
    return [*values, signs]
