"""Every benchmark finds what it imports of the package, of which some is internal."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = sorted(one.stem for one in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_imported(name, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import_module(name)
