"""The core's product of few rows with a plane whose codes are read as they lie in memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch

from ...formats import PlaneSpec
from ..choice import GemmArgs, Operand
from ..inputs import DTYPES, described_plane, given, made, matrix, plane_description
from .backend import core, core_error, core_spec
from .bf16_gemm import along_k, as_added, as_factor

__all__ = ["CodesProduct", "codes_reason"]

_CPU: Final = torch.device("cpu")
_empty: Final[Any] = torch.empty
_threads: Final = torch.get_num_threads


def codes_reason(spec: PlaneSpec | None = None) -> str | None:
    """Return None if products of few rows read a plane's codes on this CPU, else why not.

    Args:
        spec: of the plane; None: of any.
    """
    if core is None:
        return f"the compiled core is missing ({core_error})"
    if not core.reads_codes():
        return "this CPU's kernels decode a plane once faster than they read its codes each time"
    return None if spec is None else core_spec(spec)[1]


class CodesProduct:
    """Multiplies up to SKINNY_ROWS rows with planes of one spec, of which nothing is decoded.

    Args:
        spec: of the planes; one for which `codes_reason` has none.
    """

    __slots__ = ("_native", "_sizes")

    def __init__(self, spec: PlaneSpec) -> None:
        self._native = core_spec(spec)[0]

        def sizes(rows: int, cols: int) -> Any:
            """Return what the buffers must be, and the width that is stored."""
            return plane_description(spec, rows, cols), spec.padded(cols)

        self._sizes = lru_cache(maxsize=256)(sizes)

    def __call__(
        self, a: torch.Tensor, row_factor: torch.Tensor | None, b: Operand, args: GemmArgs
    ) -> torch.Tensor | None:
        """Return `a @ b.T` with all that follows; None: a value of b may leave BF16's normal range.

        Args:
            a: BF16 or FP32 `[M, K]` on a CPU, M at most SKINNY_ROWS; K is the stored width of b.
            row_factor: FP32 `[1]` or `[M]`, or None.
            b: a plane of the spec.
            args: bias, what is accumulated into, and the result's dtype.
        """
        m, width = a.shape
        n = b.rows
        description, stored = self._sizes(n, b.cols)
        if width != stored:
            raise ValueError(f"product: a and b must have one K, got {width} and {stored}")
        buffers = b.buffers
        for buffer in buffers:
            if not buffer.is_contiguous():
                buffers = [one.contiguous() for one in buffers]
                break
        step, between = a.stride()
        if between != 1 or step < width:
            a, step = along_k(a)
        row_factor, row_place = as_factor("product: the factor of rows", row_factor, m)
        bias, into = args.bias, args.accumulate_into
        if bias is not None:
            bias = bias.to(torch.float32).contiguous()
        if into is not None and into.dtype not in DTYPES:
            into = into.to(torch.float32)
        out = _empty(m, n, dtype=args.out_dtype, device=_CPU)
        is_done = core.product_of_codes(
            self._native,
            *described_plane("product", buffers, description),
            n,
            b.cols,
            *matrix("product: a", a),
            step,
            m,
            *row_place,
            0 if bias is None else given("product: bias", bias, torch.float32, n),
            *as_added(into, m, n),
            made(out),
            DTYPES[args.out_dtype],
            _threads(),
        )
        return out if is_done else None
