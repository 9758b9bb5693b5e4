"""explain(): what one call of flex_attention understood, chose and generated, as text.

Reads the same arguments as the call, walks the same first three hops, and launches nothing. What it says is what the call
would do: the programs as math with the values bound to them, the tile map and how it was decided, the backend and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn import codegen
from flexattn.codegen.decode_tiles import MOST_QUERIES, formula_of, hull_of
from flexattn.codegen.emit import KernelSource, emit
from flexattn.codegen.hopper_tiles import WARPGROUP_ROWS, role_rows
from flexattn.codegen.spec import KernelSpec
from flexattn.codegen.target import Target, target_of
from flexattn.codegen.tile_config import TileConfig, candidates
from flexattn.frontend.source import Source
from flexattn.frontend.statistics import SHOWN_PAIRS, kept_pairs
from flexattn.frontend.trace import trace
from flexattn.runtime import choose, settings
from flexattn.runtime.attention import AuxRequest, prepare
from flexattn.runtime.autograd import is_empty
from flexattn.runtime.decode import decode_choice, splits_of
from flexattn.runtime.device import target_for
from flexattn.runtime.pages import PagedKV
from flexattn.runtime.plan import Plan, Problem

if TYPE_CHECKING:
    from flexattn.frontend.block_mask import BlockMask
    from flexattn.frontend.program import Traced
    from flexattn.frontend.tile_map import TileMap


def explain(
    query: Tensor,
    key: Tensor | PagedKV,
    value: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_offset: int | Tensor | None = None,
    kv_lengths: Tensor | None = None,
) -> str:
    """What flex_attention would do with these arguments, and why.

    Args:
        query, score_mod, block_mask, scale, enable_gqa, kernel_options, mask_mod, q_offset, kv_lengths: as in flex_attention.
        key, value: as in flex_attention; or a PagedKV and None, as in paged_attention.
        return_lse, return_aux: accepted so that a call can be explained by changing its name.
    Returns: text: inputs, programs as math with their numbers and captured tensors, the tile map and how it was decided,
        the backend and its reason, and the generated functions (on a machine without a GPU, what an H100 would get).
    Raises: what flex_attention raises for these arguments.
    Example:
        >>> x = torch.ones(1, 1, 4, 8)
        >>> print(flexattn.explain(x, x, x, lambda score, b, h, q_idx, kv_idx: score * 2))  # doctest: +ELLIPSIS
        query  [1, 1, 4, 8] float32 cpu
        key    [1, 1, 4, 8] float32 cpu
        value  [1, 1, 4, 8] float32 cpu
        scale  0.353553
        <BLANKLINE>
        score_mod = score*2
        ...
    """
    problem, plan = prepare(
        (query, key, value),
        score_mod,
        (block_mask, mask_mod),
        scale=scale,
        enable_gqa=enable_gqa,
        aux=AuxRequest(return_lse) if return_aux is None else return_aux,
        options=kernel_options,
        placed=(q_offset, kv_lengths),
    )
    lines = [*_inputs(problem), "", *_program("score_mod", problem.score, score_mod), *_mask(problem, mask_mod), ""]
    return "\n".join([*lines, *_work(problem), "", *_choice(plan), "", *_generated(problem, plan)])


def _inputs(problem: Problem) -> Iterator[str]:
    for name, x in (("query", problem.q), ("key", problem.k), ("value", problem.v)):
        yield f"{name:<6} {list(x.shape)} {_dtype(x)} {x.device}"
    if problem.pages is not None:
        pages = problem.pages
        yield f"pages  of {pages.page_size} tokens for {pages.batch} requests of at most {pages.max_length}"
    yield f"scale  {problem.scale:g}"
    if problem.k.shape[1] and (group := problem.q.shape[1] // problem.k.shape[1]) > 1:
        yield f"heads  {group} query heads share one key/value head"


def _program(name: str, traced: Traced | None, given: Any) -> Iterator[str]:
    if traced is None:
        yield f"{name}: " + ("none" if given is None else "changes nothing, left out")
        return
    program, binding = traced
    yield f"{name} = {program}"
    for slot, (kind, value) in enumerate(zip(program.numbers, binding.numbers)):
        yield f"  num{slot} = {value!r} ({kind}, an argument: another value builds nothing)"
    for slot, capture in enumerate(binding.captures):
        gradient = ", gradient wanted" if capture.requires_grad else ""
        yield f"  cap{slot}: {list(capture.shape)} {_dtype(capture)} {capture.device}{gradient}"
    for line in _source_lines(given, program.kind):
        yield f"  written at {line}"


def _source_lines(mod: Any, kind: str) -> list[str]:
    """The distinct places in user code a mod's program came from, at most five."""
    if mod is None:
        return []
    sources = trace(mod, kind, sources=True).program.sources.values()
    return sorted({str(s) for s in sources if isinstance(s, Source)})[:5]


