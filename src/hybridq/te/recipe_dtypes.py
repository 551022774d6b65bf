"""What scripts ask of a recipe: the dtypes of its codes, and their largest values.

Source: names, order and defaults of arguments: Transformer Engine's `pytorch/quantization`.
"""

from __future__ import annotations

from typing import Any

import torch

from .common.recipe import Format
from .constants import DType

__all__ = ["get_fp4_te_dtype", "get_fp8_max", "get_fp8_te_dtype", "get_fp8_torch_dtype"]


def get_fp8_torch_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> torch.dtype:
    """Return torch's dtype of the FP8 codes of a recipe.

    Args:
        fp8_recipe: with an `fp8_format`.
        fprop_tensor: of inputs and weights, or of gradients, which HYBRID has in E5M2.
    """
    kind = fp8_recipe.fp8_format
    is_e4m3 = kind == Format.E4M3 or (kind == Format.HYBRID and fprop_tensor)
    return torch.float8_e4m3fn if is_e4m3 else torch.float8_e5m2


def get_fp8_te_dtype(fp8_recipe: Any, fprop_tensor: bool = True) -> DType:
    """Return the DType of the FP8 codes of a recipe.

    Args:
        fp8_recipe, fprop_tensor: as for `get_fp8_torch_dtype`.
    """
    is_e4m3 = get_fp8_torch_dtype(fp8_recipe, fprop_tensor) == torch.float8_e4m3fn
    return DType.kFloat8E4M3 if is_e4m3 else DType.kFloat8E5M2


def get_fp4_te_dtype(fp4_recipe: Any) -> DType:
    """Return the DType of the FP4 codes of a recipe.

    Args:
        fp4_recipe: with an `fp4_format`.

    Raises:
        ValueError: it is not E2M1.
    """
    kind = fp4_recipe.fp4_format
    if kind != Format.E2M1:
        raise ValueError(f"get_fp4_te_dtype: fp4_format must be E2M1, got {kind}")
    return DType.kFloat4E2M1


def get_fp8_max(fp8_recipe: Any, fprop_tensor: bool = True) -> int:
    """Return the largest value of the FP8 codes of a recipe.

    Args:
        fp8_recipe, fprop_tensor: as for `get_fp8_torch_dtype`.
    """
    largest = fp8_recipe.fp8_format.value
    return int(largest.max_fwd if fprop_tensor else largest.max_bwd)
