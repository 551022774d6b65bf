"""calibrate on several ranks: see `calibrate_program.py` for what each rank runs."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "calibrate_program.py"


def folder(tmp_path) -> str:
    made = tmp_path / "out"
    made.mkdir()
    return str(made)


def test_two_ranks_with_other_starved_experts(tmp_path) -> None:
    names = (f"starved={folder(tmp_path)}", "split", "clips", "numpy_clips", "sharded")
    run(2, tmp_path / "store", *names, program=PROGRAM)


@pytest.mark.slow
def test_four_ranks_with_other_starved_experts(tmp_path) -> None:
    names = (f"starved={folder(tmp_path)}", "split", "clips", "numpy_clips")
    run(4, tmp_path / "store", *names, program=PROGRAM)


def test_ranks_that_differ_or_fail(tmp_path) -> None:
    run(2, tmp_path / "store", f"differ={folder(tmp_path)}", program=PROGRAM)


def test_a_rank_that_dies(tmp_path) -> None:
    run(2, tmp_path / "store", f"dies={folder(tmp_path)}", program=PROGRAM, leaves=1)


def test_parts_of_modules_on_two_ranks(tmp_path) -> None:
    names = ("plan", "tokens", "groups", "served", "changed")
    run(2, tmp_path / "store", *names, program="calibrate_parts_program.py")
