"""Transposed codes, in the compiled core."""

from __future__ import annotations

import torch

from ..inputs import codes, made
from . import backend

__all__ = ["Transposer"]

_CPU = torch.device("cpu")


class Transposer:
    """Transposes codes."""

    def __call__(self, data: torch.Tensor, rows: int, cols: int, bits: int) -> torch.Tensor:
        """Return `rows x cols` codes of so many bits, transposed."""
        source = data.contiguous()
        width = -(-rows // 2) if bits == 4 else rows
        out = torch.empty(cols, width, dtype=data.dtype, device=_CPU)
        address = codes("transpose: data", source, rows, cols, bits)
        backend.core.transpose(address, rows, cols, bits, made(out), torch.get_num_threads())
        return out

    def write(self, data: int, shape: tuple[int, int], bits: int, out: int, threads: int) -> None:
        """Transpose codes into memory that there is.

        Args:
            data: address of the codes, contiguous.
            shape: `(rows, cols)`, how many.
            bits: of each.
            out: address of the result, as large as it must be.
            threads: that may work.
        """
        backend.core.transpose(data, *shape, bits, out, threads)
