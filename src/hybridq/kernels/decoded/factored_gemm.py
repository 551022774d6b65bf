"""Products of decoded operands on a GPU whose factors go into one operand, before its rounding.

NVFP4 planes, and FP8 planes with one scale, have a factor of the whole tensor. After an FP32
product it costs a pass of 6 bytes for each result. Here one operand is decoded to code times scale
times the factors of both planes, rounded once to BF16; the other one is exact, and the product's
own epilogue adds a bias and rounds. What that adds is the rounding of one operand: as much, in the
root mean square, as the rounding of the result, which is what precision "auto" allows. "exact"
applies the factors after the product, in FP32 (`planned_gemm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import factor_bound
from ..choice import GemmArgs, Operand, OpQuery, cached_choice, select
from ..inputs import is_current, stream_of
from .decoded_sides import decode_side, fp32_reason

__all__ = ["FactoredProduct", "factored_gemm", "factored_planner", "takes_factors"]


def takes_factors(query: OpQuery) -> bool:
    """Return whether factors of a query's planes go into an operand, as far as specs tell.

    Args:
        query: a GEMM.
    """
    a, b = query.row, query.col
    if a is None or b is None or query.device != "cuda" or query.precision == "exact":
        return False
    if query.dtype is not torch.bfloat16 or a.signs != b.signs:
        return False
    if a.has_row_factors or b.has_row_factors or factor_bound(a) is factor_bound(b) is None:
        return False
    # A plain first operand has no decode that could take them, and a second one may be kept.
    if a.format.is_identity:
        return False
    if b.format.is_identity and b.format.storage_dtype not in (None, torch.bfloat16):
        return False
    return fp32_reason(a, b, query.device, query.dtype, is_alone=False) is None


class FactoredProduct:
    """A GEMM of two planes in one size, with the factors of both in one operand.

    Args:
        specs: of the planes, for which `takes_factors` holds.
        decoders: of the operands (`Backend.operand_decoder`); None of a second one that is BF16.

    Attributes:
        room: bytes of what dies with the product, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_at", "_bounds", "_decoders", "room")

    def __init__(self, specs: Sequence[PlaneSpec], decoders: Sequence[Any]) -> None:
        self._decoders = decoders
        self._bounds = [factor_bound(spec) for spec in specs]
        #: Where the second operand begins.
        self._at = decoders[0].nbytes
        self.room = self._at + (0 if decoders[1] is None else decoders[1].nbytes)

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
        """Return the product with a bias added, or None: nothing was done.

        Args:
            a, b: planes of the specs, on the current device, where torch.autocast is off.
            args: the rest.
        """
        bias = args.bias
        if args.accumulate_into is not None or args.place is not None:
            return None
        if bias is not None and bias.dtype is not args.out_dtype:
            return None
        operands = (a, b)
        for operand in operands:
            for buffer in operand.buffers:
                if not buffer.is_contiguous():
                    return None
        if args.work is None or args.work.memory.numel() - args.work.at < self.room:
            device = a.buffers[0].device
            memory, at = torch.empty(self.room, dtype=torch.uint8, device=device), 0
            stream = stream_of(device)
        else:
            memory, at, stream = args.work
        factors = tuple(
            (None, 0.0) if bound is None else (operand.buffers[2 if bound else 1], bound)
            for operand, bound in zip(operands, self._bounds, strict=True)
        )
        # Never kept: it changes with the other operand's factor.
        left = self._decoders[0](a.buffers, memory, at, stream, factors)
        run = self._decoders[1]
        if run is None:
            right = b.buffers[0]
        elif b.cache is not None:  # exact, and so kept as any product keeps it
            right = decode_side(b, True, torch.bfloat16).matrix
        else:
            right = run(b.buffers, memory, at + self._at, stream)
        if bias is None:
            return torch.mm(left, right.t())
        return torch.addmm(bias, left, right.t())


def factored_planner(query: OpQuery) -> FactoredProduct | None:
    """Return what multiplies planes of a query's specs in its sizes, or None.

    Args:
        query: a GEMM.
    """
    a, b, sizes = query.row, query.col, query.sizes
    if a is None or b is None or sizes is None or 0 in sizes or not takes_factors(query):
        return None
    m, n, k = sizes
    decoders: list[Any] = []
    for spec, rows in ((a, m), (b, n)):
        if spec.format.is_identity:  # the second
            decoders.append(None)
            continue
        found = select(OpQuery("operand", query.device, torch.bfloat16, spec)).operand_decoder
        if found is None:
            return None
        decoders.append(found(spec, rows, k, torch.bfloat16))
    return FactoredProduct((a, b), decoders)


@cached_choice
def _planned(
    a: PlaneSpec,
    b: PlaneSpec,
    dtype: torch.dtype,
    precision: str,
    sizes: tuple[int, int, int],
) -> FactoredProduct | None:
    return factored_planner(OpQuery("gemm", "cuda", dtype, a, b, precision, sizes))


def factored_gemm(a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor | None:
    """Return the product of two planes with their factors in one operand, or None.

    Args:
        a, b: the operands, where torch.autocast is off.
        args: bias, precision, dtype of the result.
    """
    device = a.buffers[0].device
    if device.type != "cuda":
        return None
    sizes = (a.rows, b.rows, a.cols)
    run = _planned(a.spec, b.spec, args.out_dtype, args.precision, sizes)
    if run is None:
        return None
    if is_current(device):
        return run(a, b, args)
    with torch.cuda.device(device):
        return run(a, b, args._replace(work=None))
