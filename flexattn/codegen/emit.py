"""spec -> KernelSource: everything needed to compile a kernel, as text and plain data; imports no triton.

The idea: the argument types are written out by hand. Triton's own launcher would specialise integers on 1 and on
multiples of 16 and so build a kernel again for a window of 16; here only layout facts may promise alignment.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexattn.codegen.decode_tiles import asked_together, formula_of, hull_of, is_by_head
from flexattn.codegen.hopper_tiles import WARPGROUP_ROWS, piece_rows, query_buffers, role_rows
from flexattn.codegen.leaves import leaf_functions, leaf_name, leaf_text, slope_kind
from flexattn.codegen.spec import CaptureLayout, KernelSpec, TensorLayout, type_name
from flexattn.codegen.tile_config import decode_dims, padded, tile_dims
from flexattn.frontend.expr import DEP_H
from flexattn.frontend.zones import zones

_SKELETONS = {
    "forward": ("forward", "attention_forward"),
    "hopper_forward": ("hopper_forward", "attention_forward_hopper"),
    "delta": ("backward", "attention_backward_delta"),
    "dq": ("backward", "attention_backward_dq"),
    "dkdv": ("backward", "attention_backward_dkdv"),
    "hopper_backward": ("hopper_backward", "attention_backward_hopper"),
    "hopper_dq": ("hopper_backward", "hopper_dq_results"),
    "hopper_query_gradient": ("hopper_gradients", "hopper_query_gradient"),
    "hopper_key_gradients": ("hopper_gradients", "hopper_key_gradients"),
    "decode": ("decode", "attention_decode"),
    "merge": ("decode", "merge_splits"),
    "ranges": ("block_map", "ranges"),
    "block_map": ("block_map", "block_map"),
    "fill": ("block_map", "fill"),
    "order": ("block_map", "block_order"),
    "append_pages": ("append_pages", "append_pages"),
    "cut_values": ("cut_values", "cut_values"),
}
_GRID = {"q_heads": "i32", "q_len": "i32", "pairs": "i32", "lines": "i32"}
_LIMITS = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # the greatest numbers of types of 8 bits
_SCALES = ("K_SCALE", "V_SCALE")  # factors of keys and values
_BUILDERS = ("ranges", "block_map", "fill", "order")  # of the mask builder; they know nothing of q, k and v
MOST_TABLES, TABLE_INTS = 3, 5  # as skeletons/block_map.py has them
_LENGTHS = {"rows": "i32", "heads": "i32", "q_len": "i32", "kv_len": "i32"}
_WALK = {"group": "i32", "kv_len": "i32", "batch_step": "i32", "head_step": "i32", "swizzle": "i32"}
_SPLIT = {"q_heads": "i32", "group": "i32", "q_len": "i32", "lines": "i32", "splits": "i32"}
Signature = dict[str, Any]


@dataclass(frozen=True)
class KernelSource:
    """A kernel ready to compile.

    Args:
        spec: What it was made from.
        module, function: The skeleton, a module of flexattn.codegen.skeletons and a function in it.
        leaf_text: The generated module, '' when the kernel has no user function.
        leaf_hash: Names its file.
        leaves: Skeleton parameter -> function in the generated module.
        signature: Type of every runtime argument (nested tuples for tuples), in the skeleton's names.
        constexprs: Value of every other argument but the leaves.
        aligned: Runtime arguments that are multiples of a power of two: (name, position in the tuple or None, divisor).
        options: num_warps and so on.
    """

    spec: KernelSpec
    module: str
    function: str
    leaf_text: str
    leaf_hash: str
    leaves: dict[str, str]
    signature: Signature
    constexprs: dict[str, Any]
    aligned: tuple[tuple[str, int | None, int], ...]
    options: dict[str, Any]

    def readable(self) -> str:
        """One self-contained text: what the kernel was made for, the generated functions, then the skeleton's source."""
        parts = [f"# {line}" for line in self._facts()]
        folder = Path(__file__).parent / "skeletons"
        names = ["softmax.py", "tiles.py", *(["leaf_ops.py"] if self.leaf_text else []), f"{self.module}.py"]
        parts += ["", self.leaf_text or "# (no generated functions)"]
        for name in names:
            parts += [f"\n# {'-' * 64} {name}", (folder / name).read_text()]
        return "\n".join(parts)

    def _facts(self) -> list[str]:
        spec, config = self.spec, self.spec.config
        lines = [f"{self.function} for {'the interpreter' if spec.target.is_interpreter else f'sm_{spec.target.arch}'}"]
        lines += [f"BLOCK_M {config.BLOCK_M}, BLOCK_N {config.BLOCK_N}"]
        lines += [f"{config.num_warps} warps, {config.num_stages} stages"]
        lines += [f"qk_dim {spec.qk_dim}, v_dim {spec.v_dim}, {spec.layouts[0].dtype}"] if spec.layouts else []
        lines += [f"score = {spec.score}"] if spec.score else []
        lines += [f"mask = {spec.mask}"] if spec.mask else []
        return lines + [f"constexprs: {', '.join(f'{k}={v}' for k, v in self.constexprs.items() if v is not None)}"]


