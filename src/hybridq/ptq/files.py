"""Open files: ranges read and written in place, JSON. What opens them is `disk`.

Memory is bounded because nothing is mapped: pages of a mapped file that were touched count as the
process's own until the system takes them back. Ranges are read into memory that is used again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch

from ..errors import CheckpointError

__all__ = [
    "as_bytes",
    "copy_bytes",
    "file_digest",
    "file_size",
    "parse_json",
    "read_into",
    "read_json",
    "write_at",
    "write_json",
]

_PIECE_NBYTES: Final = 1 << 20


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


def file_size(file: int) -> int:
    """Return how many bytes an open file has.

    Args:
        file: its descriptor.
    """
    return os.fstat(file).st_size


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


def copy_bytes(source: int, target: int, path: Path) -> None:
    """Copy the contents of an open file to another one.

    Args:
        source, target: their descriptors.
        path: name of the source, for the error.

    Raises:
        CheckpointError: the source cannot be read.
    """
    piece = memoryview(bytearray(_PIECE_NBYTES))
    offset = 0
    while True:
        try:
            count = os.preadv(source, [piece], offset)
        except OSError as error:
            raise CheckpointError(f"checkpoint: cannot read {path} ({error.strerror})") from error
        if count == 0:
            return
        write_at(target, piece[:count], offset)
        offset += count


def write_json(file: int, value: Any, allow_nan: bool = False) -> None:
    """Write `value` as JSON in one fixed form into an open file.

    Args:
        file: its descriptor.
        value: to write.
        allow_nan: NaN and infinity too, as Python's JSON has them.
    """
    encoder = json.JSONEncoder(indent=2, sort_keys=True, ensure_ascii=False, allow_nan=allow_nan)
    with os.fdopen(os.dup(file), "w", encoding="utf-8") as to:
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
    except (ValueError, RecursionError) as error:
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


def read_json(file: int, path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in an open file, as `parse_json` does.

    Args:
        file: its descriptor.
        path, what: its name and what it is, for the error.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        with os.fdopen(os.dup(file), "rb") as opened:
            text = opened.read()
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {path} ({error.strerror})") from error
    return parse_json(text, path, what)
