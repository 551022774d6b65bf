"""The methods of a QuantizedTensor that torch gives no operator for: its memory, its values."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Memory"]


class Memory:
    """Methods of torch.Tensor that look at its memory or at all of its values."""

    def data_ptr(self: Any) -> int:
        """Return the address of the first plane's data: it tells tensors apart, nothing else."""
        address: int = self.tensor_storage.first.data.data_ptr()
        return address

    def share_memory_(self: Any) -> Any:
        """Move every buffer to shared memory, for other processes; return self."""
        for buffer in self.tensor_storage.flatten()[0]:
            buffer.share_memory_()
        return self

    def is_shared(self: Any) -> bool:
        """Return whether every buffer is in shared memory."""
        return all(buffer.is_shared() for buffer in self.tensor_storage.flatten()[0])

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

    def tolist(self: Any) -> Any:
        """Return the values as nested lists, as `dequantize().tolist()`."""
        return self.dequantize().tolist()


def _values(tensor: Any, dtype: torch.dtype, memory_format: torch.memory_format) -> torch.Tensor:
    values: torch.Tensor = tensor.dequantize(dtype=dtype)
    if memory_format is torch.preserve_format:
        return values
    return values.contiguous(memory_format=memory_format)
