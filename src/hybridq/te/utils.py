"""Small functions of Transformer Engine: the device, and tensors that a backward saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import distributed
from .. import tensor as tensors
from .glu import deinterleave_glu_tensor, interleave_glu_tensor

__all__ = [
    "deinterleave_glu_tensor",
    "get_device_compute_capability",
    "interleave_glu_tensor",
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
        tensors: what it returned second: an entry for each tensor, or the tensor that its own
            method of that name returned.
        saved_tensors: the plain tensors that it returned first, and maybe more behind them.
        return_saved_tensors: return what is left of them, too.
    """
    rest, made = list(saved_tensors), list[Any]()
    for entry in tensors:
        if isinstance(entry, torch.Tensor):  # whose own method gave its buffers away
            rest = entry.restore_from_saved(rest)  # type: ignore[attr-defined]
            made.append(entry)
            continue
        count = 1 if entry is None else entry.count
        made += _restore([entry], rest[:count])
        rest = rest[count:]
    return (made, rest) if return_saved_tensors else made


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
    made = restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
    ctx.tensor_objects = None
    return made


def is_bf16_compatible() -> bool:
    """Return True: every machine computes in BF16."""
    return True


def get_attention_backend(
    attention_params: Any = None,
) -> tuple[bool, None, bool, None, bool, list[bool]]:
    """Return which attention runs, as Transformer Engine's modules ask: its unfused one.

    Args:
        attention_params: not looked at: `DotProductAttention` is torch's attention between
            quantized tensors, of any sizes.

    Returns:
        Whether FlashAttention runs, and of which version; whether cuDNN's does, and in which way;
        whether the unfused one does; and all three.
    """
    del attention_params
    return False, None, False, None, True, [False, False, True]


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
    """Return the scores, in place minus infinity where the mask is True.

    Args:
        attention_scores: floating; written.
        attention_mask: bool, broadcastable to it.
    """
    return attention_scores.masked_fill_(attention_mask, float("-inf"))


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Quantize masters into weights, rounded to the weights' dtype first, as there.

    They are dealt out over ranks, as for `hybridq.distributed.quantize_master_weights`, whose
    weights lie in a FlatCodes. Of one rank weights may lie anywhere; what of them has no master
    keeps its values, under the scales of the whole.

    Args:
        model_weights, master_weights, start_offsets, group: as there.
        fsdp_shard_model_weights: None.
        manual_post_all_gather_processing: has no effect: `post_all_gather_processing` is called
            in any case.

    Raises:
        NotImplementedError: `fsdp_shard_model_weights` is given.
        ValueError: a weight has no plane, or as there.
        TypeError, RuntimeError: as there.
    """
    if fsdp_shard_model_weights is not None:
        raise NotImplementedError(
            "quantize_master_weights: fsdp_shard_model_weights must be None; under FSDP2 "
            "hybridq.distributed.prepare_fsdp2 has weights quantized as they are gathered"
        )
    for weight in model_weights:
        if not any(weight.get_usages().values()):
            raise ValueError(
                f"quantize_master_weights: a weight {list(weight.shape)} must have a plane, got "
                "one without both rowwise and columnwise ones"
            )
    pairs = list(zip(model_weights, master_weights, start_offsets, strict=True))
    rounded = [None if own is None else own.to(weight.dtype).float() for weight, own, _ in pairs]
    is_alone = torch.distributed.is_initialized() and torch.distributed.get_world_size(group) == 1
    if not is_alone or any(_is_flat(weight) for weight in model_weights):
        return distributed.quantize_master_weights(model_weights, rounded, start_offsets, group)
    with torch.no_grad():
        for (weight, _, start), own in zip(pairs, rounded, strict=True):
            if own is not None:
                values = weight.dequantize(dtype=torch.float32).reshape(-1).clone()
                values[start or 0 :][: own.numel()] = own.reshape(-1)
                weight.quantize_(values.view(weight.shape))
    return None


#: Its older names; the second is of NVFP4's weights, and each takes weights of every format.
cast_master_weights_to_fp8 = quantize_master_weights
cast_master_weights_to_nvfp4 = quantize_master_weights


def replace_raw_data(tensor: Any, new_raw_data: torch.Tensor) -> None:
    """Let the codes of a tensor lie in other memory; its values stay.

    Args:
        tensor: quantized; the codes are those of its rowwise plane, of the other one without it.
        new_raw_data: of their dtype and as many, contiguous; it is written.

    Raises:
        ValueError: it is not.
    """
    old = tensor.tensor_storage.first.data
    fits = new_raw_data.dtype == old.dtype and new_raw_data.numel() == old.numel()
    if not (fits and new_raw_data.is_contiguous()):
        raise ValueError(
            f"replace_raw_data: new_raw_data must be contiguous {old.dtype} {list(old.shape)}, got "
            f"{new_raw_data.dtype} {list(new_raw_data.shape)}"
        )
    own = new_raw_data if new_raw_data.shape == old.shape else new_raw_data.view(old.shape)
    own.detach().copy_(old)
    tensor.tensor_storage = tensor.tensor_storage.map(lambda one: own if one is old else one)


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """Give weights the planes whose codes were gathered, those that lie in a FlatCodes.

    Args:
        model_weights: of the last `quantize_master_weights`.

    Raises:
        ValueError: one was not quantized since.
    """
    distributed.post_all_gather_processing([one for one in model_weights if _is_flat(one)])


def _is_flat(weight: Any) -> bool:
    """Whether a weight lies in a FlatCodes."""
    return getattr(weight, "flat_place", None) is not None
