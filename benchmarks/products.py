"""Part `products`: GEMMs of two quantized operands, decode included, beside torch's in BF16."""

from __future__ import annotations

import torch
from timing import Case

import hybridq

NAME = "products"
UNIT = "torch's bfloat16 product"
#: Time over torch's BF16 product, at most: 0.9 of its speed.
FLOOR = round(1 / 0.9, 2)
PAIRS = (
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("mxfp8", "nvfp4"),
    ("mxfp4", "mxfp6_e3m2"),
    ("fp8_1x128", "fp8_128x128"),
)


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return products of `[rows, rows]` matrices; `cols` and `threads` are not asked."""
    a, b = torch.randn(2, rows, rows, dtype=torch.bfloat16)

    def base() -> object:
        return a @ b.t()

    def product(x: hybridq.Plane, y: hybridq.Plane) -> object:
        with hybridq.gemm_cache(0):  # nothing decoded is kept from one call to the next
            return hybridq.gemm(x, y, out_dtype=torch.bfloat16)

    found = []
    for left, right in PAIRS:
        x, y = hybridq.quantize(a, left, False).rowwise, hybridq.quantize(b, right, False).rowwise
        found.append(
            Case(f"{left} x {right}", lambda x=x, y=y: product(x, y), base, UNIT, FLOOR)  # type: ignore[misc]
        )
    wide_a, wide_b = a.float(), b.float()
    return [*found, Case("torch float32", lambda: wide_a @ wide_b.t(), base, UNIT)]
