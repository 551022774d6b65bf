"""What `report` is given as a loss, and gradients that lie elsewhere than in `grad`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hybridq


def _model(**options: Any) -> nn.Module:
    torch.manual_seed(5)
    layers = [hybridq.Linear(40, 40, **options), nn.ReLU(), hybridq.Linear(40, 40, **options)]
    return hybridq.convert(nn.Sequential(*layers))


def _square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def _report(model: nn.Module, data: Any, **options: Any) -> Any:
    return hybridq.report(model, data, recipe="mxfp8", switch=True, **options)


def _changes(report: Any) -> list[float]:
    return [row.loss_change for row in report.slots if row.tensor == "grad_output"]


def test_a_step_is_along_main_grad() -> None:
    """As of the same model whose gradients are in `grad`; what was there before has no part."""
    x, plain = torch.randn(32, 40, generator=torch.Generator().manual_seed(1)), _model()
    want = _changes(hybridq.report(plain, x, recipe="mxfp8", loss=_square, switch=True))
    fused = _model(fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    for parameter in fused.parameters():
        parameter.main_grad = torch.full_like(parameter, 7.0)  # type: ignore[attr-defined]
    got = _changes(hybridq.report(fused, x, recipe="mxfp8", loss=_square, switch=True))
    assert got == pytest.approx(want, rel=1e-3, abs=1e-9) and any(one != 0.0 for one in got)
    for parameter in fused.parameters():
        assert torch.equal(parameter.main_grad, torch.full_like(parameter, 7.0))  # type: ignore[attr-defined]


def test_a_function_that_ends_with_zero_grad_has_no_step() -> None:
    model, x = _model(), torch.randn(8, 40)

    def loop(given: nn.Module) -> float:
        loss = _square(given(x))
        loss.backward()
        given.zero_grad()
        return loss.item()

    with pytest.raises(ValueError, match=r"report: a loss after a step .* end with zero_grad\(\)"):
        hybridq.report(model, loop, recipe="nvfp4", switch=True)
    assert hybridq.report(model, loop, recipe="nvfp4").slots  # errors need no step


def test_a_function_that_steps_an_optimizer_is_refused() -> None:
    model, x = _model(), torch.randn(8, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def loop(given: nn.Module) -> float:
        other.step()  # of another model
        loss = _square(given(x))
        loss.backward()
        optimizer.step()
        return loss.item()

    for call in (_report, hybridq.advise):
        with pytest.raises(ValueError, match="must not step an optimizer of it, got a step of SGD"):
            call(model, loop)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hybridq.report(model, loop, recipe="mxfp8")  # one run, which trains
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_a_loss_returned_is_named() -> None:
    model, x = _model(), torch.randn(8, 40)
    for call in (_report, hybridq.advise):
        with pytest.raises(TypeError, match=r"loss must be a function .*, or None, got int"):
            call(model, x, loss=3)
    with pytest.raises(ValueError, match=r"loss= must return a tensor .* got an object of float"):
        hybridq.report(model, x, recipe="mxfp8", loss=lambda y: float(_square(y.detach())))
    with pytest.raises(ValueError, match="got an object of dict of the function"):
        hybridq.report(model, lambda given: {"loss": _square(given(x))}, recipe="mxfp8")
