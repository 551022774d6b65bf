"""Parameters that others have taken the place of, and optimizers that still hold them."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import warn

__all__ = ["replaced"]

#: What a parameter is marked with once another stands in its place.
_MARK: Final = "hybridq_replaced"


class _Optimizers:
    """Whether optimizers are watched, which of them hold no such parameter, and which were told."""

    def __init__(self) -> None:
        self.is_watching = False
        self.known: WeakSet[torch.optim.Optimizer] = WeakSet()
        #: Those that were warned of. No numbers of objects, which come again for other ones.
        self.told: WeakSet[torch.optim.Optimizer] = WeakSet()


_optimizers = _Optimizers()


def replaced(parameter: torch.Tensor, by: str, after: str) -> None:
    """Remember that a parameter is no longer its module's: a step that should train it warns.

    Args:
        parameter: in whose place there is another one.
        by: what has put it there, for the message.
        after: the call after which an optimizer finds it.
    """
    parameter.__dict__[_MARK] = (by, after)
    if not _optimizers.is_watching:
        _optimizers.is_watching = True
        register_optimizer_step_pre_hook(_before_step)
    _optimizers.known.clear()


def _before_step(optimizer: Any, *_: Any) -> None:
    """Warn where an optimizer holds parameters that no module has, and nobody gave gradients."""
    if torch.compiler.is_compiling() or optimizer in _optimizers.known:
        return
    held = [p for group in optimizer.param_groups for p in group["params"] if _MARK in vars(p)]
    if not held:
        _optimizers.known.add(optimizer)
        return
    lost = [one for one in held if one.requires_grad and one.grad is None]
    if lost and optimizer not in _optimizers.told:
        _optimizers.told.add(optimizer)
        by, after = vars(lost[0])[_MARK]
        warn(
            f"{type(optimizer).__name__}: the optimizer holds {len(lost)} parameters that are no "
            f"longer their modules', since {by} has put others in their place, such as one of "
            f"shape {list(lost[0].shape)}, so that these are not trained; make the optimizer after "
            f"{after}",
        )
