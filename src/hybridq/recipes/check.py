"""Are all three GEMMs of a module runnable with the quantizers of its slots? Asked when bound."""

from __future__ import annotations

from collections.abc import Mapping

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..gemm import CONTRACT
from ..quantizers import Quantizer

__all__ = ["problems", "spec_of"]


def spec_of(quantizer: Quantizer, direction: Direction) -> PlaneSpec | None:
    """Return the spec of the plane that `quantizer` makes in `direction`, or None."""
    if direction == ROWWISE:
        return quantizer.rowwise if quantizer.makes_rowwise else None
    return quantizer.columnwise if quantizer.makes_columnwise else None


def problems(quantizers: Mapping[str, Quantizer]) -> tuple[str, ...]:
    """Return one line per operand that a GEMM needs and its slot's quantizer does not make.

    Args:
        quantizers: quantizer of each slot, by tensor type.

    Returns:
        The problems, each naming the GEMM and its slots; empty if all three GEMMs can run.

    Any two planes can be multiplied (another format, another block, with or without transform),
    so a missing plane is the only thing that can be wrong.
    """
    found = []
    for gemm in CONTRACT:
        for slot, direction in ((gemm.a, gemm.a_direction), (gemm.b, gemm.b_direction)):
            quantizer = quantizers[slot]
            if spec_of(quantizer, direction) is not None:
                continue
            has_spec = getattr(quantizer, direction) is not None
            reason = f"its {direction} usage is off" if has_spec else "it has no spec for one"
            found.append(
                f"{gemm.name} ({gemm.a}.{gemm.a_direction} @ {gemm.b}.{gemm.b_direction}.T): "
                f"the quantizer of {slot!r} makes no {direction} plane, {reason}"
            )
    return tuple(found)
