"""Recipes are values: equality, quantizers per role, factories' errors, checks when bound."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import weakref

import pytest
import torch

from hybridq import formats, recipes
from hybridq.errors import RecipeError
from hybridq.formats import PlaneSpec
from hybridq.nn import Linear
from hybridq.quantizers import (
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridq.recipes import (
    ByName,
    ChoosingRecipe,
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    autocast,
    bind,
    factories,
    zoo,
)
from hybridq.recipes.boundary import boundary_quantizer
from hybridq.recipes.recipe import recipe_by_key

SLOTS = ("input", "weight", "grad_output")


def planes(recipe, slot, module_type="linear"):
    """`row | col` of a slot, in the words of the formats' names."""
    quantizer = recipes.get(recipe).quantizer(QuantizerRole(module_type, slot, "a.b"))
    words = []
    for spec in (quantizer.rowwise, quantizer.columnwise):
        fmt = spec.format
        block = "x".join(map(str, fmt.block)) if fmt.block else "tensor"
        text = fmt.family if fmt.is_identity else f"{fmt.element.name} {block}"
        text += " pow2" if fmt.power_of_two else ""
        text += " rht" if spec.signs is not None else ""
        text += " sr" if spec.stochastic else ""
        text += f" {spec.four_over_six} {spec.tensor_bound:g}" if spec.four_over_six else ""
        words.append(text + (" rows" if spec.row_scaled else ""))
    source = "" if quantizer.columnwise_source == "original" else " decoded"
    return " | ".join(words) + source


def both(word):
    return f"{word} | {word}"


MX, BLOCK, SQUARE = "e4m3 1x32", "e4m3 1x128 pow2", "e4m3 128x128 pow2"
FP4, FP4_RHT, FP4_SR = "e2m1 1x16", "e2m1 1x16 rht", "e2m1 1x16 sr"
PLAIN = "identity"
GRAD_FP4 = f"{FP4_SR} | {FP4_RHT} sr"

# From the table of factories in Transformer Engine's documentation: input, weight, grad_output.
TABLE = {
    "bf16": (both(PLAIN),) * 3,
    "high_precision": (both(PLAIN),) * 3,
    "fp8_current": (both("e4m3 tensor"), both("e4m3 tensor"), both("e5m2 tensor")),
    "fp8_delayed": (both("e4m3 tensor"), both("e4m3 tensor"), both("e5m2 tensor")),
    "fp8_block": (both(BLOCK), both(SQUARE), both(BLOCK)),
    "mxfp8": (both(MX),) * 3,
    "nvfp4": (f"{FP4} | {FP4_RHT}", both("e2m1 16x16"), GRAD_FP4),
    "high_precision_fwd_mxfp8_bwd": (f"{PLAIN} | {MX}", f"{PLAIN} | {MX}", both(MX)),
    "mxfp8_fwd_nvfp4_bwd": (f"{MX} | {FP4_RHT}", f"{MX} | {FP4} decoded", GRAD_FP4),
    "nvfp4_1d_weight": (f"{FP4} | {FP4_RHT}", f"{FP4} | {FP4} decoded", GRAD_FP4),
    "mxfp8_fwd_high_precision_bwd": (
        f"{MX} | {PLAIN} decoded",
        f"{MX} | {PLAIN} decoded",
        both(PLAIN),
    ),
    "nvfp4_fwd_mxfp8_bwd": (f"{FP4} | {MX} decoded", f"{FP4} | {MX} decoded", both(MX)),
    "fp8_block_fwd_mxfp8_bwd": (
        f"{BLOCK} | {MX} decoded",
        f"{SQUARE} | {MX} decoded",
        both(MX),
    ),
    # Of linear modules; grouped ones have a test of their own.
    "nvfp4_row_scaled_fwd_mxfp8_bwd": (both(MX),) * 3,
    "nvfp4_row_scaled_fwd_high_precision_bwd": (
        f"{FP4} rows | {PLAIN} decoded",
        f"{FP4} | {PLAIN} decoded",
        both(PLAIN),
    ),
}


def test_the_table_has_every_named_recipe():
    assert set(TABLE) == set(recipes.names())


@pytest.mark.parametrize("name", TABLE)
def test_slots_of_named_recipes(name):
    assert tuple(planes(name, slot) for slot in SLOTS) == TABLE[name]


