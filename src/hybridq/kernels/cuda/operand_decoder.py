"""Decoding operands on a GPU into memory that is given, with all prepared that no plane changes."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_private import part_of
from ...formats import PlaneSpec
from ..choice import ALIGNMENT
from ..cpu import core_spec
from ..inputs import DTYPES

__all__ = ["OperandDecoder"]

#: Two numbers on the device, and what each is divided by.
Factors = tuple[tuple[torch.Tensor | None, float], tuple[torch.Tensor | None, float]]


class OperandDecoder:
    """Decodes planes of one spec and size as operands of a GEMM.

    Without the factor of the tensor or of its rows, unless factors are given: then values are
    multiplied by them, and by those of rows that are scales, before they are rounded to `dtype`.

    Args:
        kernels: `backend.GpuKernels`.
        spec: of the planes, whose buffers are contiguous.
        rows, cols: of their own matrix.
        dtype: of the operand.

    Attributes:
        nbytes: that an operand takes, a multiple of `ALIGNMENT`.
    """

    __slots__ = (
        *("_dtype", "_has_row_factors", "_kernels", "_name", "_shape", "_sizes", "_text"),
        "nbytes",
    )

    def __init__(
        self, kernels: Any, spec: PlaneSpec, rows: int, cols: int, dtype: torch.dtype
    ) -> None:
        self._kernels, self._text = kernels, core_spec(spec)[0]
        self._dtype, self._name = dtype, DTYPES[dtype]
        self._has_row_factors = spec.has_scales_as_factors
        self._sizes, self._shape = (rows, cols), (rows, spec.padded(cols))
        nbytes = self._shape[0] * self._shape[1] * dtype.itemsize
        self.nbytes = -(-nbytes // ALIGNMENT) * ALIGNMENT

    def __call__(
        self,
        buffers: list[torch.Tensor],
        memory: torch.Tensor,
        at: int,
        stream: int,
        factors: Factors | None = None,
    ) -> torch.Tensor:
        """Return the operand `[rows, K]`, K with the transform's padding.

        Args:
            buffers: of a plane that was just made, or was checked.
            memory: uint8 on the current device.
            at: the byte where the operand begins, a multiple of `ALIGNMENT`.
            stream: the device's current one.
            factors: two numbers, FP32 `[1]` or None for none, and what each is divided by first
                (0: by nothing).
        """
        kernels, width = self._kernels, self._shape[1]
        wide = memory.view(self._dtype)
        out: torch.Tensor = part_of(wide, self._shape, (width, 1), at // self._dtype.itemsize)
        plane = (kernels.pointer(buffers[0]), kernels.pointer(buffers[1]), 0)
        own = (kernels.pointer(out, True), self._name, True, 0)
        given = None
        if self._has_row_factors and factors is not None and factors[0][0] is factors[1][0] is None:
            own = (*own[:2], False, 0)  # values: theirs are all that there are
        elif factors is not None:
            (first, first_bound), (second, second_bound) = factors
            given = (kernels.pointer(first), first_bound, kernels.pointer(second), second_bound)
        kernels.module.decode(self._text, *plane, *self._sizes, *own, stream, given)
        return out
