"""The list of mutants is up to date: `make mutants` itself takes too long for every run."""

from __future__ import annotations

import ast

import pytest

from mutants import ALL
from mutants.record import ROOT, Mutant, occurrences, sections
from mutants.run import choose, main

NAMES = [mutant.name for mutant in ALL]


@pytest.mark.parametrize("mutant", ALL, ids=NAMES)
def test_the_edit_fits_its_file(mutant: Mutant) -> None:
    """It applies at exactly one place, and what comes out of a Python file is still Python."""
    assert occurrences(mutant) == 1
    assert mutant.old != mutant.new
    if mutant.file.endswith(".py"):
        ast.parse((ROOT / mutant.file).read_text().replace(mutant.old, mutant.new))


def test_broken_rules_are_quoted_from_the_page() -> None:
    rules = {mutant.rule for mutant in ALL}
    text = {page: sections((ROOT / page).read_text()) for page in {rule.page for rule in rules}}
    for rule in rules:
        assert rule.text in text[rule.page].get(rule.section, ""), rule


def test_the_tests_that_a_mutant_names_exist() -> None:
    for test in {test for mutant in ALL for test in mutant.tests}:
        file, _, name = test.partition("::")
        function = name.partition("[")[0]
        assert not name or f"def {function}(" in (ROOT / file).read_text(), test


def test_rules_are_broken_in_every_place_where_they_live() -> None:
    assert len(set(NAMES)) == len(NAMES)
    layers: dict[str, set[str]] = {}
    for mutant in ALL:
        layers.setdefault(mutant.rule.text, set()).add(mutant.layer)
    assert sum({"reference", "core"} <= found for found in layers.values()) >= 10


def test_mutants_are_chosen_by_name_slug_or_layer(capsys: pytest.CaptureFixture[str]) -> None:
    both = choose("cast-ties-away, gemm")
    assert {m.name for m in both} >= {"reference.cast-ties-away", "core.cast-ties-away"}
    assert {m.layer for m in both} == {"reference", "core", "gemm"}
    assert choose("") == ALL
    with pytest.raises(SystemExit, match="must be names of mutants"):
        choose("core.no-such-mutant")
    assert main(["--only", "ops", "--list"]) == 0
    assert "ops.both-planes-draw-alike" in capsys.readouterr().out
