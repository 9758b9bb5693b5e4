"""Runs a mod while torch.compile traces the function around it, and writes down what it does as text.

Reads a mod and runs it on scalars of the meta device, which have a dtype and a shape but no value; a mode of torch's sees each
operation on them. The one idea: Dynamo runs this very code, symbolically. So what a mod captures are tensors of the graph, with
their gradients, the numbers of a closure are the graph's own sizes and guards, and of the mod itself nothing is left but its text.

Everything here is plain Python over lists and strings, as Dynamo must follow each line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flexattn.errors import TraceError


class Recorder(torch.overrides.TorchFunctionMode):
    """Records what is done to traced values.

    Attributes:
        lines: of the text.
        captures, numbers: what the text names, in order of first use.
    """

    def __init__(self, literals: list[int | float]) -> None:
        super().__init__()
        self.literals = literals
        self.values: list[Tensor] = []
        self.lines: list[str] = []
        self.captures: list[Tensor] = []
        self.numbers: list[int | float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not self.has_value(args) and not self.has_value(list(kwargs.values())):
            if "device" not in kwargs or torch.device(kwargs["device"]).type != "meta":
                return func(*args, **kwargs)
            out = self.made(func.__name__, args, kwargs.get("dtype"))
        elif func.__name__ in ("__getitem__", "getitem"):
            args = self.indexed(args[0], args[1])
            out = self.shape_of(args[0])[self.first(args[1])]
        else:
            args = [self.scalar(x) for x in args]
            out = func(*[self.shape_of(x) for x in args], **{k: self.shape_of(v) for k, v in kwargs.items()})
        self.write(func.__name__, args, kwargs)
        self.values.append(out)
        return out

    # ---------------------------------------------------------------- shapes
    def made(self, name: str, args: Any, dtype: Any) -> Tensor:
        """A scalar that the mod makes on the device of a traced value."""
        value = args[0] if name in ("tensor", "as_tensor", "scalar_tensor") else args[1] if name == "full" else 0.0
        return torch.full((), value, dtype=dtype, device="meta")

    def place(self, known: list[Any], x: Any) -> int:
        """Where an object is in a list; -1 if it is not."""
        for n, other in enumerate(known):
            if other is x:
                return n
        return -1

    def has_value(self, x: Any) -> bool:
        """Whether a traced value is among arguments."""
        if isinstance(x, (tuple, list)):
            return any(self.has_value(y) for y in x)
        return isinstance(x, Tensor) and self.place(self.values, x) >= 0

    def shape_of(self, x: Any) -> Any:
        """An argument that can be computed with on the meta device."""
        if isinstance(x, (tuple, list)):
            return [self.shape_of(y) for y in x]
        if isinstance(x, Tensor) and x.device.type != "meta":
            return torch.empty_like(x, device="meta")
        return x

    def first(self, index: Any) -> Any:
        """An index that takes the first element wherever a traced one stands: the result has the same shape."""
        if isinstance(index, tuple):
            return tuple([self.first(x) for x in index])
        return 0 if isinstance(index, Tensor) else index

    # ---------------------------------------------------------------- captured tensors
    def scalar(self, x: Any) -> Any:
        """A captured tensor of one element as one of no dimension."""
        if isinstance(x, Tensor) and x.dim() and x.numel() == 1 and self.place(self.values, x) < 0:
            return x.reshape(())
        return x

    def indexed(self, tensor: Tensor, index: Any) -> tuple[Tensor, Any]:
        """A captured tensor and its index with the slices taken out of the index: they are operations of the graph."""
        if self.place(self.values, tensor) >= 0:
            return tensor, index
        parts = list(index) if isinstance(index, tuple) else [index]
        for n, part in enumerate(parts):
            if part is ...:
                parts = parts[:n] + [slice(None)] * (tensor.dim() - len(parts) + 1) + parts[n + 1 :]
                break
        sliced = [n for n, p in enumerate(parts) if isinstance(p, slice)]
        if not sliced:
            return tensor, index
        tensor = tensor[tuple([p if isinstance(p, slice) else slice(None) for p in parts])]
        rest = [n for n in range(len(parts)) if n not in sliced]
        tensor = tensor.permute([*rest, *sliced, *range(len(parts), tensor.dim())])
        return tensor, tuple([parts[n] for n in rest])

    # ---------------------------------------------------------------- text
    def write(self, name: str, args: Any, kwargs: Any) -> None:
        """Adds the line of a call."""
        given = [self.text(x) for x in args]
        given += [f"{k}={self.text(v)}" for k, v in kwargs.items() if k != "device"]
        self.lines.append(f"{name}({', '.join(given)})")

    def text(self, x: Any) -> str:
        """A value in the text."""
        if isinstance(x, Tensor):
            if (n := self.place(self.values, x)) >= 0:
                return f"v{n}"
            if self.place(self.captures, x) < 0:
                self.captures.append(x)
            return f"c{self.place(self.captures, x)}"
        if isinstance(x, (tuple, list)):
            inner = "".join([f"{self.text(y)}, " for y in x])
            return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
        if isinstance(x, slice):
            return f"slice({self.text(x.start)}, {self.text(x.stop)}, {self.text(x.step)})"
        if x is ...:
            return "..."
        if x is None or isinstance(x, (bool, str, torch.dtype)):
            return repr(x)
        if isinstance(x, (int, float)):
            return self.number(x)
        raise TraceError(
            f"a mod cannot use a {type(x).__name__} as a value", hint="use Python numbers or captured torch tensors"
        )

    def number(self, x: int | float) -> str:
        """A number: a literal of the mod's code is a constant of its program, any other an argument."""
        if is_static(x):
            if x != x or x in (float("inf"), -float("inf")) or self.is_literal(x):
                return repr(x)
            for n, known in enumerate(self.numbers):
                if is_static(known) and type(known) is type(x) and known == x:
                    return f"n{n}"
        elif (n := self.place(self.numbers, x)) >= 0:
            return f"n{n}"
        self.numbers.append(x)
        return f"n{len(self.numbers) - 1}"

    def is_literal(self, x: int | float) -> bool:
        """Whether the mod's own code contains a number."""
        return any(type(n) is type(x) and n == x for n in self.literals)


