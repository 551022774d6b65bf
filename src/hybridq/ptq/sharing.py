"""The amaxes that several tensors share, so that a reader may put them together.

Servers multiply with q, k and v, and with gate and up, at once, and take one second-level scale for
all of them. So each is encoded by the amax of all, which is found before any is encoded, wherever
they stand.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .budget import Budget
from .draft import CheckpointScheme
from .encode import AMAX, PLAIN
from .exact import Exponents
from .header import Entry, dtype_name
from .plan import Job
from .record import Record
from .steps import Step, matrix_steps, read_steps
from .views import PlaneView, View

__all__ = ["Sharing"]


class Sharing:
    """Knows the amaxes of groups of tensors; finds each once.

    Args:
        scheme: says which tensors are in a group.
        budget: how large tiles may be.
    """

    def __init__(self, scheme: CheckpointScheme, budget: Budget) -> None:
        self._scheme = scheme
        self._budget = budget
        self._found: dict[str, torch.Tensor] = {}
        self._tops: dict[str, int | None] = {}
        self._notes: list[str] = []

    def stat(self, group: str) -> torch.Tensor | None:
        """Return the amax of a group, FP32 `[1]`; None where a tensor is by itself.

        Args:
            group: its name; "": none.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if group and group not in self._found:
            amax = torch.zeros(1, dtype=torch.float32, device="cpu")
            for record, view in self._scheme.members(group):
                for step, pieces in read_steps(self._steps(record, view)):
                    if step.tile is not None:
                        x = view.values(step.tile, pieces)
                        found = torch.ops.hybridq.amax(x, PLAIN, "rowwise")
                        amax = torch.maximum(amax, found)  # NaN stays
            self._found[group] = amax
        return self._found[group] if group else None

    def top(self, group: str) -> int | None:
        """Return the exponent by which a group of MXFP4 planes becomes NVFP4 exactly, or None.

        Args:
            group: its name.

        Raises:
            CheckpointError: a file cannot be read.
        """
        if group not in self._tops:
            seen, names = Exponents(), []
            for record, view in self._scheme.members(group):
                names.append(record.name)
                for step, pieces in read_steps(self._steps(record, view)):
                    if step.tile is not None and isinstance(view, PlaneView):
                        seen.add(view.plane(step.tile, pieces))
            self._tops[group] = seen.top
            if seen.top is None:
                self._notes.append(
                    f"{' and '.join(names)} cannot be NVFP4 without loss, since {seen.reason}; "
                    "the values are encoded anew"
                )
        return self._tops[group]

    def notes(self) -> list[str]:
        """Return what the user should know and was not told yet."""
        found, self._notes = self._notes, []
        return found

    def _steps(self, record: Record, view: View) -> Iterator[Step]:
        entry = Entry(record.name, dtype_name(record.dtype), record.shape, 0, 0)
        job = Job(entry, view, record, {}, False, "", 0)
        return matrix_steps(job, self._budget, (AMAX,))
