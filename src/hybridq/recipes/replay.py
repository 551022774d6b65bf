"""Makes `torch.utils.checkpoint` carry hybridq's recipe, as it carries torch.autocast's state.

A recomputation runs inside a backward: outside the `with hybridq.autocast(...)` of its forward,
possibly inside another one, possibly in another thread (CUDA's backward has its own). Both
implementations of `torch.utils.checkpoint` keep the function that they will run again, so it is
enough to hand them a function that brings its recipe along:

- reentrant: `CheckpointFunction.forward(ctx, run_function, ...)` keeps `run_function`;
- the other: `_checkpoint_without_reentrant_generator(fn, ...)` keeps `fn`, and runs it for
  recomputation only.

A region whose forward had no recipe brings "no recipe" along. Nothing is installed by importing
hybridq; the first module or the first `autocast` does it.

Source: ours; the two entry points are those of torch 2.10 to 2.14 (torch/utils/checkpoint.py).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import settings
from .._log import log_once
from .._torch_private import graph_task_id
from ..quantizers.delayed import epoch

__all__ = ["Replay", "install"]

_lock = threading.Lock()
_installed = threading.Event()

#: Names of the generator, the one to wrap first.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",
    "_checkpoint_without_reentrant_generator",
)

#: Modules that import the generator by name, and so keep their own reference to it.
_IMPORTERS = ("torch.distributed._composable.checkpoint_activation",)


class Replay:
    """Calls a function under the recipe that was set, and the scales that were, when it was made.

    Args:
        function: what is run, now or in a backward, in this thread or another.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.recipe = settings.current().recipe
        self.epoch = epoch.count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = settings.current()
        previous = state.recipe, state.recipe_task, state.scaling_epoch
        state.recipe = self.recipe
        # Says that the recipe belongs to this very recomputation, even if it is None.
        state.recipe_task = graph_task_id()
        is_first = state.recipe_task == -1  # the forward itself, and no recomputation
        state.scaling_epoch = -1 if is_first else self.epoch
        try:
            return self.function(*args, **kwargs)
        finally:
            state.recipe, state.recipe_task, state.scaling_epoch = previous
            if is_first:
                self.epoch = epoch.count


def _first_parameters(function: Callable[..., Any], count: int) -> list[str]:
    return list(inspect.signature(function).parameters)[:count]


def _wrap_reentrant(checkpoint: Any) -> str | None:
    """Wrap the reentrant implementation; return None or the reason why that is impossible."""
    function: Any = getattr(checkpoint, "CheckpointFunction", None)
    original = getattr(function, "forward", None)
    if original is None:
        return "torch.utils.checkpoint.CheckpointFunction.forward is gone"
    if _first_parameters(original, 2) != ["ctx", "run_function"]:
        return "CheckpointFunction.forward takes other arguments"

    @functools.wraps(original)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return original(ctx, Replay(run_function), *args)

    function.forward = staticmethod(forward)
    return None


def _wrap_generator(checkpoint: Any) -> str | None:
    """Wrap the non-reentrant implementation; return None or the reason."""
    # Since torch 2.14 the old name calls the new one, and torch itself calls the new one.
    name = next((name for name in _GENERATORS if hasattr(checkpoint, name)), None)
    if name is None:
        return f"torch.utils.checkpoint.{_GENERATORS[-1]} is gone"
    original = getattr(checkpoint, name)
    if _first_parameters(original, 1) != ["fn"]:
        return f"{name} takes other arguments"

    @functools.wraps(original)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(Replay(fn), *args, **kwargs)

    setattr(checkpoint, name, generator)
    for importer in _IMPORTERS:
        module = sys.modules.get(importer)
        if module is not None and getattr(module, name, None) is original:
            setattr(module, name, generator)
    return None


def install() -> None:
    """Make `torch.utils.checkpoint` bring recipes along; once per process, later calls do nothing.

    Warns once if this torch has no known entry points. Modules then fall back to the recipe of
    their own last training forward, which is the right one in plain training loops.
    """
    if _installed.is_set():
        return
    import torch.utils.checkpoint as checkpoint

    with _lock:
        if _installed.is_set():
            return
        reasons = [_wrap_reentrant(checkpoint), _wrap_generator(checkpoint)]
        _installed.set()
    reason = "; ".join(reason for reason in reasons if reason)
    if reason:
        log_once(
            "replay.install",
            f"torch.utils.checkpoint of torch {torch.__version__} cannot carry recipes ({reason}): "
            "a recomputation uses the recipe of the module's last training forward; run backward "
            "under the same hybridq.autocast as the forward",
        )
