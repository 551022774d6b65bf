"""Delayed scaling: what grows past its scale of earlier steps is cut, and that is said once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.recipes import DelayedScaling

CUT = "values were cut to what the scales of earlier steps hold"


def _said(recwarn) -> list[str]:
    return [str(w.message) for w in recwarn if CUT in str(w.message)]


def _step(layer: nn.Module, optimizer, x: torch.Tensor, **choices) -> torch.Tensor:
    with hybridq.autocast(recipe=DelayedScaling(**choices)):
        y = layer(x)
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def _trained(**choices) -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 32, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(16, 64)
    for _ in range(3):
        _step(model, optimizer, x, **choices)
    return model, optimizer, x


@pytest.mark.parametrize("way", ["replaced", "assigned", "written"])
def test_a_larger_weight_is_cut_for_one_step_and_named(recwarn, way) -> None:
    model, optimizer, x = _trained()
    large = model[0].weight.detach() * 100.0
    amax = large.abs().max() / 100.0
    if way == "replaced":
        model[0].weight = nn.Parameter(large.clone())
    elif way == "assigned":
        model.load_state_dict({"0.weight": large.clone()}, assign=True)
    else:
        with torch.no_grad():
            model[0].weight.copy_(large)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert not _said(recwarn)
    y = _step(model, optimizer, x)
    assert torch.allclose(y, x @ large.clamp(-amax, amax).T, rtol=0.1, atol=0.2)  # it was cut
    (line,) = _said(recwarn)
    assert "slot 'weight' of 0 (100 times)" in line
    y = _step(model, optimizer, x)
    assert (y - x @ large.T).norm() < 0.1 * (x @ large.T).norm()
    model[0].weight.data.mul_(100.0)
    _step(model, optimizer, x)
    assert len(_said(recwarn)) == 1


def test_inputs_before_the_first_step(recwarn) -> None:
    torch.manual_seed(0)
    layer = hybridq.Linear(64, 32)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x = torch.full((4, 64), 4480.0)
    _step(layer, optimizer, x)
    (line,) = _said(recwarn)
    assert "slot 'input' of an unnamed module (10 times)" in line
    assert "(1 before the first)" in line


@pytest.mark.parametrize(("factor", "is_said"), [(2.0, False), (3.9, False), (4.5, True)])
def test_only_what_is_cut_by_far(recwarn, factor, is_said) -> None:
    model, optimizer, x = _trained()
    _step(model, optimizer, x * factor)
    assert bool(_said(recwarn)) == is_said


def test_a_margin_below_zero_asks_to_be_cut(recwarn) -> None:
    model, optimizer, x = _trained(margin=-3)
    _step(model, optimizer, x, margin=-3)
    assert not _said(recwarn)
    _step(model, optimizer, x * 8.0, margin=-3)
    assert len(_said(recwarn)) == 1


def test_the_largest_are_named_and_others_counted(recwarn) -> None:
    torch.manual_seed(0)
    model = hybridq.convert(nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(6)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(8, 32)
    for _ in range(2):
        _step(model, optimizer, x)
    with torch.no_grad():
        for i, layer in enumerate(model):
            layer.weight.mul_(10.0 + i)
    x = x * 0.001  # so that outputs stay small
    _step(model, optimizer, x)
    (line,) = _said(recwarn)
    assert "slot 'weight' of 5 (15 times), slot 'weight' of 4 (14 times)" in line
    assert "and 3 more. The next step" in line


def test_a_gradient_that_jumps_is_named_and_none_is_not(recwarn) -> None:
    model, optimizer, x = _trained()
    for scale in (1.0, 1e5):
        with hybridq.autocast(recipe="fp8_delayed"):
            y = model(x)
        (y.sum() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(_said(recwarn)) == int(scale > 1.0)
    assert "slot 'grad_output' of 0 (1e+05 times)" in _said(recwarn)[0]
