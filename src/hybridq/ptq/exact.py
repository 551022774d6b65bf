"""MXFP4 as NVFP4 without loss: the same codes, and powers of two as scales.

With `kmax` and `k` the exponents of the largest and of a block's scale, the second-level scale is
`2^(kmax - 8)` and the block's `2^(k - kmax + 8)`, once for each half of the block: E4M3 has the
powers of two from 2^-9 to 2^8, so it holds all blocks whose `k` is at most 17 below `kmax`. Blocks
of zeros have any scale.

Source: ours; E4M3 and E8M0 as OCP MX v1.0 and OFP8 v1.0 have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..formats import PlaneSpec
from ..storage import Plane

__all__ = ["Exponents", "can_be_exact", "exact_plane"]

#: Exponents of E4M3's powers of two.
_LEAST: Final = -9
_LARGEST: Final = 8
#: Beyond these, the FP32 amax or its reciprocal factor may not be a normal number.
_RANGE: Final = (-110, 110)
_BIAS: Final = 127
_NAN: Final = 255
_NVFP4: Final = PlaneSpec.parse("nvfp4")
_MXFP4: Final = PlaneSpec.parse("mxfp4")


def can_be_exact(own: PlaneSpec, wanted: PlaneSpec) -> bool:
    """Return whether planes of one spec may be those of another, if their scales allow it.

    Args:
        own: what there is.
        wanted: what is to be written.
    """
    pairs = ((own.format, _MXFP4.format), (wanted.format, _NVFP4.format))
    return all((a.element, a.block, a.scale) == (b.element, b.block, b.scale) for a, b in pairs)


@dataclass
class Exponents:
    """The exponents of the scales of blocks that are not zero, as far as they have been seen."""

    least: int | None = None
    largest: int | None = None
    has_nan: bool = False

    def add(self, plane: Plane) -> None:
        """Take in a plane, or a tile of one.

        Args:
            plane: MXFP4, columns a multiple of 32.
        """
        scale = plane.buffers["scale"].int()
        seen = scale[_has_values(plane)]
        if not seen.numel():
            return
        self.has_nan |= bool((seen == _NAN).any())
        least, largest = int(seen.min()) - _BIAS, int(seen.max()) - _BIAS
        self.least = least if self.least is None else min(self.least, least)
        self.largest = largest if self.largest is None else max(self.largest, largest)

    @property
    def top(self) -> int | None:
        """The largest exponent, if all blocks can be held; None: they cannot."""
        if self.least is None or self.largest is None:
            return 0
        fits = self.largest - self.least <= _LARGEST - _LEAST and not self.has_nan
        return self.largest if fits and _RANGE[0] <= self.largest <= _RANGE[1] else None

    @property
    def reason(self) -> str:
        """Why the blocks cannot be held, where `top` is None."""
        if self.has_nan:
            return "a block's scale is NaN"
        seen = f"the scales of its MXFP4 blocks are 2^{self.least} to 2^{self.largest}"
        if self.largest is not None and _RANGE[0] <= self.largest <= _RANGE[1]:
            return f"{seen}, more than E4M3 holds"
        return f"{seen}, which no FP32 second-level scale stands above"


def exact_plane(plane: Plane, top: int) -> Plane:
    """Return the NVFP4 plane with the values of an MXFP4 plane.

    Args:
        plane: MXFP4, or a tile of one.
        top: `Exponents.top` of all of the tensor.
    """
    exponent = plane.buffers["scale"].int() - (_BIAS + top - _LARGEST)
    ones = torch.ones(exponent.shape, dtype=torch.float32, device=exponent.device)
    power = torch.ldexp(ones, exponent.clamp(_LEAST, _LARGEST))
    codes = power.to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = -(-plane.cols // 16)
    factor = torch.tensor([2.0 ** (top - _LARGEST)], dtype=torch.float32, device=exponent.device)
    element = _NVFP4.format.element
    bound = _NVFP4.tensor_bound * (1.0 if element is None else element.max)
    buffers = {
        "data": plane.buffers["data"],
        "scale": codes.repeat_interleave(2, 1)[:, :blocks].contiguous(),
        "amax": factor * bound,
    }
    return Plane(_NVFP4, plane.direction, plane.rows, plane.cols, buffers)


def _has_values(plane: Plane) -> torch.Tensor:
    """Return which blocks have a code that is not zero, bool `[rows, blocks]`."""
    is_some = plane.buffers["data"] & 0x77 != 0
    return is_some.reshape(plane.rows, -1, 16).any(-1)
