"""Tables: drawn once, by rich; their text needs no terminal, and no rich either."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from hybridq.report import Table

TABLE = Table("Two [b]words[/b]", ("a", "wide"), (("1", "[red]2"), ("three", ":one:")), ("a note",))
FACTS = Table("Facts", (), (("name", "value"), ("n", "v")))


def test_the_text_is_aligned_and_no_markup() -> None:
    assert str(TABLE).splitlines() == [
        *("Two [b]words[/b]", "  a      wide", "  1      [red]2", "  three  :one:", "  a note")
    ]
    assert str(FACTS).splitlines() == ["Facts", "  name  value", "  n     v"]
    assert str(Table("Nothing", (), ())) == "Nothing"


def test_the_text_needs_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("FORCE_COLOR", "1")
    row = ("x" * 300,)
    assert str(Table("Wide", ("head",), (row,))) == f"Wide\n  head\n  {row[0]}"


def test_a_terminal_folds_cells() -> None:
    file = io.StringIO()
    Console(file=file, width=20, color_system=None).print(
        Table("T", ("a", "b"), (("1", "x" * 30),))
    )
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 20 and sum(line.count("x") for line in lines) == 30


def test_without_rich_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert str(TABLE).splitlines() == [
        *("Two [b]words[/b]", "  a  wide", "  1  [red]2", "  three  :one:", "  a note")
    ]
    assert str(FACTS).splitlines() == ["Facts", "  name  value", "  n  v"]
