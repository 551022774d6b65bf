"""Files: written whole or not at all, and the library that tensors in them need."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["import_safetensors", "write_whole"]


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file: whoever opens it sees what was there before, or all of it.

    It may be read and written as one that `open` made: by the process's umask, or as the file that
    it replaces.

    Args:
        path: of the file.
        content: what it holds then.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    target = Path(path)
    name = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    written = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(written, "wb") as file:
            with suppress(OSError):  # none is there, or its rights are for others to set
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def import_safetensors(where: str) -> Any:
    """Return the library that reads and writes tensors in files; hybridq itself runs without it.

    Args:
        where: what wants it, for the error.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        return import_module("safetensors")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "safetensors":
            raise
        raise ImportError(
            f"{where}: safetensors is not installed; pip install hybridq[checkpoints]"
        ) from error
