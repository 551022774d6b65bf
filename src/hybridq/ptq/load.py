"""Read a checkpoint back: quantized tensors as their planes, all others as they are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from ..errors import CheckpointError
from ..layouts import Layout, StoredWeight, get
from ..quantizers import Quantizer
from ..storage import TensorStorage
from ..tensor import QuantizedTensor
from .disk import is_there, kind_of, reading
from .files import as_bytes, read_into
from .found import Found, Weight, find
from .header import TORCH_DTYPES, Entry, dtype_name, storage_shape
from .journal import JOURNAL
from .record import METADATA_KEY, Record, read_records
from .source import Shard, Source, open_source

__all__ = ["Checkpoint", "load_checkpoint"]

#: What a name stands for; a stack of matrices is a list, as `hybridq.grouped_gemm` takes it.
Value: TypeAlias = torch.Tensor | list[QuantizedTensor]


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands.

    Args:
        entries: its tensors in the files, each with the file, by name.
        record: how it was quantized, or None for a plain one.
        stored: how another program's layout holds it; None: it is hybridq's own.
    """

    entries: Mapping[str, tuple[Shard, Entry]]
    record: Record | None
    stored: StoredWeight | None = None


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
        source, bit for bit, or that another program has written; a stack of matrices is a list of
        those, whose buffers are views of one.

        Raises:
            KeyError: there is none.
            CheckpointError: the file has changed, or torch lacks the tensor's dtype.
        """
        place = self._places[name]
        buffers = _read(place)
        if place.record is None:
            return buffers[name]
        record = place.record
        if place.stored is not None:
            planes = place.stored.decode(buffers)
            storages = [TensorStorage(plane, None) for plane in planes]
            quantizers = [Quantizer(plane.spec, None) for plane in planes]
        else:
            storages = record.storages(buffers)
            quantizers = [record.quantizer] * len(storages)
        made = [
            QuantizedTensor.make(storage, record.matrix, record.dtype, quantizer=quantizer)
            for storage, quantizer in zip(storages, quantizers, strict=True)
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


def load_checkpoint(path: str | os.PathLike[str], layout: str | None = None) -> Checkpoint:
    """Return the tensors of a checkpoint, quantized or plain, as a mapping that reads lazily.

    Weights that other programs have quantized are read by `hybridq.layouts`, with their own codes
    and scales as rowwise planes; scales of inputs and caches are plain tensors.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or an index.
        layout: name of the layout that it has; None: what its configuration and its tensors say.

    Raises:
        CheckpointError: there is none, a file of it is damaged, it was not finished, or it is
            quantized in a way that no layout reads.
        SpecError: there is no such layout.
        TypeError, ValueError: `path` is no path, or an empty one.
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
    return Checkpoint(source.path, _places(source, None if layout is None else get(layout)))


def _places(source: Source, layout: Layout | None) -> dict[str, _Place]:
    """Return where each tensor stands; the buffers of one may lie in several files."""
    is_own = any(METADATA_KEY in shard.header.metadata for shard in source.shards)
    return _own_places(source) if is_own else _read_places(find(source, layout))


def _read_places(found: Found) -> dict[str, _Place]:
    """Return where each tensor stands of a checkpoint that is not hybridq's."""
    made: dict[str, _Place] = {}
    for shard in found.source.shards:
        for item in found.items(shard):
            if isinstance(item, Weight):
                name, shape, spec = item.entry.name, item.entry.shape, item.view.spec
                record = Record(name, Quantizer(spec, None), shape, item.dtype)
                own = {entry.name: (one, entry) for one, entry in item.view.entries}
                made[name] = _Place(own, record, item.stored)
            else:
                made[item.name] = _Place({item.name: (shard, item)}, None)
    for name, place in found.scalars.items():
        made[name] = _Place({name: place}, None)
    return made


def _own_places(source: Source) -> dict[str, _Place]:
    """Return the same of a checkpoint in hybridq's own layout."""
    entries: dict[str, tuple[Shard, Entry]] = {}
    records: dict[str, tuple[Shard, Record]] = {}
    for shard in source.shards:
        for entry in shard.header.entries:
            if entry.name in entries:
                raise CheckpointError(
                    f"checkpoint: {entry.name!r} is in two files of {source.path}"
                )
            entries[entry.name] = (shard, entry)
        for name, record in read_records(shard.header.metadata, shard.path).items():
            if name in records and records[name][1] != record:
                raise CheckpointError(
                    f"checkpoint: two files of {source.path} say how {name!r} was quantized, and "
                    f"differ, got {records[name][1].quantizer.text} and {record.quantizer.text}"
                )
            records.setdefault(name, (shard, record))
    made: dict[str, _Place] = {}
    for name, (shard, record) in records.items():
        own = {}
        for one in record.stored():
            place = entries.pop(one.name, None)
            path, found = shard.path, "none"
            if place is not None:
                path, found = place[0].path, f"{place[1].dtype} {list(place[1].shape)}"
            asked = f"{dtype_name(one.dtype)} {list(one.shape)}"
            if place is None or found != asked:
                raise CheckpointError(
                    f"checkpoint: {path} must hold {one.name!r} as {asked}, got {found}"
                )
            own[one.name] = place
        made[name] = _Place(own, record)
    for name, place in entries.items():
        if name in made:
            raise CheckpointError(f"checkpoint: {place[0].path} has {name!r} twice")
        made[name] = _Place({name: place}, None)
    return made


def _read(place: _Place) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    for name, (shard, entry) in place.entries.items():
        with reading(shard.path) as file:
            shard.check_unchanged()
            read[name] = _read_tensor(file, entry, shard.path)
    return read


def _read_tensor(file: int, entry: Entry, path: Path) -> torch.Tensor:
    if entry.dtype not in TORCH_DTYPES:
        raise CheckpointError(
            f"checkpoint: torch has no dtype for {entry.name!r} of {path}, which is {entry.dtype}"
        )
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    read_into(file, as_bytes(data), entry.begin, path)
    return data.view(TORCH_DTYPES[entry.dtype]).reshape(storage_shape(entry))
