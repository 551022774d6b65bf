"""Models of transformers by their `tp_plan`: see `tensor_parallel_hf_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytest.importorskip("transformers", minversion="5.23")
pytestmark = needs_gloo
PROGRAM = "tensor_parallel_hf_program.py"


def test_two_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "plans=llama,gemma3", "refused", program=PROGRAM)


@pytest.mark.more
def test_norms_of_heads(tmp_path) -> None:
    run(2, tmp_path / "store", "plans=qwen3", program=PROGRAM)


@pytest.mark.slow
def test_packed_projections_experts_and_what_is_saved(tmp_path) -> None:
    run(2, tmp_path / "store", "plans=phi3", "experts", "saved", program=PROGRAM)


@pytest.mark.slow
def test_four_ranks_and_uneven_parts(tmp_path) -> None:
    run(4, tmp_path / "store", "plans=llama,qwen3", program=PROGRAM)
