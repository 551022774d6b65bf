"""Experts over the ranks of each stage of a pipeline: see `experts_pipeline_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run


@needs_gloo
@pytest.mark.slow
def test_two_stages_of_two_ranks(tmp_path) -> None:
    names = ("schedules", "sharded")
    run(4, tmp_path / "store", *names, program="experts_pipeline_program.py")
