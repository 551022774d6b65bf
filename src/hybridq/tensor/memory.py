"""The methods of a QuantizedTensor that torch gives no operator for: its memory, its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..kernels.inputs import begins_at
from ..storage import GivenAway, TensorStorage
from .factories import is_made_by_optimizer, zeros_of_kind
from .replaced import is_replaced_by_module

__all__ = ["Memory"]


class _NoStorage(torch.UntypedStorage):
    """The storage of a quantized tensor: a size, and no memory."""

    def data_ptr(self) -> NoReturn:
        """Raise, since what lies in memory are planes and not the values."""
        # No NotImplementedError: safetensors takes it for a tensor without memory, and reads from
        # wherever `data_ptr` of the tensor points.
        raise RuntimeError(
            "untyped_storage: a quantized tensor has planes and no memory of its values, so "
            "safetensors and others that read that memory cannot write it; save "
            "hybridq.dequantized_state_dict(model), or tensor.dequantize(), or use torch.save"
        )

    def copy_(self, *given: Any, **options: Any) -> NoReturn:
        """Raise, where somebody copies the storage of a quantized tensor to one of its kind.

        Args:
            given, options: as of `torch.UntypedStorage.copy_`.
        """
        raise RuntimeError(
            "untyped_storage: a quantized tensor has planes and no memory of its values, so "
            "torch.distributed.checkpoint.async_save and others that copy that memory cannot take "
            "it; give them hybridq.dequantized_state_dict(model), or use "
            "torch.distributed.checkpoint.save"
        )


class Memory:
    """Methods of torch.Tensor that look at its memory or at all of its values."""

    tensor_storage: TensorStorage

    def data_ptr(self: Any) -> int:
        """Return the address of the first plane's data: it tells tensors apart, nothing else."""
        return begins_at(self.tensor_storage.first.data)

    def clear(self: Any) -> None:
        """Give all planes away: their memory is free once nobody else has it.

        Shape, dtype, device and quantizer stay. Until another tensor's planes are assigned to
        `data`, whatever reads or writes values raises PlaneError, and `get_usages` says False.
        """
        self.tensor_storage = GivenAway()

    def untyped_storage(self: Any) -> torch.UntypedStorage:
        """Return the storage, which has a size and raises when it is asked for its address."""
        own: Any = torch.Tensor.untyped_storage(self)
        own.__class__ = _NoStorage
        return own

    def share_memory_(self: Any) -> Any:
        """Move every buffer to shared memory, for other processes; return self."""
        for buffer in self.tensor_storage.flatten()[0]:
            buffer.share_memory_()
        return self

    def is_shared(self: Any) -> bool:
        """Return whether every buffer is in shared memory."""
        return all(buffer.is_shared() for buffer in self.tensor_storage.flatten()[0])

    def new_zeros(self: Any, *size: Any, **options: Any) -> torch.Tensor:
        """Return zeros with the planes and the quantizer of this tensor, plain ones without it.

        An optimizer that makes its state by it gets plain zeros: a moment is no weight.

        Args:
            size: of the result, as numbers or as one sequence.
            options: dtype, device, layout, requires_grad and pin_memory as for
                `torch.Tensor.new_zeros`; another dtype than FP32, BF16 and FP16 gives plain zeros.
        """
        shape = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
        shape = options.get("size", shape)
        of = {name: options.get(name) for name in ("dtype", "device", "pin_memory")}
        made: Any = NotImplemented
        if not is_made_by_optimizer():
            made = zeros_of_kind(self, tuple(shape), **of)
        if made is NotImplemented:
            return torch.Tensor.new_zeros(self, *size, **options)
        return made.requires_grad_(options.get("requires_grad", False))

    def float(self, *, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return the values in FP32 (dequantized, as `.half()` and `.bfloat16()` are).

        Args:
            memory_format: of the result, as for `torch.Tensor.float`.
        """
        return _values(self, torch.float32, memory_format)

    def half(self, *, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return the values in FP16.

        Args:
            memory_format: of the result, as for `torch.Tensor.half`.
        """
        return _values(self, torch.float16, memory_format)

    def bfloat16(
        self, *, memory_format: torch.memory_format = torch.preserve_format
    ) -> torch.Tensor:
        """Return the values in BF16.

        Args:
            memory_format: of the result, as for `torch.Tensor.bfloat16`.
        """
        return _values(self, torch.bfloat16, memory_format)

    def numpy(self: Any, *, force: bool = False) -> Any:
        """Return the values as a NumPy array, as `dequantize().numpy()`."""
        return self.dequantize().numpy(force=force)

    def __dlpack__(self: Any, **options: Any) -> Any:
        """Return the values as a DLPack capsule, as `dequantize().__dlpack__()`.

        Args:
            options: as of `torch.Tensor.__dlpack__`.

        Raises:
            BufferError: `copy` is False, or the tensor requires grad.
        """
        if options.get("copy") is False:
            raise BufferError("__dlpack__: a quantized tensor's values are decoded, into a copy")
        return self.dequantize().__dlpack__(**options)

    def __dlpack_device__(self: Any) -> Any:
        """Return DLPack's name of the device that the decoded values are on."""
        return torch.empty(0, dtype=torch.uint8, device=self.device).__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        """Raise AttributeError: the values are nowhere in memory. Readers then ask for DLPack."""
        raise AttributeError(
            "__cuda_array_interface__: a quantized tensor has planes and no memory of its values; "
            "take tensor.dequantize()"
        )

    def tolist(self: Any) -> Any:
        """Return the values as nested lists, as `dequantize().tolist()`."""
        return self.dequantize().tolist()


def _values(tensor: Any, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
    values: torch.Tensor = tensor.dequantize(dtype=dtype)
    if is_replaced_by_module():
        # What torch would put in the parameter's place; it assigns to `data` otherwise.
        kept: torch.Tensor = tensor._quantized_like_me(values)
        return kept
    if memory_format is torch.preserve_format:
        return values
    return values.contiguous(memory_format=memory_format)