def emit(spec: KernelSpec) -> KernelSource:
    """Makes the source of one kernel.

    Args:
        spec: What it is for; the only input.

    Returns:
        Text and data that the runtime compiles.

    Example:
        >>> bf16 = TensorLayout("bf16", is_aligned=True, is_wide=False)
        >>> source = emit(KernelSpec("forward", target_of(90), TileConfig(128, 64, 4, 3), 64, 64, layouts=(bf16,) * 4))
        >>> source.function, source.signature["Q"], source.signature["q_len"]
        ('attention_forward', 'tensordesc<bf16[1, 1, 128, 64]>', 'i32')
    """
    module, function = _SKELETONS["hopper_backward" if _is_fused_without_dq(spec) else spec.kernel]
    functions = leaf_functions(spec)
    text = leaf_text(functions)
    signature, aligned = _SIGNATURES[spec.kernel](spec)
    return KernelSource(
        spec=spec,
        module=module,
        function=function,
        leaf_text=text,
        leaf_hash=hashlib.sha256(text.encode()).hexdigest()[:20] if text else "",
        leaves={parameter: leaf_name(parameter) for parameter in functions},
        signature=signature,
        constexprs=_constexprs(spec),
        aligned=tuple(aligned),
        options=_options(spec),
    )


def _is_fused_without_dq(spec: KernelSpec) -> bool:
    """Whether dk and dv are made by the fused backward's kernel: where each of two warpgroups has registers for both, of 64 keys."""
    return spec.kernel == "hopper_key_gradients" and spec.config.BLOCK_N > WARPGROUP_ROWS


def _options(spec: KernelSpec) -> dict[str, Any]:
    """What the compiler is told. float32 is rounded after each operation as it is written (sums of products excepted): a compiler
    that is free to fuse a product with a sum does so in one kernel and not in the next, and a probability that is made again is
    then no longer the same."""
    is_single = bool(spec.layouts) and spec.layouts[0].dtype == "fp32"
    chained = {"launch_pdl": True} if spec.is_chained else {}
    return {
        "num_warps": role_rows(spec.config) // 16 if spec.kernel == "hopper_forward" else spec.config.num_warps,
        "num_stages": spec.config.num_stages,
        "enable_fp_fusion": not is_single,
        **chained,
    }


