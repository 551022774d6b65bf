"""The tables of docs/guides/distributed.md, of what benchmarks/axes.py has counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["BEGIN", "END", "GUIDE", "replaced", "tables"]

GUIDE: Final = Path(__file__).parents[1] / "docs" / "guides" / "distributed.md"
BEGIN: Final = "<!-- made by: python benchmarks/axes.py --save -->"
END: Final = "<!-- end -->"
KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")


def _kib(nbytes: int) -> str:
    kib = nbytes / 1024
    return f"{kib:.0f}" if kib >= 10 else f"{kib:.1f}"


def _moved(cost: dict[str, Any], kind: str) -> str:
    calls = cost["collectives"].get(kind, 0)
    return f"{calls}: {_kib(cost['bytes'][kind])}" if calls else ""


def _encoded(cost: dict[str, Any]) -> tuple[str, str, str]:
    found = cost["encodes"]
    if not found["matrices"]:
        return "", "", ""
    return str(found["matrices"]), str(found["planes"]), f"{found['values'] / 1e6:.2f}"


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(measured: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return a table for each number of ranks.

    Args:
        measured: by the number of ranks, axis and recipe: what `axes.cost` returns.
    """
    parts = []
    for ranks, by_axis in measured.items():
        kinds = [kind.replace("_", "-") for kind in KINDS]
        head = [f"{ranks} ranks", "", *kinds, "encodes", "planes", "10^6 values"]
        rows = [_row(head), _row(["---"] * len(head))]
        for axis, by_recipe in by_axis.items():
            for number, (recipe, cost) in enumerate(by_recipe.items()):
                cells = ["" if number else axis, recipe]
                cells += [_moved(cost, kind) for kind in KINDS]
                rows.append(_row([*cells, *_encoded(cost)]))
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def replaced(page: str, text: str) -> str:
    """Return a page with another text between its marks.

    Args:
        page: Markdown.
        text: what stands there from now on.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"
