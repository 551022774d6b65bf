"""FSDP2 of converted experts, bit for bit: see `fsdp2_experts_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

PROGRAM = "fsdp2_experts_program.py"


@needs_gloo
def test_experts_travel_as_planes_in_either_orientation(tmp_path) -> None:
    run(2, tmp_path / "store", "recipes", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_more_recipes_and_ranks(tmp_path) -> None:
    run(3, tmp_path / "store", "more", program=PROGRAM)
