"""FSDP2 of weights that are gathered as values, bit for bit: see `fsdp2_foreign_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

PROGRAM = "fsdp2_foreign_program.py"


@needs_gloo
def test_weights_in_other_shapes_are_gathered_as_values(tmp_path) -> None:
    run(2, tmp_path / "store", "train=mxfp8", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_other_recipes(tmp_path, recipe) -> None:
    run(2, tmp_path / "store", f"train={recipe}", program=PROGRAM)


@needs_gloo
@pytest.mark.more
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fwd_nvfp4_bwd"])
def test_blocks_heads_and_shared_experts_of_transformers(tmp_path, recipe) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    run(2, tmp_path / "store", f"train={recipe}", program="fsdp2_blocks_program.py")