def _mask(problem: Problem, mask_mod: Any) -> Iterator[str]:
    if problem.block_mask is None:
        yield "mask: none, every pair is kept"
        return
    given = mask_mod if mask_mod is not None or problem.mask is None else problem.block_mask.mask_mod
    yield from _program("mask_mod", problem.mask, given)
    if not is_empty(problem):
        yield from _tile_map(_any_tile_map(problem.block_mask))


def _work(problem: Problem) -> Iterator[str]:
    """Arithmetic of the call, in kept pairs and in all pairs of visited tiles, and its traffic if all is read or written once."""
    if is_empty(problem):
        return
    (batch, heads, q_len, qk_dim), (kv_heads, v_dim), kv_len = problem.q.shape, problem.v.shape[1::2], problem.kv_len
    low = high = visited = batch * heads * q_len * kv_len
    if problem.block_mask is not None:
        tiles = _any_tile_map(problem.block_mask)
        shared = batch * heads // (tiles.batch * tiles.heads)
        counted = kept_pairs(tiles, None, most_counted=SHOWN_PAIRS)
        low, high = shared * counted.low, shared * counted.high
        visited = shared * (tiles.full.tiles() + tiles.partial.tiles()) * tiles.q_block * tiles.kv_block
    pair, backward_pair = 2 * (qk_dim + v_dim), 2 * (3 * qk_dim + 2 * v_dim)  # two products, and five
    kept = _rounded(pair * low) + ("" if low == high else f" to {_rounded(pair * high)}")
    rows = heads * q_len + kv_heads * kv_len * (problem.kv_batch / batch)
    moved = batch * (rows * (qk_dim + v_dim) * problem.q.element_size() + 4 * heads * q_len)
    done, backward = _rounded(pair * visited), _rounded(backward_pair * visited)
    yield f"work: {kept}FLOP in kept pairs, {done}FLOP in visited tiles; backward {backward}FLOP"
    yield f"  at least {_rounded(moved)}B read and written"


def _rounded(number: float) -> str:
    """Three digits and the prefix of a unit: 1234567 -> '1.23 M'."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:,.0f} P"


def _any_tile_map(mask: BlockMask) -> TileMap:
    """The mask's map at its own block size, which every mask has."""
    return mask.tile_map(*mask.BLOCK_SIZE)


def _tile_map(tiles: TileMap) -> Iterator[str]:
    groups, total = tiles.batch * tiles.heads, tiles.batch * tiles.heads * tiles.rows * tiles.cols
    full, partial = tiles.full.tiles(), tiles.partial.tiles()
    shared = "shared by every batch entry and head" if groups == 1 else f"{tiles.batch} x {tiles.heads} (batch, heads)"
    share = (lambda n: f"{n} ({n / total:.1%})") if total else str
    yield f"tile map: {tiles.rows} x {tiles.cols} tiles of {tiles.q_block} x {tiles.kv_block}, {shared}"
    yield f"  full {share(full)}, partial {share(partial)}, skipped {share(total - full - partial)}"
    low, high, _ = kept_pairs(tiles, None, most_counted=SHOWN_PAIRS)
    pairs = max(1, groups * tiles.q_len * tiles.kv_len)
    kept = f"{low / pairs:.2%}" if low == high else f"between {low / pairs:.2%} and {high / pairs:.2%}"
    yield f"  density: {kept} of the pairs are kept"
    how = {name: n for name, n in tiles.decided.items() if isinstance(n, int) and n and name != "tiles"}
    if how:
        yield "  decided: " + ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in how.items())


