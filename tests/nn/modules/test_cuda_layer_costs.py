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


#: layer -> recipe -> forward and backward. Of groups whose tokens need a statistic, what happens in
#: an operator is not seen: there fake tensors have shapes only.
TABLE = {
    "LayerNormLinear": {
        "mxfp8": (Bound(3, 6, 0.0, 103), Bound(10, 13, 7.6, 70)),
        "fp8_current": (Bound(3, 6, 0.0, 100), Bound(10, 13, 7.6, 64)),
        "fp8_block": (Bound(3, 6, 0.0, 103), Bound(10, 13, 7.6, 70)),
        "nvfp4": (Bound(7, 7, 0.0, 112), Bound(16, 13, 7.6, 90)),
    },
    "LayerNormMLP": {
        "mxfp8": (Bound(6, 11, 0.0, 184), Bound(17, 21, 39.6, 132)),
        "fp8_current": (Bound(6, 11, 0.0, 178), Bound(17, 21, 39.6, 120)),
        "fp8_block": (Bound(6, 11, 0.0, 184), Bound(17, 21, 39.6, 132)),
        "nvfp4": (Bound(14, 13, 0.0, 201), Bound(29, 21, 39.6, 170)),
    },
    "BiasApart": {
        "mxfp8": (Bound(3, 5, 0.0, 77), Bound(3, 4, 0.0, 59)),
        "nvfp4": (Bound(7, 6, 0.0, 86), Bound(9, 4, 0.0, 79)),
    },
    "GroupedLinear": {
        "mxfp8": (Bound(6, 8, 0.0, 125), Bound(4, 5, 0.0, 95)),
        "fp8_current": (Bound(6, 10, 0.0, 125), Bound(4, 6, 0.0, 95)),
        "fp8_block": (Bound(6, 8, 0.0, 125), Bound(4, 5, 0.0, 95)),
        "nvfp4": (Bound(6, 13, 0.0, 160), Bound(3, 8, 0.0, 100)),
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


def test_costs_of_groups_do_not_grow_with_their_number(costs) -> None:
    """But for the views that autograd is given of each weight's gradient."""
    found = []
    for groups in (2, 64):
        weights = hybridq.GroupedLinear(groups, 256, 512, bias=False, device="meta")
        for key, parameter in list(weights.named_parameters()):
            made = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
            setattr(weights, key, torch.nn.Parameter(made))
        x = torch.empty(64 * 128, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        sizes = torch.full((groups,), 64, dtype=torch.int32, device="cuda")
        for _ in range(2):
            with hybridq.autocast(recipe="mxfp8"):
                y, forward = counted(costs, lambda own=(weights, x, sizes): own[0](*own[1:]))
            costs.append(Costs())
            dy = torch.empty(y.shape, dtype=y.dtype, device="cuda")
            _, back = counted(costs, lambda dy=dy: backward(dy))
        found.append((forward, back))
        costs.append(Costs())  # what comes next is not theirs
    for few, many in zip(*found, strict=True):
        assert (few.launches, few.allocations) == (many.launches, many.allocations)
        assert many.frames - few.frames <= 1


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
