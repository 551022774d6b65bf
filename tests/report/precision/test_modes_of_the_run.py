"""Modes of torch around a report, and runs that have no backward or no values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import hybridq

Mode = Callable[[], AbstractContextManager[None]]


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.LayerNorm(64), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
    return hybridq.convert(nn.Sequential(*layers))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("is_made_within", [False, True])
def test_a_report_within_a_mode_has_its_backward(mode: Mode, is_made_within: bool) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    want = hybridq.report(mlp().eval(), x, recipe="mxfp8", loss=mean_square)
    assert {"grad_output"} < {row.tensor for row in want.slots}
    model = mlp().eval()
    with mode():
        if is_made_within:
            x = x.clone()
        got = hybridq.report(model, x, recipe="mxfp8", loss=mean_square)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
        no = hybridq.report(model, x, recipe="mxfp8", loss=mean_square, backward=False)
    assert got.slots == want.slots and got.products == want.products
    assert {row.tensor for row in no.slots} == {"input", "weight"}


def test_advice_within_inference_mode_is_that_outside() -> None:
    x = torch.randn(32, 64)
    model = mlp().eval()
    options = {"loss": mean_square, "candidates": ["mxfp8"], "prefer": "memory", "budget": 9.0}
    want = hybridq.advise(model, x, device="b200", **options)
    with torch.inference_mode():
        got = hybridq.advise(model, x, device="b200", **options)
    assert got.recipe == want.recipe and "dgrad" in {one.gemm for one in got.products}
    assert got.loss == want.loss


def without_graph(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return mean_square(model(torch.ones(32, 64)))


@pytest.mark.parametrize(
    "loop",
    [
        without_graph,
        lambda model: mean_square(model(torch.ones(32, 64))).detach(),
        lambda model: mean_square(model(torch.ones(32, 64))).item(),
    ],
)
def test_a_run_without_the_backward_that_is_wanted_is_warned_of(loop: Callable) -> None:
    with pytest.warns(hybridq.HybridQWarning, match="made no backward of 1; return the loss"):
        hybridq.report(mlp(), loop, recipe="mxfp8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hybridq.report(mlp(), loop, recipe="mxfp8", backward=False)
        hybridq.report(mlp().requires_grad_(False), loop, recipe="mxfp8")


@pytest.mark.parametrize("function", [hybridq.report, hybridq.advise])
def test_a_model_on_the_meta_device_is_named(function: Callable) -> None:
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(
        ValueError, match=r"(report|advise): .* got 0.weight on the meta device; call"
    ):
        function(model, torch.ones(32, 64, device="meta"), loss=mean_square)
