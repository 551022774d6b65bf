"""In which specs operands are best encoded, so that nothing lies between encode and product."""

from __future__ import annotations

from dataclasses import replace

from ...formats import PlaneSpec
from .query import OpQuery
from .registry import choose

__all__ = ["operand_specs"]


def operand_specs(query: OpQuery) -> tuple[PlaneSpec, PlaneSpec]:
    """Return the specs that planes made for one product alone are encoded in.

    Where the backend that multiplies would first make something else of a plane, and the backend
    that encodes can write that at once, it is the spec of that; else the operand's own.

    Args:
        query: a GEMM, with sizes and chip.
    """
    if query.row is None or query.col is None:
        raise ValueError(f"operand_specs: a product has two operands, got {query}")
    own = (query.row, query.col)
    chosen = choose(query).chosen
    if chosen is None or chosen.operands is None:
        return own
    row, col = (
        wanted if wanted == spec or _writes_both(query, spec, wanted) else spec
        for spec, wanted in zip(own, chosen.operands(query), strict=True)
    )
    return row, col


def _writes_both(query: OpQuery, spec: PlaneSpec, wanted: PlaneSpec) -> bool:
    """Whether a native backend that encodes planes of `spec` encodes those of `wanted`, too."""
    asked = replace(query, op="encode", col=None, precision="auto", sizes=None, chip=None)
    first, second = (choose(replace(asked, row=one)).chosen for one in (spec, wanted))
    return first is second is not None and second.is_native
