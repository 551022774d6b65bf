"""The picture of `hybridq.show`; the only code of this layer that needs matplotlib.

Figures are made without pyplot: no window, no global state, nothing to close.
"""

from __future__ import annotations

import base64
import html
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..direction import ROWWISE
from .measure import Codes, ErrorMap, Scales

if TYPE_CHECKING:
    from .show import PlaneView

__all__ = ["as_html", "draw", "draw_errors", "picture_html"]

#: Largest value of an element over its smallest up to which codes stand on a linear scale.
_LINEAR: Final = 64.0

_MISSING = "matplotlib is not installed; pip install hybridq[demo]"


def _figure_class() -> Any:
    """Return matplotlib's Figure; imported here, since hybridq itself runs without matplotlib."""
    try:
        return import_module("matplotlib.figure").Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ImportError(f"figure: {_MISSING}", name="matplotlib") from error


def draw(title: str, views: Sequence[PlaneView]) -> Any:
    """Return a matplotlib Figure with a row per plane: scales, codes, error.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _figure_class()(figsize=(13.0, 0.8 + 3.4 * len(views)), layout="constrained")
    axes = figure.subplots(len(views), 3, squeeze=False)
    for view, (left, middle, right) in zip(views, axes, strict=True):
        plane = view.plane
        is_row = plane.direction == ROWWISE
        names = ("row", "column") if is_row else ("column", "row")
        block = plane.spec.format.block or plane.matrix
        _draw_scales(figure, left, view.scales, _Matrix(plane.matrix, names), block)
        _draw_codes(middle, view.codes)
        _draw_error(figure, right, view.error, _Matrix(plane.matrix, names))
        drawn = "" if is_row else ", drawn transposed"
        text = f"{plane.direction}{drawn}\n{_wrapped(str(plane.spec))}\n"
        left.set_ylabel(text + left.get_ylabel(), fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


class _Matrix(NamedTuple):
    """A plane's own matrix, and what its two axes are of the logical one."""

    size: tuple[int, int]
    names: tuple[str, str]


def _wrapped(text: str) -> str:
    return text.replace(";", "\n")


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])


def _heat(
    figure: Any,
    axis: Any,
    cells: torch.Tensor,
    cell: tuple[int, int],
    matrix: _Matrix,
    look: tuple[str, str],
) -> None:
    """Draw a map over rows and columns of the logical matrix; what is not finite is red.

    Args:
        figure, axis: of matplotlib.
        cells: `[rows, columns]` of the map.
        cell: values that each spans along both axes of the plane's own matrix.
        matrix: that one.
        look: label and colors.
    """
    grid = cells.to(torch.float64)
    shown = torch.where(grid.isfinite(), grid, math.nan).numpy()
    # Pixels are as large as cells; those at the far ends reach beyond the matrix.
    far = [count * size for count, size in zip(cells.shape, cell, strict=True)]
    extent = (0, far[1], far[0], 0)
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap=look[1], extent=extent)
    axis.set_facecolor("crimson")
    axis.set_xlim(0, max(1, matrix.size[1]))
    axis.set_ylim(max(1, matrix.size[0]), 0)
    for one, size in zip((axis.yaxis, axis.xaxis), matrix.size, strict=True):
        one.set_major_locator(_locator(size))
    axis.tick_params(labelsize=7)
    axis.set_xlabel(matrix.names[1], fontsize=8)
    axis.set_ylabel(matrix.names[0], fontsize=8)
    figure.colorbar(image, ax=axis, label=look[0], shrink=0.8)


def _locator(size: int) -> Any:
    """Return where ticks of rows or columns stand: multiples of a power of two, 9 at most."""
    step = 1
    while size > 8 * step:
        step *= 2
    return import_module("matplotlib.ticker").MultipleLocator(step)


def _draw_scales(
    figure: Any, axis: Any, scales: Scales, matrix: _Matrix, block: tuple[int, int]
) -> None:
    axis.set_title("scales" if scales.factor is None else "scales, with their factor", fontsize=9)
    if scales.log2 is None:
        return _say(axis, "no scales")
    if not scales.log2.numel():
        return _say(axis, "empty")
    if not scales.log2.isfinite().any():
        return _say(axis, "no finite scale")
    rows, cols = scales.cell
    cell = (rows * block[0], cols * block[1])
    _heat(figure, axis, scales.log2, cell, matrix, ("log2(scale)", "viridis"))
    label = "one cell per scale" if rows * cols == 1 else f"largest of {rows}x{cols}"
    hidden = "" if scales.log2.isfinite().all() else "; red: zero or NaN"
    axis.set_xlabel(f"{matrix.names[1]} ({label}{hidden})", fontsize=8)


