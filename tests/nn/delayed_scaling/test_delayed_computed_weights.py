"""Weights that are computed anew in each forward: what is a step of theirs, and what is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import hybridq


class Same(nn.Module):
    """A parametrization that changes no bit."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.0


def layers(computed: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(hybridq.Linear(40, 48, bias=False), hybridq.Linear(48, 36))
    for layer in model if computed else ():
        parametrize.register_parametrization(layer, "weight", Same())
    return model


def microbatch(model: nn.Module, number: int) -> float:
    """The first is the smallest: a scale that was made of it alone would cut the others."""
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(number)) * 10.0**number
    with hybridq.autocast(recipe="fp8_delayed"):
        loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None


@pytest.mark.parametrize("step", [by_optimizer, by_hand])
def test_microbatches_are_no_steps_and_steps_are_seen(step) -> None:
    """Losses are those of the same weights as parameters, bit for bit."""
    losses = []
    for computed in (False, True):
        model = layers(computed)
        parameters = list(model.parameters()) if step is by_optimizer else [torch.zeros(1)]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        own = []
        for _ in range(3):
            own += [microbatch(model, number) for number in range(3)]
            step(model, optimizer)
        losses.append(own)
    assert losses[0] == losses[1]


def test_an_update_computes_no_weight() -> None:
    """`spectral_norm` takes a step of its power iteration whenever its weight is asked for."""
    found = []
    for kind in (hybridq.Linear, nn.Linear):
        torch.manual_seed(0)
        layer = kind(40, 48, bias=False)
        torch.manual_seed(1)
        spectral_norm(layer)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for number in range(3):
            microbatch(nn.Sequential(layer), number)
            by_optimizer(layer, optimizer)
        found.append(layer.parametrizations.weight[0]._u)
    assert torch.equal(*found)


def test_an_optimizer_holds_what_a_weight_is_computed_of() -> None:
    """Another model's steps leave the scales of an accumulation as they are."""
    model, other = layers(True)[0], hybridq.Linear(40, 36)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    microbatch(model, 0)
    by_optimizer(model, optimizers[0])
    scale = hybridq.state_dict_with_history(model)["scaling.input.e4m3.scale"]
    microbatch(model, 2)
    microbatch(other, 1)
    by_optimizer(other, optimizers[1])
    found = hybridq.state_dict_with_history(model)
    assert torch.equal(found["scaling.input.e4m3.scale"], scale)
    by_optimizer(model, optimizers[0])
    found = hybridq.state_dict_with_history(model)
    assert not torch.equal(found["scaling.input.e4m3.scale"], scale)


def test_a_computed_weight_did_not_lose_its_gradient(recwarn) -> None:
    model = layers(True)
    for number in range(3):
        microbatch(model, number)
    assert not [one for one in recwarn if "gradient" in str(one.message)]
