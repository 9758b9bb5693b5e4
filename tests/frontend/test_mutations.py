"""The tests of masks against a package that is wrong in one place: each small wrong change must be noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flexattn

MUTATIONS = [  # (file, before, after)
    # ---------------------------------------------------------------- runs, rectangles and tiles
    ("spans", "& (stop % self.width > self.full_cells)", "& (stop % self.width > self.full_cells + 1)"),
    ("spans", ">= self.full_lines", "> self.full_lines"),
    ("spans", "keep = ~cut_line & (stop > start)", "keep = ~cut_line & (stop >= start)"),
    ("spans", "torch.ne(starts[1:], stops[:-1], out", "torch.gt(starts[1:], stops[:-1] + 1, out"),
    ("spans", "np.sort(((1 << 31) - cost) * lines + index", "np.sort(cost * lines + index"),
    ("spans", "np.cumsum(more, dtype=np.int32) - more + ", "np.cumsum(more, dtype=np.int32) + "),
    ("spans", "(x.to(self.dtype) * scale[1]).clamp(max=self.cells)", "(x.to(self.dtype) * scale[1])"),
    ("spans", "real = (base < self.lines) & (start < stop)", "real = start < stop"),
    ("spans", "differ[1:] & differ[:-1]", "differ[1:]"),
    ("spans", "above = ((line + line // max(lines, 1)) * width)", "above = (line * width)"),
    ("zone_map", "at - start < many", "at - start <= many"),
    ("zone_map", "most // tile + 1 - first", "most // tile - first"),
    ("zone_map", "-apart_most, -apart_least]", "apart_least, apart_most]"),
    ("zone_map", "(own_least <= own_most) & (near <= far), other", "own_least <= own_most, other"),
    ("zone_map", "some & (least <= most), least // tile", "some, least // tile"),
    ("ordered_map", "return table.is_sorted", "return True"),
    ("ordered_map", "if at.min() < 0 or at.max() >= size:", "if at.min() < 0:"),
    ("ordered_map", "c.is_strict == c.is_lower)", "not c.is_strict)"),
    ("ordered_map", "c.is_strict == is_least)", "c.is_strict)"),
    ("ordered_map", "np.minimum(most, first - 1))", "np.minimum(most, first))"),
    ("ordered_map", "return bool((least <= most).all()) and all(", "return all("),
    ("ordered_map", "all(self._holds_at(c, apart)", "all(True"),
    ("ordered_map", "np.where(least < kind.min, 0, found)", "np.where(least < kind.min, length, found)"),
    ("ordered_zones", "queries, strict = queries + sign, False", "strict = False"),
    ("ordered_zones", '(op == "lt") == wanted)', 'op == "lt")'),
    ("ordered_zones", '(term.op != "minimum") == (times > 0)', 'term.op != "minimum"'),
    ("ordered_zones", "is_strict, None if is_strict else _offset(key, query))", "is_strict, _offset(key, query))"),
    (
        "tile_search",
        "full, open_ = must & inside, may & ~must & inside",
        "full, open_ = may & inside, may & ~must & inside",
    ),
    ("tile_search", "full, open_ = must & inside, may & ~must & inside", "full, open_ = must & inside, ~may & inside"),
    ("tile_search", "(first + (size - 1)).clamp(max=limit - 1)", "(first + size // 2).clamp(max=limit - 1)"),
    ("tile_search", "hole[part] |= any_of(~kept)", "hole[part] |= ~any_of(kept)"),
    ("tile_search", "some[part] |= any_of(kept)", "some[part] |= ~any_of(~kept)"),
    ("tile_map", "batch=batch if deps & DEP_B else", "batch=batch if deps & DEP_H else"),
    ("tile_map", "parts.pairs * parts.kept", "parts.pairs"),
    ("tile_search", "return picked(todo, may.flatten())", "return todo[:0]"),
    ("periodic", "return 0 if args[0] == args[1] else None", "return 0"),
    ("periodic", 'if node.op == "add" else args[0] - args[1]', "if node.op else 0"),
    ("periodic", "exact = divisor != 0 and known[0] % divisor == 0", "exact = divisor != 0"),
    ("periodic", "return -args[0]", "return args[0]"),
    ("periodic", "_mirrored(x, (q_far + kv_far) // step)", "_mirrored(x, (q_far + kv_far) // step - 1)"),
    ("periodic", "(x + move).clamp(0, other[0])", "(x + move).clamp(0)"),
    ("periodic", "line < own[0]) & (start < stop)", "line <= own[0]) & (start < stop)"),
    ("periodic", "(grid.q_len - q_len, grid.kv_len)", "(grid.q_len - q_len, kv_len)"),
    ("refine", "(end - begin) * (n + 1) // parts", "(end - begin) * (n + 1) // parts - 1"),
    ("refine", "some[owner[any_of(parts.kept)]]", "some[owner[~any_of(~parts.kept)]]"),
    ("refine", "hole[owner[any_of(parts.dropped)]] = True", "pass"),
    ("refine", "return group // self.heads, group % self.heads", "return group % self.heads, group // self.heads"),
    # ---------------------------------------------------------------- bounds of operations
    ("ops", "return a[0] - b[1], a[1] - b[0]", "return a[0] - b[0], a[1] - b[1]"),
    ("ops", "torch.clamp(b[1] - 1, min=0)", "torch.clamp(b[1] - 2, min=0)"),
    ("ops", "torch.clamp(b[0] + 1, max=0)", "torch.clamp(b[0] + 2, max=0)"),
    ("ops", "same = (first == torch.floor_divide(a[1], m)) & ", "same = "),
    ("ops", "return torch.where(zero, -size, lo), torch.where(zero, size, hi)", "return lo, hi"),
    ("ops", "torch.where(_has_zero(a), torch.zeros_like(lo), torch.minimum(lo, hi))", "torch.minimum(lo, hi)"),
    ("ops", "return a[1] < b[0], ~(a[0] >= b[1])", "return a[1] <= b[0], ~(a[0] >= b[1])"),
    ("ops", "return a[1] <= b[0], ~(a[0] > b[1])", "return a[1] <= b[0], ~(a[0] >= b[1])"),
    ("ops", "(a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])", "(a[0] == a[1]) & (a[0] == b[0])"),
    ("ops", "torch.where(c[0], a[0], torch.where(c[1], low, b[0]))", "torch.where(c[1], a[0], b[0])"),
    ("ops", "(a[0] & ~b[1]) | (~a[1] & b[0])", "(a[0] & ~b[0]) | (~a[1] & b[0])"),
    ("ops", "return torch.where(a_wild & b_wild, ~size, 0), hi", "return torch.zeros_like(size), hi"),
    ("ops", "torch.where(b_wild, a[1], torch.minimum(a[1], b[1]))", "torch.minimum(a[1], b[1])"),
    ("ops", "torch.where(a_wild | b_wild, ~size, 0 if", "torch.where(a_wild & b_wild, ~size, 0 if"),
    ("ops", "torch.where(out, torch.maximum(hi, high), hi)", "hi"),
    # ---------------------------------------------------------------- captured tensors
    ("interval", "torch.where(crossing, 0, a), torch.where(crossing,", "a, torch.where(crossing,"),
    ("interval", "below | (z < 0) | (z >= n)", "below | (z < 0)"),
    ("interval", "below | (z < 0) | (z >= n)", "(z < 0) | (z >= n)"),
    ("interval", "right = z - (1 << level) + 1", "right = z - (1 << level)"),
    ("interval", "lo, hi = torch.where(outside, lo.clamp(max=0), lo), ", "lo, hi = lo, "),
    ("interval", "(x[:, 1:] >= x[:, :-1]).all()", "(x[:, 1:] >= x[:, :-1]).any()"),
    ("interval", "bool((lo // width == hi // width).all())", "True"),
    ("interval", "torch.where(outside, -1, values)", "values"),
    ("interval", "disjoint = (found[0] & found[1]) == 0", "disjoint = (found[0] & found[1]) != found[0]"),
    ("interval", "must, may = must & ~wild, may | wild", "pass"),
    ("interval", "return 1 << 63 if sizes is None", "return 1 << 31 if sizes is None"),
    ("interval", '"sub": lambda a, b: a + b,', '"sub": lambda a, b: max(a, b),'),
    ("evaluate", "found = torch.where(bad, lost, found)", "found = torch.where(bad, 0, found)"),
    ("evaluate", "i = torch.where(i < 0, i + size, i)", "i = torch.where(i < 0, 0, i)"),
    # ---------------------------------------------------------------- slices, lists and masks of masks
    ("algebra", 'make("add", make("mul", block, q.block), make("mod", row, q.block))', 'make("mul", block, q.block)'),
    (
        "algebra",
        'body = make("and", body, parts.body(inner, where=body))',
        'body = make("or", body, parts.body(inner, where=body))',
    ),
    ("algebra", 'make("floordiv", var("kv_idx"), block[1])', 'make("floordiv", var("kv_idx"), block[0])'),
    ("block_lists", "partial = partial[~torch.isin(partial, full)]", "pass"),
    ("block_lists", "getattr(by_col, name), group, col, row)", "getattr(by_col, name), group, row, col)"),
    ("block_lists", "cut |= (row * blocks.q_block < q_len) & (full.start <= cell)", "cut |= (full.start < cell)"),
    ("list_mask", "self.block[0] % q_tile == 0 and self.block[1] % kv_tile == 0", "True"),
    ("simplify", "return y if t else x", "return y if not t else x"),
]
FILES = (
    "test_ordered_zones",
    "test_tile_map",
    "test_interval",
    "test_regressions",
    "test_mask_fuzz",
    "test_block_mask",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTATIONS)))
def test_mutations_are_caught(number: int, tmp_path: Path) -> None:
    """The mask tests, which pass on the package as it is, fail on it with one change."""
    name, before, after = MUTATIONS[number]
    shutil.copytree(Path(flexattn.__file__).parent, tmp_path / "flexattn")
    shutil.copytree(Path(__file__).parent, tmp_path / "tests" / "frontend")
    source = tmp_path / "flexattn" / "frontend" / f"{name}.py"
    assert before in source.read_text()
    source.write_text(source.read_text().replace(before, after))
    options = ["-x", "-q", "-p", "no:cacheprovider", "-k", "not million and not memory and not compiled"]
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\naddopts = --import-mode=importlib\nmarkers =\n    slow: slow\n    gpu: gpu\n"
    )
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/frontend/{file}.py" for file in FILES)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLEXATTN_FUZZ")}
    environment |= {"FLEXATTN_FUZZ_SECONDS": "20"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "1 failed" in done.stdout
