"""Modules of transformers with matrices of their own: block-diagonal maps, heads, shared experts.

The oracle is transformers' own forward in FP64, whose products with a weight are replaced by those
of what the planes of both operands decode to, in all three directions.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import hybridq
from hybridq.tensor import is_quantized

pytest.importorskip("transformers")

from foreign_blocks import KINDS, converted, made, run


class _Product(torch.autograd.Function):
    """`x @ w.T` in FP64 of what the planes of FP32 operands decode to; backward, too."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, recipe: Any, kind: str) -> torch.Tensor:
        def planes(slot: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            made = recipe.quantizer(hybridq.QuantizerRole(kind, slot, ""))(matrix.float())
            return made.rowwise.dequantize().double(), made.columnwise.dequantize().double()

        ctx.planes, ctx.own = planes, (planes("input", x), planes("weight", w))
        return ctx.own[0][0] @ ctx.own[1][0].T

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        row, col = ctx.planes("grad_output", dy)
        return row @ ctx.own[1][1], col.T @ ctx.own[0][1], None, None


class _Torch:
    """Torch, but for the products with weights, which are those of the oracle."""

    def __init__(self, recipe: Any, kind: str) -> None:
        self.product = lambda x, w: _Product.apply(x, w, recipe, kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def bmm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.product(a, b.T) for a, b in zip(x, w, strict=True)])

    def baddbmm(self, bias: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return bias + self.bmm(x, w)

    def einsum(self, how: str, *operands: torch.Tensor) -> torch.Tensor:
        x, w = operands[0], operands[-1]
        if how == "ibh,hnd->ibnd":
            y = self.product(x.flatten(0, 1), w.flatten(1).T)
            return y.view(*x.shape[:2], *w.shape[1:])
        if how == "ibnd,hnd->ibh":
            return self.product(x.flatten(0, 1).flatten(1), w.flatten(1)).view(*x.shape[:2], -1)
        return torch.einsum(how, *operands)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_products_are_those_of_the_planes(kind: str, recipe: str, monkeypatch) -> None:
    plain, given, home = made(kind)
    own = run(converted(plain), given, deterministic(recipe))
    exact = run(plain, given)
    module_type = "linear" if kind == "xlnet" else "grouped_linear"
    monkeypatch.setattr(home, "torch", _Torch(deterministic(recipe), module_type))
    precise = [
        one.double() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
        for one in given
    ]
    want = run(plain.double(), tuple(precise))
    assert own.keys() == want.keys()
    for name, one in want.items():
        error = float((own[name].double() - one).norm() / one.norm())
        noise = float((exact[name].double() - one).norm() / one.norm())
        assert error < 2e-3, (name, error)
        assert error < noise / 4 or noise < 1e-5, (name, error, noise)


def deterministic(name: str) -> Any:
    """Return a recipe without random bits."""
    recipe = hybridq.recipes.get(name)
    if name == "nvfp4":
        recipe = hybridq.recipes.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True
        )
    return recipe


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_recipe_the_bits_are_its_own(kind: str) -> None:
    plain, given, _ = made(kind)
    module = converted(plain)
    assert isinstance(module, type(plain)) and list(module.state_dict()) == list(plain.state_dict())
    want = run(plain, given)
    found = run(module, given)
    assert all(torch.equal(found[name], one) for name, one in want.items())
    assert not torch.equal(run(module, given, "mxfp8")["y"], want["y"])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_files(kind: str) -> None:
    plain, given, _ = made(kind)
    module = converted(plain)
    want = run(module, given, "mxfp8")
    if hasattr(module, "recurrent_states"):
        module.recurrent_states = None  # a part of a graph, which cannot be copied
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        found = run(other, given, "mxfp8")
        assert all(torch.equal(found[name], one) for name, one in want.items())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_live_in_low_precision_where_they_are_stacks(kind: str) -> None:
    plain, given, _ = made(kind)
    want = run(converted(plain), given, "mxfp8")
    with hybridq.quantized_model_init("mxfp8"):
        low = converted(plain)
    stacks = [one for one in low.parameters() if is_quantized(one)]
    assert len(stacks) == {"gemma": 2, "inkling": 3}.get(kind, 0)
    found = run(low, given, "mxfp8")
    assert all(torch.equal(found[name], one) for name, one in want.items())


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_live_in_low_precision_says_why(kind: str, caplog) -> None:
    plain, _, _ = made(kind)
    with hybridq.quantized_model_init("mxfp8"):
        converted(plain)
    said = {"deepseek": "whose blocks have planes each", "xlnet": "it has an axis for the heads"}
    lines = [one for one in caplog.messages if "stays in high precision: it " in one]
    assert len(lines) == {"deepseek": 1, "xlnet": 5}.get(kind, 0), lines
    assert all(said[kind] in one for one in lines)
    caplog.clear()
    with hybridq.quantized_model_init(hybridq.recipe(fprop="bf16", dgrad="bf16", wgrad="bf16")):
        converted(made(kind)[0])
    assert "stays in high precision" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_histories_are_kept_of_every_product(kind: str) -> None:
    """With the amaxes of a step before, of the same values, scales are those of now."""
    plain, given, _ = made(kind)
    module, twin = converted(plain), converted(plain)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    run(module, given, "fp8_delayed")
    optimizer.step()
    want = run(twin, given, "fp8_current")["y"]
    first = run(module, given, "fp8_delayed")["y"]
    assert first.isfinite().all() and torch.equal(first, want) == (kind in ("deepseek", "gemma"))


def test_serving_keeps_them_and_calls_them() -> None:
    for kind in KINDS:
        plain, given, _ = made(kind)
        model = nn.ModuleDict({"own": plain.eval()})
        want = plain(*given)
        served = hybridq.quantize_model(model, "mxfp8")["own"]
        if hasattr(served, "recurrent_states"):
            served.recurrent_states = None
        with torch.no_grad():
            found = served(*given)
        found, want = (one[0] if isinstance(one, tuple) else one for one in (found, want))
        assert 0 < float((found - want).norm() / want.norm()) < 0.1
