"""Are all GEMMs of a module runnable with the quantizers of its slots? Asked when bound."""

from __future__ import annotations

from collections.abc import Mapping

from ..direction import ROWWISE, Direction
from ..formats import PlaneSpec
from ..quantizers import Quantizer
from .module_types import ModuleType

__all__ = ["problems", "spec_of"]


def spec_of(quantizer: Quantizer, direction: Direction) -> PlaneSpec | None:
    """Return the spec of the plane that `quantizer` makes in `direction`, or None."""
    if direction == ROWWISE:
        return quantizer.rowwise if quantizer.makes_rowwise else None
    return quantizer.columnwise if quantizer.makes_columnwise else None


def problems(quantizers: Mapping[str, Quantizer], kind: ModuleType) -> tuple[str, ...]:
    """Return one line per plane that a module reads and its slot's quantizer does not make.

    Args:
        quantizers: quantizer of each slot, by tensor type.
        kind: of the module.

    Returns:
        The problems, each naming the GEMM and its slots; empty if all of them can run.

    Any two planes can be multiplied (another format, another block, with or without transform),
    so a missing plane is the only thing that can be wrong.
    """
    found = []
    for what, slot, direction in kind.needs:
        quantizer = quantizers[slot]
        if spec_of(quantizer, direction) is not None:
            continue
        has_spec = getattr(quantizer, direction) is not None
        reason = f"its {direction} usage is off" if has_spec else "it has no spec for one"
        found.append(f"{what}: the quantizer of {slot!r} makes no {direction} plane, {reason}")
    return tuple(found)
