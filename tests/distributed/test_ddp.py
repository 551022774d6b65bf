"""DDP, and FSDP of flat parameters, against one process, bit for bit: see `ddp_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_two_ranks_are_one_process(tmp_path) -> None:
    names = ("recipes", "policies", "quantized", "main_grad", "differ")
    run(2, tmp_path / "store", *names, program="ddp_program.py")


@pytest.mark.more
def test_flat_parameters_of_two_ranks_are_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "flat_parameters", program="ddp_program.py")


@pytest.mark.slow
def test_four_ranks_are_one_process(tmp_path) -> None:
    run(4, tmp_path / "store", "recipes", program="ddp_program.py")
