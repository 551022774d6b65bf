"""Tensor parallelism x FSDP2 on meshes of two dimensions: see `mesh_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "mesh_program.py"


def test_planes_of_two_tensor_parallel_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "planes=2,halves", "refused", "written", program=PROGRAM)


@pytest.mark.slow
def test_planes_of_two_by_two_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "planes=2,aligned,halves,cut", program=PROGRAM)
    run(2, tmp_path / "two", "planes=1,cut", program=PROGRAM)


@pytest.mark.more
def test_values_of_two_by_two_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "values=2,aligned,halves,cut", program=PROGRAM)


@pytest.mark.more
def test_the_demos_weights_on_two_by_two_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "demo", program=PROGRAM)


@pytest.mark.slow
def test_replicas_recomputation_and_checkpoints_on_two_by_two_ranks(tmp_path) -> None:
    names = ("replicas", "recomputed", f"checkpoints={tmp_path / 'saved'},2,4,1")
    run(4, tmp_path / "store", *names, program=PROGRAM)
