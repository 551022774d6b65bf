"""Part `products`: GEMMs of two quantized operands, decode included, beside torch's in BF16.

On a CPU without BF16 instructions, beside torch's in FP32 and with matrices of half the size, since
each takes four times as long. One that has them plays such a CPU with
`HYBRIDQ_CPU_VARIANT=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`, and
`MKL_ENABLE_INSTRUCTIONS=AVX2` where torch has MKL.
"""

from __future__ import annotations

import torch
from timing import Case

import hybridq
from hybridq.kernels.cpu.bf16_gemm import product_reason

NAME = "products"
UNIT = "torch's bfloat16 product"
FP32_UNIT = "torch's float32 product"
#: Time over torch's product, at most, in BF16 (0.9 of its speed) and in FP32.
FLOOR, FP32_FLOOR = round(1 / 0.9, 2), 1.12
PAIRS = (
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("mxfp8", "nvfp4"),
    ("mxfp4", "mxfp6_e3m2"),
    ("fp8_1x128", "fp8_128x128"),
)


def _all_formats() -> tuple[tuple[str, str], ...]:
    """Return the pairs, and each format that is in none of them with itself."""
    seen = {name for pair in PAIRS for name in pair}
    rest = (name for name in hybridq.formats.names() if name not in seen)
    return (*PAIRS, *((name, name) for name in rest))


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return products of `[rows, rows]` matrices; `cols` and `threads` are not asked."""
    has_bf16 = product_reason() is None
    size = rows if has_bf16 else rows // 2
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16)
    wide_a, wide_b = a.float(), b.float()
    unit, floor = (UNIT, FLOOR) if has_bf16 else (FP32_UNIT, FP32_FLOOR)

    def fp32() -> object:
        return wide_a @ wide_b.t()

    def bf16() -> object:
        return a @ b.t()

    base = bf16 if has_bf16 else fp32

    def product(x: hybridq.Plane, y: hybridq.Plane) -> object:
        with hybridq.gemm_cache(0):  # nothing decoded is kept from one call to the next
            return hybridq.gemm(x, y, out_dtype=torch.bfloat16)

    found = []
    for left, right in PAIRS if has_bf16 else _all_formats():
        x, y = hybridq.quantize(a, left, False).rowwise, hybridq.quantize(b, right, False).rowwise
        found.append(
            Case(f"{left} x {right}", lambda x=x, y=y: product(x, y), base, unit, floor)  # type: ignore[misc]
        )
    if has_bf16:
        found.append(Case("torch float32", fp32, base, unit))
    return found
