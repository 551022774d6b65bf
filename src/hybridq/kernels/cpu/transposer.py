"""Transposed codes, in the compiled core."""

from __future__ import annotations

from typing import Any

import torch

from ..inputs import codes, made
from . import backend
from .results import result
from .steps import Place

__all__ = ["Transposer"]


class Transposer:
    """Transposes codes."""

    def __call__(self, data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
        """Return `rows x cols` codes of so many bits, transposed."""
        source = data.contiguous()
        width = -(-rows // 2) if bits == 4 else rows
        out = result(cols, width, dtype=data.dtype)
        address = codes("transpose: data", source, rows, cols, bits)
        backend.core.transpose(address, rows, cols, bits, made(out), torch.get_num_threads())
        return out

    def record(
        self, steps: Any, shape: tuple[int, int], bits: int, data: Place, out: Place
    ) -> None:
        """Have `steps` transpose codes.

        Args:
            steps: of `Steps`.
            shape: `(rows, cols)`, how many.
            bits: of each.
            data: place of the codes, contiguous.
            out: place of the result, as large as it must be.
        """
        steps.core.transpose(*shape, bits, data, out)
        steps.is_empty = False
