"""One problem through flexattn, torch's flex_attention, dense attention and the float64 oracle, and the contract's rule on the figures.

Reads a row of the table and `Sizes`; raises AssertionError with the figures. The one idea: torch's own error widens what is fair only
where torch computes the same thing, so a wrong result of torch cannot make ours pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexattn
from tests.differential.cases import Case, Mod, Sizes
from tests.helpers import HALF, Result, dense, differentiate, exact, make_qkv, mean_error, run, weights_for

FEW = 1000  # a mean over fewer numbers is itself uncertain


@dataclass(frozen=True)
class Problem:
    """Tensors and functions of one call, the same for everybody."""

    sizes: Sizes
    qkv: tuple[Tensor, Tensor, Tensor]
    score: Mod | None
    mask: Mod | None
    learnt: tuple[Tensor, ...]
    mask_size: tuple[int | None, int | None]
    make_mask: Callable[[ModuleType], Any] | None = None  # instead of create_block_mask

    @property
    def device(self) -> torch.device:
        return self.qkv[0].device

    def block_mask(self, flex: ModuleType) -> Any:
        """The mask made by a module, flexattn or torch's; None where everything is kept."""
        if self.make_mask is not None:
            return self.make_mask(flex)
        if self.mask is None:
            return None
        z = self.sizes
        return flex.create_block_mask(
            self.mask, *self.mask_size, z.q_len, z.kv_len, device=str(self.device), BLOCK_SIZE=z.block
        )


def make_problem(case: Case, z: Sizes, device: str, *, requires_grad: bool = True) -> Problem:
    """The tensors of a row of the table at some sizes, and its two functions around them."""
    qkv = make_qkv(
        z.batch,
        (z.q_heads, z.kv_heads),
        (z.q_len, z.kv_len),
        (z.qk_dim, z.v_dim),
        kv_batch=z.kv_batch,
        dtype=z.dtype,
        device=device,
        requires_grad=requires_grad,
    )
    tensors = [x.detach().to(device).requires_grad_(x.requires_grad and requires_grad) for x in case.captured(z)]
    shared = z.kv_batch not in (None, z.batch)  # torch then wants a mask of query's batch
    return Problem(
        sizes=z,
        qkv=qkv,
        score=case.score and case.score(z, *tensors),
        mask=case.mask(z, *tensors) if case.mask else (torch_flex.noop_mask if shared else None),
        learnt=tuple(x for x in tensors if x.requires_grad),
        mask_size=(z.batch if shared or "b" in case.mask_by else None, z.q_heads if "h" in case.mask_by else None),
    )


# ---------------------------------------------------------------- who computes
def ours(problem: Problem, **options: Any) -> Result:
    """flexattn, with the gradients of query, key, value and of what is learnt."""
    mask = problem.block_mask(flexattn)
    return run(problem.qkv, score_mod=problem.score, captures=problem.learnt, block_mask=mask, **options)


@contextmanager
def torch_without_compiler() -> Iterator[None]:
    """Torch's eager flex_attention as plain calls, without the compiler that it starts otherwise."""
    before = torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def torch_forward(problem: Problem, **options: Any) -> Result:
    """Torch's eager flex_attention: out and lse. It has no backward on a CPU."""
    q, k, v = (x.detach() for x in problem.qkv)
    with torch.no_grad(), torch_without_compiler():
        out, aux = torch_flex.flex_attention(
            q,
            k,
            v,
            problem.score,
            problem.block_mask(torch_flex),
            enable_gqa=True,
            return_aux=torch_flex.AuxRequest(lse=True),
            **options,
        )
    return Result(out, aux.lse, ())


def torch_compiled(problem: Problem, compiled: Callable[..., Any], **options: Any) -> Result:
    """Torch's compiled flex_attention, with the same gradients as ours."""
    out, aux = compiled(
        *problem.qkv,
        problem.score,
        problem.block_mask(torch_flex),
        enable_gqa=problem.sizes.q_heads != problem.sizes.kv_heads,
        return_aux=torch_flex.AuxRequest(lse=True),
        **options,
    )
    leaves = [x for x in (*problem.qkv, *problem.learnt) if x.requires_grad]
    return differentiate(out, aux.lse, leaves, weights_for(problem.qkv[0], problem.qkv[2]))


NO_KERNEL = ("NoValidChoicesError", "No valid triton configs", "CUDA driver error: invalid argument")


def torch_where_it_can(problem: Problem, compiled: Callable[..., Any], **options: Any) -> Result | None:
    """What torch's kernels say; None, with a warning, where torch finds no kernel of its own that the card runs."""
    try:
        return torch_compiled(problem, compiled, **options)
    except Exception as error:
        words = next((words for words in NO_KERNEL if words in str(error)), None)
        if words is None:
            raise
        warnings.warn(f"torch has no kernel for {problem.sizes}: {words}; compared with the oracle alone", stacklevel=2)
        return None


