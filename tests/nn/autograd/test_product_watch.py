"""Products are shown with the matrices that they multiply, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import hybridq
from hybridq.nn.autograd import WatchedProduct, watch_products


class Seen:
    """Keeps copies of what it is shown."""

    sees_plain = True

    def __init__(self) -> None:
        self.products: list[tuple[str, str, torch.Tensor, list[torch.Tensor]]] = []
        self.gradients: list[torch.Tensor] = []

    def __call__(self, product: WatchedProduct) -> Callable[[torch.Tensor], None]:
        given = (product.matrix().clone(), [one.clone() for one in product.weights()])
        self.products.append((type(product.module).__name__, product.part, *given))
        return lambda grad: self.gradients.append(grad.clone())


@pytest.mark.parametrize("recipe", [None, "nvfp4"])
def test_every_module_shows_its_matrices(recipe: str | None) -> None:
    torch.manual_seed(0)
    first, mlp = hybridq.Linear(32, 32), hybridq.LayerNormMLP(32, 64)
    groups = hybridq.GroupedLinear(3, 32, 16)
    x, seen = torch.randn(2, 8, 32), Seen()

    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        with hybridq.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
            y = groups(mlp(first(x)), [4, 0, 12])
        y.sum().backward()
        return (y.detach(), *(one.grad for one in (first.weight, mlp.fc1_weight)))

    want = [one.clone() for one in run()]
    first.zero_grad(), mlp.zero_grad()
    with watch_products(seen):
        got = run()
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)
    names = [(kind, part) for kind, part, *_ in seen.products]
    assert names == [
        *(("Linear", ""), ("LayerNormMLP", "fc1"), ("LayerNormMLP", "fc2"), ("GroupedLinear", ""))
    ]
    assert torch.equal(seen.products[0][2], x.flatten(0, 1))
    assert torch.equal(seen.products[0][3][0], first.weight)
    if recipe is None:
        hidden = F.layer_norm(first(x), (32,), mlp.layer_norm_weight, mlp.layer_norm_bias)
        torch.testing.assert_close(seen.products[1][2], hidden.flatten(0, 1).detach())
    assert [tuple(one.shape) for one in seen.products[3][3]] == [(16, 32)] * 3
    assert torch.equal(seen.gradients[0], torch.ones(16, 16))
    assert [one.shape[1] for one in seen.gradients] == [16, 32, 64, 32]


def test_nothing_is_shown_after_the_block() -> None:
    seen, layer = Seen(), hybridq.Linear(32, 32)
    with pytest.raises(ZeroDivisionError), watch_products(seen):
        layer(torch.ones(2, 32))
        raise ZeroDivisionError
    layer(torch.ones(2, 32))
    assert len(seen.products) == 1
