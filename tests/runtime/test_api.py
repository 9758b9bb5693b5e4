"""flex_attention as a drop-in: torch's signature, torch's results, the oracle's where torch has none."""

from __future__ import annotations

import functools
import inspect
import math
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexattn
import flexattn.runtime.plan
from flexattn import AuxOutput, AuxRequest, BlockMask, create_block_mask, flex_attention
from flexattn.runtime import settings
from flexattn.runtime.reference import oracle
from tests.helpers import square_qkv

CAUSAL = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
qkv = functools.partial(square_qkv, requires_grad=False)
TABLE = torch.linspace(-1, 1, 4 * 80).view(4, 80)
IDS = torch.tensor([0] * 11 + [1] * 13 + [2] * 16)


def close(actual, expected, *, atol=2e-5):
    expected = expected.to(actual.dtype)
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= atol * max(1.0, expected.abs().max())


# ---------------------------------------------------------------- the surface
@pytest.mark.parametrize(
    "name", ["flex_attention", "create_block_mask", "create_mask", "and_masks", "or_masks", "noop_mask"]
)
def test_signatures_begin_as_torchs_do(name):
    """Every parameter of torch's is ours, with its kind, position and default; what we add is optional."""
    ours = inspect.signature(getattr(flexattn, name)).parameters
    theirs = inspect.signature(getattr(torch_flex, name)).parameters
    positional = [p.name for p in theirs.values() if p.kind != p.KEYWORD_ONLY]
    assert list(ours)[: len(positional)] == positional or name in ("and_masks", "or_masks", "noop_mask")
    for p in theirs.values():
        if name in ("and_masks", "or_masks", "noop_mask"):
            assert any(mine.kind == p.kind for mine in ours.values())
            continue
        assert p.name in ours
        assert ours[p.name].kind == p.kind
        if p.name != "BLOCK_SIZE":
            assert ours[p.name].default == p.default
    extra = [p for p in ours.values() if p.name not in theirs and name.startswith(("flex", "create"))]
    assert all(p.default is not p.empty for p in extra)  # newer versions of torch have more than older ones


@pytest.mark.parametrize("name", ["AuxRequest", "AuxOutput"])
def test_named_tuples_equal_torchs(name):
    ours, theirs = getattr(flexattn, name), getattr(torch_flex, name)
    assert ours._fields == theirs._fields
    assert ours._field_defaults == theirs._field_defaults


def test_every_public_name_of_torch_is_ours():
    assert [name for name in torch_flex.__all__ if name not in flexattn.__all__ or not hasattr(flexattn, name)] == []


def test_every_kernel_option_of_torch_is_known():
    keys = set(torch_flex.FlexKernelOptions.__annotations__)
    assert keys <= set(flexattn.runtime.plan.KernelOptions.__dataclass_fields__) | set(flexattn.runtime.options._KNOWN)
    assert keys <= set(flexattn.FlexKernelOptions.__annotations__) <= set(flexattn.runtime.options._KNOWN)


# ---------------------------------------------------------------- results
def plain_bias(score, b, h, q_idx, kv_idx):
    return score + TABLE[h, q_idx - kv_idx + 39]


