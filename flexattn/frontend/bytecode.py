"""What the code of a function says of itself: its literals, the names it uses, and whether it writes or asks for identity.

Reads a code object; makes CodeFacts, once per code object. The one idea: who wrote a number can be seen in the code, so the
objects that a mod reads need not be replaced by others to find out.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

R = TypeVar("R")
_KEPT = 4096

_WRITES_NAMES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_WRITES_CELLS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_WRITES_OBJECTS = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
_OTHER_EFFECTS = frozenset({"IMPORT_NAME", "LOAD_BUILD_CLASS", "BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"})
_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_LOADS = frozenset(
    {
        "LOAD_ATTR",
        "LOAD_METHOD",
        "LOAD_DEREF",
        "LOAD_CLASSDEREF",
        "LOAD_FAST",
        "LOAD_FAST_LOAD_FAST",
        "LOAD_FAST_BORROW",
    }
    | {"LOAD_FAST_CHECK", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
    | _GLOBALS
)
_ASKING = frozenset(
    {"type", "id", "globals", "locals", "vars", "eval", "exec", "setattr", "delattr", "__class__", "__globals__"}
)
_SMALL = "LOAD_SMALL_INT"
# torch's functions that draw random numbers; with an underscore behind them, tensors' methods.
# fmt: off
DRAWING = frozenset((
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "normal", "multinomial",
    "poisson", "binomial", "uniform", "random", "exponential", "cauchy", "geometric", "log_normal",
))
# fmt: on


def once(read: Callable[[types.CodeType], R]) -> Callable[[types.CodeType], R]:
    """What is read of a code object, kept by its identity: hashing code costs as much as running it."""
    known: dict[int, tuple[types.CodeType, R]] = {}

    @functools.wraps(read)
    def call(code: types.CodeType) -> R:
        found = known.get(id(code))
        if found is None:
            if len(known) >= _KEPT:
                known.clear()
            found = known[id(code)] = (code, read(code))  # holds the code, and so its id
        return found[1]

    return call


class IntLiteral(int):
    """An int that the code of a mod contains; arithmetic gives plain ints."""


class FloatLiteral(float):
    """A float that the code of a mod contains."""


class CodeFacts(NamedTuple):
    """Facts of a code object and of those nested in it.

    Attributes:
        literals: (type, value) of each number in it.
        names: of globals and attributes.
        globals: names that are looked up as globals.
        attributes: names that are looked up elsewhere.
        rebinds: it assigns globals, or cells of an enclosing function.
        writes: that, or it assigns attributes or items, or has other effects.
        asks: it compares by identity, or asks for types or namespaces: it must see the very objects.
        branches: a condition decides what it does.
        draws: a name is one of torch's random functions.
    """

    literals: frozenset[tuple[type, Any]]
    names: frozenset[str]
    globals: frozenset[str]
    attributes: frozenset[str]
    rebinds: bool
    writes: bool
    asks: bool
    branches: bool
    draws: bool


@once
def code_facts(code: types.CodeType) -> CodeFacts:
    """The facts of a code object."""
    inner = [code_facts(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    literals = {n for c in code.co_consts for n in _numbers(c)}.union(*(f.literals for f in inner))
    looked_up: set[str] = set()
    attributes: set[str] = set()
    rebinds = writes = asks = branches = False
    before = None
    for step in dis.get_instructions(code):
        op, name = step.opname, step.argval
        if op == _SMALL:
            literals.add((int, name))
        if isinstance(name, str) and op in _GLOBALS:
            looked_up.add(name)
        elif isinstance(name, str) and name in code.co_names:
            attributes.add(name)
        rebinds |= op in _WRITES_NAMES or op in _WRITES_CELLS and name in code.co_freevars
        writes |= op in _WRITES_OBJECTS or op in _OTHER_EFFECTS
        asks |= name in _ASKING if op in _GLOBALS else op == "LOAD_ATTR" and name in ("__class__", "__globals__")
        if op == "IS_OP" and not (
            before is not None and before.opname == "LOAD_CONST" and before.argval in (None, ..., True, False)
        ):
            asks = True
        branches |= "JUMP" in op and "IF" in op
        before = step
    names = frozenset(code.co_names).union(*(f.names for f in inner))
    return CodeFacts(
        frozenset(literals),
        names,
        frozenset(looked_up).union(*(f.globals for f in inner)),
        frozenset(attributes).union(*(f.attributes for f in inner)),
        rebinds or any(f.rebinds for f in inner),
        rebinds or writes or any(f.writes for f in inner),
        asks or any(f.asks for f in inner),
        branches or any(f.branches for f in inner),
        any(n.rstrip("_") in DRAWING for n in names),
    )


def _numbers(value: Any) -> list[tuple[type, Any]]:
    if type(value) in (int, float):
        return [(type(value), value)]
    return [n for item in value for n in _numbers(item)] if isinstance(value, (tuple, frozenset)) else []


@once
def marked(code: types.CodeType) -> types.CodeType:
    """The same code with its numbers as IntLiteral and FloatLiteral, so that they are known wherever they turn up."""
    consts = tuple(_marked(c) for c in code.co_consts)
    return code if all(a is b for a, b in zip(consts, code.co_consts)) else code.replace(co_consts=consts)


def _marked(value: Any) -> Any:
    if type(value) is int:
        return IntLiteral(value)
    if type(value) is float:
        return FloatLiteral(value)
    if type(value) is tuple:
        items = tuple(map(_marked, value))
        return value if all(a is b for a, b in zip(items, value)) else items
    return marked(value) if isinstance(value, types.CodeType) else value


def knows_its_integers() -> bool:
    """Whether `marked` reaches every integer: Python 3.14 keeps small ones in the instructions themselves."""
    return _SMALL not in dis.opmap


@once
def _loads(code: types.CodeType) -> tuple[tuple[int, str], ...]:
    steps = (s for s in dis.get_instructions(code) if s.opname in _LOADS)
    return tuple((s.offset, s.argval[-1] if isinstance(s.argval, tuple) else str(s.argval)) for s in steps)


def last_name(code: types.CodeType, position: int) -> str | None:
    """The name that was read last before a position: for `x < self.width` at its comparison, 'width'."""
    name = None
    for offset, read in _loads(code):
        if offset >= position:
            break
        name = read
    return name


@functools.lru_cache(maxsize=4096)
def called(code: types.CodeType, position: int) -> str | None:
    """The global name of the function that a call instruction calls; None for other instructions and callees."""
    steps = list(dis.get_instructions(code))
    at = next((i for i in reversed(range(len(steps))) if steps[i].offset <= position), None)
    if at is None or not steps[at].opname.startswith(("CALL", "PRECALL")):  # Python 3.11 may still be at the latter
        return None
    start = _start(steps[at])
    if start is None:
        return _callee(steps, at) if steps[at].opname == "CALL_FUNCTION" else None
    for step in reversed(steps[:at]):
        if step.opname in _GLOBALS and _start(step) == start:
            return str(step.argval)
    return None


def _callee(steps: list[dis.Instruction], at: int) -> str | None:
    """The same where Python 3.10 says no columns: what lies below the arguments on the stack; None past a branch."""
    missing = (steps[at].arg or 0) + 1
    for step in reversed(steps[:at]):
        if "JUMP" in step.opname or step.is_jump_target:
            return None
        missing -= dis.stack_effect(step.opcode, step.arg)
        if missing <= 0:
            return str(step.argval) if step.opname in _GLOBALS else None
    return None


def _start(step: dis.Instruction) -> tuple[int | None, int | None] | None:
    """Where the text of an instruction begins; None where Python does not say."""
    where = getattr(step, "positions", None)
    return None if where is None or where.col_offset is None else (where.lineno, where.col_offset)
