"""Clipping of models whose experts lie over ranks, where one rank has all: torch's own is right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hybridq.moe import clip_grad_norm_


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("what", ["one parameter", "a list", "a generator"])
def test_what_is_clipped_is_torchs(what: str, norm_type: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    layer(torch.randn(7, 5)).square().sum().backward()
    other = copy.deepcopy(layer)
    for mine, value in zip(other.parameters(), layer.parameters(), strict=True):
        mine.grad = value.grad.clone()
    made = []
    for clip, model in ((clip_grad_norm_, layer), (nn.utils.clip_grad_norm_, other)):
        given = {
            "one parameter": model.weight,
            "a list": list(model.parameters()),
            "a generator": model.parameters(),
        }[what]
        made.append(clip(given, 0.25, norm_type))
    assert torch.equal(made[0], made[1]) and made[0] > 0.25
    for mine, value in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, value.grad, rtol=1e-6, atol=0)
