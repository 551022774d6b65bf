"""The torch.Tensor wrapper around a pair of planes."""

from __future__ import annotations

from . import encoded as encoded  # enters its handler
from .decoded_part import DecodedPart, as_parts
from .functional import Explanation, explain, gemm, grouped_gemm
from .named import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    HybridQuantizedTensor,
    IdentityTensor,
    MXFP8Tensor,
    NVFP4Tensor,
)
from .quantized_tensor import QuantizedTensor
from .readouts import add_readouts
from .saving import SavedTensor, prepare_for_saving, restore_from_saved
from .table import check_no_grad, drop_plane, is_flat, is_quantized, matrix_shape
from .unprepared import Unflattened

__all__ = [
    "DecodedPart",
    "Explanation",
    "Float8BlockwiseQTensor",
    "Float8Tensor",
    "HybridQuantizedTensor",
    "IdentityTensor",
    "MXFP8Tensor",
    "NVFP4Tensor",
    "QuantizedTensor",
    "SavedTensor",
    "Unflattened",
    "add_readouts",
    "as_parts",
    "check_no_grad",
    "drop_plane",
    "explain",
    "gemm",
    "grouped_gemm",
    "is_flat",
    "is_quantized",
    "matrix_shape",
    "prepare_for_saving",
    "restore_from_saved",
]
