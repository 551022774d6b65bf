"""A monitor whose ranks are added up: see `monitor_program.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_runs import needs_gloo, run


@needs_gloo
@pytest.mark.slow
def test_two_ranks_of_fsdp2_are_one_record(tmp_path: Path) -> None:
    run(2, tmp_path / "store", "fsdp2", "other_steps", "experts", program="monitor_program.py")
