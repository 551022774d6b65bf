"""`hybridq.multi_tensor_quantize`: many tensors at once, such as all weights of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..kernels.operators import StatedFunction
from ..storage import TensorStorage, build_storages
from ..tensor import QuantizedTensor, is_quantized, matrix_shape
from .checks import check_source
from .quantizer import Quantizer, draw_seed

__all__ = ["multi_tensor_quantize"]

_WHERE = "multi_tensor_quantize"


def multi_tensor_quantize(
    tensors: Iterable[torch.Tensor],
    quantizer: Quantizer | Sequence[Quantizer],
    *,
    seeds: torch.Tensor | None = None,
) -> list[QuantizedTensor]:
    """Return the tensors quantized: the bits of `[quantizer(t) for t in tensors]`, in few launches.

    Tensors of one quantizer, dtype and device are encoded by one operation. On a GPU that is one
    launch for up to 48 tensors of a format that weights have, after one for their amaxes where the
    format needs them (docs/reference/tensors.md); elsewhere, and for tensors that no such launch
    can take, one after the other. Tensors whose amax is reduced over a group are quantized one by
    one, in the order given, since every rank must reduce them in the same order.

    Args:
        tensors: `(..., K)` float32, bfloat16 or float16, each of its own shape and strides; empty
            ones are legal, and so is an empty list.
        quantizer: one for all tensors, or a sequence with one for each.
        seeds: int64 `[N]` for stochastic rounding, one for each tensor. None draws one for each
            tensor whose quantizer is stochastic, from torch's generator of its device and in the
            order given, as the single calls do.

    Returns:
        One QuantizedTensor for each tensor, in the order given. A gradient reaches each tensor by
        itself, as if nothing were rounded (straight-through).

    Raises:
        TypeError: `tensors`, `quantizer` or `seeds` is something else, or a tensor cannot be
            quantized.
        ValueError: as many quantizers or seeds as tensors are needed.
        PlaneError: a quantizer has both usages off.

    Source: the name is that of Transformer Engine's extension, which takes one quantizer for each
        tensor.

    Example:
        >>> import torch, hybridq
        >>> weights = [torch.randn(n, 64) for n in (8, 1, 33)]
        >>> made = hybridq.multi_tensor_quantize(weights, hybridq.MXFP8Quantizer())
        >>> [tuple(t.shape) for t in made]
        [(8, 64), (1, 64), (33, 64)]
    """
    sources = _sources(tensors)
    quantizers = _quantizers(quantizer, len(sources))
    drawn = _seeds(sources, quantizers, seeds)
    storages: dict[int, TensorStorage] = {}
    for numbers in _groups(sources, quantizers):
        matrices = [sources[i].detach().reshape(matrix_shape(sources[i].shape)) for i in numbers]
        seed = _joined([drawn[i] for i in numbers])
        made = _encode(quantizers[numbers[0]], matrices, seed)
        for i, storage in zip(numbers, made, strict=True):
            storages[i] = storage
    return [
        _tensor(source, storages[i], one)
        for i, (source, one) in enumerate(zip(sources, quantizers, strict=True))
    ]


def _sources(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as plain ones."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"{_WHERE}: tensors must be a sequence of tensors, got {type(tensors).__name__}"
        )
    sources = []
    for tensor in tensors:
        check_source(tensor, _WHERE)
        sources.append(tensor.dequantize() if is_quantized(tensor) else tensor)
    return sources


def _quantizers(quantizer: Quantizer | Sequence[Quantizer], count: int) -> list[Quantizer]:
    if isinstance(quantizer, Quantizer):
        return [quantizer] * count
    found = list(quantizer) if isinstance(quantizer, Sequence) else [quantizer]
    for one in found:
        if not isinstance(one, Quantizer):
            raise TypeError(
                f"{_WHERE}: quantizer must be a Quantizer or a sequence of them, got "
                f"{type(one).__name__}"
            )
    if len(found) != count:
        raise ValueError(
            f"{_WHERE}: quantizer must be one for all tensors or one for each of {count}, got "
            f"{len(found)}"
        )
    return found


def _seeds(
    sources: list[torch.Tensor], quantizers: list[Quantizer], seeds: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return the seed of each tensor, int64 `[1]`, or None where nothing is stochastic."""
    given: object = seeds
    if given is not None and not isinstance(given, torch.Tensor):
        raise TypeError(
            f"{_WHERE}: seeds must be an int64 tensor [{len(sources)}], got {type(given).__name__}"
        )
    if seeds is not None and (seeds.dtype != torch.int64 or tuple(seeds.shape) != (len(sources),)):
        raise ValueError(
            f"{_WHERE}: seeds must be int64 [{len(sources)}], got {seeds.dtype} "
            f"{tuple(seeds.shape)}"
        )
    drawn: list[torch.Tensor | None] = []
    for i, (source, one) in enumerate(zip(sources, quantizers, strict=True)):
        if not one.is_stochastic:
            drawn.append(None)
        elif seeds is not None:
            drawn.append(seeds[i : i + 1])
        else:
            drawn.append(draw_seed(source.device))
    return drawn


def _joined(drawn: list[torch.Tensor | None]) -> torch.Tensor | None:
    own = [seed for seed in drawn if seed is not None]
    return torch.cat(own) if own else None


def _groups(sources: list[torch.Tensor], quantizers: list[Quantizer]) -> list[list[int]]:
    """Return the numbers of the tensors that one operation encodes, in the order of the first.

    A tensor whose amax is reduced over a group is alone.
    """
    groups: dict[tuple[str, torch.dtype, torch.device, int], list[int]] = {}
    for i, (source, one) in enumerate(zip(sources, quantizers, strict=True)):
        place = 0 if one.amax_group is None else i + 1
        groups.setdefault((one.text, source.dtype, source.device, place), []).append(i)
    return list(groups.values())


def _encode(
    quantizer: Quantizer, matrices: list[torch.Tensor], seeds: torch.Tensor | None
) -> list[TensorStorage]:
    """Return what `quantizer.encode` does of each matrix, by one operation."""
    if quantizer.amax_group is not None:
        return [quantizer.encode(matrix, seed=seeds) for matrix in matrices]
    row, col = quantizer.specs_to_encode()
    return build_storages(
        matrices,
        row,
        col,
        seeds=seeds,
        col_source=quantizer.columnwise_source,
        keep_row=quantizer.makes_rowwise,
    )


def _tensor(source: torch.Tensor, storage: TensorStorage, quantizer: Quantizer) -> QuantizedTensor:
    if torch.is_grad_enabled() and source.requires_grad:
        return _Through.apply(source, storage, quantizer)
    return QuantizedTensor.make(storage, source.shape, source.dtype, quantizer=quantizer)


class _Through(StatedFunction):
    """A tensor that is encoded already; the gradient passes unchanged.

    One node for each tensor: a node for all of them would hold every gradient back until the last.
    """

    second = "exact"

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, storage: TensorStorage, quantizer: Quantizer
    ) -> QuantizedTensor:
        ctx.dtype = source.dtype
        return QuantizedTensor.make(storage, source.shape, source.dtype, quantizer=quantizer)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].to(ctx.dtype), None, None