@pytest.mark.parametrize("name", zoo.__all__)
def test_zoo_factories_serve_grouped_linears_and_have_a_default(name):
    recipe = CustomRecipe(getattr(zoo, name))
    only_grouped = name == "nvfp4_row_scaled_fwd_mxfp8_bwd_factory"
    for slot in () if only_grouped else SLOTS:
        assert planes(recipe, slot, "grouped_linear") == planes(recipe, slot, "linear")
    for role in (QuantizerRole(), QuantizerRole("dpa", "qkv"), QuantizerRole("linear", "output")):
        assert recipe.quantizer(role).is_stochastic is False


def test_row_scaled_forward_with_mxfp8_backward_is_for_grouped_linears():
    name = "nvfp4_row_scaled_fwd_mxfp8_bwd"
    assert [planes(name, slot, "grouped_linear") for slot in SLOTS] == [
        f"{FP4} rows | {MX} decoded",
        f"{FP4} | {MX} decoded",
        both(MX),
    ]
    assert planes(name, "output", "grouped_linear") == both(MX)


FP4_SQUARE = "e2m1 16x16"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"row_scaled_activation": True}, (f"{FP4} rows | {FP4_RHT} rows", both(FP4_SQUARE))),
        (
            {"nvfp4_4over6": "weights"},
            (f"{FP4} | {FP4_RHT}", both(f"{FP4_SQUARE} mae 256")),
        ),
        (
            {"nvfp4_4over6": "activations", "disable_rht": True, "nvfp4_4over6_err_mode": "mse"},
            (both(f"{FP4} mse 256"), both(FP4_SQUARE)),
        ),
        (
            {
                "nvfp4_4over6": "all",
                "disable_rht": True,
                "disable_2d_quantization": True,
                "nvfp4_4over6_e4m3_use_256": "weights",
                "row_scaled_activation": True,
            },
            (both(f"{FP4} mae 448 rows"), both(f"{FP4} mae 256")),
        ),
        (
            {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "none"},
            (f"{FP4} | {FP4_RHT}", both(f"{FP4_SQUARE} mae 448")),
        ),
    ],
)
def test_options_of_nvfp4_block_scaling(options, expected):
    """Gradients never take four-over-six or one amax per row, whatever is asked for."""
    recipe = NVFP4BlockScaling(**options)
    assert (planes(recipe, "input"), planes(recipe, "weight")) == expected
    plain = NVFP4BlockScaling(disable_rht=options.get("disable_rht", False))
    assert planes(recipe, "grad_output") == planes(plain, "grad_output")
    assert recipe == NVFP4BlockScaling(**options) and recipe != plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nvfp4_4over6": "gradients"}, "nvfp4_4over6 must be one of none, weights"),
        ({"nvfp4_4over6": "all"}, "add disable_rht=True or choose 'weights'"),
        ({"nvfp4_4over6": "activations"}, "does not go with the Hadamard transform"),
        ({"nvfp4_4over6_e4m3_use_256": True}, "nvfp4_4over6_e4m3_use_256 must be one of"),
        ({"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "max"}, "one of MAE, MSE"),
        ({"nvfp4_4over6_err_mode": "MSE"}, "belongs to four-over-six"),
    ],
)
def test_options_of_nvfp4_block_scaling_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4BlockScaling(**options)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        ("high_precision_factory", "high_precision"),
        ("current_scaling_factory", "fp8_current"),
        ("float8_block_scaling_factory", "fp8_block"),
        ("mxfp8_factory", "mxfp8"),
        ("nvfp4_factory", "nvfp4"),
    ],
)
def test_plain_factories_equal_the_recipes(factory, name):
    recipe = CustomRecipe(qfactory=getattr(factories, factory))
    assert [planes(recipe, slot) for slot in SLOTS] == [planes(name, slot) for slot in SLOTS]


