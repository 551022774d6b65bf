"""StoredWeight: the tensors of a file that hold one quantized weight."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..direction import ROWWISE, Direction
from ..errors import CheckpointError, warn
from ..formats import PlaneSpec
from ..storage import Plane
from .part import Part, same_shape
from .scheme import Scheme

__all__ = ["StoredTensor", "StoredWeight", "TensorInfo"]

#: dtype and shape of a tensor of a file.
TensorInfo = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Args:
        name: in the file.
        part: what it is.
        shape: in the file, with the leading `[E]` of a stack.
        dtype: in the file.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight as a file holds it.

    Args:
        name: of the weight.
        scheme: how its format is held.
        shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.
        tensors: of the file, in the order of the scheme's parts.
        direction: of the planes. Readers know rowwise ones only.
    """

    name: str
    scheme: Scheme
    shape: tuple[int, ...]
    tensors: tuple[StoredTensor, ...]
    direction: Direction = ROWWISE

    @property
    def spec(self) -> PlaneSpec:
        """The spec of the plane that the file holds."""
        return self.scheme.stored_spec(_own(self.shape, self.direction)[1])

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.shape[-2], self.shape[-1]

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @staticmethod
    def of(
        scheme: Scheme, name: str, shape: tuple[int, ...], direction: Direction = ROWWISE
    ) -> StoredWeight:
        """Return the weight `name` of this shape in `scheme`.

        Args:
            scheme: of a layout.
            name: of the weight.
            shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.
            direction: of the planes.
        """
        lead, buffers = shape[:-2], _buffer_shapes(scheme, shape, direction)
        tensors = tuple(
            StoredTensor(
                part.file_name(name), part, lead + part.shape.of(buffers[part.buffer]), part.dtype
            )
            for part in scheme.parts
        )
        return StoredWeight(name, scheme, shape, tensors, direction)

    @staticmethod
    def read(
        scheme: Scheme, name: str, codes: tuple[int, ...], entries: Mapping[str, TensorInfo]
    ) -> StoredWeight | None:
        """Return the weight `name` as a checkpoint has it, or None if it is in another scheme.

        Args:
            scheme: that it may be in.
            name: of the weight.
            codes: shape of its codes in the file.
            entries: dtype and shape of every tensor of the checkpoint.
        """
        shape = scheme.shape_of(codes)
        if shape is None:
            return None
        made = []
        for one in StoredWeight.of(scheme, name, shape).tensors:
            found = entries.get(one.name)
            if (
                found is None
                or found[0] not in one.part.read_dtypes
                or not same_shape(found[1], one.shape)
            ):
                return None
            made.append(replace(one, dtype=found[0], shape=found[1]))
        return StoredWeight(name, scheme, shape, tuple(made))

    def marks(self, inputs: str = "") -> dict[str, torch.Tensor]:
        """Return the tensors that say how the weight is held, by name; none where readers see it.

        Args:
            inputs: how inputs are quantized: `none`, `dynamic` or `static`; by default what the
                scheme has first.
        """
        mark = self.scheme.mark
        if mark is None:
            return {}
        how = inputs or next(iter(self.scheme.inputs))
        return {mark.file_name(self.name): mark.value(how)}

    def encode(self, planes: Sequence[Plane]) -> dict[str, torch.Tensor]:
        """Return the tensors of the file, by name, with those that say how the weight is held.

        Args:
            planes: the plane of each matrix, of a spec that the scheme holds.

        Raises:
            CheckpointError: the file's dtype cannot hold a value.
        """
        own = [self.scheme.as_stored(plane) for plane in planes]
        made = {}
        for one in self.tensors:
            try:
                each = [one.part.write(plane.buffers[one.part.buffer], plane.spec) for plane in own]
            except CheckpointError as error:
                raise CheckpointError(f"{one.name!r}: {error}") from error
            made[one.name] = torch.stack(each) if len(self.shape) == 3 else each[0]
        return {**made, **self.marks()}

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> list[Plane]:
        """Return the plane of each matrix, with the very codes and scales of the file.

        A second-level scale that no amax gives becomes the nearest one, with a warning.

        Args:
            tensors: of the file, by name; more are ignored.

        Raises:
            CheckpointError: a tensor is not what the header said, or a second-level scale is
                negative, or too large for an amax.
        """
        shapes = _buffer_shapes(self.scheme, self.shape, self.direction)
        for one in self.tensors:
            found = tensors[one.name]
            if (found.dtype, tuple(found.shape)) != (one.dtype, one.shape):
                raise CheckpointError(
                    f"layouts: {one.name!r} must be {one.dtype} {list(one.shape)}, got "
                    f"{found.dtype} {list(found.shape)}"
                )
        made = []
        for index in range(self.count):
            device = tensors[self.tensors[0].name].device
            spec, buffers = self.spec, self.scheme.constant_buffers(self.spec, device)
            for one in self.tensors:
                tensor = tensors[one.name][index] if len(self.shape) == 3 else tensors[one.name]
                shape = shapes[one.part.buffer]
                buffers[one.part.buffer], bound, is_exact = one.part.read(tensor, shape, spec)
                if bound is not None:
                    spec = replace(spec, tensor_bound=bound)
                if not is_exact:
                    one.part.check_near(one.name, tensor, buffers[one.part.buffer], spec)
                    warn(
                        f"layouts: {one.name!r} is {tensor.item():.9g}, which no amax of a plane "
                        "gives; the nearest factor is taken, at most 2^-22 of it away",
                    )
            named = {name: buffers[name] for name in shapes}
            made.append(Plane(spec, self.direction, *self.matrix, named))
        return made


def _own(shape: tuple[int, ...], direction: Direction) -> tuple[int, int]:
    """Return the plane's own rows and columns, of which the second is the contraction axis."""
    return (shape[-2], shape[-1]) if direction == ROWWISE else (shape[-1], shape[-2])


def _buffer_shapes(
    scheme: Scheme, shape: tuple[int, ...], direction: Direction
) -> dict[str, tuple[int, ...]]:
    rows, cols = _own(shape, direction)
    return {one.name: one.shape for one in scheme.stored_spec(cols).buffers(rows, cols)}
