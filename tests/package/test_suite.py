"""The suite itself: where files lie, what no test does, and which tests the default suite takes."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from places import ROOT, TESTS
from suite_time import SuiteTime
from thinning import chosen, spread

#: Folders that have no like in src/hybridq.
OWN = {"benchmarks", "csrc", "emulation", "fuzz", "gpu", "models", "mutants", "package"}
FILES = sorted(TESTS.rglob("*.py"))
#: The fuzzer breaks itself on purpose: a hang is what its runner must notice.
MAY_SLEEP = {"fuzz/runner.py"}


def test_folders_mirror_the_package() -> None:
    package = ROOT / "src" / "hybridq"
    for file in FILES:
        if not file.name.startswith("test_"):
            continue
        folder = file.parent.relative_to(TESTS)
        has_like = folder.parts and (package / folder / "__init__.py").is_file()
        assert has_like or str(folder) in OWN, f"{file.name} must lie in a folder that mirrors src"


def test_no_two_files_have_the_same_name() -> None:
    """They are modules without a package, the tests and what they import alike."""
    loose = [file for file in FILES if not (file.parent / "__init__.py").exists()]
    names = Counter(file.name for file in loose if file.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("file", ["Makefile", ".ci/run", "CONTRIBUTING.md", "pyproject.toml"])
def test_named_files_are_there(file: str) -> None:
    """pytest runs no test at all if one of the files that it is given has been moved."""
    roots = "tests|benchmarks|src|docs|csrc|cmake|examples"
    named = re.findall(rf"(?<![\w/.-])(?:{roots})/[\w/.-]*\.\w+", (ROOT / file).read_text())
    assert named or file in {".ci/run", "pyproject.toml"}
    assert not [name for name in named if not (ROOT / name).exists()]


def test_nothing_is_imported_from_a_test_and_nothing_sleeps() -> None:
    wrong = []
    for file in FILES:
        text, name = file.read_text(), str(file.relative_to(TESTS))
        for module in re.findall(r"^ *(?:from|import) +(test_\w+)", text, re.M):
            wrong.append(f"{name} imports {module}: move what is shared to tests/helpers")
        if "sleep" in text and name not in MAY_SLEEP:
            lines = [
                node.lineno
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Attribute) and node.attr == "sleep"
            ]
            wrong += [f"{name}:{line}: wait for what happens, never for a clock" for line in lines]
    assert wrong == []


@pytest.mark.parametrize("strength", [1, 2])
def test_chosen_cases_have_every_value_or_pair(strength: int) -> None:
    axes = {"a": range(5), "b": "xyz", "c": [None, {}]}
    cases = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    few = chosen(cases, strength)
    assert few == sorted(set(few)) and len(few) < len(cases) * (0.4 if strength == 1 else 0.8)
    for names in itertools.combinations(axes, strength):
        wanted = {repr([case[name] for name in names]) for case in cases}
        assert {repr([cases[index][name] for name in names]) for index in few} == wanted


def test_chosen_cases_of_one_parameter_and_of_none() -> None:
    assert chosen([{"a": 1}, {"a": 2}], 2) == [0, 1]
    assert chosen([], 1) == []
    with pytest.raises(ValueError, match="strength must be 1 or 2, got 3"):
        chosen([{"a": 1}], 3)


def test_few_of_the_chosen_are_spread() -> None:
    assert spread([1, 4, 6, 9, 11], 2) == [1, 6]
    assert spread([1, 4], 3) == spread([1, 4], None) == [1, 4]
    with pytest.raises(ValueError, match="few must be at least 1, got 0"):
        spread([1], 0)


def test_the_dearest_default_tests_are_named() -> None:
    """Phases of a test are summed, and what its marker leaves out is not counted."""
    spent = SuiteTime()
    for name, seconds, marker in (("a", 1, ""), ("b", 2, ""), ("a", 2, ""), ("c", 9, "more")):
        spent.add(SimpleNamespace(nodeid=name, duration=seconds, keywords={marker: 1}))
    said = spent.lines(most=1)
    assert said[0].startswith("2 default tests took 5 s together")
    assert said[1:] == ["    3.0 s  a"]
