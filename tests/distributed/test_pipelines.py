"""Pipelines: as one process, what travels, histories, ranks that differ; `pipeline_program.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import hybridq
from hybridq.distributed import pipeline_stage
from hybridq.distributed.pipelines import PlanePayload
from hybridq.errors import SpecError
from hybridq.formats import PlaneSpec
from rank_runs import needs_gloo, run

PROGRAM, FAULTS = "pipeline_program.py", "pipeline_faults_program.py"


@needs_gloo
def test_schedules_have_the_losses_and_gradients_of_one_process(tmp_path) -> None:
    run(2, tmp_path / "store", "schedules", "taken", program=PROGRAM)


@needs_gloo
def test_bytes_and_encodes_of_a_step(tmp_path) -> None:
    run(2, tmp_path / "store", "counts", "planned", program=PROGRAM)


@needs_gloo
def test_histories_are_a_stages_own(tmp_path) -> None:
    run(2, tmp_path / "store", "delayed", program=PROGRAM)
    run(2, tmp_path / "again", "unlike", program=FAULTS)


@needs_gloo
def test_ranks_that_differ_are_told_so_on_every_rank(tmp_path) -> None:
    run(2, tmp_path / "store", "disagree", program=FAULTS)


@needs_gloo
def test_a_microbatch_of_another_shape_is_said(tmp_path) -> None:
    run(2, tmp_path / "store", "uneven", program=FAULTS)


@needs_gloo
@pytest.mark.more
def test_recipes_that_change_later_are_compared(tmp_path) -> None:
    run(2, tmp_path / "store", "later", program=FAULTS)


@needs_gloo
def test_a_stage_that_dies_ends_the_others(tmp_path) -> None:
    run(3, tmp_path / "store", "dies", program=FAULTS, leaves=2)


@needs_gloo
@pytest.mark.more
def test_other_formats_travel(tmp_path) -> None:
    run(2, tmp_path / "store", "formats", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_four_stages(tmp_path) -> None:
    run(
        4, tmp_path / "store", "schedules", "taken", "counts", "planned", "delayed", program=PROGRAM
    )


@needs_gloo
@pytest.mark.more
def test_stages_of_sharded_modules(tmp_path) -> None:
    run(4, tmp_path / "store", "grid", "tensor_parallel", program=PROGRAM)
    run(4, tmp_path / "again", "open_groups", program=FAULTS)


# ---- one process


@pytest.mark.parametrize("name", [*hybridq.formats.names(), "bf16"])
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 33), (1, 64)])
def test_a_payload_has_the_plane(name, shape) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        about = PlanePayload.of(PlaneSpec.parse(name), x)
        payload = about.encoded(x)
        assert payload.shape == (about.nbytes,) and payload.dtype == torch.uint8
        want = hybridq.quantize(x, name, None)
        assert torch.equal(about.decoded(payload), want.dequantize())
        taken = about.quantized(payload)
        assert taken.dtype == dtype and taken.shape == x.shape and taken.columnwise is None
        for mine, own in zip(taken.rowwise.tensors, want.rowwise.tensors, strict=True):
            assert torch.equal(mine.view(torch.uint8), own.contiguous().view(torch.uint8))


def test_what_is_no_matrix_travels_as_it_is() -> None:
    spec = PlaneSpec.parse("mxfp8")
    for x in (torch.ones(4), torch.ones(0, 4), torch.ones(2, 3, dtype=torch.int64)):
        assert PlanePayload.of(spec, x) is None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"communication": "nope"}, SpecError, "pipeline_stage: communication"),
        ({"communication": 3}, TypeError, "communication must be the name of a format"),
        ({"communication": ("mxfp8",)}, TypeError, "communication must be the name of a format"),
        ({"replicas": 3}, TypeError, "replicas must be a process group or a mesh, got int"),
        ({"keep_weights": 1}, TypeError, "keep_weights must be a bool, got int"),
        ({"takes_planes": "yes"}, TypeError, "takes_planes must be a bool, got str"),
    ],
)
@needs_gloo
def test_bad_arguments_are_refused(options, error, text, tmp_path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with pytest.raises(error, match=text):
            pipeline_stage(nn.Linear(2, 2), 0, 1, "cpu", **options)
        with pytest.raises(TypeError, match=r"module must be an nn.Module, got int"):
            pipeline_stage(3, 0, 1, "cpu")
        mesh = dist.init_device_mesh("cpu", (1,))
        sent = SimpleNamespace(tensor=DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()]))
        with pytest.raises(TypeError, match=r"must be plain tensors with torch .* to_local\(\)"):
            pipeline_stage(nn.Linear(2, 2), 0, 1, "cpu")._encoded([sent], True)
    finally:
        dist.destroy_process_group()


@needs_gloo
def test_a_torch_that_splits_backwards_wrongly_is_told_of(monkeypatch) -> None:
    from hybridq.distributed.pipelines import split_backward

    said: list[str] = []
    halves = split_backward.split_backward()
    monkeypatch.setattr(split_backward, "log_once", lambda key, text: said.append(text))
    # A second half that computes nothing.
    monkeypatch.setattr(split_backward, "split_backward", lambda: (halves[0], lambda *args: None))
    assert not split_backward.is_split_right.__wrapped__()
    assert len(said) == 1 and "zero-bubble schedules wait longer" in said[0]


@pytest.mark.more
@needs_gloo
def test_the_demos_model_on_two_by_two_ranks(tmp_path) -> None:
    run(4, tmp_path / "store", "demo", program="pipeline_demo_program.py")