def is_static(x: Any) -> bool:
    """Whether a number is the same in every run of the graph that is being traced."""
    return torch.fx.experimental.symbolic_shapes.has_static_value(x)


class Recorded:
    """A mod as text, with what the text names."""

    def __init__(self, text: str, captures: list[Tensor], numbers: list[int | float]) -> None:
        self.text, self.captures, self.numbers = text, captures, numbers


def _recorded(recorder: Recorder, mod: Callable[..., Any], arguments: list[Tensor]) -> Any:
    with recorder:
        return mod(*arguments)


def _defaults(mod: Callable[..., Any], given: int) -> tuple[Any, ...]:
    """Defaults of further parameters, given as arguments: Dynamo of torch 2.11 has no guard for those that it fills in itself."""
    code, values = getattr(mod, "__code__", None), getattr(mod, "__defaults__", None)
    return values if code is not None and values and code.co_argcount == given + len(values) else ()


def record(mod: Callable[..., Any], kind: str, score_dtype: torch.dtype = torch.float32) -> Recorded:
    """Runs a mod once and writes down what it computes.

    Args:
        mod: `score_mod(score, b, h, q_idx, kv_idx)` or `mask_mod(b, h, q_idx, kv_idx)`.
        kind: "score" or "mask".
        score_dtype: float32, or float64 for float64 inputs.
    Returns: its text, for `program_text.replay`.
    """
    code = getattr(mod, "__code__", None)
    recorder = Recorder([] if code is None else [x for x in code.co_consts if isinstance(x, (int, float))])
    dtypes = ([score_dtype] if kind == "score" else []) + [torch.int64] * 4
    arguments = [torch.empty((), dtype=d, device="meta") for d in dtypes]
    recorder.values.extend(arguments)
    # Inside a checkpoint, Dynamo takes a mode for a side effect; this one is gone again when the mod has run.
    allowed = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer
    result = allowed(_recorded, recorder, mod, [*arguments, *_defaults(mod, len(arguments))])
    returned = recorder.text(recorder.scalar(result))
    return Recorded("\n".join([*recorder.lines, f"return {returned}"]), recorder.captures, recorder.numbers)
