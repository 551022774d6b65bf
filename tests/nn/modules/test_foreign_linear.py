"""Linear layers of other classes: their own bits without a recipe, the same planes under one."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import hybridq
from hybridq.converters import Converter, table
from hybridq.nn import ForeignLinear, Linear
from hybridq.recipes import DelayedScaling
from hybridq.recipes.factories import high_precision_factory
from linear_model import Recorder, draw_like_a_module, equal, quantized_linear, run


class Columns(nn.Module):
    """As GPT-2 keeps them: `[in, out]`, multiplied by addmm."""

    def __init__(self, in_features: int, out_features: int, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(out_features, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class Later(nn.Linear):
    """As Falcon: the product is rounded, then the bias is added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class QuantizedColumns(ForeignLinear, Columns):
    holds_transposed = True


class QuantizedLater(ForeignLinear, Later):
    adds_bias_later = True


KINDS = {
    "columns": Converter("Columns", Columns, QuantizedColumns, is_in_out=True),
    "later": Converter("Later", Later, QuantizedLater),
}


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setattr(table, "_registered", {})
    for kind in KINDS.values():
        hybridq.register_converter(kind)


def make(kind: str, dtype=torch.float32, into: int = 48, out: int = 80):
    """A layer, and the `hybridq.Linear` that has its values."""
    torch.manual_seed(3)
    layer = Columns(into, out, dtype) if kind == "columns" else Later(into, out, dtype=dtype)
    twin = Linear(into, out, dtype=dtype)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.T if kind == "columns" else layer.weight)
        twin.bias.copy_(layer.bias)
    return layer, twin


def gradient(layer: nn.Module) -> torch.Tensor:
    """The gradient of a layer's weight, as `[out, in]`."""
    grad = layer.weight.grad
    return grad.T if isinstance(layer, Columns) else grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_recipe_the_bits_are_the_layers_own(kind, dtype) -> None:
    layer, _ = make(kind, dtype)
    x, dy = torch.randn(2, 5, 48, dtype=dtype), torch.randn(2, 5, 80, dtype=dtype)
    want = run(layer, x, dy, enabled=False)
    weight = layer.weight
    assert hybridq.convert(layer) is layer and layer.weight is weight
    assert type(layer) is KINDS[kind].makes
    assert equal(run(layer, x, dy, enabled=False), want)
    assert equal(run(layer, x, dy, recipe=hybridq.CustomRecipe(high_precision_factory)), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_fwd_nvfp4_bwd", "nvfp4", "fp8_block"])
def test_under_a_recipe_it_is_the_product_of_the_planes(kind, recipe) -> None:
    layer, _ = make(kind)
    weight = layer.weight.detach().T if kind == "columns" else layer.weight.detach()
    hybridq.convert(layer)
    x, dy = torch.randn(37, 48), torch.randn(37, 80)
    torch.manual_seed(5)
    y, dx, dw, dbias = run(layer, x, dy, recipe=recipe)
    torch.manual_seed(5)
    seed = draw_like_a_module()
    bias = layer.bias.detach()
    model = quantized_linear(x, weight.contiguous(), bias, dy, recipe, seed)
    own = {"y": y, "dx": dx, "dw": dw.T if kind == "columns" else dw}
    for name, want in model.items():
        slack = 2.0**-23 * want.value.abs() if name == "y" else 0  # the bias is added by itself
        assert ((own[name].double() - want.value).abs() <= want.bound + slack).all(), name
    assert not torch.equal(y, torch.addmm(bias, x, weight.T)), "nothing was quantized"
    assert torch.allclose(dbias, dy.sum(0), atol=1e-4)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"])
def test_it_is_a_linear_bit_for_bit(recipe) -> None:
    """Some steps with an optimizer, so that histories of delayed scaling are those of `Linear`."""
    layer, twin = make("columns", torch.bfloat16)
    hybridq.convert(layer)
    steps = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (layer, twin)]
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(16, 48, dtype=torch.bfloat16)
        found = []
        for one, step in zip((layer, twin), steps, strict=True):
            torch.manual_seed(11)
            given = x.clone().requires_grad_()
            with hybridq.autocast(recipe=recipe):
                y = one(given)
            y.square().sum().backward()
            found.append((y.detach(), given.grad, gradient(one).clone(), one.bias.grad.clone()))
            step.step()
            step.zero_grad()
        assert equal(*found)
    assert torch.equal(layer.weight.T, twin.weight)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_quantized_parameter_has_the_planes_of_its_transpose(recipe, frozen) -> None:
    layer, twin = make("columns", torch.bfloat16)
    x, dy = torch.randn(16, 48).bfloat16(), torch.randn(16, 80).bfloat16()
    for one in (layer, twin):
        one.weight.requires_grad_(not frozen)
    model, other = nn.Sequential(layer), nn.Sequential(twin)
    twin.__class__ = nn.Linear  # made outside: it is converted inside
    with hybridq.quantized_model_init(recipe):
        hybridq.convert(model), hybridq.convert(other)
    assert layer.weight.shape == (48, 80) and type(layer.weight.data) is type(twin.weight.data.t())
    assert equal([layer.weight.dequantize().T], [twin.weight.dequantize()])
    found, ops = [], []
    for one in (model, other):
        given = x.clone().requires_grad_()
        torch.manual_seed(7)
        with Recorder() as seen, hybridq.autocast(recipe=recipe):
            y = one(given)
            y.backward(dy)
        found.append((y.detach(), given.grad))
        ops.append(seen.encodes)
    assert equal(*found)
    assert ops[0] == ops[1], "the weight's planes are taken as they are"
    if frozen:
        return
    assert equal([layer.weight.grad.T], [twin.weight.grad])
    for one in (model, other):
        hybridq.optim.AdamW(one.parameters(), lr=0.1).step()
    assert equal([layer.weight.dequantize().T], [twin.weight.dequantize()])


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8_fwd_nvfp4_bwd", "nvfp4_fwd_mxfp8_bwd"])
def test_a_plane_made_of_the_other_is_made_in_the_backward(recipe, compiles) -> None:
    """Bit for bit as in a `Linear`, which holds both planes; after a step, too."""
    layer, twin = make("columns", torch.bfloat16)
    twin.__class__ = nn.Linear  # made outside: it is converted inside
    with hybridq.quantized_model_init(recipe):
        hybridq.convert(nn.Sequential(layer)), hybridq.convert(nn.Sequential(twin))
    assert layer.weight.rowwise is None and twin.weight.columnwise is not None
    assert layer.weight.nbytes < twin.weight.nbytes
    x, dy = torch.randn(16, 48).bfloat16(), torch.randn(16, 80).bfloat16()
    called = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiles else layer
    for _ in range(2):
        found = []
        for one in (called, twin):
            given = x.clone().requires_grad_()
            torch.manual_seed(7)
            with hybridq.autocast(recipe=recipe):
                y = one(given)
                y.backward(dy)
            found.append((y.detach(), given.grad))
        assert equal(*found)
        assert equal([layer.weight.grad.T], [twin.weight.grad])
        for one in (layer, twin):
            hybridq.optim.AdamW(one.parameters(), lr=0.1).step()
            one.zero_grad()
        assert equal([layer.weight.dequantize().T], [twin.weight.dequantize()])


