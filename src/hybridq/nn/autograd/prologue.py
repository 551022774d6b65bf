"""Prologues: what makes the matrix that a linear module multiplies, out of the module's input.

A norm of its rows, or an activation. The matrix itself is needed in quantized form only, so it is
not made where one operation can make its planes (`norm_encode`, `activation_encode`), and it is
never saved: the backward goes through the prologue from the input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from ...kernels.choice import EncodeRequest
from ...kernels.choice import Prologue as BackendPrologue
from ...kernels.inputs import HIGH_PRECISION, refuse_tangents
from ...kernels.operators import (
    StatedFunction,
    activation_backward,
    activation_encode,
    activation_prologue,
    norm_backward,
    norm_encode,
)
from ...reference import ACTIVATIONS
from ..weights import Buffers

__all__ = ["Activation", "Norm", "Prologue", "PrologueCall", "apply"]

#: Gradients of x, gamma and beta; None where not needed.
Grads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Norm(NamedTuple):
    """`y = (x - mean) * rstd * gamma + beta` of each row; RMSNorm without mean and beta.

    Args:
        kind: `"LayerNorm"` or `"RMSNorm"`.
        eps: added to the variance, or to the mean of squares.
        zero_centered: the weight is `1 + gamma`.
    """

    kind: str
    eps: float
    zero_centered: bool = False

    def columns(self, features: int) -> int:
        """Return how many columns x has where y has `features`."""
        return features

    def run(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return y, and what the backward wants to know beside x and gamma."""
        y, mean, rstd = torch.ops.hybridq.norm(
            x, gamma, beta, self.eps, self.kind, self.zero_centered
        )
        return y, [mean, rstd]

    def encode(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        request: EncodeRequest,
    ) -> tuple[Buffers, list[torch.Tensor]]:
        """Return the planes of y, and what the backward wants to know beside x and gamma."""
        own = (gamma, beta, self.eps, self.kind, self.zero_centered)
        buffers, mean, rstd = norm_encode(x, *own, request)  # type: ignore[arg-type]
        return buffers, [mean, rstd]

    def of_backends(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> BackendPrologue | None:
        """Return the norm of x for a placed encoder, or None where its weights do not fit x."""
        for weight in (gamma, beta):
            if weight is not None and not (
                weight.dtype in HIGH_PRECISION
                and weight.shape == x.shape[1:]
                and weight.device == x.device
            ):
                return None
        if gamma is None or (beta is not None and self.kind == "RMSNorm"):
            return None
        own = (self.kind, self.kind, False, gamma, beta, self.eps, self.zero_centered)
        made = BackendPrologue(*own)
        is_plain = gamma.is_contiguous() and (beta is None or beta.is_contiguous())
        if not is_plain or (beta is not None and beta.dtype != gamma.dtype):
            return made.wide()
        return made

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        known: list[torch.Tensor],
        needs: tuple[bool, bool, bool],
    ) -> Grads:
        """Return the gradients of x, gamma and beta, those that are needed."""
        mean, rstd = known
        own = (mean, rstd, self.kind, self.zero_centered)
        return norm_backward(dy, x, gamma, *own, needs)  # type: ignore[arg-type]

    def plain(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> torch.Tensor:
        """Return y by torch's own norm, with torch's derivative; any batch shape."""
        scale = gamma + 1 if self.zero_centered and gamma is not None else gamma
        if self.kind == "LayerNorm":
            return F.layer_norm(x, (x.shape[-1],), scale, beta, self.eps)
        return F.rms_norm(x, (x.shape[-1],), scale, self.eps)


class Activation(NamedTuple):
    """An activation function, or a gated one that takes two halves.

    Args:
        kind: a name in `reference.ACTIVATIONS`.
    """

    kind: str

    def columns(self, features: int) -> int:
        """Return how many columns x has where y has `features`."""
        return 2 * features if ACTIVATIONS[self.kind].is_gated else features

    def run(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return y, and what the backward wants to know beside x: nothing."""
        return torch.ops.hybridq.activation(x, self.kind), []

    def encode(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        request: EncodeRequest,
    ) -> tuple[Buffers, list[torch.Tensor]]:
        """Return the planes of y, and what the backward wants to know beside x: nothing."""
        return activation_encode(x, self.kind, request), []

    def of_backends(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> BackendPrologue | None:
        """Return the activation of x as backends take it, or None where x has odd columns."""
        made = activation_prologue(self.kind)
        return None if made.is_gated and x.shape[1] % 2 else made

    def backward(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        known: list[torch.Tensor],
        needs: tuple[bool, bool, bool],
    ) -> Grads:
        """Return the gradient of x; there is no gamma and no beta."""
        return activation_backward(dy, x, self.kind), None, None

    def plain(
        self, x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None
    ) -> torch.Tensor:
        """Return y by torch's own functions, with torch's derivative; any batch shape."""
        record = ACTIVATIONS[self.kind]
        if not record.is_gated:
            return _PLAIN[record.core](x)
        first, second = x.chunk(2, -1)
        return _PLAIN[record.core](first) * second


Prologue = Norm | Activation


class PrologueCall(NamedTuple):
    """A prologue in front of a product, with its weights.

    Attributes:
        prologue: what makes the matrix that is multiplied out of the input.
        gamma, beta: `[features]`, float32, bfloat16 or float16: a norm's weights, or None.
    """

    prologue: Prologue
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


#: torch's own, by the name of the function of one value.
_PLAIN: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "relu": F.relu,
    "srelu": _srelu,
    "gelu": _gelu,
    "silu": F.silu,
    "qgelu": _qgelu,
}


class _Apply(StatedFunction):
    """`y = prologue(x)`, for callers that want y itself: the bits that are encoded else."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        prologue: Prologue,
        needs: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        y, known = prologue.run(x, gamma, beta)
        ctx.save_for_backward(x, gamma, *known)
        ctx.prologue, ctx.needs = prologue, needs
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, gamma, *known = ctx.saved_tensors
        return (*ctx.prologue.backward(dy, x, gamma, known, ctx.needs), None, None)


def apply(
    x: torch.Tensor,
    prologue: Prologue,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
) -> torch.Tensor:
    """Return the matrix that `prologue` makes of x, with its derivative.

    Args:
        x: `[rows, columns]`, float32, bfloat16 or float16.
        prologue: what to do.
        gamma, beta: a norm's weights `[columns]`, or None.
    """
    tensors = (x, gamma, beta)
    refuse_tangents("hybridq.norm" if gamma is not None else "hybridq.activation", *tensors)
    # No generator: dynamo does not see through one here.
    needs = tuple([tensor is not None and tensor.requires_grad for tensor in tensors])
    y: torch.Tensor = _Apply.apply(x, gamma, beta, prologue, needs)
    return y
