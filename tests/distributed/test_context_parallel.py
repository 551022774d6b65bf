"""torch's ring attention over ranks, against one process: see `context_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "context_program.py"


def test_two_ranks_in_a_ring_are_one_process(tmp_path) -> None:
    names = ("modules", "torch_modules", "buffers", "recipes", "hybrid", "faults")
    run(2, tmp_path / "store", *names, program=PROGRAM)


def test_two_ranks_in_a_ring_run_transformers(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    run(2, tmp_path / "store", "transformers_models", program=PROGRAM)


def test_a_rank_of_a_ring_that_is_gone_ends_the_others(tmp_path) -> None:
    run(3, tmp_path / "store", "dies", program=PROGRAM, leaves=1)


@pytest.mark.slow
def test_four_ranks_in_a_ring_are_one_process(tmp_path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    names = ("modules", "recipes", "hybrid", "faults", "transformers_models")
    run(4, tmp_path / "store", *names, program=PROGRAM)
