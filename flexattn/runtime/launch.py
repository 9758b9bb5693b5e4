"""A Problem and a Plan -> kernel launches: makes span tables and arguments, allocates results, starts kernels.

The idea: which kernel runs (choose.py) rests on facts alone; lengths and strides go in as arguments. A launch that is ready
keeps those, so that another call of the same sizes gives it only tensors and captured values. Each of the kernels has one
function `start` that allocates results and starts a ready launch; autotuning calls it with several and drops their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.codegen.hopper_tiles import piece_rows
from flexattn.codegen.spec import (
    BY_COLUMN,
    KernelSpec,
    TensorLayout,
    capture_layout,
    fresh_layout,
    tensor_layout,
    wide_number,
)
from flexattn.codegen.tile_config import TileConfig, delta_config, padded
from flexattn.errors import CompileError
from flexattn.runtime import decode, settings
from flexattn.runtime import device as devices
from flexattn.runtime.choose import (
    APART,
    FUSED,
    PORTABLE,
    Chosen,
    backward_kernels,
    bound,
    choose,
    forget_hopper,
    forget_hopper_backward,
    forward_kernel,
    likely_backward_kernels,
    likely_tiles,
    possible_backward_kernels,
    unbuilt,
)
from flexattn.runtime.compile import Starts, build_ahead, first_that_builds, flat_arguments, keep_ready
from flexattn.runtime.cut_values import cut_values
from flexattn.runtime.options import must_be_deterministic
from flexattn.runtime.plan import Needs, Plan, Problem, dense_strides, stride_order
from flexattn.runtime.tables import Cut, prepare_tables, table_of

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask

_LINE_LIMIT = (1 << 31) - 1
_NO_DECODE = "decode kernel not built"  # key of a plan's memo
_STATISTICS = 128  # of rows come in multiples of these for Hopper, which all query tiles of its kernels divide


# ---------------------------------------------------------------- public
def forward(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Runs the forward kernel.

    Args:
        problem: One call; q, k, v of bfloat16, float16 or float32 with at least one query and one key.
        plan: Of that call.

    Returns:
        out [batch, q_heads, q_len, v_dim] in q's dtype and stride order, lse [batch, q_heads, q_len] float32 in natural
        log, and max_scores of that shape or None.

    Raises:
        CompileError: No configuration could be built.
        OptionError: kernel_options names tiles that are not legal here.
    """
    q = problem.q
    order, problem = _unit_order(q), _with_unit_strides(problem)  # the order of its dimensions is out's
    out_shape = (*q.shape[:3], problem.v.shape[3])

    start = lambda ready: _start_forward(problem, plan, ready, order)

    with devices.current(q.device):
        if decode.decode_choice(problem, devices.target_for(q.device))[0]:
            try:
                if _NO_DECODE not in plan.memo:
                    return decode.forward(problem, plan, order, lambda: _inputs(problem), lambda: _fixed(problem))
            except CompileError as error:
                if problem.options.backend == "TRITON_DECODE":
                    raise
                plan.memo[_NO_DECODE] = True
                said = f"the decode kernel could not be built, and the forward kernel runs: {error}"
                settings.warn_once(_NO_DECODE, said, settings.FlexPerformanceWarning)
            problem = problem.dense()
        fixed = lambda: {"out_strides": dense_strides(out_shape, order)}
        try:
            return _run(problem, plan, "forward", start, fixed, (order,), want_max=problem.want_max)
        except CompileError as error:
            if problem.pages is None:
                raise
            said = f"the forward kernel over pages could not be built, and keys and values are copied first: {error}"
        settings.warn_once(said, said, settings.FlexPerformanceWarning)
        forget_hopper(problem, plan)
        return forward(problem.dense(), plan)


