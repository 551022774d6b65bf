"""The `torch` backend: exact products of decoded operands, dense and grouped, on any device."""

from __future__ import annotations

from .exact import dtype_reason, exact_gemm, product_notes
from .grouped import grouped_gemm, grouped_reason
from .registry import Backend, Call, register_backend

__all__ = ["TORCH"]


def _supports(call: Call) -> str | None:
    reason = dtype_reason(call)
    if reason is None and call.op == "grouped_gemm":
        reason = grouped_reason(call)
    return reason


def _notes(call: Call) -> tuple[str, ...]:
    notes = product_notes(call)
    if call.op == "grouped_gemm":
        by = "a loop over the groups" if call.device == "cpu" else "torch's grouped product"
        return (*notes, by)
    return notes


#: The backend of torch's own products.
TORCH = register_backend(
    Backend(
        "torch",
        _supports,
        {"gemm": exact_gemm, "grouped_gemm": grouped_gemm, "grouped_loop": grouped_gemm},
        notes=_notes,
    )
)
