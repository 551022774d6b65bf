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
        gamma: FP32 `[cols]`, contiguous, of a norm; else None.
        beta: the same, or None.
        eps: of a norm.
    """

    kind: str
    core: str
    is_gated: bool = False
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    eps: float = 0.0
