"""Forward-mode derivatives, vmap and torch.func.grad: no operation here has one, and each says so.

A tangent travels beside a tensor. What reads the tensor's memory, or takes it out of autograd,
loses the tangent, and torch would go on as if it were zero. So every such place asks
`refuse_tangents`: functions where a tensor leaves autograd, and the operators, whose `Library` has
the question before the kernels of autograd.

`torch.func.grad` and its kin take no autograd function of this library, and `vmap` no operator:
torch says so in words about its own inside, so the same functions are asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from ..._torch_private import DispatchKey, dispatch_keys, forward_ad, interpreter, is_old_batched

__all__ = ["Library", "refuse_batched", "refuse_tangents"]

_VMAP: Final = "vmap (of torch.vmap, is_grads_batched=True or vectorize=True)"
_GRAD: Final = "grad (of torch.func.grad, vjp, jacrev or hessian)"


def refuse_tangents(where: str, *tensors: torch.Tensor | None) -> None:
    """Raise where forward mode, or a transform of torch.func, differentiates or maps over one.

    Args:
        where: what takes them, for the error.
        tensors: quantized or plain; None is no tensor.

    Raises:
        NotImplementedError: one has a tangent, is batched, or requires grad inside of a transform.
    """
    # Compiled code reaches the operators, which ask while it is traced.
    if torch.compiler.is_compiling():
        return
    transform = interpreter()
    if transform is not None:
        _refuse_transform(where, transform.key().name, tensors)
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{where}: forward-mode differentiation is not supported, got a tensor with a "
                "tangent (of torch.autograd.forward_ad, torch.func.jvp, jacfwd or hessian); use "
                "reverse mode, or compute this part outside hybridq.autocast"
            )


def _refuse_transform(where: str, kind: str, tensors: Iterable[torch.Tensor | None]) -> None:
    """Raise where the innermost transform is vmap or grad, and does something with a tensor."""
    grads = torch.is_grad_enabled()
    for one in tensors if kind in ("Vmap", "Grad") else ():
        if one is not None and (_is_batched(one) or (grads and one.requires_grad)):
            raise _no_transform(where, _VMAP if kind == "Vmap" else _GRAD)


def refuse_batched(where: str, grad: torch.Tensor) -> None:
    """Raise where a backward runs for many gradients of its output at once.

    Args:
        where: whose backward.
        grad: of the output.

    Raises:
        NotImplementedError: it stands for many.
    """
    if not torch.compiler.is_compiling() and _is_batched(grad):
        raise _no_transform(where, _VMAP)


def _is_batched(tensor: torch.Tensor) -> bool:
    """Return whether it stands for many: of vmap, or of the older one that autograd has."""
    return dispatch_keys(tensor).has(DispatchKey.FuncTorchBatched) or is_old_batched(tensor)


def _no_transform(where: str, kind: str) -> NotImplementedError:
    return NotImplementedError(
        f"{where}: transforms of torch.func are not supported, got a call inside of {kind}; use "
        "torch.autograd.grad with is_grads_batched=False, or torch.autograd.functional with "
        "vectorize=False, or compute this part outside hybridq.autocast"
    )


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    """Yield the tensors among the arguments of an operator, those of lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Library(torch.library.Library):
    """`torch.library.Library` whose operators refuse tangents, whatever their backward is."""

    def impl(
        self, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **options: Any
    ) -> None:
        """Register `fn`; one for autograd is asked only about tensors without tangents.

        Args:
            op_name, fn, dispatch_key: as for `torch.library.Library`.
            options: the same.
        """
        if dispatch_key != "Autograd":
            super().impl(op_name, fn, dispatch_key, **options)
            return

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if forward_ad._current_level >= 0:
                refuse_tangents(f"hybridq::{op_name}", *_tensors((*args, *kwargs.values())))
            return fn(keyset, *args, **kwargs)

        super().impl(op_name, kernel, dispatch_key, **options)
