"""Products that make gradients of weights, put off from the backward until somebody asks.

A pipeline fills its bubbles with them: the gradients of inputs, which other stages wait for, come
first (zero-bubble schedules, arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from .main_grad import Into

__all__ = ["GradientQueue"]

#: Returns the gradient of each weight; of those that it added to a `main_grad` anything.
Product = Callable[[], Sequence[torch.Tensor | None]]
_Late = tuple[Sequence[Into | None], Product]


class GradientQueue:
    """What the backwards of a module have put off, oldest first."""

    def __init__(self) -> None:
        # By the weights that a product is for: a module may have several.
        self._waiting: dict[tuple[tuple[int, int], ...], deque[_Late]] = {}

    def put(self, into: Sequence[Into | None], product: Product) -> None:
        """Take a product.

        Args:
            into: where the gradient of each weight is added, None of one that needs none.
            product: makes them, with the bits that the backward would have made.
        """
        key = tuple((id(one.weight), one.group) for one in into if one is not None)
        self._waiting.setdefault(key, deque()).append((into, product))

    def __len__(self) -> int:
        """Return how many backwards wait."""
        return max(map(len, self._waiting.values()), default=0)

    @torch.no_grad()
    def run(self, own: Sequence[torch.Tensor]) -> None:
        """Run the products of the oldest backward, and add what they make.

        Args:
            own: the parameters of the module.

        Raises:
            RuntimeError: a weight is no parameter of the module any more.
        """
        ready = [waiting.popleft() for waiting in self._waiting.values() if waiting]
        for into, product in ready:
            for one in into:
                if one is not None and not any(one.weight is parameter for parameter in own):
                    raise RuntimeError(
                        "backward_dw: the weight of the forward is no parameter of the module any "
                        "more, as under FSDP2, which has reduced its gradient already; leave "
                        "delay_wgrad_compute off"
                    )
            for one, gradient in zip(into, product(), strict=True):
                if one is not None and one.main_grad is None and gradient is not None:
                    _add(one, gradient)


def _add(into: Into, gradient: torch.Tensor) -> None:
    """Add to the `grad` of a weight, as autograd does."""
    weight = into.weight
    if into.is_transposed:
        gradient = gradient.t()
    gradient = gradient.to(weight.dtype)
    if into.group < 0:
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)
        return
    if weight.grad is None:
        weight.grad = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    weight.grad[into.group].add_(gradient)
