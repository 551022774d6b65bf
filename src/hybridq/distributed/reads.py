"""What reads a tensor past torch's operators: of tensors that have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Reads"]


class Reads:
    """`numpy` and `tolist`, for a tensor subclass that holds its values otherwise."""

    requires_grad: bool

    def _values(self) -> torch.Tensor:
        """Return the values as a plain tensor, outside autograd."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a NumPy array; what it is written is not seen.

        Args:
            force: also of a tensor that requires a gradient, or is not on the CPU.

        Raises:
            RuntimeError: the tensor requires a gradient, and `force` is False.
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "numpy: a tensor that requires grad must be detached first; call "
                "detach().numpy(), or numpy(force=True)"
            )
        return self._values().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._values().tolist()