# ---------------------------------------------------------------- argument types
class _Arguments:
    """Collects argument types and alignment facts of one kernel."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec
        self.types: Signature = {}
        self.aligned: list[tuple[str, int | None, int]] = []

    def tensor(self, name: str, layout: TensorLayout, strides: str, block: tuple[int, int] | None = None) -> None:
        """A [batch, heads, length, dim] tensor and the tuple of its strides (batch and head always 64 bit, but not pages); with a
        block of (rows, dims) it comes as a tensor descriptor."""
        step = "i64" if layout.is_wide else "i32"
        shape = "" if block is None else f"[1, 1, {block[0]}, {block[1]}]"
        shape += f",{_shared_layout(16, 4, 128)}" if shape and self.spec.is_gluon else ""
        self.types[name] = f"tensordesc<{layout.dtype}{shape}>" if shape else f"*{layout.dtype}"
        self.types[strides] = (step if self.spec.page_size else "i64", "i64", step, step)
        if layout.is_aligned:
            divisor = 16 // (4 if layout.dtype == "fp32" else 1 if layout.dtype in _LIMITS else 2)
            self.aligned += [(name, None, 16)] if block is None else []
            self.aligned += [(strides, axis, divisor) for axis in range(3)]

    def described(self, name: str, dtype: str, block: tuple[int, ...], swizzle: int = 128) -> None:
        """A tensor that comes as a tensor descriptor of blocks, and no stride of it."""
        shape = ", ".join(str(n) for n in block)
        layout = _shared_layout(32 if dtype == "fp32" else 16, len(block), swizzle)
        self.types[name] = f"tensordesc<{dtype}[{shape}],{layout}>"

    def result(self, name: str, dim: int, strides: str) -> None:
        """A tensor the launcher allocates, unit stride, in the inputs' data type."""
        dtype = self.spec.layouts[0].dtype
        self.tensor(name, TensorLayout(dtype, dim * (4 if dtype == "fp32" else 2) % 16 == 0, False), strides)

    def plain(self, **types: Any) -> None:
        """Arguments whose types are given as they are."""
        self.types.update(types)

    def captures(self) -> None:
        """The flat tuple: per capture pointer, sizes, strides; then the numbers; never empty."""
        flat: list[str] = []
        for layout in self.spec.captures:
            flat += [f"*{layout.dtype}", *["i64" if layout.is_wide else "i32"] * (2 * layout.rank)]
        for kind, wide in zip(self.spec.number_kinds, self.spec.wide_numbers):
            flat.append("fp32" if kind == "float" else "i64" if wide else "i32")
        self.types["caps"] = tuple(flat) or ("i32",)


def _shared_layout(bits: int, rank: int, swizzle: int) -> str:
    """How tiles lie in shared memory, which Gluon asks and Triton finds by itself: the head dims of its kernels fill the widest
    swizzle."""
    numbers = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank}"
    return f"NVMMASharedLayout({numbers}, transposed=False, fp4_padded=False, cga_layout=[])"


def _hopper_forward_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _inputs(arguments)
    if spec.page_size:
        arguments.plain(PAGES="*i32", PAGE_STARTS="*i32", KV_LENGTHS="*i32", V_CUT=arguments.types["V"])
    if role_rows(spec.config) == WARPGROUP_ROWS:
        v_pad = tile_dims(spec.qk_dim, spec.v_dim, spec.target)[1]
        layout = TensorLayout(spec.layouts[0].dtype, True, False)
        arguments.tensor("OUT", layout, "out_strides", (WARPGROUP_ROWS, min(v_pad, 128)))
    else:  # written from registers
        arguments.result("OUT", spec.v_dim, "out_strides")
    arguments.plain(LSE="*fp32", MAX="*fp32", ROWS="*i32", EXTRA="*i32", COUNTER="*i32", scale="fp32", **_GRID, **_WALK)
    arguments.captures()
    return arguments.types, arguments.aligned


def _hopper_backward_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _by_column(arguments)
    arguments.plain(DQ_SUMS="*fp32")
    arguments.aligned.append(("DQ_SUMS", None, 16))
    if spec.is_queued:
        arguments.plain(COUNTER="*i32")
    return arguments.types, arguments.aligned


