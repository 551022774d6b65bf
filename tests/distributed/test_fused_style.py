"""Fused modules over ranks: see `fused_style_program.py` and `fused_sums_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "fused_style_program.py"


def test_fused_modules_on_two_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "modules=layer", "decoder", "apart", "refused", program=PROGRAM)


@pytest.mark.slow
def test_more_fused_modules(tmp_path) -> None:
    run(2, tmp_path / "store", "modules=norm,mlp,attention,interleaved", program=PROGRAM)


@pytest.mark.more
def test_graphs_have_the_shape_that_torch_would_pipeline(tmp_path) -> None:
    run(2, tmp_path / "store", "pipelined", program=PROGRAM)


@pytest.mark.more
def test_products_and_gradients_within_the_bounds_of_their_sums(tmp_path) -> None:
    names = "products=norm,mlp,attention,layer,interleaved"
    run(2, tmp_path / "store", names, program="fused_sums_program.py")


@pytest.mark.slow
def test_products_on_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "products=mlp,layer", program="fused_sums_program.py")


@pytest.mark.slow
def test_fused_modules_on_four_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "modules=layer", "decoder", "apart", "refused", program=PROGRAM)


@pytest.mark.slow
def test_a_compiled_layer(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", program=PROGRAM)
