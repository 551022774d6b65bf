"""The layout of ComfyUI: one file of a diffusion model, a text encoder or all of a pipeline.

Each quantized linear has a tensor `comfy_quant` beside it, its description in JSON, or the file's
metadata has one for all. Scales of blocks lie in cuBLASLt's tiles, and of two E2M1 codes in a byte
the first is in the upper half: names, dtypes and most shapes are ModelOpt's, the bytes are not.
Older files have a marker `scaled_fp8` and scales under other names. FP8 without a scale is a value.
FP8 with one scale per row is what convert-to-quant writes for an extension of ComfyUI.

Source: ComfyUI, QUANTIZATION.md, `comfy.ops` (how a linear is loaded and saved) and `comfy.utils`
(what older files are taken for); comfy-kitchen 0.2.40, `comfy_kitchen.tensor`; convert-to-quant
1.3.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_name
from .order import HIGH_NIBBLE_FIRST, TILES
from .part import FACTOR, ROWS, SCALAR, TILED, Part, ScalarPart
from .per_tensor import CODES, WIDENED, input_scale
from .scheme import Mark, Scheme

__all__ = ["COMFYUI", "METADATA", "NAME"]

NAME: Final = "comfyui"
#: Key of a file's metadata that says how its layers are quantized.
METADATA: Final = "_quantization_metadata"

_E4M3, _E5M2, _U8, _FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.float32
#: Inputs: quantized as they come, by calibrated scales, or not at all.
_INPUTS: Final = {"dynamic": "dynamic", "static": "static", "none": "none"}


def _mark(name: str, inputs: Mapping[str, str]) -> Mark:
    """Return what says that a linear is held in a format of ComfyUI's."""
    made = {}
    for how in inputs:
        said: dict[str, Any] = {"format": name}
        if how == "none":
            said["full_precision_matrix_mult"] = True
        made[how] = json.dumps(said).encode()
    return Mark("{module}.comfy_quant", made)


def _fp8(name: str, codes: torch.dtype, scale: str, of_input: str, mark: Mark | None) -> Scheme:
    is_e4m3 = codes == _E4M3
    return Scheme(
        name=name,
        spec="fp8_e4m3" if is_e4m3 else "fp8_e5m2",
        parts=(
            CODES if is_e4m3 else Part("{module}.weight", "data", codes),
            Part(f"{{module}}.{scale}", "scale", _FP32, SCALAR, widened=WIDENED),
        ),
        input=input_scale(of_input, torch.finfo(codes).max),
        inputs=_INPUTS,
        mark=mark,
    )


_NVFP4 = Scheme(
    name="nvfp4",
    spec="nvfp4",
    parts=(
        Part("{module}.weight", "data", _U8, order=HIGH_NIBBLE_FIRST),
        Part("{module}.weight_scale", "scale", _E4M3, TILED, widened=(_U8,), order=TILES),
        Part("{module}.weight_scale_2", "amax", _FP32, SCALAR, FACTOR),
    ),
    input=ScalarPart("{module}.input_scale", "input", (), FACTOR, 448.0 * 6.0),
    inputs=_INPUTS,
    mark=_mark("nvfp4", _INPUTS),
    rows=16,
)
_MXFP8_INPUTS: Final = {"dynamic": "dynamic", "none": "none"}
_MXFP8 = Scheme(
    name="mxfp8",
    spec="mxfp8",
    parts=(CODES, Part("{module}.weight_scale", "scale", _U8, TILED, order=TILES)),
    inputs=_MXFP8_INPUTS,
    mark=_mark("mxfp8", _MXFP8_INPUTS),
    rows=32,
)


def _config(said: Described) -> dict[str, Any]:
    """Return nothing: the tensors say it."""
    del said
    return {}


#: NVFP4, MXFP8, and FP8 with one scale per tensor.
COMFYUI = register(
    Layout(
        name=NAME,
        summary="ComfyUI's diffusion models and text encoders",
        source="ComfyUI, QUANTIZATION.md; comfy-kitchen 0.2.40",
        schemes=(
            _NVFP4,
            _fp8(
                "fp8_tensor", _E4M3, "weight_scale", "input_scale", _mark("float8_e4m3fn", _INPUTS)
            ),
            _fp8("fp8_e5m2", _E5M2, "weight_scale", "input_scale", _mark("float8_e5m2", _INPUTS)),
            _MXFP8,
        ),
        others=(
            _fp8("fp8_tensor", _E4M3, "scale_weight", "scale_input", None),
            _fp8("fp8_e5m2", _E5M2, "scale_weight", "scale_input", None),
            Scheme(
                name="fp8_channel",
                spec="e4m3/1x{cols}/fp32/amax/float8_block",
                parts=(CODES, Part("{module}.weight_scale", "scale", _FP32, ROWS)),
            ),
        ),
        marks=(".comfy_quant", "scaled_fp8"),
        has_plain_codes=True,
        methods=(),
        config=_config,
        excludes=by_name,
    )
)
