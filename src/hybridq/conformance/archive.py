"""The arrays of an npz, read with their sizes known beforehand.

NumPy's reader takes memory as an array's header says, so a small file may ask for any amount. Here
the sizes that the archive's directory and the arrays' headers say must agree, and stay below a
bound, before memory is taken; and what is no such archive is an error of one kind.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy

from .case import Array

__all__ = ["MOST_NBYTES", "VectorError", "read_arrays"]

#: Of all arrays of a file together; the largest that come with hybridq have 2 MiB.
MOST_NBYTES: Final = 256 << 20
_SUFFIX: Final = ".npy"
_HEADERS: Final[dict[tuple[int, int], Callable[..., Any]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}


#: What Python and NumPy say of archives and headers that are broken in one way or another.
_BROKEN: Final = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError),
    *(ValueError, TypeError, KeyError, SyntaxError, OverflowError, MemoryError),
)


class VectorError(ValueError):
    """A file is no vector file, or of a version that is not known."""


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz by name.

    Args:
        path: of a regular file.

    Raises:
        VectorError: it is no whole npz, holds objects, or more than `MOST_NBYTES`.
    """
    try:
        if not path.is_file():  # a FIFO would be waited for
            raise VectorError(f"read: {path} must be a regular file")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            nbytes = sum(member.file_size for member in members)
            if nbytes > MOST_NBYTES:
                raise VectorError(
                    f"read: {path} must hold at most {MOST_NBYTES} bytes, got {nbytes}"
                )
            made: dict[str, Array] = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(_SUFFIX)
                    made[name] = _array(file, member.file_size)
            return made
    except VectorError:
        raise
    except _BROKEN as error:
        raise VectorError(f"read: {path} is no whole npz of plain arrays ({error})") from error


def _array(file: IO[bytes], nbytes: int) -> Array:
    """Return the array in a member of `nbytes`.

    Raises:
        ValueError: it is none, holds objects, or has another size than its header says.
    """
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"an array of version {version}")
    shape, is_fortran, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    want, left = math.prod(shape) * dtype.itemsize, nbytes - file.tell()
    if want != left:
        raise ValueError(f"an array of {want} bytes in {left}")
    values = np.frombuffer(file.read(want), dtype)
    return values.reshape(shape, order="F" if is_fortran else "C").copy()
