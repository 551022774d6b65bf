"""A model whose parameters are shared out to ranks, as a checkpoint that one of them reads.

The first rank exports; it asks for one tensor after the other, by number, and all ranks gather it.
So no rank has more of the model than its own part and one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..distributed.agreement import Fingerprint, compare, flat_group
from ..errors import CheckpointError
from ..quantizers import Quantizer
from ..storage import Plane, TensorStorage
from ..storage.plane_stack import plane_of
from ..tensor import QuantizedTensor
from .later import Later

__all__ = ["ShardedModel", "holds_parts"]

#: What is sent in place of a tensor's number: the export is done, or has failed.
_DONE: Final = -1
_FAILED: Final = -2


def holds_parts(state: Mapping[str, Any]) -> bool:
    """Return whether some tensors of a state are DTensors, of which this rank has a part.

    Args:
        state: what `state_dict(keep_vars=True)` returned.
    """
    return any(_is_part(value) for value in state.values())


def _is_part(value: Any) -> bool:
    return getattr(value, "device_mesh", None) is not None


@dataclass(frozen=True)
class _Part:
    """A tensor that all ranks can gather together.

    Args:
        name: in the model.
        value: the DTensor.
        held: of one that is quantized on every rank, its planes here; else None.
    """

    name: str
    value: Any
    held: Any

    def gather(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the whole of it: its values, or its planes' buffers by direction and name."""
        if self.held is None:
            return {("", ""): self.value.detach().full_tensor()}
        storage = self.held.gathered_planes()
        return {
            (plane.direction, name): buffer
            for plane in storage.planes
            for name, buffer in plane.buffers.items()
        }

    def line(self) -> tuple[str, str]:
        """Return what ranks must have in common of it."""
        shape = "x".join(map(str, self.value.device_mesh.mesh.shape))
        placed = f"{self.value.placements} over {shape} ranks"
        planes = "" if self.held is None else f" as {self.held.specs}"
        facts = f"{list(self.value.shape)} {self.value.dtype} {placed}{planes}"
        return (f"the parameter {self.name}", facts)


class ShardedModel:
    """The tensors of a model of which each rank has a part.

    Args:
        model: on all ranks the same, but for its parts.
        state: what its `state_dict(keep_vars=True)` returned.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        own = dict(model.named_parameters(remove_duplicate=False))
        self._state = state
        self._parts = [
            _Part(name, value, _held(own.get(name)))
            for name, value in state.items()
            if _is_part(value)
        ]
        meshes = [part.value.device_mesh for part in self._parts]
        self._mesh = max(meshes, key=lambda mesh: int(mesh.size()))
        self._last: tuple[int, dict[tuple[str, str], torch.Tensor]] | None = None

    def run(
        self, export: Callable[[Mapping[str, torch.Tensor]], Any], said: Sequence[tuple[str, str]]
    ) -> Any:
        """Return what the first rank's `export` does, on every rank; all of them must call it.

        Args:
            export: given the tensors by name, of which parts are `Later`.
            said: what ranks must have in common besides the model.

        Raises:
            RuntimeError: ranks have different models or arguments.
            CheckpointError: on all other ranks, if the first one raises anything.
        """
        import torch.distributed as dist  # not every build of torch has it

        group = flat_group(self._mesh)
        lines = [*said, *(part.line() for part in self._parts)]
        rule = "every rank must hold its part of one model and ask for one export of it"
        compare(Fingerprint(tuple(lines)), group, "export", rule)
        is_first = dist.get_rank(group) == 0
        given: list[Any] = [None]
        if not is_first:
            end = self._serve(group)
            dist.broadcast_object_list(given, group=group, group_src=0)
            if end == _FAILED:
                raise CheckpointError(f"export: the first rank could not write it: {given[0]}")
            return given[0]
        try:
            given[0] = export(self._tensors(group))
        except BaseException as error:
            with suppress(RuntimeError):  # the others may be gone
                self._ask(group, _FAILED)
                text = [f"{type(error).__name__}: {error}"]
                dist.broadcast_object_list(text, group=group, group_src=0)
            raise
        finally:
            self._last = None
        self._ask(group, _DONE)
        dist.broadcast_object_list(given, group=group, group_src=0)
        return given[0]

    def _ask(self, group: Any, number: int) -> int:
        """Return the number that the first rank gives."""
        import torch.distributed as dist

        sent = torch.tensor([number], dtype=torch.int64, device=self._mesh.device_type)
        dist.broadcast(sent, group=group, group_src=0)
        return int(sent)

    def _serve(self, group: Any) -> int:
        """Gather what the first rank asks for, until it ends; return how it ended."""
        with torch.no_grad():
            while (number := self._ask(group, _DONE)) >= 0:
                self._parts[number].gather()
        return number

    def _take(self, group: Any, number: int, key: tuple[str, str]) -> torch.Tensor:
        """Return a tensor of a part, which is kept until another part is asked for."""
        if self._last is None or self._last[0] != number:
            self._last = None
            self._ask(group, number)
            with torch.no_grad():
                self._last = number, self._parts[number].gather()
        return self._last[1][key]

    def _tensors(self, group: Any) -> dict[str, torch.Tensor]:
        made = {name: v.detach() for name, v in self._state.items() if isinstance(v, torch.Tensor)}
        for number, part in enumerate(self._parts):
            take = partial(self._take, group, number)
            made[part.name] = _later(part, take)
        return made


def _held(parameter: Any) -> Any:
    """Return the rows that a rank holds of a quantized parameter, or None of another."""
    local = getattr(parameter, "_local_tensor", None)
    return local if hasattr(local, "gathered_planes") else None


def _later(part: _Part, take: Callable[[tuple[str, str]], torch.Tensor]) -> torch.Tensor:
    """Return a tensor, quantized if the part is, that is gathered when it is needed."""
    value = part.value
    if part.held is None:
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return Later(like, partial(take, ("", "")))
    planes: dict[Direction, Plane] = {}
    *lead, rows, cols = value.shape  # of several matrices, how many
    row, col = part.held.specs
    for direction, spec, own in ((ROWWISE, row, (rows, cols)), (COLUMNWISE, col, (cols, rows))):
        if spec is None:
            continue
        buffers = {}
        for one in spec.buffers(*own):
            shape, dtype = (*lead, *one.shape), one.dtype or value.dtype
            like = torch.empty(shape, dtype=dtype, device="meta")
            buffers[one.name] = Later(like, partial(take, (direction, one.name)))
        count = lead[0] if lead else None
        height = rows * count if count else rows
        planes[direction] = plane_of(spec, direction, height, cols, buffers, count)
    storage = TensorStorage(planes.get(ROWWISE), planes.get(COLUMNWISE))
    made: torch.Tensor = QuantizedTensor.make(
        storage, tuple(value.shape), value.dtype, quantizer=Quantizer(row, col)
    )
    return made
