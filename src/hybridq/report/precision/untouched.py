"""A model that is run and stays as it is: gradients, buffers, histories, generators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...nn.delayed_scaling import states_of

__all__ = ["untouched"]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Run a model in the block, training steps of the optimizer apart, as if it had not been run.

    Gradients are None at first and what they were at the end; buffers, `main_grad`, histories of
    delayed scaling and torch's generators have their values again. What is compiled runs eagerly.

    Args:
        model: any module.
    """
    gradients = [
        (one, one.grad, _copy(getattr(one, "main_grad", None))) for one in model.parameters()
    ]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    states = [one for module in model.modules() for one in states_of(module).values()]
    restore = [state.restorer() for state in states]
    devices = sorted({one.device.index or 0 for one in model.parameters() if one.is_cuda})
    stance: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules:  # else nothing is compiled
        stance = torch.compiler.set_stance("force_eager")
    for parameter, _, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=devices), stance:
            yield
    finally:
        with torch.no_grad():
            for parameter, gradient, main in gradients:
                parameter.grad = gradient
                if main is not None:
                    parameter.main_grad.copy_(main)  # type: ignore[attr-defined]
            for buffer, value in buffers:
                buffer.copy_(value)
            for back in restore:
                back()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else None
