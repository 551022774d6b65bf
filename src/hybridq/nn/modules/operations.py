"""Single operations as modules: activations by name, norms and quantization, for FusedSequential.

Each gives the bits that a linear module encodes where it does the same operation as its own first
step; so a sequence has one result, whether or not two of it are run as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ... import settings
from ..._log import log_once
from ...errors import must_be_one_of
from ...kernels.inputs import HIGH_PRECISION, has_autocast
from ...recipes import QuantizerRole, Recipe, is_recomputing
from ...recipes.boundary import boundary_by_key, boundary_quantizer
from ...reference import ACTIVATIONS
from ...tensor import is_quantized
from ..autograd import (
    GATES,
    Activation,
    Gate,
    Norm,
    PrologueCall,
    apply,
    gate_of,
    with_quantized_gradient,
)
from .constructor_arguments import checked
from .norms import LayerNorm, RMSNorm
from .written_options import Check, WrittenOptions, said

__all__ = ["ActivationFunction", "LayerNormStep", "Quantize", "RMSNormStep"]


class _Operation(WrittenOptions):
    """What all have: the recipe of this call, and of its recomputation."""

    _last_recipe: Any = None

    def recipe_now(self) -> Recipe | None:
        """Return the recipe of this call, or None."""
        recipe: Any = settings.current().recipe
        if not torch.compiler.is_compiling():
            if is_recomputing():
                recipe = self._last_recipe
            else:
                self.__dict__["_last_recipe"] = recipe
        return recipe if isinstance(recipe, Recipe) else None

    def _run(self, inp: torch.Tensor, step: PrologueCall) -> torch.Tensor:
        """Return a step of `[..., columns]`, with the bits that are encoded."""
        if is_quantized(inp):
            inp = inp.dequantize()
        if inp.dtype not in HIGH_PRECISION:
            return step.prologue.plain(inp, step.gamma, step.beta)
        kind = inp.device.type
        if has_autocast(kind):
            inp = inp.to(torch.get_autocast_dtype(kind))
        flat = inp.unsqueeze(0) if inp.dim() == 1 else inp.flatten(0, -2)
        made = apply(flat, *step)
        return made.view(*inp.shape[:-1], made.shape[-1])


def _gated(module: Any, name: str, value: Any) -> Any:
    """Return a new name or new parameters of an activation, which forwards compute from now on."""
    own = module.__dict__
    given = {"activation": None, "activation_params": None, **own, name: value}
    if given["activation"] is None:  # the parameters stand before the name
        return value
    kind = given["activation"]
    if kind not in (*ACTIVATIONS, *GATES):
        known = must_be_one_of((*ACTIVATIONS, *GATES), kind)
        raise ValueError(said(module, f"activation {known}"))
    own["_gate"] = gate_of(type(module).__name__, kind, given["activation_params"])
    return value


class ActivationFunction(_Operation):
    """An activation by its name; a gated one takes two halves of the last dimension.

    Args:
        activation: `"relu"`, `"srelu"`, `"gelu"` (by tanh), `"silu"`, `"qgelu"`; gated `"reglu"`,
            `"sreglu"`, `"geglu"`, `"swiglu"`, `"qgeglu"`, `"glu"`, `"clamped_swiglu"`: the function
            of the first half times the second.
        activation_params: of `"clamped_swiglu"`: `limit`, `alpha`, `glu_linear_offset`.

    Raises:
        ValueError: another name or parameter.

    Example:
        >>> import torch, hybridq
        >>> hybridq.nn.ActivationFunction("swiglu")(torch.ones(3, 64)).shape
        torch.Size([3, 32])
    """

    _written_options: ClassVar[Mapping[str, Check]] = {
        "activation": _gated,
        "activation_params": _gated,
    }
    _gate: Gate | None

    @checked
    def __init__(
        self, activation: str, activation_params: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.activation_params, self.activation = activation_params, activation

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the activation of `inp`, `[..., columns]`.

        Args:
            inp: of a gated one twice as many columns as the result has.
        """
        if self._gate is not None:
            return self._gate.plain(inp)
        return self._run(inp, PrologueCall(Activation(self.activation)))

    def as_step(self) -> PrologueCall | None:
        """Return what a linear module does first in its place, or None."""
        return None if self._gate is not None else PrologueCall(Activation(self.activation))

    def extra_repr(self) -> str:
        """Return the name, for `repr`."""
        return repr(self.activation)


