"""Gradients of DDP and FSDP2 by quantized messages: see `reduced_gradients_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo


def test_ddp_is_the_same_by_hand(tmp_path) -> None:
    names = ("ddp", "ddp_memory", "ddp_plain", "overflows", "models_in_turn")
    run(2, tmp_path / "store", *names, program="reduced_gradients_program.py")


def test_fsdp2_is_the_same_by_hand(tmp_path) -> None:
    names = ("fsdp", "branches", "fsdp_plain", "refused")
    run(2, tmp_path / "store", *names, program="reduced_gradients_program.py")


@pytest.mark.more
def test_four_ranks_are_the_same_by_hand(tmp_path) -> None:
    names = ("ddp", "fsdp", "zero_plus_plus", "refused")
    run(4, tmp_path / "store", *names, program="reduced_gradients_program.py")
