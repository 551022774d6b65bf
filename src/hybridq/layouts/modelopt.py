"""The layout of NVIDIA's ModelOpt: that of its unified checkpoints, for TensorRT-LLM, vLLM, SGLang.

Source: ModelOpt 0.47, `modelopt.torch.export` (`unified_export_hf`, `convert_hf_config`); vLLM,
`ModelOptFp8PcPtLinearMethod`, `ModelOptFp8PbWoLinearMethod` and issue 54126 (scales of blocks).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .layout import Described, Layout, register
from .matching import by_substring_or_glob
from .part import FACTOR, FOUR_DIMS, ROWS, SAME, SCALAR, Part, ScalarPart, Shape
from .per_tensor import CODES, PER_ROW
from .scheme import Scheme

__all__ = ["MODELOPT", "NAME", "PRODUCER"]

NAME: Final = "modelopt"
#: Readers take the file for ModelOpt's own by the name; the version is that of the layout.
PRODUCER: Final = {"name": "modelopt", "version": "0.47.0"}

_E4M3, _U8, _FP32 = torch.float8_e4m3fn, torch.uint8, torch.float32

_NVFP4 = Scheme(
    name="nvfp4",
    spec="nvfp4",
    parts=(
        Part("{module}.weight", "data", _U8),
        Part("{module}.weight_scale", "scale", _E4M3),
        Part("{module}.weight_scale_2", "amax", _FP32, SCALAR, FACTOR),
    ),
    input=ScalarPart("{module}.input_scale", "input", (), FACTOR, 448.0 * 6.0),
    shares_scale=True,
    config={"num_bits": 4, "group_size": 16},
    inputs={"none": "W4A16_NVFP4", "static": "NVFP4"},
)
_FP8 = Scheme(
    name="fp8_tensor",
    spec="fp8_e4m3",
    parts=(CODES, Part("{module}.weight_scale", "scale", _FP32, SCALAR)),
    input=ScalarPart("{module}.input_scale", "input", (), FACTOR, 448.0),
    shares_scale=True,
    config={"num_bits": 8},
    inputs={"static": "FP8"},
)
_MXFP8 = Scheme(
    name="mxfp8",
    spec="mxfp8",
    parts=(CODES, Part("{module}.weight_scale", "scale", _U8)),
    config={"num_bits": 8, "group_size": 32},
    inputs={"dynamic": "MXFP8"},
)
_FP8_CHANNEL = Scheme(
    name="fp8_channel",
    spec=PER_ROW,
    parts=(CODES, Part("{module}.weight_scale", "scale", _FP32, ROWS)),
    config={"num_bits": 8, "strategy": "channel"},
    inputs={"dynamic": "FP8_PER_CHANNEL_PER_TOKEN"},
)


def _fp8_block(scale: str, shape: Shape) -> Scheme:
    return Scheme(
        name="fp8_block",
        spec="fp8_128x128",
        parts=(CODES, Part(f"{{module}}.{scale}", "scale", _FP32, shape)),
        config={"group_size": 128},
        inputs={"none": "FP8_PB_WO"},
        rows=128,
    )


#: NVIDIA's script for Kimi K3 and the draft layers of Qwen3.8 hold scales of blocks so.
_READ = (
    _fp8_block("weight_scale", SAME),
    _fp8_block("weight_scale_inv", SAME),
    Scheme(
        name="mxfp4",
        spec="mxfp4",
        parts=(
            Part("{module}.weight", "data", _U8),
            Part("{module}.weight_scale", "scale", _U8),
        ),
        input=ScalarPart("{module}.input_scale", "input", (), FACTOR, 448.0),
    ),
)


def _algorithm(said: Described, scheme: Scheme) -> str:
    return str(scheme.inputs[said.inputs or next(iter(scheme.inputs))])


def _layers(said: Described) -> dict[str, dict[str, Any]]:
    """Return what is said of each module, where they differ."""
    made = {}
    for name, scheme in said.schemes.items():
        made[name] = {"quant_algo": _algorithm(said, scheme)}
        if "group_size" in scheme.config:
            made[name]["group_size"] = scheme.config["group_size"]
    return made


def _hf_quant_config(said: Described) -> dict[str, Any]:
    layers = _layers(said)
    own: dict[str, Any] = next(iter(layers.values()))
    quantization: dict[str, Any] = {"kv_cache_quant_algo": said.kv_cache and said.kv_cache.upper()}
    if all(one == own for one in layers.values()):
        quantization = {**own, **quantization}
    else:
        quantization = {"quant_algo": "MIXED_PRECISION", **quantization, "quantized_layers": layers}
    return {
        "producer": dict(PRODUCER),
        "quantization": {**quantization, "exclude_modules": list(said.kept)},
    }


def _group(said: Described, scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    if scheme.name == "fp8_block":  # it has no words for blocks there
        return {"quant_algo": _algorithm(said, scheme), "targets": targets}
    weights = {"dynamic": False, "type": "float", **scheme.config}
    is_weight_only = _algorithm(said, scheme).startswith("W4A16")
    inputs = {key: one for key, one in weights.items() if key != "strategy"}
    made: dict[str, Any] = {} if is_weight_only else {"input_activations": inputs}
    return {**made, "weights": weights, "targets": targets}


def _config(said: Described) -> dict[str, Any]:
    own = _hf_quant_config(said)["quantization"]
    names = list(dict.fromkeys(one.name for one in said.schemes.values()))
    groups = {}
    for number, name in enumerate(names):
        targets = [module for module, one in said.schemes.items() if one.name == name]
        scheme = said.schemes[targets[0]]
        groups[f"group_{number}"] = _group(said, scheme, ["Linear"] if len(names) == 1 else targets)
    made = {
        "quant_method": NAME,
        "quant_algo": own["quant_algo"],
        "config_groups": groups,
        "ignore": list(said.kept),
        "producer": dict(PRODUCER),
    }
    for key in ("group_size", "quantized_layers"):
        if key in own:
            made[key] = own[key]
    if said.kv_cache == "fp8":
        made["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    elif said.kv_cache is not None:
        made["kv_cache_scheme"] = said.kv_cache.upper()
    return made


def _kv(bound: float) -> tuple[ScalarPart, ScalarPart]:
    return (
        ScalarPart("{attention}.k_proj.k_scale", "k", (), FACTOR, bound),
        ScalarPart("{attention}.v_proj.v_scale", "v", (), FACTOR, bound),
    )


#: NVFP4, MXFP8, and FP8 per tensor, row or 128x128.
MODELOPT = register(
    Layout(
        name=NAME,
        summary="TensorRT-LLM, vLLM and SGLang, as NVIDIA's own checkpoints",
        source="ModelOpt 0.47, unified checkpoints",
        schemes=(_NVFP4, _FP8, _MXFP8, _FP8_CHANNEL, _fp8_block("weight_scale", FOUR_DIMS)),
        others=_READ,
        methods=(NAME, "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"),
        config=_config,
        excludes=by_substring_or_glob,
        hf_quant_config=_hf_quant_config,
        kv={"fp8": _kv(448.0), "nvfp4": _kv(448.0 * 6.0)},
    )
)
