"""Small functions of Transformer Engine: the device, and tensors that a backward saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import tensor as tensors
from ..distributed import post_all_gather_processing, quantize_master_weights  # noqa: F401

__all__ = [
    "get_device_compute_capability",
    "is_non_tn_fp8_gemm_supported",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]

prepare_for_saving = tensors.prepare_for_saving


def get_device_compute_capability() -> tuple[int, int]:
    """Return that of the current GPU, (0, 0) where there is none."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Return False: columnwise planes are stored transposed on every machine."""
    return False


def restore_from_saved(
    tensors: Sequence[Any],
    saved_tensors: Sequence[torch.Tensor | None],
    return_saved_tensors: bool = False,
) -> Any:
    """Return the tensors that `prepare_for_saving` took apart.

    Args:
        tensors: what it returned second: an entry for each tensor.
        saved_tensors: the plain tensors that it returned first, and maybe more behind them.
        return_saved_tensors: return what is left of them, too.
    """
    count = sum(1 if entry is None else entry.count for entry in tensors)
    made = _restore(tensors, saved_tensors[:count])
    return (made, list(saved_tensors[count:])) if return_saved_tensors else made


_restore = tensors.restore_from_saved


def restore_from_func_ctx(ctx: Any) -> list[torch.Tensor | None]:
    """Return the tensors of an autograd function's context, and free its entries.

    Args:
        ctx: with `saved_tensors`, and `tensor_objects` as `prepare_for_saving` returned them.

    Raises:
        AttributeError: there are no entries.
    """
    if getattr(ctx, "tensor_objects", None) is None:
        raise AttributeError("restore_from_func_ctx: ctx must have tensor_objects, got none")
    made = _restore(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return made


def is_bf16_compatible() -> bool:
    """Return True: every machine computes in BF16."""
    return True


def init_method_normal(sigma: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what fills a weight with normal numbers.

    Args:
        sigma: their standard deviation.
    """
    return lambda weight: torch.nn.init.normal_(weight, mean=0.0, std=sigma)


def scaled_init_method_normal(
    sigma: float, num_layers: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the same for the last projections of a model's residual branches.

    Args:
        sigma: of the other weights; divided by `sqrt(2 * num_layers)`.
        num_layers: of the model.
    """
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def attention_mask_func(attention_scores: torch.Tensor, attention_mask: torch.Tensor) -> Any:
    """Return the scores, -10000 where the mask is True.

    Args:
        attention_scores: floating.
        attention_mask: bool, broadcastable to it.
    """
    return attention_scores.masked_fill(attention_mask, -10000.0)
