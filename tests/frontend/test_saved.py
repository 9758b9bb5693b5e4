"""Masks in files: the same pairs in a process that never saw the function; files that are no masks are refused."""

from __future__ import annotations

import functools
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex

import flexattn.frontend.saved as saved
from flexattn import BlockMask, create_block_mask, create_mask
from flexattn.errors import DeviceError, FileError, StaleMaskError
from tests.frontend.mask_families import BATCH, HEADS, brute, families

pytestmark = pytest.mark.usefixtures("one_thread")
Q, K = 157, 201
MASKS = families(K)


def make(name: str) -> BlockMask:
    return create_block_mask(MASKS[name], BATCH, HEADS, Q, K, "cpu", BLOCK_SIZE=(16, 32))


@pytest.mark.parametrize("name", MASKS)
def test_a_saved_mask_is_the_same(name: str, tmp_path: Path) -> None:
    mask = make(name)
    mask.save(tmp_path / "mask.pt")
    found = BlockMask.load(tmp_path / "mask.pt")
    want = brute(MASKS[name], BATCH, HEADS, Q, K)
    assert found.shape == mask.shape
    assert found.BLOCK_SIZE == mask.BLOCK_SIZE
    assert found.device == mask.device
    if mask.traced is not None:
        assert found.traced.program == mask.traced.program
        assert found.traced.binding.numbers == mask.traced.binding.numbers
    assert torch.equal(found.to_mask(), want)
    assert torch.equal(found.tile_map(16, 32).dense(), mask.tile_map(16, 32).dense())
    assert torch.equal(create_mask(found.mask_mod, BATCH, HEADS, Q, K, "cpu"), want)


@pytest.mark.parametrize("name", ["documents per batch", "window per head", "sine", "dense", "all"])
def test_what_was_loaded_can_be_used_on(name: str, tmp_path: Path) -> None:
    """Combined, sliced, pickled, assigned to, and called with tensors."""
    mask, window = make(name), make("window")
    mask.save(tmp_path / "mask.pt")
    found = BlockMask.load(tmp_path / "mask.pt")
    want, other = (brute(MASKS[n], BATCH, HEADS, Q, K) for n in (name, "window"))
    assert torch.equal((found & window).to_mask(), want & other)
    assert torch.equal(window.combine(found.mask_mod).to_mask(), want & other)
    assert torch.equal(found[:, 1, 2:4].to_mask(), want[:, 1:2, 32:64])
    assert torch.equal(found.to("cpu").to_mask(), want)
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again.to_mask(), want)
    assert torch.equal(create_mask(again.mask_mod, BATCH, HEADS, Q, K, "cpu"), want)
    index = [torch.arange(n).view([-1 if i == d else 1 for d in range(4)]) for i, n in enumerate(want.shape)]
    assert torch.equal(torch.as_tensor(found.mask_mod(*index)).expand(want.shape), want)
    found.mask_mod = found.mask_mod
    assert found.is_list
    assert torch.equal(found.to_mask(), want)


def test_numbers_of_a_loaded_function_stay_arguments(tmp_path: Path) -> None:
    def program(size: int):
        rule = lambda b, h, q, k: q - k < size
        create_block_mask(rule, None, None, Q, K, "cpu").save(tmp_path / "mask.pt")
        return create_block_mask(BlockMask.load(tmp_path / "mask.pt").mask_mod, None, None, Q, K, "cpu").traced

    one, other = program(5), program(77)
    assert one.program == other.program
    assert (one.binding.numbers, other.binding.numbers) == ((5,), (77,))


