"""torch.func, forward-mode differentiation and second derivatives: what of them attention can do, and clear errors for the rest.

Reads tensors as torch's function transforms hand them over. The idea: a first derivative by torch.func.grad works, on the
tensors inside torch's wrappers; batching and forward mode have no rule here and would otherwise fail somewhere deep inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flexattn.errors import UnsupportedError

_FUNCTORCH: Any = torch._C._functorch


def check_transforms(tensors: Sequence[Tensor]) -> None:
    """Raises where a tensor is batched by vmap or carries a tangent of forward-mode differentiation.

    Args:
        tensors: query, key, value and what score_mod captured.
    Raises: UnsupportedError.
    """
    if torch._C._are_functorch_transforms_active() and any(_is_batched(_inside(x)) for x in tensors):
        raise no_batching()
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise no_forward_mode()


@contextlib.contextmanager
def outside() -> Iterator[Callable[[Tensor], Tensor]]:
    """Leaves torch's function transforms, inside which every new tensor is wrapped and has no memory that a kernel could read.

    Yields: what takes a tensor out of its wrappers; it raises UnsupportedError for one that vmap has batched.
    """
    if not torch._C._are_functorch_transforms_active():
        yield _unwrapped
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield _unwrapped


def _unwrapped(x: Tensor) -> Tensor:
    x = _inside(x)
    if _is_batched(x):
        raise no_batching()
    return x


def _inside(x: Tensor) -> Tensor:
    while _FUNCTORCH.is_gradtrackingtensor(x):
        x = _FUNCTORCH.get_unwrapped(x)
    return x


def _is_batched(x: Tensor) -> bool:
    return bool(_FUNCTORCH.is_batchedtensor(x) or _FUNCTORCH.is_legacy_batchedtensor(x))


def no_batching() -> UnsupportedError:
    """What to raise under torch.vmap, and what is built on it (jacrev, jacfwd, is_grads_batched)."""
    return UnsupportedError(
        "flex_attention has no rule for torch.vmap",
        given="a tensor batched by torch.vmap, or by torch.func.jacrev, jacfwd or is_grads_batched",
        hint="a batch dimension of query, key and value, with mods that read b; for a Jacobian, a loop over torch.func.vjp",
    )


def no_forward_mode() -> UnsupportedError:
    """What to raise under torch.func.jvp and torch.autograd.forward_ad."""
    return UnsupportedError(
        "flex_attention has no forward-mode derivative",
        given="a tensor with a tangent (torch.func.jvp, torch.func.jacfwd, torch.autograd.forward_ad)",
        hint="torch.func.vjp or torch.autograd.grad",
    )


def forbid_further_derivatives(
    grads: Sequence[Tensor | None], sources: Sequence[Tensor | None], *, times: str = "three times"
) -> tuple[Tensor | None, ...]:
    """The same gradients, joined to the graph by a node that raises when somebody differentiates them.

    Args:
        grads: of the inputs.
        sources: everything they depend on: the inputs and the gradients that came from above.
        times: how often attention would be differentiated then, for the message.
    """
    roots = [x for x in sources if x is not None and x.requires_grad]
    return tuple(None if g is None else _Once.apply(g, times, *roots) for g in grads)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(grad: Tensor, times: str, *roots: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise no_further_derivatives(ctx.times)


def no_further_derivatives(times: str) -> UnsupportedError:
    """What to raise for a derivative of a gradient that has none: of what kernels made, and of all third ones."""
    return UnsupportedError(
        f"flex_attention cannot be differentiated {times}",
        given="a further backward pass through its gradients (create_graph=True)",
        hint="torch.autograd.grad of the eager call with kernel_options={'BACKEND': 'TORCH'}, which has second derivatives"
        if times.startswith("twice")
        else "torch.nn.functional.scaled_dot_product_attention on the math backend, or a dense formula in torch ops",
    )


__all__ = [
    "check_transforms",
    "forbid_further_derivatives",
    "no_batching",
    "no_forward_mode",
    "no_further_derivatives",
    "outside",
]
