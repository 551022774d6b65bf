"""Quantizing into a tensor that is there, and through autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import PlaneError
from ..kernels.operators import StatedFunction
from ..storage import Plane, TensorStorage, overwrite
from ..tensor import QuantizedTensor, check_no_grad, is_quantized, matrix_shape
from .checks import check_source

__all__ = ["Quantize", "check_target", "overwrite_planes"]


def check_target(source: torch.Tensor, target: QuantizedTensor) -> None:
    """Raise unless `source` can be quantized into `target`, as far as their kinds and shapes go.

    Raises:
        TypeError: `source` is no tensor to quantize, or `target` no QuantizedTensor.
        ValueError: the shapes differ.
        RuntimeError: `source` requires grad, outside `torch.no_grad()`.
    """
    check_source(source, "update_quantized")
    check_no_grad(source, "update_quantized")
    if not is_quantized(target):
        raise TypeError(
            f"update_quantized: target must be a QuantizedTensor, got {type(target).__name__}"
        )
    if tuple(source.shape) != tuple(target.shape):
        raise ValueError(
            f"update_quantized: source must have the target's shape {tuple(target.shape)}, "
            f"got {tuple(source.shape)}"
        )


def overwrite_planes(
    source: torch.Tensor,
    target: QuantizedTensor,
    encode: Callable[[torch.Tensor, dict[str, bool]], TensorStorage],
) -> QuantizedTensor:
    """Write what `encode` makes of `source` into the planes of `target`; return `target`.

    Args:
        source, target: for which `check_target` holds.
        encode: takes a plain matrix and the usages of `target`.

    Raises:
        PlaneError: a plane of `target` has another spec than the one that was made, or another
            tensor of this memory has a plane that `target` lacks.
        RuntimeError: `target` is a leaf that requires grad, outside `torch.no_grad()`.
    """
    plain = source.dequantize() if is_quantized(source) else source
    if target.is_leaf and target.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "update_quantized: a leaf that requires grad is written in place only under "
            "torch.no_grad()"
        )
    target.tensor_storage.check_write("update_quantized")
    with torch.no_grad():
        matrix = plain.detach().to(target.device).reshape(matrix_shape(plain.shape))
        made = encode(matrix, target.get_usages())
        pairs = ((target.rowwise, made.rowwise), (target.columnwise, made.columnwise))
        for old, new in pairs:
            _check_spec(old, new)
        for old, new in pairs:  # only now: a refusal leaves both planes as they were
            _overwrite(old, new)
        torch.autograd.graph.increment_version(target)
    return target


def _check_spec(old: Plane | None, new: Plane | None) -> None:
    if old is not None and new is not None and new.count != old.count:
        raise PlaneError(
            f"update_quantized: the target has {old.count} matrices, each with planes of its own, "
            "which this quantizer does not make; use target.quantizer"
        )
    if old is not None and (new is None or new.spec != old.spec):
        raise PlaneError(
            f"update_quantized: the target's {old.direction} plane is {old.spec}, the quantizer "
            f"makes {new.spec if new else 'none'}"
        )


def _overwrite(old: Plane | None, new: Plane | None) -> None:
    if old is None or new is None:
        return
    for name, buffer in old.buffers.items():
        overwrite(buffer, new.buffers[name])
    if old.operand_cache is not None:
        old.operand_cache.forget()


class Quantize(StatedFunction):
    """Encode; the gradient passes unchanged."""

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        quantizer: Any,
        dtype: torch.dtype,
        seed: torch.Tensor | None,
    ) -> QuantizedTensor:
        ctx.dtype = tensor.dtype
        made: QuantizedTensor = quantizer._make(tensor, dtype, seed)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grads[0].to(ctx.dtype), None, None, None
