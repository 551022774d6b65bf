"""Activation functions of feed-forward layers, in FP32 operations of a stated order.

Source: ours; docs/reference/numerics.md, "Activations". Names and the halves of gated ones are
those of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .elements import power_of_two
from .rounding import round_values

__all__ = ["ACTIVATIONS", "Activation", "activation", "exp", "sigmoid"]

# exp(r) = 1 + (r + r^2 * (1/2 + ...)): coefficients of the bracket in rising powers of r, fitted
# over |r| <= ln(2)/2 for the least largest relative error (3.1e-9), then rounded to FP32.
_POLYNOMIAL = tuple(
    float.fromhex(text)
    for text in ("0x1.fffffcp-2", "0x1.555492p-3", "0x1.5558f2p-5", "0x1.123a2p-7", "0x1.6a23dp-10")
)
_LOG2_E = float.fromhex("0x1.715476p0")
# ln(2) in two pieces: the first has 10 bits, so that its product with an exponent is exact.
_LN2_HIGH, _LN2_LOW = float.fromhex("0x1.63p-1"), float.fromhex("-0x1.bd0106p-13")
# Beyond these exp is infinite or rounds to zero.
_LARGEST, _SMALLEST = 89.0, -105.0
# GELU: sqrt(8 / pi), and 0.044715 times it. Quick GELU: 1.702.
_GELU, _GELU_CUBIC = float.fromhex("0x1.988454p0"), float.fromhex("0x1.2444f2p-4")
_QUICK = float.fromhex("0x1.b3b646p0")


def exp(v: torch.Tensor) -> torch.Tensor:
    """Return e^v: a polynomial of r from -ln(2)/2 to ln(2)/2 times a power of two, within one ulp.

    Above 88.73 infinity, below -103.98 zero, NaN stays; subnormal results are rounded once.

    Args:
        v: FP32, any shape.

    Source: ours; docs/reference/numerics.md, "Activations".
    """
    v = v.clamp(_SMALLEST, _LARGEST)  # keeps NaN
    n = torch.round(v * _LOG2_E)
    r = (v - n * _LN2_HIGH) - n * _LN2_LOW
    bracket = torch.full_like(r, _POLYNOMIAL[-1])
    for coefficient in _POLYNOMIAL[-2::-1]:
        bracket = bracket * r + coefficient
    value = (bracket * (r * r) + r) + 1.0
    # Two factors: one alone would leave the range of exponents before the result does.
    exponent = torch.where(n.isnan(), 0.0, n).to(torch.int32)
    first = exponent >> 1
    factors = [power_of_two(e).to(torch.float32) for e in (first, exponent - first)]
    return (value * factors[0]) * factors[1]


def sigmoid(v: torch.Tensor) -> torch.Tensor:
    """Return `1 / (1 + e^-v)`, as `e^v / (1 + e^v)` for negative v: small values keep their bits.

    Args:
        v: FP32, any shape.
    """
    small = exp(-v.abs())
    return torch.where(v < 0.0, small, 1.0) / (small + 1.0)


def _relu(v: torch.Tensor) -> torch.Tensor:
    return torch.where(v < 0.0, 0.0, v)


def _srelu(v: torch.Tensor) -> torch.Tensor:
    positive = _relu(v)
    return positive * positive


def _gelu(v: torch.Tensor) -> torch.Tensor:
    # 0.5 * (1 + tanh(u)) is sigmoid(2u), without the cancellation of 1 + tanh.
    return v * sigmoid(v * ((v * v) * _GELU_CUBIC + _GELU))


def _silu(v: torch.Tensor) -> torch.Tensor:
    return v * sigmoid(v)


def _qgelu(v: torch.Tensor) -> torch.Tensor:
    return v * sigmoid(v * _QUICK)


@dataclass(frozen=True)
class Activation:
    """One activation.

    Args:
        name: as Transformer Engine calls it.
        core: name of the function of one value, in the compiled core too.
        is_gated: x is `[rows, 2 * cols]`; the second half is multiplied with the function of the
            first.
        function: of FP32 values.
    """

    name: str
    core: str
    is_gated: bool
    function: Callable[[torch.Tensor], torch.Tensor] = field(compare=False)


def _records() -> dict[str, Activation]:
    functions = {"relu": _relu, "srelu": _srelu, "gelu": _gelu, "silu": _silu, "qgelu": _qgelu}
    gated = {"reglu": "relu", "sreglu": "srelu", "geglu": "gelu", "swiglu": "silu"}
    gated["qgeglu"] = "qgelu"
    plain = {name: Activation(name, name, False, run) for name, run in functions.items()}
    return plain | {
        name: Activation(name, core, True, functions[core]) for name, core in gated.items()
    }


#: Activations by name: relu, srelu, gelu, silu, qgelu and the gated reglu, sreglu, geglu, swiglu,
#: qgeglu.
ACTIVATIONS = _records()


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the activation of x in the dtype of x, rounded once.

    Args:
        x: `[rows, cols]` float32, bfloat16 or float16; `[rows, 2 * cols]` for a gated one.
        kind: a name in ACTIVATIONS.

    Returns:
        `[rows, cols]` of x's dtype. A gated one is `function(first half) * second half`, the
        product of FP32 values.

    Source: docs/reference/numerics.md, "Activations".
    """
    record = ACTIVATIONS[kind]
    values = x.to(torch.float32)
    if not record.is_gated:
        return round_values(record.function(values), x.dtype)
    first, second = values.chunk(2, dim=1) if x.shape[1] else (values, values)
    return round_values(record.function(first) * second, x.dtype)
