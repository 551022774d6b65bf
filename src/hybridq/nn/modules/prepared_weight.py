"""What a module remembers of a weight that is prepared for sharded training."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from ...recipes import Recipe

__all__ = ["PreparedWeight"]


class PreparedWeight(Protocol):
    """What keeps a weight prepared for sharded training."""

    @property
    def is_held(self) -> bool:
        """Whether its shards are quantized."""

    def use(self, module: nn.Module, name: str, recipe: Recipe | None) -> None:
        """Have the planes that a forward takes; every rank must call it."""

    def attach(self, module: nn.Module, name: str) -> None:
        """Prepare the weight again if the module holds a plain one now."""

    def keep_initial(self, parameter: Any, values: Any) -> None:
        """Keep what quantized shards were made of, if initial values are kept."""