def test_another_process_has_the_same_mask(tmp_path: Path) -> None:
    ids = torch.arange(4 * K)[:K] // 20
    rule = lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k) | (torch.sin(q * 0.1) > 0.9)
    mask = create_block_mask(rule, None, None, Q, K, "cpu")
    mask.save(tmp_path / "mask.pt")
    code = f"""
import sys, torch
from flexattn import BlockMask
mask = BlockMask.load({str(tmp_path / "mask.pt")!r})
torch.save((mask.to_mask(), mask.tile_map(16, 16).table(), mask.shape), {str(tmp_path / "found.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    kept, table, shape = torch.load(tmp_path / "found.pt", weights_only=False)
    assert torch.equal(kept, mask.to_mask())
    assert all(torch.equal(a, b) for a, b in zip(table, mask.tile_map(16, 16).table()))
    assert shape == mask.shape


def test_lists_and_styles(tmp_path: Path) -> None:
    theirs = torch_flex.create_block_mask(MASKS["padding"], BATCH, HEADS, Q, K, "cpu", BLOCK_SIZE=(16, 32))
    BlockMask.from_torch(theirs).save(tmp_path / "lists.pt")
    found = BlockMask.load(tmp_path / "lists.pt")
    assert not found.is_list
    assert torch.equal(found.to_mask(), brute(MASKS["padding"], BATCH, HEADS, Q, K))
    merged = create_block_mask(MASKS["padding"], BATCH, 1, Q, K, "cpu", separate_full_blocks=False)
    merged.save(tmp_path / "merged.pt")
    assert BlockMask.load(tmp_path / "merged.pt").full_kv_indices is None
    assert torch.equal(BlockMask.load(tmp_path / "merged.pt").kv_indices, merged.kv_indices)


def test_files_hold_only_what_is_captured(tmp_path: Path) -> None:
    long = torch.arange(1 << 20)
    ids = long[:K]
    create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, Q, K, "cpu").save(tmp_path / "mask.pt")
    assert (tmp_path / "mask.pt").stat().st_size < 20_000


def test_a_device_nobody_asked_for_is_chosen_again(tmp_path: Path) -> None:
    rule = lambda b, h, q, k: q >= k
    create_block_mask(rule, None, None, Q, K).save(tmp_path / "anywhere.pt")
    found = BlockMask.load(tmp_path / "anywhere.pt")
    assert found.predicate.follows
    assert found.device == create_block_mask(rule, None, None, Q, K).device
    assert BlockMask.load(tmp_path / "anywhere.pt", device="meta").device.type == "meta"


def test_stale_masks_are_not_saved(tmp_path: Path) -> None:
    ids = torch.arange(K)
    mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, Q, K, "cpu")
    ids.add_(1)
    with pytest.raises(StaleMaskError):
        mask.save(tmp_path / "mask.pt")


def _changed(content: dict, **changes: object) -> dict:
    return content | {"program": content["program"] | changes}


DAMAGE = {
    "other data": (lambda c: {"weights": torch.zeros(2)}, "other data"),
    "no dictionary": (lambda c: [1, 2], "other data"),
    "version": (lambda c: c | {"version": 7}, "version 7, where this flexattn reads 1"),
    "missing": (lambda c: {n: x for n, x in c.items() if n != "lengths"}, "damaged content"),
    "operation": (lambda c: _changed(c, nodes=[("system", (), None, "bool")]), "node 0, 'system'"),
    "argument": (lambda c: _changed(c, nodes=[("not", (3,), None, "bool")]), "node 0, 'not'"),
    "itself": (lambda c: _changed(c, nodes=[("not", (-1,), None, "bool")]), "node 0, 'not'"),
    "no captures": (lambda c: _changed(c, captures=[]), "damaged content"),
    "rank": (lambda c: _changed(c, captures=[torch.zeros(2, 2, dtype=torch.int64)]), "is none of a mask's"),
    "no nodes": (lambda c: _changed(c, nodes=[]), "damaged content"),
    "no truth value": (lambda c: _changed(c, nodes=c["program"]["nodes"][:1]), "no truth value"),
    "data type": (lambda c: _changed(c, nodes=[("var", (), "b", "Tensor")]), "node 0, 'var'"),
    "negative": (lambda c: c | {"lengths": (-1, 5)}, "damaged content"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    ids, (damage, text) = torch.arange(K), DAMAGE[name]
    path = tmp_path / "mask.pt"
    create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, Q, K, "cpu").save(path)
    content = damage(torch.load(path))
    if isinstance(content, dict) and content.pop("checksum", None):  # somebody who means it writes a new one
        content["checksum"] = saved._checksum(content)
    torch.save(content, path)
    with pytest.raises(FileError, match=text):
        BlockMask.load(path)


def _touch(marker: str) -> None:
    Path(marker).touch()


class _Hostile:
    """Runs something when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return _touch, (self.marker,)


def test_bytes_and_code_are_refused(tmp_path: Path) -> None:
    path, marker = tmp_path / "mask.pt", tmp_path / "ran"
    make("causal").save(path)
    whole = path.read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(FileError, match="cannot read"):
            BlockMask.load(path)
    torch.save({"format": saved.FORMAT, "version": 1, "program": _Hostile(marker)}, path)
    with pytest.raises(FileError, match="cannot read"):
        BlockMask.load(path)
    assert not marker.exists()
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "nothing.pt")


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    make("causal").save(tmp_path / "mask.pt")
    with pytest.raises(DeviceError, match="is not here"):
        BlockMask.load(tmp_path / "mask.pt", device="cuda:77")


