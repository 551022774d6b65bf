"""The page of a precision report: one HTML file, no network; tables that sort, plots as SVG."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from .rows import SlotRow
from .slot_statistics import GNR_LINE, NO_EXPONENT

if TYPE_CHECKING:
    from .precision_report import PrecisionReport

__all__ = ["page"]

_STYLE: Final = """
body{font-family:system-ui,sans-serif;margin:2em;color:#1b1f24;max-width:110em}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}
table{border-collapse:collapse;font-size:.85em}
th{cursor:pointer;text-align:left;border-bottom:2px solid #57606a;padding:.3em .8em;
position:sticky;top:0;background:#fff;user-select:none}
td{padding:.15em .8em;border-bottom:1px solid #eaeef2;white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}
tr.bad td{background:#ffebe9}tr.low td{background:#fff8c5}tr.whatif td{color:#57606a}
th[aria-sort=ascending]::after{content:" \\25b2"}th[aria-sort=descending]::after{content:" \\25bc"}
.note{color:#57606a;font-size:.9em}label{margin-right:1.5em}svg text{font-size:10px;fill:#1b1f24}
.bad-note{background:#ffebe9;padding:.6em 1em;border-left:4px solid #cf222e}
"""

#: Sorts a table by the column whose head is clicked, and hides rows by format, tensor and text.
_SCRIPT: Final = """
function sortBy(table, column, descending) {
  const body = table.tBodies[0];
  const key = row => {
    const cell = row.cells[column];
    const given = cell.dataset.v;
    if (given === undefined) return cell.textContent;
    return given === "" ? null : Number(given);
  };
  const rows = Array.from(body.rows);
  rows.sort((a, b) => {
    const x = key(a), y = key(b);
    if (x === null || y === null) return (x === null) - (y === null);
    const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", {numeric: true});
    return descending ? -order : order;
  });
  rows.forEach(row => body.appendChild(row));
  Array.from(table.tHead.rows[0].cells).forEach((head, at) => {
    const order = descending ? "descending" : "ascending";
    head.setAttribute("aria-sort", at === column ? order : "none");
  });
}
function filterRows(table) {
  const format = document.getElementById("format").value;
  const tensor = document.getElementById("tensor").value;
  const text = document.getElementById("layer").value;
  let shown = 0;
  Array.from(table.tBodies[0].rows).forEach(row => {
    const is = (!format || row.dataset.format === format)
      && (!tensor || row.dataset.tensor === tensor)
      && row.cells[0].textContent.includes(text);
    row.hidden = !is;
    shown += is;
  });
  document.getElementById("shown").textContent = shown;
}
document.querySelectorAll("table.sortable").forEach(table => {
  Array.from(table.tHead.rows[0].cells).forEach((head, at) => {
    head.addEventListener("click", () => {
      sortBy(table, at, head.getAttribute("aria-sort") !== "descending");
    });
  });
});
["format", "tensor", "layer"].forEach(id => {
  const control = document.getElementById(id);
  control.addEventListener("input", () => filterRows(document.getElementById("slots")));
});
"""

_HEADS: Final = (
    *("layer", "tensor", "direction", "format", "run"),
    *("error", "bulk error", "SNR, dB", "underflow", "saturated", "outliers"),
    *("gradient / noise", "loss change", "amax", "not finite"),
    *("worst expert", "its error", "block scales, log2"),
)


def page(report: PrecisionReport) -> str:
    """Return the page of a report.

    Args:
        report: any.
    """
    title = f"Precision of {report.model}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _facts(report),
        "<h2>Error by layer</h2>",
        _by_layer(report),
        _gradients(report),
        "<h2>Slots</h2>",
        _controls(report),
        _slots(report),
        "<h2>Products: what their operands' formats add</h2>",
        _products(report),
    ]
    data = json.dumps(report.as_dict(), allow_nan=False).replace("<", "\\u003c")
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    script = f"<script type='application/json' id='data'>{data}</script><script>{_SCRIPT}</script>"
    body = "".join(parts)
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}{script}</body></html>\n"


def _facts(report: PrecisionReport) -> str:
    loss = "" if report.loss is None else f"; loss {report.loss:.6g}"
    ranks = f"; sums over {report.ranks} ranks" if report.ranks > 1 else ""
    recipe = escape(report.recipe_text)
    text = f"<p>Recipe: <code>{recipe}</code>{loss}{ranks}</p>"
    if report.first_bad is not None:
        text += f"<p class='bad-note'>{escape(str(report.first_bad))}</p>"
    return text


# ---- tables


def _number(value: float | None, text: str = "{:.3g}") -> str:
    """Return a cell that sorts by its number."""
    if value is None or not math.isfinite(value):
        return "<td class='n' data-v=''></td>"
    return f"<td class='n' data-v='{value!r}'>{text.format(value)}</td>"


def _words(*cells: str) -> str:
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _heads(heads: Iterable[str]) -> str:
    cells = "".join(f"<th scope='col' aria-sort='none'>{escape(one)}</th>" for one in heads)
    return f"<thead><tr>{cells}</tr></thead>"


def _slots(report: PrecisionReport) -> str:
    rows = "".join(map(_slot, report.sorted()))
    return f"<table id='slots' class='sortable'>{_heads(_HEADS)}<tbody>{rows}</tbody></table>"


def _slot(row: SlotRow) -> str:
    own = row.statistics
    kind = "bad" if own.bad else "low" if row.is_below_line else "" if row.in_run else "whatif"
    words = (row.layer or "(model)", row.tensor, row.direction, row.format)
    share = "{:.2%}"
    cells = (
        _words(*words, "yes" if row.in_run else ""),
        _number(own.relative_error),
        _number(own.bulk_error),
        _number(own.snr_db, "{:.1f}"),
        _number(own.underflow_share, share),
        _number(own.saturation_share, share),
        _number(own.outlier_share, share),
        _number(row.gradient_to_noise),
        _number(row.loss_change, "{:+.3g}"),
        _number(own.amax),
        _number(own.bad, "{:d}"),
        *_expert(row),
        f"<td data-v='{len(own.scales)}'>{_histogram(row)}</td>",
    )
    given = f"data-format='{escape(row.format, True)}' data-tensor='{row.tensor}'"
    return f"<tr class='{kind}' {given}>{''.join(cells)}</tr>"


def _expert(row: SlotRow) -> tuple[str, str]:
    """Return the number of the worst expert, and its severity."""
    worst = row.worst_expert
    if worst is None:
        return _number(None), _number(None)
    return _number(worst, "{:d}"), _number(row.experts[worst].severity)


def _products(report: PrecisionReport) -> str:
    heads = ("layer", "GEMM", "formats", "run", "error added")
    rows = "".join(
        f"<tr class='{'' if one.in_run else 'whatif'}'>"
        + _words(one.layer or "(model)", one.gemm, one.format, "yes" if one.in_run else "")
        + _number(one.relative_error)
        + "</tr>"
        for one in report.products
    )
    return f"<table id='products' class='sortable'>{_heads(heads)}<tbody>{rows}</tbody></table>"


def _controls(report: PrecisionReport) -> str:
    def choice(name: str, values: Sequence[str]) -> str:
        options = "".join(f"<option>{escape(one)}</option>" for one in values)
        return f"<label>{name} <select id='{name}'><option></option>{options}</select></label>"

    tensors = list(dict.fromkeys(row.tensor for row in report.slots))
    layer = "<label>layer <input id='layer' type='search'></label>"
    shown = f"<span class='note'><span id='shown'>{len(report.slots)}</span> rows</span>"
    return f"<p>{choice('format', report.formats())}{choice('tensor', tensors)}{layer}{shown}</p>"


# ---- plots

_COLORS: Final = ("#0969da", "#bf3989", "#1a7f37", "#9a6700", "#8250df", "#cf222e", "#57606a")


def _histogram(row: SlotRow) -> str:
    """Return how many block scales there are of each exponent, as a small picture."""
    scales = {key: count for key, count in row.statistics.scales.items() if key != NO_EXPONENT}
    if not scales:
        return ""
    low, high, most = min(scales), max(scales), max(scales.values())
    width = 110 / (high - low + 1)
    bars = "".join(
        f"<rect x='{(key - low) * width:.1f}' y='{18 - 17 * count / most:.1f}' "
        f"width='{max(width - 0.5, 0.5):.1f}' height='{17 * count / most:.1f}' fill='#0969da'>"
        f"<title>2^{key}: {count}</title></rect>"
        for key, count in sorted(scales.items())
    )
    label = f"{low} to {high}"
    return f"<svg width='110' height='20' role='img' aria-label='{label}'>{bars}</svg> {label}"


def _by_layer(report: PrecisionReport) -> str:
    """Return the worst error of each layer in each format, as lines of points on a log scale."""
    layers = list(dict.fromkeys(row.layer for row in report.slots))
    errors: dict[str, dict[int, float]] = {}
    for row in report.slots:
        error = row.statistics.relative_error
        if error and not row.is_plain and not row.statistics.bad:
            own = errors.setdefault(row.format, {})
            at = layers.index(row.layer)
            own[at] = max(own.get(at, 0.0), error)
    values = [error for own in errors.values() for error in own.values()]
    if not values:
        return "<p class='note'>No plane has an error.</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    step = max(14, min(60, 900 // max(len(layers), 1)))
    wide = 70 + step * len(layers)

    def y(value: float) -> float:
        return 10 + 180 * (high - math.log10(value)) / (high - low)

    parts = [
        f"<line x1='50' x2='{wide}' y1='{y(10.0**n):.1f}' y2='{y(10.0**n):.1f}' stroke='#eaeef2'/>"
        f"<text x='5' y='{y(10.0**n) + 3:.1f}'>1e{n}</text>"
        for n in range(low, high + 1)
    ]
    for number, (fmt, own) in enumerate(errors.items()):
        color = _COLORS[number % len(_COLORS)]
        for at, error in own.items():
            name = escape(layers[at] or "(model)")
            parts.append(
                f"<circle cx='{60 + step * at}' cy='{y(error):.1f}' r='3' fill='{color}'>"
                f"<title>{name}, {escape(fmt)}: {error:.3g}</title></circle>"
            )
        parts.append(
            f"<text x='{60 + 130 * number}' y='290' style='fill:{color}'>{escape(fmt)}</text>"
        )
    for at, layer in enumerate(layers):
        place = 60 + step * at
        parts.append(
            f"<text x='{place}' y='200' transform='rotate(60 {place} 200)'>"
            f"{escape((layer or '(model)')[-16:])}</text>"
        )
    wide = max(wide, 70 + 130 * len(errors))
    return (
        f"<svg id='by-layer' width='{wide}' height='300' role='img' "
        f"aria-label='largest relative error of each layer by format'>{''.join(parts)}</svg>"
    )


def _gradients(report: PrecisionReport) -> str:
    """Return the ratios of gradients to their noise, with the line at sqrt(3)."""
    rows = [row for row in report.slots if row.gradient_to_noise is not None and not row.is_plain]
    known = [(row, row.gradient_to_noise or 0.0) for row in rows if not row.statistics.bad]
    known = [(row, ratio) for row, ratio in known if math.isfinite(ratio) and ratio > 0]
    if not known:
        return ""
    low = min(0.0, *(math.log10(ratio) for _, ratio in known))
    high = max(1.0, *(math.log10(ratio) for _, ratio in known))
    formats = list(dict.fromkeys(row.format for row, _ in known))

    def x(ratio: float) -> float:
        return 110 + 640 * (math.log10(ratio) - low) / (high - low)

    parts = [
        f"<line x1='{x(GNR_LINE):.1f}' x2='{x(GNR_LINE):.1f}' y1='5' y2='{25 * len(formats) + 10}' "
        "stroke='#cf222e' stroke-dasharray='4'/>",
        f"<text x='{x(GNR_LINE) + 4:.1f}' y='{25 * len(formats) + 22}'>sqrt(3)</text>",
    ]
    for number, fmt in enumerate(formats):
        color = _COLORS[number % len(_COLORS)]
        parts.append(
            f"<text x='0' y='{25 * number + 22}' style='fill:{color}'>{escape(fmt)}</text>"
        )
        for row, ratio in known:
            if row.format == fmt:
                name = f"{row.layer or '(model)'}, {row.direction}: {ratio:.3g}"
                parts.append(
                    f"<circle cx='{x(ratio):.1f}' cy='{25 * number + 18}' r='4' fill='{color}' "
                    f"fill-opacity='.6'><title>{escape(name)}</title></circle>"
                )
    note = (
        "<p class='note'>Left of the line a gradient is below sqrt(3) times its quantization "
        "noise, where training was seen to suffer (arXiv:2505.19115).</p>"
    )
    return (
        "<h2>Gradients over their quantization noise</h2>"
        f"<svg id='gradients' width='780' height='{25 * len(formats) + 30}' role='img' "
        f"aria-label='ratio of gradients to noise by format'>{''.join(parts)}</svg>{note}"
    )
