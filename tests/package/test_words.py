"""Words that this project does not use: the field has a better one.

A word is retired by one line in `RETIRED`, once nothing has it any more. Released names stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from places import ROOT

EVERYWHERE = (
    *("src", "csrc", "docs", "tests", "benchmarks"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
)
PROSE = ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SUFFIXES = (".py", ".h", ".cpp", ".cu", ".cuh", ".md")


@dataclass(frozen=True)
class Retired:
    """A retired word.

    Args:
        pattern: regular expression; white space in it stands for any, a line's end included.
        instead: what to write.
        within: the folders and files that are clean of it.
        but: paths below these that are not clean yet.
    """

    pattern: str
    instead: str
    within: tuple[str, ...] = EVERYWHERE
    but: tuple[str, ...] = ()

    @property
    def parts(self) -> list[str]:
        """Letters of the pattern, of which every match has some: to look for them is fast."""
        return re.findall(r"[A-Za-z]{3,}(?!\?)", re.sub(r"\[.*?\]|\\.", " ", self.pattern))

    def lines(self, text: str) -> list[int]:
        """Return the numbers of the lines in which the word begins."""
        if not any(part in text for part in self.parts):
            return []
        pattern = self.pattern.replace(" ", r"[\s/#>*]+")
        return [text.count("\n", 0, one.start()) + 1 for one in re.finditer(pattern, text)]


RANKS = (
    *(
        "src/hybridq/distributed",
        "src/hybridq/shards",
        "src/hybridq/estimate",
        "tests/distributed",
        "tests/ranks",
        "tests/fuzz/over_ranks.py",
        "tests/mutants/over_ranks.py",
        "tests/shards",
    ),
    "tests/helpers/distributed",
)

RETIRED = (
    Retired(r"[Aa]maxima", "amaxes"),
    Retired(r"\b[Mm]axima\b", "amaxes, or largest values", but=RANKS),
    Retired(r"\b[Tt]exts\b", "strings, spec strings", PROSE),
    Retired(r"(?:\b|_)[Tt]urned(?:\b|_)", "rotated, transposed, transformed, negated, converted"),
    Retired(r"\b[Ff]ew rows\b", "skinny GEMM, small M", PROSE),
    Retired(r"\b[Ss]hort way\b", "fast path"),
    Retired(r"\b(?:[Ll]ong|[Gg]eneral) way\b", "general path"),
    Retired(r"\b[Kk]ept(?: |_)weights?\b|_kept_weights?|KeptWeight", "cached weight"),
    Retired(r"\b[Ww]ithout a word\b", "silently"),
    Retired(r"\bwithout a say\b", "contributes the neutral element"),
    Retired(r"\bnone is as good as any\b", "n may be 0"),
    Retired(r"\b[Tt]he peer\b(?!-)", "Transformer Engine, or the implementation's name"),
    Retired(r"\b[Nn]othing watches\b", "the dispatcher may be bypassed"),
    Retired(r"\bnothing_watches\b", "can_bypass_dispatcher"),
    Retired(r"\bWish\b", "ExpectedRecipe"),
    Retired(r"\bHeldParameter\b", "QuantizedShard"),
    Retired(r"GivenWeight", "PrequantizedWeight"),
    Retired(r"short_linear", "eager_forward"),
    Retired(r"\braises? (?:slot|entry|the amax|an amax)\b", "updates"),
)


@cache
def sources(folder: str) -> dict[str, str]:
    """The files below a folder, or one file, by path."""
    top = ROOT / folder
    files = [top] if top.is_file() else sorted(top.rglob("*"))
    return {
        str(file.relative_to(ROOT)): file.read_text()
        for file in files
        if file.suffix in SUFFIXES and file != Path(__file__)
    }


@pytest.mark.parametrize("word", RETIRED, ids=lambda word: word.instead.replace(" ", "-"))
def test_retired_words_are_not_used(word: Retired) -> None:
    found = [
        f"{path}:{line}: write {word.instead}"
        for folder in word.within
        for path, text in sources(folder).items()
        if not path.startswith(word.but)
        for line in word.lines(text)
    ]
    assert found == [], "\n".join(found)


def test_a_word_is_found_across_lines_and_comments() -> None:
    word = Retired(r"\bshort way\b", "fast path")
    assert word.lines("a\nthe short\n    # way of it") == [2]
    assert word.lines("a shorter way") == []
    assert Retired(r"(?:\b|_)[Tt]urned?(?:\b|_)", "").parts == ["urne"]
    assert all(word.parts for word in RETIRED)