def softcap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def head_slope(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * torch.exp2(-2.0 * (h + 1))


SCORE_MODS = {
    "identity": lambda score, b, h, q_idx, kv_idx: score,
    "times two": lambda score, b, h, q_idx, kv_idx: score * 2,
    "squared": lambda score, b, h, q_idx, kv_idx: score * score,
    "causal by score": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")),
    "relative": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "slope": head_slope,
    "softcap": softcap,
    "table": plain_bias,
    "head gate": lambda score, b, h, q_idx, kv_idx: score * TABLE[h, 3],
    "batch offset": lambda score, b, h, q_idx, kv_idx: score + b * 0.25 - h / 3,
    "floor": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) // 7 - (q_idx - kv_idx) % 5,
    "same document": lambda score, b, h, q_idx, kv_idx: torch.where(IDS[q_idx] == IDS[kv_idx], score, score - 2.5),
    "sigmoid": lambda score, b, h, q_idx, kv_idx: torch.sigmoid(score) * 3 + (score.abs() + 0.5).sqrt(),
    "clamped": lambda score, b, h, q_idx, kv_idx: torch.clamp(score, -0.5, 0.5) + torch.minimum(score, score * 0.5),
    "constant": lambda score, b, h, q_idx, kv_idx: 1.5,
}
MASK_MODS = {
    "none": None,
    "causal": CAUSAL,
    "window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 9),
    "documents": lambda b, h, q_idx, kv_idx: (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx),
    "by head": lambda b, h, q_idx, kv_idx: (kv_idx % 4 == h) | (kv_idx == q_idx),
    "by batch": lambda b, h, q_idx, kv_idx: kv_idx < 5 + 7 * b,
    "floor": lambda b, h, q_idx, kv_idx: (
        ((q_idx - kv_idx) // 4 == -1) | ((q_idx - kv_idx) % 4 == 3) | (q_idx == kv_idx)
    ),
    "true": lambda b, h, q_idx, kv_idx: True,
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_agree_with_torch_and_the_oracle(name):
    q, k, v = qkv()
    score_mod = SCORE_MODS[name]
    out, aux = flex_attention(q, k, v, score_mod=score_mod, return_aux=AuxRequest(lse=True))
    expected, lse = oracle(q, k, v, score_mod=score_mod)
    close(out, expected)
    close(aux.lse, lse)
    if name != "constant":  # torch wants a tensor back
        close(out, _torch_eager(q, k, v, score_mod=score_mod))


@pytest.mark.parametrize("name", MASK_MODS)
def test_masks_agree_with_torch_and_the_oracle(name):
    q, k, v = qkv()
    mask_mod = MASK_MODS[name]
    out = flex_attention(q, k, v, mask_mod=mask_mod)
    close(out, oracle(q, k, v, mask_mod=mask_mod)[0])
    if name in ("causal", "documents", "by head", "by batch"):
        theirs = torch_flex.create_block_mask(mask_mod, 2, 4, 40, 40, device="cpu")
        close(out, _torch_eager(q, k, v, block_mask=theirs))
        close(flex_attention(q, k, v, block_mask=theirs), out)  # torch's BlockMask is accepted
    if mask_mod is not None:
        ours = create_block_mask(mask_mod, 2, 4, 40, 40, device="cpu", BLOCK_SIZE=16)
        close(flex_attention(q, k, v, block_mask=ours), out)


def _torch_eager(q, k, v, **kwargs):
    old = getattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch_flex.flex_attention(q, k, v, **kwargs)
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = old


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads", "kv_batch"), [(4, 4, 2), (6, 2, 1), (5, 1, 2)])
def test_groups_batches_and_dtypes(dtype, heads, kv_heads, kv_batch):
    q, k, v = qkv(heads=heads, kv_heads=kv_heads, kv_batch=kv_batch, q_len=33, kv_len=70, dtype=dtype)
    mods = {"score_mod": head_slope, "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx + 37 >= kv_idx) & (kv_idx != h + b)}
    out, aux = flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True, max_scores=True), **mods)
    expected, lse = oracle(q, k, v, **mods)
    close(
        out,
        expected,
        atol={torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-12}[dtype],
    )
    assert out.dtype == dtype
    assert aux.lse.dtype == aux.max_scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(aux.lse, lse, atol=1e-4 if dtype != torch.float64 else 1e-12)


def test_both_masks_mean_both():
    q, k, v = qkv()
    window = lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= 9
    mask = create_block_mask(CAUSAL, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    close(flex_attention(q, k, v, block_mask=mask, mask_mod=window), oracle(q, k, v, MASK_MODS["window"])[0])


def test_list_masks_keep_their_blocks():
    q, k, v = qkv(q_len=64, kv_len=64)
    counts = torch.tensor([[[1, 2, 1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 1, 3], [0, 3, 1, 2], [1, 0, 2, 3], [0, 1, 2, 3]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=16, mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 0
    )
    table = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    dense = lambda b, h, q_idx, kv_idx: table[q_idx // 16, kv_idx // 16] & ((q_idx + kv_idx) % 3 != 0)
    out = flex_attention(q, k, v, block_mask=mask)
    close(out, oracle(q, k, v, dense)[0])
    assert (out[:, :, 48:] == 0).all()


def test_callables_of_every_kind():
    q, k, v = qkv()

    class Window:
        def __init__(self, width):
            self.width = width

        def __call__(self, b, h, q_idx, kv_idx):
            return (q_idx - kv_idx).abs() <= self.width

    def scaled(factor, score, b, h, q_idx, kv_idx):
        return score * factor

    out = flex_attention(q, k, v, functools.partial(scaled, 0.5), mask_mod=Window(6))
    expected = oracle(q, k, v, lambda b, h, i, j: (i - j).abs() <= 6, lambda s, b, h, i, j: s * 0.5)[0]
    close(out, expected)


# ---------------------------------------------------------------- outputs
def test_outputs_by_request():
    q, k, v = qkv()
    settings.forget_warnings()
    plain = flex_attention(q, k, v)
    assert isinstance(plain, torch.Tensor)
    with pytest.warns(FutureWarning):
        out, lse = flex_attention(q, k, v, return_lse=True)
    close(lse, torch.logsumexp(q @ k.transpose(-1, -2) / 4, -1))
    for request, present in [
        (AuxRequest(), (False, False)),
        (AuxRequest(lse=True), (True, False)),
        (AuxRequest(max_scores=True), (False, True)),
        (torch_flex.AuxRequest(lse=True, max_scores=True), (True, True)),
    ]:
        out, aux = flex_attention(q, k, v, return_aux=request)
        assert isinstance(aux, AuxOutput)
        assert (aux.lse is not None, aux.max_scores is not None) == present
        close(out, plain)
    close(aux.max_scores, (q @ k.transpose(-1, -2) / 4).amax(-1))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
def test_output_has_querys_stride_order(order, grad):
    q, k, v = qkv()
    stored = q.permute(order).contiguous()
    q = stored.permute(torch.argsort(torch.tensor(order)).tolist()).requires_grad_(grad)
    out = flex_attention(q, k, v, mask_mod=CAUSAL)
    assert out.permute(order).is_contiguous()
    close(out, oracle(q, k, v, CAUSAL)[0])


def test_odd_strides():
    base = torch.randn(2, 40, 3, 4, 16)
    q, k, v = base.permute(2, 0, 3, 1, 4)
    close(flex_attention(q, k, v, mask_mod=CAUSAL), oracle(q, k, v, CAUSAL)[0])
    last = torch.randn(2, 4, 16, 40).transpose(-1, -2)
    close(flex_attention(q, last, v), oracle(q, last, v)[0])
    one = torch.randn(1, 1, 40, 16).expand(2, 4, 40, 16)
    close(flex_attention(one, one, one, mask_mod=CAUSAL), oracle(one, one, one, CAUSAL)[0])
    offset = torch.randn(2 * 4 * 40 * 16 + 1)[1:].view(2, 4, 40, 16)
    close(flex_attention(offset, offset, offset), oracle(offset, offset, offset)[0])


# ---------------------------------------------------------------- contract: empty rows, sizes of zero
@pytest.mark.parametrize(
    ("sizes", "empty"),
    [
        ({"batch": 0}, "none"),
        ({"q_len": 0}, "none"),
        ({"kv_len": 0}, "rows"),
        ({"q_len": 0, "kv_len": 0}, "none"),
        ({"heads": 0}, "none"),
    ],
)
@pytest.mark.parametrize("mods", [{}, {"mask_mod": CAUSAL}, {"score_mod": softcap}])
def test_sizes_of_zero(sizes, empty, mods):
    q, k, v = (x.requires_grad_() for x in qkv(**sizes))
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True), **mods)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert aux.lse.shape == aux.max_scores.shape == q.shape[:3]
    assert (out == 0).all()
    assert (aux.lse == -math.inf).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in (q, k, v))
    assert (out.numel() > 0) == (empty == "rows")


@pytest.mark.parametrize("sizes", [{"q_len": 0}, {"kv_len": 0}, {"batch": 0}])
def test_sizes_of_zero_with_a_block_mask(sizes):
    q, k, v = qkv(**sizes)
    mask = create_block_mask(CAUSAL, None, None, q.shape[2], k.shape[2], device="cpu")
    out = flex_attention(q, k, v, block_mask=mask)
    assert out.shape == (*q.shape[:3], 24)
    assert (out == 0).all()


@pytest.mark.parametrize("by", ["mask", "block mask", "score"])
def test_rows_without_a_key(by):
    q, k, v = qkv()
    keep = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx >= 20)
    arguments = {
        "mask": {"mask_mod": keep},
        "block mask": {"block_mask": create_block_mask(keep, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)},
        "score": {"score_mod": lambda score, b, h, i, j: torch.where(keep(b, h, i, j), score, -math.inf)},
    }[by]
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True, max_scores=True), **arguments)
    expected, lse = oracle(q, k, v, keep)
    close(out, expected)
    assert (out[:, :, :20] == 0).all()
    assert (aux.lse[:, :, :20] == -math.inf).all()
    assert (aux.max_scores[:, :, :20] == -math.inf).all()
    close(aux.lse[:, :, 20:], lse[:, :, 20:])


