"""strict_nan: a bad row of query, key, value or d_out reaches what keeps it, and nothing else."""

from __future__ import annotations

import pytest
import torch

from flexattn import AuxRequest, BlockMask, flex_attention

WINDOW = lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= 2
KEEP = (torch.arange(40)[:, None] - torch.arange(40)).abs() <= 2
STRICT = {"strict_nan": True}


def problem(*, bad: bool, dtype=torch.float32):
    """Inputs, a captured table and d_out; `bad` puts a NaN into one row of each."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, n, 40, d, dtype=dtype) for n, d in ((4, 8), (2, 8), (2, 6)))
    table, d_out = torch.randn(40), torch.randn(2, 4, 40, 6, dtype=dtype)
    if bad:
        q[:, :, 3, 1] = torch.nan
        k[:, :, 12, 0] = torch.nan
        v[:, :, 20, 0] = torch.nan
        d_out[:, :, 30, 5] = torch.nan
    return [x.requires_grad_() for x in (q, k, v, table)], d_out


def run(leaves, d_out, options, mask=None):
    q, k, v, table = leaves
    score_mod = lambda score, b, h, q_idx, kv_idx: torch.tanh(score) * 2 + table[kv_idx]
    masks = {"mask_mod": WINDOW} if mask is None else {"block_mask": mask}
    out, aux = flex_attention(
        q, k, v, score_mod, enable_gqa=True, kernel_options=options, return_aux=AuxRequest(True, True), **masks
    )
    return out, aux, torch.autograd.grad(out, leaves, d_out)


def same_but(actual, expected, spoiled):
    """NaN exactly at `spoiled` (broadcast), and the clean run's values elsewhere."""
    spoiled = spoiled.expand(actual.shape)
    assert torch.equal(torch.isnan(actual), spoiled)
    torch.testing.assert_close(actual[~spoiled], expected[~spoiled], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("as_list", [False, True])
def test_bad_rows_reach_only_what_keeps_them(as_list):
    mask = None
    if as_list:
        counts, indices = (
            torch.full((1, 1, 5), 5, dtype=torch.int32),
            torch.arange(5, dtype=torch.int32).expand(1, 1, 5, 5),
        )
        mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8, mask_mod=WINDOW)
    out, aux, grads = run(*problem(bad=True), STRICT, mask)
    clean, clean_aux, clean_grads = run(*problem(bad=False), None, mask)
    row = torch.arange(40)
    lost = (row == 3) | KEEP[:, 12]  # rows with a NaN score
    half = KEEP[:, 20]  # rows with a NaN in one column of out
    column = torch.arange(6)
    same_but(out, clean, (lost[:, None] | (half[:, None] & (column == 0)))[None, None])
    same_but(aux.lse, clean_aux.lse, lost[None, None])
    same_but(aux.max_scores, clean_aux.max_scores, lost[None, None])
    spoiled = lost | half | (row == 30)  # rows whose scores get a NaN gradient
    keys = KEEP[spoiled].any(0)
    same_but(grads[0], clean_grads[0], spoiled[:, None][None, None])
    same_but(grads[1], clean_grads[1], keys[:, None][None, None])
    same_but(grads[2], clean_grads[2], (KEEP[lost].any(0)[:, None] | (KEEP[30][:, None] & (column == 5)))[None, None])
    same_but(grads[3], clean_grads[3], keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_a_bad_entry_the_option_changes_no_bit(dtype):
    plain, strict = (run(*problem(bad=False, dtype=dtype), options) for options in (None, STRICT))
    assert torch.equal(plain[0], strict[0])
    assert torch.equal(plain[1].lse, strict[1].lse)
    assert all(torch.equal(a, b) for a, b in zip(plain[2], strict[2]))


def test_the_strict_path_computes_the_same_attention(monkeypatch):
    monkeypatch.setattr("flexattn.runtime.strict.is_needed", lambda *_: False)
    plain = run(*problem(bad=False), None)
    monkeypatch.setattr("flexattn.runtime.strict.is_needed", lambda *_: True)
    strict = run(*problem(bad=False), None)
    for a, b in zip((plain[0], *plain[1], *plain[2]), (strict[0], *strict[1], *strict[2])):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_rows_without_a_key_stay_exactly_zero():
    leaves, d_out = problem(bad=True)
    q, k, v, _ = leaves
    mask_mod = lambda b, h, q_idx, kv_idx: (q_idx >= 35) & (kv_idx >= 35)
    out, aux = flex_attention(
        q, k, v, mask_mod=mask_mod, enable_gqa=True, kernel_options=STRICT, return_aux=AuxRequest(lse=True)
    )
    assert torch.isfinite(out).all()
    assert (out[:, :, :35] == 0).all()
    assert torch.isneginf(aux.lse[:, :, :35]).all()
    d_q, d_k, d_v = torch.autograd.grad(out, [q, k, v], d_out)
    assert (d_q[:, :, :35] == 0).all()
    assert all((g[:, :, :35] == 0).all() and torch.isfinite(g).all() for g in (d_k, d_v))
