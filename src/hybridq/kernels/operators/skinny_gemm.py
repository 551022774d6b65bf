"""A product of few rows with a weight in one call of the core, where it is what the steps would do.

Encoding the rows, decoding them and multiplying are three calls with tensors between them, which at
one row cost more than all kernels. `skinny_gemm` says whether one call does the same: the same
backends, the same bits. Who gets None, or is told that it was not done, takes the steps.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from ... import settings
from ...formats import PlaneSpec
from ..choice import ORIGINAL, EncodeRequest, Operand, OpQuery, cached_choice, choose, together
from ..cpu import SKINNY_ROWS, encoder, product_reason
from ..decoded import TORCH, fp32_reason, no_codes_reason
from ..inputs import described_plane, given, given_or_none, made, plane_description, values

__all__ = ["SKINNY_ROWS", "SkinnyGemm", "skinny_gemm"]

_CPU = torch.device("cpu")
_empty: Any = torch.empty
_threads = torch.get_num_threads


class SkinnyGemm:
    """Multiplies few rows with a weight, encoded as specs say.

    Args:
        run: the core's product of few rows.
        col: of the rows' columnwise plane, which is made too; None: it is not.
        weight: of the weight's rowwise plane.
        dtype: of the rows, the weight, the bias and the result.
    """

    __slots__ = ("_columns", "_described", "_dtype", "_run")

    def __init__(
        self, run: Any, col: PlaneSpec | None, weight: PlaneSpec, dtype: torch.dtype
    ) -> None:
        self._run = run
        self._columns = None if col is None else encoder(None, col, dtype).planes
        self._dtype = dtype
        #: What the buffers of a weight `[n, k]` are.
        self._described = lru_cache(maxsize=256)(partial(plane_description, weight))

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | Operand,
        bias: torch.Tensor | None,
        seed: torch.Tensor | None,
        col_stream: int,
        x_amax: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Return `x @ weight.T + bias` and the buffers of x's columnwise plane; None: not done.

        Args:
            x: `[rows, k]`, from 1 to SKINNY_ROWS rows, on a CPU; no tensor needs the dispatcher.
            weight: `[n, k]`, to be quantized, where the core has a BF16 product; or its plane,
                whose codes are read as they lie.
            bias: `[n]` contiguous, or None.
            seed: int64 `[1]` where the columnwise plane is rounded stochastically.
            col_stream: its random stream.
            x_amax: FP32 `[1]`, what x is scaled by, as `given_statistic` returns it; None: its own.
        """
        rows, k = x.shape
        buffers: list[torch.Tensor] = []
        column, finds, seed_read = None, False, None
        if self._columns is not None:
            own = ("", "", None, None, seed, ORIGINAL, True, 0, 0, 0, col_stream)
            request = EncodeRequest(*own)
            buffers, planes, seed_read = self._columns(rows, k, request)
            column, finds = planes[1], planes[3]
        pointer = codes = scales = amax = 0
        strides: tuple[int, ...] = (0, 0)
        if isinstance(weight, Operand):
            n, width = weight.rows, weight.cols
            for buffer in weight.buffers:
                if not buffer.is_contiguous():
                    return None  # a part of a plane, of which the steps make a copy
            described = self._described(n, k)
            codes, scales, amax = described_plane("linear: the weight", weight.buffers, described)
        else:
            (n, width), strides = weight.shape, weight.stride()
            pointer = values("linear: the weight", weight, self._dtype)
        if width != k:
            raise ValueError(f"linear: the weight must be [n, {k}], got [{n}, {width}]")
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
            codes,
            scales,
            amax,
            given_or_none("linear: bias", bias, self._dtype, n),
            made(out),
            _threads(),
            *(() if x_amax is None else (given("linear: amax", x_amax, torch.float32, 1),)),
        )
        del seed_read  # alive until here
        return (out, buffers) if is_done else None


def skinny_gemm(
    row: str, col: str, weight: str, dtype: torch.dtype, has_bias: bool, precision: str
) -> SkinnyGemm | None:
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
) -> SkinnyGemm | None:
    row, weight = (PlaneSpec.parse(text).resolve(dtype) for text in (row_text, weight_text))
    col = PlaneSpec.parse(col_text).resolve(dtype) if col_text else None
    del forced  # what `choose` and `together` ask for
    if product_reason() is not None:
        # Codes are read in FP32: of values that BF16 holds, so that one call is enough.
        if no_codes_reason(row, weight) or not row.is_bf16_exact:
            return None
    elif fp32_reason(row, weight, "cpu", dtype, not has_bias):
        return None
    if col is not None and col.format.is_identity:
        return None
    whole = OpQuery("skinny_gemm", "cpu", dtype, row, weight)
    of_col = OpQuery("encode", "cpu", dtype, None, col).parts()  # none where there is none
    backend = together(whole, (*whole.parts(), *of_col)).chosen
    product = choose(OpQuery("gemm", "cpu", dtype, row, weight, precision)).chosen
    if backend is None or product is not TORCH:
        return None
    return SkinnyGemm(backend.ops["skinny_gemm"](row, weight, dtype), col, weight, dtype)
