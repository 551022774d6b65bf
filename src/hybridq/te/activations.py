"""Activations of `te.ops`, whose input may be saved as FP8.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/ops/basic`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .. import nn
from ..quantizers import Float8CurrentScalingQuantizer
from ..tensor import is_quantized
from .glu import halves_of
from .signatures import constructor, with_arguments

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "ClampedSwiGLU",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SwiGLU",
]

#: Where scripts find the classes.
_PLACE: Final = f"{__package__}.ops"
#: As which an input is saved: E4M3 with the scale of its own amax.
_SAVED: Final = Float8CurrentScalingQuantizer("e4m3", columnwise=False)
_ACTIVATION: Final = "cache_quantized_input=False, glu_interleave_size=None"
_KEPT: Final = {"cache_quantized_input": "cache_quantized_input"}
_GATED: Final = {**_KEPT, "glu_interleave_size": "glu_interleave_size"}


class _Activation(nn.ActivationFunction):
    """Base of the activations; the halves of a gated one may lie in blocks."""

    cache_quantized_input = False
    glu_interleave_size: int | None = None

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the activation of `inp`, `[..., columns]`.

        With `cache_quantized_input` the backward is that at `inp` in E4M3, with the scale of its
        amax, which is all that is saved.

        Args:
            inp: of a gated one twice as many columns as the result has; with a
                `glu_interleave_size` so many of the gate, as many of the other half, and so on.
        """
        if not self.cache_quantized_input:
            return self._of(inp)
        kind = inp.device.type
        x = inp.dequantize() if is_quantized(inp) else inp
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return nn.saving_planes(self._of, x, _SAVED)

    def _of(self, inp: torch.Tensor) -> torch.Tensor:
        where = f"te.ops.{type(self).__name__}"
        return super().forward(halves_of(where, inp, self.glu_interleave_size))


def _step_of(self: _Activation) -> Any:
    """Return what a linear operation does first in its place; None of one that runs by itself."""
    is_alone = self.cache_quantized_input or self.glu_interleave_size is not None
    return None if is_alone else nn.ActivationFunction.as_step(self)


def _check_blocks(module: _Activation) -> None:
    """Raise for a size that no block has."""
    nothing = torch.empty(0, dtype=torch.float32, device="meta")
    halves_of(f"te.ops.{type(module).__name__}", nothing, module.glu_interleave_size)


def _activation(name: str, kind: str, is_gated: bool = True) -> type:
    """Return the class of an activation, whose step a linear operation takes."""

    def prepare(given: dict[str, Any]) -> None:
        given["activation"] = kind

    kept = _GATED if is_gated else _KEPT
    own = (nn.ActivationFunction, f"*, {_ACTIVATION}", prepare, _check_blocks, kept)
    body = {
        "__doc__": f"`hybridq.nn.ActivationFunction({kind!r})`.",
        "__init__": constructor(*own),
        "__module__": _PLACE,
        "as_step": _step_of,
    }
    return with_arguments(type(name, (_Activation,), body))


GELU, GEGLU = _activation("GELU", "gelu", False), _activation("GEGLU", "geglu")
GLU = _activation("GLU", "glu")
QGELU, QGEGLU = _activation("QGELU", "qgelu", False), _activation("QGEGLU", "qgeglu")
ReLU, ReGLU = _activation("ReLU", "relu", False), _activation("ReGLU", "reglu")
SReLU, SReGLU = _activation("SReLU", "srelu", False), _activation("SReGLU", "sreglu")
SiLU, SwiGLU = _activation("SiLU", "silu", False), _activation("SwiGLU", "swiglu")


def _clamped(given: dict[str, Any]) -> None:
    own = {name: given.pop(name) for name in ("limit", "alpha", "glu_linear_offset")}
    given |= {"activation": "clamped_swiglu", "activation_params": own}


def _parameter(name: str) -> property:
    """Return the property of one parameter of an activation, which may be written."""

    def write(self: Any, value: float) -> None:
        self.activation_params = {**self.activation_params, name: value}

    return property(lambda self: self.activation_params[name], write, doc=f"The {name}.")


@with_arguments
class ClampedSwiGLU(_Activation):
    """`hybridq.nn.ActivationFunction("clamped_swiglu")` with these parameters."""

    __module__ = _PLACE
    limit, alpha = _parameter("limit"), _parameter("alpha")
    glu_linear_offset = _parameter("glu_linear_offset")
    __init__ = constructor(
        nn.ActivationFunction,
        f"*, limit=7.0, alpha=1.702, glu_linear_offset=1.0, {_ACTIVATION}",
        _clamped,
        _check_blocks,
        _GATED,
    )
