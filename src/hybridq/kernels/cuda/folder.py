"""Folding on a GPU into memory that is given, with all prepared that no plane changes."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import FOLD_WIDTH
from ..choice import ALIGNMENT
from ..cpu import core_spec

__all__ = ["Folder"]


class Folder:
    """Folds planes of one spec and size to FP8 with FP32 scales of `1 x 128`.

    Args:
        kernels: `backend.GpuKernels`.
        spec: of the planes, with E8M0 scales.
        rows, cols: of their own matrix.

    Attributes:
        nbytes: that a folded plane takes, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_changed", "_kernels", "_scale", "_sizes", "_text", "nbytes")

    def __init__(self, kernels: Any, spec: PlaneSpec, rows: int, cols: int) -> None:
        width = spec.padded(cols)
        self._kernels, self._text = kernels, core_spec(spec)[0]
        self._sizes = (rows, width, -(-width // FOLD_WIDTH))
        #: Where the scales and the count of changes begin, behind the codes.
        self._scale = -(-rows * width // ALIGNMENT) * ALIGNMENT
        scales = 4 * rows * self._sizes[2]
        self._changed = self._scale + -(-scales // ALIGNMENT) * ALIGNMENT
        self.nbytes = self._changed + ALIGNMENT

    def __call__(
        self, buffers: list[torch.Tensor], memory: torch.Tensor, at: int, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes `[rows, K]` and scales `[rows, ceil(K / 128)]` with strides `(1, rows)`.

        Args:
            buffers: data and scales of a plane that was just made, or was checked.
            memory: uint8 on the current device.
            at: the byte where the folded plane begins, a multiple of `ALIGNMENT`.
            stream: the device's current one.
        """
        kernels, (rows, width, right) = self._kernels, self._sizes
        data, scale = kernels.pointer(buffers[0]), kernels.pointer(buffers[1])
        base = kernels.pointer(memory, True) + at
        own = (base, base + self._scale, 1, rows, base + self._changed)
        kernels.module.fold(self._text, data, scale, rows, width, 1, *own, stream)
        codes = memory.as_strided((rows, width), (width, 1), at)
        scales = memory.view(torch.float32)
        return codes, scales.as_strided((rows, right), (1, rows), (at + self._scale) // 4)
