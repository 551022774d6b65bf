"""What is encoded into memory that the caller has made: several planes in one allocation."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .encode_request import EncodeRequest
from .prologue import Prologue

__all__ = ["ALIGNMENT", "Place", "PlacedEncoder"]

#: Bytes at a multiple of which every buffer begins: what torch's allocator of GPUs gives.
ALIGNMENT = 256


class Place(NamedTuple):
    """Where a plane goes.

    Args:
        memory: uint8, of which it is a part.
        at: the byte where it begins, a multiple of `ALIGNMENT`.
        stream: the current stream of the memory's device, which is the current one.
    """

    memory: torch.Tensor
    at: int
    stream: int


class PlacedEncoder(Protocol):
    """Encodes planes of two specs of matrices of one dtype, the rowwise one where it is told."""

    def room(self, rows: int, cols: int) -> int:
        """Return the bytes that the rowwise plane takes, a multiple of `ALIGNMENT`.

        Args:
            rows, cols: of the matrix.
        """

    def encode(
        self,
        x: torch.Tensor,
        request: EncodeRequest,
        place: Place,
        prologue: Prologue | None = None,
    ) -> list[torch.Tensor]:
        """Return the buffers of the planes of x, as a backend's `encode` does.

        The rowwise plane's are views of the place's memory; the columnwise plane has an allocation
        of its own. An amax of both planes is one buffer, of the columnwise one.

        Args:
            x: `[rows, cols]` on the current device.
            request: without statistics.
            place: of the rowwise plane.
            prologue: what x goes through first, for a backend that encodes both planes so in one
                call (`map_encode`); then a norm's mean and rstd follow the buffers.
        """