def _by_column(arguments: _Arguments) -> None:
    """What kernels that walk the queries of tiles of keys have, 64 keys a tile of it."""
    spec = arguments.spec
    dtype, rows = spec.layouts[0].dtype, spec.config.BLOCK_M
    qk_pad, v_pad = tile_dims(spec.qk_dim, spec.v_dim, spec.target)
    sides = {"Q": (rows, qk_pad), "K": (WARPGROUP_ROWS, qk_pad), "V": (WARPGROUP_ROWS, v_pad), "D_OUT": (rows, v_pad)}
    for name, block in {**sides, "DK": sides["K"], "DV": sides["V"]}.items():
        arguments.described(name, dtype, (1, 1, *block))
    arguments.described("STATS", "fp32", (1, rows), swizzle=0)
    arguments.plain(ROWS="*i32", EXTRA="*i32", scale="fp32", repeats="i32", q_tiles="i32", **_GRID, **_WALK)
    arguments.captures()


def _hopper_query_gradient_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    qk_pad, v_pad = tile_dims(spec.qk_dim, spec.v_dim, spec.target)
    own, other = WARPGROUP_ROWS, spec.config.BLOCK_N
    sides = {"Q": (own, qk_pad), "K": (other, qk_pad), "V": (other, v_pad), "D_OUT": (own, v_pad), "DQ": (own, qk_pad)}
    for name, block in sides.items():
        arguments.described(name, spec.layouts[0].dtype, (1, 1, *block))
    strides = ("i64",) * 4  # only whether a batch serves all others is asked
    arguments.plain(ROW_LSE="*fp32", DELTA="*fp32", ROWS="*i32", EXTRA="*i32", k_strides=strides, v_strides=strides)
    arguments.plain(scale="fp32", row_step="i32", **_GRID, **_WALK)
    arguments.captures()
    return arguments.types, arguments.aligned


def _hopper_key_gradients_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _by_column(arguments)
    if _is_fused_without_dq(spec):
        arguments.plain(DQ_SUMS="i32")
    return arguments.types, arguments.aligned


def _hopper_dq_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    arguments.result("DQ", spec.qk_dim, "dq_strides")
    arguments.plain(DQ_SUMS="*fp32", scale="fp32", **_GRID)
    arguments.aligned.append(("DQ_SUMS", None, 16))
    return arguments.types, arguments.aligned


def _forward_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _inputs(arguments)
    arguments.result("OUT", spec.v_dim, "out_strides")
    arguments.plain(LSE="*fp32", MAX="*fp32", ROWS="*i32", EXTRA="*i32", scale="fp32", **_GRID, **_WALK)
    arguments.captures()
    return arguments.types, arguments.aligned


def _decode_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _inputs(arguments)
    arguments.result("OUT", spec.v_dim, "out_strides")
    arguments.plain(LSE="*fp32", MAX="*fp32", PARTS="*fp32", scale="fp32", **_SPLIT, kv_len="i32")
    arguments.aligned.append(("PARTS", None, 16))
    if spec.page_size:
        arguments.plain(PAGES="*i32", PAGE_STARTS="*i32")
    arguments.plain(**{name: "*fp32" for name, count in zip(_SCALES, spec.scales) if count})
    arguments.captures()
    return arguments.types, arguments.aligned


def _merge_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    arguments.result("OUT", spec.v_dim, "out_strides")
    arguments.plain(LSE="*fp32", MAX="*fp32", PARTS="*fp32", **_SPLIT)
    arguments.aligned.append(("PARTS", None, 16))
    return arguments.types, arguments.aligned


def _delta_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    arguments.result("OUT", spec.v_dim, "out_strides")
    arguments.tensor("D_OUT", spec.layouts[3], "d_out_strides")
    arguments.plain(LSE="*fp32", D_LSE="*fp32", DELTA="*fp32", ROW_LSE="*fp32", row_step="i32", **_GRID)
    return arguments.types, arguments.aligned


def _dq_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _backward_inputs(arguments)
    arguments.result("DQ", spec.qk_dim, "dq_strides")
    arguments.plain(row_step="i32", sums=(f"*{type_name(spec.sum_dtype)}",) * len(spec.capture_grads) or ("i32",))
    return arguments.types, arguments.aligned


