"""What an asynchronous collective returns."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["CollectiveHandle"]


class CollectiveHandle:
    """A collective whose bytes are on their way: `wait()` gives its result.

    The message was sent when the handle was made; `wait` decodes, and sums, what has arrived. An
    all-reduce sends its second message in `wait`, so all ranks must wait for their handles in the
    same order.

    Args:
        finish: returns the result.

    Source: ours.
    """

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Return the result; the same tensor at each call.

        Raises:
            RuntimeError: a call before has failed.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        if self._result is None:
            raise RuntimeError("wait: this collective has failed before; start a new one")
        return self._result
