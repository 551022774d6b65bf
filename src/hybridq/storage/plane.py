"""Plane: one encoded copy of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..direction import ROWWISE, Direction, opposite
from ..errors import PlaneError
from ..formats import PlaneSpec

__all__ = ["Plane"]


class Plane:
    """One encoded copy of the logical matrix X `[rows, cols]`. Treat as frozen.

    A columnwise plane holds the bytes of the rowwise plane of X transposed, so its own matrix is
    `[cols, rows]` and its data always has the contraction axis last.

    Args:
        spec: what the codes mean; an identity spec has its dtype fixed.
        direction: `"rowwise"` or `"columnwise"`.
        rows, cols: the logical matrix X.
        buffers: name to tensor, the names and shapes of `spec.buffers(*self.matrix)`.
    """

    __slots__ = ("buffers", "cols", "direction", "rows", "spec")

    def __init__(
        self,
        spec: PlaneSpec,
        direction: Direction,
        rows: int,
        cols: int,
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        self.spec = spec
        self.direction = direction
        self.rows = rows
        self.cols = cols
        self.buffers = dict(buffers)

    @staticmethod
    def of(x: torch.Tensor, direction: Direction = ROWWISE) -> Plane:
        """Return the identity plane of the plain matrix x `[rows, cols]`; shares its memory."""
        spec = PlaneSpec.parse("identity").resolve(x.dtype)
        data = x if direction == ROWWISE else x.t()
        return Plane(spec, direction, x.shape[0], x.shape[1], {"data": data})

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the plane's own matrix: `(rows, cols)`, or `(cols, rows)` if columnwise."""
        return (self.rows, self.cols) if self.direction == ROWWISE else (self.cols, self.rows)

    @property
    def data(self) -> torch.Tensor:
        """The codes (uint8), or the values of an identity plane."""
        return self.buffers["data"]

    @property
    def scale(self) -> torch.Tensor | None:
        """The block scales, uint8 bytes or float32, or None."""
        return self.buffers.get("scale")

    @property
    def amax(self) -> torch.Tensor | None:
        """FP32 `[1]` amax of the tensor for two-level formats, or None."""
        return self.buffers.get("amax")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers in the format's order, as operations take them."""
        return list(self.buffers.values())

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers.values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return X `[rows, cols]` in `dtype`: FP32 arithmetic, one rounding at the end."""
        own = torch.ops.hybridq.decode(self.tensors, self.spec.text, *self.matrix, dtype)
        return own if self.direction == ROWWISE else own.t()

    def mirrored(self) -> Plane:
        """Return the same buffers as the other direction's plane of X transposed."""
        other = opposite(self.direction)
        return Plane(self.spec, other, self.cols, self.rows, self.buffers)

    def derive(self) -> Plane:
        """Return the other direction's plane of the same X, computed from this one's bytes.

        Raises:
            PlaneError: the spec's other plane does not follow from this one.
        """
        if not self.spec.is_derivable:
            raise PlaneError(
                f"derive: the {self.direction} plane of {self.spec} does not determine the other "
                "one; quantize the original with both usages"
            )
        other = opposite(self.direction)
        buffers = dict(self.buffers)
        if self.spec.format.is_identity:
            buffers["data"] = self.data.t()
            return Plane(self.spec, other, self.rows, self.cols, buffers)
        element = self.spec.format.element
        bits = 4 if element is not None and element.codes_per_byte == 2 else 8
        buffers["data"] = torch.ops.hybridq.transpose(self.data, *self.matrix, bits)
        if self.scale is not None and self.spec.format.block is not None:
            buffers["scale"] = self.scale.t().contiguous()
        return Plane(self.spec, other, self.rows, self.cols, buffers)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Plane:
        """Return the plane whose buffers are `function` of these."""
        buffers = {name: function(buffer) for name, buffer in self.buffers.items()}
        return Plane(self.spec, self.direction, self.rows, self.cols, buffers)

    def __repr__(self) -> str:
        parts = ", ".join(
            f"{name}={str(buffer.dtype).removeprefix('torch.')}{list(buffer.shape)}"
            for name, buffer in self.buffers.items()
        )
        return f"Plane({self.spec}, {self.direction}, {self.rows}x{self.cols}, {parts})"
