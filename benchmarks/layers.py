"""Part `layers`: hybridq.Linear forward and backward, quantization included, beside nn.Linear.

On a CPU for which torch has no fast BF16 product, beside `nn.Linear` in FP32 with half the tokens
and half the features, so that the part takes minutes there too; and, of a small layer, beside
`nn.Linear` in BF16, of which one step of the large one would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timing import Case

import hybridq
from hybridq.kernels.decoded.plain_gemm import is_slow

NAME = "layers"
UNIT = "nn.Linear in bfloat16"
FP32_UNIT = "nn.Linear in float32"
#: Time over nn.Linear's, at most; over that in FP32 it is 1.3 for all.
FLOORS = {"mxfp8": 1.3, "nvfp4": 1.6, "fp8_current": None, "mxfp8_fwd_nvfp4_bwd": None}
FP32_FLOOR = 1.3
#: Tokens, and features in and out, of the layer that is held against slow BF16.
SMALL = 256


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return one layer of half of `cols` by as many, for `rows` tokens, under each recipe."""
    if not is_slow(torch.bfloat16):
        return _beside(torch.bfloat16, rows, cols // 2, dict(FLOORS))
    floors = dict.fromkeys((*FLOORS, "bf16"), FP32_FLOOR)
    small = dict.fromkeys((*FLOORS, "bf16"), 1.0)
    return [
        *_beside(torch.float32, rows // 2, cols // 4, floors),
        *_beside(torch.bfloat16, SMALL, SMALL, small),
    ]


def _beside(
    dtype: torch.dtype, rows: int, size: int, floors: dict[str, float | None] | dict[str, float]
) -> list[Case]:
    """Return hybridq.Linear in BF16 under each recipe over nn.Linear in `dtype`."""
    x = torch.randn(rows, size, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(rows, size, dtype=torch.bfloat16)
    plain_x, plain_dy = x.detach().to(dtype).requires_grad_(), dy.to(dtype)
    plain = torch.nn.Linear(size, size, dtype=dtype)
    ours = hybridq.Linear(size, size, dtype=torch.bfloat16)
    unit = FP32_UNIT if dtype == torch.float32 else UNIT

    def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> object:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)
        return x.grad

    def under(recipe: str) -> Callable[[], object]:
        def run() -> object:
            with hybridq.autocast(recipe=hybridq.recipes.get(recipe)):
                return step(ours, x, dy)

        return run

    what = "forward and backward" + (f", {rows} x {size}" if size == SMALL else "")
    return [
        Case(f"{name} {what}", under(name), lambda: step(plain, plain_x, plain_dy), unit, most)
        for name, most in floors.items()
    ]
