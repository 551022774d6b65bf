"""FSDP2 against unsharded training, bit for bit: see `fsdp2_program.py` for what each rank runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.distributed import GatheredWeight, prepare_fsdp2
from rank_runs import needs_gloo, run


@needs_gloo
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (2, "matrix=some"),
        pytest.param(2, "matrix", marks=pytest.mark.more),
        pytest.param(4, "matrix", marks=pytest.mark.slow),
    ],
)
def test_every_recipe_and_alignment(world, what, tmp_path) -> None:
    run(world, tmp_path / "store", what)


@needs_gloo
def test_policies_memory_and_checkpoints(tmp_path) -> None:
    names = ("policies", "mixed_precision", "accumulation", "inference", "state", "wire", "freed")
    run(
        2,
        tmp_path / "store",
        *names,
        "gathered_in_high_precision",
        "reductions",
        "offload",
        "chunks",
    )


@needs_gloo
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (2, "units=some"),
        pytest.param(2, "units", marks=pytest.mark.more),
        pytest.param(4, "units", marks=pytest.mark.slow),
    ],
)
def test_weights_of_one_unit_are_gathered_together(world, what, tmp_path) -> None:
    run(world, tmp_path / "store", what, "prefetched")


@needs_gloo
@pytest.mark.parametrize("which", ["some", pytest.param("every", marks=pytest.mark.slow)])
def test_a_gather_costs_the_host_little_more_than_a_plain_one(which, tmp_path) -> None:
    names = (f"calls={which}", "calls_of_stacks")
    run(2, tmp_path / "store", *names, program="host_cost_program.py")


@needs_gloo
def test_a_unit_is_gathered_by_one_collective(tmp_path) -> None:
    run(2, tmp_path / "store", "collectives")


@needs_gloo
def test_shards_that_one_rank_writes_by_turns(tmp_path) -> None:
    run(2, tmp_path / "store", "written_by_turns", "replicated")


@needs_gloo
# Of 2 ranks each holds all rows.
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.more)])
def test_two_dimensional_mesh(world, tmp_path) -> None:
    run(world, tmp_path / "store", "hsdp")


def test_prepared_parameters_are_parameters() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert prepare_fsdp2(model) is model and prepare_fsdp2(model) is model
    weight = model[0].weight
    assert isinstance(weight, GatheredWeight) and isinstance(weight, nn.Parameter)
    assert type(model[0].bias) is nn.Parameter and weight.requires_grad
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(type(tensor) is torch.Tensor for tensor in model.state_dict().values())
    # For everything but FSDP2 it is the tensor that it holds.
    y = model[0](torch.ones(2, 8))
    y.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.allclose(model[0].weight.detach() + 2.0, before["0.weight"], atol=1e-6)


def test_what_is_left_alone_and_what_is_refused() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": hybridq.Linear(8, 16)})
    model["head"].weight = model["embedding"].weight  # tied to a module that cannot take planes
    assert type(prepare_fsdp2(model)["head"].weight) is nn.Parameter
    parts = nn.Sequential(nn.Linear(64, 64), hybridq.Linear(64, 64, tp_size=2, parallel_mode="row"))
    with pytest.raises(RuntimeError, match=r"1\.weight is one rank's part .* set_tensor_parallel"):
        prepare_fsdp2(hybridq.convert(parts))
    assert type(parts[0].weight) is nn.Parameter  # nothing was prepared
    with pytest.raises(TypeError, match=r"prepare_fsdp2: model must be an nn.Module, got int"):
        prepare_fsdp2(3)
    tied = nn.ModuleList([hybridq.Linear(8, 8), hybridq.Linear(8, 8)])
    tied[1].weight = tied[0].weight
    prepare_fsdp2(tied)
    assert tied[0].weight is tied[1].weight and isinstance(tied[0].weight, GatheredWeight)


@needs_gloo
@pytest.mark.parametrize("is_quantized", [False, True])
def test_weights_that_fully_shard_has_sharded_are_refused(is_quantized) -> None:
    with hybridq.quantized_model_init("mxfp8", enabled=is_quantized):
        model = nn.Sequential(hybridq.Linear(64, 64), nn.Sequential(hybridq.Linear(64, 64)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        for part in (model, model[1]):  # of which the unit is another module
            with pytest.raises(RuntimeError, match=r"weight must not be sharded yet, and fully_"):
                prepare_fsdp2(part)
        with pytest.raises(RuntimeError, match="prepare_fsdp2: weight must not"):
            prepare_fsdp2(model[0])  # a module that is the whole model: no dot before its weight
    finally:
        dist.destroy_process_group()
    ready = prepare_fsdp2(nn.Sequential(hybridq.Linear(64, 64)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert prepare_fsdp2(fully_shard(ready)) is ready  # it was prepared: nothing is left to do
    finally:
        dist.destroy_process_group()
