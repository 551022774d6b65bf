"""Sharded models, exported by all ranks, byte for byte: see `export_program.py`."""

from __future__ import annotations

import pytest

from rank_runs import needs_gloo, run

PROGRAM = "export_program.py"


@needs_gloo
def test_files_are_those_of_one_process(tmp_path) -> None:
    names = ("fsdp2", "quantized", "tensor_parallel", "one_at_a_time", "refused", "resumed")
    given = [f"{name}={tmp_path}" for name in names]
    run(2, tmp_path / "store", *given, program=PROGRAM)


@needs_gloo
def test_a_rank_that_dies_is_an_error_and_the_export_goes_on(tmp_path) -> None:
    run(2, tmp_path / "store", f"dies={tmp_path}", program=PROGRAM, leaves=1)


@needs_gloo
@pytest.mark.more
def test_experts_are_never_all_gathered(tmp_path) -> None:
    pytest.importorskip("transformers")
    given = [f"{name}={tmp_path}" for name in ("mixture", "quantized_stacks")]
    run(2, tmp_path / "store", *given, program=PROGRAM)


@needs_gloo
@pytest.mark.more
def test_tensor_parallel_parts_in_shards(tmp_path) -> None:
    given = [f"{name}={tmp_path}" for name in ("tensor_parallel", "quantized")]
    run(4, tmp_path / "store", *given, program=PROGRAM)