@contextmanager
def torch_compiler(*, dynamic: bool) -> Iterator[tuple[Callable[..., Any], Callable[[], int]]]:
    """(torch's flex_attention compiled, a function that counts its compilations so far), in this process alone.

    Sizes that happen to be equal are not taken for one another, or the next sizes would be compiled anew.
    """
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters
    from torch.fx.experimental import _config as shapes

    torch._dynamo.reset()
    counters.clear()
    try:
        with (
            torch._inductor.config.patch(compile_threads=1),
            torch._functorch.config.patch(donated_buffer=False),  # `differentiate` retains the graph
            shapes.patch(use_duck_shape=False),
        ):
            compiled = torch.compile(torch_flex.flex_attention, dynamic=dynamic, fullgraph=True)
            yield compiled, lambda: counters["stats"]["unique_graphs"]
    finally:
        torch._dynamo.reset()


def torch_result(problem: Problem, **options: Any) -> Result | None:
    """What torch says: its compiled kernels forward and backward on a GPU (None where it has none), its eager forward on the CPU."""
    if problem.device.type == "cpu":
        return torch_forward(problem, **options)
    with torch_compiler(dynamic=False) as (compiled, _):
        return torch_where_it_can(problem, compiled, **options)


# ---------------------------------------------------------------- the rule
def compare(problem: Problem, result: Result, torchs: Result | None = None, **options: Any) -> None:
    """Contract line 7 for out, lse and every gradient: ours against float64, beside the dense formulas and torch.

    Args:
        problem: what was computed.
        result: ours.
        torchs: torch's; its gradients may be missing.
        options: scale.
    """
    parts = (problem.qkv, problem.mask, problem.score)
    right = exact(*parts, captures=problem.learnt, **options)
    fair = dense(*parts, captures=problem.learnt, **options)
    assert result.out.dtype == problem.sizes.dtype
    failures = []
    for name, part in _parts(problem, result):
        beside = [part(torchs)] if torchs is not None and part(torchs) is not None else []
        failures += judge(name, part(result), part(right), [part(x) for x in fair], beside, problem.sizes.dtype)
    assert not failures, "\n".join((str(problem.sizes), *failures))


def _parts(problem: Problem, result: Result) -> Iterator[tuple[str, Callable[[Result], Any]]]:
    """(name, how to get it from a Result) of everything that is compared."""
    yield "out", lambda x: x.out
    yield "lse", lambda x: x.lse
    names = [f"captured gradient {n}" for n in range(len(problem.learnt))]
    if problem.qkv[0].requires_grad:
        names = ["dQ", "dK", "dV", *names]
    leaves = [x for x in (*problem.qkv, *problem.learnt) if x.requires_grad]
    assert len(names) == len(leaves) == len(result.grads)
    for n, (name, leaf) in enumerate(zip(names, leaves)):
        assert result.grads[n].dtype == leaf.dtype, f"{name} is {result.grads[n].dtype}, its tensor {leaf.dtype}"
        yield name, lambda x, n=n: x.grads[n] if x.grads else None


def judge(
    name: str, actual: Tensor, right: Tensor, fair: Sequence[Tensor], torchs: Sequence[Tensor], dtype: torch.dtype
) -> list[str]:
    """What is wrong with one tensor, in figures; nothing if it keeps the rule."""
    error, worst = mean_error(actual, right)
    dense_error, dense_worst = (max(x) for x in zip(*(mean_error(x, right) for x in fair)))
    finite = right[torch.isfinite(right)].double().abs()
    size = finite.mean().item() if finite.numel() else 0.0
    text, allowed = f"dense {dense_error:.3g} (max {dense_worst:.3g})", dense_error
    found = []
    for x in torchs:
        torch_error, torch_worst = mean_error(x, right)
        text += f", torch {torch_error:.3g} (max {torch_worst:.3g})"
        allowed = max(allowed, torch_error)
        if torch_error > max(0.1 * size, 4 * dense_error, 1e-6):
            found.append(f"{name}: torch computes something else: {text}, mean |float64| {size:.3g}")
    few = name.startswith("captured") and right.numel() < FEW
    if few and dtype not in HALF:  # a float32 sum of very many terms: the bound of the collected cases
        error, limit, text = _beside_size(actual, right), 2e-5, f"in parts of max(1, |float64|); {text}"
    else:
        limit = max(factor(name, right.numel() if few else 0, dtype) * allowed, 1e-7 * size)
    if not error <= limit:
        found.append(f"{name}: mean error {error:.3g} (max {worst:.3g}) above {limit:.3g}; {text}")
    return found


def _beside_size(actual: Tensor, right: Tensor) -> float:
    """The greatest error in parts of max(1, |right|); NaN is an infinite one."""
    error = (actual.double() - right).abs() / right.abs().clamp(min=1)
    return torch.where(error.isnan(), math.inf, error).max().item()


def factor(name: str, few: int, dtype: torch.dtype) -> float:
    """How many times the fair error: 1.1 (out, lse) or 1.25 (gradients) in half types, 2 in float32.

    The mean of n errors is known to about 0.76 / sqrt(n) of itself and the quotient of two such to 1.07 / sqrt(n): a captured gradient
    of `few` numbers (0: of many) has three of those on top.
    """
    base = (1.1 if name in ("out", "lse") else 1.25) if dtype in HALF else 2.0
    return base * (1 + 3.2 / math.sqrt(few)) if few else base
