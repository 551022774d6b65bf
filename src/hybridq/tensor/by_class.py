"""A parameter made by its class: what libraries do that move parameters and know none of them."""

from __future__ import annotations

from typing import Any

import torch
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

        Raises:
            TypeError: a parameter of values, which say nothing of a quantizer.
        """
        if len(args) == 1 and is_quantized(args[0]) and not kwargs:
            needs = args[0].requires_grad if requires_grad is None else requires_grad
            return nn.Parameter(args[0], needs)
        if requires_grad is not None:
            if len(args) == 1 and isinstance(args[0], torch.Tensor):
                raise TypeError(
                    f"{cls.__name__}: a parameter of planes is made of a quantized tensor "
                    f"(quantizer.quantize(values)), got a {type(args[0]).__name__}; accelerate's "
                    "offload to the disk makes it of values: keep quantized weights in memory "
                    '(cpu_offload, a device map without "disk")'
                )
            kwargs["requires_grad"] = requires_grad
        return super().__new__(cls, *args, **kwargs)
