"""Weights that are not trained hold one plane, and their backward makes no other that it can spare.

The oracle of the bits is a recipe with `columnwise_source="rowwise_dequantized"` on a weight in
high precision: its columnwise plane is made of what the rowwise one decodes to.
"""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq.nn.autograd import prepared_linear, slot_encoder
from hybridq.recipes import Recipe, get

RECIPES = ("mxfp8", "nvfp4", "nvfp4_1d_weight", "fp8_current", "mxfp8_fwd_nvfp4_bwd")


def decoded_weights(name: str) -> Recipe:
    """Return the recipe of that name whose columnwise planes are made of the rowwise ones."""
    return get(name).with_choices(columnwise_source="rowwise_dequantized")


def frozen_linear(recipe: str, weight: torch.Tensor) -> hybridq.Linear:
    out, into = weight.shape
    with hybridq.quantized_model_init(recipe, frozen=True):
        layer = hybridq.Linear(into, out, bias=False, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def run(layer: torch.nn.Module, recipe: object, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the result and the input's gradient; random bits are those of one seed."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    with hybridq.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weight_has_one_plane_and_the_bits_of_a_decoded_source(recipe: str) -> None:
    weight = torch.randn(48, 96).bfloat16()
    layer = frozen_linear(recipe, weight)
    assert layer.weight.columnwise is None and not layer.weight.requires_grad
    plain = hybridq.Linear(96, 48, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(weight)
    plain.weight.requires_grad_(False)
    x = torch.randn(20, 96).bfloat16()
    own = run(layer, recipe, x)
    for one, other in zip(own, run(plain, decoded_weights(recipe), x), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(own[1], run(plain, None, x)[1])


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_saves_nothing_of_input_and_weight(recipe: str) -> None:
    layer = frozen_linear(recipe, torch.randn(48, 96).bfloat16())
    saved: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda o: o),
        hybridq.autocast(recipe=recipe),
    ):
        layer(torch.randn(20, 96).bfloat16().requires_grad_())
    assert sum(one.numel() for one in saved) <= 1  # a seed


@pytest.mark.parametrize("recipe", RECIPES)
def test_planes_that_no_gradient_needs_are_not_made(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, bool, bool]] = []
    encode = slot_encoder.SlotEncoder.encode

    def watch(self: object, x: torch.Tensor, with_row: bool, with_col: bool) -> object:
        made.append((self.slot, with_row, with_col))
        return encode(self, x, with_row, with_col)

    operand = prepared_linear.PreparedSlot.operand

    def watch_prepared(self: object, x: torch.Tensor, is_saved: bool, seed: object) -> object:
        made.append(("input", True, is_saved))
        return operand(self, x, is_saved, seed)

    monkeypatch.setattr(slot_encoder.SlotEncoder, "encode", watch)
    monkeypatch.setattr(prepared_linear.PreparedSlot, "operand", watch_prepared)
    layer = frozen_linear(recipe, torch.randn(48, 96).bfloat16())
    run(layer, recipe, torch.randn(20, 96).bfloat16())
    assert ("input", True, False) in made and ("grad_output", True, False) in made
    assert not [one for one in made if one[0] != "weight" and one[2]]
    before = len(made)
    with hybridq.autocast(recipe=recipe):
        layer(torch.randn(20, 96).bfloat16())  # the first layer: its input needs no gradient
    assert made[before:] == [("input", True, False)]


def test_write_between_forward_and_backward_is_an_error() -> None:
    layer = frozen_linear("mxfp8", torch.randn(48, 96).bfloat16())
    x = torch.randn(4, 96).bfloat16().requires_grad_()
    with hybridq.autocast(recipe="mxfp8"):
        y = layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_frozen_groups_have_the_bits_of_frozen_layers(recipe: str) -> None:
    weights = [torch.randn(32, 64).bfloat16() for _ in range(2)]
    with hybridq.quantized_model_init(recipe, frozen=True):
        grouped = hybridq.GroupedLinear(2, 64, 32, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        for g, weight in enumerate(weights):
            getattr(grouped, f"weight{g}").copy_(weight)
    assert grouped.weight0.columnwise is None
    x = torch.randn(32, 64).bfloat16().requires_grad_()
    dy = torch.randn(32, 32).bfloat16()
    with hybridq.autocast(recipe=recipe):
        y = grouped(x, [16, 16])
    torch.manual_seed(0)
    y.backward(dy)
    if recipe == "nvfp4":  # its gradients are rounded stochastically
        assert x.grad.isfinite().all()
        return
    for g, weight in enumerate(weights):
        part = slice(16 * g, 16 * g + 16)
        own = x.detach()[part].clone().requires_grad_()
        with hybridq.autocast(recipe=recipe):
            out = frozen_linear(recipe, weight)(own)
        out.backward(dy[part])
        assert torch.equal(out, y[part]) and torch.equal(own.grad, x.grad[part])


def test_frozen_is_a_flag() -> None:
    with pytest.raises(TypeError, match="frozen must be a bool, got int"):
        hybridq.quantized_model_init("mxfp8", frozen=1)


def test_weight_that_the_forward_takes_as_it_is_stays_plain() -> None:
    with hybridq.quantized_model_init("high_precision_fwd_mxfp8_bwd", frozen=True):
        layer = hybridq.Linear(64, 32)
    assert type(layer.weight) is torch.nn.Parameter
