"""Experts over the ranks of tensor parallelism: see `experts_folding_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "experts_folding_program.py"
PLACED = "experts_placed_program.py"


NAMES = ("replicated=one", "sequence=one", "quantized=one", "shares", "faults")


def test_two_ranks_of_both(tmp_path) -> None:
    run(2, tmp_path / "store", *NAMES, program=PROGRAM)


@pytest.mark.slow
def test_four_ranks(tmp_path) -> None:
    kinds = "one,tp,dp,all"
    names = (f"replicated={kinds}", f"sequence={kinds}", "quantized=one", "shares", "faults")
    run(4, tmp_path / "store", *names, program=PROGRAM)


def test_tokens_that_are_dtensors(tmp_path) -> None:
    names = ("results=one", "quantized=one", "sorted_rows", "faults")
    run(2, tmp_path / "store", *names, program=PLACED)


@pytest.mark.slow
def test_tokens_that_are_dtensors_in_one_graph(tmp_path) -> None:
    run(2, tmp_path / "store", "graphs", program=PLACED)


@pytest.mark.slow
def test_one_graph_for_all_numbers_of_tokens(tmp_path) -> None:
    run(2, tmp_path / "store", "sizes", program=PLACED, timeout=600)


@pytest.mark.slow
def test_tokens_that_are_dtensors_on_four_ranks(tmp_path) -> None:
    names = ("results=one,tp,dp,all", "quantized=one,all", "sorted_rows", "faults")
    run(4, tmp_path / "store", *names, program=PLACED)
