"""hybridq: quantized tensors for PyTorch, any format in either direction of any tensor.

Example:
    >>> import torch, hybridq
    >>> t = hybridq.quantize(torch.randn(4, 64), "mxfp8", columnwise="nvfp4")
    >>> t.dequantize().shape
    torch.Size([4, 64])
"""

from __future__ import annotations

from . import distributed, formats, kernels, nn, optim, ptq, quantizers, recipes, report, tensor
from ._version import __version__
from .errors import (
    BackendError,
    CheckpointError,
    HybridQWarning,
    PlaneError,
    RecipeError,
    SpecError,
)
from .formats import DEFAULT_SIGNS, Element, Format, PlaneSpec
from .gemm.prepare import forget, prepare
from .nn import (
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNormLinear,
    RotaryPositionEmbedding,
    TransformerLayer,
    checkpoint,
    convert,
    dequantized_state_dict,
    fp8_model_init,
    quantized_model_init,
    state_dict_with_history,
    update_scaling,
)
from .ptq import convert_checkpoint, load_checkpoint
from .quantizers import (
    DelayedScalingRequest,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    multi_tensor_quantize,
    quantize,
    quantize_grouped,
    quantizer,
)
from .recipes import CustomRecipe, QuantizerRole, Recipe, RecipeSchedule, autocast, fp8_autocast
from .report import MemoryReport, memory_report, show
from .settings import backend, gemm_cache
from .storage import Plane, RaggedTensor, TensorStorage
from .tensor import (
    Explanation,
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
    QuantizedTensor,
    explain,
    gemm,
    grouped_gemm,
    prepare_for_saving,
    restore_from_saved,
)

__all__ = [
    "DEFAULT_SIGNS",
    "BackendError",
    "CheckpointError",
    "CustomRecipe",
    "DelayedScalingRequest",
    "Element",
    "Explanation",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Format",
    "GroupedLinear",
    "HybridQWarning",
    "HybridQuantizedTensor",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MemoryReport",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "Plane",
    "PlaneError",
    "PlaneSpec",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "RMSNormLinear",
    "RaggedTensor",
    "Recipe",
    "RecipeError",
    "RecipeSchedule",
    "RotaryPositionEmbedding",
    "SpecError",
    "TensorStorage",
    "TransformerLayer",
    "__version__",
    "autocast",
    "backend",
    "checkpoint",
    "convert",
    "convert_checkpoint",
    "dequantized_state_dict",
    "distributed",
    "explain",
    "forget",
    "formats",
    "fp8_autocast",
    "fp8_model_init",
    "gemm",
    "gemm_cache",
    "grouped_gemm",
    "kernels",
    "load_checkpoint",
    "memory_report",
    "multi_tensor_quantize",
    "nn",
    "optim",
    "prepare",
    "prepare_for_saving",
    "ptq",
    "quantize",
    "quantize_grouped",
    "quantized_model_init",
    "quantizer",
    "quantizers",
    "recipes",
    "report",
    "restore_from_saved",
    "show",
    "state_dict_with_history",
    "tensor",
    "update_scaling",
]
