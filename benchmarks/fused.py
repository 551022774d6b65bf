"""Part `fused`: norm + encode and activation + encode as one operation, beside two.

The base is what a model would run otherwise: torch's own norm or activation in BF16, then hybridq's
encode of the result; and, with the same bits as the one operation, hybridq's norm or activation and
then its encode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from timing import Case, Run
from torch.nn import functional

from hybridq.formats import DEFAULT_SIGNS
from hybridq.kernels.choice import EncodeRequest
from hybridq.kernels.operators import activation_encode, encode, norm_encode

NAME = "fused"

Make = Callable[[], torch.Tensor]

_TURNED = f"nvfp4;rht={DEFAULT_SIGNS:04x}"
#: (label, row, col)
PLANES = (
    ("mxfp8 row", "mxfp8", ""),
    ("mxfp8 both", "mxfp8", "mxfp8"),
    ("fp8_e4m3 both", "fp8_e4m3", "fp8_e4m3"),
    ("nvfp4 row + column transform", "nvfp4", _TURNED),
    ("mxfp8 row + nvfp4 column transform", "mxfp8", _TURNED),
)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=1)
    return functional.silu(first) * second


def cases(rows: int, cols: int, threads: int) -> list[Case]:
    """Return all lines of the part."""
    x = torch.randn(rows, cols, dtype=torch.bfloat16)
    wide = torch.randn(rows, 2 * cols, dtype=torch.bfloat16)
    gamma, beta = torch.randn(cols), torch.randn(cols)
    weights = (gamma.bfloat16(), beta.bfloat16())
    ops = torch.ops.hybridq
    norms: dict[str, tuple[Make, Make]] = {
        "LayerNorm": (
            lambda: functional.layer_norm(x, (cols,), *weights),
            lambda: ops.norm(x, gamma, beta, 1e-5, "LayerNorm")[0],
        ),
        # torch's own RMSNorm is several operations on a CPU.
        "RMSNorm": (
            lambda: functional.rms_norm(x, (cols,), weights[0]),
            lambda: ops.norm(x, gamma, None, 1e-5, "RMSNorm")[0],
        ),
    }
    activations: dict[str, tuple[torch.Tensor, Make]] = {
        "relu": (x, lambda: functional.relu(x)),
        "gelu": (x, lambda: functional.gelu(x, approximate="tanh")),
        "swiglu": (wide, lambda: _swiglu(wide)),
    }
    found: list[Case] = []
    for name, row, col in PLANES:
        planes = EncodeRequest(row, col)

        def add(
            kind: str,
            run: Run,
            torchs: Make,
            ours: Make,
            name: str = name,
            planes: EncodeRequest = planes,
        ) -> None:
            label = f"{kind}, {name}"
            for make, what, end in ((torchs, "torch's", ""), (ours, "hybridq's", ", of two")):
                base: Run = lambda make=make: encode(make(), planes)  # type: ignore[misc]  # noqa: E731
                found.append(Case(label + end, run, base, f"{what} {kind}, then encode"))

        for kind, (torchs, ours) in norms.items():
            shift = beta if kind == "LayerNorm" else None
            run = partial(norm_encode, x, gamma, shift, 1e-5, kind, False, planes)
            add(kind, run, torchs, ours)
        for kind, (own, torchs) in activations.items():
            run = partial(activation_encode, own, kind, planes)
            add(kind, run, torchs, partial(ops.activation, own, kind))
    return found
