"""Launches through the driver: arguments lie where the kernel reads them, what changes is written anew, what is odd is not guessed."""

from __future__ import annotations

import ctypes
import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexattn
from flexattn.runtime import driver

CPU = torch.device("cpu")
KINDS = (
    (0, "Q", "tensordesc<bf16[1, 1, 64, 128]>"), (1, "LSE", "*fp32"), (3, "strides", ("i64", "i32")), (4, "scale", "fp32"),
    (6, "caps", ("*fp32", "i32", "fp32")), (7, "n", "i32"),
)  # fmt: skip
SIZES = [128, 4, 4, 4, 4, 8, 8, 8, 8, 8, 8, 4, 4, 8, 4, 4, 4]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 128]}


def natural(sizes: list[int]) -> list[tuple[int, int]]:
    places, end = [], 0
    for size in sizes:
        at = -(-end // min(size, 64)) * min(size, 64)
        places.append((at, size))
        end = at + size
    return places


class Library:
    """Stands in for the driver: says where parameters are, keeps what a launch was given."""

    def __init__(self, places: list[tuple[int, int]], failures: int = 0) -> None:
        self.places, self.failures = places, failures
        self.launches: list[tuple[Any, bytes]] = []
        self.encoded = 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.places):
            return 1
        offset._obj.value, size._obj.value = self.places[index.value]
        return 0

    def cuTensorMapEncodeTiled(self, room: Any, *rest: Any) -> int:
        self.encoded += 1
        address, sizes = rest[2].value, list(rest[3])
        ctypes.memmove(
            ctypes.addressof(room._obj) + _skip(room), struct.pack("<QQQQQ", address, *sizes).ljust(128, b"m"), 128
        )
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        size = ctypes.c_size_t.from_address(extra[3]).value
        known = {
            name: getattr(config._obj, name) for name in ("grid_x", "block_x", "shared", "stream", "attribute_count")
        }
        self.launches.append((SimpleNamespace(**known), ctypes.string_at(extra[1], size)))
        return driver._NO_CONTEXT if len(self.launches) <= self.failures else 0

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = b"invalid device context"
        return 0


def _skip(room: Any) -> int:
    return -ctypes.addressof(room._obj) % 64


def compiled_of(**changes: Any) -> Any:
    facts = {
        "target": SimpleNamespace(backend="cuda"), "num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0,
        "profile_scratch_size": 0, "num_warps": 4, "shared": 1234, "launch_pdl": True, "tensordesc_meta": [META],
    }  # fmt: skip
    return SimpleNamespace(metadata=SimpleNamespace(**{**facts, **changes}), function=77)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library(natural([*SIZES, 8, 8]))
    monkeypatch.setattr(driver, "_library", lambda: made)
    monkeypatch.setattr(driver, "stream_of", lambda device: 55)
    return made


def arguments(number: float = 2.5) -> dict[str, Any]:
    q, lse, capture = torch.zeros(2, 1, 100, 128, dtype=torch.bfloat16), torch.zeros(200), torch.zeros(5)
    return {"Q": q, "LSE": lse, "strides": (1 << 40, 7), "scale": 0.125, "caps": (capture, 5, number), "n": -3}


def launch_of(compiled: Any, given: dict[str, Any], **options: Any) -> Any:
    options = {"chained": True, **options}
    return driver.launch_of(compiled, KINDS, 9, given, ("Q", "LSE", "caps"), **options)


def test_every_argument_lies_where_the_kernel_reads_it(library: Library) -> None:
    given = arguments()
    launch_of(compiled_of(), given)(given, device=CPU)
    (config, packed), offsets = library.launches[0], [at for at, _ in library.places]
    assert (config.grid_x, config.block_x, config.shared, config.stream, config.attribute_count) == (
        9,
        128,
        1234,
        55,
        1,
    )
    read = lambda n, form: struct.unpack_from(f"<{form}", packed, offsets[n])[0]
    assert packed[:40] == struct.pack("<QQQQQ", given["Q"].data_ptr(), 128, 100, 1, 2)
    assert [read(n, "i") for n in (1, 2, 3, 4)] == [2, 1, 100, 128]
    assert [read(n, "q") for n in (5, 6, 7, 8)] == [100 * 128, 8, 128, 1]  # of one head: what the hardware takes
    assert read(9, "Q") == given["LSE"].data_ptr() and read(10, "q") == 1 << 40 and read(11, "i") == 7
    assert read(12, "f") == 0.125 and read(13, "Q") == given["caps"][0].data_ptr()
    assert (read(14, "i"), read(15, "f"), read(16, "i")) == (5, 2.5, -3)
    assert len(packed) == offsets[-1] + 8 and packed[offsets[-2] :] == bytes(16)


