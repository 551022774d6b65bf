"""The modules, from `Linear` to `TransformerLayer`."""

from __future__ import annotations

from .attention import MultiheadAttention
from .attention_parts import BiasApart
from .dot_product_attention import DotProductAttention
from .embedding import Embedding
from .foreign_linear import ForeignLinear
from .fused_sequential import FusedSequential
from .group_padding import Fp8Padding, Fp8Unpadding
from .grouped_linear import GroupedLinear
from .grouped_module import GroupedModule
from .kv_cache import InferenceParams
from .layernorm_linear import LayerNormLinear, RMSNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .linear_class import convert_linear, is_linear, reason_against_class, reason_against_linear
from .linear_part import run_part
from .made_class import clash, made_class
from .norms import LayerNorm, RMSNorm
from .operations import ActivationFunction, LayerNormStep, Quantize, RMSNormStep
from .patch_conv import (
    PatchConv,
    PatchConv1d,
    PatchConv2d,
    PatchConv3d,
    is_patch_conv,
    patch_features,
    patches,
    reason_against_patches,
)
from .plain_norm import PlainNorm
from .quantized_module import QuantizedModule
from .quantized_parts import of_part
from .recorded_amaxes import recording_amaxes
from .rotary import RotaryPositionEmbedding, apply_rotary
from .torch_attention import TorchMultiheadAttention, convert_attention
from .torch_encoder import ENCODERS, TorchEncoder, TorchEncoderLayer
from .transformer_layer import TransformerLayer
from .weight_owner import WeightOwner
from .written_options import WrittenOptions, settled

__all__ = [
    "ENCODERS",
    "ActivationFunction",
    "BiasApart",
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
    "clash",
    "convert_attention",
    "convert_linear",
    "is_linear",
    "is_patch_conv",
    "made_class",
    "of_part",
    "patch_features",
    "patches",
    "reason_against_class",
    "reason_against_linear",
    "reason_against_patches",
    "recording_amaxes",
    "run_part",
    "settled",
]
