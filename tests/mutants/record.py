"""What a mutant is, and where its text stands."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = "docs/reference/numerics.md"


@dataclass(frozen=True)
class Rule:
    """A rule of a page: the heading that it stands under, and words quoted from it."""

    section: str
    text: str
    page: str = PAGE


@dataclass(frozen=True)
class Mutant:
    """One edit that breaks one rule.

    Args:
        layer: `reference`, `core`, `ops`, `gemm` or `modules`.
        slug: what is broken and how, in a few words; unique within the layer.
        rule: the broken rule.
        file: the edited file, from the root of the tree.
        old: exact text, which stands in the file once.
        new: what replaces it.
        tests: that are run until one fails, as pytest names them.
        needs: what the machine must have for the edit to change anything: nothing, `"bf16"`
            (BF16 instructions) or `"x86_64"`.
    """

    layer: str
    slug: str
    rule: Rule
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str = ""

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.slug}"

    @property
    def keyword(self) -> str:
        """pytest's -k: tests of one backend leave out the other one's."""
        return {"reference": "reference", "core": "not reference"}.get(self.layer, "")

    @property
    def is_compiled(self) -> bool:
        return self.file.startswith("csrc/")


def occurrences(mutant: Mutant, root: Path = ROOT) -> int:
    """How often the mutant's old text stands in its file under `root`."""
    path = root / mutant.file
    return path.read_text().count(mutant.old) if path.is_file() else 0


def sections(page: str) -> dict[str, str]:
    """Text by heading, white space folded, of a Markdown page."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.M)
    return {
        head: " ".join(body.split()) for head, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def of_core(
    slug: str,
    rule: Rule,
    file: str,
    old: str,
    new: str,
    tests: tuple[str, ...],
    needs: str = "",
) -> Mutant:
    """Return a mutant of the C++ core; `file` is below `csrc`."""
    return Mutant("core", slug, rule, f"csrc/{file}", old, new, tests, needs)
