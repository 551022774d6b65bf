"""What follows a product in FP32 before its one rounding, on NVIDIA GPUs, in one pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..choice import GemmArgs, Place
from ..inputs import addresses as memory

__all__ = ["Finisher", "finish", "two_factors"]

#: Elements from one factor to the next: what products read begins at 16 bytes.
_STEP = 4


def finish(
    kernels: Any,
    product: torch.Tensor,
    row_factor: torch.Tensor | None,
    col_factor: torch.Tensor | None,
    args: GemmArgs,
    bounds: tuple[float, float] = (0.0, 0.0),
) -> torch.Tensor:
    """Return `reference.finish_product` of a product in FP32.

    Args:
        kernels: `backend.GpuKernels`.
        product: `[M, N]`, of any strides.
        row_factor: FP32 `[1]` or `[M]`, or None.
        col_factor: FP32 `[1]` or `[N]`, or None.
        args: bias, what is added, the result's dtype and, where it is contiguous, its place, which
            may be what is added.
        bounds: of each factor `[1]` what it is divided by first, as an amax is; 0: by nothing.
    """
    (rows, cols), device = product.shape, product.device
    with kernels.launch(device) as stream:
        out = args.place
        if out is None or not out.is_contiguous():
            out = torch.empty(rows, cols, dtype=args.out_dtype, device=device)
        bias, into = _readable(args.bias), _readable(args.accumulate_into)
        kernels.module.finish(
            kernels.matrix("finish: product", product, device, "float32")[0],
            rows,
            cols,
            *product.stride(),
            _factor(kernels.along("finish: row_factor", row_factor, rows, device), bounds[0]),
            _factor(kernels.along("finish: col_factor", col_factor, cols, device), bounds[1]),
            kernels.along("finish: bias", bias, cols, device),
            None if into is None else _added(kernels, into, product),
            kernels.place("finish: out", out, args.out_dtype, rows * cols, device),
            memory.DTYPES[args.out_dtype],
            stream,
        )
    return out


def two_factors(
    kernels: Any, amaxes: Sequence[torch.Tensor], bounds: Sequence[float], place: Place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two amaxes, each divided by its bound, FP32 `[1]` views of memory that is given.

    The bits are those of `reference.factor_of`.

    Args:
        kernels: `backend.GpuKernels`.
        amaxes: FP32 `[1]` of each plane, as it was made or checked, on the current device.
        bounds: what each is divided by, above 0.
        place: of `ALIGNMENT` bytes.
    """
    pointer, floats, at = kernels.pointer, place.memory.view(torch.float32), place.at // 4
    first, second = amaxes
    given = (pointer(first), bounds[0], pointer(second), bounds[1])
    kernels.module.two_factors(*given, pointer(floats, True) + 4 * at, _STEP, place.stream)
    return floats[at : at + 1], floats[at + _STEP : at + _STEP + 1]


def _factor(along: tuple[int, int, str] | None, bound: float) -> tuple[Any, ...] | None:
    return None if along is None else (*along, bound)


class Finisher:
    """Finishes products of one size, whose factors are one number each, with all prepared.

    Args:
        kernels: `backend.GpuKernels`.
        rows, cols: of the product, not empty.
        dtype: of the result, and of a bias.
        bounds: as `finish` takes them.
    """

    __slots__ = ("_bounds", "_kernels", "_name", "_sizes")

    def __init__(
        self,
        kernels: Any,
        rows: int,
        cols: int,
        dtype: torch.dtype,
        bounds: tuple[float, float],
    ) -> None:
        self._kernels, self._bounds = kernels, bounds
        self._sizes, self._name = (rows, cols, cols, 1), memory.DTYPES[dtype]

    def __call__(
        self,
        product: torch.Tensor,
        factors: tuple[torch.Tensor | None, torch.Tensor | None],
        bias: torch.Tensor | None,
        out: torch.Tensor,
        stream: int,
    ) -> None:
        """Write `finish` of a product into `out`.

        Args:
            product: FP32 `[rows, cols]`, contiguous, on the current device.
            factors: FP32 `[1]` or None, as the planes were made or checked.
            bias: `[cols]` of the result's dtype, contiguous, or None.
            out: `[rows, cols]`, contiguous.
            stream: the device's current one.
        """
        pointer, name, along = self._kernels.pointer, self._name, []
        for factor, bound in zip(factors, self._bounds, strict=True):
            along.append(None if factor is None else (pointer(factor), 0, "float32", bound))
        added = None if bias is None else (pointer(bias), 1, name)
        place = (pointer(out, True), name, stream)
        self._kernels.module.finish(pointer(product), *self._sizes, *along, added, None, *place)


def _readable(added: torch.Tensor | None) -> torch.Tensor | None:
    """Return what is added in a dtype that kernels read."""
    if added is None or added.dtype in memory.DTYPES:
        return added
    return added.to(torch.float32)


def _added(kernels: Any, into: torch.Tensor, product: torch.Tensor) -> tuple[Any, ...]:
    if into.shape != product.shape:
        raise ValueError(
            f"finish: what is added must be {tuple(product.shape)}, got {tuple(into.shape)}"
        )
    address, name = kernels.matrix("finish: what is added", into, product.device)
    return address, *into.stride(), name
