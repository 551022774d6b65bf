"""A switch over an enum class has a case for every value and no default, which would hide one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".h", ".cpp", ".cu"))


def body_at(text: str, start: int) -> str:
    """What stands between the braces that open after `start`, without nested switches."""
    begin = text.index("{", start)
    depth, end = 1, begin + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    own = text[begin + 1 : end - 1]
    inner = re.search(r"\bswitch \(", own)
    while inner:
        nested = body_at(own, inner.start())
        own = own[: inner.start()] + own[own.index(nested, inner.start()) + len(nested) :]
        inner = re.search(r"\bswitch \(", own)
    return own


def hidden_cases(text: str) -> list[str]:
    """The first label of every switch over an enum class that has a default."""
    text = re.sub(r"//.*", "", text)
    found = []
    for switch in re.finditer(r"\bswitch \(", text):
        body = body_at(text, switch.start())
        labels = re.findall(r"\bcase (\w+::\w+)", body)
        if labels and re.search(r"\bdefault:", body):
            found.append(labels[0])
    return found


def test_no_switch_over_an_enum_class_has_a_default() -> None:
    assert sum("switch (" in file.read_text() for file in FILES) > 5
    for file in FILES:
        assert not hidden_cases(file.read_text()), file


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("switch (a) { case A::kB: f(); default: g(); }", ["A::kB"]),
        ("switch (n) { case 1: switch (a) { case A::kB: f(); } default: g(); }", []),
        ("switch (a) { case A::kB: switch (n) { case 1: default: g(); } }  // default:", []),
    ],
)
def test_the_search_finds_a_default(text, found) -> None:
    assert hidden_cases(text) == found


def test_a_missing_case_is_an_error_of_the_build() -> None:
    for file in ("cpu.cmake", "cuda.cmake", "tests.cmake"):
        assert "-Werror=switch" in (ROOT / "cmake" / file).read_text(), file
