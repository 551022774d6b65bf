"""Gated activations whose halves lie in blocks, and activations times weights of tokens.

Source: names, order of arguments and layouts: Transformer Engine's `pytorch/utils` and
`pytorch/ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import nn
from .._log import log_once

__all__ = [
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "deinterleave_glu_tensor",
    "halves_of",
    "interleave_glu_tensor",
]


def _checked(where: str, size: int, interleave_size: Any) -> None:
    ok = isinstance(interleave_size, int) and not isinstance(interleave_size, bool)
    if not ok or interleave_size < 1:
        raise ValueError(
            f"{where}: interleave_size must be a positive int, got {interleave_size!r}"
        )
    if size % (2 * interleave_size):
        raise ValueError(
            f"{where}: 2 * interleave_size must divide what is gated, got {2 * interleave_size} "
            f"and {size}"
        )


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return a weight or bias whose gate and linear rows alternate in blocks, as two halves.

    Args:
        tensor: `[rows, ...]`: `interleave_size` rows of the gate, as many of the other half, ...
        interleave_size: rows of a block.

    Returns:
        A new tensor of its shape: all rows of the gate, then the others.

    Raises:
        ValueError: twice the size does not divide the rows.

    Example:
        >>> import torch, hybridq.te as te
        >>> te.deinterleave_glu_tensor(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    _checked("deinterleave_glu_tensor", rows or 1, interleave_size)
    blocks = tensor.unflatten(0, (-1, 2, interleave_size))
    return blocks.transpose(0, 1).reshape(tensor.shape)


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """Return the inverse of `deinterleave_glu_tensor`.

    Args:
        tensor: `[rows, ...]`: all rows of the gate, then the others.
        interleave_size: rows of a block.

    Raises:
        ValueError: twice the size does not divide the rows.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    _checked("interleave_glu_tensor", rows or 1, interleave_size)
    blocks = tensor.unflatten(0, (2, -1, interleave_size))
    return blocks.transpose(0, 1).reshape(tensor.shape)


def halves_of(where: str, inp: torch.Tensor, interleave_size: int | None) -> torch.Tensor:
    """Return what a gated activation takes, its columns as two halves.

    Args:
        where: for errors.
        inp: `[..., columns]`.
        interleave_size: columns of a block; None: there are no blocks.
    """
    if interleave_size is None:
        return inp
    _checked(where, inp.shape[-1], interleave_size)
    blocks = inp.unflatten(-1, (-1, 2, interleave_size))
    return blocks.transpose(-3, -2).reshape(inp.shape)


class _Scaled(torch.nn.Module):
    """An activation times a weight of each token, which a Sequential is given beside its input.

    Args:
        activation: of hybridq.
        glu_interleave_size: columns of a block of a gated one.
        activation_recompute_in_mlp: has no effect, which is said once.
    """

    num_extra_inputs = 1

    def __init__(
        self, activation: Any, glu_interleave_size: int | None, activation_recompute_in_mlp: bool
    ) -> None:
        super().__init__()
        if glu_interleave_size is not None:
            _checked(self._where, 0, glu_interleave_size)
        self.activation = activation
        self.glu_interleave_size = glu_interleave_size
        if activation_recompute_in_mlp:
            log_once(
                "te.ops.activation_recompute_in_mlp",
                f"{self._where}: activation_recompute_in_mlp has no effect; hybridq.checkpoint "
                "around the experts computes their activations again",
            )

    @property
    def _where(self) -> str:
        return f"te.ops.{type(self).__name__}"

    def forward(self, inp: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return `activation(inp) * scales[..., None]`, in the dtype of `inp`.

        Args:
            inp: `[..., columns]`.
            scales: `[...]`, any floating dtype; rounded to that of `inp` first.

        Raises:
            ValueError: `scales` has another shape.
        """
        if scales.shape != inp.shape[:-1]:
            raise ValueError(
                f"{self._where}: scales must be {list(inp.shape[:-1])}, got {list(scales.shape)}"
            )
        made = self.activation(halves_of(self._where, inp, self.glu_interleave_size))
        result: torch.Tensor = made * scales.to(made.dtype).unsqueeze(-1)
        return result


class ScaledSwiGLU(_Scaled):
    """SwiGLU times a weight of each token.

    Args:
        glu_interleave_size: as of `SwiGLU`.
        activation_recompute_in_mlp: has no effect, which is said once.

    Example:
        >>> import torch, hybridq.te as te
        >>> experts = te.ops.Sequential(te.ops.GroupedLinear(2, 64, 128), te.ops.ScaledSwiGLU(),
        ...                             te.ops.GroupedLinear(2, 64, 64))
        >>> sizes = torch.tensor([3, 5])
        >>> experts(torch.ones(8, 64), sizes, torch.rand(8), sizes).shape
        torch.Size([8, 64])
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        own = nn.ActivationFunction("swiglu")
        super().__init__(own, glu_interleave_size, activation_recompute_in_mlp)


class ScaledClampedQGeGLU(_Scaled):
    """ClampedSwiGLU times a weight of each token.

    Args:
        glu_interleave_size: as of `SwiGLU`.
        activation_recompute_in_mlp: has no effect, which is said once.
        limit, alpha, glu_linear_offset: as of `ClampedSwiGLU`.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        activation_recompute_in_mlp: bool = False,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        own = {"limit": limit, "alpha": alpha, "glu_linear_offset": glu_linear_offset}
        activation = nn.ActivationFunction("clamped_swiglu", own)
        super().__init__(activation, glu_interleave_size, activation_recompute_in_mlp)


class ScaledSReLU(_Scaled):
    """SReLU times a weight of each token.

    Args:
        activation_recompute_in_mlp: has no effect, which is said once.
    """

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(nn.ActivationFunction("srelu"), None, activation_recompute_in_mlp)
