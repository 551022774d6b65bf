"""Identity: values kept in high precision; the format of a plain torch.Tensor in a GEMM.

Limits: none but the dtype's own.

Source: ours; IEEE 754.
"""

from __future__ import annotations

from .base import Format
from .elements import BF16, FP16, FP32, Element
from .registry import register_alias, register_format

__all__ = ["IDENTITY", "IDENTITY_BF16", "IDENTITY_FP16", "IDENTITY_FP32"]


def _register(name: str, element: Element | None, summary: str) -> Format:
    return register_format(
        name,
        Format(element, None, None, "identity", "identity"),
        summary=summary,
        source="IEEE 754" if element else "ours",
        limits="none",
    )


IDENTITY_BF16 = _register("bf16", BF16, "values in BF16")
IDENTITY_FP16 = _register("fp16", FP16, "values in FP16")
IDENTITY_FP32 = _register("fp32", FP32, "values in FP32")
IDENTITY = _register("identity", None, "values in the dtype that they come in")
register_alias("high_precision", "identity")
