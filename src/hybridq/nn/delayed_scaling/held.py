"""Histories that stay what they were, whatever forwards and backwards run meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from .state import ScalingState, states_of

__all__ = ["hold_history"]


class _Kept(NamedTuple):
    """Copies of all that forwards, backwards and updates change in a state."""

    state: ScalingState
    numbers: list[torch.Tensor]
    histories: dict[int, torch.Tensor]
    elements: list[str]

    @staticmethod
    def of(state: ScalingState) -> _Kept:
        """Return the copies of a state."""
        histories = {index: one.clone() for index, one in state.histories.items()}
        numbers = [one.detach().clone() for one in _numbers(state)]
        return _Kept(state, numbers, histories, list(state.elements))

    def put_back(self) -> None:
        """Write them into the state's own memory."""
        state = self.state
        for own, one in zip(_numbers(state), self.numbers, strict=True):
            own.data.copy_(one)
        for index, one in self.histories.items():
            state.history(index, one.shape[0]).copy_(one)
        for index in set(state.histories) - set(self.histories):
            del state.histories[index]
        state.elements[:] = self.elements
        state.num_changes += 1


def _numbers(state: ScalingState) -> tuple[torch.Tensor, ...]:
    return state.forward_stats, state.backward_stats, state.forward_amaxes, state.backward_amaxes


@contextmanager
def hold_history(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context: at its end histories, amaxes and scales of delayed scaling are what they were.

    They are written in their own memory, where captured graphs read them.

    Args:
        modules: of a model, those inside of them included.

    Example:
        >>> import torch, hybridq
        >>> layer = hybridq.Linear(8, 8)
        >>> with hybridq.nn.hold_history([layer]), hybridq.autocast(recipe="fp8_delayed"):
        ...     y = layer(torch.ones(2, 8))
        >>> [key for key in hybridq.state_dict_with_history(layer) if "scaling" in key]
        []
    """
    inner = {id(own): own for module in modules for own in module.modules()}
    states = [state for own in inner.values() for state in states_of(own).values()]
    kept = [_Kept.of(state) for state in states]
    try:
        yield
    finally:
        for one in kept:
            one.put_back()