def test_mask_that_keeps_nothing():
    q, k, v = qkv()
    out, aux = flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: False, return_aux=AuxRequest(lse=True))
    assert (out == 0).all()
    assert (aux.lse == -math.inf).all()


@pytest.mark.parametrize("qk_dim", [1, 4, 17, 121, 320])
def test_any_head_dim(qk_dim):
    q, k, v = qkv(qk_dim=qk_dim, v_dim=qk_dim + 3)
    close(flex_attention(q, k, v, mask_mod=CAUSAL), oracle(q, k, v, CAUSAL)[0])


def test_lengths_of_every_kind():
    for q_len, kv_len in [(1, 1), (1, 129), (129, 1), (17, 255), (255, 17), (128, 128), (131, 260)]:
        q, k, v = qkv(batch=1, heads=2, q_len=q_len, kv_len=kv_len)
        bottom_right = lambda b, h, q_idx, kv_idx, d=kv_len - q_len: q_idx + d >= kv_idx
        close(flex_attention(q, k, v, mask_mod=bottom_right), oracle(q, k, v, bottom_right)[0])


# ---------------------------------------------------------------- what calls see
def test_changes_between_calls_are_seen():
    q, k, v = qkv()
    state = {"width": 3, "bias": torch.zeros(40)}
    mods = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + state["bias"][kv_idx],
        "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= state["width"],
    }
    for width, fill in [(3, 0.0), (0, 1.0), (39, -2.0), (3, 1.0), (3.0, 0.5), (-1, 0.0)]:
        state["width"] = width
        state["bias"].copy_(torch.linspace(0, fill, 40))
        close(flex_attention(q, k, v, **mods), oracle(q, k, v, mods["mask_mod"], mods["score_mod"])[0])


