"""What reads a tensor past torch's operators: of tensors that have no memory of their own."""

from __future__ import annotations

from typing import Any

import torch

from ...kernels.inputs import begins_at

__all__ = ["Reads"]


class Reads:
    """`numpy`, `tolist` and an address, for a tensor subclass that holds its values otherwise."""

    requires_grad: bool

    def _values(self) -> torch.Tensor:
        """Return the values as a plain tensor, outside autograd."""
        raise NotImplementedError

    def data_ptr(self) -> int:
        """Return the address of what it holds: it tells tensors apart, nothing else.

        accelerate finds an optimizer's parameters by it once FSDP2 has sharded them.
        """
        held = self._memory()
        return 0 if held is None else begins_at(held)

    def _memory(self) -> torch.Tensor | None:
        """Return the plain tensor whose memory tells it apart; None: it holds nothing yet."""
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
