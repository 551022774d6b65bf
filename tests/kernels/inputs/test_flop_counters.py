"""Operations that torch's FlopCounterMode counts are those of the same products in BF16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import hybridq

ROWS, WIDTH, OUT = 40, 64, 96


def counted(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "nvfp4", "fp8_current", "fp8_delayed"])
@pytest.mark.parametrize("needs_input", [False, True])
def test_a_training_step_has_three_products(recipe: str, needs_input: bool) -> None:
    model = hybridq.convert(nn.Sequential(nn.Linear(WIDTH, OUT), nn.Linear(OUT, WIDTH)))
    groups = hybridq.GroupedLinear(3, WIDTH, OUT)
    x = torch.randn(ROWS, WIDTH, requires_grad=needs_input)

    def step() -> None:
        with hybridq.autocast(recipe=recipe):
            (model(x).sum() + groups(x, [8, 12, 20]).sum()).backward()

    products = (3 if needs_input else 2) + 3 + (3 if needs_input else 2)
    assert counted(step) == products * 2 * ROWS * WIDTH * OUT


def test_products_outside_of_modules_are_counted() -> None:
    w = hybridq.quantize(torch.randn(WIDTH, WIDTH), "nvfp4")
    out = torch.zeros(WIDTH, WIDTH)
    assert counted(lambda: hybridq.gemm(w, w)) == 2 * WIDTH**3
    assert counted(lambda: hybridq.gemm(w, w, out=out, accumulate=True)) == 2 * WIDTH**3
    served = hybridq.quantize_model(nn.Sequential(nn.Linear(WIDTH, OUT)), "nvfp4")
    x = torch.randn(1, WIDTH)
    assert counted(lambda: served(x)) == 2 * WIDTH * OUT
    compiled = torch.compile(served, backend="eager")
    compiled(x)
    assert counted(lambda: compiled(x)) == 2 * WIDTH * OUT