@pytest.mark.parametrize(
    ("recipe", "slot", "expected"),
    [
        (Float8CurrentScaling(use_power_2_scales=True), "input", both("e4m3 tensor pow2")),
        (Float8CurrentScaling(fp8_format="E4M3"), "grad_output", both("e4m3 tensor")),
        (Float8BlockScaling(use_f32_scales=True), "weight", both("e4m3 128x128")),
        (Float8BlockScaling(x_block_scaling_dim=2), "input", both(SQUARE)),
        (Float8BlockScaling(w_block_scaling_dim=1), "weight", both(BLOCK)),
        (Float8BlockScaling(grad_block_scaling_dim=2), "grad_output", both(SQUARE)),
        (Float8BlockScaling(fp8_format="hybrid"), "grad_output", both("e5m2 1x128 pow2")),
        (MXFP8BlockScaling(fp8_format="HYBRID"), "grad_output", both("e5m2 1x32")),
        (MXFP8BlockScaling(enable_2d_quantization=True), "weight", both("e4m3 32x32")),
        (MXFP8BlockScaling(enable_2d_quantization=True), "input", both(MX)),
        (NVFP4BlockScaling(disable_rht=True), "input", both(FP4)),
        (NVFP4BlockScaling(disable_rht=True), "grad_output", both(FP4_SR)),
        (
            NVFP4BlockScaling(disable_stochastic_rounding=True),
            "grad_output",
            f"{FP4} | {FP4_RHT}",
        ),
        (NVFP4BlockScaling(disable_2d_quantization=True), "weight", both(FP4)),
    ],
)
def test_options(recipe, slot, expected):
    assert planes(recipe, slot) == expected


class Unhashable:
    __hash__ = None

    def __call__(self, role):
        return MXFP8Quantizer()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Float8CurrentScaling(fp8_format="E5M2"), ValueError),
        (lambda: MXFP8BlockScaling(fp8_format=3), ValueError),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), ValueError),
        # Options of Transformer Engine that do nothing here yet are refused, not ignored.
        (lambda: NVFP4BlockScaling(nvfp4_4over6="all"), ValueError),
        (lambda: NVFP4BlockScaling(backward_override="decoded"), ValueError),
        (lambda: MXFP8BlockScaling(columnwise_source="rowwise"), ValueError),
        (lambda: Float8CurrentScaling(fp8_dpa=True), TypeError),
        (lambda: NVFP4BlockScaling(disable_rht="false"), TypeError),
        (lambda: Float8CurrentScaling(use_power_2_scales=1), TypeError),
        (lambda: Float8BlockScaling(use_f32_scales=None), TypeError),
        (lambda: CustomRecipe(qfactory=3), TypeError),
        (lambda: CustomRecipe(), TypeError),
        (lambda: CustomRecipe(qfactory=Unhashable()), TypeError),
        (lambda: QuantizerRole("linear", None), TypeError),
        (lambda: recipes.get("mxfp9"), ValueError),
        (lambda: recipes.get(None), TypeError),
        (lambda: recipes.get(MXFP8BlockScaling), TypeError),
        (lambda: autocast(recipe="no such recipe"), ValueError),
        (lambda: autocast(recipe=factories.mxfp8_factory), TypeError),
        (lambda: autocast(MXFP8BlockScaling()), TypeError),
    ],
)
def test_bad_values(make, error):
    with pytest.raises(error) as caught:
        make()
    assert (
        ", got " in str(caught.value)
        or "unexpected keyword" in str(caught.value)
        or "missing" in str(caught.value)
    )


def test_equality_hash_and_key():
    assert MXFP8BlockScaling() == MXFP8BlockScaling(fp8_format="e4m3")
    assert MXFP8BlockScaling() != MXFP8BlockScaling(enable_2d_quantization=True)
    assert len({MXFP8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()}) == 2
    assert MXFP8BlockScaling().key == MXFP8BlockScaling().key
    assert MXFP8BlockScaling().key != MXFP8BlockScaling(enable_2d_quantization=True).key
    one, two = CustomRecipe(lambda role: None), CustomRecipe(lambda role: None)
    assert one != two and one.key != two.key
    assert one == CustomRecipe(one.qfactory) and one.key == CustomRecipe(one.qfactory).key
    with pytest.raises(AttributeError):
        one.qfactory = two.qfactory
    with pytest.raises(AttributeError):
        MXFP8BlockScaling().fp8_format = "HYBRID"


class Owner:
    def factory(self, role):
        return MXFP8Quantizer()


def test_custom_recipes_of_equal_callables_are_equal():
    owner = Owner()
    one, two = CustomRecipe(owner.factory), CustomRecipe(owner.factory)
    assert one.qfactory is not two.qfactory
    assert one == two and hash(one) == hash(two) and one.key == two.key
    assert CustomRecipe(Owner().factory) != one
    partial = functools.partial(factories.mxfp8_factory)
    assert CustomRecipe(partial) == CustomRecipe(partial)


