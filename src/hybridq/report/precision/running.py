"""One run of a model for a report: a batch, or a function of the caller that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...recipes import Recipe, autocast

__all__ = ["Run", "check_loss", "check_model"]


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
        is_compared: it is run again and again, from the same parameters: no optimizer may step.
    """

    owner: str
    model: nn.Module
    data: Any
    loss: Callable[[Any], torch.Tensor] | None = None
    backward: bool = True
    is_compared: bool = True

    def __call__(self, recipe: Recipe | None) -> float | None:
        """Run the model, and its backward; return the loss, or None: there is none.

        Args:
            recipe: that the modules compute under; None: that of the caller.

        Raises:
            TypeError: data are of another kind.
            ValueError: a backward is wanted, and there is no loss; an optimizer of the model steps.
        """
        under: AbstractContextManager[Any] = nullcontext()
        if recipe is not None:
            under = autocast(recipe=recipe)
        held = _no_steps(self.owner, self.model) if self.is_compared else nullcontext()
        with under, held, torch.set_grad_enabled(self.backward):
            value = self._forward()
        if not isinstance(value, torch.Tensor):
            return None if value is None else float(value)
        if self.backward and value.requires_grad:
            value.backward()
        return float(value.detach())

    def _forward(self) -> Any:
        """Return the loss as a scalar tensor or number, or None."""
        is_loop = callable(self.data) and not isinstance(self.data, torch.Tensor | Mapping)
        if is_loop:
            made = self.data(self.model)
            if made is None or isinstance(made, int | float):
                return made
        else:
            made = _called(self.owner, self.model, self.data)
        found = self.loss(made) if self.loss is not None else _loss_of(made)
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found.reshape(())
        if self.backward or self.loss is not None:
            who = "the function" if is_loop else "the model"
            if self.loss is None:
                fix = "loss=, a function of what the model returns, or a function of the model"
                raise ValueError(
                    f"{self.owner}: a backward needs a loss of one element, got {_kind(made)} of "
                    f"{who}; give {fix} that returns a loss, or backward=False"
                )
            raise ValueError(
                f"{self.owner}: loss= must return a tensor of one element, got {_kind(found)}, of "
                f"{_kind(made)} that {who} returned"
            )
        return None


def check_model(owner: str, model: object) -> None:
    """Raise where a model cannot be run.

    Args:
        owner: name of the function that was called.
        model: that it was given.

    Raises:
        TypeError: it is no module.
        ValueError: a parameter or a buffer is on the meta device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: model must be an nn.Module, got {type(model).__name__}")
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        if one.is_meta:
            raise ValueError(
                f"{owner}: the model is run, so its tensors must have values, got {name} on the "
                "meta device; call model.to_empty(device=...) and load weights first"
            )


def check_loss(owner: str, loss: object) -> None:
    """Raise TypeError for a loss that nothing can call; None: there is none.

    Args:
        owner: name of the function that was called.
        loss: that it was given.
    """
    if loss is not None and not callable(loss):
        raise TypeError(
            f"{owner}: loss must be a function of what the model returns, or None, got "
            f"{type(loss).__name__}"
        )


def _kind(value: Any) -> str:
    """Return what a value is, for an error."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return f"an object of {type(value).__name__}"


@contextmanager
def _no_steps(owner: str, model: nn.Module) -> Iterator[None]:
    """Refuse steps of optimizers that have a parameter of the model, whose runs are compared."""
    own = {id(one) for one in model.parameters()}

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            raise ValueError(
                f"{owner}: runs of the same parameters are compared, so a function of the model "
                f"must not step an optimizer of it, got a step of {type(optimizer).__name__}; "
                "leave steps out of the function"
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _called(owner: str, model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**{name: _ordinary(one) for name, one in batch.items()})
    if isinstance(batch, tuple | list):
        return model(*map(_ordinary, batch))
    if isinstance(batch, torch.Tensor):
        return model(_ordinary(batch))
    raise TypeError(
        f"{owner}: a batch must be a tensor, a tuple, a list or a mapping, or a function of the "
        f"model, got {type(batch).__name__}"
    )


def _ordinary(value: Any) -> Any:
    """Return what autograd may save for a backward: a copy of a tensor of inference mode."""
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value


def _loss_of(made: Any) -> Any:
    own = getattr(made, "loss", None)
    if own is not None:
        return own
    return made[0] if isinstance(made, tuple) and made else made
