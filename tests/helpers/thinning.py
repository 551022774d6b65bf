"""Which tests of a large product of parameters are default ones: `@pytest.mark.thinned(strength)`.

Of a test so marked the default suite runs a few that together have every value of every parameter
(strength 1), or every pair of values of any two parameters (strength 2). All others get the marker
`more`, or that which the test names: `thinned(strength, "slow")`. With `few=n` no more than n of
those that were chosen are default ones, evenly spread: for tests that take long, or whose one
parameter has many values. Nothing is drawn: the same tests are chosen in every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

__all__ = ["chosen", "spread", "thin"]


def chosen(cases: Sequence[Mapping[str, Any]], strength: int) -> list[int]:
    """Return the indices of some cases that have what all cases have, in the order of the cases.

    Args:
        cases: of each the values by parameter.
        strength: 1 for every value, 2 for every pair of values.
    """
    if strength not in (1, 2):
        raise ValueError(f"thinned: strength must be 1 or 2, got {strength!r}")
    parts = []
    for case in cases:
        # Texts, since values need not be hashable. An address in one tells objects apart, no more.
        values = sorted((name, repr(value)) for name, value in case.items())
        size = min(strength, len(values))
        parts.append(set(combinations(values, size)))
    seen: set[object] = set()
    taken: list[int] = []
    # Those that bring most come first: fewer are needed than in one pass.
    for least in range(max(map(len, parts), default=0), 0, -1):
        for index, part in enumerate(parts):
            if len(part - seen) >= least:
                seen |= part
                taken.append(index)
    return sorted(taken)


def spread(indices: Sequence[int], few: int | None) -> list[int]:
    """Return at most so many of some indices, evenly spread; all, if few is None.

    Args:
        indices: in order.
        few: at least 1.
    """
    if few is not None and few < 1:
        raise ValueError(f"thinned: few must be at least 1, got {few!r}")
    if few is None or few >= len(indices):
        return list(indices)
    return [indices[place * len(indices) // few] for place in range(few)]


def thin(items: Sequence[pytest.Item]) -> None:
    """Mark as `more`, or as is asked, what of every `thinned` test is not chosen."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        left_out = any(item.get_closest_marker(name) for name in ("more", "slow"))
        if item.get_closest_marker("thinned") and not left_out:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in functions.values():
        marker = group[0].get_closest_marker("thinned")
        cases = [getattr(item, "callspec").params for item in group]  # noqa: B009
        strength, rest = (*marker.args, "more")[:2]
        kept = set(spread(chosen(cases, strength), marker.kwargs.get("few")))
        for index, item in enumerate(group):
            if index not in kept:
                item.add_marker(rest)
