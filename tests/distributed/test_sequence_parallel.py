"""Sequences that ranks share, against one process: see `sequence_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "sequence_program.py"


def test_two_ranks_are_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "masks", "recipes", "cross", "helper", "formats", program=PROGRAM)


def test_ranks_that_disagree(tmp_path) -> None:
    run(2, tmp_path / "store", "faults", "meshes", program=PROGRAM)


def test_a_rank_that_is_gone_ends_those_that_share_its_sequences(tmp_path) -> None:
    run(2, tmp_path / "store", "dies", program=PROGRAM, leaves=1)


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path) -> None:
    names = ("masks", "recipes", "cross", "helper", "faults", "demo")
    run(4, tmp_path / "store", *names, program=PROGRAM)
