"""The picture of `hybridq.show`; the only code of this layer that needs matplotlib.

Figures are made without pyplot: no window, no global state, nothing to close.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .measure import Codes, ErrorMap, Scales

if TYPE_CHECKING:
    from .show import PlaneView

__all__ = ["as_html", "draw"]

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
        _draw_scales(figure, left, view.scales)
        _draw_codes(middle, view.codes)
        _draw_error(figure, right, view.error)
        left.set_ylabel(f"{view.plane.direction}\n{_wrapped(str(view.plane.spec))}", fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _wrapped(text: str) -> str:
    return text.replace(";", "\n")


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])


def _heat(figure: Any, axis: Any, cells: torch.Tensor, label: str, colors: str) -> None:
    """Draw a map; cells that are not finite are red."""
    grid = cells.to(torch.float64)
    shown = torch.where(grid.isfinite(), grid, math.nan).numpy()
    image = axis.imshow(shown, aspect="auto", interpolation="nearest", cmap=colors)
    axis.set_facecolor("crimson")
    axis.set_xticks([])
    axis.set_yticks([])
    figure.colorbar(image, ax=axis, label=label, shrink=0.8)


def _draw_scales(figure: Any, axis: Any, scales: Scales) -> None:
    axis.set_title("scales", fontsize=9)
    if scales.log2 is None:
        return _say(axis, "no scales")
    if not scales.log2.numel():
        return _say(axis, "empty")
    if not scales.log2.isfinite().any():
        return _say(axis, "no finite scale")
    rows, cols = scales.cell
    _heat(figure, axis, scales.log2, "log2(scale)", "viridis")
    label = "one cell per scale" if rows * cols == 1 else f"largest of {rows}x{cols}"
    hidden = "" if scales.log2.isfinite().all() else "; red: zero or NaN"
    axis.set_xlabel(label + hidden)


def _draw_codes(axis: Any, codes: Codes) -> None:
    axis.set_title(f"codes ({codes.element})", fontsize=9)
    if not codes.total:
        return _say(axis, "empty")
    shares = [codes.share(count) for count in codes.counts]
    positions = range(len(shares))
    axis.bar(positions, shares, width=1.0)
    ticks = [round(i * (len(shares) - 1) / 8) for i in range(9)]
    axis.set_xticks(ticks)
    axis.set_xticklabels([f"{codes.values[i]:.3g}" for i in ticks], rotation=45, fontsize=7)
    axis.set_ylabel("share")
    axis.set_xlabel("value of the code, before its scale", fontsize=8)


def _draw_error(figure: Any, axis: Any, error: ErrorMap | None) -> None:
    axis.set_title("relative error" if error is None else f"error vs {error.against}", fontsize=9)
    if error is None:
        return _say(axis, "nothing to compare with;\npass original=")
    if not error.cells.numel():
        return _say(axis, "empty")
    if not error.cells.isfinite().any():
        return _say(axis, "undefined")
    rows, cols = error.cell
    _heat(figure, axis, error.cells, "relative error", "magma")
    axis.set_xlabel(f"per {rows}x{cols}")


def as_html(title: str, views: Sequence[PlaneView], text: str) -> str:
    """Return the figure as an inline PNG, followed by the text; the text alone if it cannot."""
    try:
        figure = draw(title, views)
    except ImportError as error:
        if error.name != "matplotlib":
            raise
        return f"<pre>{html.escape(text)}\n\n{html.escape(_MISSING)}</pre>"
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=90)
    image = base64.b64encode(target.getvalue()).decode("ascii")
    alt = html.escape(title, quote=True)
    return f'<img alt="{alt}" src="data:image/png;base64,{image}"/><pre>{html.escape(text)}</pre>'