def _dkdv_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    _backward_inputs(arguments)
    arguments.result("DK", spec.qk_dim, "dk_strides")
    arguments.result("DV", spec.v_dim, "dv_strides")
    arguments.plain(repeats="i32")
    return arguments.types, arguments.aligned


def _inputs(arguments: _Arguments, names: tuple[str, ...] = ("Q", "K", "V")) -> None:
    spec = arguments.spec
    (qk_pad, v_pad), config = tile_dims(spec.qk_dim, spec.v_dim, spec.target), spec.config
    q_rows = role_rows(spec.config) if spec.is_gluon else config.BLOCK_M
    k_rows = piece_rows(config.BLOCK_N, spec.page_size) if spec.is_gluon and spec.page_size else config.BLOCK_N
    blocks = ((q_rows, qk_pad), (k_rows, qk_pad), (k_rows, v_pad), (config.BLOCK_M, v_pad))
    for name, layout, is_described, block in zip(names, spec.layouts, spec.described, blocks):
        arguments.tensor(name, layout, f"{name.lower()}_strides", block if is_described else None)


def _backward_inputs(arguments: _Arguments) -> None:
    _inputs(arguments, ("Q", "K", "V", "D_OUT"))
    arguments.plain(ROW_LSE="*fp32", DELTA="*fp32", ROWS="*i32", EXTRA="*i32", scale="fp32", **_GRID, **_WALK)
    arguments.captures()


def _append_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    names = ("K", "k_strides"), ("V", "v_strides"), ("K_PAGES", "k_page_strides"), ("V_PAGES", "v_page_strides")
    for (name, strides), layout in zip(names, spec.layouts):
        arguments.tensor(name, layout, strides)
    arguments.plain(SLOTS="*i32", ENDS="*i32", TABLE="*i32", LENGTHS="*i32", K_INVERSE="*fp32", V_INVERSE="*fp32")
    sizes = ("kv_heads", "tokens", "tokens_each", "requests", "page_size", "width", "k_scales", "v_scales")
    arguments.plain(**dict.fromkeys(sizes, "i32"))
    return arguments.types, arguments.aligned


def _cut_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    arguments = _Arguments(spec)
    arguments.tensor("V", spec.layouts[0], "v_strides")
    arguments.plain(
        PAGES="*i32", PAGE_STARTS="*i32", KV_LENGTHS="*i32", kv_heads="i32", V_CUT=f"*{spec.layouts[0].dtype}"
    )
    arguments.aligned.append(("V_CUT", None, 16))
    return arguments.types, arguments.aligned


def _builder_signature(spec: KernelSpec) -> tuple[Signature, list[tuple[str, int | None, int]]]:
    """Of the kernels that make a mask's span table."""
    arguments, tables = _Arguments(spec), ("i32",) * (MOST_TABLES * TABLE_INTS)
    if spec.kernel == "order":
        arguments.plain(UNSORTED="*i32", ROWS="*i32", NEEDED="*i32", TOLD="*i32", tables=tables, **_LENGTHS)
    elif spec.kernel == "block_map":
        trees = tuple(tree_type(spec.captures[slot]) for slot in spec.ranged) + ("*i64",) * len(spec.valued)
        arguments.plain(ROWS="*i32", EXTRA="*i32", NEEDED="*i32", WILD="*i32", trees=trees or ("i32",), tables=tables)
        arguments.plain(room="i32", **_LENGTHS)
        arguments.captures()
    elif spec.kernel == "fill":
        arguments.plain(ROWS="*i32", EXTRA="*i32", tables=tables, room="i32", **_LENGTHS)
        arguments.captures()
    else:
        (capture,) = spec.captures
        arguments.plain(DATA=f"*{capture.dtype}", TREE=tree_type(capture), SETS="*i64", DONE="*i32", programs="i32")
        arguments.plain(length="i64" if capture.is_wide else "i32")
    return arguments.types, arguments.aligned


def tree_type(capture: CaptureLayout) -> str:
    """Type of the tree over a captured tensor's ranges."""
    return "*i64" if capture.dtype in ("i64", "u32") else "*i32"


