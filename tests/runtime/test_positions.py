"""q_offset and kv_lengths: the same numbers as mods written out, on every path, and the errors of what does not fit."""

from __future__ import annotations

import pytest
import torch

import flexattn
from flexattn import AuxRequest, flex_attention
from flexattn.errors import CallError, DTypeError, FlexError, OptionError, ShapeError, UnsupportedError
from tests.helpers import Result, assert_rule, causal, dense, exact, make_qkv, on_devices, run, window


def alibi(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx) * (h + 1)


def assert_right(result: Result, qkv, mask, score) -> None:
    """The contract's rule for out, lse and gradients, by mods that say positions themselves."""
    want, fair = exact(qkv, mask, score), dense(qkv, mask, score)
    for name, x in result.named.items():
        assert_rule(name, x, want.named[name], [f.named[name] for f in fair], qkv[0].dtype)


OFFSETS = {
    "int": lambda device: (17, lambda b: 17),
    "one": lambda device: ((x := torch.tensor([17], device=device)), lambda b: x[0]),
    "0-d of the CPU": lambda device: (torch.tensor(17), lambda b: 17),
    "by batch": lambda device: ((x := torch.tensor([17, 5], dtype=torch.int32, device=device)), lambda b: x[b]),
}


@on_devices
@pytest.mark.parametrize("given", OFFSETS)
def test_q_offset_is_what_mods_see(device, given) -> None:
    """Output, lse and gradients of mods that add the offset themselves."""
    offset, of = OFFSETS[given](device)
    qkv = make_qkv(device=device)
    shifted = lambda b, h, i, j: window(40)(b, h, i + of(b), j)
    score = lambda s, b, h, i, j: alibi(s, b, h, i + of(b), j)
    assert_right(run(qkv, window(40), alibi, q_offset=offset), qkv, shifted, score)


@on_devices
def test_kv_lengths_drop_what_is_behind_them(device) -> None:
    """Gradients too; NaN behind a length reaches nothing, and gets the gradient 0."""
    lengths = torch.tensor([33, 90], device=device)
    qkv = make_qkv(device=device)
    with torch.no_grad():
        for x in qkv[1:]:
            x[0, :, 33:] = torch.nan
    got = run(qkv, causal, alibi, kv_lengths=lengths)
    clean = [x.detach().nan_to_num().requires_grad_() for x in qkv]
    assert_right(got, clean, lambda b, h, i, j: causal(b, h, i, j) & (j < lengths[b]), alibi)
    assert all((grad[0, :, 33:] == 0).all() for grad in got.grads[1:])


def test_a_length_of_no_key_is_an_empty_row() -> None:
    q, k, v = make_qkv(requires_grad=False)
    aux = AuxRequest(lse=True)
    out, (lse, _) = flex_attention(q, k, v, enable_gqa=True, kv_lengths=torch.tensor([0, 90]), return_aux=aux)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all() and torch.isfinite(lse[1]).all()


def test_offset_and_mask_of_other_lengths() -> None:
    """A block_mask made for every position is read from the offset on, and keeps to kv_lengths."""
    q, k, v = make_qkv(requires_grad=False)
    mask = flexattn.create_block_mask(window(9), None, None, 200, 90, device="cpu")
    lengths = torch.tensor([71, 90])
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, q_offset=torch.tensor([5, 20]), kv_lengths=lengths)
    starts = torch.tensor([5, 20])
    want = exact([q, k, v], lambda b, h, i, j: window(9)(b, h, i + starts[b], j) & (j < lengths[b])).out
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


WRONG = {
    "offset below 0": ({"q_offset": -1}, OptionError, "q_offset must be at least 0; got -1"),
    "offset float": ({"q_offset": 1.5}, CallError, "q_offset must be an int or a tensor; got float"),
    "offset bool": ({"q_offset": True}, CallError, "q_offset must be an int or a tensor; got bool"),
    "offset float tensor": (
        {"q_offset": torch.ones(2)},
        DTypeError,
        "q_offset must be int32 or int64; got torch.float32",
    ),
    "offset shape": ({"q_offset": torch.ones(3, dtype=torch.int32)}, ShapeError, "(3,) for a batch of 2"),
    "lengths list": ({"kv_lengths": [1, 2]}, CallError, "kv_lengths must be a tensor; got list"),
    "lengths shape": ({"kv_lengths": torch.ones(2, 1, dtype=torch.int64)}, ShapeError, "kv_lengths must have shape"),
    "lengths dtype": (
        {"kv_lengths": torch.ones(2, dtype=torch.bool)},
        DTypeError,
        "kv_lengths must be int32 or int64",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_positions(name) -> None:
    given, error, words = WRONG[name]
    qkv = make_qkv(requires_grad=False)
    with pytest.raises(error) as raised:
        flex_attention(*qkv, enable_gqa=True, **given)
    assert words in str(raised.value) and isinstance(raised.value, FlexError) and "Try:" in str(raised.value)


def test_masks_that_cannot_be_moved() -> None:
    q, k, v = make_qkv(requires_grad=False)
    short = flexattn.create_block_mask(causal, None, None, 70, 90, device="cpu")
    with pytest.raises(ShapeError, match="queries up to position 75"):
        flex_attention(q, k, v, block_mask=short, enable_gqa=True, q_offset=5)
    lists = flexattn.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), seq_lengths=(70, 90)
    )
    with pytest.raises(UnsupportedError, match="lists of blocks cannot be read from q_offset on"):
        flex_attention(q, k, v, block_mask=lists, enable_gqa=True, q_offset=5)


def test_explain_knows_them() -> None:
    q, k, v = make_qkv(requires_grad=False)
    lengths = torch.tensor([33, 90])
    text = flexattn.explain(q, k, v, alibi, mask_mod=causal, enable_gqa=True, q_offset=7, kv_lengths=lengths)
    assert "num0 = 7 (int, an argument" in text and "kv_idx < cap0[b]" in text
    assert "copied first" in text
