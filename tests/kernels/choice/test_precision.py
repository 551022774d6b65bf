"""`precision` on its way from a call, a recipe or autocast to the choice of a backend."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hybridq
from hybridq.kernels import PRECISIONS
from hybridq.recipes import CustomRecipe, MXFP8BlockScaling, Recipe
from hybridq.recipes.factories import high_precision_factory


def test_calls_name_it(asked: list[str]) -> None:
    a, b = (
        hybridq.quantize(torch.randn(4, 64), "mxfp8"),
        hybridq.quantize(torch.randn(5, 64), "mxfp8"),
    )
    results = [hybridq.gemm(a, b, precision=name) for name in PRECISIONS]
    out = torch.zeros(4, 5)
    hybridq.gemm(a, b, out=out, precision="fast")
    hybridq.gemm(a, b)
    assert asked == [*PRECISIONS, "fast", "auto"]
    # There is one way on a CPU.
    assert all(torch.equal(results[0], result) for result in (*results, out))


def test_operators_of_torch_take_the_recipes(asked: list[str]) -> None:
    x, w = torch.randn(4, 64), hybridq.quantize(torch.randn(5, 64), "mxfp8")
    with hybridq.autocast(recipe="mxfp8", precision="exact"):
        _ = x @ w.t()
        hybridq.gemm(x, w)
        hybridq.gemm(x, w, precision="fast")
        with hybridq.autocast(enabled=False):
            hybridq.gemm(x, w)
    assert asked == ["exact", "exact", "fast", "auto"]


@pytest.mark.parametrize(
    "name", ["mxfp8", "nvfp4", "fp8_block", "fp8_current", "mxfp8_fwd_nvfp4_bwd"]
)
def test_recipes_carry_it(name: str, asked: list[str]) -> None:
    recipe = hybridq.recipes.get(name)
    exact = recipe.with_precision("exact")
    assert recipe.precision == "auto" and exact.precision == "exact"
    assert exact != recipe and exact.key != recipe.key
    assert exact.with_precision("auto") == recipe
    assert exact.with_precision("auto").key == recipe.key
    assert copy.deepcopy(exact) == exact and copy.deepcopy(exact).key == exact.key
    layer = hybridq.Linear(64, 32)
    for chosen, forced in ((recipe, "auto"), (exact, "exact"), (recipe, "auto")):
        with hybridq.autocast(recipe=chosen):
            y = layer(torch.randn(9, 64, requires_grad=True))  # few rows ask elsewhere
        y.sum().backward()
        assert asked == [forced] * 3
        asked.clear()


def test_built_in_recipes_take_it_by_keyword_and_survive_pickling() -> None:
    recipe = MXFP8BlockScaling(precision="fast")
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hybridq.recipes.recipe.recipe_by_key(recipe.key) == recipe
    assert CustomRecipe(high_precision_factory, precision="exact").precision == "exact"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_brings_it_along(use_reentrant: bool, asked: list[str]) -> None:
    """The backward runs outside the context, and inside one that says otherwise."""
    layer = hybridq.Linear(64, 32)
    x = torch.randn(9, 64, requires_grad=True)
    with hybridq.autocast(recipe="mxfp8", precision="exact"):
        y = checkpoint(layer, x, use_reentrant=use_reentrant)
    with hybridq.autocast(recipe="mxfp8", precision="fast"):
        y.sum().backward()
    assert asked == ["exact"] * 4  # forward, its recomputation, and the two of the backward


def test_compiled_code_is_guarded_by_it(asked: list[str]) -> None:
    layer = hybridq.Linear(64, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 64)
    for forced in ("exact", "fast", "exact", "auto"):
        with hybridq.autocast(recipe="mxfp8", precision=forced):
            compiled(x)
    assert asked == ["exact", "fast", "exact", "auto"]


def test_compiled_code_may_enter_autocast_with_it(asked: list[str]) -> None:
    layer = hybridq.Linear(64, 32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor, forced: str) -> torch.Tensor:
        with hybridq.autocast(recipe="mxfp8", precision=forced):
            return layer(x)

    for forced in ("exact", "fast", "exact"):
        run(torch.randn(3, 64), forced)
    assert asked == ["exact", "fast", "exact"]


def test_compiled_code_may_name_it(asked: list[str]) -> None:
    w = hybridq.quantize(torch.randn(32, 64), "mxfp8")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        plane = w.rowwise
        return torch.ops.hybridq.gemm(
            [x], "fp32", 3, plane.tensors, "mxfp8", 32, 64, out_dtype=x.dtype, precision="fast"
        )

    run(torch.randn(3, 64))
    assert asked == ["fast"]


@dataclass(frozen=True)
class Plain(Recipe):
    """A recipe of a user's own, without the field."""

    def quantizer(self, role):
        return hybridq.MXFP8Quantizer("e4m3")


@pytest.mark.parametrize(
    "call,error,message",
    [
        (
            lambda a: hybridq.gemm(a, a, precision="half"),
            ValueError,
            "auto, exact, fast, got 'half'",
        ),
        (
            lambda a: hybridq.autocast(precision="no"),
            ValueError,
            "autocast: precision must be",
        ),
        (lambda a: MXFP8BlockScaling(precision="no"), ValueError, "MXFP8BlockScaling: precision"),
        (lambda a: Plain().with_precision("exact"), TypeError, "Plain has no field precision"),
        (lambda a: hybridq.explain("gemm", a, a, precision="no"), ValueError, "explain: precision"),
        (lambda a: hybridq.prepare(a.rowwise, precision="no"), ValueError, "prepare: precision"),
        (
            lambda a: torch.ops.hybridq.gemm(
                a.rowwise.tensors,
                "mxfp8",
                4,
                a.rowwise.tensors,
                "mxfp8",
                4,
                64,
                out_dtype=torch.float32,
                precision="no",
            ),
            ValueError,
            "gemm: precision",
        ),
    ],
)
def test_unknown_ones_are_refused(call, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(hybridq.quantize(torch.randn(4, 64), "mxfp8"))


def test_a_recipe_without_the_field_is_auto() -> None:
    assert Plain().precision == "auto" and Plain().with_precision("auto") == Plain()
    with hybridq.autocast(recipe=Plain()):
        hybridq.Linear(32, 8)(torch.randn(2, 32))
