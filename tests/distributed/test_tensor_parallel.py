"""Linear modules over ranks by torch's own plans: see `tensor_parallel_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "tensor_parallel_program.py"


def test_two_ranks(tmp_path) -> None:
    run(
        2,
        tmp_path / "store",
        "matrix=cut",
        "planes",
        "styles",
        "tokens",
        "optimizers",
        "written",
        "refused",
        program=PROGRAM,
    )


@pytest.mark.slow
def test_aligned_parts_and_other_numbers_of_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "matrix=aligned", "tokens=all", program=PROGRAM)
    run(3, tmp_path / "three", "matrix=cut,aligned", "planes", program=PROGRAM)
    run(4, tmp_path / "four", "matrix=cut", "planes", "styles", program=PROGRAM)


@pytest.mark.more
def test_graphs_have_gathers_of_planes_beside_products(tmp_path) -> None:
    run(2, tmp_path / "store", "graphs", program=PROGRAM)


@pytest.mark.slow
def test_compiled(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", program=PROGRAM)


MODULES = "parallel_modules_program.py"


def test_arguments_of_modules(tmp_path) -> None:
    run(2, tmp_path / "store", "traffic", "modules=column,row,mlp", "arguments", program=MODULES)


@pytest.mark.slow
def test_more_modules(tmp_path) -> None:
    run(2, tmp_path / "store", "modules=norm,layer", "compiled", program=MODULES)
    run(4, tmp_path / "four", "modules=column,row,mlp,layer", program=MODULES)


QUANTIZED = "parallel_quantized_program.py"


def test_quantized_weights(tmp_path) -> None:
    names = ("modules=column,mlp", "initial", "other_recipes", "styles", "refused", "sharded")
    run(2, tmp_path / "store", *names, program=QUANTIZED)


@pytest.mark.slow
def test_more_quantized_weights(tmp_path) -> None:
    run(2, tmp_path / "store", "modules=row,layer", "compiled", program=QUANTIZED)
    run(4, tmp_path / "four", "modules=column,row,mlp,layer", "styles", program=QUANTIZED)


FAULTS = "parallel_faults_program.py"


def test_ranks_that_differ_are_told_apart(tmp_path) -> None:
    run(
        3, tmp_path / "store", "compared", "at_first_use", "many_lengths", "changes", program=FAULTS
    )


@pytest.mark.thinned(1, "slow", few=1)
@pytest.mark.parametrize("name", ["dies=forward", "dies=backward", "stalls=forward"])
def test_a_rank_that_is_gone_ends_the_others(name, tmp_path) -> None:
    run(3, tmp_path / "store", name, program=FAULTS, leaves=1)


@pytest.mark.more
def test_a_rank_that_alone_goes_back_to_a_recipe_is_noticed(tmp_path) -> None:
    run(3, tmp_path / "store", "goes_back", program=FAULTS)


def test_parts_under_fsdp2(tmp_path) -> None:
    names = ("amaxes", "own_tokens", "remade")
    run(4, tmp_path / "store", *names, program="parallel_fsdp2_program.py")
