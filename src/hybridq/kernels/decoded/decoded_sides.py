"""Decoded operands of a product: exact, and without the factor of their tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ... import settings
from ...formats import PlaneSpec
from ...reference import factor_bound, factor_of
from ..choice import Operand, OpQuery, cached_choice, select
from ..cpu import product_reason
from ..inputs import is_host
from .plain_gemm import is_slow, slow_reason

__all__ = [
    "Side",
    "SideDecoder",
    "decode_side",
    "fp32_reason",
    "inexact_operands",
    "row_factors",
    "side_decoder",
    "with_row_factors",
]


def row_factors(spec: PlaneSpec, cols: int) -> PlaneSpec:
    """Return the spec under which BF16 holds a plane with a scale per row, where that is another.

    Args:
        spec: of the plane.
        cols: of its own matrix.
    """
    return spec if spec.is_bf16_exact else spec.by_row(cols)


def inexact_operands(a: PlaneSpec, b: PlaneSpec) -> list[int]:
    """Return which of two operands BF16 does not hold, scales and factors of rows included.

    Args:
        a, b: their specs, with scales of rows as factors where they are (`row_factors`).
    """
    return [i for i, s in enumerate((a, b)) if s.has_row_factors or not s.is_bf16_exact]


def with_row_factors(operand: Operand) -> Operand:
    """Return an operand under its `row_factors`, which change no buffer.

    Args:
        operand: any plane.
    """
    own = row_factors(operand.spec, operand.cols)
    return operand if own is operand.spec else operand._replace(spec=own)


class Side(NamedTuple):
    """A decoded operand: `matrix * factor`; `is_bf16` if the matrix is exact in BF16.

    On a GPU the factor of two levels is an amax still, which what follows the product divides by
    `bound` on the way; 0: it is the factor.
    """

    matrix: torch.Tensor
    factor: torch.Tensor | None
    is_bf16: bool
    bound: float = 0.0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The matrix and, if there is one, the factor."""
        return [self.matrix] if self.factor is None else [self.matrix, self.factor]


#: `decode(buffers, rows, cols)`: the values; of an operand also whether any leaves BF16's range.
_Decode = Callable[[list[torch.Tensor], int, int], Any]


class SideDecoder:
    """Decodes operands of one spec on one kind of device, with all prepared that the spec tells.

    Args:
        spec: of the planes.
        keep_transformed: leave a transform in, since the other operand has the same.
        dtype: BF16 or FP32, decoded to.
        device: type of the planes' device.
    """

    __slots__ = (
        *("_bound", "_decode", "_divides", "_form", "_in_fp32", "_is_by_row", "_is_exact"),
        "_run",
    )

    def __init__(
        self, spec: PlaneSpec, keep_transformed: bool, dtype: torch.dtype, device: str
    ) -> None:
        fmt = spec.format
        self._is_by_row = spec.has_scales_as_factors
        left_out = " without scales of rows" if self._is_by_row else ""
        self._form = f"decoded {dtype}{'' if keep_transformed else ' transformed back'}{left_out}"
        self._bound = factor_bound(spec)
        #: The factor is made here; else what follows the product makes it, where it is one number.
        self._divides = is_host(device) or spec.has_row_factors or not self._bound
        self._is_exact = spec.is_bf16_exact
        #: What turns a plane back into values; what decodes it, to the dtype and to FP32.
        self._decode: _Decode | None = None
        self._run: _Decode | None = None
        self._in_fp32: _Decode | None = None
        if spec.signs is not None and not keep_transformed:
            self._decode = _decoder(spec, torch.float32, device, False)
        elif not fmt.is_identity:
            self._run = _decoder(spec, dtype, device, True)
            if dtype is not torch.float32:
                self._in_fp32 = _decoder(spec, torch.float32, device, True)

    def ready(self, operand: Operand) -> Side | None:
        """Return an operand that is not quantized, or what its cache keeps of it; or None.

        Args:
            operand: a plane of the spec.
        """
        if self._run is None and self._decode is None:
            matrix = operand.buffers[0]
            return Side(matrix, None, matrix.dtype == torch.bfloat16)
        if operand.cache is None:
            return None
        return operand.cache.get(self._form, operand.buffers, lambda: self.decode(operand))

    def decode(self, operand: Operand) -> Side:
        """Return an operand decoded, in FP32 where BF16 turns out not to hold it.

        Args:
            operand: a plane of the spec.
        """
        buffers, _, rows, cols, _ = operand
        if self._run is None:
            return Side(self._decode(buffers, rows, cols), None, False)  # type: ignore[misc]
        matrix, is_outside = self._run(buffers, rows, cols)
        if is_outside and self._in_fp32 is not None:
            matrix, _ = self._in_fp32(buffers, rows, cols)
        is_bf16 = self._is_exact and not is_outside
        if self._bound is None:
            return Side(matrix, None, is_bf16)
        if self._divides:
            factor = factor_of(buffers, self._bound)
            return Side(matrix, factor[..., 0] if self._is_by_row else factor, is_bf16)
        return Side(matrix, buffers[2], is_bf16, self._bound)


