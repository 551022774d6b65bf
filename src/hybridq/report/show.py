"""`hybridq.show`: the planes of a tensor in numbers and as a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from ..direction import ROWWISE
from ..recipes import Recipe, get
from ..storage import Plane, TensorStorage
from ..tensor import QuantizedTensor, is_quantized, matrix_shape
from . import figure as drawing
from .measure import (
    Codes,
    ErrorMap,
    Scales,
    measure_codes,
    measure_error,
    measure_fold,
    measure_scales,
)
from .show_model import ModelView, show_model

__all__ = ["PlaneView", "TensorView", "show"]

Shown = torch.Tensor | TensorStorage | Plane


@dataclass(frozen=True, eq=False)
class PlaneView:
    """What `show` found out about one plane.

    Args:
        plane: the plane.
        codes, scales: its contents.
        error: how far it is from what it is compared with, or None.
        num_folded: how many codes would change if a GEMM folded the plane (docs/reference/gemm.md),
            or None where it cannot be folded.
    """

    plane: Plane
    codes: Codes
    scales: Scales
    error: ErrorMap | None
    num_folded: int | None = None

    @property
    def title(self) -> str:
        """The plane in one line."""
        rows, cols = self.plane.matrix
        drawn = "" if self.plane.direction == ROWWISE else ", drawn transposed"
        return f"{self.plane.direction} plane [{rows}, {cols}]{drawn}: {self.plane.spec}"

    def lines(self) -> list[str]:
        """Return the plane's numbers, a line each."""
        codes, scales, plane = self.codes, self.scales, self.plane
        values = max(1, plane.rows * plane.cols)
        word = "values" if plane.spec.format.is_python else "codes"
        lines = [
            f"bytes      {plane.nbytes} ({8 * plane.nbytes / values:.2f} bits per value)",
            f"{word:<10} {codes.total} {codes.element}: {codes.share(codes.num_zero):.2%} zero, "
            f"{codes.share(codes.num_saturated):.2%} at the maximum, "
            f"{codes.share(codes.num_nan):.2%} NaN",
        ]
        if scales.num_blocks:
            share = scales.num_nan / scales.num_blocks
            extent = "none finite"
            if scales.smallest is not None and scales.largest is not None:
                extent = f"{scales.smallest:.4g} to {scales.largest:.4g}"
            lines.append(f"scales     {scales.num_blocks}: {extent}; {share:.2%} NaN")
        else:
            lines.append("scales     none")
        if scales.factor is not None:
            low, high = scales.factor
            lines.append(f"factor     {low:.4g}" + ("" if low == high else f" to {high:.4g}"))
        if self.num_folded is not None:
            share = self.codes.share(self.num_folded)
            lines.append(f"fold       {self.num_folded} codes would change ({share:.4%})")
        if self.error is not None:
            lines += _error_lines(self.error)
        return lines


def _error_lines(error: ErrorMap) -> list[str]:
    if error.relative is None or error.snr_db is None:
        lines = [f"error      undefined against {error.against}"]
    else:
        lines = [
            f"error      {error.relative:.4g} relative, SNR {error.snr_db:.1f} dB, largest "
            f"difference {error.largest:.4g}, against {error.against}"
        ]
    known = error.cells[error.cells.isfinite()]
    if known.numel() > 1:
        middle, tail = (float(known.quantile(q)) for q in (0.5, 0.99))
        rows, cols = error.cell
        lines.append(
            f"per {rows}x{cols}".ljust(11)
            + f"median {middle:.4g}, 99% below {tail:.4g}, worst {float(known.max()):.4g}"
        )
    if error.num_not_finite:
        lines.append(f"           {error.num_not_finite} values that are not finite left out")
    return lines


