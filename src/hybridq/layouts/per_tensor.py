"""FP8 with one scale per tensor or per row, as several programs hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from .part import FACTOR, SCALAR, Part, ScalarPart
from .scheme import Scheme

__all__ = ["CODES", "PER_ROW", "WIDENED", "fp8_tensor", "input_scale"]

#: Codes of FP8 stand for the weight.
CODES: Final = Part("{module}.weight", "data", torch.float8_e4m3fn)
#: The spec of a plane with one scale for each row.
PER_ROW: Final = "e4m3/1x{cols}/fp32/amax/float8_block"
#: Some programs write scales in the model's dtype.
WIDENED: Final = (torch.bfloat16, torch.float16)
_INPUTS: Final = {"dynamic": "dynamic", "static": "static"}


def input_scale(name: str, bound: float = 448.0) -> ScalarPart:
    """Return the scale of an input in FP8, which values are multiplied with.

    Args:
        name: its last part, after the module's.
        bound: the largest code, of E4M3 by default.
    """
    return ScalarPart(f"{{module}}.{name}", "input", (), FACTOR, bound)


def fp8_tensor(
    scale: str,
    of_input: str,
    config: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] = _INPUTS,
) -> Scheme:
    """Return the scheme of a weight `[N, K]` whose scale, FP32 `[]`, values are multiplied with.

    Args:
        scale, of_input: last parts of the names of the scales of the weight and of its input.
        config, inputs: as for `Scheme`.
    """
    return Scheme(
        name="fp8_tensor",
        spec="fp8_e4m3",
        parts=(CODES, Part(f"{{module}}.{scale}", "scale", torch.float32, SCALAR, widened=WIDENED)),
        input=input_scale(of_input),
        shares_scale=True,
        config=config or {},
        inputs=inputs,
    )
