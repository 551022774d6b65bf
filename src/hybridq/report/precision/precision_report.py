"""PrecisionReport: what `hybridq.report` returns."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._text import Table, html
from ...errors import must_be_one_of
from .rows import KEYS, BadValue, ProductShape, ProductStatistics, SlotRow
from .slot_statistics import OUTLIER

__all__ = ["PrecisionReport"]

#: Rows of a table, unless more are asked for.
_ROWS = 20


@dataclass(frozen=True, repr=False)
class PrecisionReport:
    """Where a run loses precision: `str`, a terminal and a notebook show the worst of it.

    Args:
        model: its class.
        recipe: that it ran under, as it prints; None: nothing was quantized.
        loss: of the run; None: there was none. Over ranks their mean.
        slots: a row for each layer, tensor, direction and format.
        products: what operands in each format add to each GEMM.
        first_bad: the first value that is NaN or infinite; None: all are finite.
        ranks: how many ranks' sums these are.
        shapes: of the layers' products.
    """

    model: str
    recipe: str | None
    loss: float | None
    slots: tuple[SlotRow, ...]
    products: tuple[ProductStatistics, ...]
    first_bad: BadValue | None = None
    ranks: int = 1
    shapes: tuple[ProductShape, ...] = field(default=(), repr=False)

    def formats(self) -> tuple[str, ...]:
        """Return the formats of all rows, in the order in which they were met."""
        return tuple(dict.fromkeys(row.format for row in self.slots))

    def rows(self, *, format: str | None = None, in_run: bool | None = None) -> list[SlotRow]:
        """Return some of the rows, in the order of the run.

        Args:
            format: of the plane; None: any.
            in_run: what the run quantizes, or what-if; None: both.
        """
        return [
            row
            for row in self.slots
            if format in (None, row.format) and in_run in (None, row.in_run)
        ]

    def worst(self, count: int = 1, by: str = "severity") -> list[SlotRow]:
        """Return the rows that lose most, the worst first.

        The slot of the first NaN or infinity is before all others. Of a run that quantizes, its
        own planes are ranked; else those of what-if.

        Args:
            count: how many at most, 0 or more.
            by: one of `KEYS`: `"severity"` is the larger of the relative error of all values and of
                those that are no outliers; of experts, the worst one's.

        Raises:
            ValueError: there is no such key, or the count is no such number.
        """
        return self.sorted(by, self._ranked())[: _checked("worst", count)]

    def sorted(self, by: str = "severity", rows: Sequence[SlotRow] | None = None) -> list[SlotRow]:
        """Return rows, the worst first; rows without that number are last.

        Args:
            by: as for `worst`.
            rows: of this report; None: all.

        Raises:
            ValueError: there is no such key.
        """
        if by not in KEYS:
            raise ValueError(f"PrecisionReport.sorted: by {must_be_one_of(KEYS, by)}")

        def place(row: SlotRow) -> tuple[bool, bool, float, int]:
            value = row.value(by)
            is_known = value is not None and not math.isnan(value)
            is_first = by == "severity" and self._has_first_bad(row)
            return not is_first, not is_known, -(value or 0.0), row.order

        return sorted(self.slots if rows is None else rows, key=place)

    @property
    def recipe_text(self) -> str:
        """The recipe as it prints; without one, that there is none, and what a report needs."""
        if self.recipe is not None:
            return self.recipe
        hint = "" if self._ranked() else "; give formats=[...], or run it under hybridq.autocast"
        return f"none, nothing was quantized{hint}"

    def _ranked(self) -> list[SlotRow]:
        own = [row for row in self.slots if row.in_run and not row.is_plain]
        bad = [row for row in self.slots if row.in_run and row.is_plain and row.statistics.bad]
        return own + bad if own else bad + [row for row in self.slots if not row.in_run]

    def _has_first_bad(self, row: SlotRow) -> bool:
        bad = self.first_bad
        if bad is None or bad.tensor == "output":
            return False
        return (row.layer, row.tensor, row.direction) == (bad.layer, bad.tensor, bad.direction)

    # ---- as text, JSON, HTML

    def tables(self, count: int = _ROWS, by: str = "severity") -> tuple[Table, Table]:
        """Return the worst slots and the worst products as tables.

        Args:
            count: rows of each at most, 0 or more.
            by: as for `worst`.

        Raises:
            ValueError: as of `worst`.
        """
        count = _checked("tables", count)
        ranked = self._ranked()
        has_experts = any(row.experts for row in ranked)
        rows = tuple(_cells(row, has_experts) for row in self.sorted(by, ranked)[:count])
        what = "in the run" if any(row.in_run for row in ranked) else "what if"
        title = f"{self.model}: {len(rows)} worst of {len(ranked)} planes, {what}"
        more = ("worst expert",) if has_experts else ()
        slots = Table(title, (*_HEADS, *more), rows, self._notes())
        known = [one for one in self.products if one.relative_error is not None]
        worst = sorted(known, key=lambda one: (not one.in_run, -(one.relative_error or 0.0)))
        heads = ("layer", "GEMM", "formats", "in the run", "error added")
        cells = tuple(
            (
                *(one.layer or "(model)", one.gemm, one.format, "yes" if one.in_run else ""),
                f"{one.relative_error:.3g}",
            )
            for one in worst[:count]
        )
        return slots, Table("Products: what their operands' formats add", heads, cells)

    def _notes(self) -> tuple[str, ...]:
        notes = [f"recipe: {self.recipe_text}"]
        if self.loss is not None:
            notes.append(f"loss: {self.loss:.6g}")
        if self.first_bad is not None:
            notes.append(str(self.first_bad))
        if any(row.is_below_line for row in self.slots if row.in_run):
            notes.append("!: a gradient below sqrt(3) times its noise (arXiv:2505.19115)")
        notes.append(
            f"error: ||Q(x) - x|| / ||x||; of the bulk: without outliers, values beyond "
            f"{OUTLIER:g} median magnitudes"
        )
        if self.ranks > 1:
            notes.append(f"sums over {self.ranks} ranks")
        return tuple(notes)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        bad = self.first_bad
        return {
            "model": self.model,
            "recipe": self.recipe,
            "loss": self.loss if self.loss is None or math.isfinite(self.loss) else None,
            "ranks": self.ranks,
            "first_bad": None if bad is None else {**vars(bad), "text": str(bad)},
            "slots": [row.as_dict() for row in self.slots],
            "products": [one.as_dict() for one in self.products],
        }

    def to_json(self) -> str:
        """Return all of it as a JSON object; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs no other file and no network: tables that sort, and plots.

        Args:
            path: of the file.
        """
        from .page import page  # its text is long

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self.tables())

    def _repr_html_(self) -> str:
        return "".join(map(html, self.tables()))


_HEADS = (
    *("layer", "tensor", "direction", "format", "error", "of the bulk", "SNR, dB"),
    *("underflow", "saturated", "outliers", "gradient / noise", "loss change"),
)


def _checked(where: str, count: object) -> int:
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"PrecisionReport.{where}: count must be an integer >= 0, got {count!r}")
    return count


def _cells(row: SlotRow, has_experts: bool) -> tuple[str, ...]:
    own = row.statistics
    error = "not finite" if own.bad else _number(own.relative_error)
    ratio = _number(row.gradient_to_noise) + (" !" if row.is_below_line else "")
    change = "" if row.loss_change is None else f"{row.loss_change:+.3g}"
    snr = "" if own.snr_db is None else f"{own.snr_db:.1f}"
    return (
        *(row.layer or "(model)", row.tensor, row.direction, row.format, error),
        *(_number(own.bulk_error), snr, _share(own.underflow_share)),
        *(_share(own.saturation_share), _share(own.outlier_share), ratio, change),
        *((_expert(row),) if has_experts else ()),
    )


def _expert(row: SlotRow) -> str:
    """Return the number of the worst expert and its severity."""
    worst = row.worst_expert
    return "" if worst is None else f"{worst}: {_number(row.experts[worst].severity)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"
