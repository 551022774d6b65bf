"""Two calibrations compared: how many amaxes are equal, larger, smaller, and by how much."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from .._text import Table
from .calibration import SLOTS, Calibration

__all__ = ["AmaxDiff", "SlotDiff", "amax_diff"]

#: Names that are shown of each slot, those that differ most.
_WORST: Final = 10


@dataclass(frozen=True)
class SlotDiff:
    """How the amaxes of one slot differ, value by value: of stacks and channels each one.

    Args:
        slot: which.
        equal, larger, smaller: how many values of B are, beside A's.
        only_a, only_b: how many only one of them has.
        median_ratio: of B by A, over the values that differ and are not 0; None: there is none.
        worst: name, and the values of A and B, of those that differ by the largest factor.
    """

    slot: str
    equal: int
    larger: int
    smaller: int
    only_a: int
    only_b: int
    median_ratio: float | None
    worst: tuple[tuple[str, float, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        worst = [{"name": name, "a": a, "b": b} for name, a, b in self.worst]
        return {**vars(self), "worst": worst}


@dataclass(frozen=True)
class AmaxDiff:
    """What `amax_diff` finds: `str` shows two tables.

    Args:
        slots: those that one of both has.
    """

    slots: tuple[SlotDiff, ...]

    @property
    def is_equal(self) -> bool:
        """Whether both have the same values, and nothing else."""
        counts = ((one.larger, one.smaller, one.only_a, one.only_b) for one in self.slots)
        return not any(map(any, counts))

    def tables(self) -> tuple[Table, ...]:
        """Return a table of counts, and one of the names that differ most, if any do."""
        heads = ("slot", "equal", "larger", "smaller", "only A", "only B", "median B / A")
        rows = []
        for one in self.slots:
            counts = (one.equal, one.larger, one.smaller, one.only_a, one.only_b)
            ratio = "" if one.median_ratio is None else f"{one.median_ratio:.4g}"
            rows.append((one.slot, *(f"{count:,}" for count in counts), ratio))
        made = [Table("Amaxes of B beside those of A", heads, tuple(rows))]
        worst = tuple(
            (name, one.slot, f"{a:.6g}", f"{b:.6g}", f"{b / a:.4g}" if a else "")
            for one in self.slots
            for name, a, b in one.worst
        )
        if worst:
            made.append(Table("Differ most", ("name", "slot", "A", "B", "B / A"), worst))
        return tuple(made)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {"is_equal": self.is_equal, "slots": [one.as_dict() for one in self.slots]}

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))


def amax_diff(
    a: Calibration | str | os.PathLike[str],
    b: Calibration | str | os.PathLike[str],
    *,
    worst: int = _WORST,
) -> AmaxDiff:
    """Return how the amaxes of a calibration differ from those of another.

    Args:
        a, b: calibrations, or the paths of their files.
        worst: how many names are kept of each slot.

    Raises:
        CheckpointError: a file cannot be read.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.calibration import amax_diff
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> found = [hybridq.calibrate(model, [torch.full((1, 8), x)]) for x in (1.0, 3.0)]
        >>> [(one.slot, one.equal, one.larger, one.median_ratio) for one in amax_diff(*found).slots]
        [('input', 0, 1, 3.0), ('weight', 1, 0, None)]
    """
    mine, other = (one if isinstance(one, Calibration) else Calibration.load(one) for one in (a, b))
    values: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
    for place, one in enumerate((mine, other)):
        for name, slot, value in _values(one):
            values.setdefault(slot, ({}, {}))[place][name] = value
    return AmaxDiff(tuple(_slot(slot, *values[slot], worst) for slot in SLOTS if slot in values))


def _values(found: Calibration) -> Iterator[tuple[str, str, float]]:
    """Yield each value by itself, with the numbers of experts, channels and blocks in its name."""
    for name, slot, amax in found.entries():
        if not amax.dim():
            yield name, slot, float(amax)
            continue
        is_stack = slot in ("weight", "expert_input") and bool(found.tokens[name].dim())
        stack = [(f"{name}.{e}", one) for e, one in enumerate(amax)] if is_stack else [(name, amax)]
        for own, one in stack:
            if not one.dim():
                yield own, slot, float(one)
                continue
            for number, value in enumerate(one.tolist()):
                yield f"{own}[{number}]", slot, value


def _slot(slot: str, a: Mapping[str, float], b: Mapping[str, float], worst: int) -> SlotDiff:
    a, b = ({name: one for name, one in part.items() if one >= 0} for part in (a, b))
    both = [name for name in a if name in b]
    differ = [name for name in both if a[name] != b[name]]
    ratios = [b[name] / a[name] for name in differ if a[name] and b[name]]
    differ.sort(key=lambda name: (-_factor(a[name], b[name]), name))
    larger = sum(1 for name in differ if b[name] > a[name])
    return SlotDiff(
        slot,
        equal=len(both) - len(differ),
        larger=larger,
        smaller=len(differ) - larger,
        only_a=len(a) - len(both),
        only_b=len(b) - len(both),
        median_ratio=median(ratios) if ratios else None,
        worst=tuple((name, a[name], b[name]) for name in differ[:worst]),
    )


def _factor(a: float, b: float) -> float:
    """Return by how much two amaxes differ; infinite where one of them is 0."""
    return abs(math.log(b / a)) if a and b else math.inf
