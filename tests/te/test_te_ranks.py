"""Scripts of several ranks: see `te_fsdp2_program.py` and `te_operations_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run


@pytest.mark.more
@needs_gloo
def test_a_script_with_fsdp2_trains_as_replicas_do(tmp_path) -> None:
    run(2, tmp_path / "store", "script", program="te_fsdp2_program.py")


@pytest.mark.more
@needs_gloo
def test_operations_exchange_what_ranks_have(tmp_path) -> None:
    run(2, tmp_path / "store", "parts", program="te_operations_program.py")
