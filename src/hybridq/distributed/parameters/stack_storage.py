"""The planes of a parameter of several matrices that FSDP2 gathers, all of them encoded alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...direction import Direction
from ...recipes import SlotPlan
from ...shards import StorageShards
from ...storage import Plane, PlaneStack
from .gather_call import GatherCall
from .gathered_storage import GatheredStorage, no_cache

__all__ = ["StackStorage", "WholeStack"]


class WholeStack:
    """What a StackStorage asks of its parameter.

    Args:
        stack: the parameter.
    """

    is_encoded, in_graph = False, False  # a stack is no input of a graph
    holds_columns = True  # that each matrix has its plane is asked of the matrix

    def __init__(self, stack: Any) -> None:
        self._stack = stack

    @property
    def inner(self) -> list[torch.Tensor]:
        """Buffers of the unsharded parameter, that FSDP2 frees."""
        found: list[torch.Tensor] = self._stack.inner
        return found

    def derives_from(self, plan: StorageShards) -> bool:
        """Return False: each matrix derives its own plane, when it is asked for.

        Args:
            plan: not used.
        """
        del plan
        return False

    def last_call(self) -> GatherCall:
        """Return how the last gather was done."""
        call: GatherCall = self._stack.last_call()
        return call

    def use_slot(self, slot: SlotPlan) -> None:
        """Raise: slots are of matrices."""
        raise RuntimeError(f"fsdp2: a slot is of one matrix of a stack, got {slot} of all")

    def gather_now(self, direction: Direction) -> Plane:
        """Raise: matrices are asked for their planes."""
        raise RuntimeError(f"fsdp2: each matrix gathers its plane, got {direction} of all")

    def changed(self) -> None:
        """Have the next gather worked out anew, since other memory is filled from now on."""
        self._stack.changed()


class StackStorage(GatheredStorage):
    """The planes of all matrices in common buffers; those of each matrix are views of them.

    Args:
        about: what it asks of the parameter.
        matrices: the storages of each matrix, which modules compute with.
    """

    __slots__ = ("_matrices", "_views")

    def __init__(self, about: WholeStack, matrices: Sequence[GatheredStorage]) -> None:
        super().__init__(about)
        self._matrices = tuple(matrices)
        #: By planes of all matrices that are filled again and again, those of each.
        self._views: dict[Plane, tuple[Plane, ...]] = {}

    def fill(self, plan: Any, payloads: torch.Tensor) -> None:
        """Hold the planes of a gather, and no others, and have each matrix hold its own.

        Args:
            plan: UniformShards, how the payloads were made.
            payloads: uint8 `[world, payload]`.
        """
        before = self._earlier
        super().fill(plan, payloads)
        if before != self._earlier:
            self._views = {one: own for one, own in self._views.items() if one in self._earlier}
        for storage, row, col in self.each():
            storage.forget()
            storage.rowwise, storage.columnwise = row, col

    def each(self) -> list[tuple[GatheredStorage, Plane | None, Plane | None]]:
        """Return the storage of each matrix, and the planes that it has of what was gathered."""
        none = (None,) * len(self._matrices)
        row = none if self.rowwise is None else self._of_each(self.rowwise)
        col = none if self.columnwise is None else self._of_each(self.columnwise)
        return list(zip(self._matrices, row, col, strict=True))

    def _of_each(self, plane: Plane) -> tuple[Plane, ...]:
        found = self._views.get(plane)
        if found is None:
            if not isinstance(plane, PlaneStack):
                raise RuntimeError(f"fsdp2: planes of several matrices are wanted, got {plane}")
            found = tuple(plane.single(number) for number in range(plane.count))
            for one in found:
                one.operand_cache = no_cache
            self._views[plane] = found
        return found