_SIGNATURES = {
    "forward": _forward_signature, "hopper_forward": _hopper_forward_signature, "delta": _delta_signature,
    "decode": _decode_signature, "merge": _merge_signature,
    "dq": _dq_signature, "dkdv": _dkdv_signature, "hopper_backward": _hopper_backward_signature, "hopper_dq": _hopper_dq_signature,
    "hopper_query_gradient": _hopper_query_gradient_signature, "hopper_key_gradients": _hopper_key_gradients_signature,
    "append_pages": _append_signature, "cut_values": _cut_signature, **dict.fromkeys(_BUILDERS, _builder_signature),
}  # fmt: skip


# ---------------------------------------------------------------- constants
def _constexprs(spec: KernelSpec) -> dict[str, Any]:
    """Values of the upper-case parameters; a user function that is absent is None."""
    if not spec.layouts:
        return _builder_constexprs(spec)
    if spec.kernel == "append_pages":
        return {"QK_DIM": spec.qk_dim, "V_DIM": spec.v_dim, "QK_PAD": padded(spec.qk_dim), "V_PAD": padded(spec.v_dim),
                "BLOCK_M": spec.config.BLOCK_M, "LIMIT": _LIMITS.get(spec.layouts[2].dtype)}  # fmt: skip
    if spec.kernel == "cut_values":
        return {
            "V_DIM": spec.v_dim,
            "V_PAD": padded(spec.v_dim),
            "BLOCK_N": spec.config.BLOCK_N,
            "PAGE_SIZE": spec.page_size,
        }
    q, k, v, d_out = spec.described
    if spec.kernel == "delta":
        return {"V_DIM": spec.v_dim, "V_PAD": padded(spec.v_dim), "BLOCK_M": spec.config.BLOCK_M, "HAS_D_LSE": spec.has_d_lse,
                "IS_D_OUT_DESCRIBED": d_out}  # fmt: skip
    qk_pad, v_pad = tile_dims(spec.qk_dim, spec.v_dim, spec.target)
    if spec.kernel == "merge":
        return {"V_DIM": spec.v_dim, "V_PAD": v_pad, "BLOCK_M": spec.config.BLOCK_M,
                "WANT_MAX": spec.want_max, "IS_CHAINED": spec.is_chained}  # fmt: skip
    if spec.kernel == "hopper_dq":
        return {"QK_DIM": spec.qk_dim, "QK_PAD": qk_pad, "BLOCK_M": spec.config.BLOCK_M}
    part = qk_pad * 3 // 4  # whole columns of 64, or half a one
    qk_used = part if qk_pad >= 128 and spec.qk_dim <= part else qk_pad
    if spec.is_gluon and spec.kernel != "hopper_forward":
        values: dict[str, Any] = {
            "SCORE_MOD": None, "MASK_MOD": None, "KNOWN": None, "SEEN": None, "SLOPE": slope_kind(spec), "QK_PAD": qk_pad,
            "V_PAD": v_pad, "FOLD_SCALE": spec.fold_scale,
        }  # fmt: skip
        if spec.kernel == "hopper_backward" or _is_fused_without_dq(spec):
            values |= {} if spec.is_queued else {"COUNTER": None}
            return {**values, "BLOCK_M": spec.config.BLOCK_M, "WANT_DQ": spec.kernel == "hopper_backward"}
        if spec.kernel == "hopper_key_gradients":
            return {**values, "QK_USED": qk_used, "BLOCK_M": spec.config.BLOCK_M}
        v_buffers = 2 if v_pad <= 128 else 1  # what there is room for
        return {**values, "QK_USED": qk_used, "BLOCK_N": spec.config.BLOCK_N, "V_BUFFERS": v_buffers}
    if spec.kernel == "hopper_forward":
        is_lazy = v_pad > 64 or spec.mask is not None  # measured: not where heads are narrow and every tile is full
        return {
            "SCORE_MOD": None, "ENDS": None, "MASK_MOD": None, "KNOWN": None, "SEEN": None, "QK_PAD": qk_pad, "QK_USED": qk_used,
            "V_DIM": spec.v_dim, "V_PAD": v_pad, "BLOCK_M": spec.config.BLOCK_M, "BLOCK_N": spec.config.BLOCK_N,
            "Q_BUFFERS": query_buffers(spec.config, (qk_pad, v_pad), spec.target), "FOLD_SCALE": spec.fold_scale,
            "IS_LAZY": is_lazy, "WANT_MAX": spec.want_max, "PAGE_SIZE": spec.page_size,
            **({} if spec.page_size else dict.fromkeys(("PAGES", "PAGE_STARTS", "KV_LENGTHS", "V_CUT"))),
        }  # fmt: skip
    values = {
        "SCORE_MOD": None, "MASK_MOD": None, "QK_DIM": spec.qk_dim, "V_DIM": spec.v_dim, "QK_PAD": qk_pad,
        "V_PAD": v_pad, "BLOCK_M": spec.config.BLOCK_M, "BLOCK_N": spec.config.BLOCK_N,
        "FOLD_SCALE": spec.fold_scale, "IS_Q_DESCRIBED": q, "IS_K_DESCRIBED": k,
        "IS_V_DESCRIBED": v, "PRECISION": spec.precision, "UPCAST": spec.target.is_interpreter,
    }  # fmt: skip
    if spec.kernel == "forward":
        return {**values, "READS": None, "WANT_MAX": spec.want_max}
    if spec.kernel == "decode":
        values = {name: value for name, value in values.items() if not name.endswith("_DESCRIBED")}
        qk_pad, qk_rest, v_pad = decode_dims(spec.qk_dim, spec.v_dim, spec.target)
        values |= {"QK_PAD": qk_pad, "QK_REST": qk_rest, "V_PAD": v_pad, "V_IN_K": spec.v_in_k}
        return {**values, "READS": None, "WANT_MAX": spec.want_max, **_decode_constexprs(spec)}
    values |= {"SCORE_GRAD": None, "IS_D_OUT_DESCRIBED": d_out}
    if spec.kernel == "dq":
        return {**values, "CAPTURE_GRAD": None, "WANT_DQ": spec.want_dq}
    return {**values, "WANT_DK": spec.want_dk, "WANT_DV": spec.want_dv}


