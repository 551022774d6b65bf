"""Part `modules`: fused modules forward and backward, beside the same of separate modules.

The base are torch's norm and activation between `hybridq.Linear` modules, under the same recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import Case
from torch import nn

import hybridq

NAME = "modules"
UNIT = "torch's norm and activation, hybridq.Linear"
RECIPES = ("mxfp8", "nvfp4", "fp8_block", "mxfp8_fwd_nvfp4_bwd")


class _Mlp(nn.Module):
    """RMSNorm, SwiGLU and two linear modules."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, 1e-5)
        self.up = nn.Linear(hidden, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.up(self.norm(x)).chunk(2, -1)
        made: torch.Tensor = self.down(nn.functional.silu(first) * second)
        return made


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return one LayerNormLinear and one LayerNormMLP for `rows / 4` tokens of `cols / 8`."""
    tokens, hidden, width = rows // 4, cols // 8, 11 * cols // 32
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    options = {"bias": False, "dtype": torch.bfloat16}
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {
        f"LayerNormLinear {hidden} x {3 * hidden}": (
            hybridq.LayerNormLinear(hidden, 3 * hidden, **options),
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden, bias=False)),
        ),
        f"LayerNormMLP {hidden} x {width}, swiglu": (
            hybridq.LayerNormMLP(
                hidden, width, normalization="RMSNorm", activation="swiglu", **options
            ),
            _Mlp(hidden, width),
        ),
    }
    found = []
    for label, (fused, apart) in pairs.items():
        apart = hybridq.convert(apart.to(torch.bfloat16))
        for recipe in RECIPES:
            runs = [_step(module, x, recipe) for module in (fused, apart)]
            found.append(Case(f"{label}, {recipe}", runs[0], runs[1], UNIT))
    return found


def _step(module: nn.Module, x: torch.Tensor, recipe: str) -> Callable[[], object]:
    def run() -> object:
        x.grad = None
        module.zero_grad()
        with hybridq.autocast(recipe=recipe):
            y = module(x)
        y.backward(torch.ones_like(y))
        return x.grad

    return run