def test_functions_of_loaded_masks_are_made_of_parts_that_move(tmp_path: Path) -> None:
    make("documents").save(tmp_path / "mask.pt")
    moved = BlockMask.load(tmp_path / "mask.pt").to("meta")
    assert isinstance(moved.mask_mod, functools.partial)
    assert moved.mask_mod.args[1][0].device.type == "meta"


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Wherever it is: a file loads as the mask that was saved, or not at all."""
    path, ids = tmp_path / "mask.pt", torch.arange(200) // 30
    mask = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < 57), None, None, 200, 200, "cpu")
    mask.save(path)
    whole, want, refused = path.read_bytes(), mask.to_mask(), 0
    for at in range(5, len(whole), 23):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        try:
            found = BlockMask.load(path)
        except FileError:
            refused += 1
        else:  # a byte between the records of the archive
            assert found.shape == mask.shape and found.BLOCK_SIZE == mask.BLOCK_SIZE
            assert torch.equal(found.to_mask(), want)
    assert refused > 40


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mask.pt"
    make("documents per batch").save(path)
    whole = path.read_bytes()
    for length in (0, 1, 3, 100, len(whole) // 2, len(whole) - 300, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match="holds no BlockMask that can be read"):
            BlockMask.load(path)
    with pytest.raises(FileNotFoundError):
        BlockMask.load(tmp_path / "none.pt")


def test_files_of_before_there_was_a_checksum_are_read(tmp_path: Path) -> None:
    path, mask = tmp_path / "mask.pt", make("documents per batch")
    mask.save(path)
    content = torch.load(path, weights_only=True)
    del content["checksum"]
    torch.save(content, path)
    with pytest.raises(FileError, match="does not fit its checksum"):
        BlockMask.load(path)
    torch.save(content | {"version": 1}, path)
    assert torch.equal(BlockMask.load(path).to_mask(), mask.to_mask())


def by_name(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class _Local:
    def __init__(self, ids: torch.Tensor) -> None:
        self.ids, self.lock = ids, (n for n in ())  # which pickle cannot write

    def __call__(self, b, h, q_idx, kv_idx):
        return self.ids[q_idx] == self.ids[kv_idx]


@pytest.mark.parametrize("kind", ["predicate", "list", "torch", "made of masks"])
def test_masks_of_functions_without_a_name_are_pickled_as_they_were_traced(kind: str, tmp_path: Path) -> None:
    ids, cut = torch.arange(100) // 30, 3
    rule = lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < 40 + cut)
    mask = create_block_mask(rule, None, 2, 100, 100, "cpu", BLOCK_SIZE=16)
    if kind == "list":
        mask.kv_indices = mask.kv_indices.clone()
    if kind == "torch":
        mask = BlockMask.from_torch(torch_flex.create_block_mask(rule, None, 2, 100, 100, "cpu", BLOCK_SIZE=16))
    if kind == "made of masks":
        mask = (mask & create_block_mask(_Local(ids), None, None, 100, 100, "cpu"))[:, :, 1:]
    want = mask.to_mask()
    torch.save(mask, tmp_path / "mask.pt")
    for found in (pickle.loads(pickle.dumps(mask)), torch.load(tmp_path / "mask.pt", weights_only=False)):
        assert (found.is_list, found.shape, found.BLOCK_SIZE) == (mask.is_list, mask.shape, mask.BLOCK_SIZE)
        assert torch.equal(found.to_mask(), want)
        assert torch.equal(create_mask(found.mask_mod, 1, 2, *found.seq_lengths, "cpu") & want, want)
    assert pickle.loads(pickle.dumps(create_block_mask(by_name, None, None, 9, 9, "cpu"))).mask_mod is by_name


def test_files_that_are_open_and_paths_that_are_none(tmp_path: Path) -> None:
    mask, file = make("causal"), io.BytesIO()
    mask.save(file)
    file.seek(0)
    assert torch.equal(BlockMask.load(file).to_mask(), mask.to_mask())
    for ask in (mask.save, BlockMask.load):
        with pytest.raises(FileNotFoundError):
            ask(tmp_path / "nowhere" / "mask.pt")
        with pytest.raises(TypeError, match="is named by a path"):
            ask(5)
