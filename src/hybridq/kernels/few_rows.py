"""A product of few rows with a weight in one call of the core, where it is what the steps would do.

Encoding the rows, decoding them and multiplying are three calls with tensors between them, which at
one row cost more than all kernels. `few_rows_product` says whether one call does the same: the same
backends, the same bits. Who gets None, or is told that it was not done, takes the steps.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import settings
from ..formats import PlaneSpec
from .backend_cpu import CPU, core, core_spec, encoder
from .exact import Side, exact_gemm, fp32_reason
from .memory import DTYPES, given, given_or_none, made, values
from .product import FEW_ROWS, product_reason
from .registry import Call, cached_choice, operation, select

__all__ = ["FEW_ROWS", "FewRowsProduct", "few_rows_product"]

_CPU = torch.device("cpu")
_empty: Any = torch.empty
_threads = torch.get_num_threads


class FewRowsProduct:
    """Multiplies few rows, encoded as `row` says, with a weight, encoded as `weight` says.

    Args:
        row: of the rows' rowwise plane.
        col: of their columnwise plane, which is made too; None: it is not.
        weight: of the weight's rowwise plane.
        dtype: of the rows, the weight, the bias and the result.
    """

    __slots__ = ("_columns", "_dtype", "_padded", "_run")

    def __init__(
        self, row: PlaneSpec, col: PlaneSpec | None, weight: PlaneSpec, dtype: torch.dtype
    ) -> None:
        self._run = core.FewRows(core_spec(row)[0], core_spec(weight)[0], DTYPES[dtype])
        self._columns = None if col is None else encoder(None, col, dtype).planes
        self._dtype = dtype
        self._padded = weight.padded

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Side,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        col_stream: int,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Return `x @ weight.T + bias` and the buffers of x's columnwise plane; None: not done.

        Args:
            x: `[rows, k]`, from 1 to FEW_ROWS rows, on a CPU; nothing watches any of the tensors.
            weight: `[n, k]`, to be quantized; or what its plane was decoded to, in BF16.
            bias: `[n]` contiguous, or None.
            seed: int64 `[1]` where the columnwise plane is rounded stochastically.
            col_stream: its random stream.
        """
        rows, k = x.shape
        buffers: list[torch.Tensor] = []
        column, finds, seed_read = None, False, None
        if self._columns is not None:
            place = (0, 0, 0, col_stream)
            buffers, planes, seed_read = self._columns(rows, k, None, None, seed, *place)
            column, finds = planes[1], planes[3]
        if isinstance(weight, Side):
            codes, factor = weight.matrix, weight.factor
            n, pointer = codes.shape[0], 0
            strides: tuple[int, ...] = (0, 0)
            count = n * self._padded(k)
            decoded = given("linear: the decoded weight", codes, torch.bfloat16, count)
            factor_pointer = given_or_none("linear: its factor", factor, torch.float32, 1)
        else:
            (n, width), strides = weight.shape, weight.stride()
            if width != k:
                raise ValueError(f"linear: the weight must be [n, {k}], got [{n}, {width}]")
            pointer = values("linear: the weight", weight, self._dtype)
            decoded = factor_pointer = 0
        out = _empty(rows, n, dtype=self._dtype, device=_CPU)
        is_done = self._run(
            values("linear: x", x, self._dtype),
            *x.stride(),
            rows,
            k,
            column,
            finds,
            pointer,
            *strides,
            n,
            decoded,
            factor_pointer,
            given_or_none("linear: bias", bias, self._dtype, n),
            made(out),
            _threads(),
        )
        del seed_read  # alive until here
        return (out, buffers) if is_done else None


def few_rows_product(
    row: str, col: str, weight: str, dtype: torch.dtype, has_bias: bool, precision: str
) -> FewRowsProduct | None:
    """Return what multiplies few rows on a CPU in one call, or None where that takes steps.

    Args:
        row, col: texts of the rows' planes; col empty where it is not made.
        weight: text of the weight's rowwise plane.
        dtype: of the rows, the weight, the bias and the result.
        has_bias: there is a bias.
        precision: of the product.
    """
    return _product(row, col, weight, dtype, has_bias, precision, settings.current().backend)


@cached_choice
def _product(
    row_text: str,
    col_text: str,
    weight_text: str,
    dtype: torch.dtype,
    has_bias: bool,
    precision: str,
    forced: str | None,
) -> FewRowsProduct | None:
    row, weight = (PlaneSpec.parse(text).resolve(dtype) for text in (row_text, weight_text))
    col = PlaneSpec.parse(col_text).resolve(dtype) if col_text else None
    if forced is not None or dtype not in DTYPES or product_reason() is not None:
        return None
    for spec in (row, weight):
        if spec.format.is_identity or spec.stochastic or spec.row_scaled:
            return None
        if select(Call("encode", "cpu", dtype, spec)) is not CPU:
            return None
        if operation("operand", "cpu", torch.bfloat16, spec) is not CPU.ops["operand"]:
            return None
    if col is not None and (
        col.format.is_identity
        or select(Call("encode", "cpu", dtype, col)) is not CPU
        or CPU.reason(Call("encode", "cpu", dtype, row, col)) is not None
    ):
        return None
    multiply = operation("gemm", "cpu", dtype, row, weight, precision, None, None)
    if multiply is not exact_gemm or fp32_reason(row, weight, "cpu", dtype, not has_bias):
        return None
    return FewRowsProduct(row, col, weight, dtype)
