"""FSDP2 over all kinds of modules and pairs of formats, bit for bit: see the two programs."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_tied_fused_and_grouped_modules(tmp_path) -> None:
    names = ("tied", "fused", "transformer", "grouped")
    run(2, tmp_path / "store", *names, program="fsdp2_modules_program.py")


def test_wrappers_around_prepared_modules(tmp_path) -> None:
    run(2, tmp_path / "store", "wrapped", program="fsdp2_modules_program.py")


@pytest.mark.slow
def test_four_ranks(tmp_path) -> None:
    names = ("tied", "fused", "transformer", "grouped", "split_groups")
    run(4, tmp_path / "store", *names, program="fsdp2_modules_program.py")


@pytest.mark.slow
def test_compiled_blocks(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", program="fsdp2_modules_program.py")


@pytest.mark.slow
def test_compiled_blocks_that_were_gathered_for_another_recipe(tmp_path) -> None:
    names = ("compiled_early", "compiled_inner_recipe")
    run(2, tmp_path / "store", *names, program="fsdp2_modules_program.py")


@pytest.mark.slow
def test_every_format(tmp_path) -> None:
    run(2, tmp_path / "store", "uniform", program="fsdp2_pairs_program.py")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["even", "misaligned", "uneven"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_pair_of_formats(world, what, tmp_path) -> None:
    run(world, tmp_path / "store", what, program="fsdp2_pairs_program.py", timeout=1200)
