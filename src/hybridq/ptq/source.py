"""The checkpoint to read: one file, or a folder of shards with or without an index.

Source: the layout of Hugging Face's checkpoints, `model.safetensors` or
`model.safetensors.index.json` with `weight_map` and `metadata`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..errors import CheckpointError
from .conv1d import are_turned, turned, uses_conv1d
from .disk import is_name, is_there, kind_of, reading
from .files import read_json
from .header import Header, read_header

__all__ = ["INDEX", "SINGLE", "Shard", "Source", "marked", "open_source"]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
SUFFIX: Final = ".safetensors"
#: Weights in this or another form: never copied beside the converted ones.
_WEIGHTS: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth"),
    *("*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.npz", "*.tflite"),
)
#: What is larger is no configuration or vocabulary.
_SMALL_NBYTES: Final = 256 << 20


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint.

    Args:
        path: of the file.
        header: what it holds.
        nbytes, mtime_ns: size and time of change when the header was read.
    """

    path: Path
    header: Header
    nbytes: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file is no longer the one whose header was read."""
        try:
            found = self.path.stat()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: cannot read {self.path} ({error.strerror})"
            ) from error
        if (found.st_size, found.st_mtime_ns) != (self.nbytes, self.mtime_ns):
            raise CheckpointError(f"checkpoint: {self.path} has changed while it was read")


@dataclass(frozen=True)
class Source:
    """A checkpoint whose headers have been read.

    Args:
        path: the file or folder.
        shards: its files, by name.
        index: the index, or None where there is none.
        extras: other files to keep beside the weights, relative to `path`.
        left_out: other files that are too large for that.
    """

    path: Path
    shards: tuple[Shard, ...]
    index: Mapping[str, Any] | None
    extras: tuple[Path, ...]
    left_out: tuple[Path, ...]

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.is_dir()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for shard in self.shards for entry in shard.header.entries)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Read the headers of the checkpoint at `path`.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or
            `model.safetensors.index.json`.

    Raises:
        CheckpointError: there is none, a file of it is damaged, or index and files disagree.
        ImportError: safetensors is not installed.
    """
    found = Path(path)
    kind = kind_of(found)
    if not kind:
        raise CheckpointError(f"checkpoint: there is no {found}")
    if kind != "folder":
        if found.suffix != SUFFIX:
            raise CheckpointError(f"checkpoint: a file must end in {SUFFIX}, got {found}")
        return Source(found, (_open_shard(found),), None, (), ())
    index = None
    if is_there(found / INDEX):
        with reading(found / INDEX) as file:
            index = read_json(file, found / INDEX, "index")
        shards = _open_shards(found, index)
    elif is_there(found / SINGLE):
        shards = (_open_shard(found / SINGLE),)
    else:
        raise CheckpointError(f"checkpoint: {found} has neither {SINGLE} nor {INDEX}")
    extras, left_out = _extras(found)
    return Source(found, shards, index, extras, left_out)


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the model's configuration, if there is one."""
    path = folder / CONFIG
    if not is_there(path):
        return {}
    with reading(path) as file:
        return read_json(file, path, "configuration")


def marked(source: Source) -> Source:
    """Return a checkpoint with those weights marked that its model keeps as `[in, out]`.

    Args:
        source: as it was opened.

    Raises:
        CheckpointError: its `config.json` cannot be read.
    """
    config = _config(source.path) if source.is_folder else {}
    every = (entry for shard in source.shards for entry in shard.header.entries)
    if not are_turned(every, uses_conv1d(config)):
        return source
    shards = tuple(
        replace(shard, header=replace(shard.header, entries=turned(shard.header.entries)))
        for shard in source.shards
    )
    return replace(source, shards=shards)


def _open_shard(path: Path) -> Shard:
    header = read_header(path)
    found = path.stat()
    return Shard(path, header, found.st_size, found.st_mtime_ns)


def _open_shards(folder: Path, index: Mapping[str, Any]) -> tuple[Shard, ...]:
    weight_map = index.get("weight_map")
    where = folder / INDEX
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"checkpoint: {where} has no weight_map")
    files = sorted({_file_name(name, where) for name in weight_map.values()})
    if SINGLE not in files and is_there(folder / SINGLE):
        raise CheckpointError(
            f"checkpoint: {folder} has both {SINGLE} and an {INDEX} that does not name it; "
            "which one is meant? Give the file, or move one away"
        )
    for name in files:
        if not is_there(folder / name):
            raise CheckpointError(f"checkpoint: {where} names {name}, which is not there")
    shards = tuple(_open_shard(folder / name) for name in files)
    _check_map(weight_map, shards, where)
    return shards


def _file_name(name: object, where: Path) -> str:
    # A path could point out of the folder, and the converted shard be written there.
    is_plain = isinstance(name, str) and is_name(name) and Path(name).name == name
    if not isinstance(name, str) or not is_plain or not name.endswith(SUFFIX):
        raise CheckpointError(f"checkpoint: {where} must name {SUFFIX} files, got {name!r}")
    return name


def _check_map(weight_map: Mapping[str, str], shards: tuple[Shard, ...], where: Path) -> None:
    holder: dict[str, str] = {}
    for shard in shards:
        for entry in shard.header.entries:
            if entry.name in holder:
                raise CheckpointError(
                    f"checkpoint: {entry.name!r} is in {holder[entry.name]} and in {shard.name}"
                )
            holder[entry.name] = shard.name
    for name, file in weight_map.items():
        if holder.get(name) != file:
            raise CheckpointError(f"checkpoint: {where} has {name!r} in {file}, which lacks it")


def _extras(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    small: list[Path] = []
    large: list[Path] = []
    for path in _files(folder):
        relative = path.relative_to(folder)
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in _WEIGHTS):
            continue
        (small if path.stat().st_size <= _SMALL_NBYTES else large).append(relative)
    return tuple(small), tuple(large)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder`, in order; what begins with a dot is not part of it."""
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (Path(top) / name).is_file():
                yield Path(top) / name
