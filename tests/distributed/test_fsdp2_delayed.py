"""FSDP2 under delayed scaling, bit for bit: see `fsdp2_delayed_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "fsdp2_delayed_program.py"


def test_every_recipe(tmp_path) -> None:
    run(2, tmp_path / "store", "matrix=some", program=PROGRAM)


def test_policies_and_updates(tmp_path) -> None:
    names = ("policies", "microbatches", "told_by_nobody", "update_before_backward", "not_finite")
    run(2, tmp_path / "store", *names, "loaded", "wire", program=PROGRAM)


@pytest.mark.slow
def test_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "hsdp", "few=uneven", program=PROGRAM)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_recipe_in_every_alignment(world, tmp_path) -> None:
    run(world, tmp_path / "store", "matrix", program=PROGRAM, timeout=900)