def test_captured_mask_table_changed_in_place():
    q, k, v = qkv()
    cut = torch.tensor([5, 30])
    mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < cut[b]
    mask = create_block_mask(mask_mod, 2, None, 40, 40, device="cpu")
    close(flex_attention(q, k, v, block_mask=mask), oracle(q, k, v, mask_mod)[0])
    cut += 6
    close(flex_attention(q, k, v, mask_mod=mask_mod), oracle(q, k, v, mask_mod)[0])


def test_inference_mode_then_training():
    q, k, v = qkv()
    with torch.inference_mode():
        first = flex_attention(q, k, v, softcap, mask_mod=MASK_MODS["documents"])
        causal = flex_attention(q, k, v, mask_mod=CAUSAL)
    q.requires_grad_()
    second = flex_attention(q, k, v, softcap, mask_mod=MASK_MODS["documents"])
    second.sum().backward()
    flex_attention(q, k, v, mask_mod=CAUSAL).sum().backward()
    close(first, second.detach())
    close(causal, oracle(q, k, v, CAUSAL)[0].detach())


def test_autocast_keeps_float32_sums():
    q, k, v = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, aux = flex_attention(q, k, v, mask_mod=CAUSAL, return_aux=AuxRequest(lse=True))
    assert out.dtype == torch.bfloat16
    rounded = [x.bfloat16() for x in (q, k, v)]
    close(aux.lse, oracle(*rounded, CAUSAL)[1], atol=1e-5)


