"""Modules whose GEMMs are not a linear layer's three."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.errors import RecipeError
from hybridq.gemm import CONTRACT
from hybridq.quantizers import MXFP8Quantizer
from hybridq.recipes import (
    INPUTS,
    CustomRecipe,
    ModuleType,
    QuantizerRole,
    bind,
    forward_plan,
    names,
    register_module_type,
)
from hybridq.recipes.bind import is_same_plan

LOOKUP = register_module_type(ModuleType("test_lookup", (), (("weight", "rowwise"),)))
#: A layer that is never differentiated.
FORWARD = register_module_type(ModuleType("test_forward", CONTRACT[:1]))


class Lookup(hybridq.nn.QuantizedModule):
    """An embedding whose rows are those of the quantized weight."""

    module_type = LOOKUP.name

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, size))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        plan, weight = self.plan_now(""), self.weight
        if plan is not None:
            spec = hybridq.PlaneSpec.parse(plan.weight.row.spec)
            seen = hybridq.quantize(weight.detach(), spec).dequantize()
            weight = weight + (seen - weight).detach()  # the gradient is that of the weight
        return nn.functional.embedding(numbers, weight)


def rowwise(asked: list[str]) -> CustomRecipe:
    """A recipe that makes rowwise planes only, and notes what it is asked for."""

    def factory(role: hybridq.QuantizerRole) -> hybridq.Quantizer:
        asked.append(role.tensor_type)
        return MXFP8Quantizer(columnwise=False)

    return CustomRecipe(factory)


def test_a_module_without_gemms_binds_and_is_asked_for_what_it_reads() -> None:
    asked: list[str] = []
    recipe, layer, numbers = rowwise(asked), Lookup(8, 32), torch.tensor([1, 5, 5])
    with hybridq.autocast(recipe=recipe):
        y = layer(numbers)
    want = hybridq.quantize(layer.weight.detach(), "mxfp8").dequantize()[numbers]
    assert torch.equal(y, want) and set(asked) == {"weight"}
    y.sum().backward()
    assert layer.weight.grad[5].eq(2).all() and layer.weight.grad[0].eq(0).all()
    plan = bind(recipe, "", LOOKUP.name)
    assert plan.input.row.is_plain and plan.grad_output.col.is_plain
    assert plan.weight.col.is_plain and not plan.weight.row.is_plain and not plan.is_plain
    assert torch.equal(layer(numbers), layer.weight[numbers])  # outside autocast


def test_planes_that_no_gemm_reads_need_not_be_there() -> None:
    asked: list[str] = []
    plan = bind(rowwise(asked), "", FORWARD.name)
    assert asked == ["input", "weight"] == list(FORWARD.slots)
    assert not plan.input.row.is_plain and plan.input.col.is_plain
    for kind in ("linear", "nobody registered it"):  # which has a linear layer's table
        with pytest.raises(RecipeError, match=r"got 3 missing .* dgrad \(grad_output.rowwise @ w"):
            bind(rowwise([]), "", kind)


@pytest.mark.parametrize("kind", [FORWARD, ModuleType("test_frozen", CONTRACT[:2])])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_products_beside_the_table_are_exact(kind, recipe) -> None:
    """A gradient whose GEMM the table does not have is that of the values."""
    register_module_type(kind)
    layer = hybridq.Linear(32, 48, dtype=torch.bfloat16)
    layer.module_type = kind.name
    whole = hybridq.Linear(32, 48, dtype=torch.bfloat16)
    whole.load_state_dict(layer.state_dict())
    x, dy = torch.randn(16, 32).bfloat16(), torch.randn(16, 48).bfloat16()
    found = []
    for one in (layer, whole):
        own = x.clone().requires_grad_()
        torch.manual_seed(0)
        with hybridq.autocast(recipe=recipe):
            y = one(own)
        y.backward(dy)
        found.append((y.detach(), own.grad, one.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    exact = torch.nn.functional.linear(x, layer.weight.detach())
    assert not torch.equal(found[0][0], exact), "nothing was quantized"
    names = {gemm.name for gemm in kind.gemms}
    for name, mine, linear, exact in (
        ("dgrad", found[0][1], found[1][1], hybridq.gemm(dy, layer.weight.detach().t())),
        ("wgrad", found[0][2], found[1][2], hybridq.gemm(dy.t(), x.t())),
    ):
        assert torch.equal(mine, linear) == (name in names), name
        if name not in names and "grad_output" not in kind.slots:
            assert torch.equal(mine, exact), name


def test_what_is_read_must_be_made() -> None:
    recipe = CustomRecipe(lambda role: MXFP8Quantizer(rowwise=False))
    with pytest.raises(RecipeError, match=r"got 1 missing .*: a read of weight.rowwise: the quan"):
        bind(recipe, "", LOOKUP.name)


def test_a_name_has_one_table() -> None:
    assert register_module_type(ModuleType(LOOKUP.name, (), LOOKUP.reads)) == LOOKUP
    with pytest.raises(ValueError, match=r"'linear' must be registered once, got .* \['fprop'\]"):
        register_module_type(ModuleType("linear", CONTRACT[:1]))
    with pytest.raises(
        ValueError, match=r"a slot of .attention. must be one of input, weight, grad_output"
    ):
        ModuleType("attention", (), (("key", "rowwise"),))


def test_plans_that_are_equal_are_the_same_in_compiled_code(monkeypatch) -> None:
    """There their texts are compared: of every recipe's plan, trained and run forwards alone."""
    plans = [bind(hybridq.recipes.get(name)) for name in names()]
    plans += [forward_plan(plan, inputs) for plan in plans for inputs in INPUTS]
    plans += [plan._replace(**{fact: True}) for plan in plans[:2] for fact in plan._fields[-2:]]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    again = [plan._replace() for plan in plans]  # other objects
    for i, one in enumerate(plans):
        assert [is_same_plan(one, other) for other in again] == [one == other for other in plans], i


@pytest.mark.parametrize("name", names())
def test_a_kind_of_ones_own_has_the_formats_of_a_linear_layer(name: str) -> None:
    """What a recipe says of inputs, weights and gradients does not depend on who multiplies."""
    recipe = hybridq.recipes.get(name)
    for slot in ("input", "weight", "grad_output"):
        own, linear = (recipe.ask(QuantizerRole(kind, slot, "a")) for kind in ("own", "linear"))
        assert own == linear, slot


def test_a_direction_or_a_gemm_that_is_none_is_named():
    with pytest.raises(ValueError, match="a direction of 'x' must be one of rowwise, columnwise"):
        ModuleType("x", (), (("weight", "rows"),))
    with pytest.raises(TypeError, match="gemms of 'x' must be"):
        ModuleType("x", ("fprop",))
