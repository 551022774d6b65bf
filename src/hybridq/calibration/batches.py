"""Batches through a model that stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .._eager import running_eagerly

__all__ = ["Data", "evaluating", "run", "unwrapped"]

#: Batches, or a loop over them that is given the model.
Data = Iterable[Any] | Callable[[nn.Module], object]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have every module of a model in evaluation mode, without gradients; then as it was.

    torch's fast path of attention is off: it calls no children. What is compiled runs as it was
    written: hooks that come later are no part of a graph.

    Args:
        model: any module.
    """
    were = [(module, module.training) for module in model.modules()]
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), running_eagerly():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        for module, was in were:
            module.training = was


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that torch.compile or DistributedDataParallel were given.

    Args:
        model: any; one that they did not make is returned as it is.
    """
    inner = getattr(model, "_orig_mod", None)  # of torch.compile, whose class is dynamo's
    if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def run(model: nn.Module, data: Data) -> int:
    """Call a model with each batch, in evaluation mode and without gradients; return how many.

    Args:
        model: any module.
        data: batches: a mapping is `model(**batch)`, a tuple or a list `model(*batch)`, a tensor
            `model(batch)`; or a function that is called with the model, once, and counts as one.

    Raises:
        TypeError: `data` is neither, or a batch is of another kind.
        ValueError: there is no batch.
    """
    given: object = data
    with evaluating(model):
        if isinstance(given, Iterable) and not isinstance(given, torch.Tensor | Mapping | str):
            return _each(model, given)
        if not callable(given):
            raise TypeError(
                "calibrate: data must be an iterable of batches or a function of the model, got "
                f"{type(given).__name__}"
                f"{'; put one batch into a list' if isinstance(given, Iterable) else ''}"
            )
        given(model)
        return 1


def _each(model: nn.Module, batches: Iterable[Any]) -> int:
    count = 0
    for batch in batches:
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        elif isinstance(batch, torch.Tensor):
            model(batch)
        else:
            raise TypeError(
                "calibrate: a batch must be a mapping, a tuple, a list or a tensor, got "
                f"{type(batch).__name__} as number {count}"
            )
        count += 1
    if not count:
        raise ValueError(
            "calibrate: data must hold at least one batch, got none; a generator is empty when it "
            "has been run through"
        )
    return count
