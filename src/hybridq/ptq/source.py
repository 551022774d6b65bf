"""The checkpoint to read: one file, or a folder of shards with or without an index.

Source: the layout of Hugging Face's checkpoints, `model.safetensors` or
`model.safetensors.index.json` with `weight_map` and `metadata`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError, path_in
from ..layouts import TORCHAO, current_names, said_of
from .disk import is_name, is_there, kind_of, names_in_folder, reading
from .files import as_bytes, read_into, read_json
from .header import Header, read_header

__all__ = [
    "CONFIG",
    "INDEX",
    "SINGLE",
    "Opened",
    "Shard",
    "Source",
    "open_source",
    "read_config",
]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
SUFFIX: Final = ".safetensors"
#: Weights in this or another form: never copied beside the converted ones.
_WEIGHTS: Final = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth"),
    *("*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.npz", "*.tflite"),
)
#: Start of the names of PEFT's files.
_ADAPTER: Final = "adapter_"
#: What is larger is no configuration or vocabulary.
_SMALL_NBYTES: Final = 256 << 20


class Opened:
    """A file that is open for reading.

    Args:
        file: its descriptor.
        path: its name, for errors.
    """

    def __init__(self, file: int, path: Path) -> None:
        self._file = file
        self._path = path

    def read(self, out: memoryview, offset: int) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before, or cannot be read.
        """
        read_into(self._file, out, offset, self._path)

    def will_need(self, offset: int, count: int) -> None:
        """Tell the system that a range is read next."""
        os.posix_fadvise(self._file, offset, count, os.POSIX_FADV_WILLNEED)


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

    @contextmanager
    def opened(self) -> Iterator[Opened]:
        """Open the file for reading.

        Raises:
            CheckpointError: it cannot be opened, or is no regular file.
        """
        with reading(self.path) as file:
            yield Opened(file, self.path)

    def read(self, offset: int, count: int) -> torch.Tensor:
        """Return some bytes of the file, uint8.

        Args:
            offset: of the first.
            count: how many.

        Raises:
            CheckpointError: the file cannot be read, or ends before.
        """
        data = torch.empty(count, dtype=torch.uint8, device="cpu")
        with self.opened() as file:
            file.read(as_bytes(data), offset)
        return data

    @property
    def title(self) -> str:
        """What errors call it."""
        return str(self.path)

    def identity(self) -> dict[str, Any]:
        """Return what tells the file from a changed one, as JSON has it."""
        return {
            "nbytes": self.nbytes,
            "mtime_ns": self.mtime_ns,
            "header": self.header.digest,
        }

    def is_same(self, found: object) -> bool:
        """Return whether it still is what it was.

        Args:
            found: what `identity` returned then.

        Raises:
            CheckpointError: it cannot be read.
        """
        return found == self.identity()

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
        own_files: the JSON files of a model in memory, by name; None: it is no such.
    """

    path: Path
    shards: tuple[Shard, ...]
    index: Mapping[str, Any] | None
    extras: tuple[Path, ...]
    left_out: tuple[Path, ...]
    own_files: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, or becomes one."""
        return self.own_files is not None or self.path.is_dir()

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration; empty if there is none.

        Raises:
            CheckpointError: its `config.json` cannot be read.
        """
        if self.own_files is not None:
            return self.own_files.get(CONFIG, {})
        return read_config(self.path) if self.path.is_dir() else {}

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
    found = path_in("checkpoint: the source", path)
    kind = kind_of(found)
    if not kind:
        raise CheckpointError(f"checkpoint: there is no {found}")
    if kind != "folder":
        if found.suffix != SUFFIX:
            what = ""
            if any(fnmatch.fnmatch(found.name, one) for one in _WEIGHTS):
                what = ", which is read by other programs: save it as safetensors first"
            raise CheckpointError(f"checkpoint: a file must end in {SUFFIX}, got {found}{what}")
        return Source(found, (_with_current_names(_open_shard(found)),), None, (), ())
    index = None
    if is_there(found / INDEX):
        with reading(found / INDEX) as file:
            index = read_json(file, found / INDEX, "index")
        shards = _open_shards(found, index)
    elif is_there(found / SINGLE):
        shards = (_open_shard(found / SINGLE),)
    else:
        raise CheckpointError(
            f"checkpoint: {found} has neither {SINGLE} nor {INDEX}{_what_is_there(found)}"
        )
    extras, left_out = _extras(found)
    return Source(found, tuple(map(_with_current_names, shards)), index, extras, left_out)


def _what_is_there(folder: Path) -> str:
    """Return what an error says of the weights that a folder has under other names."""
    names = names_in_folder(folder)
    if SINGLE in names or INDEX in names:
        name = SINGLE if SINGLE in names else INDEX
        return f": its {name} is a link to a file that is not there; download or copy that first"
    own = [name for name in names if name.endswith(SUFFIX)]
    whole = [name for name in own if not name.startswith(_ADAPTER)]
    if len(whole) == 1:
        return f"; give the file {folder / whole[0]} itself"
    if whole:
        return f", but {whole[0]} and {len(whole) - 1} more; an {INDEX} must name them"
    if own:
        return f", but {own[0]}: merge the adapter into its model, and give that"
    others = [name for name in names if any(fnmatch.fnmatch(name, one) for one in _WEIGHTS)]
    if others:
        what = f", but {others[0]}, which is read by other programs: save it as safetensors first"
        said = said_of(read_config(folder))
        if isinstance(said, Mapping) and said.get("quant_method") == TORCHAO.name:
            what += " (transformers' save_pretrained does, with torchao 0.15 or later)"
        return what
    return ""


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the model's configuration; empty if there is none.

    Args:
        folder: of a checkpoint.

    Raises:
        CheckpointError: its `config.json` cannot be read.
    """
    path = folder / CONFIG
    if not is_there(path):
        return {}
    with reading(path) as file:
        return read_json(file, path, "configuration")


def _open_shard(path: Path) -> Shard:
    header = read_header(path)
    found = path.stat()
    return Shard(path, header, found.st_size, found.st_mtime_ns)


def _with_current_names(shard: Shard) -> Shard:
    """Return a file with the names that today's torchao gives the tensors of an older one's."""
    own = shard.header
    names = current_names((entry.name for entry in own.entries), own.metadata)
    if not names:
        return shard
    entries = (replace(one, name=names.get(one.name, one.name)) for one in own.entries)
    return replace(shard, header=replace(own, entries=tuple(entries)))


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
        is_path = isinstance(name, str) and name.endswith(SUFFIX) and Path(name).name != name
        beside = " that lie beside it, and no paths" if is_path else ""
        raise CheckpointError(f"checkpoint: {where} must name {SUFFIX} files{beside}, got {name!r}")
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
