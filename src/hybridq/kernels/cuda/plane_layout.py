"""What new planes of one spec and size have in common: their buffers, and how kernels know them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...formats import PlaneSpec
from ..cpu import core_spec
from .plane_forms import as_encoded, form_of

__all__ = ["PlaneLayout", "plane_layout"]


class PlaneLayout(NamedTuple):
    """What new planes of a spec and a size have in common.

    Args:
        buffers: shape and dtype of each.
        text: the spec as the module takes it.
        needs_amax: an amax, or one of each row, is needed before the plane can be written.
        scale_strides: of FP32 scales of blocks where they lie as a product takes them, else zeros.
        form: in which the kernel writes it.
    """

    buffers: tuple[tuple[tuple[int, ...], torch.dtype | None], ...]
    text: Any
    needs_amax: bool
    scale_strides: tuple[int, int]
    form: int

    def make(self, device: torch.device) -> list[torch.Tensor]:
        """Return new buffers."""
        strides = (None, self.scale_strides if any(self.scale_strides) else None, None)
        return [
            torch.empty(size, dtype=dtype, device=device)
            if stride is None
            else torch.empty_strided(size, stride, dtype=dtype, device=device)
            for (size, dtype), stride in zip(self.buffers, strides, strict=False)
        ]


@lru_cache(maxsize=4096)
def plane_layout(spec: PlaneSpec, rows: int, cols: int) -> PlaneLayout:
    """Return the layout of a new plane of `spec`.

    Args:
        spec: of the plane.
        rows, cols: of the plane's own matrix.
    """
    own = tuple((tuple(b.shape), b.dtype) for b in spec.buffers(rows, cols))
    form, is_down = form_of(spec), spec.scale_layout == "down"
    # Scales of one group of columns side by side, as cuBLASLt reads them.
    strides = (1, max(rows, 1)) if spec.format.unfolded or is_down else (0, 0)
    text = core_spec(as_encoded(spec))[0]
    return PlaneLayout(own, text, spec.needs_amax_inside, strides, form)
