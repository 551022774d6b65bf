"""Files: ranges read and written in place, and files that appear whole or not at all.

Memory is bounded because nothing is mapped: pages of a mapped file that were touched count as the
process's own until the system takes them back. Ranges are read into memory that is used again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError

__all__ = [
    "as_bytes",
    "check_space",
    "copy_file",
    "file_digest",
    "locked",
    "make_folder",
    "parse_json",
    "partial_path",
    "read_into",
    "read_json",
    "sync_folder",
    "whole_file",
    "write_at",
    "write_json",
]

_PIECE_NBYTES: Final = 1 << 20
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as writable bytes."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def read_into(file: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill `out` with the bytes of an open file from `offset` on.

    Args:
        file: its descriptor.
        out: writable.
        offset: in bytes.
        path: its name, for the error.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    done = 0
    try:
        while done < len(out):
            got = os.preadv(file, [out[done:]], offset + done)
            if got == 0:
                raise CheckpointError(f"checkpoint: {path} has become shorter while it was read")
            done += got
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {path} ({error.strerror})") from error


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` of an open file."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def partial_path(path: Path) -> Path:
    """Return the name under which `path` is written until it is whole."""
    return path.with_name(f".{path.name}.partial")


@contextmanager
def whole_file(path: Path) -> Iterator[int]:
    """Open a file for writing that gets the name `path` only once all of it is on the disk.

    If the block raises, nothing is left; if the process dies, a file of another name
    (`partial_path`).

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    partial = partial_path(path)
    file = -1
    try:
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        yield file
        os.fsync(file)
        os.replace(partial, path)
        sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(path, error) from error
        raise
    finally:
        if file >= 0:
            os.close(file)


def _write_error(path: Path, error: OSError) -> CheckpointError:
    if error.errno in _FULL:
        return CheckpointError(
            f"checkpoint: no space left for {path} ({error.strerror}); what was finished is kept: "
            "make room and run again"
        )
    return CheckpointError(f"checkpoint: cannot write {path} ({error.strerror})")


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_space(folder: Path, nbytes: int, what: str) -> None:
    """Raise unless the disk of `folder` has room for `nbytes` more.

    Args:
        folder: exists.
        nbytes: how many.
        what: what they are for.

    Raises:
        CheckpointError: it has less.
    """
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < nbytes:
        raise CheckpointError(
            f"checkpoint: {what} needs {nbytes} bytes in {folder}, which has {free} free"
        )


def file_digest(file: int) -> str:
    """Return the SHA-256 of an open file as hexadecimal digits.

    Args:
        file: its descriptor.
    """
    digest = hashlib.sha256()
    piece = memoryview(bytearray(_PIECE_NBYTES))
    offset = 0
    while count := os.preadv(file, [piece], offset):
        digest.update(piece[:count])
        offset += count
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, where they are not there.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot make {folder} ({error.strerror})") from error


def copy_file(source: Path, target: Path) -> None:
    """Copy the contents of a file; `target` appears whole, its folder is made.

    Raises:
        CheckpointError: `source` cannot be read, or `target` not be written.
    """
    try:
        read = source.open("rb")
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {source} ({error.strerror})") from error
    make_folder(target.parent)
    with read, whole_file(target) as file, os.fdopen(os.dup(file), "wb") as to:
        shutil.copyfileobj(read, to, _PIECE_NBYTES)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON in one fixed form; the file appears whole."""
    encoder = json.JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    with whole_file(path) as file, os.fdopen(os.dup(file), "w", encoding="utf-8") as to:
        for piece in encoder.iterencode(value):  # never all of the text in memory
            to.write(piece)
        to.write("\n")


def parse_json(text: bytes, path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object that `text` is.

    Args:
        text: UTF-8.
        path, what: where it comes from and what it is, for the error.

    Raises:
        CheckpointError: it is something else, or names something twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except ValueError as error:
        raise CheckpointError(f"checkpoint: {path} is no {what} ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint: {path} is no {what} (it holds no JSON object)")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"it names {twice!r} twice")
    return made


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file, as `parse_json` does.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {path} ({error.strerror})") from error
    return parse_json(text, path, what)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone; the system lets it go when the process ends.

    Raises:
        CheckpointError: another process holds it.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"checkpoint: another process is writing into {folder}"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):  # no locks on this file system
                raise
        yield
    finally:
        os.close(file)
