"""Ranks of experts that are gone, or mean others: see `experts_faults_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "experts_faults_program.py"


def test_a_rank_that_dies_in_the_dispatch_ends_the_others(tmp_path) -> None:
    run(3, tmp_path / "store", "dies=forward", program=PROGRAM, leaves=2)


@pytest.mark.more
def test_a_rank_that_dies_in_the_backward_ends_the_others(tmp_path) -> None:
    run(3, tmp_path / "store", "dies=backward", program=PROGRAM, leaves=2)


@pytest.mark.more
def test_other_meshes_are_an_error_on_every_rank(tmp_path) -> None:
    run(2, tmp_path / "store", "meshes", program=PROGRAM)