def _choice(plan: Plan) -> Iterator[str]:
    yield f"backend: {plan.backend}, because {plan.reason}"
    if plan.backend == "torch":
        yield "  block-sparse torch operations, forward and backward; memory grows with length x block"
    if plan.options.strict_nan:
        yield "  strict_nan: a NaN at a masked position stays where it is"
    if plan.layout.dtype == torch.float32 and plan.backend == "triton":
        yield f"  float32 products: {'TF32' if plan.tf32 else 'IEEE'}"


def _generated(problem: Problem, plan: Plan) -> Iterator[str]:
    """The kernels, and the generated functions of the forward one: this GPU's, or an H100's where there is none."""
    if problem.q.dtype == torch.float64 or is_empty(problem):
        yield "kernels: none for " + ("float64" if problem.q.dtype == torch.float64 else "an empty call")
        return
    decode, decode_reason = decode_choice(problem, _target(problem, plan))
    why_copied = None if decode or problem.pages is None else choose.why_gathered(problem, plan, _target(problem, plan))
    problem = problem if why_copied is None else _as_copied(problem)
    source, why, reason = _forward_source(problem, plan, decode)
    where = "for this device" if plan.backend == "triton" else "not run here; what an H100 would get"
    yield f"kernel: {source.function} ({where})"
    if decode:
        yield f"  the decode kernel: {decode_reason}"
        yield from _split(problem, source.spec)
    else:
        if problem.pages is not None:
            yield "  keys and values are read where they lie in pages"
        elif problem.lengths is not None:
            because = "" if why_copied is None else f": {why_copied}"
            yield f"  keys and values are copied first, as dense tensors with zeros behind each length{because}"
        if problem.q.shape[2] <= MOST_QUERIES:
            yield f"  not the decode kernel: {decode_reason}"
        yield f"  {_is_for_hopper(source.spec.is_gluon)}: {reason}"
    yield f"  {_tiles(source.spec.config, source.spec.kernel)} ({why})"
    yield from _backward_tiles(problem, plan)
    yield from _loads(source.spec)
    skeletons = Path(codegen.__file__).parent / "skeletons"
    yield f"  skeleton {skeletons / source.module}.py"
    if not source.leaf_text:
        yield "  no generated functions: there is neither a score_mod nor a mask to apply"
        return
    if plan.backend == "triton":
        yield f"  generated functions, kept as {settings.cache_dir() / 'leaves' / f'flexattn_leaves_{source.leaf_hash}.py'}:"
    else:
        yield "  generated functions:"
    yield ""
    yield from source.leaf_text.rstrip().splitlines()


def _as_copied(problem: Problem) -> Problem:
    """The problem over keys and values of the sizes that a copy of its pages has."""
    if problem.pages is None:
        return problem
    sizes = problem.kv_batch, problem.k.shape[1], problem.kv_len
    k, v = (problem.q.new_empty((*sizes, x.shape[3])) for x in (problem.k, problem.v))
    return replace(problem, k=k, v=v, pages=None)


def _target(problem: Problem, plan: Plan) -> Target:
    """Where the call runs; an H100 where it runs no kernel."""
    return target_for(problem.q.device) if plan.backend == "triton" else target_of(90)


def _split(problem: Problem, spec: KernelSpec) -> Iterator[str]:
    """Into how many parts the decode kernel splits keys, and how it finds the tiles that a mask keeps."""
    splits, tile = splits_of(problem, spec.config, spec.target), spec.config.BLOCK_N
    yield f"  keys in {splits} parts, each every {splits}-th of the tiles of {tile} that the mask may keep"
    if spec.mask is not None:
        if formula_of(spec.mask, spec.wide_numbers) is not None:
            yield "  those by formula"
        else:
            where = (
                ""
                if hull_of(spec.mask, spec.wide_numbers) is None
                else " in a range that some of its conditions give by formula"
            )
            yield f"  those by asking the mask for every pair{where}, before they are read"


