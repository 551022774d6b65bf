"""Experts of all families of transformers over ranks: see `experts_families_program.py`."""

from __future__ import annotations

import re

import pytest

from models.mixtures import REFUSED, UNTRIED, marked
from places import ROOT
from rank_runs import needs_gloo, run

transformers = pytest.importorskip("transformers", minversion="5.23")
PROGRAM = "experts_families_program.py"
GROUPS = 8
#: The newest version whose families were run.
TRIED = (5, 24)


@needs_gloo
@pytest.mark.more
def test_families_that_are_refused(tmp_path) -> None:
    run(2, tmp_path / "store", "refused", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_marked_family(group, world, tmp_path) -> None:
    names = [name for name in marked() if name not in {*UNTRIED, *REFUSED}][group::GROUPS]
    run(world, tmp_path / "store", f"marked={','.join(names)}", program=PROGRAM)


def test_the_guide_names_every_marked_family() -> None:
    page = (ROOT / "docs" / "guides" / "expert-parallel.md").read_text()
    section = page.split("## Families of transformers")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)`", section.split("| refused")[0]))
    known = {name for name in marked() if name not in {*UNTRIED, *REFUSED}}
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if version > TRIED and known - told:  # no fault of the tree: a release that came after it
        pytest.skip(f"families of transformers {version} that nobody ran: {sorted(known - told)}")
    assert known <= told and (version < TRIED or told <= known)
