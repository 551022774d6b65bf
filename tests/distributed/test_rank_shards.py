"""What ranks do with their own shards, and whose shards are replaced: `shards_program.py`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import GatheredWeight, prepare_fsdp2
from rank_runs import needs_gloo, run

PROGRAM = "shards_program.py"


@needs_gloo
def test_a_rank_that_reads_its_shard_and_models_that_start_on_the_meta_device(tmp_path) -> None:
    run(2, tmp_path / "store", "readers", "first_inference", "reset", program=PROGRAM)


@needs_gloo
@pytest.mark.slow
def test_a_rank_that_writes_its_shard_and_shards_that_are_replaced(tmp_path) -> None:
    run(2, tmp_path / "store", "writers", "averages", "assigned", program=PROGRAM)


def test_only_what_lies_in_the_parameters_memory_is_prepared() -> None:
    weight = prepare_fsdp2(hybridq.Linear(8, 6)).weight
    values = weight.detach()
    assert type(values) is GatheredWeight
    before = values.writes.stamp
    for copied in (values.clone(), torch.empty_like(values), values.double(), values + 0):
        assert type(copied) is torch.Tensor
        copied.zero_()
    torch.abs(values, out=torch.empty(6, 8))
    assert values.writes.stamp == before, "a read is no write"
    with torch.inference_mode():
        views = [values.narrow(0, 0, 3), values.t(), values[1], values.view(-1)]
    for view in (*views, *values.unbind(1), values.diagonal(), values.view(torch.int32)):
        assert type(view) is GatheredWeight and view.writes is values.writes
    for number, write in enumerate((values[0].zero_, values.t().zero_, lambda: out_of(values))):
        write()
        assert values.writes.count == before[1] + number + 1


def out_of(values: torch.Tensor) -> None:
    torch.add(torch.ones(6, 8), 1, out=values)


def test_shards_are_read_as_any_tensor() -> None:
    weight = prepare_fsdp2(hybridq.Linear(4, 3)).weight
    values = weight.detach() + 0
    assert weight.tolist() == values.tolist()
    assert (weight.detach().numpy() == values.numpy()).all()
    assert (weight.numpy(force=True) == values.numpy()).all()
    with pytest.raises(RuntimeError, match="numpy: a tensor that requires grad must be detached"):
        weight.numpy()
    with pytest.raises(RuntimeError, match="copy the model before that"):
        copy.deepcopy(weight)
    assert type(pickle.loads(pickle.dumps(weight.detach()))) is torch.Tensor


def test_weights_stay_prepared_where_a_module_moves_or_replaces_them() -> None:
    model = prepare_fsdp2(nn.Sequential(hybridq.Linear(4, 3)))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.float16).to_empty(device="cpu")
    assert type(model[0].weight.data) is GatheredWeight and model[0].weight.dtype == torch.float16
    model.load_state_dict(state, assign=True)
    assert type(model[0].weight.data) is GatheredWeight and model[0].weight.dtype == torch.float32
    assert torch.equal(model[0].weight.detach() + 0, state["0.weight"])
