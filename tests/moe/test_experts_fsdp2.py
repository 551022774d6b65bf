"""FSDP2 of converted experts, bit for bit: see `fsdp2_experts_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

PROGRAM = "fsdp2_experts_program.py"


@needs_gloo
def test_experts_travel_as_planes_in_either_orientation(tmp_path) -> None:
    run(2, tmp_path / "store", "recipes", program=PROGRAM)


@needs_gloo
def test_quantized_experts_and_embeddings_stay_so_in_shards(tmp_path) -> None:
    names = ("recipes=nvfp4", "wire", f"stored={tmp_path / 'checkpoint'}")
    run(2, tmp_path / "store", *names, program="fsdp2_held_experts_program.py")


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_recipe_of_quantized_experts(world, tmp_path) -> None:
    run(world, tmp_path / "store", "recipes", program="fsdp2_held_experts_program.py")


@needs_gloo
@pytest.mark.slow
def test_more_recipes_and_ranks(tmp_path) -> None:
    run(3, tmp_path / "store", "more", program=PROGRAM)
