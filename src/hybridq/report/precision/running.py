"""One run of a model for a report: a batch, or a function of the caller that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from ...recipes import Recipe, autocast

__all__ = ["Run"]


class Run(NamedTuple):
    """How a model is run once.

    Attributes:
        owner: name of the function that was called, for errors.
        model: any module.
        data: a batch: a tensor is `model(batch)`, a tuple or a list `model(*batch)`, a mapping
            `model(**batch)`; or a function that is called with the model and returns a loss.
        loss: makes a loss of what the model returns; None: it returns one, by itself, first in a
            tuple, or as `.loss`.
        backward: whether the loss is differentiated.
    """

    owner: str
    model: nn.Module
    data: Any
    loss: Callable[[Any], torch.Tensor] | None = None
    backward: bool = True

    def __call__(self, recipe: Recipe | None) -> float | None:
        """Run the model, and its backward; return the loss, or None: there is none.

        Args:
            recipe: that the modules compute under; None: that of the caller.

        Raises:
            TypeError: data are of another kind.
            ValueError: a backward is wanted, and there is no loss.
        """
        under: AbstractContextManager[Any] = nullcontext()
        if recipe is not None:
            under = autocast(recipe=recipe)
        with under, torch.set_grad_enabled(self.backward):
            value = self._forward()
        if not isinstance(value, torch.Tensor):
            return None if value is None else float(value)
        if self.backward and value.requires_grad:
            value.backward()
        return float(value.detach())

    def _forward(self) -> Any:
        """Return the loss as a scalar tensor or number, or None."""
        if callable(self.data) and not isinstance(self.data, torch.Tensor | Mapping):
            made = self.data(self.model)
            if made is None or isinstance(made, int | float):
                return made
        else:
            made = _called(self.owner, self.model, self.data)
        found = self.loss(made) if self.loss is not None else _loss_of(made)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found.reshape(())
        if self.backward or self.loss is not None:
            got = f"a tensor {list(made.shape)}" if isinstance(made, torch.Tensor) else type(made)
            raise ValueError(
                f"{self.owner}: a backward needs a loss of one element, got {got} of the model; "
                "give loss=, a function of what the model returns, or a function of the model "
                "that returns a loss, or backward=False"
            )
        return None


def _called(owner: str, model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, torch.Tensor):
        return model(batch)
    raise TypeError(
        f"{owner}: a batch must be a tensor, a tuple, a list or a mapping, or a function of the "
        f"model, got {type(batch).__name__}"
    )


def _loss_of(made: Any) -> Any:
    own = getattr(made, "loss", None)
    if own is not None:
        return own
    return made[0] if isinstance(made, tuple) and made else made
