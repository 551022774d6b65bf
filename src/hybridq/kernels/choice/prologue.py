"""What a matrix goes through before it is encoded, as backends take it."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Prologue"]


class Prologue(NamedTuple):
    """What a matrix goes through before it is encoded: a norm of its rows, or an activation.

    Args:
        kind: a name in `reference.NORMS` or `reference.ACTIVATIONS`.
        core: name of the function in the compiled core.
        is_gated: x has the columns of two matrices, see `reference.Activation`.
        gamma: FP32 `[cols]`, contiguous, of a norm; else None. A `PlacedEncoder` may be given it,
            and beta, in a dtype of 16 bits.
        beta: the same, or None.
        eps: of a norm.
        is_centered: 1 is yet to be added to gamma, in FP32; for a `PlacedEncoder` alone.
    """

    kind: str
    core: str
    is_gated: bool = False
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    eps: float = 0.0
    is_centered: bool = False

    def wide(self) -> Prologue:
        """Return it with weights in FP32, to which nothing is yet to be added."""
        if self.gamma is None:
            return self
        gamma, beta = self.gamma.to(torch.float32), self.beta
        if self.is_centered:
            gamma = gamma + 1.0
        beta = None if beta is None else beta.to(torch.float32).contiguous()
        return self._replace(gamma=gamma.contiguous(), beta=beta, is_centered=False)
