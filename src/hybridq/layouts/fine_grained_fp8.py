"""The layout of DeepSeek-V3's checkpoints: FP8 in blocks of 128x128, or MXFP8, with `scale_inv`.

What it calls an inverse is what values are multiplied with. Mistral's checkpoints have one for the
tensor, and one for the input.

Source: DeepSeek-V3's checkpoint; Ministral 3's; transformers 5.24, `FineGrainedFP8Config`; vLLM,
`Fp8Config`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..errors import SpecError
from .layout import Described, Layout, register
from .matching import by_start_or_end
from .part import ONE_BY_ONE, SAME, SCALAR, Part, Shape
from .per_tensor import CODES, fp8_tensor
from .scheme import Scheme

__all__ = ["FINE_GRAINED_FP8", "NAME"]

NAME: Final = "fine-grained-fp8"

# DeepSeek-V3.1 and later write powers of two as E8M0 or as bytes.
_SCALE = Part(
    "{module}.weight_scale_inv",
    "scale",
    torch.float32,
    widened=(torch.bfloat16, torch.float8_e8m0fnu, torch.uint8),
)
_INPUTS = {"dynamic": "dynamic"}

_FP8_BLOCK = Scheme(
    name="fp8_block",
    spec="e4m3/128x128/fp32/amax/float8_block",
    parts=(CODES, _SCALE),
    config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    inputs=_INPUTS,
)
_MXFP8 = Scheme(
    name="mxfp8",
    spec="mxfp8",
    parts=(CODES, Part("{module}.weight_scale_inv", "scale", torch.uint8)),
    config={"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    inputs=_INPUTS,
)


_FP8_TENSOR = fp8_tensor(
    *("weight_scale_inv", "activation_scale"),
    config={"quant_method": "fp8", "weight_block_size": None},
)


def _stack(name: str, spec: str, shape: Shape) -> Scheme:
    """Return how a stack of experts is held that one tensor has."""
    scale = Part("{weight}_scale_inv", "scale", torch.float32, shape, widened=_SCALE.widened)
    return Scheme(name, spec, (Part("{weight}", "data", torch.float8_e4m3fn), scale))


#: As Mistral Small 4 and transformers write experts: a scale for each, or for each of its blocks.
_STACKS = (
    _stack("fp8_tensor", _FP8_TENSOR.spec, ONE_BY_ONE),
    _stack("fp8_tensor", _FP8_TENSOR.spec, SCALAR),
    _stack("fp8_block", _FP8_BLOCK.spec, SAME),
)


def _config(said: Described) -> dict[str, Any]:
    names = sorted({scheme.name for scheme in said.schemes.values()})
    if len(names) > 1:
        raise SpecError(
            f"layouts: {NAME} has one block size for all weights, got {' and '.join(names)}; "
            "export them apart, or as compressed-tensors"
        )
    own = next(iter(said.schemes.values())).config
    return {
        "quant_method": own["quant_method"],
        "fmt": "e4m3",
        "activation_scheme": said.inputs or "dynamic",
        **{key: value for key, value in own.items() if key != "quant_method"},
        "modules_to_not_convert": list(said.kept),
        "ignored_layers": list(said.kept),
    }


#: FP8 in 128x128 blocks or with one scale per tensor, and MXFP8.
FINE_GRAINED_FP8 = register(
    Layout(
        name=NAME,
        summary="DeepSeek's own, and Mistral's: transformers, vLLM and SGLang",
        source="DeepSeek-V3; transformers 5.24, FineGrainedFP8Config",
        schemes=(_FP8_BLOCK, _MXFP8, _FP8_TENSOR),
        methods=("fp8", "mxfp8"),
        config=_config,
        excludes=by_start_or_end,
        stacks=_STACKS,
    )
)
