"""Weights pushed from FSDP2: see `rollout_program.py` for what each rank runs."""

from __future__ import annotations

from rank_runs import needs_gloo, run


@needs_gloo
def test_sharded_models_push_what_unsharded_ones_do(tmp_path) -> None:
    names = ("matrices", "travels", "ends_early", "quantized", "experts")
    run(2, tmp_path / "store", *names, program="rollout_program.py")
