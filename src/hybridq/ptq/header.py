"""The header of a safetensors file: read and checked, or made from names, shapes and dtypes.

The library checks files; it writes them only from tensors that are all in memory, so headers of
files that are written piece by piece are made here, with the library's own order of tensors.

Source: the format's description, github.com/huggingface/safetensors, README.md, "Format".
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from .._files import import_safetensors
from ..errors import CheckpointError
from .disk import reading
from .files import parse_json, read_into

__all__ = [
    "TORCH_DTYPES",
    "Entry",
    "Header",
    "dtype_name",
    "make_header",
    "read_header",
    "storage_shape",
]

#: Every dtype of the format in the library's order: what is aligned to more bytes comes first.
_ORDER: Final = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"),
    *("F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
#: The dtypes that torch has.
TORCH_DTYPES: Final = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F4": torch.float4_e2m1fn_x2,
    "BOOL": torch.bool,
}
#: A dtype that is new in the library comes last: its bytes are only copied.
_RANKS: Final = {name: rank for rank, name in enumerate(_ORDER)}
_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_METADATA: Final = "__metadata__"
_PREFIX_NBYTES: Final = 8
#: The library reads no larger header.
_MAX_HEADER_NBYTES: Final = 100_000_000


def dtype_name(dtype: torch.dtype) -> str:
    """Return the format's name of a torch dtype."""
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    Args:
        name: unique in the file.
        dtype: the format's name, such as `"BF16"`; also of dtypes that torch lacks.
        shape: logical; codes of less than a byte count one by one.
        begin, end: place in the file, in bytes from its start.
        is_transposed: a weight that its model keeps as `[in, out]` (`conv1d`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    is_transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Args:
        entries: its tensors in the order of their places.
        metadata: its free strings.
        digest: SHA-256 of the header's bytes, as hexadecimal digits.
    """

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]
    digest: str


def read_header(path: Path) -> Header:
    """Return the checked header of the safetensors file `path`.

    The library refuses headers that are cut or no JSON, unknown dtypes, and places that overlap,
    leave a hole or do not end where the file does. A name that is given twice is refused here: the
    library would take the last one.

    Raises:
        CheckpointError: the file is no whole and unambiguous safetensors file.
        ImportError: the library is not installed.
    """
    library = import_safetensors("checkpoints")
    try:
        with reading(path) as file:  # the library would wait for a FIFO
            with library.safe_open(os.fspath(path), framework="np"):
                pass
            prefix = bytearray(_PREFIX_NBYTES)
            read_into(file, memoryview(prefix), 0, path)
            size = int.from_bytes(prefix, "little")
            raw = bytearray(size)  # the library has found it within the file
            read_into(file, memoryview(raw), _PREFIX_NBYTES, path)
    except library.SafetensorError as error:
        raise CheckpointError(
            f"checkpoint: {path} is no whole safetensors file ({error})"
        ) from error
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot read {path} ({error.strerror})") from error
    table = parse_json(bytes(raw), path, "safetensors file")
    start = _PREFIX_NBYTES + size
    metadata = table.pop(_METADATA, None) or {}
    entries = [
        Entry(name, info["dtype"], tuple(info["shape"]), *(start + n for n in info["data_offsets"]))
        for name, info in table.items()
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    return Header(tuple(entries), metadata, hashlib.sha256(raw).hexdigest())


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[Entry, ...]]:
    """Return the first bytes of a file with these tensors, and where each will stand.

    Args:
        tensors: name, dtype, shape and number of bytes of each.
        metadata: free strings; keys are sorted, so that equal files have equal bytes.

    Returns:
        The length and the header, and the entries in the order of their places: larger alignment
        first, then by name.

    Raises:
        CheckpointError: more tensors than a header can hold.
    """
    ordered = sorted(tensors, key=lambda tensor: (_RANKS.get(tensor[1], len(_ORDER)), tensor[0]))
    table: dict[str, Any] = {}
    if metadata:
        table[_METADATA] = dict(sorted(metadata.items()))
    places = []
    end = 0
    for name, dtype, shape, nbytes in ordered:
        begin, end = end, end + nbytes
        places.append(Entry(name, dtype, shape, begin, end))
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % _PREFIX_NBYTES)  # data begins at a multiple of 8
    if len(raw) > _MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"checkpoint: a header must have at most {_MAX_HEADER_NBYTES} bytes, got {len(raw)} "
            f"for {len(places)} tensors; split the shard"
        )
    start = _PREFIX_NBYTES + len(raw)
    entries = tuple(
        Entry(one.name, one.dtype, one.shape, start + one.begin, start + one.end) for one in places
    )
    return len(raw).to_bytes(_PREFIX_NBYTES, "little") + raw, entries


def storage_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape of the torch tensor with the bytes of `entry`.

    Two F4 codes are one element of torch's dtype.
    """
    if entry.dtype != "F4":
        return entry.shape
    if not entry.shape or entry.shape[-1] % 2:
        return (math.prod(entry.shape) // 2,)
    return (*entry.shape[:-1], entry.shape[-1] // 2)