class TensorView:
    """The planes of a tensor in numbers; `str()` is text, `figure()` a picture.

    A notebook shows both.

    Attributes:
        title: the tensor in one line.
        planes: a PlaneView each.
    """

    def __init__(self, title: str, planes: tuple[PlaneView, ...]) -> None:
        self.title = title
        self.planes = planes

    def __str__(self) -> str:
        parts = [self.title]
        for view in self.planes:
            parts.append("  " + view.title)
            parts += ["    " + line for line in view.lines()]
        return "\n".join(parts)

    __repr__ = __str__

    def figure(self) -> Any:
        """Return a matplotlib Figure: scales, codes and error of each plane.

        The figure belongs to no window; `figure.savefig(path)` writes it.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return drawing.draw(self.title, self.planes)

    def _repr_html_(self) -> str:
        """Return the picture and the text for a notebook; the text alone without matplotlib."""
        return drawing.as_html(self.title, self.planes, str(self))


@overload
def show(
    tensor: nn.Module, *, original: None = None, recipe: Recipe | str | None = None
) -> ModelView: ...


@overload
def show(
    tensor: Shown, *, original: torch.Tensor | None = None, recipe: None = None
) -> TensorView: ...


def show(
    tensor: Shown | nn.Module,
    *,
    original: torch.Tensor | None = None,
    recipe: Recipe | str | None = None,
) -> TensorView | ModelView:
    """Return what the planes of `tensor` hold: scales, codes, and how far they are from `original`.

    Scales have the factor of the second level within them; a columnwise plane is drawn as it is
    stored, transposed.

    Args:
        tensor: a QuantizedTensor, or a TensorStorage or Plane of one; any format, also empty. Or a
            model, whose weights are shown: the planes that they hold, or those of the recipe.
        original: what was quantized, of the same shape. None: where both planes exist, the
            columnwise one is compared with the rowwise one.
        recipe: of a model: what its weights are quantized by; None: the recipe in force, or of the
            modules' own.

    Returns:
        A TensorView, of a model a ModelView: `str()` is text, `figure()` a matplotlib Figure, and a
        notebook shows both.

    Raises:
        TypeError: `tensor` is not quantized, or an argument is not for it.
        ValueError: `original` has another shape, something is on the meta device, or the model has
            no modules of hybridq.

    Example:
        >>> import torch, hybridq
        >>> x = torch.ones(4, 64)
        >>> view = hybridq.show(hybridq.quantize(x, "mxfp8", columnwise="nvfp4"), original=x)
        >>> [plane.error.relative for plane in view.planes]
        [0.0, 0.0]
    """
    if isinstance(tensor, nn.Module):
        if original is not None:
            raise TypeError("show: original is that of a tensor, got one beside a model")
        return show_model(tensor, None if recipe is None else get(recipe))
    if recipe is not None:
        raise TypeError(f"show: a recipe is for a model, got {type(tensor).__name__} beside it")
    storage, title, shape = _storage(tensor)
    first = storage.first
    for word, one in (("tensor", first), ("original", original)):
        if one is not None and one.device.type == "meta":
            raise ValueError(f"show: the {word} must have values, got one on the meta device")
    if original is not None and tuple(original.shape) != shape:
        raise ValueError(
            f"show: original must have the tensor's shape {shape}, got {tuple(original.shape)}"
        )
    with torch.no_grad():
        want, against = None, "the original"
        if original is not None:
            plain = original.dequantize() if is_quantized(original) else original
            want = plain.detach().reshape(first.rows, first.cols)
        elif len(storage.planes) == 2:
            want, against = first.dequantize(), f"the {first.direction} plane"
        views = []
        for plane in storage.planes:
            error = None
            if want is not None and (original is not None or plane is not first):
                own = want if plane.direction == ROWWISE else want.t()
                error = measure_error(plane, own, against)
            found = (measure_codes(plane), measure_scales(plane), error, measure_fold(plane))
            views.append(PlaneView(plane, *found))
    return TensorView(title, tuple(views))


def _storage(tensor: Shown) -> tuple[TensorStorage, str, tuple[int, ...]]:
    """Return the storage, a title, and the shape that an original must have."""
    if isinstance(tensor, Plane):
        is_row = tensor.direction == ROWWISE
        tensor = TensorStorage(tensor if is_row else None, None if is_row else tensor)
    if isinstance(tensor, TensorStorage):
        first = tensor.first
        shape: tuple[int, ...] = (first.rows, first.cols)
        return tensor, f"TensorStorage {list(shape)} on {first.device}", shape
    if not isinstance(tensor, QuantizedTensor):
        raise TypeError(
            "show: takes a QuantizedTensor, a TensorStorage, a Plane or a model, got "
            f"{type(tensor).__name__}; hybridq.quantize makes one"
        )
    shape = tuple(tensor.shape)
    if tensor.tensor_storage.count is not None:
        raise ValueError(
            f"show: takes one matrix, got {list(shape)} of {tensor.tensor_storage.count} that were "
            "quantized each by itself; show(tensor[0]) is the first of them"
        )
    nominal = str(tensor.dtype).removeprefix("torch.")
    rows, cols = matrix_shape(shape)
    matrix = "" if (rows, cols) == shape else f" as [{rows}, {cols}]"
    plain_nbytes = math.prod(shape) * tensor.dtype.itemsize
    ratio = f", {tensor.nbytes / plain_nbytes:.3f} of it" if plain_nbytes else ""
    title = (
        f"{type(tensor).__name__} {list(shape)}{matrix} {nominal} on {tensor.device}: "
        f"{tensor.nbytes} bytes{ratio}"
    )
    return tensor.tensor_storage, title, shape
