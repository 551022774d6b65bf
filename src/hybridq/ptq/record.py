"""How a quantized tensor stands in a safetensors file: named buffers, and a record to decode them.

The buffers of tensor `NAME` are `NAME.rowwise.data`, `NAME.rowwise.scale`, `NAME.columnwise.data`,
... with the planes' own bytes, shapes and dtypes; those of a stack of matrices `[E, rows, cols]`
have a leading `[E]`. What the bytes do not say stands in the file's metadata under `hybridq`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..errors import CheckpointError, SpecError
from ..formats import PlaneSpec
from ..kernels.inputs import HIGH_PRECISION
from ..layouts import without_classes
from ..layouts.comfyui import METADATA as COMFYUI_KEY
from ..quantizers import Quantizer
from ..storage import Plane, TensorStorage
from ..storage.plane_stack import plane_of
from .files import parse_json
from .header import TORCH_DTYPES, dtype_name

__all__ = [
    "METADATA_KEY",
    "VERSION",
    "Record",
    "StoredBuffer",
    "read_records",
    "records_text",
    "without_records",
]

#: Version of the records. A reader refuses a later one.
VERSION: Final = 1
#: Where a file's metadata has them.
METADATA_KEY: Final = "hybridq"


@dataclass(frozen=True)
class StoredBuffer:
    """One buffer of a tensor's planes as a tensor of the file.

    Args:
        name: in the file.
        direction: of its plane.
        buffer: name within the plane.
        shape: with the leading `[E]` of a stack.
        dtype: of the file's tensor.
        convert: makes the file's values of the buffer's and the plane's spec; None: the bytes are
            the same.
    """

    name: str
    direction: Direction
    buffer: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    convert: Callable[[torch.Tensor, PlaneSpec], torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Record:
    """What is known of a quantized tensor without its buffers.

    Args:
        name: of the tensor.
        quantizer: made its planes, of each matrix by itself.
        shape: `[rows, cols]`, or `[E, rows, cols]` for a stack of matrices.
        dtype: nominal dtype.
    """

    name: str
    quantizer: Quantizer
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_stack(self) -> bool:
        """Whether there are several matrices, each with planes of its own."""
        return len(self.shape) == 3

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return self.shape[0] if self.is_stack else 1

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of one matrix."""
        return self.shape[-2], self.shape[-1]

    @property
    def row(self) -> PlaneSpec | None:
        """The spec of the rowwise plane, or None where none is made."""
        own = self.quantizer.rowwise if self.quantizer.makes_rowwise else None
        return None if own is None else own.resolve(self.dtype)

    @property
    def col(self) -> PlaneSpec | None:
        """The spec of the columnwise plane, or None where none is made."""
        own = self.quantizer.columnwise if self.quantizer.makes_columnwise else None
        return None if own is None else own.resolve(self.dtype)

    @property
    def is_derived(self) -> bool:
        """Whether the columnwise plane is the rowwise one transposed, and so not stored."""
        return (
            self.row is not None
            and self.row == self.col
            and self.row.is_derivable
            and self.quantizer.columnwise_source == "original"
        )

    def plane_buffers(self) -> list[tuple[Direction, PlaneSpec, tuple[str, ...]]]:
        """Return the planes that are stored, and the names of the buffers stored of each."""
        made: list[tuple[Direction, PlaneSpec, tuple[str, ...]]] = []
        if self.row is not None:
            made.append((ROWWISE, self.row, _names(self.row)))
        if self.col is not None and not self.is_derived:
            made.append((COLUMNWISE, self.col, _names(self.col)))
        return made

    def stored(self) -> list[StoredBuffer]:
        """Return the tensors of the file that hold this one."""
        made = []
        rows, cols = self.matrix
        lead = (self.count,) if self.is_stack else ()
        for direction, spec, names in self.plane_buffers():
            own = (rows, cols) if direction == ROWWISE else (cols, rows)
            for buffer in spec.buffers(*own):
                if buffer.name in names:
                    made.append(
                        StoredBuffer(
                            f"{self.name}.{direction}.{buffer.name}",
                            direction,
                            buffer.name,
                            (*lead, *buffer.shape),
                            buffer.dtype or self.dtype,
                        )
                    )
        return made

    def storages(self, buffers: Mapping[str, torch.Tensor]) -> list[TensorStorage]:
        """Return the planes of each matrix, put together from what the file holds.

        Args:
            buffers: the tensors of `stored`, by their names.
        """
        stored = self.stored()
        return [
            self._storage(
                {
                    (one.direction, one.buffer): (
                        buffers[one.name][index] if self.is_stack else buffers[one.name]
                    )
                    for one in stored
                },
                None,
            )
            for index in range(self.count)
        ]

    def storage(self, buffers: Mapping[str, torch.Tensor]) -> TensorStorage:
        """Return the planes of the tensor; of a stack those of all its matrices in one.

        Args:
            buffers: the tensors of `stored`, by their names.
        """
        stored = self.stored()
        own: dict[tuple[str, str], torch.Tensor] = {
            (one.direction, one.buffer): buffers[one.name] for one in stored
        }
        return self._storage(own, self.count if self.is_stack else None)

    def _storage(
        self, own: Mapping[tuple[str, str], torch.Tensor], count: int | None
    ) -> TensorStorage:
        rows, cols = self.matrix
        planes: dict[str, Plane] = {}
        for direction, spec, _ in self.plane_buffers():
            named = {name: own[direction, name] for name in _names(spec)}
            planes[direction] = plane_of(spec, direction, rows * (count or 1), cols, named, count)
        row = planes.get(ROWWISE)
        if self.is_derived and row is not None:
            planes[COLUMNWISE] = row.derive()
        return TensorStorage(row, planes.get(COLUMNWISE))

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON has it, without the name."""
        return {
            "quantizer": self.quantizer.text,
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype),
        }


def _names(spec: PlaneSpec) -> tuple[str, ...]:
    return tuple(buffer.name for buffer in spec.buffers(1, 1))


def records_text(records: Iterable[Record]) -> str:
    """Return the text that a file's metadata has under `METADATA_KEY`."""
    tensors = {record.name: record.as_dict() for record in records}
    value = {"version": VERSION, "tensors": tensors}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def without_records(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a file's metadata but what says how its tensors are quantized.

    Args:
        metadata: of the file.
    """
    left = {key: one for key, one in metadata.items() if key not in (METADATA_KEY, COMFYUI_KEY)}
    return without_classes(left)


def read_records(metadata: Mapping[str, str], path: Path) -> dict[str, Record]:
    """Return the records in a file's metadata, by name; none of a file without any.

    Args:
        metadata: of the file.
        path: its name, for errors.

    Raises:
        CheckpointError: they are damaged, of a later version, or of an unknown format.
    """
    if METADATA_KEY not in metadata:
        return {}
    what = "record of quantized tensors"
    value = parse_json(metadata[METADATA_KEY].encode(), path, what)
    if value.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint: {path} must have records of version {VERSION}, got "
            f"{value.get('version')!r}; a newer hybridq may read it"
        )
    made = {}
    try:
        for name, one in value["tensors"].items():
            shape = tuple(one["shape"])
            if len(shape) not in (2, 3) or any(type(n) is not int or n < 0 for n in shape):
                raise ValueError(f"the shape of {name!r} is {one['shape']!r}")
            dtype = TORCH_DTYPES[one["dtype"]]
            if dtype not in HIGH_PRECISION:
                raise ValueError(f"the dtype of {name!r} is {one['dtype']!r}")
            quantizer = Quantizer.parse(one["quantizer"])
            if quantizer.amax_group is not None or quantizer.is_stochastic:
                raise ValueError(f"the quantizer of {name!r} is {quantizer.text!r}")
            made[name] = Record(name, quantizer, shape, dtype)
    except SpecError as error:
        raise CheckpointError(f"checkpoint: {path}, {name!r}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {path} has a damaged {what} ({error})") from error
    return made
