"""Forward-mode derivatives: no operation here has one, and each says so.

A tangent travels beside a tensor. What reads the tensor's memory, or takes it out of autograd,
loses the tangent, and torch would go on as if it were zero. So every such place asks
`refuse_tangents`: functions where a tensor leaves autograd, and the operators, whose `Library` has
the question before the kernels of autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._torch_private import forward_ad

__all__ = ["Library", "refuse_tangents"]


def refuse_tangents(where: str, *tensors: torch.Tensor | None) -> None:
    """Raise where one of these tensors has a tangent of forward-mode differentiation.

    Args:
        where: what takes them, for the error.
        tensors: quantized or plain; None is no tensor.

    Raises:
        NotImplementedError: one has a tangent.
    """
    # Compiled code reaches the operators, which ask while it is traced.
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{where}: forward-mode differentiation is not supported, got a tensor with a "
                "tangent (of torch.autograd.forward_ad, torch.func.jvp, jacfwd or hessian); use "
                "reverse mode, or compute this part outside hybridq.autocast"
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
