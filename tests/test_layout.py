"""The shape of the package: what may import what, and what `import flexattn` costs."""

from __future__ import annotations

import ast
import builtins
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "flexattn"
FOLDERS = ["errors", "frontend", "codegen", "runtime", "__init__", "__main__"]  # each may import those to its left
TOOLS = ["mods", "ordering"]  # files at the top that users import beside the package's own names
# Order inside frontend is import order, as the design lists it.
FRONTEND = [
    "eager", "arguments", "source", "ops", "expr", "bytecode", "numbers", "program", "contents", "mod_errors",
    "proxy", "torch_functions", "simplify", "trace", "program_text", "record", "evaluate",
    "interval", "box_bounds", "symbolic", "gradient",
    "spans", "closed_form", "clusters", "refine", "tile_search", "slices", "algebra", "periodic", "tile_map",
    "group_forms", "statistics", "row_tape", "row", "mask_functions", "predicate_mask", "block_lists", "list_mask",
    "display", "figures", "mask_window", "torch_lists", "mask_views", "mask_operations", "mask_pytree", "saved",
    "block_mask", "graph_mask", "stack", "create", "check",
]  # fmt: skip
HEAVY = ["triton", "sympy", "matplotlib", "torch._dynamo", "torch._inductor", "numpy.testing", "IPython"]


def _files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "skeletons" not in p.parts)


def _folder(module: str) -> str:
    """'flexattn.frontend.expr' -> 'frontend'; a top-level module stands for itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def _imports(path: Path, *, at_import_time: bool) -> list[str]:
    """Modules of flexattn that a file imports; `from flexattn.a import b` counts as flexattn.a.b where that is a file."""
    tree = ast.parse(path.read_text())
    nodes = _top_level(tree) if at_import_time else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] == "flexattn"]
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(path, node)
            if module.split(".")[0] == "flexattn":
                found += [_member(module, a.name) for a in node.names]
    return found


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """The full name of the module in `from ..a import b`."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    return ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))


def _member(module: str, name: str) -> str:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return f"{module}.{name}" if (base / f"{name}.py").exists() or (base / name).is_dir() else module


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    """Statements that run at import: not those in functions, not those under `if TYPE_CHECKING`."""
    todo: list[ast.stmt] = list(tree.body)
    found = []
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found.append(node)
        for block in ("body", "orelse", "finalbody"):
            todo += getattr(node, block, [])
    return found


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_folders_import_only_to_their_left(path: Path) -> None:
    own = _folder(_module(path))
    if own in (*TOOLS, "__init__"):
        return
    allowed = FOLDERS[: FOLDERS.index(own) + 1]
    for imported in _imports(path, at_import_time=False):
        assert _folder(imported) in allowed, f"{own} imports {imported}"


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_import_nothing_of_the_package_but_the_frontend(tool: str) -> None:
    path = PACKAGE / f"{tool}.py"
    assert [m for m in _imports(path, at_import_time=False) if _folder(m) not in ("errors", "frontend")] == []


def test_frontend_files_import_only_those_above_them_at_import_time() -> None:
    for path in _files():
        if path.parent.name != "frontend" or path.stem not in FRONTEND:
            continue
        for imported in _imports(path, at_import_time=True):
            name = imported.split(".")[-1]
            if _folder(imported) == "frontend" and name in FRONTEND:
                assert FRONTEND.index(name) < FRONTEND.index(path.stem), f"{path.stem} imports {name}"


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_error_says_what_came_and_what_to_try(path: Path) -> None:
    """Contract line 8: an error of ours has a `hint`, and what came: in `given`, in its words, or as a place in a mod."""
    if _folder(_module(path)) not in ("frontend", "runtime", *TOOLS):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(call := node.exc, ast.Call) and _is_ours(call):
            keys = {k.arg for k in call.keywords}
            assert "hint" in keys, f"line {node.lineno}: no hint"
            said = keys & {"given", "where"} or isinstance(call.args[0], ast.JoinedStr) or _name(call) == "error"
            assert said, f"line {node.lineno}: no given"


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).split(".")[-1]


def _is_ours(call: ast.Call) -> bool:
    return _name(call) == "error" or _name(call).endswith("Error") and not hasattr(builtins, _name(call))


def test_no_import_cycles_at_import_time() -> None:
    graph = {_module(p): set(_imports(p, at_import_time=True)) for p in _files()}
    done: set[str] = set()

    def walk(module: str, road: tuple[str, ...]) -> None:
        assert module not in road, " -> ".join((*road, module))
        if module in done:
            return
        for imported in graph.get(module, ()):
            walk(imported, (*road, module))
        done.add(module)

    for module in graph:
        walk(module, ())
    assert done == set(graph) | done


def test_reference_imports_nothing_of_the_package_and_optimised_code_never_imports_it() -> None:
    assert set(_imports(PACKAGE / "runtime" / "reference.py", at_import_time=False)) <= {"flexattn.errors"}
    for path in _files():
        assert "flexattn.runtime.reference" not in _imports(path, at_import_time=False), path


def _run(code: str, **env: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=PACKAGE.parent,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_and_a_call_need_no_gpu_and_no_heavy_module() -> None:
    blocked = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ImportError("blocked " + name)
sys.meta_path.insert(0, Block())
import torch
before = set(sys.modules)
import flexattn
new = set(sys.modules) - before
print([m for m in {HEAVY!r} if any(n == m or n.startswith(m + ".") for n in new)])
x = torch.randn(1, 2, 40, 8)
print(tuple(flexattn.flex_attention(x, x, x, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).shape))
print([m for m in ("triton", "torch._dynamo") if m in sys.modules])
"""
    assert _run(blocked, CUDA_VISIBLE_DEVICES="").splitlines() == ["[]", "(1, 2, 40, 8)", "[]"]


def test_import_costs_less_than_50_ms_beyond_torch(tmp_path: Path) -> None:
    """Processor time, with byte code as an installed package has it (kept in tmp_path, whatever the environment says)."""
    code = f"""
import sys, time, torch
sys.dont_write_bytecode, sys.pycache_prefix = False, {str(tmp_path)!r}
start = time.process_time()
import flexattn
print((time.process_time() - start) * 1e3)
"""
    _run(code)  # writes the byte code
    times = [float(_run(code)) for _ in range(3)]
    assert min(times) < 50, times


def test_every_exported_name_exists_and_is_documented() -> None:
    import flexattn

    for name in flexattn.__all__:
        value = getattr(flexattn, name)
        assert name == "__version__" or getattr(value, "__doc__", None), name
    assert re.fullmatch(r"\d+\.\d+\.\d+", flexattn.__version__)
    assert set(dir(flexattn)) == set(flexattn.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = flexattn.no_such_name


def test_function_is_not_shadowed_by_a_submodule() -> None:
    code = """
from flexattn import flex_attention, explain, stats
import flexattn, flexattn.runtime.attention, flexattn.runtime.explain, flexattn.runtime.stats
print(callable(flexattn.flex_attention), flexattn.flex_attention is flex_attention)
print(callable(flexattn.stats), callable(flexattn.explain))
"""
    assert _run(code).split() == ["True"] * 4
