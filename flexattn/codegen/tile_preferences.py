"""Preferred tiles, warps and pipeline stages, best first: tables by matrix instruction, kernel and head dim, nothing else.

The idea: what is measured is a table. A row is (largest padded head dim, configurations); the rows below the first that fits follow it.
Those for wgmma were timed on an H200 up to head dim 256 (benchmarks/NOTES.md); the others are chosen by what the assembler spills.
"""

from __future__ import annotations

from flexattn.codegen.shared_memory import TileConfig

# 16-bit inputs
Rows = tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...]
_WGMMA: dict[str, Rows] = {
    "forward": (
        (64, ((64, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2))),
        (128, ((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2))),
        (256, ((128, 64, 8, 2), (64, 64, 4, 1), (64, 32, 4, 1))),
        (512, ((64, 64, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1))),
    ),
    "dq": (
        (64, ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3))),
        (128, ((128, 64, 8, 3), (64, 64, 4, 2), (128, 64, 8, 2))),
        (256, ((64, 32, 4, 2), (64, 32, 4, 1), (32, 32, 4, 1))),
        (512, ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 4, 1))),
    ),
    "dkdv": (
        (64, ((64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3))),
        (128, ((64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 2))),
        (256, ((32, 64, 8, 2), (64, 64, 8, 1), (32, 32, 4, 1))),
        (512, ((16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1))),
    ),
}
# family, kind of mask (`mask_kind`), kernel: short rows of tiles, many of them partial
MASKED: dict[str, dict[str, dict[str, Rows]]] = {
    "wgmma": {
        "banded": {"dq": ((128, ((64, 64, 4, 2),)),), "dkdv": ((64, ((64, 64, 4, 2),)),)},
        "reading": {  # a third stage makes rows of ids wait for one another: 30 % of the forward
            "forward": ((64, ((64, 128, 4, 2),)), (128, ((64, 64, 4, 2), (128, 128, 8, 3)))),
            "dq": ((128, ((64, 64, 4, 2),)),),
            "dkdv": ((64, ((64, 64, 4, 2),)),),
        },
    },
    # not timed: what spills in the default tiles does not in these
    "mma": {"reading": {"forward": ((64, ((128, 64, 4, 3),)), (128, ((64, 64, 4, 2),)))}},
    "tcgen05": {},
}
_SCORED: dict[str, Rows] = {
    "dq": ((64, ((64, 64, 4, 3), (64, 64, 4, 2))),),
    "dkdv": ((64, ((64, 64, 4, 3), (64, 64, 4, 2))), (128, ((32, 64, 4, 3), (32, 64, 4, 2)))),
}
SCORED: dict[str, dict[str, Rows]] = {  # a score_mod, or its derivative, takes registers that other tiles do not have
    "wgmma": {**_SCORED, "dkdv": (*_SCORED["dkdv"], (256, ((16, 64, 8, 2), (32, 64, 8, 2))))},
    "tcgen05": _SCORED,
    "mma": {"forward": ((64, ((128, 64, 8, 2),)), (128, ((64, 64, 4, 2),)))},
}
_TCGEN05_OWN = {  # where 4 warps, or one stage more, spill hundreds of bytes a thread
    ("forward", 64): ((64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
    ("forward", 256): ((128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
    ("forward", 512): ((64, 16, 8, 1), (32, 32, 8, 1), (16, 16, 4, 1)),
    ("dq", 256): ((64, 32, 8, 2), (64, 32, 4, 1), (32, 32, 4, 1)),
    ("dkdv", 128): ((64, 64, 8, 2), (32, 64, 4, 2), (32, 64, 4, 1)),
    ("dkdv", 256): ((32, 64, 8, 1), (32, 32, 4, 1)),
}
_TCGEN05: dict[str, Rows] = {
    kernel: tuple((pad, _TCGEN05_OWN.get((kernel, pad), configs)) for pad, configs in rows)
    for kernel, rows in _WGMMA.items()
}
_MMA: dict[str, Rows] = {
    "forward": (
        (64, ((128, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2))),
        (128, ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2))),
        (256, ((64, 32, 8, 2), (64, 32, 4, 1), (32, 32, 4, 1))),
        (512, ((32, 32, 8, 1), (32, 16, 4, 1), (16, 16, 4, 1))),
    ),
    "dq": (
        (64, ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 1))),
        (128, ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 1))),
        (256, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (512, ((16, 16, 4, 1),)),
    ),
    "dkdv": (
        (64, ((64, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 1))),
        (128, ((64, 64, 8, 2), (32, 64, 4, 2), (32, 32, 4, 1))),
        (256, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (512, ((16, 16, 8, 1), (16, 16, 4, 1))),
    ),
}
AMD: dict[str, Rows] = {"dkdv": ((64, ((32, 64, 4, 2),)),)}  # 64 rows of queries spill there
# float32: products run on ordinary arithmetic units, which hold whole rows of both operands in registers: small tiles lose
# little, compile fast and do not spill
SINGLE: dict[str, Rows] = {
    "forward": (
        (64, ((64, 32, 8, 2), (32, 32, 4, 1), (16, 32, 4, 1))),
        (128, ((32, 32, 4, 2), (32, 32, 4, 1), (16, 16, 4, 1))),
        (256, ((32, 16, 4, 1), (16, 16, 4, 1))),
        (512, ((16, 16, 4, 1),)),
    ),
    "dq": (
        (64, ((32, 32, 8, 1), (32, 32, 4, 1), (16, 32, 4, 1))),
        (128, ((16, 32, 8, 1), (16, 32, 4, 2), (16, 16, 4, 1))),
        (256, ((16, 16, 4, 1),)),
        (512, ((16, 16, 4, 1), (4, 16, 4, 1))),
    ),
    "dkdv": (
        (64, ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1))),
        (128, ((32, 16, 8, 1), (16, 32, 8, 2), (16, 16, 4, 1))),
        (256, ((16, 16, 4, 1),)),
        (512, ((16, 16, 8, 1), (16, 4, 8, 1), (16, 8, 8, 1))),
    ),
}
SMALLEST = (TileConfig(32, 32, 4, 1), TileConfig(32, 16, 4, 1), TileConfig(16, 16, 4, 1))
SHORT = (TileConfig(32, 64, 4, 2), TileConfig(16, 64, 4, 2), TileConfig(16, 32, 4, 1))
# captured reads along both axes keep an address an element in registers: more threads, smaller tiles
GATHERING: dict[str, dict[str, Rows]] = {
    "wgmma": {
        "forward": ((128, ((128, 64, 8, 2), (64, 64, 4, 2))), (256, ((128, 32, 8, 2),))),
        "dq": ((128, ((64, 64, 8, 2), (64, 32, 4, 2))), (256, ((64, 32, 8, 2),))),
        "dkdv": ((128, ((64, 64, 8, 2), (32, 64, 4, 2))), (256, ((16, 64, 8, 2), (32, 64, 8, 2)))),
    },
    "mma": {
        "forward": (
            (64, ((128, 64, 8, 2), (64, 64, 4, 2))),
            (128, ((128, 32, 8, 2), (64, 64, 8, 2))),
        ),
        "dq": ((64, ((64, 32, 8, 2),)), (128, ((64, 64, 8, 2), (64, 32, 4, 2)))),
        "dkdv": ((64, ((64, 32, 8, 2),)), (128, ((64, 64, 8, 2), (32, 64, 4, 2))), (256, ((32, 32, 8, 2),))),
    },
    "tcgen05": {
        "forward": ((128, ((128, 64, 8, 2), (64, 64, 4, 2))),),
        "dq": (
            (64, ((64, 64, 8, 2), (64, 32, 4, 2))),
            (128, ((64, 32, 8, 2), (64, 32, 4, 2))),
            (256, ((64, 32, 8, 1),)),
        ),
        "dkdv": ((64, ((64, 64, 8, 2),)), (128, ((32, 64, 8, 2), (32, 64, 4, 2)))),
    },
}
KEPT: dict[str, dict[str, Rows]] = {  # where one of them is the mask's: truth values an element, in two layouts
    "tcgen05": {"forward": ((64, ((128, 64, 8, 2),)), (128, ((128, 32, 8, 2),)), (256, ((64, 64, 8, 2),)))},
}
# the kernel in Gluon, by what its leaves hold in registers: captured values of every key beside the scores or an
# address an element; what a division of integers takes an element; and by how many full tiles rows have
_PLAIN: Rows = (
    (128, ((128, 128, 4, 2), (128, 64, 4, 2), (128, 32, 4, 2))),
    (256, ((128, 64, 4, 2), (128, 32, 4, 2))),
)
HOPPER: dict[str, Rows] = {
    "long": ((64, ((192, 128, 4, 2), (128, 128, 4, 2), (128, 64, 4, 2))), *_PLAIN),
    "plain": ((64, ((128, 128, 4, 2), (128, 64, 4, 2))), *_PLAIN),
    "reading": (
        (64, ((128, 128, 4, 2), (128, 64, 4, 2))),
        (128, ((128, 64, 4, 2), (128, 32, 4, 2))),
        (256, ((128, 32, 4, 2),)),
    ),
    "dividing": ((64, ((128, 64, 4, 2),)), (128, ((128, 64, 4, 2), (128, 32, 4, 2))), (256, ((128, 32, 4, 2),))),
}
# the decode kernel: (most rows, keys, warps, stages) by head dim; what is on its way to a processor counts, not what it computes
_DECODE: Rows = (
    (64, ((64, 128, 4, 3), (64, 128, 4, 4), (64, 64, 4, 2))),
    (128, ((64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2))),  # 3 stages timed: 1 to 2 % faster than 4, 5 than 5
    (256, ((64, 32, 4, 4), (64, 32, 4, 2), (32, 32, 4, 1))),
    (512, ((16, 32, 8, 2), (16, 16, 4, 2), (16, 16, 4, 1))),
)
DECODE: dict[str, Rows] = {
    "wgmma": _DECODE,
    "tcgen05": _DECODE,
    "mma": tuple(
        (pad, tuple((min(m, 32 if pad > 64 else 64), n, warps, stages) for m, n, warps, stages in rows))
        for pad, rows in _DECODE
    ),
}
# the same, tried before, where values are the first dims of keys: a product of 64 rows reads them in place, and few rows leave room
_DECODE_V_IN_K: Rows = ((512, ((64, 64, 8, 2), (64, 32, 8, 2))),)
DECODE_V_IN_K: dict[str, Rows] = {
    "wgmma": _DECODE_V_IN_K,
    **dict.fromkeys(
        ("tcgen05", "mma"), tuple((pad, tuple((32, *row[1:]) for row in rows)) for pad, rows in _DECODE_V_IN_K)
    ),
}
DECODE_SINGLE: Rows = (
    (64, ((16, 32, 4, 2), (16, 32, 4, 1))),
    (128, ((16, 32, 4, 2), (16, 16, 4, 1))),
    (512, ((16, 16, 4, 1),)),
)
DEFAULT = {"mma": _MMA, "wgmma": _WGMMA, "tcgen05": _TCGEN05}

__all__ = [
    "AMD",
    "DECODE",
    "DECODE_SINGLE",
    "DECODE_V_IN_K",
    "DEFAULT",
    "GATHERING",
    "HOPPER",
    "KEPT",
    "MASKED",
    "SCORED",
    "SHORT",
    "SINGLE",
    "SMALLEST",
    "Rows",
]
