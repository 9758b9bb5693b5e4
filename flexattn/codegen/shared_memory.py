"""How much shared memory a kernel takes: reads tiles and what a call streams, makes bytes, and with them what is legal.

The idea: what decides whether a launch fits is shared memory, and the compiler's figure follows from tiles, stages and how a
matrix instruction takes its operands; the model is checked against the compiler in the tests, never below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flexattn.codegen.target import Target


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One launch shape: BLOCK_M query rows by BLOCK_N keys, warps and software pipeline stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class CapturedReads:
    """What the loop reads of captured tensors, in bytes: an element of the tile, a query row and a key, each as far as
    their index moves along it alone; whether an element is narrower than 4 bytes, which no hardware copies by itself; and
    whether the dq kernel may add to the gradient of a captured tensor element by element."""

    element: int = 0
    query: int = 0
    key: int = 0
    is_narrow: bool = False
    may_have_gradient: bool = False


@dataclass(frozen=True, slots=True)
class TileProblem:
    """What the choice of tiles rests on."""

    kernel: str  # 'forward', 'decode', 'dq' or 'dkdv'
    target: Target
    element_bytes: int
    qk_pad: int
    v_pad: int
    is_short: bool
    gathers: int  # captured reads in the loop whose index moves along both tile axes
    has_score: bool = False  # there is a score_mod, and its derivative must be computed
    mask: str = "plain"  # 'plain' (no or one comparison), 'banded' (several) or 'reading' (captured tensors)
    is_kept: bool = False  # some of `gathers` are the mask's
    reads: CapturedReads = CapturedReads()
    precision: str = "ieee"  # of float32 products
    is_paged: bool = False  # keys and values are found by page numbers that are loaded first
    qk_rest: int = 0  # of the decode kernel: dims of q and k behind the first qk_pad, as a tile of their own holds them
    kv_bytes: int = 0  # of the decode kernel's keys and values in memory, 0: element_bytes
    v_in_k: bool = False  # of the decode kernel: values are the first part of keys, and not loaded

    @property
    def is_single(self) -> bool:
        """Whether products run on ordinary arithmetic units."""
        return self.element_bytes == 4 and self.precision == "ieee"

    @property
    def is_followed(self) -> bool:
        """Whether the model follows how operands in registers change their layout, rather than bound it."""
        return self.element_bytes == 2 and not self.target.is_amd

    @property
    def is_described(self) -> bool:
        """Whether the hardware may load aligned tiles for products by registers: `KernelSpec.described` says more."""
        return self.target.has_descriptors and self.element_bytes == 2 and self.pad <= 256

    @property
    def last_width(self) -> int:
        """Columns of the loop's last product."""
        return self.v_pad if self.kernel == "forward" else self.qk_pad

    @property
    def pad(self) -> int:
        """The larger of the two padded head dims."""
        return max(self.qk_pad, self.v_pad)


def padded(dim: int) -> int:
    """Head dimension as a tile holds it: the next power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def tile_dims(qk_dim: int, v_dim: int, target: Target) -> tuple[int, int]:
    """(QK_PAD, V_PAD): both head dimensions as tiles hold them.

    On Hopper the narrower one is padded up to the other's shared-memory swizzle (64 elements is the widest). A loop that
    is not pipelined lets a key tile and a value tile take turns in one buffer, and ptxas 12.8 then mixes up the upper
    halves of their matrix descriptors when the swizzles differ: wrong values and reads outside shared memory.
    """
    qk_pad, v_pad = padded(qk_dim), padded(v_dim)
    if target.family == "wgmma":
        return max(qk_pad, min(v_pad, 64)), max(v_pad, min(qk_pad, 64))
    return qk_pad, v_pad


WIDEST_PART = 512  # of the decode kernel's tiles of q and k


def decode_dims(qk_dim: int, v_dim: int, target: Target) -> tuple[int, int, int]:
    """(QK_PAD, QK_REST, V_PAD) of the decode kernel: what is wider than WIDEST_PART lies in a second tile, 512 + 64 in place of 1024.

    Example:
        >>> from flexattn.codegen.target import target_of
        >>> decode_dims(576, 512, target_of(90)), decode_dims(192, 128, target_of(90))
        ((512, 64, 512), (256, 0, 128))
    """
    qk_pad, v_pad = tile_dims(min(qk_dim, WIDEST_PART), v_dim, target)
    return qk_pad, padded(qk_dim - WIDEST_PART) if qk_dim > WIDEST_PART else 0, v_pad


def reads_v_in_k(qk_dim: int, v_dim: int, target: Target) -> bool:
    """Whether the decode kernel's first tile of k may be its tile of v where v is the beginning of k."""
    qk_pad, _, v_pad = decode_dims(qk_dim, v_dim, target)
    return qk_pad == v_pad