# ---------------------------------------------------------------- the same road with kernels
@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["none", "documents", "by batch"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_kernels_agree_with_the_oracle(name, mask, monkeypatch):
    for table in ("TABLE", "IDS"):
        monkeypatch.setitem(globals(), table, globals()[table].cuda())
    tensors = [x.cuda().requires_grad_() for x in qkv()]
    mods = {"score_mod": SCORE_MODS[name], "mask_mod": MASK_MODS[mask]}
    out, aux = flex_attention(*tensors, return_aux=AuxRequest(lse=True, max_scores=True), **mods)
    expected, lse = oracle(*tensors, **mods)
    weight = torch.randn_like(out)
    close(out, expected)
    close(aux.lse, lse)
    grads = [torch.autograd.grad((x * weight).sum(), tensors, allow_unused=True) for x in (out, expected)]
    for got, want, leaf in zip(*grads, tensors):
        close(got, torch.zeros_like(leaf) if want is None else want, atol=1e-4)


@pytest.mark.gpu
def test_kernels_run_under_torch_compile_and_in_querys_order():
    q, k, v = (x.cuda().transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(dtype=torch.bfloat16))
    flexattn.reset_stats()
    out = torch.compile(flex_attention, backend="eager")(q, k, v, mask_mod=CAUSAL)
    assert out.transpose(1, 2).is_contiguous()
    assert flexattn.stats().launches["forward"] == 1
    close(out, oracle(q, k, v, CAUSAL)[0], atol=2e-2)


@pytest.mark.gpu
def test_a_scalar_on_the_cpu_follows_the_query():
    q, k, v = (x.cuda() for x in qkv())
    slope, width = torch.tensor(0.5, requires_grad=True), torch.tensor(9)
    mods = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score * slope,
        "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= width,
    }
    out = flex_attention(q, k, v, **mods)
    close(out, oracle(q, k, v, lambda b, h, i, j: (i - j).abs() <= 9, lambda s, b, h, i, j: s * 0.5)[0])
    out.square().sum().backward()
    assert slope.grad.device.type == "cpu"
    assert slope.grad != 0


@pytest.mark.gpu
def test_float64_on_a_gpu_is_announced_and_right():
    q, k, v = (x.cuda() for x in qkv(dtype=torch.float64))
    settings.forget_warnings()
    flexattn.runtime.plan._plan.cache_clear()
    with pytest.warns(flexattn.FlexPerformanceWarning, match="float64 has no kernel"):
        out = flex_attention(q, k, v, mask_mod=CAUSAL)
    close(out, oracle(q, k, v, CAUSAL)[0], atol=1e-12)


@pytest.mark.parametrize(
    "name, hint", [("mask", "mask_mod="), ("blockmask", "block_mask="), ("score_modd", "score_mod=")]
)
def test_a_misspelt_argument_says_what_is_meant(name: str, hint: str) -> None:
    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(TypeError, match=f"no argument '{name}'") as caught:
        flexattn.flex_attention(x, x, x, **{name: lambda *a: a[0]})
    assert hint in str(caught.value)
