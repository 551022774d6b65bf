"""Products of decoded operands on a GPU of which one is rounded to BF16, with all that it takes.

NVFP4 planes, and FP8 planes with one scale, have a factor of the whole tensor. After an FP32
product it costs a pass of 6 bytes for each result. Here one operand is decoded to code times scale
times the factors of both planes, rounded once to BF16; the other one is exact, and the product's
own epilogue adds a bias and rounds. The same is done with an operand that BF16 does not hold, FP8
with FP32 scales of blocks or rows: exactly it is a product of FP32 operands, which tensor cores do
not make. What that adds is the rounding of one operand: as much, in the root mean square, as the
rounding of the result, which is what precision "auto" allows. "exact" applies the factors after the
product, in FP32 (`planned_gemm`), and multiplies in FP32 what BF16 does not hold.

Source: ours; docs/adr/0203-factors-of-a-product-go-into-an-operand.md and
docs/adr/0233-an-operand-that-bf16-does-not-hold-is-rounded-once.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import factor_bound
from ..choice import GemmArgs, Operand, OpQuery, cached_choice, select
from ..inputs import is_current, stream_of
from .decoded_sides import decode_side, inexact_operands, row_factors

__all__ = ["FactoredProduct", "factored_gemm", "factored_planner", "rounded_operand"]


def rounded_operand(query: OpQuery) -> int | None:
    """Return which operand of a GEMM takes all factors and is rounded to BF16, by specs and K.

    Args:
        query: a GEMM; without sizes, scales of blocks that may be whole rows count as those of
            blocks.

    Returns:
        0 or 1; None: neither.
    """
    a, b = query.row, query.col
    if a is None or b is None or query.device != "cuda" or query.precision == "exact":
        return None
    if query.dtype is not torch.bfloat16 or a.signs != b.signs:
        return None
    if query.sizes is not None:
        a, b = (row_factors(spec, query.sizes[2]) for spec in (a, b))
    inexact = inexact_operands(a, b)
    if inexact:
        spec = (a, b)[inexact[0]]
        is_taken = len(inexact) == 1 and not spec.row_scaled and not spec.format.is_identity
        return inexact[0] if is_taken else None
    # A plain first operand has no decode that could take factors, and a second one may be kept.
    if factor_bound(a) is factor_bound(b) is None or a.format.is_identity:
        return None
    return 0


class FactoredProduct:
    """A GEMM of two planes in one size, with the factors of both in one operand.

    Args:
        specs: of the planes, with scales of rows as factors.
        decoders: of the operands (`Backend.operand_decoder`); None of one that is BF16.
        rounded: which of them is `rounded_operand`.

    Attributes:
        room: bytes of what dies with the product, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_at", "_bounds", "_decoders", "_has_factor", "_rounded", "room")

    def __init__(self, specs: Sequence[PlaneSpec], decoders: Sequence[Any], rounded: int) -> None:
        self._decoders, self._rounded = decoders, rounded
        #: Scales of rows are decoded with the codes.
        self._bounds = [None if s.has_row_factors else factor_bound(s) for s in specs]
        nbytes = [0 if one is None else one.nbytes for one in decoders]
        self._has_factor = any(bound is not None for bound in self._bounds)
        #: Where each operand begins.
        self._at = (0, nbytes[0])
        self.room = sum(nbytes)

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
        sides = []
        for i, operand in enumerate(operands):
            run, own = self._decoders[i], i == self._rounded
            if run is None:
                sides.append(operand.buffers[0])
            elif operand.cache is not None and not (own and self._has_factor):
                # As any product keeps it. With factors it changes with the other's.
                sides.append(decode_side(operand, True, torch.bfloat16).matrix)
            else:
                place = (operand.buffers, memory, at + self._at[i], stream)
                sides.append(run(*place, factors if own else None))
        left, right = sides
        if bias is None:
            return torch.mm(left, right.t())
        return torch.addmm(bias, left, right.t())


def factored_planner(query: OpQuery) -> FactoredProduct | None:
    """Return what multiplies planes of a query's specs in its sizes, or None.

    Args:
        query: a GEMM.
    """
    a, b, sizes = query.row, query.col, query.sizes
    rounded = rounded_operand(query)
    if a is None or b is None or sizes is None or 0 in sizes or rounded is None:
        return None
    m, n, k = sizes
    a, b = row_factors(a, k), row_factors(b, k)
    decoders: list[Any] = []
    for spec, rows in ((a, m), (b, n)):
        if spec.format.is_identity:  # the other one
            decoders.append(None)
            continue
        found = select(OpQuery("operand", query.device, torch.bfloat16, spec)).operand_decoder
        if found is None:
            return None
        decoders.append(found(spec, rows, k, torch.bfloat16))
    return FactoredProduct((a, b), decoders, rounded)


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