def test_a_plane_that_a_history_scales_cannot_be_made_late_and_says_so(caplog) -> None:
    recipe = DelayedScaling(columnwise_source="rowwise_dequantized")
    layer, _ = make("columns")
    with (
        caplog.at_level(logging.WARNING, "hybridq"),
        hybridq.quantized_model_init(recipe),
    ):
        hybridq.convert(nn.ModuleDict({"fc": layer}))
    assert type(layer.weight.data) is torch.Tensor
    (record,) = [one for one in caplog.records if "quantized_model_init" in one.message]
    assert "fc.weight [48, 80] stays in high precision: it is [in, out]" in record.message


def test_a_module_without_a_name_is_named_by_its_parameter_alone(caplog) -> None:
    recipe = DelayedScaling(columnwise_source="rowwise_dequantized")
    layer, _ = make("columns")
    with (
        caplog.at_level(logging.WARNING, "hybridq"),
        hybridq.quantized_model_init(recipe),
    ):
        hybridq.convert(layer)
    (record,) = [one for one in caplog.records if "quantized_model_init" in one.message]
    assert "quantized_model_init: weight [48, 80] stays" in record.message


def test_it_is_compiled_in_one_graph() -> None:
    layer, _ = make("columns")
    hybridq.convert(layer)
    x = torch.randn(16, 48)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with hybridq.autocast(recipe="mxfp8"):
        assert equal([compiled(x)], [layer(x)])


def test_what_it_does_not_take_it_says() -> None:
    layer, _ = make("columns")
    hybridq.convert(layer)
    layer.fuse_wgrad_accumulation = True
    with pytest.raises(RuntimeError, match=r"needs a weight \[out, in\], got one \[in, out\]"):
        layer(torch.randn(2, 48))
    later = hybridq.convert(make("later")[0])
    later.fuse_wgrad_accumulation = True
    later.weight.main_grad = torch.zeros(80, 48)
    with hybridq.autocast(recipe="mxfp8"):
        later(torch.randn(2, 48)).sum().backward()
        assert later.weight.grad is None and later.weight.main_grad.any()
        with pytest.raises(TypeError, match="forward takes the input alone, got 1 more arguments"):
            later(torch.randn(2, 48), 1)
        with pytest.raises(RuntimeError, match="must be in_features=48, got shape"):
            later(torch.randn(2, 40))


def test_fsdp2_gathers_values_of_what_is_transposed_and_says_so(caplog) -> None:
    model = nn.ModuleDict({"fc": make("columns")[0], "up": make("later")[0]})
    hybridq.convert(model)
    weight = model["fc"].weight
    with caplog.at_level(logging.WARNING, "hybridq"):
        hybridq.distributed.prepare_fsdp2(model)
        hybridq.distributed.prepare_fsdp2(model)
    assert model["fc"].weight is weight
    assert type(model["up"].weight.data).__name__ == "GatheredWeight"
    (record,) = [one for one in caplog.records if "are kept as [in, out]" in one.message]
    assert "of 1 weights" in record.message and "fc.weight" in record.message