class LayerNormStep(LayerNorm, _Operation):
    """`hybridq.nn.LayerNorm` of the last dimension, with the bits that a linear module encodes.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, device, dtype:
            as for `hybridq.nn.LayerNorm`.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the norm of `inp` `[..., features]`, in its dtype.

        Args:
            inp: float32, bfloat16 or float16.
        """
        step = self.as_step()
        return super().forward(inp) if step is None else self._run(inp, step)

    def as_step(self) -> PrologueCall | None:
        """Return what a linear module does first in its place; None of several dimensions."""
        return _norm_step(self, self.bias)


class RMSNormStep(RMSNorm, _Operation):
    """`hybridq.nn.RMSNorm` of the last dimension, with the bits that a linear module encodes.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, device, dtype:
            as for `hybridq.nn.RMSNorm`.
    """

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the norm of `inp` `[..., features]`, in its dtype.

        Args:
            inp: float32, bfloat16 or float16.
        """
        step = self.as_step()
        return super().forward(inp) if step is None else self._run(inp, step)

    def as_step(self) -> PrologueCall | None:
        """Return what a linear module does first in its place; None of several dimensions."""
        return _norm_step(self, None)


def _norm_step(norm: Any, bias: torch.Tensor | None) -> PrologueCall | None:
    if len(norm.normalized_shape) != 1:
        return None
    kind = "RMSNorm" if isinstance(norm, RMSNorm) else "LayerNorm"
    return PrologueCall(Norm(kind, norm.eps, norm.zero_centered_gamma), norm.weight, bias)


class Quantize(_Operation):
    """Quantizes what passes, or its gradient, as the recipe says for a linear module behind it.

    A linear module takes such planes as they are. Without a recipe nothing happens; under delayed
    scaling, whose histories belong to the linear modules, nothing either, which is said once.

    Args:
        forward: quantize the tensor, as the input of a linear module.
        backward: quantize the gradient, as the gradient of a linear module's output.
        name: qualified name, for the roles that a recipe's factory sees.

    Example:
        >>> import torch, hybridq
        >>> with hybridq.autocast(recipe="mxfp8"):
        ...     y = hybridq.nn.Quantize()(torch.ones(2, 64))
        >>> type(y).__name__
        'MXFP8Tensor'
    """

    @checked
    def __init__(self, forward: bool = True, backward: bool = False, name: str = "") -> None:
        super().__init__()
        self.quantizes_forward, self.quantizes_backward = bool(forward), bool(backward)
        self.name = name

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return `inp` quantized, or as it is with a gradient that will be.

        Args:
            inp: `[..., features]`.
        """
        recipe = self.recipe_now()
        if recipe is None:
            return inp
        if self.quantizes_backward:
            quantizer = self.quantizer_of(recipe, "grad_output")
            if quantizer is not None:
                inp = with_quantized_gradient(inp, quantizer)
        if self.quantizes_forward:
            quantizer = self.quantizer_of(recipe, "input")
            if quantizer is not None and not quantizer.is_identity:
                inp = quantizer.quantize(inp)
        return inp

    def quantizer_of(self, recipe: Recipe, tensor_type: str) -> Any:
        """Return what quantizes a slot under a recipe, or None: its scales are histories.

        Args:
            recipe: any.
            tensor_type: `"input"` or `"grad_output"`.
        """
        if torch.compiler.is_compiling():
            return boundary_by_key(recipe.key, "linear", tensor_type, self.name)
        role = QuantizerRole("linear", tensor_type, self.name)
        if recipe.for_name(role.name).ask(role).is_delayed:
            log_once(
                "nn.Quantize",
                "Quantize: has no effect under delayed scaling, whose histories belong to the "
                "linear modules that quantize behind it",
            )
            return None
        return boundary_quantizer(recipe, role)

    def extra_repr(self) -> str:
        """Return what it quantizes, for `repr`."""
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}"
