"""Turns result files into what people read: the README's section, RESULTS.md and one picture a file.

The idea: nothing of it is typed. Text and pictures are functions of the rows, a test compares them with what the committed
rows give, and a picture carries the digest of the rows it was drawn from.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import cpu, problems
from benchmarks.peers import PEERS
from benchmarks.results import OURS, RESULTS, ROOT, Row, load

README, DETAILS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
_STAR = "A star: measured beside an earlier flexattn than the one in its line."
_BRACKETS = "in brackets, how many times as fast flexattn is, measured in alternation"


# ---------------------------------------------------------------- rows
def files() -> list[Path]:
    """Result files that have rows for a report, GPUs first."""
    found = [p for p in sorted(RESULTS.glob("*.json")) if any(_counts(r) for r in load(p))]
    return sorted(found, key=lambda p: (_is_cpu(load(p)), p.name))


def _counts(row: Row) -> bool:
    return not row["what"].startswith("sweep")


def rows_of(path: Path) -> list[Row]:
    """A file's rows without sweeps."""
    return [r for r in load(path) if _counts(r)]


def _is_cpu(rows: Sequence[Row]) -> bool:
    return all(r["device"].startswith("CPU") for r in rows if _counts(r))


def _pick(rows: Iterable[Row], what: str) -> dict[tuple[str, str], dict[str, Row]]:
    """(shape, variant) -> peer -> row of one measurement, in the order of our lists."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["what"] == what:
            found.setdefault((row["shape"], row["variant"]), {})[row["impl"]] = row
    return dict(sorted(found.items(), key=lambda item: _order(*item[0])))


def _order(shape: str, variant: str) -> tuple[int, tuple[int, ...], str, int]:
    names = [str(s) for s in (*problems.SHAPES.values(), *problems.DECODE_SHAPES.values())]
    numbers = tuple(int(n) for n in shape.replace("/", "x").split("x") if n.isdigit())
    known = names.index(shape) if shape in names else len(names)
    place = problems.VARIANTS.index(variant) if variant in problems.VARIANTS else len(problems.VARIANTS)
    return known, numbers, shape, place


def _peers(table: dict[tuple[str, str], dict[str, Row]], *, measured_only: bool) -> list[str]:
    """The peers of a table, flexattn first; those without any figure may be left out."""
    found = {n for cells in table.values() for n, r in cells.items() if r["status"] == "ok" or not measured_only}
    return [n for n in PEERS if n in found]


def _titles(rows: Sequence[Row]) -> dict[str, str]:
    return cpu.TITLES if _is_cpu(rows) else problems.TITLES


# ---------------------------------------------------------------- tables
Cell = Callable[[Row], str]


_HEADERS = {  # what a peer is called where it is not attention that it computes
    "mask": {"torch_flex": "torch, compiled", "torch_flex_eager": "torch, eager"},
    "ceiling": {"torch_flex": "torch"},
}


def _table(rows: Sequence[Row], what: str, cell: Cell, *, first: str = "batch x heads x length x head size") -> str:
    """Markdown of one measurement; no text where nothing was measured."""
    table = _pick(rows, what)
    peers = _peers(table, measured_only=True)
    if not peers:
        return ""
    titles = _titles(rows)
    lines = [[first, "variant", *(_HEADERS.get(what, {}).get(n, PEERS[n].title) for n in peers)]]
    for (shape, variant), cells in table.items():
        texts = [
            cell(cells[n]) + _mark(cells[n], cells)
            if n in cells and cells[n]["status"] == "ok"
            else _missing(cells.get(n))
            for n in peers
        ]
        lines.append([shape, titles.get(variant, variant), *texts])
    return _markdown(lines)


def _mark(row: Row, cells: dict[str, Row]) -> str:
    """A star at a ratio to an earlier flexattn than the one that the same line shows."""
    is_old = _paired(row) and row["impl"] != OURS and OURS in cells and row["commit"] != cells[OURS]["commit"]
    return "*" if is_old else ""


def _missing(row: Row | None) -> str:
    status = "" if row is None else str(row["status"])
    return {"unsupported": "-", "absent": "not installed"}.get(status, status)


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _with_speedup(text: str, row: Row) -> str:
    return text if row["impl"] == OURS or "speedup" not in row else f"{text} ({_times(row['speedup'])})"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio < 9.95 else f"{ratio:.0f}x"


def _rate(row: Row) -> str:
    """TFLOP/s, or GFLOP/s where it is small; three digits."""
    value, unit = (row["tflops"], "") if row["tflops"] >= 1 else (1e3 * row["tflops"], " G")
    return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.3g}{unit}"


def milliseconds(ms: float) -> str:
    """Three digits, in the unit that suits."""
    for limit, scale, unit in ((1, 1e3, "us"), (1e3, 1, "ms"), (float("inf"), 1e-3, "s")):
        if ms < limit:
            return f"{ms * scale:.3g} {unit}" if ms * scale < 999.5 else f"{ms * scale:.0f} {unit}"
    return "never"


# ---------------------------------------------------------------- README
def readme_section(paths: Sequence[Path]) -> str:
    """What stands between the markers, without them."""
    parts = []
    for path in paths:
        rows = rows_of(path)
        parts += [f"### {_heading(rows)}", _about(rows), f"![{_alt(rows)}]({_relative(_picture(path))})", _short(rows)]
    parts.append(
        "All tables, and what a peer cannot do and why, are in `benchmarks/RESULTS.md`. `python -m benchmarks report` makes both "
        "from `benchmarks/results`; `python -m benchmarks --help` says how to measure again."
    )
    return "\n\n".join(parts)


def _short(rows: Sequence[Row]) -> str:
    return _short_cpu(rows) if _is_cpu(rows) else _short_gpu(rows)


def _short_gpu(rows: Sequence[Row]) -> str:
    """One line a case: our TFLOP/s, and how many times as fast as each peer, forward / backward."""
    forward, backward = _pick(rows, "forward"), _pick(rows, "backward")
    both = {key: {**forward.get(key, {}), **backward.get(key, {})} for key in {**forward, **backward}}
    peers = [n for n in _peers(both, measured_only=True) if n != OURS]
    titles = _titles(rows)
    header = ["batch x heads x length x head size", "variant", "flexattn, TFLOP/s", *(PEERS[n].title for n in peers)]
    lines = [header]
    for key in both:
        pair = [table.get(key, {}) for table in (forward, backward)]
        ours = " / ".join(_rate(t[OURS]) if _ok(t.get(OURS)) else "-" for t in pair)
        ratio = lambda row, cells: _times(row["speedup"]) + _mark(row, cells)
        ratios = [" / ".join(ratio(t[n], t) if _paired(t.get(n)) else "-" for t in pair) for n in peers]
        lines.append([key[0], titles.get(key[1], key[1]), ours, *(r if r != "- / -" else "-" for r in ratios)])
    note = (
        "Forward / backward: TFLOP/s on kept pairs, and how many times as fast flexattn is as each peer, measured in alternation. "
        f"A dash: the peer cannot do it, or was not timed there. {_STAR}"
    )
    return f"{_markdown(lines)}\n\n{note}" if len(lines) > 1 else ""


def _short_cpu(rows: Sequence[Row]) -> str:
    """The longest length: milliseconds, and how many times as fast as each peer."""
    table = _pick(rows, "forward")
    longest = max((shape for shape, _ in table), key=lambda s: int(s.split("x")[2]), default="")
    peers = [n for n in _peers(table, measured_only=True) if not n.startswith(OURS)]
    lines = [["variant", "flexattn", *(f"as fast as {PEERS[n].title}" for n in peers)]]
    for (shape, variant), cells in table.items():
        if shape == longest and _ok(cells.get(OURS)):
            ratios = [_times(cells[n]["speedup"]) if _paired(cells.get(n)) else "-" for n in peers]
            lines.append([cpu.TITLES.get(variant, variant), milliseconds(cells[OURS]["ms"]), *ratios])
    return f"Forward at {longest} (batch x heads x length x head size), {_dtype(rows)}:\n\n{_markdown(lines)}"


def _ok(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok"


def _paired(row: Row | None) -> bool:
    return row is not None and row["status"] == "ok" and "speedup" in row


def _dtype(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({r["dtype"] for r in rows}))


def _heading(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({r["device"] for r in rows}))


def _about(rows: Sequence[Row]) -> str:
    """Versions, commits and days."""
    join = lambda key: ", ".join(sorted({str(r[key]) for r in rows}))
    versions = {
        f"{PEERS[r['impl']].title} {r['version']}"
        for r in rows
        if PEERS[r["impl"]].package not in ("torch", "flexattn")
    }
    others = "".join(f", {v}" for v in sorted(versions) if not v.endswith("none"))
    triton = "" if _is_cpu(rows) else f", Triton {join('triton')}"
    checked = all("error" in r for r in rows if r["status"] == "ok" and r["what"] in ("forward", "backward"))
    how = "compared with dense float64 attention" if checked else "compared with each other"
    return (
        f"{_dtype(rows)}, torch {join('torch')}{triton}{others}; flexattn at commit {join('commit')}, {join('date')}. "
        f"Outputs were {how} before they were timed."
    )


def _alt(rows: Sequence[Row]) -> str:
    return f"Bars: speed of flexattn and its peers on {_heading(rows)}"


# ---------------------------------------------------------------- RESULTS.md
def details(paths: Sequence[Path]) -> str:
    """All tables and all reasons."""
    parts = [
        "# Results",
        "Made by `python -m benchmarks report` from the files in `benchmarks/results`; do not edit. FLOPs are counted on kept "
        f"pairs, forward 4 * batch * heads * kept * head size, backward 2.5 times that; {_BRACKETS}. {_STAR}",
    ]
    for path in paths:
        rows = rows_of(path)
        parts += [
            f"## {_heading(rows)}",
            _about(rows),
            f"![{_alt(rows)}]({_relative(_picture(path), DETAILS.parent)})",
        ]
        parts += [text for title, text in _all_tables(rows) for text in (f"### {title}", text) if text != ""]
        parts.append(_reasons(rows))
    return "\n\n".join(p for p in parts if p) + "\n"


def _all_tables(rows: Sequence[Row]) -> list[tuple[str, str]]:
    rate = lambda r: _with_speedup(f"{_rate(r)}, {milliseconds(r['ms'])}", r)
    bandwidth = lambda r: _with_speedup(f"{milliseconds(r['ms'])}, {r['tbs']:.2f}", r)
    mebibytes = lambda r: f"{r['mib']:.0f}"
    host = lambda r: _with_speedup(milliseconds(r["ms"]), r)
    seconds = lambda r: f"{r['ms'] / 1e3:.2f}" + (" (first of its process)" if r["order"] == 0 else "")
    mask = lambda r: milliseconds(r["ms"]) + (f", {r['mib']:.0f} MiB" if "mib" in r else "")
    ceiling = lambda r: f"{r['tflops']:.0f} TFLOP/s" if "tflops" in r else f"{r['tbs']:.2f} TB/s"
    found = [
        ("Forward, TFLOP/s (G: GFLOP/s)", _table(rows, "forward", rate)),
        ("Backward, TFLOP/s (G: GFLOP/s)", _table(rows, "backward", rate)),
        ("Decode in a CUDA graph: time a call, TB/s", _table(rows, "decode", bandwidth)),
        ("Decode, call by call", _table(rows, "decode_eager", bandwidth)),
        ("Building a block mask", _table(rows, "mask", mask, first="tokens")),
        ("Host time of a small forward call", _table(rows, "host", host)),
        ("First call, cold, forward, seconds", _table(rows, "first_forward", seconds)),
        ("First call, cold, backward, seconds", _table(rows, "first_backward", seconds)),
        ("Peak memory of a forward, MiB", _table(rows, "memory_forward", mebibytes)),
        ("Peak memory of forward and backward, MiB", _table(rows, "memory_backward", mebibytes)),
        ("What the device itself reaches", _table(rows, "ceiling", ceiling, first="size")),
    ]
    return [(title, text) for title, text in found if text]


def _reasons(rows: Sequence[Row]) -> str:
    """Why cells are empty, each reason once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            key = (PEERS[row["impl"]].title, row["status"], row["reason"])
            found.setdefault(key, []).append(f"{row['what']} {row['shape']} {row['variant']}")
    if not found:
        return ""
    lines = []
    for (title, status, reason), cases in sorted(found.items()):
        named = (
            ", ".join(sorted(set(cases))) if len(cases) <= 3 else f"{len(cases)} cases, {sorted(cases)[0]} among them"
        )
        lines.append(f"- {title}: {status}: {reason.replace('<', '&lt;')} ({named})")
    return "### What has no figure\n\nAn empty cell was not timed; a dash is one of these:\n\n" + "\n".join(lines)