def test_a_key_never_returns_and_keeps_nothing_alive():
    class Heavy:
        def __call__(self, role):
            return MXFP8Quantizer()

    factory = Heavy()
    ghost, recipe = weakref.ref(factory), CustomRecipe(factory)
    key = recipe.key
    twin = CustomRecipe(factory)
    del recipe
    assert recipe_by_key(key) == twin
    del factory, twin
    gc.collect()
    assert ghost() is None
    with pytest.raises(KeyError):
        recipe_by_key(key)
    assert CustomRecipe(Heavy()).key != key


@pytest.mark.parametrize(
    "copier",
    [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "mxfp8_fwd_nvfp4_bwd"])
def test_recipes_copy_and_pickle(copier, name):
    recipe = recipes.get(name)
    assert copier(recipe) == recipe and copier(recipe).key == recipe.key


def test_the_factory_is_asked_once_per_slot_with_the_qualified_name():
    seen = []

    def factory(role):
        seen.append(role)
        return MXFP8Quantizer()

    layer, x = Linear(8, 8, name="blocks.3.up"), torch.randn(2, 8)
    for _ in range(3):
        with autocast(recipe=CustomRecipe(factory)):  # a new, equal value in every step
            layer(x).sum().backward()
    assert seen == [QuantizerRole("linear", slot, "blocks.3.up") for slot in SLOTS]


@pytest.mark.parametrize(
    ("result", "error"),
    [(None, ValueError), ("mxfp8", TypeError), (MXFP8Quantizer, TypeError), (3, TypeError)],
)
def test_a_factory_of_the_wrong_type_is_named(result, error):
    def my_factory(role):
        return MXFP8Quantizer() if role.tensor_type != "weight" else result

    layer = Linear(8, 8, name="encoder.proj")
    with autocast(recipe=CustomRecipe(my_factory)), pytest.raises(error) as caught:
        layer(torch.randn(2, 8))
    for word in ("my_factory", "'weight'", "encoder.proj", "IdentityQuantizer"):
        assert word in str(caught.value)


class OwnRecipe(ChoosingRecipe):
    def quantizer(self, role):
        return role.no_such_field


def raises(role):
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("recipe", "cause", "words"),
    [
        (CustomRecipe(raises), KeyError, "qfactory raises must return .* got KeyError: 'mine'"),
        (CustomRecipe(lambda: None), TypeError, "called with one argument, the QuantizerRole"),
        (CustomRecipe(functools.partial(raises, 1)), TypeError, "called with one argument"),
        (OwnRecipe(), AttributeError, "OwnRecipe.quantizer must return a Quantizer"),
        (ByName([("*", CustomRecipe(raises))], "bf16"), KeyError, "qfactory raises must return"),
    ],
)
def test_a_factory_that_raises_is_named_with_its_slot(recipe, cause, words):
    layer, x = Linear(8, 8, name="blocks.1.up"), torch.randn(2, 8)
    with pytest.raises(RecipeError, match=words) as caught, autocast(recipe=recipe):
        layer(x)
    assert "linear slot 'input' of blocks.1.up" in str(caught.value)
    assert type(caught.value.__cause__) is cause
    with pytest.raises(RecipeError, match="linear slot 'output' of blocks"):
        boundary_quantizer(recipe, QuantizerRole("linear", "output", "blocks.1.up"))
    # The module stays usable.
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_all_missing_planes_are_reported_at_once():
    def factory(role):
        if role.tensor_type == "input":
            return MXFP8Quantizer(rowwise=False)
        if role.tensor_type == "grad_output":
            return NVFP4Quantizer(columnwise=False)
        return MXFP8Quantizer(columnwise=False)

    layer = Linear(8, 8, name="blocks.0.q")
    with autocast(recipe=CustomRecipe(factory)), pytest.raises(RecipeError) as caught:
        layer(torch.randn(2, 8))
    text = str(caught.value)
    assert "blocks.0.q" in text and "got 3 missing" in text
    assert "fprop" in text and "'input' makes no rowwise" in text
    assert "dgrad" in text and "'weight' makes no columnwise" in text
    assert "wgrad" in text and "'grad_output' makes no columnwise" in text


