"""Optimizers that hold parameters whose place quantized ones have taken are warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridq
from hybridq.moe import ExpertsLayout, convert_experts, parallelize_experts
from own_experts import OwnExperts

TEXT = r"SGD: the optimizer holds 2 parameters.*make the optimizer after hybridq\.convert"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


def quantized(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    with hybridq.quantized_model_init("mxfp8", frozen=frozen):
        return hybridq.convert(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with hybridq.autocast(recipe="mxfp8"):
            model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [str(one.message) for one in found if "the optimizer holds" in str(one.message)]


def values(model: nn.Module) -> torch.Tensor:
    return model[0].weight.detach().dequantize()


def test_an_optimizer_of_before_trains_nothing_and_says_so_once() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(quantized(model))
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.randn(8, 64)).sum().backward()
    with pytest.warns(hybridq.HybridQWarning, match=TEXT):
        optimizer.step()
    assert torch.equal(values(model), before)
    assert step(model, optimizer) == []


def test_one_that_is_made_afterwards_trains_and_nothing_is_said() -> None:
    model = quantized(net())
    before = values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step(model, optimizer) == [] and not torch.equal(values(model), before)


def test_one_that_was_known_before_is_looked_at_again() -> None:
    model = hybridq.convert(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert step(model, optimizer) == []
    plain = nn.Sequential(nn.Linear(64, 96))
    optimizer.add_param_group({"params": plain.parameters()})
    quantized(plain)
    assert len(step(model, optimizer)) == 1


def test_masters_that_are_given_gradients_are_the_callers() -> None:
    model = net()
    masters = list(model.parameters())
    optimizer = torch.optim.SGD(masters, lr=0.1)
    quantized(model)
    for one in masters:
        one.grad = torch.ones_like(one)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_parameters_that_needed_no_gradient_are_no_loss() -> None:
    model = net().requires_grad_(False)
    adapter = nn.Parameter(torch.zeros(3))
    adapter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([*model.parameters(), adapter], lr=0.1)
    quantized(model, frozen=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert torch.equal(adapter, torch.full((3,), -0.1))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_made_before_prepare_fsdp2_is_told_to_come_after_fully_shard(one_rank) -> None:
    model = hybridq.convert(net())
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(hybridq.distributed.prepare_fsdp2(model))
    (said,) = step(model, early)
    assert "holds 2 parameters" in said and "since prepare_fsdp2 has put others" in said
    assert "make the optimizer after fully_shard" in said
    assert step(model, torch.optim.SGD(model.parameters(), lr=0.1)) == []


def test_one_made_before_experts_were_dealt_out(one_rank) -> None:
    model = nn.Sequential(convert_experts(OwnExperts(ExpertsLayout()), ExpertsLayout()))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize_experts(model, init_device_mesh("cpu", (1,)))
    with pytest.warns(hybridq.HybridQWarning, match="since parallelize_experts has put others"):
        early.step()


def test_every_optimizer_is_told_once() -> None:
    for _ in range(3):
        model = net()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        quantized(model)
        assert len(step(model, early)) == 1
        assert step(model, early) == []
