"""Predicate masks in files: the traced form, so that a process without the function's source gets the same mask.

Reads a mask and writes plain data, and the way back. The one idea: a program is a list of table rows that name earlier ones, so
a file holds names, numbers and tensors, no code, and reading one runs none.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import CallError, FileError
from flexattn.frontend.arguments import device_of
from flexattn.frontend.evaluate import evaluate
from flexattn.frontend.expr import Expr, convert, fold, intern, load, rebuild, topological
from flexattn.frontend.mask_functions import noop_mask
from flexattn.frontend.numbers import tag
from flexattn.frontend.ops import OPS
from flexattn.frontend.predicate_mask import PredicateMask
from flexattn.frontend.program import Binding, CaptureInfo, Program, Traced
from flexattn.frontend.proxy import Proxy
from flexattn.frontend.source import Source

FORMAT, VERSION = "flexattn.BlockMask", 2  # version 1 had no checksum
_LEAVES = {"var": 0, "const": 0, "num": 0, "cast": 1}  # operations besides the table's, with their arguments
_VARIABLES = ("b", "h", "q_idx", "kv_idx")
Node = tuple[str, tuple[int, ...], Any, str]  # operation, earlier nodes, attribute, data type


def write(path: str | os.PathLike[str], mask: PredicateMask, style: Sequence[bool | None]) -> None:
    """Writes a mask, and how its lists are written."""
    mask.check_current()
    traced, content = mask.traced, {"format": FORMAT, "version": VERSION, "style": tuple(style)}
    content |= {"sizes": mask.sizes, "lengths": mask.lengths, "block": mask.block}
    content |= {"device": None if mask.follows else str(mask.device), "program": None}
    if traced is not None:
        program, (captures, numbers) = traced
        content["program"] = {
            "nodes": _nodes(program.body),
            "captures": [t.detach().clone() for t in captures],  # without what lies around them in memory
            "numbers": list(numbers),
            "name": program.name,
            "where": None if program.where is None else tuple(program.where),
        }
    whole = content | {"checksum": _checksum(content)}
    with _opened(path, "wb") as file:
        torch.save(whole, file)


def read(path: str | os.PathLike[str], device: torch.device | str | None) -> tuple[PredicateMask, tuple[Any, ...]]:
    """The mask and the style in a file."""
    with _opened(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as e:  # torch raises whatever its reader stumbled over
            raise _refused(path, f"a file that torch cannot read ({type(e).__name__})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _refused(path, "other data")
    if content.get("version") not in (1, VERSION):
        raise _refused(path, f"version {content.get('version')}, where this flexattn reads 1 and {VERSION}")
    if content["version"] == VERSION and content.pop("checksum", None) != _checksum(content):
        raise _refused(path, "damaged content: it does not fit its checksum")
    try:
        mask, style = _mask_of(content), tuple(content["style"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise _refused(path, f"damaged content ({e})") from None
    wanted = content["device"] if device is None else device
    if wanted is None:
        return mask.following(device_of(torch.accelerator.current_accelerator() or "cpu")), style
    return mask.to(device_of(wanted, hint='BlockMask.load(path, device="cpu")')), style


def _opened(path: Any, mode: str) -> AbstractContextManager[Any]:
    """The file; what the system says of a path, such as that there is no such file, is said as it is."""
    if hasattr(path, "read"):
        return nullcontext(path)
    if not isinstance(path, (str, os.PathLike)):
        raise CallError("a mask's file is named by a path", given=type(path).__name__, hint='BlockMask.load("mask.pt")')
    return open(path, mode)


def _checksum(content: dict[str, Any]) -> str:
    """Of all that a file holds, whatever way it is written."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        if isinstance(value, dict):
            value = sorted(value.items())
        if isinstance(value, Tensor):
            digest.update(repr((value.dtype, tuple(value.shape))).encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, (tuple, list)):
            digest.update(f"({len(value)}".encode())
            for item in value:
                add(item)
        else:
            digest.update(f"{value!r};".encode())

    add(content)
    return digest.hexdigest()