def _decoder(spec: PlaneSpec, dtype: torch.dtype, device: str, is_operand: bool) -> _Decode:
    """Return what decodes planes on one kind of device, as values or as an operand of a GEMM."""
    op = "operand" if is_operand else "decode"
    backend = select(OpQuery(op, device, dtype, spec))
    if backend.decoder is not None:
        return backend.decoder(spec, dtype, is_operand)
    run = backend.ops[op]
    # An answer from a GPU would have to be waited for.
    asks = (is_host(device) and dtype == torch.bfloat16,) if is_operand else ()

    def decode(buffers: list[torch.Tensor], rows: int, cols: int) -> Any:
        return run(buffers, spec, rows, cols, dtype, *asks)

    return decode


def decode_side(operand: Operand, keep_transformed: bool, dtype: torch.dtype) -> Side:
    """Return `operand` decoded to `dtype`, or to FP32 where BF16 turns out not to hold it.

    Args:
        operand: any plane.
        keep_transformed: leave a transform in, since the other operand has the same.
        dtype: BF16 or FP32.
    """
    device = operand.buffers[0].device.type
    forced = settings.current().backend
    decoder = side_decoder(operand.spec, keep_transformed, dtype, device, forced)
    return decoder.ready(operand) or decoder.decode(operand)


@cached_choice
def side_decoder(
    spec: PlaneSpec, keep_transformed: bool, dtype: torch.dtype, device: str, forced: str | None
) -> SideDecoder:
    """Return what decodes operands of a spec.

    Args:
        spec, keep_transformed, dtype, device: as `SideDecoder` takes them.
        forced: the backend that is forced now.
    """
    del forced  # what `operation` asks for, and others ask for otherwise
    return SideDecoder(spec, keep_transformed, dtype, device)


def fp32_reason(
    a: PlaneSpec, b: PlaneSpec, device: str, out_dtype: torch.dtype, is_alone: bool
) -> str | None:
    """Return None if a BF16 product keeps the rules, as far as specs tell; else why not.

    Args:
        a, b: the operands' specs.
        device: type of their device.
        out_dtype: dtype of the result.
        is_alone: nothing is added to the product.
    """
    if is_slow(torch.bfloat16, device) and product_reason() is not None:
        return slow_reason(torch.bfloat16)
    has_fp32_result = device != "cpu" or product_reason() is None
    return _fp32_reason(a, b, has_fp32_result, out_dtype, is_alone)


@lru_cache(maxsize=4096)
def _fp32_reason(
    a: PlaneSpec, b: PlaneSpec, has_fp32_result: bool, out_dtype: torch.dtype, is_alone: bool
) -> str | None:
    for name, spec in (("a", a), ("b", b)):
        if not spec.is_bf16_exact:
            return f"BF16 does not hold operand {name} exactly ({spec.format})"
    if a.signs != b.signs:
        return "one operand is transformed and the other is not, so it is transformed back in FP32"
    if has_fp32_result:
        return None  # of the BF16 product
    if out_dtype != torch.bfloat16:
        return f"torch's BF16 product on a CPU rounds to BF16, and the result is {out_dtype}"
    if not is_alone:
        return "bias and accumulation are added before the result is rounded"
    return None
