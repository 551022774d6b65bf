"""What makes an input, and how its channels are divided by scales.

Source: arXiv:2211.10438, equation 3, for the division; the rest is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..kernels.inputs import wide

__all__ = ["LayerSource", "Source", "assign", "multiply"]


class Source(Protocol):
    """What makes the channels of an input."""

    def divide(self, scales: torch.Tensor) -> None:
        """Divide what it makes by scales, in place; each parameter is rounded once.

        Args:
            scales: FP64 `[n]`, positive, of each channel.
        """


def multiply(parameter: torch.Tensor, by: torch.Tensor) -> None:
    """Multiply in place, in FP64, and round once.

    Args:
        parameter: any shape and dtype.
        by: FP64 factors of a shape that fits.
    """
    assign(parameter, wide(parameter.detach()) * by)


def assign(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a parameter.

    Args:
        parameter: any shape and dtype.
        values: of its shape.
    """
    with torch.no_grad():
        parameter.copy_(values.to(parameter.dtype))


@dataclass(frozen=True)
class LayerSource:
    """A linear layer or a norm.

    Args:
        layer: with `weight`, and `bias` perhaps.
        kind: as `Fold` has it.
    """

    layer: Any
    kind: str = "linear"

    def divide(self, scales: torch.Tensor) -> None:
        weight = self.layer.weight
        if self.kind == "linear":
            multiply(weight, (1.0 / scales)[:, None])
        elif self.kind == "zero_centered_norm":
            assign(weight, (1.0 + wide(weight)) / scales - 1.0)
        else:
            multiply(weight, 1.0 / scales)
        if getattr(self.layer, "bias", None) is not None:
            multiply(self.layer.bias, 1.0 / scales)