# ---------------------------------------------------------------- the model of shared memory
_ROUNDING = 1024  # of buffers to the widest swizzle, barriers, a row of captured integers between two layouts
_SWIZZLED_ROWS = 8  # after which a swizzle repeats


class _Sides(NamedTuple):
    """A kernel's tiles in bytes: its own rows (queries in the forward and dq, keys in dkdv) and what it streams."""

    own: int  # rows
    kept: int  # tiles of the own rows that stay
    first: int  # the streamed tile of q or k
    second: int  # the streamed tile of d_out or v
    scores: int  # a tile of probabilities in the inputs' data type
    captured: int  # captured reads a stage holds beside it
    row: int  # what a streamed row holds beside it in each stage

    @property
    def streamed(self) -> int:
        return self.first + self.second


def _sides(config: TileConfig, problem: TileProblem) -> _Sides:
    m, n, size, reads = config.BLOCK_M, config.BLOCK_N, problem.element_bytes, problem.reads
    is_dkdv = problem.kernel == "dkdv"
    own, other = (n, m) if is_dkdv else (m, n)
    kept = own * (problem.qk_pad + (0 if problem.kernel == "forward" else problem.v_pad)) * size
    row = other * (8 + reads.query if is_dkdv else reads.key)  # 8: a log-sum and a delta
    first, second = other * problem.qk_pad * size, other * problem.v_pad * size
    return _Sides(own, kept, first, second, m * n * size, m * n * reads.element, row)


def shared_bytes(config: TileConfig, problem: TileProblem) -> int:
    """Shared memory the compiled kernel takes: never less than the compiler's figure, at most 5 % or 4 KiB more (a tile
    of 4-byte elements more where captured elements are narrower, or may have a gradient: Triton's versions differ there).

    Tiles of the own rows stay; what is streamed has buffers by the number of stages, one more or less by the matrix
    instruction; scores go through shared memory where they must change their layout to become an operand. Captured
    reads in a loop of one stage change layouts in ways that are bounded here, not followed.

    Args:
        config: Tiles, warps and stages.
        problem: Kernel, target, sizes and captured reads.

    Returns:
        Bytes.

    Example:
        >>> shared_bytes(TileConfig(128, 64, 4, 3), TileProblem("forward", target_of(90), 2, 64, 64, False, 0))
        66560
    """
    if problem.kernel == "decode":
        return _decode_bytes(config, problem)
    sides, tile, stages = _sides(config, problem), config.BLOCK_M * config.BLOCK_N, config.num_stages
    by_registers = _by_registers(sides, config, problem)
    loop = (_register_loop if by_registers else _operand_loop)(sides, config, problem)
    loop += (stages - 1) * sides.captured + stages * sides.row
    reads, kernel = problem.reads, problem.kernel
    if stages == 1 and (reads.element or reads.query or reads.key):
        loop = max(loop + _relayout(sides, problem, by_registers) * tile, 4 * tile)
    loop += _element_scratch(problem) * tile
    results = sides.own * max(problem.v_pad, 0 if kernel == "forward" else problem.qk_pad)
    return max(sides.kept + loop, results * problem.element_bytes) + _rounding(problem, by_registers)


def _by_registers(sides: _Sides, config: TileConfig, problem: TileProblem) -> bool:
    """Whether products take their left operand from registers: wgmma and tcgen05 need 64 rows, and 4 warps or more."""
    warps, family = config.num_warps, problem.target.family
    if family == "mma" or problem.is_single or sides.own < 64:
        return True
    return warps < 4 or (family == "tcgen05" and warps > 8)


def _rounding(problem: TileProblem, by_registers: bool) -> int:
    """Of buffers that products read in place, to where their swizzle repeats: barriers fit in it. Elsewhere _ROUNDING."""
    if by_registers or problem.reads != CapturedReads():
        return _ROUNDING
    return min(_ROUNDING, _SWIZZLED_ROWS * problem.pad * problem.element_bytes)


