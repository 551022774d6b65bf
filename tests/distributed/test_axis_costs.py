"""Collectives, bytes and encodes of a step on every axis: see `costs_program.py`."""

from __future__ import annotations

import json
import sys

import pytest

from places import BENCHMARKS
from rank_runs import needs_gloo, run

sys.path.insert(0, str(BENCHMARKS))

import axes_table

pytest.importorskip("transformers")
PROGRAM = "costs_program.py"
FILE = max((BENCHMARKS / "results").glob("axes-*.json"))


@pytest.mark.more
@needs_gloo
def test_a_step_of_two_ranks_costs_what_its_axis_needs(tmp_path) -> None:
    run(2, tmp_path / "store", "some=2", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_guides_tables_are_what_is_counted(world, tmp_path) -> None:
    run(world, tmp_path / "store", f"kept={FILE}", program=PROGRAM)


def test_the_guide_has_the_tables_of_the_file_that_is_kept() -> None:
    page = axes_table.GUIDE.read_text()
    made = axes_table.tables(json.loads(FILE.read_text())["measured"])
    assert made in page and axes_table.replaced(page, made) == page
