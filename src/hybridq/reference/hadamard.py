"""The random Hadamard transform: 16 points along the contraction axis.

Source: docs/reference/numerics.md, "Random Hadamard transform"; arXiv:2509.25149 section 4.
"""

from __future__ import annotations

import torch

from ..formats import HADAMARD_SIZE

__all__ = ["hadamard", "inverse_hadamard"]


def _signs(signs: int, device: torch.device) -> torch.Tensor:
    """Return the 16 multipliers `+-1/4`: 1/sqrt(16) and the sign in one, exact."""
    values = [-0.25 if signs >> point & 1 else 0.25 for point in range(HADAMARD_SIZE)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def _butterflies(groups: torch.Tensor) -> torch.Tensor:
    """Return Sylvester's transform over the last axis (16), in FP32, strides 1, 2, 4, 8."""
    for stride in (1, 2, 4, 8):
        pairs = groups.unflatten(-1, (HADAMARD_SIZE // (2 * stride), 2, stride))
        low, high = pairs.unbind(dim=-2)
        groups = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return groups


def hadamard(x: torch.Tensor, signs: int) -> torch.Tensor:
    """Return x with every 16 values of a row replaced by `H @ (sign * x) / 4`, in BF16.

    Args:
        x: `[rows, cols]`, floating point.
        signs: bit i set: point i is multiplied by -1.

    Returns:
        bfloat16 `[rows, 16 * ceil(cols / 16)]`; zeros fill the last group before it turns.
    """
    rows, cols = x.shape
    x = torch.nn.functional.pad(x.to(torch.float32), (0, -cols % HADAMARD_SIZE))
    groups = x.reshape(rows, x.shape[1] // HADAMARD_SIZE, HADAMARD_SIZE)
    transformed = _butterflies(groups * _signs(signs, x.device))
    return transformed.reshape(x.shape).to(torch.bfloat16)


def inverse_hadamard(x: torch.Tensor, signs: int, cols: int) -> torch.Tensor:
    """Return the FP32 `[rows, cols]` whose transform is x.

    Args:
        x: `[rows, 16 * ceil(cols / 16)]`.
        signs: those of the transform, 16 bits.
        cols: columns before the transform filled its last group.
    """
    rows = x.shape[0]
    groups = x.to(torch.float32).reshape(rows, x.shape[1] // HADAMARD_SIZE, HADAMARD_SIZE)
    transformed = _butterflies(groups) * _signs(signs, x.device)
    return transformed.reshape(x.shape)[:, :cols]
