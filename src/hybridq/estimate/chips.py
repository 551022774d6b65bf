"""Rates of GPUs by their data sheets, and the least times of products that follow from them.

What is planned here was not measured: a product takes as long as its operations at a share of the
peak that libraries reach, or as its bytes at a share of the memory's rate, and quantizing its
operands as long as their bytes. Which kind of product hybridq runs is asked of the backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from ..errors import must_be_one_of
from ..formats import PlaneSpec
from ..kernels.choice import OpQuery
from ..kernels.inputs import Chip
from ..tensor.functional import explain_query

__all__ = ["CHIPS", "ChipRates", "chip_rates", "planned_seconds"]

#: Shares of a rate that are reached: of the memory's, of the BF16 peak, and of the lower ones with
#: a scale per tensor and with scales of blocks. Assumptions, those of the project's benchmarks.
_REACHED: Final = {"memory": 0.9, "bf16": 0.79, "tensor": 0.66, "block": 0.58}


@dataclass(frozen=True)
class ChipRates:
    """Rates of one GPU.

    Args:
        name: of it.
        capability: compute capability.
        memory: bytes per second.
        bf16, fp8, fp4: dense operations per second of its tensor cores; 0: it has none.
        source: of the numbers.
    """

    name: str
    capability: tuple[int, int]
    memory: float
    bf16: float
    fp8: float
    fp4: float
    source: str


_SHEET: Final = "NVIDIA data sheet, dense"
#: By the name that `advise(device=)` takes.
CHIPS: Final = {
    "a100": ChipRates("A100 80GB SXM", (8, 0), 2.039e12, 312e12, 0.0, 0.0, _SHEET),
    "h100": ChipRates("H100 SXM", (9, 0), 3.35e12, 989.5e12, 1979e12, 0.0, _SHEET),
    "h200": ChipRates("H200 SXM", (9, 0), 4.8e12, 989.5e12, 1979e12, 0.0, _SHEET),
    "b200": ChipRates("B200", (10, 0), 8.0e12, 2250e12, 4500e12, 9000e12, _SHEET),
}


def chip_rates(name: str) -> ChipRates:
    """Return the rates of a GPU.

    Args:
        name: of `CHIPS`, in any case.

    Raises:
        ValueError: there is no such name.
    """
    found = CHIPS.get(name.lower())
    if found is None:
        raise ValueError(f"chip_rates: a device {must_be_one_of(CHIPS, name)}")
    return found


def planned_seconds(
    chip: ChipRates, sizes: tuple[int, int, int], a: PlaneSpec, b: PlaneSpec
) -> tuple[float, str]:
    """Return what quantizing two operands and multiplying them would take, and by which backend.

    Args:
        chip: rates of the GPU.
        sizes: (M, N, K) of the product.
        a, b: specs of the operands; identity ones are BF16.

    Source: the formulas of `benchmarks/gpu_bench/predict.py`, two bytes of BF16 read for each
    value that is quantized.

    Example:
        >>> from hybridq.estimate.chips import chip_rates, planned_seconds
        >>> from hybridq.formats import PlaneSpec
        >>> plain, mxfp8 = map(PlaneSpec.parse, ("identity", "mxfp8"))
        >>> sizes, b200 = (8192, 8192, 8192), chip_rates("b200")
        >>> planned_seconds(b200, sizes, mxfp8, mxfp8) < planned_seconds(b200, sizes, plain, plain)
        True
    """
    m, n, k = sizes
    memory = _REACHED["memory"] * chip.memory
    row, col = (one.resolve(torch.bfloat16) for one in (a, b))
    kind = Chip.of("cuda", chip.capability)
    found = explain_query(OpQuery("gemm", "cuda", torch.bfloat16, row, col, "auto", sizes, kind))
    backend = found.chosen or "none"
    sides = ((row, m), (col, n))
    encode = sum(
        0.0 if spec.format.is_identity else (2 * size * k + spec.nbytes(size, k)) / memory
        for spec, size in sides
    )
    # Formats whose scale is of the whole tensor read it once more, for its largest magnitude.
    encode += sum(2 * size * k / memory for spec, size in sides if spec.needs_amax)
    moved = sum(spec.nbytes(size, k) for spec, size in sides) + 2 * m * n
    flops = 2.0 * m * n * k
    is_low = backend in ("native", "fold") and not row.format.is_identity
    if not is_low:
        decode = sum(3 * size * k for spec, size in sides if not spec.format.is_identity) / memory
        product = max(flops / (_REACHED["bf16"] * chip.bf16), moved / memory)
        return encode + decode + product, backend
    bits = max(8 if spec.format.element is None else spec.format.element.bits for spec, _ in sides)
    peak = chip.fp4 if bits == 4 and chip.fp4 else chip.fp8
    is_tensor = all(spec.format.block is None for spec, _ in sides)
    folds = 0.0
    if backend == "fold":
        folds = sum(2 * size * k for spec, size in sides if spec.format.block is not None) / memory
    reached = _REACHED["tensor" if is_tensor else "block"] * peak
    return encode + folds + max(flops / reached, moved / memory), backend