# ---------------------------------------------------------------- writing and checking
def _picture(path: Path) -> Path:
    return path.with_suffix(".png")


def _relative(path: Path, base: Path = ROOT) -> str:
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.name


def digest(rows: Iterable[Row]) -> str:
    """Of what a picture shows."""
    shown = [[r[k] for k in ("device", "what", "shape", "variant", "impl", "tflops")] for r in drawn(rows)]
    return hashlib.sha256(json.dumps(sorted(shown)).encode()).hexdigest()[:16]


def drawn(rows: Iterable[Row]) -> list[Row]:
    """The rows that become bars."""
    return [r for r in rows if r["what"] in ("forward", "backward") and r["status"] == "ok"]


def picture_digest(path: Path) -> str | None:
    """The digest a PNG carries in its 'Source' text, or None."""
    if not path.exists():
        return None
    data, at = path.read_bytes(), 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if kind == b"tEXt" and body.startswith(b"Source\x00"):
            return body[7:].decode("latin-1")
        at += 12 + size
    return None


def placed(text: str, section: str) -> str:
    """README's text with the section between its markers.

    Raises:
        ValueError: The markers are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the README must hold {BEGIN} and {END}; put them where the section belongs")
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{section}\n{END}{rest.split(END, 1)[1]}"


def stale() -> list[str]:
    """What differs from what the result files give."""
    paths = files()
    text = README.read_text(encoding="utf-8")
    found = [] if placed(text, readme_section(paths)) == text else ["README.md: section between the benchmark markers"]
    if not DETAILS.exists() or DETAILS.read_text(encoding="utf-8") != details(paths):
        found.append(_relative(DETAILS))
    found += [_relative(_picture(p)) for p in paths if picture_digest(_picture(p)) != digest(rows_of(p))]
    return found


def write() -> list[Path]:
    """Makes everything anew; returns the files written."""
    from benchmarks.chart import draw

    paths = files()
    text = README.read_text(encoding="utf-8")
    README.write_text(placed(text, readme_section(paths)), encoding="utf-8")
    DETAILS.write_text(details(paths), encoding="utf-8")
    for path in paths:
        draw(rows_of(path), _picture(path))
    return [README, DETAILS, *(_picture(p) for p in paths)]
