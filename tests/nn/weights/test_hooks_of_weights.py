"""Hooks on gradients stay on parameters that are quantized afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq


def quantized(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    with hybridq.quantized_model_init("mxfp8", frozen=frozen):
        return hybridq.convert(model)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


def backward(model: nn.Module) -> torch.Tensor | None:
    model.zero_grad()
    torch.manual_seed(1)
    with hybridq.autocast(recipe="mxfp8"):
        model(torch.randn(8, 64)).square().sum().backward()
    return model[0].weight.grad


def test_a_hook_changes_the_gradient_until_its_handle_removes_it() -> None:
    wanted = backward(quantized(net()))
    model = net()
    handle = model[0].weight.register_hook(lambda gradient: 3 * gradient)
    quantized(model)
    assert torch.equal(backward(model), 3 * wanted)
    handle.remove()
    assert torch.equal(backward(model), wanted)


def test_a_hook_behind_the_accumulation_is_called_with_the_quantized_parameter() -> None:
    model, seen = net(), []
    handle = model[0].weight.register_post_accumulate_grad_hook(seen.append)
    quantized(model)
    backward(model)
    assert len(seen) == 1 and seen[0] is model[0].weight
    handle.remove()
    backward(model)
    assert len(seen) == 1


@pytest.mark.filterwarnings("error")
def test_of_frozen_weights_none_is_called() -> None:
    model, seen = net(), []
    model[0].weight.register_hook(seen.append)
    quantized(model, frozen=True)
    assert backward(model) is None and seen == []
