"""Arithmetic that a quantized tensor rounds off is warned of; what it keeps is not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hybridq

RECIPES = ("mxfp8", "nvfp4", "fp8_current", "fp8_block", "mxfp8_fwd_nvfp4_bwd")


def made(recipe: str) -> nn.Module:
    with hybridq.quantized_model_init(recipe):
        return nn.Sequential(hybridq.Linear(64, 96), hybridq.Linear(96, 32))


def average(decay: float, recipe: str) -> None:
    model = made(recipe)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        ema.update_parameters(model)


def own_loop(decay: float, recipe: str) -> None:
    one, other = made(recipe), made(recipe)
    with torch.no_grad():
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            a.mul_(decay).add_(b, alpha=1 - decay)


def steps(kind: type, rate: float, recipe: str, **options: bool) -> None:
    model = made(recipe)
    optimizer = kind(model.parameters(), lr=rate, **options)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()


LOST = {
    "average": lambda recipe: average(0.999, recipe),
    "own loop": lambda recipe: own_loop(0.999, recipe),
    "sgd": lambda recipe: steps(torch.optim.SGD, 1e-5, recipe),
    "fused": lambda recipe: steps(torch.optim.AdamW, 1e-5, recipe, fused=True),
}
KEPT = {
    "average": lambda recipe: average(0.5, recipe),
    "own loop": lambda recipe: own_loop(0.5, recipe),
    "sgd": lambda recipe: steps(torch.optim.SGD, 0.1, recipe),
    "ours": lambda recipe: steps(hybridq.optim.AdamW, 1e-5, recipe),
    "nothing": lambda recipe: made(recipe)[0].weight.detach().mul_(1.0),
}


@pytest.mark.parametrize("name", sorted(LOST))
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_lost_is_warned_of_once(recipe, name) -> None:
    with pytest.warns(hybridq.HybridQWarning, match=r"rounds what is written, and kept \d+%") as w:
        LOST[name](recipe)
    assert len([one for one in w if one.category is hybridq.HybridQWarning]) == 1


@pytest.mark.parametrize("name", sorted(KEPT))
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_kept_is_not(recipe, name) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridq.HybridQWarning)
        KEPT[name](recipe)


@pytest.mark.parametrize("scale", ["fp8_current", "nvfp4"])
def test_a_factor_that_the_scale_takes_is_kept(scale) -> None:
    weight = made(scale)[0].weight.detach()
    values = weight.dequantize()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hybridq.HybridQWarning)
        weight.mul_(0.999)
    torch.testing.assert_close(weight.dequantize(), values * 0.999, rtol=1e-5, atol=0.0)


def test_an_average_of_a_plain_copy_is_that_of_the_values() -> None:
    model = made("mxfp8")
    plain = copy.deepcopy(model)
    plain.load_state_dict(hybridq.dequantized_state_dict(model), assign=True)
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    wanted = None
    for _ in range(5):
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(96, 64))
        ema.update_parameters(model)
        now = model[0].weight.detach().dequantize().double()
        wanted = now if wanted is None else 0.999 * wanted + 0.001 * now
    torch.testing.assert_close(ema.module[0].weight.double(), wanted, rtol=1e-5, atol=1e-6)
