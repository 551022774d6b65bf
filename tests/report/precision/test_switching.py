"""What a switched slot adds to the loss, against runs that are made here by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hybridq
from hybridq.recipes import ByName, NVFP4BlockScaling, Recipe


def test_rules_keep_their_choices_where_another_module_is_switched() -> None:
    """Layer 1 has a backward in high precision, by a choice of its rule; layer 2 is switched."""
    torch.manual_seed(0)
    model = hybridq.convert(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    x = torch.randn(64, 64)
    rule = ("1", NVFP4BlockScaling(backward_override="high_precision"))
    base = ByName([rule], default="mxfp8")
    other = ByName([rule, ("2", hybridq.recipe("mxfp8", grad_output="bf16"))], default="mxfp8")

    def loss(y: torch.Tensor) -> torch.Tensor:
        return (y - 1).square().mean()

    def after(recipe: Recipe) -> float:
        """The loss after a step of 1/100 of the parameters' length, under the base."""
        own = list(model.parameters())
        with hybridq.autocast(recipe=recipe):
            grads = torch.autograd.grad(loss(model(x)), own)
        lengths = [
            sum(float(t.detach().double().square().sum()) for t in ts) for ts in (own, grads)
        ]
        step = 0.01 * (lengths[0] / lengths[1]) ** 0.5
        moved = {
            name: one.detach() - step * grad
            for (name, one), grad in zip(model.named_parameters(), grads, strict=True)
        }
        with torch.no_grad(), hybridq.autocast(recipe=base):
            return float(loss(torch.func.functional_call(model, moved, (x,))))

    found = hybridq.report(model, x, recipe=base, loss=loss, switch=True)
    rows = [row for row in found.slots if (row.layer, row.tensor) == ("2", "grad_output")]
    (change,) = {row.loss_change for row in rows}
    want = after(base) - after(other)
    assert abs(change - want) < 0.05 * abs(want)


def test_layers_that_a_recipe_cannot_tell_apart_are_refused() -> None:
    """Parts that were converted apart have names in common; converted as a whole they have none."""
    part = lambda: hybridq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))  # noqa: E731
    model, x = nn.ModuleDict({"enc": part(), "dec": part()}), torch.randn(32, 64)

    def loop(run: nn.ModuleDict) -> torch.Tensor:
        return run["dec"](run["enc"](x)).square().mean()

    for call in (
        lambda: hybridq.report(model, loop, recipe="mxfp8", switch=True),
        lambda: hybridq.advise(model, loop, device="b200", candidates=["mxfp8"]),
    ):
        with pytest.raises(ValueError, match=r"'0' of both 'dec\.0' and 'enc\.0', .* of the whole"):
            call()
    assert hybridq.report(model, loop, recipe="mxfp8").slots  # which asks nobody by a name
    hybridq.convert(model)
    found = hybridq.report(model, loop, recipe="mxfp8", switch=True)
    assert {row.layer for row in found.slots} == {"enc.0", "enc.1", "dec.0", "dec.1"}
    advice = hybridq.advise(model, loop, device="b200", candidates=["mxfp8"], prefer="memory")
    again = hybridq.report(model, loop, recipe=advice)
    assert again.recipe == repr(advice.recipe)


def test_a_run_without_rows_says_so() -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ValueError, match="its input had no rows"):
        hybridq.report(model, torch.empty(0, 64), recipe="mxfp8", loss=lambda y: y.sum())
