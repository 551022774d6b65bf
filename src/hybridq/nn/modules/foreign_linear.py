"""Linear layers of other libraries, whose own forward stays what runs without a recipe."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .linear_part import run_part
from .quantized_module import QuantizedModule

__all__ = ["ForeignLinear"]


class ForeignLinear(QuantizedModule):
    """Base of classes that `hybridq.convert` makes of linear layers of other libraries.

    Derive a class from it and then from the library's: parameters, attributes and `isinstance` stay
    what they were. Without a recipe the library's own forward runs, bit for bit. Under one the
    three GEMMs run between planes of the input, of the weight as `[out, in]` whichever way it is
    stored, and of the output's gradient.

    Attributes:
        holds_transposed: the weight is `[in, out]`; its gradient, and a quantized parameter, too.
        adds_bias_later: the product is rounded before the bias is added, as a step of its own.

    A weight that is `[in, out]` has no `main_grad`, and FSDP2 gathers its values and no planes.

    Example:
        >>> import torch, hybridq
        >>> from torch import nn
        >>> class Product(nn.Module):  # of some library
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.randn(64, 32))
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> class QuantizedProduct(hybridq.nn.ForeignLinear, Product):
        ...     holds_transposed = True
        >>> kind = hybridq.converters.Converter(
        ...     "Product", Product, QuantizedProduct, is_in_out=True
        ... )
        >>> layer, x = Product(), torch.randn(3, 64)
        >>> plain = layer(x)
        >>> kind.convert(layer)
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = layer(x)
        >>> torch.equal(layer(x), plain), torch.equal(y, plain)
        (True, False)
    """

    weight: nn.Parameter
    adds_bias_later: bool = False

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `input @ weight.T + bias`, or with `holds_transposed` `input @ weight + bias`.

        Args:
            input: `[..., in_features]`.
            args, kwargs: of the library's forward; under a recipe there must be none.

        Returns:
            `[..., out_features]`.

        Raises:
            RuntimeError: features or dtypes do not fit, or a weight that is `[in, out]` has
                `fuse_wgrad_accumulation`.
            TypeError: a dtype that cannot be quantized, or more arguments under a recipe.
        """
        recipe = self._recipe()
        plan = None if recipe is None else self.plan_of(recipe)
        if (plan is None or plan.is_plain) and not self.fuse_wgrad_accumulation:
            return super().forward(input, *args, **kwargs)
        if args or kwargs:
            got = len(args) + len(kwargs)
            raise self._error(TypeError, f"forward takes the input alone, got {got} more arguments")
        bias: torch.Tensor | None = getattr(self, "bias", None)  # not every class has one
        if bias is None or not self.adds_bias_later:
            return run_part(self, "", recipe, input, self._matrix(), bias)
        return run_part(self, "", recipe, input, self._matrix(), None) + bias

    def _matrix(self) -> torch.Tensor:
        """Return the weight as `[out, in]`."""
        if not self.holds_transposed:
            return self.weight
        if self.fuse_wgrad_accumulation:
            raise self._error(
                RuntimeError,
                "fuse_wgrad_accumulation needs a weight [out, in], got one [in, out]; leave it off",
            )
        return self.weight.t()
