"""Recomputation and random states under Transformer Engine's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import nn
from .._log import log_once

__all__ = ["CudaRNGStatesTracker", "checkpoint"]


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Context of a forward that another library's checkpoint runs, or runs again: changes nothing.

    A module of hybridq sees by itself that a backward runs it again, and takes the recipe of its
    forward, or the one that is set around it there.

    Args:
        activation_recompute, recompute_phase: have no effect.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(8, 8)
        >>> with te.distributed.activation_recompute_forward(True, False):
        ...     y = layer(torch.ones(2, 8))
    """
    yield


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`, and run it again in the backward: `hybridq.checkpoint`.

    Args:
        function: what is called.
        *args: its arguments; one of them must require grad where `use_reentrant` is True, which
            is the default here.
        distribute_saved_activations: False.
        get_rng_state_tracker: has no effect: the random state of the forward comes along. States
            of a tracker are those of torch's generators while they are forked.
        tp_group: has no effect: nothing is distributed.
        use_reentrant: as `hybridq.checkpoint` takes it.
        **kwargs: the same.

    Raises:
        NotImplementedError: `distribute_saved_activations` is True.

    Example:
        >>> import torch, hybridq.te as te
        >>> layer = te.Linear(8, 8)
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> te.checkpoint(layer, x, use_reentrant=False).sum().backward()
    """
    given = {"distribute_saved_activations": distribute_saved_activations}
    return nn.checkpoint(function, *args, use_reentrant=use_reentrant, **given, **kwargs)


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Do nothing but say once that saved activations stay whole: no result depends on it.

    Args:
        fsdp_root: a model in torch's FullyShardedDataParallel. Its parameters are sharded by that;
            Transformer Engine would deal out what a forward saves for the backward, too.
    """
    del fsdp_root
    log_once(
        "te.prepare_te_modules_for_fsdp",
        "prepare_te_modules_for_fsdp: has no effect; what a forward saves stays whole on each "
        "rank, as planes; te.checkpoint or hybridq.offload saves less",
    )


class CudaRNGStatesTracker:
    """Random states by name, of torch's generator of the GPU, or of the CPU where there is none.

    Example:
        >>> import torch, hybridq.te as te
        >>> tracker = te.CudaRNGStatesTracker()
        >>> tracker.add("parts", 7)
        >>> with tracker.fork("parts"):
        ...     a = torch.rand(1)
        >>> b = torch.rand(1)
        >>> sorted(tracker.get_states())
        ['parts']
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states, by name."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take these states.

        Args:
            states: by name, as `get_states` returns them.
        """
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Keep the state that a seed makes.

        Args:
            name, seed: that no other state has.

        Raises:
            ValueError: one has.
        """
        if name in self.states_ or seed in self.seeds_:
            raise ValueError(f"CudaRNGStatesTracker: must be new, got {name!r} and seed {seed}")
        self.seeds_.add(seed)
        before = _state()
        torch.cuda.manual_seed(seed) if torch.cuda.is_available() else torch.manual_seed(seed)
        self.states_[name] = _state()
        _set_state(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Context: torch draws from that state, which goes on from there the next time.

        Args:
            name: of a state.

        Raises:
            KeyError: there is none.
        """
        if name not in self.states_:
            raise KeyError(f"CudaRNGStatesTracker: {name!r} must have been added")
        before = _state()
        _set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set_state(before)


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set_state(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
