"""Models of transformers whose sequences ranks share: see `sequence_hf_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytest.importorskip("transformers", minversion="5.23")
pytestmark = needs_gloo
PROGRAM = "sequence_hf_program.py"
MORE = (
    *("models", "recipes", "hybrids", "masks", "others", "recomputed", "communication"),
    *("images", "images_quantized"),
)


def test_two_ranks_are_one_process(tmp_path) -> None:
    names = ("models=llama, one head of keys+gemma4", "recipes=llama", "masks=gemma3", "faults")
    names = (*names, "hybrids=llama")
    run(2, tmp_path / "store", *names, program=PROGRAM)


def test_two_ranks_share_images_and_audio(tmp_path) -> None:
    run(2, tmp_path / "store", "images=gemma4", program=PROGRAM)


@pytest.mark.more
def test_two_ranks_share_images_and_parameters(tmp_path) -> None:
    run(2, tmp_path / "store", "images_sharded", program=PROGRAM)


@pytest.mark.slow
def test_two_ranks_more(tmp_path) -> None:
    run(2, tmp_path / "store", *MORE, program=PROGRAM)


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path) -> None:
    run(4, tmp_path / "store", *MORE, "faults", program=PROGRAM)
