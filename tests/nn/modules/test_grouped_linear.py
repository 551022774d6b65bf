"""hybridq.GroupedLinear: every bit of a loop of hybridq.Linear over the groups, gradients included.

The oracle is that loop: the splits are cut on the host, each group goes through a Linear of its
own with the same weight, and the generator starts in the same state.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import hybridq
from grouped_model import (
    FEATURES,
    by_name,
    grouped,
    plain,
    run_grouped,
    run_loop,
    same,
    singles,
    tokens_of,
)
from hybridq import CustomRecipe, recipes
from hybridq.formats import DEFAULT_SIGNS, PlaneSpec
from hybridq.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    NVFP4Quantizer,
)

#: Delayed scaling keeps a history by group: tests/nn/delayed_scaling/test_delayed_modules.py.
RECIPES = tuple(name for name in recipes.names() if name != "fp8_delayed")
#: An empty group first, in the middle and last; sizes that no block divides; one group only.
SPLITS = [(0, 37, 0, 130, 16, 0), (5,), (128, 256), (0, 0), (1,) * 7]


def _uniform(make):
    def factory(role):
        return make()

    factory.reads_names = False
    return factory


#: Inputs and gradients that no recipe by name has: what depends on the group in every way.
FACTORIES = {
    "square 32": _uniform(lambda: plain(PlaneSpec.parse("mxfp8_32x32"))),
    "square 128": _uniform(lambda: Float8BlockQuantizer("e4m3", block_scaling_dim=2)),
    "square nvfp4": _uniform(lambda: plain(PlaneSpec.parse("nvfp4_16x16"))),
    "nvfp4 transformed": _uniform(
        lambda: plain(PlaneSpec(hybridq.formats.format("nvfp4"), False, DEFAULT_SIGNS))
    ),
    "fp8 transformed": _uniform(
        lambda: plain(PlaneSpec(hybridq.formats.format("fp8_e4m3"), True, DEFAULT_SIGNS))
    ),
    "nvfp4 rows both": _uniform(lambda: plain(PlaneSpec.parse("nvfp4;rows"))),
    "mxfp8 sr": _uniform(lambda: plain(PlaneSpec.parse("mxfp8;sr"))),
    "four over six": _uniform(lambda: plain(PlaneSpec.parse("nvfp4;4o6=mse"))),
    "current | nvfp4 decoded": _uniform(
        lambda: HybridQuantizer(
            rowwise_quantizer=Float8CurrentScalingQuantizer("e4m3"),
            columnwise_quantizer=NVFP4Quantizer(),
            columnwise_source="rowwise_dequantized",
        )
    ),
    "identity | current": _uniform(
        lambda: HybridQuantizer(
            rowwise_quantizer=IdentityQuantizer(),
            columnwise_quantizer=Float8CurrentScalingQuantizer("e5m2"),
        )
    ),
}


def compare(recipe, sizes, dtype=torch.float32, **options) -> None:
    module = grouped(len(sizes), dtype, **options)
    x = tokens_of(sizes, dtype)
    dy = torch.randn(x.shape[0], FEATURES[1]).to(dtype)
    want = run_loop(singles(module), x, sizes, dy, recipe)
    same(run_grouped(module, x, list(sizes), dy, recipe), want)
    for kind in (torch.int32, torch.int64):
        same(run_grouped(module, x, torch.tensor(sizes, dtype=kind), dy, recipe), want)


@pytest.mark.parametrize("sizes", SPLITS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_equals_a_loop_of_linear(recipe: str, sizes) -> None:
    compare(recipe, sizes)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_recipe_in_16_bits(recipe: str, dtype) -> None:
    compare(recipe, (3, 0, 45, 150), dtype)


@pytest.mark.parametrize("name", list(FACTORIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factories_of_any_format_equal_a_loop(name: str, dtype) -> None:
    for sizes in (SPLITS[0], (33, 1, 200)):
        compare(CustomRecipe(FACTORIES[name]), sizes, dtype)


@pytest.mark.parametrize(
    "recipe", ["mxfp8", "fp8_current", "nvfp4", "nvfp4_row_scaled_fwd_mxfp8_bwd"]
)
def test_on_the_reference_backend(recipe: str) -> None:
    with hybridq.backend("reference"):
        compare(recipe, (5, 0, 33))


@pytest.mark.parametrize("seed", range(6))
def test_random_splits(seed: int) -> None:
    """Any recipe, any sizes, any layout of the parameters."""
    draw = random.Random(seed)
    sizes = tuple(draw.choice((0, 1, 31, 32, draw.randrange(300))) for _ in range(1 + seed % 5))
    options = {
        "bias": draw.random() < 0.7,
        "single_grouped_weight": draw.random() < 0.5,
        "single_grouped_bias": draw.random() < 0.5,
    }
    compare(draw.choice(RECIPES), sizes, **options)


@pytest.mark.usefixtures("fast_products")
@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_a_recipe_it_is_a_loop_of_nn_linear(dtype, is_device: bool) -> None:
    if dtype == torch.float64 and is_device:
        return
    sizes = (4, 0, 19)
    module = grouped(3, dtype)
    x = tokens_of(sizes, dtype)
    dy = torch.randn(23, FEATURES[1]).to(dtype)
    splits = torch.tensor(sizes) if is_device else sizes
    want = run_loop(singles(module, nn.Linear), x, sizes, dy, None)
    same(run_grouped(module, x, splits, dy, None), want)


@pytest.mark.parametrize("options", [{}, {"single_grouped_weight": True}], ids=str)
def test_groups_with_different_quantizers(options) -> None:
    compare(CustomRecipe(by_name), (5, 40, 0, 130, 7), name="experts", **options)
    compare(CustomRecipe(by_name), (0, 3), **options)