def test_what_changes_is_written_at_each_call(library: Library) -> None:
    first, second = arguments(), arguments(-4.0)
    launch = launch_of(compiled_of(), first, chained=False)
    for given in (first, second, first):
        launch(given, device=CPU)
    packed, at = [p for _, p in library.launches], [at for at, _ in library.places]
    assert packed[0] == packed[2] != packed[1] and library.encoded == 2  # a descriptor is remembered by its address
    assert struct.unpack_from("<f", packed[1], at[15]) == (-4.0,)
    assert struct.unpack_from("<i", packed[1], at[16]) == (-3,) and library.launches[0][0].attribute_count == 0


@pytest.mark.parametrize("number", [1e300, -math.inf, 3])
def test_numbers_become_float32(library: Library, number: float) -> None:
    given = arguments(number)
    launch_of(compiled_of(), given)(given, device=CPU)
    (found,) = struct.unpack_from("<f", library.launches[0][1], library.places[15][0])
    assert found == (math.inf if number == 1e300 else number)


@pytest.mark.parametrize(
    "changes",
    [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8},
     {"target": SimpleNamespace(backend="hip")}, {"tensordesc_meta": None}],
)  # fmt: skip
def test_kernels_of_another_kind_are_left_to_triton(library: Library, changes: dict[str, Any]) -> None:
    assert launch_of(compiled_of(**changes), arguments()) is None


def test_parameters_that_are_not_what_was_expected_are_left_to_triton(library: Library) -> None:
    for sizes in (SIZES, [*SIZES, 8], [*SIZES, 8, 8, 8], [*SIZES[:-1], 8, 8, 8], []):
        library.places = natural(sizes)
        assert launch_of(compiled_of(), arguments()) is None
    library.places = natural([*SIZES, 8, 8])
    assert driver.launch_of(compiled_of(), [(0, "x", "fp16")], 1, {"x": 1.0}, (), chained=True) is None


def test_a_thread_without_a_context_gets_one(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    library.failures, given = 1, arguments()
    launch = launch_of(compiled_of(), given)
    launch(given, device=CPU)
    assert used == [CPU] and len(library.launches) == 2
    library.failures = 9
    with pytest.raises(RuntimeError, match="invalid device context"):
        launch(given, device=CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("wants_grad", [False, True])
def test_all_kernels_start_this_way_and_as_triton_starts_them(
    wants_grad: bool, fresh_stats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (
        torch.randn(2, 3, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=wants_grad)
        for n in (333, 500, 500)
    )
    slopes = torch.rand(3, device="cuda")
    score = lambda s, b, h, i, j: s + slopes[h] * (j - i)
    mask = lambda b, h, i, j: i - j < 77
    counted: list[int] = []
    real = driver.DirectLaunch.__call__

    def call(self: Any, given: dict[str, Any], *, device: torch.device) -> None:
        counted.append(1)
        real(self, given, device=device)

    monkeypatch.setattr(driver.DirectLaunch, "__call__", call)

    def run() -> list[torch.Tensor]:
        options = {"deterministic": True}
        out = flexattn.flex_attention(q, k, v, score, mask_mod=mask, kernel_options=options)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))] if wants_grad else [out]

    found = run()
    launches = {n: c for n, c in flexattn.stats().launches.items() if not n.startswith("torch")}
    assert len(counted) == sum(launches.values()) > 0, launches
    from flexattn.runtime import compile as compiling

    monkeypatch.setattr(compiling, "_hooks", lambda: (None, _ignore))
    for a, b in zip(found, run(), strict=True):
        assert torch.equal(a, b)


def _ignore(*_: Any) -> None:
    return None
