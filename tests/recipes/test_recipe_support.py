"""Names that scripts for Transformer Engine call before they train, and its autocast arguments."""

from __future__ import annotations

import pytest
import torch

import hybridq
from hybridq import recipes
from hybridq.recipes import ByName, CustomRecipe, RecipeSchedule
from linear_model import equal, run

AVAILABLE = [name for name in recipes.__all__ if name.endswith("_available")]


@pytest.mark.parametrize("name", AVAILABLE)
def test_everything_is_available_everywhere(name):
    assert len(AVAILABLE) == 5
    function = getattr(recipes, name)
    assert function() is True and function(return_reason=True) == (True, "")


def test_the_default_recipe_is_autocasts():
    with hybridq.autocast() as context:
        assert context.recipe == recipes.get_default_recipe() == recipes.default_recipe()


@pytest.mark.parametrize("name", recipes.names())
def test_every_named_recipe_is_supported_in_any_shape(name):
    assert recipes.check_recipe_support(name) is None
    assert recipes.check_recipe_support(ByName([("a", name)], default=recipes.get(name))) is None
    assert recipes.get_align_size_for_quantization(name) == 1


def _forward_only(role):
    return hybridq.MXFP8Quantizer(columnwise=False)


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        (CustomRecipe(_forward_only), hybridq.RecipeError, "got 3 missing"),
        (CustomRecipe(lambda role: None), ValueError, "got None"),
        (CustomRecipe(lambda role: "mxfp8"), TypeError, "got str"),
        ("mxfp9", ValueError, "got 'mxfp9'"),
        (None, TypeError, "got NoneType"),
        (RecipeSchedule([(0, "mxfp8")]), TypeError, "got RecipeSchedule"),
    ],
)
def test_a_recipe_that_no_module_could_follow(recipe, error, message):
    with pytest.raises(error, match=message):
        recipes.check_recipe_support(recipe)
    if error is TypeError and not isinstance(recipe, CustomRecipe):
        with pytest.raises(error, match=message):
            recipes.get_align_size_for_quantization(recipe)


def test_a_choice_supports_what_a_factory_alone_does_not():
    recipe = CustomRecipe(_forward_only, backward_override="dequantized")
    assert recipes.check_recipe_support(recipe) is None


def test_the_older_autocast_is_the_same():
    layer, x, dy = hybridq.Linear(64, 32), torch.randn(4, 64), torch.randn(4, 32)
    expected = run(layer, x, dy, recipe="nvfp4_fwd_mxfp8_bwd")
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    with hybridq.fp8_autocast(True, False, "nvfp4_fwd_mxfp8_bwd"):
        y = layer(leaf)
    y.backward(dy)
    assert equal([y.detach(), leaf.grad, layer.weight.grad], expected[:3])
    with hybridq.fp8_autocast(enabled=False, fp8_recipe="mxfp8", fp8_group=None):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    with hybridq.autocast(
        enabled=True, calibrating=False, recipe="mxfp8", amax_reduction_group=None
    ):
        assert not torch.equal(layer(x), y)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: hybridq.autocast(calibrating=True),
            ValueError,
            "no statistics are collected without quantizing, got calibrating=True",
        ),
        (
            lambda: hybridq.fp8_autocast(fp8_group=object()),
            ValueError,
            "belongs to its quantizer .* got amax_reduction_group=object",
        ),
        (lambda: hybridq.autocast(True, False), TypeError, "recipe: must be a Recipe .* got bool"),
        (lambda: hybridq.autocast(1), TypeError, "enabled must be a bool, got int"),
        (lambda: hybridq.autocast("mxfp8"), TypeError, r"got str; .* autocast\(recipe=\.\.\.\)"),
        (lambda: hybridq.autocast(hybridq.recipe(fprop="mxfp8")), TypeError, "by keyword"),
    ],
)
def test_what_autocast_does_not_take(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_error_inside_restores_what_was_before():
    layer, x = hybridq.Linear(64, 32), torch.randn(4, 64)
    plain = layer(x)
    with hybridq.autocast(recipe="mxfp8"):
        before = layer(x)
        with pytest.raises(RuntimeError), hybridq.autocast(recipe="nvfp4"):
            layer(torch.randn(4, 63))
        assert torch.equal(layer(x), before)
    assert torch.equal(layer(x), plain) and not torch.equal(before, plain)
