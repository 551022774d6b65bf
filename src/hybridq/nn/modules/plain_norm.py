"""Norms that stay in high precision: of queries and keys, and of a layer's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ...errors import must_be_one_of
from ...reference import NORMS
from ..autograd import Norm, share
from .constructor_arguments import checked
from .dealt_parameters import local_part
from .marks import mark_again
from .tensor_parallel import is_dtensor
from .written_options import Check, WrittenOptions, finite_eps, settled, switch

__all__ = ["PlainNorm"]

_L2: Final = "L2Normalization"


class PlainNorm(WrittenOptions):
    """torch's norm of the last dimension, or the division by its length.

    Args:
        features: of the last dimension.
        kind: `"LayerNorm"`, `"RMSNorm"`, or `"L2Normalization"`: `x / sqrt(sum(x^2) + eps)`, FP32
            inside and without weights.
        eps: added to the variance, the mean of squares, or the sum of squares.
        zero_centered_gamma: the norm multiplies with `1 + weight`.
        device, dtype: of the weights.

    Raises:
        ValueError: `kind` is unknown, or `eps` negative or not finite.

    Source: kinds, names and formulas: Transformer Engine's query and key norms.
    """

    _written_options: ClassVar[Mapping[str, Check]] = {
        "kind": settled,
        "eps": finite_eps,
        "zero_centered_gamma": switch,
    }

    @checked
    def __init__(
        self,
        features: int,
        kind: str,
        eps: float,
        zero_centered_gamma: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if kind not in (*NORMS, _L2):
            raise ValueError(f"norm: type {must_be_one_of((*NORMS, _L2), kind)}")
        self.kind, self.eps = kind, eps
        self.zero_centered_gamma = zero_centered_gamma
        #: Name of the group over which the weights' gradients are summed, or empty.
        self.group = ""
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if kind != _L2:
            self.weight = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        if kind == NORMS[0]:
            self.bias = nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to their initial values."""
        mark_again(self)
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x `[..., features]`, in its dtype."""
        if self.weight is not None:
            gamma: torch.Tensor = self.weight
            beta: torch.Tensor | None = self.bias
            if not is_dtensor(x):
                gamma, beta = local_part(gamma), local_part(beta)
            if self.group:
                gamma = share(gamma, self.group)
                beta = None if beta is None else share(beta, self.group)
            # torch has no fused norm of a BF16 input with FP32 weights, and says so.
            same = x.to(torch.promote_types(x.dtype, gamma.dtype))
            norm = Norm(self.kind, self.eps, self.zero_centered_gamma)
            return norm.plain(same, gamma, beta).to(x.dtype)
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the kind and eps, for `repr`."""
        return f"{self.kind}, eps={self.eps}"
