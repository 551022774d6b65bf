"""Which planes a quantized tensor has: drop one, or add one that the other determines."""

from __future__ import annotations

from typing import Any

from ..errors import PlaneError
from ..formats import PlaneSpec
from ..storage import TensorStorage

__all__ = ["used"]


def used(
    storage: TensorStorage, quantizer: Any, rowwise: bool, columnwise: bool
) -> tuple[TensorStorage, Any]:
    """Return the storage with just the planes asked for, and the quantizer that describes them.

    Args:
        storage: what there is.
        quantizer: the tensor's own, or None.
        rowwise, columnwise: which planes there are to be.

    Raises:
        PlaneError: a plane is neither there nor derivable, would have another spec than the
            quantizer's, or none is left.
    """
    made = storage.with_usage(rowwise, columnwise)
    for plane in made.planes:
        own = getattr(quantizer, plane.direction, None)
        if own is None and quantizer is not None:
            # A plane that was derived is written from now on, and so the quantizer describes it.
            quantizer = quantizer.with_spec(plane.direction, plane.spec)
        is_new = getattr(storage, plane.direction) is None
        if is_new and own is not None and not _describes(own, plane.spec):
            raise PlaneError(
                f"update_usage: the quantizer makes the {plane.direction} plane {own}, and from "
                f"the other one it would be {plane.spec}; quantize the original again"
            )
    return made, quantizer


def _describes(own: PlaneSpec, spec: PlaneSpec) -> bool:
    """Whether `spec` is `own`, or what an identity of open dtype has become."""
    return own == spec or (own.format.is_identity and spec.format.is_identity)