def test_recipes_print_as_what_they_are():
    """Keys do not: they have every field, as before."""
    rules = [("a", NVFP4BlockScaling(disable_rht=True)), ("b", CustomRecipe(raises))]
    for recipe, text in (
        (recipes.get("mxfp8"), "<MXFP8BlockScaling(): mxfp8>"),
        (
            Float8CurrentScaling(fp8_format="E4M3", precision="exact"),
            "<Float8CurrentScaling(fp8_format=FloatFormat.E4M3, precision='exact'): fp8_e4m3>",
        ),
        (
            Float8BlockScaling(w_block_scaling_dim=1),
            "<Float8BlockScaling(w_block_scaling_dim=1): fp8_1x128>",
        ),
        (
            recipes.get("nvfp4"),
            "<NVFP4BlockScaling(): fprop nvfp4 x nvfp4_16x16, dgrad nvfp4;sr x nvfp4_16x16, "
            "wgrad nvfp4;sr;rht x nvfp4;rht>",
        ),
        (recipes.get("bf16"), "CustomRecipe(hybridq.recipes.factories.high_precision_factory)"),
        (
            CustomRecipe(functools.partial(raises), backward_override="dequantized"),
            "CustomRecipe(functools.partial, backward_override='dequantized')",
        ),
        (OwnRecipe(), "OwnRecipe()"),
        (
            ByName(rules, default="mxfp8"),
            "ByName([('a', NVFP4BlockScaling(disable_rht=True)), "
            f"('b', CustomRecipe({raises.__module__}.raises))], default='mxfp8')",
        ),
    ):
        assert repr(recipe) == str(recipe) == text
    key = "MXFP8BlockScaling(fp8_format=FloatFormat.E4M3, enable_2d_quantization=False)"
    assert recipes.get("mxfp8").key == f"hybridq.recipes.builtin.{key}"


def test_quantizers_print_in_one_line():
    for quantizer, text in (
        (MXFP8Quantizer(), "Quantizer(mxfp8)"),
        (MXFP8Quantizer("e5m2", columnwise=False), "Quantizer(mxfp8_e5m2, columnwise_usage=False)"),
        (
            HybridQuantizer(
                rowwise_quantizer=NVFP4Quantizer(row_scaled_nvfp4=True),
                columnwise_quantizer=IdentityQuantizer(),
                columnwise_source="rowwise_dequantized",
            ),
            "Quantizer(nvfp4;rows | identity, columnwise_source='rowwise_dequantized')",
        ),
        (Quantizer(None, PlaneSpec.parse("nvfp4;rht")), "Quantizer(None | nvfp4;rht)"),
    ):
        assert repr(quantizer) == text


@pytest.mark.parametrize("name", formats.names())
def test_a_short_text_is_that_of_the_spec(name):
    spec = PlaneSpec.parse(name)
    assert spec.short_text == name and PlaneSpec.parse(spec.short_text) == spec
    if not spec.format.is_identity:
        rounded = PlaneSpec(spec.format, stochastic=True)
        assert PlaneSpec.parse(rounded.short_text) == rounded == PlaneSpec.parse(f"{name};sr")
    own = dataclasses.replace(spec.format, family="own")
    assert PlaneSpec(own).short_text == PlaneSpec(own).text


def test_plans_say_what_is_plain_and_what_is_stochastic():
    def mixed(role):
        return IdentityQuantizer() if role.tensor_type == "weight" else MXFP8Quantizer()

    assert bind(recipes.get("bf16")).is_plain
    assert not bind(recipes.get("mxfp8_fwd_high_precision_bwd")).is_plain
    assert not bind(CustomRecipe(mixed)).is_plain
    half = CustomRecipe(lambda role: IdentityQuantizer(dtype=torch.bfloat16))
    assert not bind(half).is_plain
    assert bind(recipes.get("nvfp4")).is_stochastic
    assert not bind(NVFP4BlockScaling(disable_stochastic_rounding=True)).is_stochastic
    mirrored = HybridQuantizer(
        rowwise_quantizer=IdentityQuantizer(),
        columnwise_quantizer=MXFP8Quantizer(),
        columnwise_source="rowwise_dequantized",
    )
    assert bind(CustomRecipe(lambda role: mirrored)).input.col_source == "original"
