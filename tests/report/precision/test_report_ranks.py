"""report and advise on several ranks: see `report_program.py` for what each rank runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo


@pytest.mark.slow
def test_ranks_report_and_advise_together(tmp_path: Path) -> None:
    names = ("sums", "bad", "fails", "advice", "experts")
    run(2, tmp_path / "store", *names, program="report_program.py")
