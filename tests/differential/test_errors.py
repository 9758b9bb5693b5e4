"""What torch refuses, ours refuses with the same class; what torch refuses and ours does is in a table of its own.

Torch is asked first, so that a row says what the installed torch does and not what somebody remembers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import flexattn
from tests.differential.cases import CASES, Case, Mod, Sizes, causal, learnt
from tests.differential.compare import (
    compare,
    make_problem,
    ours,
    torch_compiled,
    torch_compiler,
    torch_without_compiler,
)
from tests.helpers import on_devices


def tensors(device: str, **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value of 2 x 4 x 32 x 16, or a shape or dtype of one of them changed by its name."""
    make = {"q": (2, 4, 32, 16), "k": (2, 4, 32, 16), "v": (2, 4, 32, 16), "dtype": {}, **changes}
    q, k, v = (torch.randn(make[n], device=device, dtype=make["dtype"].get(n, torch.float32)) for n in "qkv")
    return q, k, v


def call(flex: ModuleType, device: str, *arguments: Any, gqa: bool = False, **options: Any) -> Any:
    """flex_attention of a module on `tensors(device, **options)`; options that are no shapes go to the call."""
    shapes = {n: options.pop(n) for n in ("q", "k", "v", "dtype") if n in options}
    return flex.flex_attention(*tensors(device, **shapes), *arguments, enable_gqa=gqa, **options)


def mask_of(
    flex: ModuleType, device: str, *, lengths: tuple[int, int] = (32, 32), mod: Mod = causal, **options: Any
) -> Any:
    return flex.create_block_mask(mod, None, None, *lengths, device=device, **options)


def lists(flex: ModuleType, device: str, **options: Any) -> Any:
    """A BlockMask of two by two blocks from lists."""
    count = torch.full((1, 1, 2), 2, dtype=torch.int32, device=device)
    index = torch.arange(2, dtype=torch.int32, device=device).expand(1, 1, 2, 2).contiguous()
    return flex.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=16, **options)


