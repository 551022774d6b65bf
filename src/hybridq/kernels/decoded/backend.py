"""The `torch` backend: exact products of decoded operands, dense and grouped, on any device."""

from __future__ import annotations

from ..choice import Backend, DeviceSupport, OpQuery, register_backend
from .decoded_gemm import dtype_reason, exact_gemm, multiplier, product_notes
from .decoded_grouped_gemm import grouped_gemm, grouped_reason, rounded_of_groups
from .planned_gemm import planner

__all__ = ["TORCH"]


def _supports(query: OpQuery) -> str | None:
    reason = dtype_reason(query)
    if reason is None and query.op == "grouped_gemm":
        reason = grouped_reason(query)
    return reason


def _notes(query: OpQuery) -> tuple[str, ...]:
    if query.op != "grouped_gemm":
        return product_notes(query)
    if query.device != "cuda":
        return (*product_notes(query), "a loop over the groups")
    made = "operands decoded to BF16, torch's grouped product with FP32 accumulation"
    rounded = rounded_of_groups(query)
    if rounded is not None:
        return (
            f"{made}; operand {'ab'[rounded]} is rounded once, which adds as much as the rounding "
            "of the result (precision 'exact' does not)",
        )
    if not any(spec is not None and spec.needs_amax for spec in (query.row, query.col)):
        return (made,)
    return (
        f"{made}; the tokens take the factors of both operands before they are rounded, which adds "
        "as much as the rounding of the result (precision 'exact' does not)",
    )


#: The backend of torch's own products.
TORCH = register_backend(
    Backend(
        "torch",
        _supports,
        {"gemm": exact_gemm, "grouped_gemm": grouped_gemm, "grouped_loop": grouped_gemm},
        op_devices={
            "grouped_gemm": DeviceSupport(min_capability=(8, 0)),
            "grouped_loop": DeviceSupport(("cpu",)),
        },
        priority=10,
        notes=_notes,
        multiplier=multiplier,
        planner=planner,
        takes_group_factors=True,
    )
)
