"""What a switched slot adds to the loss, against runs that are made here by hand."""

from __future__ import annotations

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