def _register_loop(sides: _Sides, config: TileConfig, problem: TileProblem) -> int:
    """Products whose left operand and sums are in registers (mma.sync, and float32 on ordinary arithmetic units): copies
    run a stage ahead, and the tile at hand needs no buffer of its own. Where the last product is wider than it is tall
    its warps lie side by side, and every one of them needs all scores of its rows. Tensors that the hardware cannot copy
    (not aligned) run as one stage does, whatever the number of stages."""
    scores = sides.scores if problem.is_single or sides.own < problem.last_width else 0
    piped = (config.num_stages - 1) * sides.streamed + scores
    return max(piped, (_followed if problem.is_followed else _bounded)(scores, sides, config, problem))


def _followed(scores: int, sides: _Sides, config: TileConfig, problem: TileProblem) -> int:
    """A tile of a loop that is not pipelined: what is read along both its axes stays, beside it what passes to an operand."""
    first, second = (_passing(width, config, problem) for width in (problem.qk_pad, problem.v_pad))
    if problem.kernel == "forward":
        return max(sides.first if problem.is_described else first, sides.second + scores)
    if problem.kernel == "dq":
        return sides.first + max(scores, first, second)
    if problem.reads.element > 0:  # bounded, not followed
        second = max(sides.first, sides.second)
    return max(sides.first + first, sides.streamed + max(scores, second))


def _bounded(scores: int, sides: _Sides, config: TileConfig, problem: TileProblem) -> int:
    """The same of float32 and for AMD, whose changes of layout are not followed: a streamed tile, or a part of a narrow one."""
    tile, size, is_dkdv = max(sides.first, sides.second), problem.element_bytes, problem.kernel == "dkdv"
    if problem.kernel == "forward":
        return max(sides.first, sides.second + scores)
    if problem.is_single:
        turned = 0 if is_dkdv else sides.second
    elif problem.pad >= 128 or (is_dkdv and problem.reads.element > 0):
        turned = tile
    else:
        width = problem.v_pad if is_dkdv and size == 4 else problem.pad  # TF32: only d_out's
        turned = min(tile, max(512 * config.num_warps, 32 * width * size))
    return (sides.streamed if is_dkdv else sides.first) + max(scores, turned)


