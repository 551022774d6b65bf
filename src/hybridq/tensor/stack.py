"""QuantizedStack: matrices of one shape in one tensor, each of them quantized by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..storage import TensorStorage
from .decoded_part import as_parts
from .quantized_tensor import QuantizedTensor
from .table import dequantize

__all__ = ["QuantizedStack", "is_stack", "split_stack"]

_aten = torch.ops.aten


class QuantizedStack(torch.Tensor):
    """A tensor `[G, rows, cols]` whose G matrices are quantized each by itself.

    A QuantizedTensor of that shape is one matrix `[G * rows, cols]`: its blocks, and the amax of a
    format that has one, are shared between the G. Here each matrix has planes of its own, also of
    other formats than its neighbour's. `stack[g]` and `stack.unbind()` are QuantizedTensors that
    share the planes; every other operator sees the decoded values. It cannot be written.

    Attributes:
        storages: the planes of each matrix.
    """

    storages: tuple[TensorStorage, ...]

    @staticmethod
    def make(storages: Sequence[TensorStorage], dtype: torch.dtype) -> QuantizedStack:
        """Return the stack of matrices of one shape on one device.

        Args:
            storages: one for each matrix, at least one.
            dtype: what the tensor appears as and is decoded to: FP32, BF16 or FP16.
        """
        first = storages[0].first
        made: Any = torch.Tensor._make_wrapper_subclass(
            QuantizedStack,
            (len(storages), first.rows, first.cols),
            dtype=dtype,
            device=first.data.device,
        )
        made.storages = tuple(storages)
        return made

    def matrices(self) -> list[torch.Tensor]:
        """Return the matrices: QuantizedTensors with the planes that the stack has of them."""
        shape = tuple(self.shape[1:])
        return [QuantizedTensor.make(storage, shape, self.dtype) for storage in self.storages]

    def decoded(self) -> torch.Tensor:
        """Return the values as a plain tensor, outside autograd."""
        return torch.stack([dequantize(matrix, self.dtype) for matrix in self.matrices()])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
        plain = torch.utils._pytree.tree_map(
            lambda one: one.decoded() if is_stack(one) else one, (args, kwargs)
        )
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
    """Return the matrices of a tensor `[G, rows, cols]`: views, or QuantizedTensors of a stack.

    Args:
        tensor: a QuantizedStack, or plain.
    """
    if isinstance(tensor, QuantizedStack) and not torch.is_grad_enabled():
        return tensor.matrices()  # views cannot be made in inference mode of what is not
    return list(tensor.unbind(0))


def _own(func: Any, stack: QuantizedStack, *args: Any, **kwargs: Any) -> Any:
    """Return what an operator makes of the planes as they are, or NotImplemented."""
    if func in (_aten.detach.default, _aten.alias.default):
        return QuantizedStack.make(stack.storages, stack.dtype)
    if func is _aten.as_strided.default:
        same = tuple(args[0]) == tuple(stack.shape) and tuple(args[1]) == tuple(stack.stride())
        is_start = not (args[2] if len(args) > 2 else kwargs.get("storage_offset"))
        return QuantizedStack.make(stack.storages, stack.dtype) if same and is_start else _NO
    if func is _aten._to_copy.default:
        dtype = kwargs.get("dtype") or stack.dtype
        moves = kwargs.get("device") not in (None, stack.device)
        return _NO if moves or dtype not in _HIGH else QuantizedStack.make(stack.storages, dtype)
    if func is _aten.unbind.int and not (args[0] if args else kwargs.get("dim", 0)):
        return stack.matrices()
    if func is _aten.select.int and args[0] == 0 and abs(args[1] + 0.5) < len(stack.storages):
        return stack.matrices()[args[1]]
    return _NO


_NO: Any = NotImplemented
_HIGH = (torch.float32, torch.bfloat16, torch.float16)
