"""Delayed scaling of experts over ranks: see `experts_history_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo
PROGRAM = "experts_history_program.py"


def test_histories_are_those_of_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "recorded=all", "kept", f"save={tmp_path}", program=PROGRAM)
    run(1, tmp_path / "one", f"resume={tmp_path},plain", program=PROGRAM)


@pytest.mark.more
def test_histories_go_on_with_other_numbers_of_ranks(tmp_path) -> None:
    run(2, tmp_path / "two", f"save={tmp_path}", program=PROGRAM)
    kinds = [f"resume={tmp_path},{kind}" for kind in ("all", "pairs")]
    run(4, tmp_path / "four", "recorded=all", "recorded=pairs", "unknown", *kinds, program=PROGRAM)
    run(1, tmp_path / "one", f"resume={tmp_path},all", program=PROGRAM)


@pytest.mark.more
def test_histories_under_fsdp2(tmp_path) -> None:
    run(4, tmp_path / "store", "sharded", program=PROGRAM)


@pytest.mark.more
def test_what_one_process_saved_goes_on_over_ranks(tmp_path) -> None:
    run(1, tmp_path / "one", f"save={tmp_path}", program=PROGRAM)
    run(2, tmp_path / "two", f"resume={tmp_path},all", program=PROGRAM)
