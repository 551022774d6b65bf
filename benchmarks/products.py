"""Part `products`: GEMMs of two quantized operands, decode included, beside torch in BF16."""

from __future__ import annotations

import torch
from timing import Case

import hybridq

NAME = "products"
UNIT = "torch's bfloat16 product"


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return square products of `rows`; `cols` and `threads` are not asked."""
    a, b = torch.randn(2, rows, rows, dtype=torch.bfloat16)

    def base() -> object:
        return a @ b.t()

    found = []
    for left, right in (("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("mxfp8", "nvfp4")):
        x, y = hybridq.quantize(a, left, False), hybridq.quantize(b, right, False)
        found.append(
            Case(f"{left} x {right}", lambda x=x, y=y: hybridq.gemm(x, y), base, UNIT)  # type: ignore[misc]
        )
    wide_a, wide_b = a.float(), b.float()
    return [*found, Case("torch float32", lambda: wide_a @ wide_b.t(), base, UNIT)]
