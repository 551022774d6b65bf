"""The true product of two planes, and how far an FP32 product may be from it."""

from __future__ import annotations

import numpy as np
import torch

from ..formats import PlaneSpec
from ..reference import plane_operand, tensor_factor
from .case import Array, Buffers

__all__ = ["true_product"]


def _operand(buffers: Buffers, spec: PlaneSpec, rows: int, k: int) -> tuple[Array, Array]:
    """Return code times block scale `[rows, padded k]`, and the plane's factor, in FP64."""
    tensors = [
        torch.from_numpy(np.ascontiguousarray(buffers[buffer.name]))
        for buffer in spec.buffers(rows, k)
    ]
    values, _ = plane_operand(tensors, spec, rows, k, torch.float32)
    factor = tensor_factor(tensors, spec)
    one = torch.ones(1, dtype=torch.float32, device="cpu") if factor is None else factor
    return values.double().numpy(), one.double().numpy()


def true_product(
    a: tuple[Buffers, PlaneSpec, int], b: tuple[Buffers, PlaneSpec, int], k: int
) -> tuple[Array, Array]:
    """Return the FP64 product `[rows of a, rows of b]` and the bound of an FP32 one.

    A transform is left in place: both operands must have the same, and it cancels. The bound is
    `(K + 4) * 2^-24 * sum |a||b|`: FP32 accumulation, two roundings by factors, and one of the
    result (docs/reference/numerics.md, "Operands of a GEMM").

    Args:
        a, b: (buffers, spec, rows) of each plane.
        k: contracted width, before any padding.
    """
    (left, fa), (right, fb) = _operand(*a, k), _operand(*b, k)
    factors = fa[:, None] * fb[None, :]
    product = (left @ right.T) * factors
    magnitude = (np.abs(left) @ np.abs(right).T) * factors
    return product, magnitude * (left.shape[1] + 4) * 2.0**-24
