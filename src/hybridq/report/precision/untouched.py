"""A model that is run and stays as it is: gradients, buffers, histories, generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..._eager import running_eagerly
from ...nn.autograd import unwatched
from ...nn.delayed_scaling import states_of

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module, batch: Any = None) -> Iterator[None]:
    """Run a model in the block, training steps of the optimizer apart, as if it had not been run.

    Gradients are None at first, each `main_grad` is zeros, and both are what they were at the end;
    buffers, histories of delayed scaling and torch's generators have their values again. What is
    compiled runs eagerly. Monitors and traces that watch a training are not shown these runs.

    Args:
        model: any module.
        batch: that it is given, whose gradients are kept as those of the model are; a function
            of the model has none that are known.
    """
    leaves = [*model.parameters(), *_leaves(batch)]
    gradients = [(one, one.grad, _copy(getattr(one, "main_grad", None))) for one in leaves]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    # A forward may write into a buffer, or put another tensor in its place.
    held = [(one, dict(one._buffers)) for one in model.modules()]
    states = [one for module in model.modules() for one in states_of(module).values()]
    restore = [state.restorer() for state in states]
    devices = sorted({one.device.index or 0 for one in model.parameters() if one.is_cuda})
    for parameter, _, main in gradients:
        parameter.grad = None
        if main is not None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng(devices=devices), running_eagerly(), unwatched():
            yield
    finally:
        with torch.no_grad():
            for parameter, gradient, main in gradients:
                parameter.grad = gradient
                if main is not None:
                    parameter.main_grad.copy_(main)  # type: ignore[attr-defined]
            for module, own in held:
                module._buffers.clear()
                module._buffers.update(own)
            for buffer, value in buffers:
                with torch.inference_mode(buffer.is_inference()):
                    buffer.copy_(value)
            for back in restore:
                back()


def _leaves(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch that a backward would give a gradient."""
    if isinstance(batch, torch.Tensor):
        if batch.requires_grad and batch.is_leaf:
            yield batch
    elif isinstance(batch, Mapping):
        yield from _leaves(tuple(batch.values()))
    elif isinstance(batch, tuple | list):
        for one in batch:
            yield from _leaves(one)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else None
