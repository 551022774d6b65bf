"""Quantized sums of sequence parallelism: see `token_sums_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "token_sums_program.py"


def test_two_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "sums", "messages", "refused", program=PROGRAM)


@pytest.mark.slow
def test_graphs_and_four_ranks(tmp_path) -> None:
    run(2, tmp_path / "store", "compiled", program=PROGRAM)
    run(4, tmp_path / "four", "sums", "messages", program=PROGRAM)
