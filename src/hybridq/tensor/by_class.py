"""A parameter made by its class: what libraries do that move parameters and know none of them."""

from __future__ import annotations

from typing import Any

from torch import nn

from .table import is_quantized

__all__ = ["MadeByClass"]


class MadeByClass:
    """`type(parameter)(tensor, requires_grad=...)`, as `nn.Parameter` is called.

    accelerate moves parameters so, between devices and to the host and back.
    """

    def __new__(cls, *args: Any, requires_grad: bool | None = None, **kwargs: Any) -> Any:
        """Return a quantized tensor as a parameter; torch's own constructor takes all else.

        Args:
            args: one quantized tensor.
            requires_grad: of the parameter; None: that of the tensor.
            kwargs: none.
        """
        if len(args) == 1 and is_quantized(args[0]) and not kwargs:
            needs = args[0].requires_grad if requires_grad is None else requires_grad
            return nn.Parameter(args[0], needs)
        if requires_grad is not None:
            kwargs["requires_grad"] = requires_grad
        return super().__new__(cls, *args, **kwargs)
