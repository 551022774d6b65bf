"""QuantizedStack: matrices of one shape in one tensor, each of them quantized by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch_private import no_torch_function, tree_map
from ..storage import TensorStorage
from .decoded_part import as_parts
from .quantized_tensor import QuantizedTensor
from .table import dequantize

__all__ = ["QuantizedStack", "is_stack", "split_stack", "split_transposed"]

_aten = torch.ops.aten


class QuantizedStack(torch.Tensor):
    """A tensor `[G, rows, cols]` whose G matrices are quantized each by itself.

    Or one `[G, cols, rows]` that holds each of them transposed.

    A QuantizedTensor of that shape is one matrix `[G * rows, cols]`: its blocks, and the amax of a
    format that has one, are shared between the G. Here each matrix has planes of its own, also of
    other formats than its neighbour's. `stack[g]` and `stack.unbind()` are QuantizedTensors that
    share the planes; every other operator sees the decoded values. It cannot be written.

    Attributes:
        storages: the planes of each matrix.
        is_transposed: each matrix is the transpose of a part of the tensor.
    """

    storages: tuple[TensorStorage, ...]
    is_transposed: bool

    @staticmethod
    def make(
        storages: Sequence[TensorStorage], dtype: torch.dtype, is_transposed: bool = False
    ) -> QuantizedStack:
        """Return the stack of matrices of one shape on one device.

        Args:
            storages: one for each matrix, at least one.
            dtype: what the tensor appears as and is decoded to: FP32, BF16 or FP16.
            is_transposed: the tensor is `[G, cols, rows]`.
        """
        first = storages[0].first
        matrix = (first.cols, first.rows) if is_transposed else (first.rows, first.cols)
        made: Any = torch.Tensor._make_wrapper_subclass(
            QuantizedStack,
            (len(storages), *matrix),
            dtype=dtype,
            device=first.data.device,
        )
        made.storages, made.is_transposed = tuple(storages), is_transposed
        return made

    def matrices(self) -> list[torch.Tensor]:
        """Return the matrices `[rows, cols]`: QuantizedTensors with the stack's planes of them."""
        shape = tuple(self.shape[1:])
        shape = shape[::-1] if self.is_transposed else shape
        return [QuantizedTensor.make(storage, shape, self.dtype) for storage in self.storages]

    def decoded(self) -> torch.Tensor:
        """Return the values as a plain tensor, outside autograd."""
        return torch.stack([self._decoded(matrix) for matrix in self.matrices()])

    def _decoded(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return what the tensor has of one matrix, in the order of memory that it states."""
        values = dequantize(matrix, self.dtype)
        return values.t().contiguous() if self.is_transposed else values

    def parts(self) -> list[torch.Tensor]:
        """Return the parts along the first axis: quantized, or decoded if they are transposed."""
        if not self.is_transposed:
            return self.matrices()
        return [self.part(number) for number in range(len(self.storages))]

    def part(self, number: int) -> torch.Tensor:
        """Return one of them.

        Args:
            number: from -G to G - 1.
        """
        matrix = self.matrices()[number]
        is_plain = self.storages[number].first.spec.format.is_identity
        if not (self.is_transposed or is_plain):  # plain ones meet torch's own operators
            return matrix
        made: torch.Tensor = as_parts(self._decoded(matrix))
        return made

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _own(func, *args, **kwargs) if args and is_stack(args[0]) else NotImplemented
        if found is not NotImplemented:
            return found
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func}: a stack of quantized matrices cannot be written, got shape "
                f"{[tuple(one.shape) for one in args if is_stack(one)]}"
            )
        plain = tree_map(lambda one: one.decoded() if is_stack(one) else one, (args, kwargs))
        result = func(*plain[0], **plain[1])
        return as_parts(result) if func.is_view else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedStack(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # Not NotImplementedError: dynamo takes that for its own.
        raise RuntimeError(
            "torch.compile: a stack of quantized matrices cannot be an input of a compiled graph; "
            "leave hybridq.distributed.prepare_fsdp2 out where blocks are compiled, or give each "
            "group a weight of its own: single_grouped_weight=False"
        )

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        raise RuntimeError("torch.compile: a stack of quantized matrices is in no graph")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decoded().__reduce_ex__(protocol)  # a plain tensor in every file


def is_stack(value: Any) -> bool:
    """Return whether `value` is a QuantizedStack."""
    return isinstance(value, QuantizedStack)


def split_stack(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a tensor along its first axis: views, or QuantizedTensors of a stack.

    Args:
        tensor: a QuantizedStack, or plain.
    """
    if isinstance(tensor, QuantizedStack) and not torch.is_grad_enabled():
        if tensor.is_transposed:
            return [matrix.t() for matrix in tensor.matrices()]
        return tensor.matrices()  # views cannot be made in inference mode of what is not
    return list(tensor.unbind(0))


def split_transposed(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a tensor along its first axis, each transposed: as `split_stack` does.

    Args:
        tensor: a QuantizedStack, or plain.
    """
    if isinstance(tensor, QuantizedStack) and tensor.is_transposed and not torch.is_grad_enabled():
        return tensor.matrices()
    return [matrix.t() for matrix in split_stack(tensor)]


def _own(func: Any, stack: QuantizedStack, *args: Any, **kwargs: Any) -> Any:
    """Return what an operator makes of the planes as they are, or NotImplemented."""

    def same(dtype: torch.dtype = stack.dtype) -> QuantizedStack:
        return QuantizedStack.make(stack.storages, dtype, stack.is_transposed)

    if func in (_aten.detach.default, _aten.alias.default):
        return same()
    if func is _aten.as_strided.default:
        is_same = tuple(args[0]) == tuple(stack.shape) and tuple(args[1]) == tuple(stack.stride())
        is_start = not (args[2] if len(args) > 2 else kwargs.get("storage_offset"))
        return same() if is_same and is_start else _NO
    if func is _aten._to_copy.default:
        dtype = kwargs.get("dtype") or stack.dtype
        moves = kwargs.get("device") not in (None, stack.device)
        return _NO if moves or dtype not in _HIGH else same(dtype)
    if func is _aten.unbind.int and not (args[0] if args else kwargs.get("dim", 0)):
        return stack.parts()
    if func is _aten.select.int and args[0] == 0 and abs(args[1] + 0.5) < len(stack.storages):
        return stack.part(args[1])
    return _NO


_NO: Any = NotImplemented
_HIGH = (torch.float32, torch.bfloat16, torch.float16)
