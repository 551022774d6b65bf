"""Gated activations that no backend fuses with an encode: a GLU, and SwiGLU with limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from ...kernels.operators import StatedFunction

__all__ = ["GATES", "Gate", "gate_of"]

#: By name, the parameters that each takes, with their defaults.
GATES: Final[dict[str, dict[str, float]]] = {
    "glu": {},
    "clamped_swiglu": {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0},
}


class Gate(NamedTuple):
    """A gated activation: a function of the first half of x, times the second half.

    Args:
        kind: of `GATES`.
        limit: `"clamped_swiglu"`: the first half is at most this, the second within plus and minus.
        alpha: of it, `u * sigmoid(alpha * u)` is the function.
        offset: of it, what is added to the second half.
    """

    kind: str
    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0

    def columns(self, features: int) -> int:
        """Return how many columns x has where y has `features`."""
        return 2 * features

    def plain(
        self, x: torch.Tensor, gamma: torch.Tensor | None = None, beta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return y in the dtype of x, rounded once; any batch shape.

        Args:
            x: `[..., 2 * features]`, which alone is saved for the backward.
            gamma, beta: None: there are no weights.
        """
        made: torch.Tensor = _Gated.apply(x, self)
        return made

    def _value(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        if self.kind == "glu":
            y = torch.sigmoid(first) * second
        else:
            first = first.clamp(max=self.limit)
            second = second.clamp(-self.limit, self.limit) + self.offset
            y = first * torch.sigmoid(self.alpha * first) * second
        return y.to(x.dtype)


class _Gated(StatedFunction):
    """`y = gate(x)`; the backward computes it again."""

    second = "exact"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.gate = gate
        return gate._value(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # create_graph=True
        given = x if again else x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.gate._value(given)
        (grad,) = torch.autograd.grad(y, given, dy, create_graph=again)
        return grad, None


def gate_of(owner: str, kind: str, params: Mapping[str, float] | None) -> Gate | None:
    """Return the gate of a name, or None: it is no gate.

    Args:
        owner: the class, for errors.
        kind: of `GATES`, or another activation.
        params: what differs from the defaults, or None.

    Raises:
        TypeError: `params` is no mapping, or a value no number.
        ValueError: the activation takes no such parameter, or not such a value.
    """
    known = GATES.get(kind, {})
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(
            f"{owner}: activation_params must be a dict of numbers by name, got "
            f"{type(params).__name__}"
        )
    for name, value in (params or {}).items():
        if name not in known:
            raise ValueError(
                f"{owner}: activation_params of {kind!r} must be among {sorted(known)}, got "
                f"{name!r}"
            )
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise TypeError(f"{owner}: activation_params must be numbers, got {name}={value!r}")
        if not math.isfinite(value) or (name == "limit" and value <= 0.0):
            raise ValueError(
                f"{owner}: activation_params must be finite, and limit positive, got {name}={value}"
            )
    if kind not in GATES:
        return None
    if not known:
        return Gate(kind)
    own = {**known, **(params or {})}
    return Gate(kind, float(own["limit"]), float(own["alpha"]), float(own["glu_linear_offset"]))
