"""Modules: drop-in replacements of torch's whose GEMMs run between quantized planes.

Rooms, each of which imports only those before it: `weights`, `delayed_scaling`, `autograd`,
`modules`. What converts models is `hybridq.converters`, whose older names can be had here, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from .._imports import after_import
from .autograd import (
    checkpoint,
    gather_tokens,
    get_cpu_offload_context,
    offload,
    saving_planes,
    scatter_tokens,
    sum_over,
)
from .delayed_scaling import (
    history_of,
    hold_history,
    state_dict_with_history,
    take_history,
    update_scaling,
)
from .modules import (
    ActivationFunction,
    BiasApart,
    DotProductAttention,
    Embedding,
    ForeignLinear,
    Fp8Padding,
    Fp8Unpadding,
    FusedSequential,
    GroupedLinear,
    GroupedModule,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    LayerNormStep,
    Linear,
    MultiheadAttention,
    PatchConv,
    PatchConv1d,
    PatchConv2d,
    PatchConv3d,
    PlainNorm,
    Quantize,
    QuantizedModule,
    RMSNorm,
    RMSNormLinear,
    RMSNormStep,
    RotaryPositionEmbedding,
    TorchEncoder,
    TorchEncoderLayer,
    TorchMultiheadAttention,
    TransformerLayer,
    WeightOwner,
    WrittenOptions,
    apply_rotary,
    of_part,
    recording_amaxes,
    settled,
)
from .weights import dequantized_state_dict, fp8_model_init, quantized_model_init

__all__ = [
    "ActivationFunction",
    "BiasApart",
    "Conversion",
    "DotProductAttention",
    "Embedding",
    "ForeignLinear",
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedSequential",
    "GroupedLinear",
    "GroupedModule",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerNormStep",
    "Linear",
    "MultiheadAttention",
    "PatchConv",
    "PatchConv1d",
    "PatchConv2d",
    "PatchConv3d",
    "PlainNorm",
    "Quantize",
    "QuantizedModule",
    "RMSNorm",
    "RMSNormLinear",
    "RMSNormStep",
    "RotaryPositionEmbedding",
    "TorchEncoder",
    "TorchEncoderLayer",
    "TorchMultiheadAttention",
    "TransformerLayer",
    "WeightOwner",
    "WrittenOptions",
    "apply_rotary",
    "checkpoint",
    "conversion",
    "convert",
    "default_filter",
    "dequantized_state_dict",
    "fp8_model_init",
    "gather_tokens",
    "get_cpu_offload_context",
    "history_of",
    "hold_history",
    "of_part",
    "offload",
    "quantized_model_init",
    "recording_amaxes",
    "saving_planes",
    "scatter_tokens",
    "settled",
    "state_dict_with_history",
    "sum_over",
    "take_history",
    "update_scaling",
]

#: Older names of `hybridq.converters`, a layer to the right of this one.
_MOVED: Final = ("Conversion", "conversion", "convert", "default_filter")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("..converters", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MOVED})


# Adapters of modules that nobody converts, or were converted before PEFT was imported.
after_import("peft", "hybridq.integrations.peft")
