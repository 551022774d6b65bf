"""What the default tests of a run took, beside their budget: a report, and no test of time."""

from __future__ import annotations

from collections import Counter

import pytest

__all__ = ["SECONDS", "SuiteTime"]

#: Of all default tests together, on cores that do nothing else: `make test` has two of them for six
#: minutes, of which each takes half a minute to start and to collect.
SECONDS = 660


class SuiteTime:
    """Seconds of every default test, its fixtures included."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def add(self, report: pytest.TestReport) -> None:
        """Count a phase of a test, unless its marker leaves it out of the default suite."""
        if not {"more", "slow"} & set(report.keywords):
            self._seconds[report.nodeid] += report.duration

    def lines(self, most: int = 10) -> list[str]:
        """Return the sum beside the budget, and the tests that took longest."""
        total = sum(self._seconds.values())
        first = (
            f"{len(self._seconds):,} default tests took {total:.0f} s together, "
            f"where nothing else computes {SECONDS} s are their budget; the dearest:"
        )
        dearest = self._seconds.most_common(most)
        return [first, *(f"  {seconds:5.1f} s  {name}" for name, seconds in dearest)]
