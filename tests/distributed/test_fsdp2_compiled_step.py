"""FSDP2 of weights that compiled code updates: see `fsdp2_compiled_step_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

pytestmark = needs_gloo


@pytest.mark.parametrize("name", ["of_optimizer", "of_each", "of_quantized"])
def test_a_compiled_step(tmp_path, name) -> None:
    names = (f"{name}={recipe}" for recipe in ("mxfp8", "nvfp4"))
    run(2, tmp_path / "store", *names, program="fsdp2_compiled_step_program.py")
