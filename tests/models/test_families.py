"""Models of transformers, converted: nothing changes without a recipe, and under one all runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

from models.columns import COLUMNS, NotThere
from models.families import DEFAULT, FAMILIES, Family

#: Many seconds for each family: of these alone outside the slow tests.
_LONG = {"compile": ("Llama",), "steps": DEFAULT}


def _cases() -> list[Any]:
    found = []
    for family in FAMILIES:
        for column in COLUMNS:
            if column in _LONG:
                marks = [pytest.mark.more if family.name in _LONG[column] else pytest.mark.slow]
            else:
                marks = [] if family.name in DEFAULT else [pytest.mark.more]
            found.append(pytest.param(family, column, id=f"{family.name}-{column}", marks=marks))
    return found


def test_there_are_enough_families() -> None:
    names = [family.name for family in FAMILIES]
    assert len(names) >= 40 and len(set(names)) == len(names)
    assert len(DEFAULT) >= 12 and set(DEFAULT) <= set(names)


@pytest.mark.thinned(1, few=30)
@pytest.mark.parametrize(("family", "column"), _cases())
def test_of_every_family(family: Family, column: str, tmp_path: Path) -> None:
    try:
        COLUMNS[column](family, tmp_path)
    except NotThere as reason:
        pytest.skip(str(reason))
