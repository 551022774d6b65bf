"""Parameters on the meta device, which get memory where their initial values are set.

Scripts of Transformer Engine make a model there, shard it, and call `reset_parameters` of each
module; torch's own modules, and hybridq's, want `to_empty` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["GetsMemory", "give_memory"]


def give_memory(module: torch.nn.Module) -> None:
    """Give a module's own parameters memory, if they are on the meta device.

    It is memory of the mesh's devices where they are sharded, else of torch's default device.

    Args:
        module: whose children are left as they are.
    """
    empty: list[Any] = [one for one in module.parameters(recurse=False) if one.is_meta]
    if empty:
        mesh = getattr(empty[0], "device_mesh", None)
        device = torch.get_default_device() if mesh is None else mesh.device_type
        module.to_empty(device=device, recurse=False)


class GetsMemory:
    """Base, before a class of hybridq, of modules whose `reset_parameters` gives them memory."""

    #: Set while a constructor runs: what is made on the meta device stays there.
    _is_being_made = False

    def reset_parameters(self: Any, defer_init: bool = False) -> None:
        """Set all parameters to their initial values; those on the meta device get memory first.

        Args:
            defer_init: True: nothing is done.
        """
        if defer_init:
            return
        if not self._is_being_made:
            give_memory(self)
        super().reset_parameters()  # type: ignore[misc]

    @staticmethod
    @contextmanager
    def later(module: Any) -> Iterator[None]:
        """Context of a constructor, in which `reset_parameters` gives no memory.

        Args:
            module: that is being made; nothing of it is there yet.
        """
        module.__dict__["_is_being_made"] = True
        try:
            yield
        finally:
            module.__dict__.pop("_is_being_made", None)
