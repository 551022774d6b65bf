"""How the planes of a unit are filled with what was received: by one operation for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch_private import copy_each
from ...kernels.cpu import Place, Steps
from ...kernels.inputs import begins_at, can_bypass_dispatcher, made
from ...kernels.operators import transpose_recorder
from ...shards import Copies, memories
from ...storage import Plane
from ..parameters import StackStorage

__all__ = ["UnitFill"]


class UnitFill:
    """Fills planes that there are from a gather that is as an earlier one was.

    Args:
        members: the parameters, that hold the planes of a gather.
        plans: of each.
        parts: uint8 `[world, ...]`, what that gather received: views of tensors that FSDP2 fills
            in each gather, or more than one, which are put together.
        payloads: returns, for all parts side by side and the number of a parameter, its payloads.
    """

    def __init__(
        self,
        members: Sequence[Any],
        plans: Sequence[Any],
        parts: Sequence[torch.Tensor],
        payloads: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        #: What FSDP2's first tensor is a view of.
        self._source = parts[0].untyped_storage()
        whole, self._whole = parts[0], None
        if len(parts) > 1:
            whole = self._whole = torch.cat(list(parts), 1)
            self._freed = (whole.untyped_storage(), whole.numel())
        self._copies = Copies()
        #: The ends of payloads with amaxes, whose they are, and how many of each.
        self._ends: list[torch.Tensor] = []
        self._scaled: list[Any] = []
        self._counts: list[int] = []
        #: Of planes that are derived for graphs: what a transposed view is copied to; and of codes
        #: that share bytes: where they go, they, and the size of their matrix.
        self._transposed: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._packed: list[tuple[torch.Tensor, torch.Tensor, tuple[int, int]]] = []
        #: What transposes these past the dispatcher; and the beginning of each memory it reads.
        self._steps: Any = None
        self._firsts: list[torch.Tensor] = []
        self._held: list[tuple[Any, Any, Plane | None, Plane | None, list[torch.Tensor]]] = []
        #: The same of each matrix of a stack, whose planes are views of the stack's.
        self._of_matrices: list[tuple[Any, Plane | None, Plane | None]] = []
        sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for number, (about, plan) in enumerate(zip(members, plans, strict=True)):
            storage, own = about.storage, payloads(whole, number)
            pair = (storage.rowwise, storage.columnwise)
            planes = [plane for plane in pair if plane is not None]
            there = {plane.direction: plane for plane in planes}
            for shards, places in zip(plan.sent, plan.places, strict=True):
                plane = there.pop(shards.direction)
                storage.fill_again(plane, places, own, self._copies)
            for plane in there.values():
                self._derive(storage.first, plane)
            if plan.num_amaxes:
                self._ends.append(own[:, plan.payload - 4 * plan.num_amaxes :])
                self._scaled.append(storage)
                self._counts.append(plan.num_amaxes)
            # A memory that several parameters share is listed, and freed, by the first of them.
            found = memories(*planes)
            own_memories = [one for one, _ in found if _key(one) not in sizes]
            for one, nbytes in found:
                memory, most = sizes.get(_key(one), (one.untyped_storage(), 0))
                sizes[_key(one)] = (memory, max(most, nbytes))
            self._held.append((about, storage, *pair, own_memories))
            if isinstance(storage, StackStorage):
                self._of_matrices += storage.each()
        self._memories = list(sizes.values())
        self.free()

    def _derive(self, plane: Plane, derived: Plane) -> None:
        """Have a plane filled with another one, transposed.

        Args:
            plane: that travels.
            derived: of the other direction, in memory that comes and goes alike.
        """
        for name, own in derived.buffers.items():
            given = plane.buffers[name]
            if begins_at(own) == begins_at(given):
                continue  # one memory, filled already
            if name == "data" and own.shape != given.shape[::-1]:  # several codes in a byte
                self._packed.append((own.data, given, plane.matrix))
            else:
                self._transposed[0].append(own.data)
                self._transposed[1].append(given.t())

    @staticmethod
    def of(
        members: Sequence[Any],
        plans: Sequence[Any],
        parts: Sequence[torch.Tensor],
        payloads: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> UnitFill | None:
        """Return what fills the planes of the next gathers; None: only their parameters know.

        Args:
            members, plans, parts, payloads: as for `UnitFill`.
        """
        if any(getattr(plan, "places", None) is None for plan in plans):
            return None
        return UnitFill(members, plans, parts, payloads)

    def takes(self, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether a gather was received where the earlier one was.

        Args:
            parts: as for `UnitFill`.
        """
        return self._whole is not None or parts[0].untyped_storage()._cdata == self._source._cdata

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all parts side by side, uint8 `[world, ...]`.

        Args:
            parts: as for `UnitFill`.
        """
        whole = self._whole
        if whole is None:
            return parts[0]
        self._freed[0].resize_(self._freed[1])
        torch.cat(list(parts), 1, out=whole)
        return whole

    def run(self) -> None:
        """Fill the planes, and have their parameters hold them."""
        for memory, nbytes in self._memories:
            if not memory.nbytes():  # else torch would allocate anew, and copy
                memory.resize_(nbytes)
        self._copies.run()
        if self._transposed[0]:
            copy_each(*self._transposed)
        if self._packed:
            self._transpose_packed()
        for about, storage, row, col, found in self._held:
            storage.rowwise, storage.columnwise = row, col
            about.filled = found
        for storage, row, col in self._of_matrices:
            storage.rowwise, storage.columnwise = row, col
        if self._ends:
            amaxes = torch.cat(self._ends, 1).view(torch.float32).amax(0)
            each = amaxes.split_with_sizes(self._counts)
            for storage, own in zip(self._scaled, each, strict=True):
                storage.amaxes = own

    def _transpose_packed(self) -> None:
        """Fill what is made of codes that share bytes."""
        if not can_bypass_dispatcher() or not self._record():
            made_anew = [torch.ops.hybridq.transpose(d, *size, 4) for _, d, size in self._packed]
            copy_each([target for target, _, _ in self._packed], made_anew)
            return
        steps: Any = self._steps
        steps.bases = [made(first) for first in self._firsts]
        steps.run(torch.get_num_threads())

    def _record(self) -> bool:
        """Return whether the core can do that by addresses; see to it that it is known how."""
        if self._steps is None:
            record = transpose_recorder(torch.uint8, self._packed[0][0].device.type)
            if record is None:
                return False
            self._steps = Steps()
            bases: dict[int, int] = {}

            def place(buffer: torch.Tensor) -> Place:
                """Return where a buffer is: memories are freed and allocated as one."""
                key = _key(buffer)
                if key not in bases:
                    bases[key] = self._steps.base()
                    self._firsts.append(buffer.new_empty(0).set_(buffer.untyped_storage()))
                return bases[key], int(buffer.storage_offset()) * buffer.element_size()

            for target, data, size in self._packed:
                record(self._steps, size, 4, place(data), place(target))
        return True

    def free(self) -> None:
        """Free what parts were put together in."""
        if self._whole is not None:
            self._freed[0].resize_(0)


def _key(buffer: torch.Tensor) -> int:
    return buffer.untyped_storage()._cdata
