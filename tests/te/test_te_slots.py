"""Slots of the door's modules: roles, weights that nothing quantizes, inputs that are saved."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hybridq.te.pytorch.quantization import QuantizerRole

import hybridq.te as te
from hybridq.te.common import recipe
from hybridq.te.custom_recipes import quantizer_factory_zoo as zoo

E4M3 = te.DType.kFloat8E4M3


def names(roles: list[Any]) -> list[Any]:
    return [None if one is None else (one.tensor_type, one.name) for one in roles]


def test_roles_of_slots_are_those_of_who_takes_what_they_hold() -> None:
    layer = te.Linear(32, 32, name="a")
    assert names(layer.get_quantizer_roles(fwd=True, num_quantizers=4)) == [
        *(("input", "a"), ("weight", "a"), None, ("input", "a")),
    ]
    layer.grad_input_quantizer_role = QuantizerRole("dpa", "do", "core")
    backward = layer.get_quantizer_roles(fwd=False, num_quantizers=2)
    assert names(backward) == [("grad_output", "a"), ("do", "core")]
    mlp = te.LayerNormMLP(32, 64, name="m")
    assert names(mlp.get_quantizer_roles(fwd=True, num_quantizers=6)) == [
        *(("input", "m.fc1"), ("weight", "m.fc1"), ("input", "m.fc2")),
        *(("input", "m.fc2"), ("weight", "m.fc2"), None),
    ]
    assert names(mlp.get_quantizer_roles(fwd=False, num_quantizers=4)) == [
        *(("grad_output", "m.fc1"), None, ("grad_output", "m.fc2"), ("grad_output", "m.fc1")),
    ]
    groups = te.GroupedLinear(2, 32, 32, name="g")
    roles = groups.get_quantizer_roles(fwd=True, num_quantizers=3)
    assert names(roles) == [("input", "g"), ("weight", "g"), None]
    assert roles[0].module_type == "grouped_linear"


def identity(role: Any) -> Any:
    return te.IdentityQuantizer()


def hybrid_identity(role: Any) -> Any:
    parts = {"rowwise_quantizer": te.IdentityQuantizer()}
    return te.HybridQuantizer(**parts, columnwise_quantizer=te.IdentityQuantizer())


@pytest.mark.parametrize("factory", [identity, hybrid_identity])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.ops.BasicLinear])
def test_weights_that_nothing_quantizes_are_identity_tensors_and_train_alike(kind, factory) -> None:
    own = recipe.CustomRecipe(factory)
    torch.manual_seed(0)
    plain = kind(32, 48)
    with te.quantized_model_init(recipe=own):
        made = kind(32, 48)
    is_hybrid = factory is hybrid_identity
    assert isinstance(made.weight, te.HybridQuantizedTensor if is_hybrid else te.IdentityTensor)
    made.load_state_dict(plain.state_dict())
    x = torch.randn(8, 32)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, made)]
    for _ in range(3):
        ys = []
        for module, step in zip((plain, made), steps, strict=True):
            step.zero_grad()
            with te.autocast(enabled=module is made, recipe=own):
                ys.append(module(x))
            ys[-1].square().sum().backward()
            step.step()
        assert torch.equal(*ys)
        assert torch.equal(made.weight.dequantize(), plain.weight)


def grouped(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x, [16, 16])


MAKERS = [
    (lambda: te.Linear(32, 32, save_original_input=True), lambda layer, x: layer(x)),
    (lambda: te.GroupedLinear(2, 32, 32, save_original_input=True), grouped),
]


@pytest.mark.parametrize(("make", "call"), MAKERS)
def test_an_original_input_that_the_recipe_does_not_take_is_told_once(make, call) -> None:
    layer, x = make(), torch.randn(32, 32)
    own = recipe.CustomRecipe(zoo.mxfp8_fwd_high_precision_bwd_factory)
    with te.autocast(recipe=own), pytest.warns(UserWarning, match="Ignoring save_original_input"):
        call(layer, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=own):
            call(layer, x)  # it was told
        with te.autocast(recipe=recipe.MXFP8BlockScaling()):
            call(make(), x)
        call(make(), x)


def test_quantizers_that_cannot_be_hashed_are_told_apart() -> None:
    class Counting(te.IdentityQuantizer):
        def __init__(self, seen: list[Any]) -> None:
            super().__init__()
            self.seen = seen

        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            self.seen.append(tuple(tensor.shape))
            return super().quantize_impl(tensor)

    seen: list[list[Any]] = [[], []]
    quantizers = [Counting(one) for one in seen]
    assert quantizers[0].frozen == quantizers[0].frozen != quantizers[1].frozen
    quantizers[1].frozen.quantize(torch.ones(2, 3))
    assert not seen[0] and (2, 3) in seen[1]
