"""Read a checkpoint back: quantized tensors as their planes, all others as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from ..errors import CheckpointError
from ..tensor import QuantizedTensor
from .disk import is_there, kind_of, reading
from .files import as_bytes, read_into
from .header import TORCH_DTYPES, Entry, dtype_name, storage_shape
from .journal import JOURNAL
from .record import Record, read_records
from .source import Shard, open_source

__all__ = ["Checkpoint", "load_checkpoint"]

#: What a name stands for; a stack of matrices is a list, as `hybridq.grouped_gemm` takes it.
Value: TypeAlias = torch.Tensor | list[QuantizedTensor]


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands.

    Args:
        shard: the file.
        entries: its tensors there, by name.
        record: how it was quantized, or None for a plain one.
    """

    shard: Shard
    entries: Mapping[str, Entry]
    record: Record | None


class Checkpoint(Mapping[str, Value]):
    """The tensors of a checkpoint by name, each read when it is asked for.

    A mapping: `checkpoint[name]` reads one tensor, `checkpoint.items()` one after the other, and
    `dict(checkpoint)` all of them. What it returns is in memory of its own; nothing is kept.

    Args:
        path: the file or folder.
        places: name to where the tensor stands, as `load_checkpoint` finds it.
    """

    def __init__(self, path: Path, places: Mapping[str, _Place]) -> None:
        self.path = path
        self._places = places

    def __getitem__(self, name: str) -> Value:
        """Return the tensor called `name`.

        A quantized one is a QuantizedTensor with the planes that its quantizer makes of the
        source, bit for bit; a stack of matrices is a list of those, whose buffers are views of one.

        Raises:
            KeyError: there is none.
            CheckpointError: the file has changed, or torch lacks the tensor's dtype.
        """
        place = self._places[name]
        buffers = _read(place)
        if place.record is None:
            return buffers[name]
        record = place.record
        made = [
            QuantizedTensor.make(storage, record.matrix, record.dtype, quantizer=record.quantizer)
            for storage in record.storages(buffers)
        ]
        return made if record.is_stack else made[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def record(self, name: str) -> Record | None:
        """Return how a tensor was quantized, without reading it; None for a plain one.

        Args:
            name: of the tensor.

        Raises:
            KeyError: there is none.
        """
        return self._places[name].record

    def __repr__(self) -> str:
        quantized = sum(place.record is not None for place in self._places.values())
        return f"Checkpoint({os.fspath(self.path)!r}, {len(self)} tensors, {quantized} quantized)"


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the tensors of a checkpoint, converted or plain, as a mapping that reads lazily.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or an index.

    Raises:
        CheckpointError: there is none, a file of it is damaged, or it was not finished.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile, torch, hybridq
        >>> from safetensors.torch import save_file
        >>> path = tempfile.mkdtemp() + "/a.safetensors"
        >>> save_file({"norm.weight": torch.ones(3)}, path)
        >>> hybridq.load_checkpoint(path)["norm.weight"]
        tensor([1., 1., 1.])
    """
    try:
        source = open_source(path)
    except CheckpointError as error:
        if kind_of(Path(path)) == "folder" and is_there(Path(path) / JOURNAL):
            raise CheckpointError(
                f"{error}; its conversion was not finished: run the same command again"
            ) from error
        raise
    places: dict[str, _Place] = {}
    for shard in source.shards:
        for name, place in _places(shard).items():
            if name in places:
                raise CheckpointError(f"checkpoint: {name!r} is in two files of {source.path}")
            places[name] = place
    return Checkpoint(source.path, places)


def _places(shard: Shard) -> dict[str, _Place]:
    entries = {entry.name: entry for entry in shard.header.entries}
    made: dict[str, _Place] = {}
    for name, record in read_records(shard.header.metadata, shard.path).items():
        own = {}
        for one in record.stored():
            entry = entries.pop(one.name, None)
            if entry is None or (entry.dtype, entry.shape) != (dtype_name(one.dtype), one.shape):
                found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"checkpoint: {shard.path} must hold {one.name!r} as {dtype_name(one.dtype)} "
                    f"{list(one.shape)}, got {found}"
                )
            own[one.name] = entry
        made[name] = _Place(shard, own, record)
    for name, entry in entries.items():
        if name in made:
            raise CheckpointError(f"checkpoint: {shard.path} has {name!r} twice")
        made[name] = _Place(shard, {name: entry}, None)
    return made


def _read(place: _Place) -> dict[str, torch.Tensor]:
    path = place.shard.path
    with reading(path) as file:
        place.shard.check_unchanged()
        return {name: _read_tensor(file, entry, path) for name, entry in place.entries.items()}


def _read_tensor(file: int, entry: Entry, path: Path) -> torch.Tensor:
    if entry.dtype not in TORCH_DTYPES:
        raise CheckpointError(
            f"checkpoint: torch has no dtype for {entry.name!r} of {path}, which is {entry.dtype}"
        )
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    read_into(file, as_bytes(data), entry.begin, path)
    return data.view(TORCH_DTYPES[entry.dtype]).reshape(storage_shape(entry))
