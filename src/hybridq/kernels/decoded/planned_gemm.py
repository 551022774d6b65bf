"""The exact product of one size on a GPU with all prepared: two decodes, a product, what follows.

What dies with it (the decoded operands and the FP32 product) lies in one piece of memory, which the
caller may have made together with what dies with it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import factor_bound
from ..choice import ALIGNMENT, GemmArgs, Operand, OpQuery, select
from ..inputs import has_autocast, is_current, stream_of
from .decoded_gemm import exact_gemm
from .decoded_sides import fp32_reason
from .factored_gemm import FactoredProduct, factored_planner

__all__ = ["PlannedProduct", "planner"]

#: Of BF16 operands with an FP32 result, which only GPUs have.
_mm: Any = torch.mm


class PlannedProduct:
    """A GEMM of two planes in one size, of whose operands one has a factor, `[1]`.

    Args:
        sizes: M and N.
        decoders: of the operands (`Backend.operand_decoder`).
        bounds: of the operands (`reference.factor_bound`).
        finisher: of the product (`Backend.finisher`).
        dtype: of the result.

    Attributes:
        room: bytes of what dies with the product, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_at", "_bounds", "_decoders", "_dtype", "_finish", "_sizes", "room")

    def __init__(
        self,
        sizes: tuple[int, int],
        decoders: Sequence[Any],
        bounds: Sequence[float | None],
        finisher: Any,
        dtype: torch.dtype,
    ) -> None:
        self._sizes, self._dtype = sizes, dtype
        self._decoders, self._finish = decoders, finisher
        #: Which buffer of each plane has the factor, or the amax that it is made of; None: none.
        self._bounds = [None if bound is None else 2 if bound else 1 for bound in bounds]
        left = decoders[0].nbytes
        #: Where the second operand and the product begin.
        self._at = (left, left + decoders[1].nbytes)
        nbytes = sizes[0] * sizes[1] * 4
        self.room = self._at[1] + -(-nbytes // ALIGNMENT) * ALIGNMENT

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        """Return what `exact_gemm` does, with its bits."""
        bias, device = args.bias, a.buffers[0].device
        if (
            a.cache is not None  # an operand may be there
            or b.cache is not None
            or args.accumulate_into is not None
            or args.place is not None
            or not is_current(device)
            or has_autocast(device.type)
        ):
            return exact_gemm(a, b, args)
        if bias is not None and not (bias.dtype is self._dtype and bias.is_contiguous()):
            return exact_gemm(a, b, args)
        left, right = a.buffers, b.buffers
        for buffer in (*left, *right):
            if not buffer.is_contiguous():
                return exact_gemm(a, b, args)
        if args.work is None or args.work.memory.numel() - args.work.at < self.room:
            memory, at = torch.empty(self.room, dtype=torch.uint8, device=device), 0
            stream = stream_of(device)
        else:
            memory, at, stream = args.work
        first = self._decoders[0](left, memory, at, stream)
        second = self._decoders[1](right, memory, at + self._at[0], stream)
        (m, n), floats = self._sizes, memory.view(torch.float32)
        product = floats.as_strided((m, n), (n, 1), (at + self._at[1]) // 4)
        _mm(first, second.t(), out_dtype=torch.float32, out=product)
        x, y = self._bounds
        factors = (None if x is None else left[x], None if y is None else right[y])
        out = torch.empty(m, n, dtype=self._dtype, device=device)
        self._finish(product, factors, bias, out, stream)
        return out


class _WithFactors:
    """A GEMM whose factors go into an operand, and the exact one where that is not done.

    Attributes:
        room: bytes of what dies with the product, a multiple of `ALIGNMENT`.
    """

    __slots__ = ("_run", "room")

    def __init__(self, run: FactoredProduct) -> None:
        self._run, self.room = run, run.room

    def __call__(self, a: Operand, b: Operand, args: GemmArgs) -> torch.Tensor:
        device = a.buffers[0].device
        made = None
        if is_current(device) and not has_autocast(device.type):
            made = self._run(a, b, args)
        return exact_gemm(a, b, args) if made is None else made


def planner(query: OpQuery) -> PlannedProduct | _WithFactors | None:
    """Return what multiplies planes of a query's specs in its sizes, or None.

    Args:
        query: a GEMM on a GPU.
    """
    a, b, sizes = query.row, query.col, query.sizes
    if a is None or b is None or sizes is None or 0 in sizes or query.dtype is torch.float32:
        return None
    made = factored_planner(query)
    if made is not None:
        return _WithFactors(made)
    bounds = [factor_bound(spec) for spec in (a, b)]
    if bounds == [None, None]:  # of BF16 operands whose product may round at once
        return None
    if a.signs != b.signs:
        return None
    if any(spec.format.is_identity or spec.has_row_factors for spec in (a, b)):
        return None
    if fp32_reason(a, b, query.device, query.dtype, is_alone=False) is not None:
        return None
    m, n, k = sizes
    decoders = [_decoder(query.device, spec, rows, k) for spec, rows in ((a, m), (b, n))]
    finisher = select(OpQuery("finish", query.device, query.dtype)).finisher
    if finisher is None or None in decoders:
        return None
    first, second = (bound or 0.0 for bound in bounds)
    finish = finisher(m, n, query.dtype, (first, second))
    return PlannedProduct((m, n), decoders, bounds, finish, query.dtype)


def _decoder(device: str, spec: PlaneSpec, rows: int, cols: int) -> Any:
    found = select(OpQuery("operand", device, torch.bfloat16, spec)).operand_decoder
    return None if found is None else found(spec, rows, cols, torch.bfloat16)
