"""Block masks that are not made by create_block_mask from a function: torch's own objects, lists by hand, slices, crops."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from tests.differential.cases import CASES, Sizes, causal, documents
from tests.differential.compare import Problem, compare, make_problem, ours, torch_result
from tests.helpers import Result, on_devices

BF16 = torch.bfloat16
BLOCK = 128
MASKED = [name for name, case in CASES.items() if case.mask is not None]


@on_devices
@pytest.mark.parametrize("name", MASKED)
def test_torchs_object_is_accepted(name: str, device: str) -> None:
    """Ours with the BlockMask that torch made of the same function."""
    z = Sizes(2, 4, 2, 140, 300, 32, 32, dtype=BF16) if device == "cuda" else Sizes(2, 4, 2, 70, 90, 16, 16, block=32)
    problem = make_problem(CASES[name], z, device)
    compare(problem, ours(replace(problem, make_mask=lambda _: problem.block_mask(torch_flex))))


# ---------------------------------------------------------------- lists by hand
def lists(flex: ModuleType, partial: Tensor, full: Tensor | None, **options: Any) -> Any:
    """A BlockMask from which blocks are partial and which full, bool [rows, columns] each."""
    packed = []
    for chosen in (partial, full):
        if chosen is None:
            continue
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        packed += [x.to(torch.int32)[None, None] for x in (chosen.sum(-1), order)]
    return flex.BlockMask.from_kv_blocks(*packed, BLOCK_SIZE=BLOCK, **options)


def whole_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx // BLOCK >= kv_idx // BLOCK


def _problem(device: str, lengths: tuple[int, int] = (512, 384)) -> Problem:
    dims = (32, 32) if device == "cuda" else (16, 16)
    z = Sizes(1, 2, 1, *lengths, *dims, dtype=BF16 if device == "cuda" else torch.float32)
    return make_problem(CASES["identity"], z, device)


def _kernels_alone(problem: Problem) -> Result | None:
    """Torch's eager form asks the function alone and never looks at the lists; its kernels do."""
    return torch_result(problem) if problem.device.type == "cuda" else None


@on_devices
@pytest.mark.parametrize("kind", ["partial and full", "partial alone", "no function", "not divisible"])
def test_lists_by_hand(kind: str, device: str) -> None:
    """A generator of causal block lists, as users write one for speed."""
    lengths = (500, 370) if kind == "not divisible" else (512, 384)
    problem = _problem(device, lengths)
    row, column = torch.arange(4, device=device)[:, None], torch.arange(3, device=device)[None, :]
    partial, full = (row >= column, None) if kind in ("partial alone", "no function") else (row == column, row > column)
    options: dict[str, Any] = {} if kind == "no function" else {"mask_mod": causal}
    if kind == "not divisible":
        options["seq_lengths"] = lengths
    problem = replace(
        problem,
        mask=whole_blocks if kind == "no function" else causal,
        make_mask=lambda flex: lists(flex, partial, full, **options),
    )
    compare(problem, ours(problem), _kernels_alone(problem) if kind == "no function" else torch_result(problem))


@on_devices
def test_a_row_of_blocks_without_any(device: str) -> None:
    """Rows whose lists are empty give 0, and lists may name blocks in any order."""
    problem = _problem(device)
    partial = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool, device=device)
    keep = lambda b, h, i, j: partial[i // BLOCK, j // BLOCK]
    problem = replace(problem, mask=keep, make_mask=lambda flex: lists(flex, partial, None))
    result = ours(problem)
    compare(problem, result, _kernels_alone(problem))
    assert result.out[:, :, 128:256].abs().max() == 0


# ---------------------------------------------------------------- parts of a mask
@on_devices
def test_slice_with_its_function_assigned(device: str) -> None:
    """Torch's way: slice the blocks, then assign the function that counts from the slice's start, and the lengths."""
    ids = documents(512, 90).to(device)
    problem = _problem(device, (256, 384))
    shifted = lambda b, h, i, j: (ids[i + 128] == ids[j]) & (i + 128 >= j)

    def make(flex: ModuleType) -> Any:
        whole = flex.create_block_mask(
            lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, 512, 384, device=device
        )
        part = whole[:, :, 1:3]
        part.mask_mod, part.seq_lengths = shifted, (256, 384)
        return part

    problem = replace(problem, mask=shifted, make_mask=make)
    compare(problem, ours(problem), torch_result(problem))


@on_devices
@pytest.mark.parametrize("lengths", [(256, 256), (300, 200), (512, 100)])
def test_crop(lengths: tuple[int, int], device: str) -> None:
    """Ours and newer torch crop to the lengths, older torch to whole blocks; it then refuses the lengths it was asked for."""
    problem = _problem(device, lengths)
    make = lambda flex: flex.create_block_mask(causal, None, None, 512, 384, device=device)._adjust(*lengths)
    problem = replace(problem, mask=causal, make_mask=make)
    result, cropped = ours(problem), make(torch_flex).shape[-2:]
    if cropped == lengths:
        compare(problem, result, torch_result(problem))
        return
    compare(problem, result)
    assert cropped == tuple(-(-length // BLOCK) * BLOCK for length in lengths)
    with pytest.raises(Exception, match=r"block_mask was created for block_mask\.shape"):
        torch_result(problem)


@on_devices
def test_head_of_a_mask_for_all_heads(device: str) -> None:
    """One head's mask serves a call of one head."""
    problem = _problem(device)
    mask = lambda b, h, i, j: (i >= j) & (i - j < 100 * (h + 1))

    def make(flex: ModuleType) -> Any:
        part = flex.create_block_mask(mask, None, 2, 512, 384, device=device)[:, 1:2]
        part.mask_mod = lambda b, h, i, j: mask(b, h + 1, i, j)
        return part

    z = replace(problem.sizes, q_heads=1)
    problem = make_problem(CASES["identity"], z, device)
    problem = replace(problem, mask=lambda b, h, i, j: mask(b, 1, i, j), make_mask=make)
    compare(problem, ours(problem), torch_result(problem))
