"""Folding on a GPU into memory that is given, with all prepared that no plane changes."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch_private import part_of
from ...formats import PlaneSpec
from ...reference import FOLD_WIDTH
from ..choice import ALIGNMENT
from ..cpu import core_spec

__all__ = ["Folder"]


class Folder:
    """Folds planes of one spec and size to FP8 with FP32 scales of `height x 128`.

    Args:
        kernels: `backend.GpuKernels`.
        spec: of the planes, with E8M0 scales.
        rows, cols: of their own matrix.
        height: 1 or 128.

    Attributes:
        nbytes: that a folded plane takes, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_changed", "_height", "_kernels", "_scale", "_sizes", "_steps", "_text", "nbytes")

    def __init__(
        self, kernels: Any, spec: PlaneSpec, rows: int, cols: int, height: int = 1
    ) -> None:
        width = spec.padded(cols)
        right, down = -(-width // FOLD_WIDTH), -(-rows // height)
        self._kernels, self._text, self._height = kernels, core_spec(spec)[0], height
        self._sizes = (rows, width)
        #: Shape and strides of the scales; those of a row of squares are whole groups of 16 bytes.
        self._steps = ((down, right), (1, down))
        if height > 1:
            self._steps = ((down, right), (-(-right // 4) * 4, 1))
        #: Where the scales and the count of changes begin, behind the codes.
        self._scale = -(-rows * width // ALIGNMENT) * ALIGNMENT
        scales = 4 * max(self._steps[0][0] * self._steps[1][0], down * right)
        self._changed = self._scale + -(-scales // ALIGNMENT) * ALIGNMENT
        self.nbytes = self._changed + ALIGNMENT

    def __call__(
        self, buffers: list[torch.Tensor], memory: torch.Tensor, at: int, stream: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes `[rows, K]` and the scales `[ceil(rows / height), ceil(K / 128)]`.

        Scales of rows have strides `(1, rows)`, those of squares lie along K, as products read
        them.

        Args:
            buffers: data and scales of a plane that was just made, or was checked.
            memory: uint8 on the current device.
            at: the byte where the folded plane begins, a multiple of `ALIGNMENT`.
            stream: the device's current one.
        """
        kernels, (rows, width), (shape, steps) = self._kernels, self._sizes, self._steps
        data, scale = kernels.pointer(buffers[0]), kernels.pointer(buffers[1])
        base = kernels.pointer(memory, True) + at
        own = (base, base + self._scale, *steps, base + self._changed)
        kernels.module.fold(self._text, data, scale, rows, width, self._height, *own, stream)
        codes = part_of(memory, (rows, width), (width, 1), at)
        scales = memory.view(torch.float32)
        return codes, part_of(scales, shape, steps, (at + self._scale) // 4)
