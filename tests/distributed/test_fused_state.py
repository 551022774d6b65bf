"""Parameters of fused modules over ranks: see `fused_state_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "fused_state_program.py"
ALL = "norm,mlp,attention,layer,interleaved"


def test_planes_of_parts(tmp_path) -> None:
    run(2, tmp_path / "store", "planes=mlp,attention", program=PROGRAM)


@pytest.mark.more
def test_planes_and_values_of_all_modules(tmp_path) -> None:
    run(2, tmp_path / "store", f"planes={ALL}", f"whole_values={ALL}", program=PROGRAM)
    run(4, tmp_path / "four", f"whole_values={ALL}", program=PROGRAM)


@pytest.mark.slow
def test_checkpoints_between_numbers_of_ranks(tmp_path) -> None:
    """From two ranks to four, to one process, under FSDP2 in two ways, and back."""
    names = f"checkpoints={tmp_path / 'saved'},layer,2,4,0,2f,2p,1,2"
    run(4, tmp_path / "store", names, program=PROGRAM)


@pytest.mark.slow
def test_fsdp2_and_replicas_on_two_by_two_ranks(tmp_path) -> None:
    names = ("fsdp2=mlp,layer,interleaved", f"gathered={ALL}", "replicas=layer")
    run(4, tmp_path / "store", *names, program=PROGRAM)
