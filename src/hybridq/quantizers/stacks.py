"""Several matrices in one tensor, each of them quantized by itself: the weights of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import PlaneError
from ..storage import TensorStorage, build_storages
from ..tensor import QuantizedTensor
from .checks import check_dtype, check_source

__all__ = ["MakesStacks"]


class MakesStacks:
    """Methods of a Quantizer that make planes of each matrix of a tensor `[G, rows, cols]`."""

    def quantize_stack(self: Any, tensor: torch.Tensor) -> QuantizedTensor:
        """Return a tensor of several matrices quantized, each by itself.

        `quantize` takes the same tensor for one matrix `[G * rows, cols]`, whose blocks and amax
        the G share. Here nothing is shared: `made[g]` has the planes of `quantize(tensor[g])`. A
        write rewrites them so.

        Args:
            tensor: `[G, rows, cols]` float32, bfloat16 or float16, G at least 1, outside autograd.

        Raises:
            TypeError: dtype or layout of `tensor` cannot be quantized.
            ValueError: it has another number of axes, or no matrix.
            PlaneError: both usages are off.

        Example:
            >>> import torch, hybridq
            >>> x = torch.randn(3, 32, 64)
            >>> made = hybridq.quantizer("nvfp4").quantize_stack(x)
            >>> made.rowwise.amax.shape, torch.equal(made.rowwise.amax[1, 0], x[1].abs().max())
            (torch.Size([3, 1]), True)
        """
        check_source(tensor, "quantize_stack")
        _check_shape(tensor.shape, "quantize_stack")
        with torch.no_grad():
            storage = self.encode_stack(tensor.detach())
        return QuantizedTensor.make(storage, tensor.shape, tensor.dtype, quantizer=self)

    def encode_stack(self: Any, matrices: torch.Tensor) -> TensorStorage:
        """Return the storage of several plain matrices, outside autograd.

        Args:
            matrices: `[G, rows, cols]` float32, bfloat16 or float16, G at least 1.

        Raises:
            PlaneError: both usages are off.
        """
        if matrices.is_meta:
            made: TensorStorage = self.encode(matrices[0], seed=_no_seed(matrices.device))
            return made.stacked(len(matrices))
        one_by_one = list(matrices.unbind(0))
        if self.amax_group is not None or self.is_stochastic:
            storages = [self.encode(one) for one in one_by_one]
        else:
            row, col = self.specs_to_encode()
            source, keeps = self.columnwise_source, self.makes_rowwise
            storages = build_storages(one_by_one, row, col, col_source=source, keep_row=keeps)
        return TensorStorage.stack(storages)

    def make_empty_stack(
        self: Any,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> QuantizedTensor:
        """Return a tensor as `quantize_stack` makes it, with zeroed buffers, to be written into.

        Args:
            shape: `[G, rows, cols]`, G at least 1.
            dtype: nominal dtype.
            device: of the buffers; None: torch's default device.

        Raises:
            ValueError: `shape` is another one.
        """
        check_dtype(dtype, "make_empty_stack")
        _check_shape(shape, "make_empty_stack")
        zeros = torch.zeros(*shape[1:], dtype=dtype, device=device)
        made = self.encode(zeros, seed=_no_seed(zeros.device))
        storage = TensorStorage.stack([made] * shape[0])
        return QuantizedTensor.make(storage, tuple(shape), dtype, quantizer=self)

    def encode_as(
        self: Any, plain: torch.Tensor, count: int | None, seed: torch.Tensor | None
    ) -> TensorStorage:
        """Return the storage of a matrix `[rows, cols]`, or of the `count` that it is made of.

        Args:
            plain: the matrix.
            count: of the target's storage.
            seed: as in `quantize`.

        Raises:
            PlaneError: a seed is given for several matrices.
        """
        if count is None:
            one: TensorStorage = self.encode(plain, seed=seed)
            return one
        if seed is not None:
            raise PlaneError("update_quantized: several matrices in one tensor take no seed")
        return self.encode_stack(plain.unflatten(0, (count, -1)))


def _no_seed(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


def _check_shape(shape: Sequence[int], where: str) -> None:
    if len(shape) != 3 or not shape[0]:
        raise ValueError(
            f"{where}: takes [G, rows, cols] with a matrix at least, got {list(shape)}"
        )
