"""Part `layers`: hybridq.Linear forward and backward, quantization included, beside nn.Linear."""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import Case

import hybridq

NAME = "layers"
UNIT = "nn.Linear in bfloat16"
#: Time over nn.Linear's, at most.
FLOORS = {"mxfp8": 1.3, "nvfp4": 1.6, "fp8_current": None, "mxfp8_fwd_nvfp4_bwd": None}


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return one layer of half of `cols` by as many, for `rows` tokens, under each recipe."""
    size = cols // 2
    x = torch.randn(rows, size, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, size, dtype=torch.bfloat16)
    plain = torch.nn.Linear(size, size, dtype=torch.bfloat16)
    ours = hybridq.Linear(size, size, dtype=torch.bfloat16)

    def step(layer: torch.nn.Module) -> object:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)
        return x.grad

    def under(recipe: str) -> Callable[[], object]:
        def run() -> object:
            with hybridq.autocast(recipe=hybridq.recipes.get(recipe)):
                return step(ours)

        return run

    return [
        Case(f"{name} forward and backward", under(name), lambda: step(plain), UNIT, most)
        for name, most in FLOORS.items()
    ]