def _forward_source(problem: Problem, plan: Plan, decode: bool) -> tuple[KernelSource, str, str]:
    """What the forward kernel is generated from, the same facts as a launch, for this GPU or for sm_90; why its tiles, why it."""
    q, v = problem.q, problem.v
    if decode:
        target = _target(problem, plan)
        runs_here = plan.backend == "triton"
        tiles = choose.tiles_of(problem, plan, "decode") if runs_here else None
        config, why = tiles or (choose.tiles_of_decode(problem, plan, target)[0], "the default")
        facts = {**choose.kernel_facts(problem, plan), **choose.facts_of_decode(problem, target)}
        return emit(KernelSpec("decode", target, config, **facts)), why, ""
    if plan.backend == "triton":
        kernel, reason = choose.forward_kernel(problem, plan)
        target, (config, why) = target_for(q.device), choose.tiles_of(problem, plan, kernel)
    else:  # the call runs whatever its tiles, so neither options nor a list mask may make this fail
        target = target_of(90)
        found = choose.why_portable(problem, plan, target)
        kernel, reason = ("hopper_forward", "it serves this call") if found is None else ("forward", found)
        sizes: dict[str, Any] = {
            "element_bytes": q.element_size(),
            "qk_dim": q.shape[3],
            "v_dim": v.shape[3],
            "q_len": q.shape[2],
            "precision": "tf32" if plan.tf32 else "ieee",
        }
        portable = candidates("forward", target, programs=(plan.score, plan.mask), **sizes)
        config, why = (choose.tiles_on_hopper(problem, plan, target) if found is None else portable)[0], "the default"
    spec = KernelSpec(kernel=kernel, target=target, config=config, **choose.kernel_facts(problem, plan))
    return emit(spec), why, reason


def _backward_tiles(problem: Problem, plan: Plan) -> Iterator[str]:
    """Which kernels make the gradients, where any is needed, and why; their tiles, where they run."""
    inputs = (problem.q, problem.k, problem.v, *problem.captures)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return
    runs_here = plan.backend == "triton"
    kernels, why = choose.likely_backward_kernels(problem, plan, None if runs_here else target_of(90))
    serves = kernels != choose.PORTABLE
    yield f"  backward: {_is_for_hopper(serves)}: {why if runs_here or not serves else 'it serves this call'}"
    if not runs_here:
        return
    if any(c.requires_grad for c in problem.captures):
        kernels = tuple(dict.fromkeys((*kernels, "dq")))
    for kernel in kernels:
        config, why = choose.tiles_of(problem, plan, kernel)
        yield f"  {kernel}: {_tiles(config, kernel)} ({why})"


def _is_for_hopper(it_is: bool) -> str:
    return "the kernel for Hopper" if it_is else "not the kernel for Hopper"


def _loads(spec: KernelSpec) -> Iterator[str]:
    """How tiles get to shared memory, where the device has two ways."""
    if not spec.target.has_descriptors or spec.kernel == "decode":
        return
    names = ("query", "key", "value")
    described = [name for name, is_described in zip(names, spec.described) if is_described]
    if described:
        yield f"  {', '.join(described)}: loaded through tensor descriptors"
    if others := [name for name in names if name not in described]:
        yield f"  {', '.join(others)}: loaded by pointers, being float32, expanded, or not aligned to 16 bytes"


def _tiles(config: TileConfig, kernel: str) -> str:
    if kernel == "hopper_forward":
        looking = " and a looking" if role_rows(config) > WARPGROUP_ROWS else ""
        work = f"{config.BLOCK_M // WARPGROUP_ROWS} warpgroups, a copying{looking} warp, 2 buffers"
    elif kernel in (*choose.FUSED, *choose.APART):
        work = "2 warpgroups, a copying warp, 2 buffers"
    else:
        work = f"{config.num_warps} warps, {config.num_stages} stages"
    return f"tiles {config.BLOCK_M} x {config.BLOCK_N}, {work}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
