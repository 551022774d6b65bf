"""What each layer asks of a GPU under each recipe (table: docs/reference/gpu-status.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import hybridq
from cuda_costs import Costs, backward, counted, fake_gpu
from hybridq.nn import BiasApart

ROWS, WIDTH, OUT, GROUPS = 16384, 4096, 16384, 8


class Bound(NamedTuple):
    """What a forward or a backward costs at most.

    Args:
        launches: products, calls of the core and operators, each one launch or more.
        tensors: with new memory.
        nbytes: that operators of torch move, for each of `ROWS x OUT` elements.
        frames: of Python in hybridq, with room for other versions of torch.
    """

    launches: int
    tensors: int
    nbytes: float
    frames: int


#: layer -> recipe -> forward and backward. Of groups, whose operators have shapes only for fake
#: tensors, what happens in an operator is not seen.
TABLE = {
    "LayerNormLinear": {
        "mxfp8": (Bound(5, 8, 0.0, 105), Bound(10, 13, 7.6, 85)),
        "fp8_current": (Bound(5, 8, 0.0, 102), Bound(10, 13, 7.6, 80)),
        "fp8_block": (Bound(5, 8, 0.0, 105), Bound(10, 13, 7.6, 85)),
        "nvfp4": (Bound(9, 9, 0.0, 115), Bound(16, 13, 7.6, 107)),
    },
    "LayerNormMLP": {
        "mxfp8": (Bound(8, 13, 0.0, 190), Bound(17, 21, 39.6, 155)),
        "fp8_current": (Bound(8, 13, 0.0, 184), Bound(17, 21, 39.6, 143)),
        "fp8_block": (Bound(8, 13, 0.0, 190), Bound(17, 21, 39.6, 155)),
        "nvfp4": (Bound(16, 15, 0.0, 208), Bound(29, 21, 39.6, 200)),
    },
    "BiasApart": {
        "mxfp8": (Bound(3, 5, 0.0, 85), Bound(3, 4, 0.0, 62)),
        "nvfp4": (Bound(7, 6, 0.0, 95), Bound(9, 4, 0.0, 84)),
    },
    "GroupedLinear": {
        "mxfp8": (Bound(5, 40, 0.0, 285), Bound(3, 6, 0.0, 100)),
        "fp8_current": (Bound(5, 40, 0.0, 285), Bound(3, 6, 0.0, 104)),
        "fp8_block": (Bound(5, 40, 0.0, 285), Bound(3, 6, 0.0, 100)),
        "nvfp4": (Bound(6, 59, 0.0, 285), Bound(3, 8, 0.0, 100)),
    },
}
CASES = [(layer, recipe) for layer, recipes in TABLE.items() for recipe in recipes]


@pytest.fixture
def costs(monkeypatch) -> Iterator[list[Costs]]:
    """A Hopper that is not there."""
    with fake_gpu(monkeypatch) as made:
        yield made


def _layer(name: str) -> torch.nn.Module:
    sizes = (GROUPS, WIDTH, OUT) if name == "GroupedLinear" else (WIDTH, OUT)
    kind = BiasApart if name == "BiasApart" else getattr(hybridq, name)  # attention's projection
    layer = kind(*sizes, bias=False, device="meta", dtype=torch.bfloat16)
    for module in layer.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda")
            setattr(module, key, torch.nn.Parameter(made))
    return layer


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_costs_of_a_layer(costs, name: str, recipe: str) -> None:
    layer, parts = _layer(name), 2 if name == "LayerNormMLP" else 1
    x = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    given = [x]
    if name == "GroupedLinear":
        given.append(torch.full((GROUPS,), ROWS // GROUPS, dtype=torch.int32, device="cuda"))
    for _ in range(2):  # caches know the shapes from the second step on
        with hybridq.autocast(recipe=recipe):
            y, forward = counted(costs, lambda: layer(*given))
        costs.append(Costs())
        dy = torch.empty(y.shape, dtype=y.dtype, device="cuda")
        grads, back = counted(costs, lambda dy=dy: backward(dy, parts))
    assert grads[0] is not None and grads[0].shape == x.shape
    for costed, bound in zip((forward, back), TABLE[name][recipe], strict=True):
        found = Bound(
            costed.launches, costed.allocations, costed.nbytes / (ROWS * OUT), costed.frames
        )
        assert found.launches <= bound.launches, costed
        assert found.tensors <= bound.tensors, costed
        assert found.nbytes <= bound.nbytes + 0.01, costed
        assert found.frames <= bound.frames, costed