def _draw_codes(axis: Any, codes: Codes) -> None:
    """Draw the share of each code over its value; codes of one value are one line."""
    axis.set_title(f"codes ({codes.element})", fontsize=9)
    if not codes.total:
        return _say(axis, "empty")
    shares: dict[float, float] = {}
    beside: dict[str, float] = {}
    for value, count in zip(codes.values, codes.counts, strict=True):
        if math.isfinite(value):
            shares[value] = shares.get(value, 0.0) + codes.share(count)
        elif count:
            beside[str(value)] = beside.get(str(value), 0.0) + codes.share(count)
    smallest = min(value for value in shares if value > 0)
    largest = max(shares)
    if largest / smallest > _LINEAR:
        axis.set_xscale("symlog", linthresh=smallest, base=2)
        axis.tick_params(axis="x", rotation=45)
    axis.vlines(list(shares), 0, list(shares.values()), linewidth=1.5)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=7)
    axis.set_ylabel("share")
    more = "".join(f"; {name}: {share:.2%}" for name, share in beside.items())
    axis.set_xlabel(f"value of the code, before its scale{more}", fontsize=8)


def _draw_error(figure: Any, axis: Any, error: ErrorMap | None, matrix: _Matrix) -> None:
    axis.set_title("relative error" if error is None else f"error vs {error.against}", fontsize=9)
    if error is None:
        return _say(axis, "nothing to compare with;\npass original=")
    if not error.cells.numel():
        return _say(axis, "empty")
    if not error.cells.isfinite().any():
        return _say(axis, "undefined")
    rows, cols = error.cell
    _heat(figure, axis, error.cells, error.cell, matrix, ("relative error", "magma"))
    axis.set_xlabel(f"{matrix.names[1]} (per {rows}x{cols})", fontsize=8)


def draw_errors(title: str, points: Sequence[tuple[str, str, float | None]]) -> Any:
    """Return a matplotlib Figure of errors by name, on a log scale; a mark for each kind.

    Args:
        title: above it.
        points: name, kind and error; without an error it is left out.

    Raises:
        ImportError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name for name, _, _ in points))
    figure = _figure_class()(figsize=(max(6.0, 0.25 * len(names) + 2), 4.5), layout="constrained")
    axis = figure.subplots()
    axis.set_title("\n".join(textwrap.wrap(title, 80)), fontsize=9)
    known = [(name, kind, error) for name, kind, error in points if error]
    if not known:
        _say(axis, "no plane has an error")
        return figure
    for kind in dict.fromkeys(kind for _, kind, _ in known):
        own = [(names.index(name), error) for name, one, error in known if one == kind]
        mark = "o" if kind.startswith(ROWWISE) else "x"
        axis.plot(*zip(*own, strict=True), mark, label=kind, markersize=5, fillstyle="none")
    axis.set_yscale("log")
    axis.set_ylabel("relative error")
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)
    return figure


def picture_html(title: str, make: Callable[[], Any]) -> str:
    """Return a figure as an inline PNG; what is missing to draw it, if something is.

    Args:
        title: for those who do not see it.
        make: returns the figure.
    """
    try:
        figure = make()
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        return f"<pre>{html.escape(_MISSING)}</pre>"
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=90)
    image = base64.b64encode(target.getvalue()).decode("ascii")
    return f'<img alt="{html.escape(title, quote=True)}" src="data:image/png;base64,{image}"/>'


def as_html(title: str, views: Sequence[PlaneView], text: str) -> str:
    """Return the figure as an inline PNG, followed by the text; the text alone if it cannot."""
    picture = picture_html(title, lambda: draw(title, views))
    if picture.startswith("<pre>"):
        return f"<pre>{html.escape(text)}\n\n{html.escape(_MISSING)}</pre>"
    return f"{picture}<pre>{html.escape(text)}</pre>"
