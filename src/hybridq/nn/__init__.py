"""Modules: drop-in replacements of torch's whose GEMMs run between quantized planes."""

from __future__ import annotations

from .attention import MultiheadAttention
from .checkpoint import checkpoint
from .conversion import Conversion, conversion
from .convert import convert, default_filter
from .fused_sequential import FusedSequential
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear, RMSNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .model_init import dequantized_state_dict, fp8_model_init, quantized_model_init
from .module import QuantizedModule
from .rotary import RotaryPositionEmbedding
from .scaling_dict import state_dict_with_history
from .scaling_update import update_scaling
from .transformer_layer import TransformerLayer

__all__ = [
    "Conversion",
    "FusedSequential",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "QuantizedModule",
    "RMSNormLinear",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "checkpoint",
    "conversion",
    "convert",
    "default_filter",
    "dequantized_state_dict",
    "fp8_model_init",
    "quantized_model_init",
    "state_dict_with_history",
    "update_scaling",
]