def _decode_constexprs(spec: KernelSpec) -> dict[str, Any]:
    found = hull_of(spec.mask, spec.wide_numbers)
    kept, dropped = (0, 0) if found is None else (len(found.kept), len(found.dropped))
    by_head = found is not None and is_by_head(found)
    asked, alone = asked_together(spec.config)
    of_heads = spec.mask is not None and bool(spec.mask.body.deps & DEP_H)
    by_formula = formula_of(spec.mask, spec.wide_numbers) is not None
    return {
        "ZONES": None, "BY_FORMULA": by_formula, "KEPT": kept, "DROPPED": dropped, "BY_HEAD": by_head, "ASKED": asked,
        "ASKED_ALONE": alone, "OF_HEADS": of_heads, "IS_CHAINED": spec.is_chained, "PAGE_SIZE": spec.page_size,
        **({} if spec.page_size else {"PAGES": None, "PAGE_STARTS": None}),
        **{f"{name}S": count for name, count in zip(_SCALES, spec.scales)},
        **{name: None for name, count in zip(_SCALES, spec.scales) if not count},
    }  # fmt: skip


def _builder_constexprs(spec: KernelSpec) -> dict[str, Any]:
    if spec.kernel == "ranges":
        return {"IS_WIDE": spec.captures[0].is_wide}
    if spec.kernel == "order":
        return {"LINES_AT_ONCE": spec.config.BLOCK_M, "OTHERS": spec.config.BLOCK_N}
    if spec.kernel == "fill":
        found = zones(spec.mask) if spec.mask is not None else None
        assert found is not None
        return {"KEPT": len(found.kept), "DROPPED": len(found.dropped), "LINES_AT_ONCE": spec.config.BLOCK_M}
    return {"SHARPER_BOUNDS": None}
