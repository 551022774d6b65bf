"""FSDP2 against unsharded training, bit for bit: see `fsdp2_program.py` for what each rank runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq.distributed import GatheredWeight, prepare_fsdp2

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


def run(
    world: int,
    store: Path,
    *names: str,
    program: str = "fsdp2_program.py",
    leaves: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Run scenarios in `world` processes; the outcome of the rank that `leaves` does not matter."""
    file = Path(__file__).with_name(program)
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                str(file),
                str(rank),
                str(world),
                str(store),
                *names,
            ],
            env={**os.environ, "TEST_TIMEOUT": str(timeout)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        staying = [process for rank, process in enumerate(ranks) if rank != leaves]
        outcomes = [(one.communicate(timeout=timeout)[1], one.returncode) for one in staying]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    errors = [f"process {n}: {text}" for n, (text, code) in enumerate(outcomes) if code]
    assert not errors, "\n".join(errors)


@needs_gloo
@pytest.mark.parametrize("world", [2, 4])
def test_every_recipe_and_alignment(world, tmp_path) -> None:
    run(world, tmp_path / "store", "matrix")


@needs_gloo
def test_policies_memory_and_checkpoints(tmp_path) -> None:
    names = ("policies", "mixed_precision", "accumulation", "inference", "state", "wire", "freed")
    run(2, tmp_path / "store", *names, "gathered_in_high_precision", "reductions")


@needs_gloo
@pytest.mark.parametrize("world", [2, 4])  # of 2 ranks each holds all rows
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
    with pytest.raises(TypeError, match=r"prepare_fsdp2: model must be an nn.Module, got int"):
        prepare_fsdp2(3)
    tied = nn.ModuleList([hybridq.Linear(8, 8), hybridq.Linear(8, 8)])
    tied[1].weight = tied[0].weight
    prepare_fsdp2(tied)
    assert tied[0].weight is tied[1].weight and isinstance(tied[0].weight, GatheredWeight)
