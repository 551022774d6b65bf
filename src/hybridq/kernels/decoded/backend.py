"""The `torch` backend: exact products of decoded operands, dense and grouped, on any device."""

from __future__ import annotations

from ..choice import Backend, DeviceSupport, OpQuery, register_backend
from ..inputs import is_host
from .decoded_gemm import dtype_reason, exact_gemm, multiplier, product_notes
from .decoded_grouped_gemm import grouped_gemm, grouped_reason
from .planned_gemm import planner

__all__ = ["TORCH"]


def _supports(query: OpQuery) -> str | None:
    reason = dtype_reason(query)
    if reason is None and query.op == "grouped_gemm":
        reason = grouped_reason(query)
    return reason


def _notes(query: OpQuery) -> tuple[str, ...]:
    notes = product_notes(query)
    if query.op == "grouped_gemm":
        by = "a loop over the groups" if is_host(query.device) else "torch's grouped product"
        return (*notes, by)
    return notes


#: The backend of torch's own products.
TORCH = register_backend(
    Backend(
        "torch",
        _supports,
        {"gemm": exact_gemm, "grouped_gemm": grouped_gemm, "grouped_loop": grouped_gemm},
        op_devices={
            "grouped_gemm": DeviceSupport(("cpu", "cuda"), (8, 0)),
            "grouped_loop": DeviceSupport(("cpu",)),
        },
        priority=10,
        notes=_notes,
        multiplier=multiplier,
        planner=planner,
        takes_group_factors=True,
    )
)