def five_arguments(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return s


# (module, device) -> None; each is an error of torch in eager form.
REFUSED: dict[str, Callable[[ModuleType, str], Any]] = {
    "three dimensions": lambda m, d: call(m, d, q=(4, 32, 16)),
    "five dimensions": lambda m, d: call(m, d, k=(1, 2, 4, 32, 16)),
    "heads without groups": lambda m, d: call(m, d, k=(2, 2, 32, 16), v=(2, 2, 32, 16)),
    "heads that do not divide": lambda m, d: call(m, d, k=(2, 3, 32, 16), v=(2, 3, 32, 16), gqa=True),
    "another batch": lambda m, d: call(m, d, k=(3, 4, 32, 16), v=(3, 4, 32, 16)),
    "another head dim": lambda m, d: call(m, d, k=(2, 4, 32, 24)),
    "both ways to ask for lse": lambda m, d: call(m, d, return_lse=True, return_aux=m.AuxRequest(lse=True)),
    "mask too short": lambda m, d: call(m, d, None, mask_of(m, d, lengths=(16, 16), BLOCK_SIZE=16)),
    "mask too long": lambda m, d: call(m, d, None, mask_of(m, d, lengths=(64, 64), BLOCK_SIZE=16)),
    "mask too long in keys": lambda m, d: call(m, d, None, mask_of(m, d, lengths=(32, 48), BLOCK_SIZE=16)),
    "reserved option lse": lambda m, d: call(m, d, kernel_options={"OUTPUT_LOGSUMEXP": True}),
    "reserved option maxima": lambda m, d: call(m, d, kernel_options={"OUTPUT_MAX": True}),
    "no such backend": lambda m, d: call(m, d, kernel_options={"BACKEND": "CUDA"}),
    "two ways to ask for a kernel": lambda m, d: call(m, d, kernel_options={"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}),
    "key on another device": lambda m, d: m.flex_attention(*tensors(d)[:1], *tensors("meta")[1:]),
    "score_mod as mask_mod": lambda m, d: mask_of(m, d, mod=five_arguments),
    "mask_mod of three arguments": lambda m, d: mask_of(m, d, mod=lambda b, h, i: i > 3),
    "mask that is a number": lambda m, d: mask_of(m, d, mod=lambda b, h, i, j: (i - j) * 0.5),
    "and of what cannot be called": lambda m, d: m.and_masks(causal, 3),
    "or of what cannot be called": lambda m, d: m.or_masks("causal"),
    "lists of one dimension": lambda m, d: m.BlockMask.from_kv_blocks(*(torch.zeros(1, dtype=torch.int32, device=d) for _ in "ab")),
    "full counts without indices": lambda m, d: m.BlockMask.from_kv_blocks(
        *(torch.zeros(1, 1, *n, dtype=torch.int32, device=d) for n in ((2,), (2, 2), (2,)))
    ),
}  # fmt: skip

# Errors of torch that need a GPU's compiled form, or that torch has on the CPU alone: what ours does instead is right.
DONE_HERE: dict[str, Case | str] = {
    "a gradient on the CPU": "causal mask",
    "a table indexed twice": "symmetric",
    "a reduction in the mod": "sum of a whole table",
}


def builtin(error: BaseException) -> type[BaseException]:
    """The builtin class that torch raised, unwrapped from its compiler's."""
    inner = getattr(error, "inner_exception", None)
    if inner is not None:
        return builtin(inner)
    return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")


@on_devices
@pytest.mark.filterwarnings("ignore:kernel_options")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_torchs_class(name: str, device: str) -> None:
    with torch_without_compiler(), pytest.raises(Exception) as theirs:
        REFUSED[name](torch_flex, device)
    with pytest.raises(builtin(theirs.value)) as raised:
        REFUSED[name](flexattn, device)
    assert isinstance(raised.value, flexattn.errors.FlexError), repr(raised.value)


@on_devices
def test_mask_on_another_device(device: str) -> None:
    masks = [mask_of(m, device).to("meta") for m in (torch_flex, flexattn)]
    with torch_without_compiler(), pytest.raises(RuntimeError, match="same device"):
        call(torch_flex, device, None, masks[0])
    with pytest.raises(RuntimeError, match="same device"):
        call(flexattn, device, None, masks[1])


@on_devices
def test_torchs_sliced_mask_has_no_function(device: str) -> None:
    """Torch refuses a sliced mask of its own; so does ours, while our own slices keep their function."""
    sliced = mask_of(torch_flex, device, lengths=(64, 32), BLOCK_SIZE=32)[:, :, :1]
    for flex in (torch_flex, flexattn):
        with torch_without_compiler(), pytest.raises(RuntimeError, match="sliced"):
            call(flex, device, None, sliced)
    mine = mask_of(flexattn, device, lengths=(64, 32), BLOCK_SIZE=32)[:, :, :1]
    assert call(flexattn, device, None, mine).shape == (2, 4, 32, 16)


@on_devices
def test_mixed_dtypes(device: str) -> None:
    """Torch's CPU computes with mixed dtypes in eager form; its kernels refuse them, and so does ours everywhere."""
    mixed = {"dtype": {"v": torch.bfloat16}}
    with pytest.raises(ValueError, match="same dtype"):
        call(flexattn, device, **mixed)
    if device == "cuda":
        q, k, v = (x.requires_grad_() for x in tensors(device, **mixed))
        with (
            torch_compiler(dynamic=False) as (compiled, _),
            pytest.raises(Exception, match="mixed query, key, and value"),
        ):
            compiled(q, k, v).sum().backward()


@on_devices
def test_lists_that_are_missing(device: str) -> None:
    with pytest.raises(flexattn.errors.FlexError, match="kv_num_blocks"):
        flexattn.BlockMask.from_kv_blocks(None, None)
    with torch_without_compiler(), pytest.raises(AttributeError):
        torch_flex.BlockMask.from_kv_blocks(None, None)


@on_devices
def test_lists_without_the_transposed_ones_have_a_backward(device: str) -> None:
    """Torch has none then; ours finds the transposed tiles by itself."""
    problem = make_problem(CASES["causal mask"], Sizes(2, 4, 4, 32, 32, 16, 16), device)
    problem = replace(problem, mask=None, make_mask=lambda m: lists(m, device, compute_q_blocks=False))
    assert problem.block_mask(flexattn).q_indices is None
    compare(problem, ours(problem))
    if device == "cuda":
        mask = problem.block_mask(torch_flex)
        with torch_without_compiler(), pytest.raises(RuntimeError, match="q_indices"):
            torch_flex.flex_attention(*problem.qkv, None, mask).sum().backward()


@on_devices
def test_blocks_that_no_tile_of_torch_divides(device: str) -> None:
    problem = make_problem(CASES["causal mask"], Sizes(2, 2, 2, 200, 300, 16, 16, block=(40, 56)), device)
    compare(problem, ours(problem))
    if device == "cuda":
        with torch_compiler(dynamic=False) as (compiled, _), pytest.raises(Exception, match="divisible by BLOCK_M"):
            torch_compiled(problem, compiled)


@on_devices
@pytest.mark.parametrize("name", DONE_HERE)
def test_done_where_torch_refuses(name: str, device: str) -> None:
    case = CASES[DONE_HERE[name]]
    problem = make_problem(case, Sizes(2, 2, 2, 40, 50, 16, 16), device)
    compare(problem, ours(problem))
    if device == "cpu":
        with torch_without_compiler(), pytest.raises(NotImplementedError, match="does not support backward on CPU"):
            torch_flex.flex_attention(*problem.qkv)
    elif case.torch_cannot:
        with torch_compiler(dynamic=False) as (compiled, _), pytest.raises(Exception, match=case.torch_cannot):
            torch_compiled(problem, compiled)


@on_devices
@pytest.mark.parametrize("dims", [(8, 8), (4, 16), (16, 5)])
def test_head_dims_too_small_for_torch(dims: tuple[int, int], device: str) -> None:
    problem = make_problem(CASES["alibi"], Sizes(2, 2, 2, 140, 150, *dims), device)
    compare(problem, ours(problem))
    if device == "cuda":
        with torch_compiler(dynamic=False) as (compiled, _), pytest.raises(Exception, match="at least 16"):
            torch_compiled(problem, compiled)


@on_devices
def test_mask_table_that_needs_a_gradient(device: str) -> None:
    """Torch's autograd refuses a mask whose table requires grad; a truth value has no gradient, so here it counts as none."""
    case = Case("", (), mask=lambda z, t: lambda b, h, i, j: t[j] > 0, captured=lambda z: [learnt(z.kv_len)])
    problem = make_problem(case, Sizes(2, 2, 2, 40, 50, 16, 16), device)
    result = ours(problem)
    compare(problem, result)
    assert result.grads[3].abs().max() == 0
