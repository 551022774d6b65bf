"""The torch.Tensor wrapper around a pair of planes."""

from __future__ import annotations

from .aten import is_quantized
from .functional import Explanation, explain, gemm
from .named import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
)
from .quantized_tensor import (
    QuantizedTensor,
    SavedTensor,
    matrix_shape,
    prepare_for_saving,
    restore_from_saved,
)

__all__ = [
    "Explanation",
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "HybridQuantizedTensor",
    "IdentityTensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "QuantizedTensor",
    "SavedTensor",
    "explain",
    "gemm",
    "is_quantized",
    "matrix_shape",
    "prepare_for_saving",
    "restore_from_saved",
]
