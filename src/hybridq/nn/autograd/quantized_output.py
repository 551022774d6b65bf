"""Tensors that stay quantized between modules: `fp8_output` and `fp8_grad`.

The output of a module, or the gradient that it hands back, is a QuantizedTensor made by the
quantizer of that slot. The next module encodes it like any input, and the operator takes planes
that the tensor already has as they are (`tensor.encoded`): there is no second rounding, and with
equal quantizers on both sides every bit is that of a plain tensor between them.
"""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.inputs import refuse_tangents
from ...kernels.operators import StatedFunction
from ...quantizers import Quantizer
from ...recipes import QuantizerRole, Recipe
from ...recipes.boundary import boundary_by_key, boundary_quantizer
from ...recipes.roles import GRAD_INPUT, OUTPUT
from ...tensor import QuantizedTensor, matrix_shape
from .double_backward import without_derivative

__all__ = ["Boundary", "with_quantized_gradient"]


class Boundary:
    """What a module knows of its boundary slots: their roles and quantizers."""

    # Class attributes, so that a module whose __class__ `convert` changed has them too.
    name: str
    training: bool
    module_type: str
    _boundary_roles: tuple[QuantizerRole | None, QuantizerRole | None] = (None, None)
    #: By tensor type: the recipe and role that were asked for, and the quantizer.
    _boundary: dict[str, tuple[Recipe, QuantizerRole, Quantizer]]

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """The role that a recipe is asked for where the output is to be quantized.

        None, the default, is the module's own `"output"` slot. Set it to the role of whoever takes
        the output in (`QuantizerRole("linear", "input", "blocks.0.proj")`), so that both agree.
        """
        return self._boundary_roles[0]

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._boundary_roles = (_role(role, "output_quantizer_role"), self._boundary_roles[1])

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The role that a recipe is asked for where the input's gradient is to be quantized.

        None, the default, is the module's own `"grad_input"` slot.
        """
        return self._boundary_roles[1]

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._boundary_roles = (self._boundary_roles[0], _role(role, "grad_input_quantizer_role"))

    def _boundary_quantizer(self, recipe: Recipe, tensor_type: str) -> Quantizer:
        """Return the quantizer of the slot `"output"` or `"grad_input"` under `recipe`."""
        role = self._boundary_roles[1 if tensor_type == GRAD_INPUT else 0]
        if torch.compiler.is_compiling():
            if role is not None:
                return boundary_by_key(recipe.key, role.module_type, role.tensor_type, role.name)
            name = self.name if recipe.reads_names else ""
            return boundary_by_key(recipe.key, self.module_type, tensor_type, name)
        if role is None:
            role = QuantizerRole(self.module_type, tensor_type, self.name)
        known = self.__dict__.setdefault("_boundary", {})
        made = known.get(tensor_type)
        if made is None or made[0] != recipe or made[1] != role:
            made = known[tensor_type] = recipe, role, boundary_quantizer(recipe, role)
        return made[2]

    def _quantized_output(self, y: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        """Return y as the output slot's quantizer makes it; y itself if that changes nothing."""
        quantizer = self._boundary_quantizer(recipe, OUTPUT)
        if quantizer.is_identity:
            return y
        # A reentrant checkpoint trains without gradients, and its planes are taken on from there.
        if not (self.training or torch.is_grad_enabled()) and quantizer.makes_rowwise:
            quantizer = quantizer.with_usage(columnwise=False)
        return quantizer.quantize(y)


def _role(role: object, where: str) -> QuantizerRole | None:
    if role is None or isinstance(role, QuantizerRole):
        return role
    raise TypeError(f"{where}: must be a QuantizerRole or None, got {type(role).__name__}")


class _QuantizeGradient(StatedFunction):
    """Passes x on; its gradient is quantized on the way back."""

    second = "refused"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,), quantizer = grads, ctx.quantizer
        # Not `quantize`: compiled code takes this gradient to be of x's kind, which it need not be.
        storage = quantizer.encode(grad.detach().reshape(matrix_shape(grad.shape)))
        made: Any = QuantizedTensor.make(storage, grad.shape, grad.dtype, quantizer=quantizer)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            (made,) = without_derivative("fp8_grad", (grad,), (made,))
        return made, None


def with_quantized_gradient(x: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Return x; the gradient that it is handed is what `quantizer` makes of it.

    Args:
        x: any tensor; what is none is returned, for the module to refuse.
        quantizer: of the gradient.
    """
    has_gradient = isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()
    if quantizer.is_identity or not has_gradient:
        return x
    refuse_tangents("fp8_grad", x)
    made: torch.Tensor = _QuantizeGradient.apply(x, quantizer)
    return made
