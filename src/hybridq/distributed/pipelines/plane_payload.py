"""One rowwise plane as one tensor of bytes, for collectives that send a single tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from ...direction import ROWWISE
from ...formats import PlaneSpec
from ...quantizers import Quantizer
from ...storage import Plane, TensorStorage
from ...tensor import QuantizedTensor

__all__ = ["PlanePayload"]

#: Where buffers begin: a multiple of the size of every element that they have.
_ALIGNMENT: Final = 8


class PlanePayload(NamedTuple):
    """The bytes of the rowwise plane of a tensor: its buffers one after the other.

    Attributes:
        spec: of the plane; an identity format has its dtype fixed.
        shape: of the tensor, `(..., cols)`.
        dtype: of the tensor.
    """

    spec: PlaneSpec
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(spec: PlaneSpec, tensor: torch.Tensor) -> PlanePayload | None:
        """Return how a tensor travels in a format; None: as it is.

        As they are travel tensors without a matrix or a value, and those of other dtypes than
        float32, bfloat16 and float16. Only shape and dtype of the tensor are read.

        Args:
            spec: of the plane.
            tensor: to be sent or received, plain or quantized.
        """
        kinds = (torch.float32, torch.bfloat16, torch.float16)
        if tensor.dtype not in kinds or tensor.dim() < 2 or not tensor.numel():
            return None
        return PlanePayload(spec.resolve(tensor.dtype), tuple(tensor.shape), tensor.dtype)

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes that are sent, gaps between buffers included."""
        return _layout(self.spec, *self.matrix)[1]

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return memory for it, uint8 `[nbytes]`.

        Args:
            device: of the memory.
        """
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    @torch.no_grad()
    def encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a tensor's plane, uint8 `[nbytes]`.

        Args:
            tensor: of this shape and dtype, any strides.
        """
        plane = Quantizer(self.spec, None).encode(tensor.detach().reshape(self.matrix)).rowwise
        if plane is None:  # a quantizer of one rowwise spec makes it
            raise RuntimeError("PlanePayload.encoded: there must be a rowwise plane, got none")
        made = self.empty(tensor.device)
        for place, buffer in zip(self._places(made), plane.tensors, strict=True):
            place.copy_(buffer.reshape(place.shape))
        return made

    def _places(self, payload: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the buffers in a payload, as views of it."""
        return [
            payload.narrow(0, start, numel * dtype.itemsize).view(dtype).view(shape)
            for start, numel, dtype, shape in _layout(self.spec, *self.matrix)[0]
        ]

    def plane(self, payload: torch.Tensor) -> Plane:
        """Return the plane whose buffers a payload holds; they are views of it.

        Args:
            payload: uint8 `[nbytes]`.
        """
        rows, cols = self.matrix
        names = [buffer.name for buffer in self.spec.buffers(rows, cols)]
        places = zip(names, self._places(payload), strict=True)
        return Plane(self.spec, ROWWISE, rows, cols, places)

    @torch.no_grad()
    def decoded(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the values of a payload, in the shape and dtype of the tensor.

        Args:
            payload: uint8 `[nbytes]`.
        """
        return self.plane(payload).dequantize(self.dtype).reshape(self.shape)

    def quantized(self, payload: torch.Tensor) -> QuantizedTensor:
        """Return the tensor with the plane that a payload holds, and no columnwise one.

        Args:
            payload: uint8 `[nbytes]`.
        """
        storage = TensorStorage(self.plane(payload), None)
        return QuantizedTensor.make(storage, self.shape, self.dtype)


_Places = tuple[tuple[int, int, torch.dtype, tuple[int, ...]], ...]


@lru_cache(maxsize=256)
def _layout(spec: PlaneSpec, rows: int, cols: int) -> tuple[_Places, int]:
    """Return of each buffer where it begins, its values, dtype and shape; and bytes in all."""
    made, end = [], 0
    for buffer in spec.buffers(rows, cols):
        dtype = buffer.dtype or torch.bfloat16
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        made.append((start, buffer.numel, dtype, tuple(buffer.shape)))
        end = start + buffer.numel * dtype.itemsize
    return tuple(made), end
