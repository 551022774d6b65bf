"""The layout of compressed-tensors: vLLM's, llm-compressor's, and one that transformers reads.

Source: compressed-tensors 0.20, `compressors` and `quantization.quant_scheme`.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_name_or_pattern
from .part import FACTOR, RECIPROCAL, Part, ScalarPart
from .per_tensor import PER_ROW
from .scheme import Scheme

__all__ = ["COMPRESSED_TENSORS", "NAME"]

NAME: Final = "compressed-tensors"

_E4M3, _U8, _FP32 = torch.float8_e4m3fn, torch.uint8, torch.float32
_CODES = Part("{module}.weight", "data", _E4M3)
_PACKED = Part("{module}.weight_packed", "data", _U8)
_E8M0_SCALE = Part("{module}.weight_scale", "scale", _U8)
# llm-compressor writes scales in the model's dtype.
_SCALE = Part("{module}.weight_scale", "scale", _FP32, widened=(torch.bfloat16, torch.float16))
_INPUT = ScalarPart("{module}.input_scale", "input", (1,), FACTOR, 448.0)
_GLOBAL_INPUT = ScalarPart("{module}.input_global_scale", "input", (1,), RECIPROCAL, 448.0 * 6.0)


def _args(bits: int, strategy: str, dynamic: bool | str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": dynamic,
        **more,
    }


_TOKEN = _args(8, "token", True)
_FLOAT = "float-quantized"

_NVFP4 = Scheme(
    name="nvfp4",
    spec="nvfp4",
    parts=(
        _PACKED,
        Part("{module}.weight_scale", "scale", _E4M3),
        Part("{module}.weight_global_scale", "amax", _FP32, value=RECIPROCAL),
    ),
    input=_GLOBAL_INPUT,
    shares_scale=True,
    config={
        "format": "nvfp4-pack-quantized",
        "weights": _args(
            4, "tensor_group", False, group_size=16, scale_dtype="torch.float8_e4m3fn"
        ),
    },
    inputs={
        "none": None,
        "static": _args(
            4,
            "tensor_group",
            "local",
            group_size=16,
            scale_dtype="torch.float8_e4m3fn",
            observer="static_minmax",
        ),
    },
)
_MXFP8 = Scheme(
    name="mxfp8",
    spec="mxfp8",
    parts=(_CODES, _E8M0_SCALE),
    config={
        "format": "mxfp8-quantized",
        "weights": _args(8, "group", False, group_size=32, scale_dtype="torch.uint8"),
    },
    inputs={
        "none": None,
        "dynamic": _args(8, "group", True, group_size=32, scale_dtype="torch.uint8"),
    },
)
_MXFP4 = Scheme(
    name="mxfp4",
    spec="mxfp4",
    parts=(_PACKED, _E8M0_SCALE),
    config={
        "format": "mxfp4-pack-quantized",
        "weights": _args(4, "group", False, group_size=32, scale_dtype="torch.uint8"),
    },
    inputs={
        "none": None,
        "dynamic": _args(4, "group", True, group_size=32, scale_dtype="torch.uint8"),
    },
)
_FP8_TENSOR = Scheme(
    name="fp8_tensor",
    spec="fp8_e4m3",
    parts=(_CODES, _SCALE),
    input=_INPUT,
    shares_scale=True,
    config={"format": _FLOAT, "weights": _args(8, "tensor", False)},
    inputs={
        "none": None,
        "dynamic": _TOKEN,
        "static": _args(8, "tensor", False, observer="static_minmax"),
    },
)
_FP8_BLOCK = Scheme(
    name="fp8_block",
    spec="e4m3/128x128/fp32/amax/float8_block",
    parts=(_CODES, _SCALE),
    config={"format": _FLOAT, "weights": _args(8, "block", False, block_structure=[128, 128])},
    inputs={"none": None, "dynamic": _args(8, "group", True, group_size=128)},
)
_FP8_CHANNEL = Scheme(
    name="fp8_channel",
    spec=PER_ROW,
    parts=(_CODES, _SCALE),
    input=_INPUT,
    config={"format": _FLOAT, "weights": _args(8, "channel", False)},
    inputs={
        "none": None,
        "dynamic": _TOKEN,
        "static": _args(8, "tensor", False, observer="static_minmax"),
    },
)


def _config(said: Described) -> dict[str, Any]:
    groups: dict[str, dict[str, Any]] = {}
    schemes = list(dict.fromkeys(scheme.name for scheme in said.schemes.values()))
    for number, name in enumerate(schemes):
        own = [module for module, one in said.schemes.items() if one.name == name]
        scheme = said.schemes[own[0]]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else own,
            "weights": dict(scheme.config["weights"]),
            "input_activations": scheme.inputs[said.inputs or next(iter(scheme.inputs))],
            "output_activations": None,
            "format": scheme.config["format"],
        }
    formats = list(dict.fromkeys(group["format"] for group in groups.values()))
    return {
        "quant_method": NAME,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(said.kept),
        "kv_cache_scheme": None if said.kv_cache is None else _args(8, "tensor", False),
        "global_compression_ratio": None,
    }


#: NVFP4, MXFP8, MXFP4, and FP8 per tensor, per row and in 128x128 blocks.
COMPRESSED_TENSORS = register(
    Layout(
        name=NAME,
        summary="vLLM, llm-compressor and transformers, with the package compressed-tensors",
        source="compressed-tensors 0.20",
        schemes=(_NVFP4, _MXFP8, _MXFP4, _FP8_TENSOR, _FP8_CHANNEL, _FP8_BLOCK),
        methods=(NAME,),
        config=_config,
        excludes=by_name_or_pattern,
        kv={
            "fp8": (
                ScalarPart("{attention}.k_scale", "k", (1,), FACTOR, 448.0),
                ScalarPart("{attention}.v_scale", "v", (1,), FACTOR, 448.0),
            )
        },
    )
)