def _passing(width: int, config: TileConfig, problem: TileProblem) -> int:
    """Bytes of a streamed tile that pass at once from the layout of its loads to that of an operand: what threads are spread
    over in either of them, and up to 16 bytes of each.

    An operand has 8 rows for each of the warps that lie side by side. Loads have threads along the columns first: 16 bytes
    for each where tensors are aligned, or the tile has the shape of the kernel's results and shares the layout in which they
    are stored; else an element for each, and as many rows as fill 16 bytes pass at once if threads reach a second row."""
    own, other = (config.BLOCK_N, config.BLOCK_M) if problem.kernel == "dkdv" else (config.BLOCK_M, config.BLOCK_N)
    threads, size = 32 * config.num_warps, problem.element_bytes
    rows, columns = 8 * (config.num_warps if own < problem.last_width else 1), min(width, threads)
    by_vector = width * min(other, max(rows, threads * 16 // (width * size))) * size
    by_element = columns * min(other, max(rows, threads // columns)) * (16 if threads > columns else size)
    if own == other and (problem.kernel == "dkdv" or width == problem.last_width):
        return by_vector
    # else the hardware copies what is aligned, and nothing is turned
    is_aligned = config.num_stages == 1 and not problem.is_described
    return min(other * width * size, max(by_element, by_vector if is_aligned else 0))


def _operand_loop(sides: _Sides, config: TileConfig, problem: TileProblem) -> int:
    """Products that read their operands from shared memory (wgmma, tcgen05): every stage has a buffer. tcgen05 runs beside
    the loop, so a tile that a later product reads again has one more."""
    stages, kernel = config.num_stages, problem.kernel
    if stages == 1:
        is_split = problem.target.family == "tcgen05" and config.num_warps >= 8 and config.BLOCK_M >= 128
        split = 512 * config.num_warps if is_split else 0  # a part of the probabilities, between halves of the columns
        return max(sides.first, sides.second) + split if kernel == "forward" else sides.streamed
    again = 0
    if problem.target.family == "tcgen05":
        again = {"forward": _correction_scratch(config, problem), "dq": sides.first, "dkdv": sides.streamed}[kernel]
    return stages * sides.streamed + again


def _correction_scratch(config: TileConfig, problem: TileProblem) -> int:
    """tcgen05 with 8 warps on 128 rows or fewer splits columns between them, of 64 rows between lanes too. Where scores and
    sums differ in that, the sums change their layout to be rescaled by row (in all versions of Triton where they are the
    wider ones, else in 3.9: in 3.6.0 the factors change theirs). What passes at once is 16 bytes of every row, times two for
    each of the columns that tell threads apart in either layout. Where they agree, two parts of a row only meet."""
    m, n, width = config.BLOCK_M, config.BLOCK_N, problem.v_pad
    if config.num_warps < 8 or m > 128:
        return 0
    if m < 128 and n == width:
        return 2 * 4 * m
    columns = {tile // part for tile in (n, width) for part in ((2,) if m == 128 else (2, 4))}
    return 16 * m << sum(column < width for column in columns)


def _relayout(sides: _Sides, problem: TileProblem, by_registers: bool) -> int:
    """Bytes an element of the tile of scores that captured reads may add to a loop of one stage: in the forward those of 4 bytes,
    read before the product, pass to its layout beside the streamed tile (Triton 3.9; 3.6 less)."""
    kernel, reads = problem.kernel, problem.reads
    is_turned = by_registers and sides.own < problem.pad
    is_copied = problem.target.family == "tcgen05" and (kernel == "dq" or (kernel == "dkdv" and reads.element > 0))
    if kernel == "forward" and not by_registers:
        is_copied = reads.element > 0 and not reads.is_narrow
    return 4 if is_turned or is_copied else 1


def _element_scratch(problem: TileProblem) -> int:
    """Bytes an element that is read or added to one by one takes on its way between two layouts: by Triton's version a part
    of the tile or, as said here, all of it."""
    is_added = problem.kernel == "dq" and problem.reads.may_have_gradient
    return 4 if is_added or problem.reads.is_narrow else 0


def _decode_bytes(config: TileConfig, problem: TileProblem) -> int:
    """Of the decode kernel: its rows of queries stay, and where they are few, so do their probabilities beside what is streamed."""
    m, n, reads = config.BLOCK_M, config.BLOCK_N, problem.reads
    stages = 1 + (config.num_stages - 1) // (2 if problem.is_paged else 1)  # the compiler shares them out
    qk_width, v_width = problem.qk_pad + problem.qk_rest, 0 if problem.v_in_k else problem.v_pad
    first, second = (n * width * (problem.kv_bytes or problem.element_bytes) for width in (qk_width, v_width))
    is_narrow = 0 < problem.kv_bytes < problem.element_bytes
    queries = m * qk_width * problem.element_bytes
    scores = m * n * problem.element_bytes if problem.is_single or m < problem.v_pad else 0
    captured = max(stages - 1, 1) * (m * n * reads.element + 2 * n * reads.key)
    if reads.element or reads.is_narrow:  # by version a buffer more, or one between the layouts of load and product
        captured += 4 * m * n
    captured += 4 * n * stages if problem.is_paged else 0
    if problem.mask == "reading" and reads.element + reads.key:  # what is kept, known before keys are read
        captured += 4 * m * n
    if m >= 64 and problem.target.family != "mma" and not problem.is_single:
        streamed = (stages - is_narrow) * (first + second)
        if is_narrow:  # as products read them, one after the other; of tcgen05 bounded, not followed
            widths = qk_width, problem.v_pad
            streamed += n * (max(widths) if problem.target.family == "wgmma" else sum(widths)) * problem.element_bytes
        again = _correction_scratch(config, problem) + 2 * _ROUNDING if problem.target.family == "tcgen05" else 0
        return queries + streamed + again + captured + _ROUNDING
    turned = n * problem.v_pad * problem.element_bytes if problem.is_single and stages > 1 else 0
    ahead = (stages - 1) * (first + second) + turned
    if is_narrow and stages == 1:  # bounded, not followed
        first = n * max(problem.qk_pad, problem.v_pad) * problem.element_bytes
    again = (
        n * problem.qk_pad * problem.element_bytes if problem.v_in_k and stages == 1 else 0
    )  # as the other product's operand
    return queries + scores + max(ahead, first + again, second) + captured + _ROUNDING


def is_legal(config: TileConfig, problem: TileProblem) -> bool:
    """Whether a configuration fits the target."""
    return shared_bytes(config, problem) <= problem.target.shared_bytes