def _refused(path: object, given: str) -> FileError:
    return FileError(f"{path} holds no BlockMask that can be read", given=given, hint="mask.save(path)")


def _mask_of(content: dict[str, Any]) -> PredicateMask:
    traced, stored = None, content["program"]
    if stored is not None:
        captures, numbers = tuple(stored["captures"]), tuple(stored["numbers"])
        info = tuple(CaptureInfo(t.dtype, t.dim()) for t in captures)
        kinds = tuple("int" if isinstance(n, int) else "float" for n in numbers)
        where = None if stored["where"] is None else Source(*stored["where"])
        body = _body(stored["nodes"], captures, numbers)
        program = Program("mask", body, info, kinds, name=str(stored["name"]), where=where)
        traced = Traced(program, Binding(captures, numbers))
    sizes, lengths, block = ((int(a), int(b)) for a, b in (content[n] for n in ("sizes", "lengths", "block")))
    device, follows = torch.device("cpu"), content["device"] is None
    function = noop_mask if traced is None else functools.partial(replayed, traced.program, *traced.binding)
    return PredicateMask(traced, function, sizes=sizes, lengths=lengths, block=block, device=device, follows=follows)


# ---------------------------------------------------------------- programs as data
def _nodes(body: Expr) -> list[Node]:
    order = topological([body])
    place = {node: n for n, node in enumerate(order)}
    return [(n.op, tuple(place[a] for a in n.args), n.attr, str(n.dtype).removeprefix("torch.")) for n in order]


def _body(nodes: Sequence[Node], captures: Sequence[Tensor], numbers: Sequence[int | float]) -> Expr:
    """The expression of a list of nodes.

    Raises:
        ValueError: a node is none of a mask's, or names something that is not there.
    """
    built: list[Expr] = []
    for op, args, attr, dtype in nodes:
        kind = getattr(torch, dtype)
        if op == "load":
            attr = (int(attr[0]), int(attr[1]), str(attr[2]))
            tensor = captures[attr[0]]
            known = len(args) == tensor.dim() == attr[1] and str(tensor.dtype) == f"torch.{attr[2]}"
        else:
            arity = _LEAVES.get(op, OPS[op].arity if op in OPS else -1)
            known = arity == len(args) and (op != "var" or attr in _VARIABLES)
            known = known and (op != "num" or 0 <= attr < len(numbers))
        if not known or not isinstance(kind, torch.dtype) or any(not 0 <= a < len(built) for a in args):
            raise ValueError(f"node {len(built)}, {op!r}, is none of a mask's")
        built.append(intern(op, tuple(built[a] for a in args), attr, kind))
    if built[-1].dtype != torch.bool:
        raise ValueError("the last node is no truth value")
    return built[-1]


# ---------------------------------------------------------------- programs as functions
def replayed(
    program: Program, captures: tuple[Tensor, ...], numbers: tuple[Any, ...], b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> Any:
    """A program as a mask function: of tensors, or of traced values, into whose trace it goes as it is."""
    index = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
    proxy = next((x for x in index.values() if isinstance(x, Proxy)), None)
    if proxy is None:
        b, h, q_idx, kv_idx = map(torch.as_tensor, index.values())
        return evaluate(program, Binding(captures, numbers), b=b, h=h, q_idx=q_idx, kv_idx=kv_idx)
    trace, arguments = proxy.trace, tuple(map(tag, numbers))

    def visit(node: Expr, args: list[Expr]) -> Expr:
        if node.op == "var":
            return convert(trace.operand(index[node.attr]), torch.int64)
        if node.op == "num":
            return convert(trace.operand(arguments[node.attr]), node.dtype)
        if node.op == "load":
            tensor = captures[node.attr[0]]
            return load(trace.capture(tensor), tensor.dtype, args)
        return rebuild(node, args)

    return trace.wrap(fold([program.body], visit)[0])
