"""Weights whose planes a recipe does not take are decoded and quantized again, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

import hybridq


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="hybridq"):
        yield caplog


def said(logged: pytest.LogCaptureFixture) -> list[str]:
    """Return what was said of planes; on some CPUs there are lines about others' products."""
    return [one.getMessage() for one in logged.records if "holds planes of" in one.getMessage()]


def linear(recipe: str, **options: object) -> hybridq.Linear:
    with hybridq.quantized_model_init(recipe, **options):
        return hybridq.Linear(64, 32, bias=False, dtype=torch.bfloat16, name="blocks.0.up")


def run(module: torch.nn.Module, recipe: str, *args: object, grad: bool = False) -> torch.Tensor:
    x = torch.linspace(-2, 2, 16 * 64).view(16, 64).bfloat16().requires_grad_(grad)
    with torch.set_grad_enabled(grad), hybridq.autocast(recipe=recipe):
        return module(x, *args)


@pytest.mark.parametrize("compiles", [False, True])
def test_the_recipes_that_take_the_planes_are_named_once(logged, compiles: bool) -> None:
    torch._dynamo.reset()
    layers = [linear("nvfp4_1d_weight", frozen=True) for _ in range(2)]
    for layer in layers:
        weight = layer.weight.dequantize()
        if compiles:
            layer.compile(fullgraph=True)
        y = run(layer, "nvfp4")
        plain = hybridq.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            plain.weight.copy_(weight)
        assert torch.equal(y, run(plain, "nvfp4"))  # rounded twice, as is said
    (text,) = said(logged)
    name = "Linear: " if compiles else "Linear blocks.0.up: "
    assert text.startswith(
        f"{name}its weight holds planes of nvfp4, and the recipe asks for nvfp4_16x16: it is "
        "decoded and quantized again"
    )
    assert "compute under a recipe that takes them (nvfp4_1d_weight" in text


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    ("held", "recipe"),
    [
        ("nvfp4", "nvfp4"),
        ("nvfp4_1d_weight", "nvfp4_1d_weight"),
        ("mxfp8", "mxfp8"),
        ("fp8_delayed", "fp8_current"),
        ("high_precision_fwd_mxfp8_bwd", "nvfp4"),
    ],
)
def test_planes_that_are_taken_as_they_are(logged, held: str, recipe: str, compiles: bool) -> None:
    torch._dynamo.reset()
    layer = linear(held)
    if compiles:
        layer.compile(fullgraph=True)
    run(layer, recipe, grad=True).float().sum().backward()
    assert layer.weight.grad is not None
    assert not said(logged)


def test_frozen_planes_and_other_columns_of_a_backward(logged) -> None:
    run(linear("mxfp8", frozen=True), "mxfp8_fwd_nvfp4_bwd", grad=True).float().sum().backward()
    assert not said(logged)  # the backward encodes what it reads, and nothing twice
    run(linear("mxfp8"), "mxfp8_fwd_nvfp4_bwd", grad=True)
    (text,) = said(logged)
    assert "holds planes of mxfp8, and the recipe asks for mxfp8 | nvfp4" in text


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_groups(logged, single: bool, compiles: bool) -> None:
    torch._dynamo.reset()
    with hybridq.quantized_model_init("mxfp8"):
        groups = hybridq.GroupedLinear(
            2, 64, 32, bias=False, dtype=torch.bfloat16, single_grouped_weight=single
        )
    if compiles:
        groups.compile()
    run(groups, "mxfp8", [8, 8])
    assert not said(logged)
    run(groups, "nvfp4", [8, 8])
    (text,) = said(logged)
    name = "GroupedLinear: " if compiles else "GroupedLinear 0: "
    assert text.startswith(f"{name}its weight holds planes of mxfp8")
    assert "recipe that takes them (mxfp8" in text
