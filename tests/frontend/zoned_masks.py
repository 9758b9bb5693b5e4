"""Masks that are unions of zones, by name, for all tests of what is made by formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LENGTHS = torch.tensor([37, 90])
STARTS = torch.tensor([5, -3], dtype=torch.int32)
FLAGS = torch.tensor([True, False])
OFFSET = torch.tensor(11, dtype=torch.int32)
WINDOW, FAR_WINDOW = 20, 1 << 31

ZONED: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, i, j: i >= j,
    "causal with an offset on the device": lambda b, h, i, j: i + OFFSET >= j,
    "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    "window both ways": lambda b, h, i, j: (i - j).abs() <= WINDOW,
    "window of 31 bits": lambda b, h, i, j: (i >= j) & (i - j < FAR_WINDOW),
    "prefix a request": lambda b, h, i, j: (j < LENGTHS[b]) | (i >= j),
    "sink and window": lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j < WINDOW)),
    "window a head": lambda b, h, i, j: (i - j).abs() <= 9 * (h + 1),
    "padding on both sides": lambda b, h, i, j: (j >= STARTS[b]) & (j < LENGTHS[b]) & (i >= j),
    "two windows that touch": lambda b, h, i, j: ((i - j >= 0) & (i - j < 16)) | ((i - j >= 16) & (i - j < 40)),
    "full by union of halves": lambda b, h, i, j: (i < 29) | (i > 28) & (j != 3),
    "a flag a request": lambda b, h, i, j: FLAGS[b] & (i >= j),
    "queries and keys apart": lambda b, h, i, j: (i < 40) ^ (j < 50),
    "one query, one key": lambda b, h, i, j: (i == 17) | (j == 40),
    "chunks of keys and of queries": lambda b, h, i, j: (j // 16 <= 2) | (i // 32 >= 2) & (i >= j),
    "far from the diagonal": lambda b, h, i, j: (i - j).abs() > 25,
    "nothing but a corner": lambda b, h, i, j: (i >= 80) & (j < 10),
    "no pair": lambda b, h, i, j: (i < 0) & (j >= 0),
    "a length of 0": lambda b, h, i, j: (j < OFFSET - 11) & (i >= 0),
}
