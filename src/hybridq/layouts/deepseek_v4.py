"""The layout of DeepSeek-V4's checkpoints: FP8 in blocks, experts in MXFP4, scales named `scale`.

Blocks are of 128x128, or of 32x32 as in V4.1; scales of blocks are powers of two there, and FP32
in the base models.

Source: DeepSeek-V4's checkpoint; transformers 5.24, `FineGrainedFP8Config` and `deepseek_v4`; vLLM.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..errors import SpecError
from .layout import Described, Layout, register
from .matching import by_start_or_end
from .part import Part
from .per_tensor import CODES
from .scheme import Scheme

__all__ = ["DEEPSEEK_V4", "NAME"]

NAME: Final = "deepseek-v4"

_E8M0 = Part("{module}.scale", "scale", torch.float8_e8m0fnu, widened=(torch.uint8,))
_INPUTS = {"dynamic": "dynamic"}

_MXFP4 = Scheme(
    name="mxfp4",
    spec="mxfp4",
    parts=(
        Part("{module}.weight", "data", torch.int8, widened=(torch.uint8,)),
        _E8M0,
    ),
    config={"expert_dtype": "fp4"},
    inputs=_INPUTS,
)
_FP8_BLOCK = Scheme(
    name="fp8_block",
    spec="e4m3/128x128/fp32/amax/float8_block",
    parts=(
        CODES,
        Part(
            *("{module}.scale", "scale", torch.float32),
            widened=(torch.bfloat16, torch.float8_e8m0fnu, torch.uint8),
        ),
    ),
    config={"weight_block_size": [128, 128]},
    inputs=_INPUTS,
)
_MXFP8 = Scheme(
    name="mxfp8_32x32",
    spec="mxfp8_32x32",
    parts=(CODES, _E8M0),
    config={"weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    inputs=_INPUTS,
)


def _config(said: Described) -> dict[str, Any]:
    each = {scheme.name: scheme.config for scheme in said.schemes.values()}
    if {_FP8_BLOCK.name, _MXFP8.name} <= set(each):
        raise SpecError(
            f"layouts: {NAME} has one block size for all weights in FP8, got {_FP8_BLOCK.name} and "
            f"{_MXFP8.name}; export them apart"
        )
    own: dict[str, Any] = {}
    for config in each.values():
        own.update(config)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        **own,
        "modules_to_not_convert": list(said.kept),
        "ignored_layers": list(said.kept),
    }


#: FP8 in 128x128 or 32x32 blocks, and MXFP4.
DEEPSEEK_V4 = register(
    Layout(
        name=NAME,
        summary="DeepSeek-V4's own: transformers and vLLM",
        source="DeepSeek-V4; transformers 5.24, deepseek_v4",
        schemes=(_MXFP4, _FP8_BLOCK, _MXFP8),
        methods=("fp8",),
        config=_config,
        excludes=by_start_or_end,
    )
)