def _start_forward(
    problem: Problem, plan: Plan, ready: Ready, order: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Allocates out, in that order of dimensions, lse and max_scores, and starts a forward kernel."""
    q, pages = problem.q, problem.pages
    out = torch.empty_permuted((*q.shape[:3], problem.v.shape[3]), order, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    peaks = torch.empty_like(lse) if problem.want_max else None
    results = {"OUT": out, "LSE": lse, "MAX": lse if peaks is None else peaks}
    if ready.spec.is_queued:
        results["COUNTER"] = devices.counter_of(q.device)
    if pages is not None:
        results["V_CUT"] = cut_values(pages, plan, piece_rows(ready.cut.kv_tile, pages.page_size))
    ready.launch({**_inputs(problem), **_table(problem, ready), **results}, device=q.device)
    return out, lse, peaks


def ready_forward(problem: Problem, plan: Plan) -> Callable[[Problem], tuple[Tensor, Tensor, Tensor | None]] | None:
    """What starts the forward kernel for calls that differ from this one, which has run, in the memory of their tensors alone: such
    a call chooses nothing. None where a call does more than start one kernel over the tensors that it is given.

    Example:
        >>> start = ready_forward(problem, plan)  # doctest: +SKIP
        >>> out, lse, max_scores = start(problem.bind(q, k, v, problem.captures))  # doctest: +SKIP
    """
    q, order = problem.q, _unit_order(problem.q)
    if any(x.stride(3) != 1 for x in (q, problem.k, problem.v)) or problem.lengths is not None:
        return None
    with devices.current(q.device):
        if decode.decode_choice(problem, devices.target_for(q.device))[0]:
            return None
        ready = plan.memo.get("ready", {}).get(("forward", _sizes(problem), None, order, problem.want_max))
    if ready is None:
        return None

    def start(problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        with devices.current(q.device):
            return _start_forward(problem, plan, ready, order)

    return start


def backward(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[Tensor | None, ...]]:
    """Runs the backward kernels that are needed.

    Args:
        problem, plan: Of the forward call.
        out, lse: What it returned.
        d_out: Gradient of out, any strides.
        d_lse: Gradient of lse, or None.
        needs: Whether q, k, v and each captured tensor of score_mod needs a gradient.

    Returns:
        Gradients in the inputs' dtypes, None where not needed. dk and dv have k's and v's own batch size: where it is 1
        they are summed over the batch inside the kernel, in float32.
    """
    need_q, need_k, need_v, need_captures = needs
    problem = _with_unit_strides(problem)
    with devices.current(problem.q.device):
        d_out = d_out.to(out.dtype)
        if d_out.stride(3) != 1 or not tensor_layout(d_out).is_aligned:
            d_out = d_out.clone(memory_format=torch.contiguous_format)
        if out.stride(3) != 1:  # out follows query's order of dimensions, and the last one may not be innermost there
            out = out.contiguous()
        while (kernels := backward_kernels(problem, plan, tensor_layout(d_out), needs)[0]) != PORTABLE:
            try:
                common = run_delta(problem, plan, out, lse, d_out, d_lse, _whole_rows(out.shape[2]))
                run = run_fused if kernels == FUSED else run_apart
                results = run(problem, plan, common, needs)
                return (*results, run_dq(problem, plan, common, False, need_captures)[1])
            except CompileError:
                forget_hopper_backward(problem, plan, tensor_layout(d_out), kernels)
        common = run_delta(problem, plan, out, lse, d_out, d_lse)
        dq, sums = run_dq(problem, plan, common, need_q, need_captures)
        dk, dv = run_dkdv(problem, plan, common, need_k, need_v)
    return dq, dk, dv, sums


def make_tile_maps(problem: Problem, plan: Plan) -> None:
    """Makes the span tables that forward and backward will look up, all together, so that backward builds nothing and sees no
    later change of a mask.

    Before a call is autotuned those are the tables of every configuration that will be timed.

    Args:
        problem, plan: One call that may need gradients.
    """
    mask, begun = problem.block_mask, ("begun", problem.q.device.index)
    if mask is None and begun in plan.memo:  # then lengths say everything
        return
    wanted = tuple(x.requires_grad for x in (problem.q, problem.k, problem.v, *problem.captures))
    ready = ("ready", id(plan), wanted, must_be_deterministic(problem.options))
    predicate = None if mask is None else mask.predicate
    if predicate is not None and ready in predicate.tables:
        return
    forward_one, _ = forward_kernel(problem, plan)
    likely, _ = likely_backward_kernels(problem, plan)
    if begun not in plan.memo:
        plan.memo[begun] = True
        _build_ahead(problem, plan, (forward_one, *likely))
    if mask is None:
        return
    _make_tables(problem, plan, mask, (forward_one, *possible_backward_kernels(problem, plan)))
    if predicate is not None and predicate.reusable and not devices.is_capturing(problem.q.device):
        predicate.tables[ready] = plan  # kept, so that no other plan gets its id


def _build_ahead(problem: Problem, plan: Plan, kernels: Sequence[str]) -> None:
    """Starts compiling those kernels that a plan's first call will wait for, while its tables, with kernels of their own, are made;
    the first kernel, which is waited for most, has Python to itself until it is translated."""
    device = problem.q.device
    for kernel in kernels:
        spec = unbuilt(problem, plan, kernel)
        if spec is None:
            continue
        translated = build_ahead(spec, device)
        if kernel == kernels[0]:
            translated.wait()
        if kernel in (*FUSED, *APART, *PORTABLE):
            build_ahead(_delta_spec(spec.v_dim, problem.q.dtype, spec.layouts[3], False, device), device)
        if kernel == "hopper_backward":
            build_ahead(_dq_spec(spec, problem.q), device)


def _make_tables(problem: Problem, plan: Plan, mask: BlockMask, kernels: Sequence[str]) -> None:
    tiles = [(kernel, config) for kernel in dict.fromkeys(kernels) for config in likely_tiles(problem, plan, kernel)]
    prepare_tables(problem, mask, tuple(dict.fromkeys(_cut(config, kernel in BY_COLUMN) for kernel, config in tiles)))


def _with_unit_strides(problem: Problem) -> Problem:
    """The problem over copies of those inputs whose last dimension is not contiguous; each would be read many times."""
    if problem.q.stride(3) == problem.k.stride(3) == problem.v.stride(3) == 1:
        return problem
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    copied = {name: x.contiguous() for name, x in tensors.items() if x.stride(3) != 1 and x.shape[3] > 1}
    if not copied:
        return problem
    names = " and ".join({"q": "query", "k": "key", "v": "value"}[name] for name in copied)
    settings.warn_once(
        f"copies {names}",
        f"flex_attention copies {names} at every call: the last dimension is not contiguous. Try: .contiguous() once",
        settings.FlexPerformanceWarning,
    )
    q, k, v = (copied.get(name, x) for name, x in tensors.items())
    return problem.bind(q, k, v, problem.captures)


# ---------------------------------------------------------------- launches that are ready
_EACH_CALL = ("caps", "sums", "batch_step", "head_step")  # arguments that follow tensors and values, not sizes


class Ready(NamedTuple):
    """A launch for calls of certain sizes, and the kernel it starts."""

    launch: Starts
    spec: KernelSpec
    cut: Cut  # of the table it walks
    in_order: bool  # programs that sum over several lines of the table need one order of tiles in all of them


def _run(
    problem: Problem, plan: Plan, kernel: str, start: Callable[[Ready], Any], fixed: Callable[[], dict[str, Any]],
    key: tuple[Any, ...], *, common: Common | None = None, **wants: Any,
) -> Any:  # fmt: skip
    """Starts the launch of a kernel that is ready for these sizes, or makes it ready.

    Args:
        problem, plan: One call.
        kernel: 'forward', of which there are two, or one that makes gradients.
        start: Allocates results and starts the launch it is given.
        fixed: Makes the arguments that this kernel has beside those of every kernel, as far as they are sizes.
        key: What `fixed` rests on beside the sizes of q, k and v.
        common: Of a backward kernel, what it shares with the others.
        wants: Fields of the kernel's spec.
    """
    sizes = (_sizes(problem), None) if common is None else common.sizes
    whole_key = (kernel, *sizes, *key, *wants.values())
    known: dict[Any, Ready] = plan.memo.setdefault("ready", {})
    ready = known.get(whole_key)
    if ready is not None:
        return start(ready)
    d_out = None if common is None else common.arguments["D_OUT"]
    layout, steps = (None, {}) if d_out is None else (tensor_layout(d_out), {"d_out_strides": d_out.stride()})
    arguments = {**_fixed(problem), **fixed(), **steps, **_inputs(problem), "D_OUT": d_out}

    def make(kernel: str) -> Ready:
        of = lambda chosen: _ready(problem, kernel, chosen, arguments)
        return of(choose(problem, plan, kernel, lambda chosen: start(of(chosen)), d_out=layout, **wants))

    ready = _forward_ready(problem, plan, make) if kernel == "forward" else make(kernel)
    if not devices.is_capturing(problem.q.device):  # a call then times nothing, a later one may
        keep_ready(known, whole_key, ready)
    return start(ready)


def _forward_ready(problem: Problem, plan: Plan, make: Callable[[str], Ready]) -> Ready:
    """A launch of the kernel for Hopper where it serves and builds, else of the portable one; the table it walks is made while it is
    being compiled."""
    kernel, _ = forward_kernel(problem, plan)
    _build_ahead(problem, plan, (kernel,))
    if problem.block_mask is not None:
        _make_tables(problem, plan, problem.block_mask, (kernel,))
    try:
        return make(kernel)
    except CompileError:
        if kernel == "forward" or problem.options.warp_specialized or problem.pages is not None:
            raise
    forget_hopper(problem, plan)
    return make("forward")


def _ready(problem: Problem, kernel: str, chosen: Chosen, arguments: dict[str, Any]) -> Ready:
    q, k, config = problem.q, problem.k, chosen.config
    is_transposed = kernel in BY_COLUMN
    pairs = k.shape[0] * k.shape[1] if is_transposed else q.shape[0] * q.shape[1]
    length, tile = (k.shape[2], config.BLOCK_N) if is_transposed else (q.shape[2], config.BLOCK_M)
    lines = -(-length // tile)
    walk = {"pairs": pairs, "lines": lines, "swizzle": _swizzle(problem, pairs, lines, is_transposed)}
    if kernel in (*FUSED, *APART) and is_transposed:
        walk["q_tiles"] = _whole_rows(q.shape[2]) // config.BLOCK_M
    at_once = chosen.spec.target.processors if chosen.spec.is_queued else _LINE_LIMIT
    launch = chosen.kernel.fix(min(pairs * lines, at_once), {**arguments, **walk}, changing=_EACH_CALL)
    in_order = is_transposed and pairs != q.shape[0] * q.shape[1]
    return Ready(launch, chosen.spec, _cut(config, is_transposed), in_order)


def _cut(config: TileConfig, by_column: bool) -> Cut:
    return Cut(config.BLOCK_M, config.BLOCK_N, by_column)


def _sizes(problem: Problem) -> tuple[Any, ...]:
    """What the arguments that are not tensors or captured values follow from, and the facts that choose a kernel."""
    q, mask = problem.q, problem.block_mask
    captures, numbers = bound(problem)
    return (
        q.device.index, problem.scale, q.shape, problem.k.shape, problem.kv_len, problem.pages is None, _facts(q),
        _facts(problem.k), _facts(problem.v), problem.v.shape[3],
        None if mask is None or mask.predicate is not None else mask.BLOCK_SIZE,
        tuple(map(capture_layout, captures)), tuple(map(wide_number, numbers)),
    )  # fmt: skip


def _facts(x: Tensor) -> tuple[tuple[int, ...], int]:
    """What a launch's arguments and its kernel's layout facts rest on, beside the shape."""
    return x.stride(), x.data_ptr() % 16


# ---------------------------------------------------------------- arguments
def _inputs(problem: Problem) -> dict[str, Any]:
    """The tensors and captured values that every attention kernel has."""
    inputs = {"Q": problem.q, "K": problem.k, "V": problem.v, "caps": flat_arguments(*bound(problem))}
    pages = problem.pages
    if pages is None:
        return inputs
    lists = {"PAGES": pages.page_indices, "PAGE_STARTS": pages.page_starts, "KV_LENGTHS": pages.kv_lengths}
    scales = {"K_SCALE": pages.k_scale, "V_SCALE": pages.v_scale}
    return {**inputs, **lists, **{name: scale for name, scale in scales.items() if scale is not None}}


def _fixed(problem: Problem) -> dict[str, Any]:
    """The sizes that every attention kernel has."""
    q, k, v = problem.q, problem.k, problem.v
    return {
        "q_strides": q.stride(), "k_strides": _kv_strides(k), "v_strides": _kv_strides(v), "scale": float(problem.scale),
        "q_heads": q.shape[1], "group": q.shape[1] // k.shape[1], "q_len": q.shape[2], "kv_len": problem.kv_len,
    }  # fmt: skip


def _kv_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of k or v; a batch of 1 serves every query batch."""
    return (0 if x.shape[0] == 1 else x.stride(0), *x.stride()[1:])


def _table(problem: Problem, ready: Ready) -> dict[str, Any]:
    """The span table of the chosen tiles, and how programs find their line of it."""
    rows, extra, batch, heads = table_of(problem, ready.cut)
    if ready.in_order and (heads > 1 or batch > 1):
        order = rows[:, :, 0].argsort(1)
        rows = rows.gather(1, order[:, :, None].expand(rows.shape))
    steps = {"batch_step": heads if batch > 1 else 0, "head_step": 1 if heads > 1 else 0}
    return {"ROWS": rows, "EXTRA": extra, **steps}


def _swizzle(problem: Problem, pairs: int, lines: int, transposed: bool) -> int:
    """How many (batch, head) pairs are worked on together: as many as have what they stream in half of the L2 cache."""
    q, k, v = problem.q, problem.k, problem.v
    group = q.shape[1] // k.shape[1]
    row = (q.shape[3] + v.shape[3]) * q.element_size()
    streamed = row * (q.shape[2] * group if transposed else problem.kv_len)
    fitting = devices.target_for(q.device).l2_bytes // 2 // max(streamed, 1)
    unit = 1 if transposed else group
    return unit * _even(pairs // unit, max(1, min(fitting, _LINE_LIMIT // max(lines * unit, 1))))


def _even(count: int, most: int) -> int:
    """The size of parts, from half of `most` on, that leaves the fullest last part: long rows in a small last part run alone."""
    if most >= count:
        return max(1, count)
    return max(range(most // 2 + 1, most + 1), key=lambda size: ((count % size or size) / size, size))


# ---------------------------------------------------------------- backward kernels
class Common(NamedTuple):
    """What both gradient kernels have: tensors and captured values, and the key of everything that follows from sizes."""

    arguments: dict[str, Any]
    sizes: tuple[Any, ...]
    row_step: int  # from the statistics of one (batch, head) pair to the next


def run_delta(
    problem: Problem, plan: Plan, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, row_step: int | None = None
) -> Common:  # fmt: skip
    """Runs the pre-pass; returns what the gradient kernels take from it: of each (batch, head) pair row_step rows, q_len or
    more."""
    row_step = lse.shape[2] if row_step is None else row_step
    stats = lse.new_empty(2, lse.shape[0] * lse.shape[1] * row_step)
    launch = _delta_launch(plan, out, d_out, d_lse is not None, row_step)
    d_lse = lse if d_lse is None else d_lse.to(torch.float32).contiguous()
    terms = {"D_OUT": d_out, "ROW_LSE": stats[0], "DELTA": stats[1], "STATS": stats}
    launch({"OUT": out, "LSE": lse, "D_LSE": d_lse, **terms}, device=out.device)
    return Common({**_inputs(problem), **terms}, (_sizes(problem), _facts(d_out)), row_step)


def _delta_launch(plan: Plan, out: Tensor, d_out: Tensor, has_d_lse: bool, row_step: int) -> Starts:
    key = (out.device.index, out.shape, out.stride(), _facts(d_out), has_d_lse, row_step)
    known: dict[Any, Starts] = plan.memo.setdefault("delta", {})
    launch = known.get(key)
    if launch is None:
        batch, heads, q_len, v_dim = out.shape
        spec = _delta_spec(v_dim, out.dtype, tensor_layout(d_out), has_d_lse, out.device)
        _, kernel = first_that_builds([spec], out.device)
        lines = -(-row_step // spec.config.BLOCK_M)
        fixed = {
            "out_strides": out.stride(), "d_out_strides": d_out.stride(), "q_heads": heads, "q_len": q_len, "row_step": row_step,
            "pairs": batch * heads, "lines": lines,
        }  # fmt: skip
        launch = keep_ready(known, key, kernel.fix(batch * heads * lines, fixed))
    return launch


def _delta_spec(
    v_dim: int, dtype: torch.dtype, d_out: TensorLayout, has_d_lse: bool, device: torch.device
) -> KernelSpec:
    return KernelSpec(
        kernel="delta", target=devices.target_for(device), config=delta_config(padded(v_dim), dtype.itemsize), qk_dim=v_dim,
        v_dim=v_dim, layouts=(fresh_layout(dtype, v_dim),) * 3 + (d_out,), has_d_lse=has_d_lse,
    )  # fmt: skip


def run_fused(problem: Problem, plan: Plan, common: Common, needs: Needs) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, of which all are needed, by one kernel and its post-pass.

    Raises:
        CompileError: No configuration could be built.
    """
    q, k, v = problem.q, problem.k, problem.v
    rows = q.shape[0] * q.shape[1] * _whole_rows(q.shape[2])
    k_order, v_order = _unit_order(k), _unit_order(v)

    def start(ready: Ready) -> tuple[Tensor, Tensor, Tensor]:
        dk = torch.empty_permuted(k.shape, k_order, dtype=k.dtype, device=k.device)
        dv = torch.empty_permuted(v.shape, v_order, dtype=v.dtype, device=v.device)
        sums = torch.zeros(rows * padded(q.shape[3]) // 128, 128, dtype=torch.float32, device=q.device)
        results = {"DK": dk, "DV": dv, "DQ_SUMS": sums}
        if ready.spec.is_queued:
            results["COUNTER"] = devices.counter_of(q.device)
        ready.launch({**common.arguments, **_table(problem, ready), **results}, device=q.device)
        return _dq_of(sums, problem, plan, ready.spec), dk, dv

    fixed = lambda: {"repeats": q.shape[0] * q.shape[1] // (k.shape[0] * k.shape[1])}
    result: tuple[Tensor, Tensor, Tensor]
    result = _run(problem, plan, "hopper_backward", start, fixed, (k_order, v_order), common=common)
    return result


def run_apart(
    problem: Problem, plan: Plan, common: Common, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dq by one kernel for Hopper, dk and dv by another, each where it is needed.

    Raises:
        CompileError: No configuration could be built.
    """
    q, k, v = problem.q, problem.k, problem.v
    k_order, v_order = _unit_order(k), _unit_order(v)

    def start_query(ready: Ready) -> Tensor:
        dq = torch.empty_permuted(q.shape, _unit_order(q), dtype=q.dtype, device=q.device)
        ready.launch({**common.arguments, **_table(problem, ready), "DQ": dq}, device=q.device)
        return dq

    def start_key(ready: Ready) -> tuple[Tensor, Tensor]:
        dk = torch.empty_permuted(k.shape, k_order, dtype=k.dtype, device=k.device)
        dv = torch.empty_permuted(v.shape, v_order, dtype=v.dtype, device=v.device)
        ready.launch({**common.arguments, **_table(problem, ready), "DK": dk, "DV": dv}, device=q.device)
        return dk, dv

    dq = dk = dv = None
    of_query, of_keys = APART
    if needs[0]:
        fixed: Callable[[], dict[str, Any]] = lambda: {"row_step": common.row_step}
        dq = _run(problem, plan, of_query, start_query, fixed, (_unit_order(q), common.row_step), common=common)
    if needs[1] or needs[2]:
        fixed = lambda: {"repeats": q.shape[0] * q.shape[1] // (k.shape[0] * k.shape[1]), "DQ_SUMS": 0}  # no sums of dq
        dk, dv = _run(problem, plan, of_keys, start_key, fixed, (k_order, v_order), common=common)
    return dq, dk if needs[1] else None, dv if needs[2] else None


def _whole_rows(q_len: int) -> int:
    return -(-q_len // _STATISTICS) * _STATISTICS


def _dq_of(sums: Tensor, problem: Problem, plan: Plan, spec: KernelSpec) -> Tensor:
    """dq from the fused backward's sums."""
    q = problem.q
    dq = torch.empty_permuted(q.shape, _unit_order(q), dtype=q.dtype, device=q.device)
    key = (q.device.index, q.shape, dq.stride(), problem.scale, spec.config)
    known: dict[Any, Starts] = plan.memo.setdefault("fused dq", {})
    launch = known.get(key)
    if launch is None:
        _, kernel = first_that_builds([_dq_spec(spec, q)], q.device)
        pairs, lines = q.shape[0] * q.shape[1], _whole_rows(q.shape[2]) // spec.config.BLOCK_M
        fixed = {
            "dq_strides": dq.stride(), "scale": float(problem.scale), "q_heads": q.shape[1], "q_len": q.shape[2], "pairs": pairs,
            "lines": lines,
        }  # fmt: skip
        launch = keep_ready(known, key, kernel.fix(pairs * lines, fixed))
    launch({"DQ_SUMS": sums, "DQ": dq}, device=q.device)
    return dq


def _dq_spec(fused: KernelSpec, q: Tensor) -> KernelSpec:
    """The post-pass of a fused backward, which knows nothing of mods."""
    layouts = (fresh_layout(q.dtype, q.shape[3]),) * 4
    return replace(fused, kernel="hopper_dq", layouts=layouts, score=None, mask=None, captures=(), wide_numbers=())


def run_dq(
    problem: Problem, plan: Plan, common: Common, need_q: bool, need_captures: Sequence[bool]
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """dq and the sums of captured tensors; no launch where neither is needed."""
    q = problem.q
    slots = tuple(i for i, need in enumerate(need_captures) if need)
    if not need_q and not slots:
        return None, (None,) * len(need_captures)
    captures, order = problem.captures, _unit_order(q)

    def start(ready: Ready) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        dq = torch.empty_permuted(q.shape, order, dtype=q.dtype, device=q.device) if need_q else None
        sums = tuple(torch.zeros(captures[i].shape, dtype=ready.spec.sum_dtype, device=q.device) for i in slots)
        results = {"DQ": q if dq is None else dq, "sums": sums or (0,)}
        ready.launch({**common.arguments, **_table(problem, ready), **results}, device=q.device)
        return dq, sums

    fixed = lambda: {"dq_strides": dense_strides(tuple(q.shape), order), "row_step": common.row_step}
    wants = {"want_dq": need_q, "capture_grads": slots}
    dq, sums = _run(problem, plan, "dq", start, fixed, (order, common.row_step), common=common, **wants)
    by_slot = {slot: total.to(captures[slot].dtype) for slot, total in zip(slots, sums)}
    return dq, tuple(by_slot.get(i) for i in range(len(need_captures)))


def run_dkdv(
    problem: Problem, plan: Plan, common: Common, need_k: bool, need_v: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dk and dv in their tensors' dtypes; no launch where neither is needed."""
    if not need_k and not need_v:
        return None, None
    q, k, v = problem.q, problem.k, problem.v
    k_order, v_order = _unit_order(k), _unit_order(v)

    def start(ready: Ready) -> tuple[Tensor | None, Tensor | None]:
        dk = torch.empty_permuted(k.shape, k_order, dtype=k.dtype, device=k.device) if need_k else None
        dv = torch.empty_permuted(v.shape, v_order, dtype=v.dtype, device=v.device) if need_v else None
        results = {"DK": k if dk is None else dk, "DV": v if dv is None else dv}
        ready.launch({**common.arguments, **_table(problem, ready), **results}, device=q.device)
        return dk, dv

    fixed = lambda: {
        "dk_strides": dense_strides(tuple(k.shape), k_order), "dv_strides": dense_strides(tuple(v.shape), v_order),
        "repeats": q.shape[0] * q.shape[1] // (k.shape[0] * k.shape[1]),
    }  # fmt: skip
    key, wants = (k_order, v_order), {"want_dk": need_k, "want_dv": need_v}
    result: tuple[Tensor | None, Tensor | None]
    result = _run(problem, plan, "dkdv", start, fixed, key, common=common, **wants)
    return result


def _unit_order(x: Tensor) -> tuple[int, ...]:
    """x's dimensions from the slowest to the fastest in memory, but with the last one fastest."""
    order = stride_order(x)
    return order if order[3] == 3 else (*(d for d in order if d != 3), 3)


__all__ = ["backward", "forward", "make_tile_maps", "ready_forward"]
