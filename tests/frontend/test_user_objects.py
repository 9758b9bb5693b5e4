"""A mod sees the very objects that it names: their identity, their types, their operators, their hooks, and what it writes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from flexattn.errors import FlexError, TraceError
from flexattn.frontend.trace import trace

HALF = "score*num0"


class Window:
    """A plain object."""

    def __init__(self) -> None:
        self.me = self


class Factor:
    """A number of its own kind."""

    def __init__(self, x: float) -> None:
        self.x = x

    def __float__(self) -> float:
        return self.x

    def __int__(self) -> int:
        return 2

    __index__ = __int__

    def __mul__(self, other: Any) -> Any:
        return other * self.x

    __rmul__ = __mul__

    def __lt__(self, other: Any) -> bool:
        return self.x < other

    def __enter__(self) -> float:
        return self.x

    def __exit__(self, *_: object) -> None:
        return None


@dataclasses.dataclass(order=True)
class Version:
    x: int = 1


MODE, LAYER, ONE, TWO, UNIT = Window(), torch.nn.Linear(1, 1), Version(1), Version(2), Factor(0.5)
ALIAS = MODE
ACTIVATION = functools.partial(torch.pow, exponent=2)


def gelu(x: Any) -> Any:
    return x * 3.0


class Net:
    act = staticmethod(gelu)


NET = Net()
SAME = {
    "type": lambda: type(MODE) is Window,
    "is": lambda: MODE is ALIAS,
    "attribute is itself": lambda: MODE.me is MODE,
    "type of a module": lambda: type(LAYER) is torch.nn.Linear,
    "name of a type": lambda: type(MODE).__name__ == "Window",
    "issubclass": lambda: issubclass(type(MODE), Window),
    "str": lambda: str(ONE) == "Version(x=1)",
    "by type": lambda: {torch.nn.Linear: True}.get(type(LAYER), False),
    "order": lambda: ONE < TWO,
    "replace": lambda: dataclasses.replace(ONE, x=2) == TWO,
    "asdict": lambda: dataclasses.asdict(ONE) == {"x": 1},
    "made anew": lambda: type(ONE)() == ONE,
    "float": lambda: float(UNIT) == 0.5,
    "int": lambda: int(UNIT) == 2,
    "index": lambda: [False, False, True][UNIT],
    "less": lambda: UNIT < 1,
    "a number's type": lambda: type(WIDTH) is int and type(ONE.x) is int,
    "a function by two roads": lambda: NET.act is gelu,
}
WIDTH = 7


@pytest.mark.parametrize("name", SAME)
def test_questions_about_objects_are_answered_for_the_objects_themselves(name: str) -> None:
    question = SAME[name]
    assert question(), "the question itself"
    text = str(trace(lambda s, b, h, q, k: s * (0.5 if question() else 1.5), "score").program)
    assert text == "score*0.5"


def test_operators_of_objects() -> None:
    def within(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with UNIT as x:
            return s * x

    for mod in (lambda s, b, h, q, k: s * UNIT, lambda s, b, h, q, k: UNIT * s, within):
        traced = trace(mod, "score")
        assert str(traced.program) == HALF and traced.binding.numbers == (0.5,)


@pytest.mark.parametrize("value", [0, 1, 2, 16, 17, -1, 2**31])
def test_numbers_of_objects_never_change_the_program(value: int) -> None:
    """Two attributes, equal to each other and to literals of the code."""

    class Both:
        def __init__(self, w: int, d: int) -> None:
            self.window, self.start = w, d

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q - k < self.window) & (k >= self.start) & (k % 2 == 1)

    both, other = Both(value, value), Both(1000, 30)
    by_closure = lambda o: lambda b, h, q, k: (q - k < o.window) & (k >= o.start) & (k % 2 == 1)
    for build in (lambda o: o, by_closure):
        traced = trace(build(both), "mask")
        assert traced.program == trace(build(other), "mask").program
        assert sorted(traced.binding.numbers) == [value, value]


def test_an_attribute_that_is_read_twice_is_one_argument() -> None:
    class Cap:
        cap = 20.0

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return self.cap * torch.tanh(s / self.cap)

    assert str(trace(Cap(), "score").program) == "num0*tanh(score/num0)"


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.nn.Tanh()
        self.weight = torch.nn.Parameter(torch.ones(4, 2))

    def forward(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.act(s) * self.weight[h, 0]


def test_hooks_of_modules_run() -> None:
    net = Scaled()
    assert str(trace(net, "score").program) == "tanh(score)*cap0[h, 0]"
    net.act.register_forward_hook(lambda module, args, out: out * 5.0)
    assert str(trace(net, "score").program) == "tanh(score)*5*cap0[h, 0]"
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1.0, *args[1:]))
    assert str(trace(net, "score").program) == "tanh(score + 1)*5*cap0[h, 0]"
    inside = lambda s, b, h, q, k: net(s, b, h, q, k)
    assert str(trace(inside, "score").program) == "tanh(score + 1)*5*cap0[h, 0]"


def test_a_forward_that_is_replaced_is_the_one_that_runs() -> None:
    net = Scaled()
    trace(net, "score")
    net.act.forward = lambda x: x * 9.0
    assert str(trace(net, "score").program) == "score*9*cap0[h, 0]"


def test_weights_that_a_hook_computes_are_fresh() -> None:
    net = Scaled()
    torch.nn.utils.weight_norm(net, "weight")
    with torch.no_grad():
        net.weight_g.mul_(3)
    found = trace(lambda s, b, h, q, k: net(s, b, h, q, k), "score").binding.captures[0]
    torch.testing.assert_close(found, 3 * torch.ones(4, 2))


class Kind(torch.Tensor):
    """A subclass without anything of its own."""


def test_a_subclass_of_tensor_is_read_as_a_tensor() -> None:
    table = torch.rand(4).as_subclass(Kind)
    traced = trace(lambda s, b, h, q, k: s * table[h] + table[k % 4], "score")
    (capture,) = traced.binding.captures
    assert type(capture) is torch.Tensor and capture.data_ptr() == table.data_ptr()


@pytest.mark.parametrize(
    "table", [torch.eye(4).to_sparse(), torch.ones(4, 4).to(torch.float8_e4m3fn)], ids=["sparse", "float8"]
)
def test_tensors_that_kernels_cannot_read_are_refused(table: torch.Tensor) -> None:
    with pytest.raises(TraceError, match="a captured tensor must be") as caught:
        trace(lambda s, b, h, q, k: s + table[h, q], "score")
    assert "test_user_objects.py" in str(caught.value)


# ---------------------------------------------------------------- what a mod writes
COUNT, CALLS, SEEN = 0, [0], {}


def test_what_a_mod_writes_is_written() -> None:
    class Lazy:
        def __init__(self) -> None:
            self.table, self.calls = None, 0

        def __call__(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            self.calls += 1
            if self.table is None:
                self.table = torch.arange(4.0)
            return s * self.table[h]

    lazy = Lazy()
    for mod in (lazy, lambda *a: lazy(*a), lazy.__call__):
        assert str(trace(mod, "score").program) == "score*cap0[h]"
    assert lazy.calls == 3 and type(lazy.calls) is int and lazy.table is not None

    def count(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        global COUNT
        COUNT += 1
        CALLS[0] += 1
        SEEN["x"] = CALLS[0]
        return s * (COUNT + 0.25)

    assert [trace(count, "score").binding.numbers for _ in range(3)] == [(1.25,), (2.25,), (3.25,)]
    assert COUNT == 3 and CALLS == [3] and SEEN == {"x": 3}

    def only_containers(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        CALLS.append(0.25)
        return s * CALLS[-1]

    assert trace(only_containers, "score").binding.numbers in ((0.25,), ())
    assert CALLS == [3, 0.25] and all(type(x) in (int, float) for x in CALLS)


def test_a_traced_value_that_is_kept_cannot_be_used_in_another_call() -> None:
    kept: list[Any] = []

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        kept.append(s)
        return s + kept[0]

    assert "score" in str(trace(mod, "score").program)
    with pytest.raises(TraceError, match="belongs to the call that made it"):
        trace(mod, "score")


# ---------------------------------------------------------------- a traced value among tensors
def test_traced_values_are_tensors_to_whoever_asks() -> None:
    is_number = lambda x: isinstance(x, (float, int))
    mods = (
        lambda s, b, h, q, k: s * (0.5 if torch.is_tensor(s) else 1.5),
        lambda s, b, h, q, k: s * (0.5 if isinstance(s, torch.Tensor) else 1.5),
        lambda s, b, h, q, k: s * (0.5 if isinstance(s, (int, torch.Tensor)) and not isinstance(s * 2, float) else 1.5),
        lambda s, b, h, q, k: s * (1.5 if is_number(s) or hasattr(s, "x") or getattr(s, "y", None) else 0.5),
    )
    for mod in mods:
        assert str(trace(mod, "score").program) == "score*0.5"
    assert "where" in str(trace(lambda s, b, h, q, k: torch.where(q > k, s, 0.0), "score").program)


RAW = {
    "dictionary": (lambda s, b, h, q, k: s * {0: 1.0}[h], KeyError, "captured tensor instead of a dictionary"),
    "numpy": (lambda s, b, h, q, k: s * torch.ones(4).numpy()[h], TypeError, "Try"),
    "shape": (lambda s, b, h, q, k: s * s.shape[0], IndexError, "no dimensions"),
    "matmul": (lambda s, b, h, q, k: s @ s, TypeError, "table"),
    "round": (lambda s, b, h, q, k: round(s), TypeError, "torch.round"),
    "divmod": (lambda s, b, h, q, k: s + divmod(q, 7)[0], TypeError, "x // y"),
    "by zero": (lambda s, b, h, q, k: s + q // 0, ZeroDivisionError, "divisor"),
    "modulo zero": (lambda s, b, h, q, k: s + q % 0, ZeroDivisionError, "divisor"),
    "max": (lambda s, b, h, q, k: s * max(q, k), TypeError, "torch.maximum"),
    "linear": (lambda s, b, h, q, k: LAYER(s), TypeError, "captured"),
    "embedding": (lambda s, b, h, q, k: torch.nn.Embedding(4, 2)(h).sum(), TypeError, "emb.weight"),
    "hypot": (lambda s, b, h, q, k: torch.hypot(s, s), TypeError, "sqrt"),
    "isin": (lambda s, b, h, q, k: torch.isin(q, torch.arange(3)), TypeError, "outside"),
    "bucketize": (lambda s, b, h, q, k: torch.bucketize(q, torch.arange(3)), TypeError, "outside"),
    "tensor": (lambda s, b, h, q, k: s * torch.tensor(q), TypeError, "tensor already"),
    "nothing": (lambda s, b, h, q, k: s * None.x, AttributeError, "Try"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_errors_of_python_and_torch_say_where_and_what_to_try(name: str) -> None:
    mod, builtin, fragment = RAW[name]
    with pytest.raises(builtin) as caught:
        trace(mod, "score")
    assert isinstance(caught.value, FlexError) and fragment in str(caught.value)
    assert "test_user_objects.py:" in str(caught.value)


def test_what_a_mod_raises_itself_arrives_as_it_is() -> None:
    class MineError(Exception):
        pass

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        raise MineError("mine")

    with pytest.raises(MineError, match=r"^mine$"):
        trace(mod, "score")


def test_a_traced_value_is_a_tensor_in_code_that_has_run_often() -> None:
    """Python changes the instructions of code that runs often."""

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        known = (
            isinstance(s, torch.Tensor),
            torch.is_tensor(q),
            not isinstance(s, float),
            all(isinstance(x, torch.Tensor) for x in (s,)),
        )
        return s * (0.5 if all(known) else 1.5)

    assert {str(trace(mod, "score").program) for _ in range(100)} == {"score*0.5"}
    for _ in range(100):
        mod(torch.ones(()), 0, 0, torch.tensor(0), 0)
    assert str(trace(mod, "score").program) == "score*0.5"
