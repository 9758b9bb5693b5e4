"""Errors before anything is launched: the right class, torch's words, what was given and what to try."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexattn
import flexattn.runtime.plan
from flexattn import AuxRequest, BlockMask, create_block_mask, errors, flex_attention
from flexattn.runtime import settings
from flexattn.runtime.attention import prepare
from flexattn.runtime.options import DEFAULT, KernelOptions, TileOptions, parse_options
from flexattn.runtime.plan import Device, choose_backend

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def qkv(*, batch=2, heads=4, q_len=16, kv_len=16, qk_dim=8, v_dim=8, kv_heads=None, kv_batch=None, **kwargs):
    kv = (batch if kv_batch is None else kv_batch, heads if kv_heads is None else kv_heads, kv_len)
    return (
        torch.randn(batch, heads, q_len, qk_dim, **kwargs),
        torch.randn(*kv, qk_dim, **kwargs),
        torch.randn(*kv, v_dim, **kwargs),
    )


# ---------------------------------------------------------------- query, key, value
@pytest.mark.parametrize(
    ("tensors", "builtin", "ours", "fragment"),
    [
        (
            lambda: [x[0] for x in qkv()],
            NotImplementedError,
            errors.UnsupportedError,
            "NYI: query, key, and value must be 4D tensors",
        ),
        (
            lambda: qkv(kv_heads=2),
            ValueError,
            errors.ShapeError,
            "Expect query and key/value to have the same number of heads",
        ),
        (lambda: qkv(kv_heads=2), ValueError, errors.ShapeError, "Hq=4 and Hkv=2.*Try setting enable_gqa=True"),
        (
            lambda: qkv(batch=3, kv_batch=2),
            ValueError,
            errors.ShapeError,
            "to have the same batch size.*Bq=3 and Bkv=2",
        ),
        (
            lambda: [*qkv()[:1], *qkv(qk_dim=4)[1:]],
            ValueError,
            errors.ShapeError,
            "the same embedding dimension; got E=8 and E=4",
        ),
        (
            lambda: [*qkv()[:2], qkv(kv_len=9)[2]],
            ValueError,
            errors.ShapeError,
            r"\(2, 4, 16, 8\) and value \(2, 4, 9, 8\)",
        ),
        (lambda: qkv(qk_dim=0), ValueError, errors.ShapeError, "at least 1"),
        (
            lambda: [*qkv()[:2], qkv(dtype=torch.bfloat16)[2]],
            ValueError,
            errors.DTypeError,
            "query: torch.float32, key: torch.float32, value: torch.bfloat16",
        ),
        (lambda: [x.int() for x in qkv()], ValueError, errors.DTypeError, "float16, bfloat16, float32 or float64"),
        (lambda: [*qkv()[:2], qkv(device="meta")[2]], ValueError, errors.DeviceError, "the same device type.*meta"),
        (lambda: [*qkv()[:2], qkv(device="meta")[2]], RuntimeError, errors.DeviceError, "query: cpu"),
        (lambda: [*qkv()[:2], [1.0]], TypeError, errors.CallError, "value must be a torch.Tensor; got list"),
        (lambda: [x.to_sparse() for x in qkv()], NotImplementedError, errors.UnsupportedError, "dense"),
    ],
)
def test_tensors_that_do_not_fit(tensors, builtin, ours, fragment):
    with pytest.raises(builtin, match=fragment) as caught:
        flex_attention(*tensors())
    assert isinstance(caught.value, ours)


def test_nested_tensors_are_named():
    nested = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 7, 8)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="NestedTensor"):
        flex_attention(nested, nested, nested)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(35, 2), (4, 3), (2, 4)])
def test_query_heads_must_be_a_multiple_of_kv_heads(q_heads, kv_heads):
    with pytest.raises(ValueError, match="multiple of kv heads for GQA"):
        flex_attention(*qkv(heads=q_heads, kv_heads=kv_heads), enable_gqa=True)


def test_mixed_dtypes_with_gradients_name_the_backward_pass():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="Backward pass with mixed query, key, and value dtype is not supported"):
        flex_attention(q.requires_grad_(), k, v.half())


def test_mixed_dtypes_run_under_autocast():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flex_attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, flex_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


# ---------------------------------------------------------------- scale
@pytest.mark.parametrize(
    ("scale", "builtin"),
    [
        ("1", TypeError),
        (torch.tensor(1.0), TypeError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (1j, TypeError),
    ],
)
def test_scale_must_be_a_finite_number(scale, builtin):
    with pytest.raises(builtin, match="scale must be"):
        flex_attention(*qkv(), scale=scale)


@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 1, 3.0, True])
def test_any_finite_scale_is_right(scale):
    q, k, v = qkv()
    expected = torch.softmax(q @ k.transpose(-1, -2) * scale, -1) @ v
    torch.testing.assert_close(flex_attention(q, k, v, scale=scale), expected, atol=2e-5, rtol=0)


# ---------------------------------------------------------------- masks
@pytest.mark.parametrize(("batch", "heads"), [(None, None), (1, 1), (3, 1), (1, 2), (3, 2)])
def test_masks_broadcast_over_batch_and_heads(batch, heads):
    q, k, v = qkv(batch=3, heads=2, q_len=12, kv_len=12, qk_dim=32)
    mask = create_block_mask(CAUSAL, batch, heads, 12, 12, device="cpu")
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v, mask_mod=CAUSAL))


@pytest.mark.parametrize(("batch", "heads"), [(2, 1), (4, 1), (1, 4), (3, 3)])
def test_masks_of_other_sizes_are_refused_naming_both(batch, heads):
    q, k, v = qkv(batch=3, heads=2, q_len=12, kv_len=12, qk_dim=32)
    mask = create_block_mask(CAUSAL, batch, heads, 12, 12, device="cpu")
    with pytest.raises(ValueError, match=rf"shape=\({batch}, {heads}, 12, 12\) and query \(3, 2, 12, 32\)"):
        flex_attention(q, k, v, block_mask=mask)


@pytest.mark.parametrize(
    ("lengths", "word"),
    [((8, 16), "smaller"), ((16, 8), "smaller"), ((32, 16), "larger"), ((16, 32), "larger"), ((32, 32), "larger")],
)
def test_mask_lengths_must_match(lengths, word):
    mask = create_block_mask(CAUSAL, None, None, *lengths, device="cpu")
    with pytest.raises(ValueError, match=r"block_mask was created for block_mask\.shape=") as caught:
        flex_attention(*qkv(), block_mask=mask)
    assert word in str(caught.value)
    assert "q_len=16 and kv_len=16" in str(caught.value)


def test_torchs_sign_of_no_mask_fits_every_length():
    """torch hands one block of 2**30 tokens around where no mask was given; a mask_mod given with it still counts."""
    q, k, v = qkv(q_len=5, kv_len=9)
    for mask in (
        torch_flex._create_empty_block_mask(q, k),
        BlockMask.from_torch(torch_flex._create_empty_block_mask(q, k)),
    ):
        assert torch.equal(flex_attention(q, k, v, block_mask=mask), flex_attention(q, k, v))
        both = flex_attention(q, k, v, block_mask=mask, mask_mod=CAUSAL)
        assert torch.equal(both, flex_attention(q, k, v, mask_mod=CAUSAL))
        assert prepare((q, k, v), None, (mask, None))[0].block_mask is None


def test_mask_on_another_device():
    mask = create_block_mask(CAUSAL, None, None, 16, 16, device="cpu")
    with pytest.raises(RuntimeError, match="Expect q/k/v and block_mask to be on the same device; got meta and cpu"):
        flex_attention(*qkv(device="meta"), block_mask=mask)


def test_tensors_without_data_are_refused():
    with pytest.raises(ValueError, match="only supported on devices that compute; got meta tensors"):
        flex_attention(*qkv(device="meta"))


def test_captured_tensor_on_another_device():
    bias = torch.zeros(16, device="meta")
    with pytest.raises(
        RuntimeError,
        match=r"captured by score_mod must be on query's device; got captured tensor `bias` of shape \(16,\) on meta",
    ):
        flex_attention(*qkv(), score_mod=lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx])


@pytest.mark.parametrize(
    ("arguments", "builtin", "fragment"),
    [
        ({"block_mask": CAUSAL}, TypeError, "block_mask must be a BlockMask; got function. Try: mask_mod="),
        ({"block_mask": 3}, TypeError, "block_mask must be a BlockMask; got int"),
        ({"score_mod": CAUSAL}, AssertionError, "score_mod must have the form .*mask_mod="),
        (
            {"mask_mod": lambda score, b, h, q_idx, kv_idx: score},
            AssertionError,
            "mask_mod must have the form .*score_mod=",
        ),
        ({"score_mod": 1.0}, TypeError, "score_mod must be callable"),
        ({"mask_mod": lambda b, h, q_idx, kv_idx: q_idx * 0.5}, AssertionError, "bool"),
    ],
)
def test_mods_and_masks_of_the_wrong_kind(arguments, builtin, fragment):
    with pytest.raises(builtin, match=fragment):
        flex_attention(*qkv(), **arguments)


def test_error_in_a_mod_names_the_line():
    def branching(score, b, h, q_idx, kv_idx):
        if q_idx > kv_idx:
            return score
        return score * 2

    with pytest.raises(errors.TraceError, match=r"test_validate.py:\d+: .*torch.where"):
        flex_attention(*qkv(), score_mod=branching)


# ---------------------------------------------------------------- outputs asked for
def test_return_lse_and_return_aux_exclude_each_other():
    with pytest.raises(ValueError, match="Cannot specify both return_lse and return_aux"):
        flex_attention(*qkv(), return_lse=True, return_aux=AuxRequest(lse=True))


def test_return_lse_warns_once():
    settings.forget_warnings()
    with pytest.warns(FutureWarning, match="return_lse is deprecated"):
        flex_attention(*qkv(), return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(*qkv(), return_lse=True)


def test_return_aux_must_be_a_request():
    with pytest.raises(TypeError, match="return_aux must be an AuxRequest; got bool"):
        flex_attention(*qkv(), return_aux=True)


# ---------------------------------------------------------------- kernel_options
def test_options_default_and_prefixes():
    assert parse_options(None) is DEFAULT
    assert parse_options({}) == KernelOptions()
    both = parse_options({"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "num_stages": 3})
    assert both.forward == TileOptions(BLOCK_M=64, BLOCK_N=32, num_stages=3)
    assert both.backward == TileOptions(BLOCK_M=64, BLOCK_M1=16, num_stages=3)
    for order in (["BLOCK_M", "fwd_BLOCK_M"], ["fwd_BLOCK_M", "BLOCK_M"]):
        chosen = parse_options({key: {"BLOCK_M": 64, "fwd_BLOCK_M": 128}[key] for key in order})
        assert (chosen.forward.BLOCK_M, chosen.backward.BLOCK_M) == (128, 64)
    assert hash(both) == hash(parse_options({"BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 16, "num_stages": 3}))


@pytest.mark.parametrize(
    ("options", "builtin", "fragment"),
    [
        ({"BLOK_M": 64}, ValueError, "unknown key; got 'BLOK_M'. Try: BLOCK_M"),
        ({"bwd_BLOCKM1": 64}, ValueError, "Try: bwd_BLOCK_M1"),
        ({"zzz": 1}, ValueError, "unknown key.*one of"),
        ({3: 1}, ValueError, "strings"),
        ({"BLOCK_M": 48}, ValueError, "power of 2 and at least 16; got 48"),
        ({"BLOCK_N": 8}, ValueError, "at least 16"),
        ({"num_warps": 3}, ValueError, "power of 2"),
        ({"num_stages": 0}, ValueError, "at least 1"),
        ({"BLOCK_M": "64"}, ValueError, "must be an int"),
        ({"BACKEND": "CUDNN"}, ValueError, "Invalid BACKEND value 'CUDNN'. Must be one of"),
        ({"BACKEND": None}, ValueError, "Invalid BACKEND"),
        ({"OUTPUT_LOGSUMEXP": True}, AssertionError, "OUTPUT_LOGSUMEXP must not be in kernel_options"),
        ({"OUTPUT_MAX": True}, AssertionError, "OUTPUT_MAX must not be in kernel_options"),
        ({"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True}, RuntimeError, "BACKEND cannot be combined with legacy"),
        ({"BACKEND": "FLASH"}, RuntimeError, "BACKEND='FLASH' but flash attention cannot be used"),
    ],
)
def test_options_that_are_wrong(options, builtin, fragment):
    with pytest.raises(builtin, match=fragment) as caught:
        flex_attention(*qkv(), kernel_options=options)
    assert isinstance(caught.value, errors.OptionError)


def test_options_that_are_no_dictionary():
    with pytest.raises(errors.CallError, match="kernel_options must be a dictionary; got int"):
        flex_attention(*qkv(), kernel_options=3)


def test_flash_has_no_max_scores():
    with pytest.raises(NotImplementedError, match="Returning max scores is not supported with BACKEND='FLASH'"):
        flex_attention(*qkv(), kernel_options={"BACKEND": "FLASH"}, return_aux=AuxRequest(max_scores=True))


def test_decode_is_for_short_queries():
    with pytest.raises(RuntimeError, match="flex_decoding cannot be used for this input; got q_len=200"):
        flex_attention(*qkv(q_len=200), kernel_options={"BACKEND": "TRITON_DECODE"})


@pytest.mark.parametrize("value", [0, 257, True, "two"])
def test_parts_of_the_keys_are_a_whole_number(value):
    with pytest.raises(errors.OptionError, match=r"\['fwd_SPLIT_KV'\] must be an int from 1 to 256"):
        flex_attention(*qkv(), kernel_options={"fwd_SPLIT_KV": value})


def test_triton_on_the_cpu_is_not_replaced_in_silence(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"BACKEND='TRITON' was specified but cannot be used.*TRITON_INTERPRET=1"):
        flex_attention(*qkv(), kernel_options={"BACKEND": "TRITON"})


@pytest.mark.parametrize(
    "name",
    [
        "ROWS_GUARANTEED_SAFE",
        "BLOCKS_ARE_CONTIGUOUS",
        "WRITE_DQ",
        "PRESCALE_QK",
        "USE_TMA",
        "kpack",
        "waves_per_eu",
    ],
)
def test_options_without_meaning_warn_once_and_change_nothing(name):
    settings.forget_warnings()
    q, k, v = qkv()
    empty_rows = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx > 3)
    plain = flex_attention(q, k, v, mask_mod=empty_rows)
    with pytest.warns(UserWarning, match=rf"\['fwd_{name}'\] has no effect here"):
        out = flex_attention(q, k, v, mask_mod=empty_rows, kernel_options={f"fwd_{name}": True})
    assert torch.equal(out, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(q, k, v, kernel_options={name: False})


def test_tiles_must_divide_the_blocks_of_a_list_mask(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    counts, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    listed = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=96, seq_lengths=(96, 96))
    for mask, refused in (
        (listed, True),
        (create_block_mask(CAUSAL, None, None, 96, 96, device="cpu", BLOCK_SIZE=96), False),
    ):
        arguments = (qkv(q_len=96, kv_len=96), None, (mask, None))
        options = {"BACKEND": "TRITON", "BLOCK_M": 64}
        if not refused:
            assert prepare(*arguments, options=options)[1].backend == "triton"
            continue
        with pytest.raises(ValueError, match=r"must be divisible by BLOCK_M and BLOCK_N; got BLOCK_SIZE=\(96, 96\)"):
            prepare(*arguments, options=options)


def test_tiles_on_the_torch_path_are_announced_as_unused():
    settings.forget_warnings()
    flexattn.runtime.plan._plan.cache_clear()
    with pytest.warns(UserWarning, match="BLOCK_M: no effect on the torch-ops path"):
        flex_attention(*qkv(), kernel_options={"BLOCK_M": 32, "BACKEND": "TORCH"})


# ---------------------------------------------------------------- the choice of a backend
CUDA = Device("cuda", (9, 0))


@pytest.mark.parametrize(
    ("dtype", "device", "wanted", "interpret", "backend"),
    [
        (torch.bfloat16, CUDA, "AUTO", False, "triton"),
        (torch.float16, CUDA, "AUTO", False, "triton"),
        (torch.float32, CUDA, "AUTO", False, "triton"),
        (torch.float32, CUDA, "TORCH", False, "torch"),
        (torch.float32, Device("cpu"), "AUTO", False, "torch"),
        (torch.float32, Device("cpu"), "AUTO", True, "torch"),
        (torch.float32, Device("cpu"), "TRITON", True, "triton"),
    ],
)
def test_backend_choice(dtype, device, wanted, interpret, backend):
    settings.forget_warnings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(dtype, device, wanted, interpret=interpret)[0] == backend


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, CUDA), (torch.float32, Device("xpu"))])
def test_slow_choices_are_announced_once(dtype, device):
    settings.forget_warnings()
    with pytest.warns(flexattn.FlexPerformanceWarning, match="torch ops instead of a fused kernel"):
        assert choose_backend(dtype, device, "AUTO", interpret=False)[0] == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_backend(dtype, device, "AUTO", interpret=False)
