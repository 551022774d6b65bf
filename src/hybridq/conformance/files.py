"""Vector files: an npz with a JSON `meta` that says what every array is.

See docs/reference/conformance.md.

| array | in the file |
| --- | --- |
| codes, E8M0 and E4M3 scales | uint8 |
| float32, float16 values | as they are |
| bfloat16 values | uint16, their bits |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .archive import VectorError, read_arrays
from .case import Array, Case
from .inputs import all_values

__all__ = ["FORMAT", "VERSION", "VectorError", "cases_of", "read_file", "read_meta", "write_file"]

#: What `format` is in a vector file's `meta`.
FORMAT = "hybridq-conformance"
#: Version of the files; a change that old readers would misread raises it.
VERSION = 1
#: Stands for an array that is not stored: every value of a 16-bit dtype, index = its bits.
_ALL = "all:"
#: Fields of a Case that are no arrays; what equals its default is left out of the file.
_PLAIN = ("dtype", "direction", "seed", "stream", "source", "ulp")


class _Store:
    """Arrays to be written, equal ones once."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, array: Array) -> str:
        """Return the name under which `array` is stored: short, since a zip repeats names."""
        array = np.ascontiguousarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = f"a{len(self.arrays)}"
            self.arrays[self._known[key]] = array
        return self._known[key]


def _packed(x: Array, dtype: str) -> Array:
    if dtype == "float32":
        return x.astype(np.float32)
    if dtype == "float16":
        return x.astype(np.float16)
    return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> np.uint32(16)).astype(
        np.uint16
    )


def _unpacked(stored: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _is_all(x: Array, dtype: str) -> bool:
    if dtype == "float32" or x.shape != (1 << 16,):
        return False
    return np.array_equal(x, all_values(dtype), equal_nan=True)


def write_file(path: Path, summary: str, cases: Iterable[Case], written_by: str) -> None:
    """Write `cases` to `path`.

    Args:
        path: an `.npz`; it is replaced.
        summary: one line about the file.
        cases: with their answers.
        written_by: what computed the answers.
    """
    store = _Store()
    listed = [_entry(case, store) for case in cases]
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "name": path.stem,
        "summary": summary,
        "written_by": written_by,
        "cases": listed,
    }
    text = np.array(json.dumps(meta, allow_nan=False))
    np.savez_compressed(path, meta=text, **store.arrays)  # type: ignore[arg-type]


def _entry(case: Case, store: _Store) -> dict[str, Any]:
    """Return a case as JSON, its arrays replaced by their names in `store`."""
    entry: dict[str, Any] = {"id": case.id, "kind": case.kind, "spec": dict(case.spec)}
    entry["shape"] = list(case.shape)
    default = Case("", "", {})
    for name in _PLAIN:
        if getattr(case, name) != getattr(default, name):
            entry[name] = getattr(case, name)
    if case.offset != default.offset:
        entry["offset"] = list(case.offset)
    if case.x is not None:
        entry["x"] = (
            _ALL + case.dtype
            if _is_all(case.x, case.dtype)
            else store.add(_packed(case.x, case.dtype))
        )
    for part in ("given", "want"):
        arrays = getattr(case, part)
        if arrays:
            entry[part] = {name: store.add(array) for name, array in arrays.items()}
    if case.other is not None:
        spec, shape, buffers = case.other
        names = {name: store.add(array) for name, array in buffers.items()}
        entry["other"] = {"spec": dict(spec), "shape": list(shape), "given": names}
    return entry


def read_meta(file: Mapping[str, Array], path: Path) -> dict[str, Any]:
    """Return the JSON object in the array `meta` of an npz."""
    try:
        meta = json.loads(str(file["meta"]))
    except (KeyError, ValueError, RecursionError) as error:
        raise VectorError(f"read: {path} has no JSON meta ({error})") from error
    if not isinstance(meta, dict):
        raise VectorError(f"read: the meta of {path} must be an object, got {type(meta).__name__}")
    return meta


def read_file(path: Path) -> list[Case]:
    """Return the cases of a vector file.

    Raises:
        VectorError: the file is damaged, of another format or of a later version.
    """
    arrays = read_arrays(path)
    return cases_of(path, read_meta(arrays, path), arrays)


def cases_of(path: Path, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[Case]:
    """Return the cases of a vector file that has been read.

    Args:
        path: its name, for errors.
        meta: its `meta`.
        arrays: all that is in it.

    Raises:
        VectorError: it is of another format or of a later version, or its cases are damaged.
    """
    if meta.get("format") != FORMAT or meta.get("version") != VERSION:
        raise VectorError(
            f"read: {path} must be {FORMAT} version {VERSION}, got "
            f"{meta.get('format')!r} version {meta.get('version')!r}"
        )
    try:
        return [_case(entry, arrays) for entry in meta["cases"]]
    except KeyError as error:
        raise VectorError(f"read: {path} names {error}, which is not in it") from error
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise VectorError(f"read: a case of {path} is damaged ({error})") from error


def _case(entry: Mapping[str, Any], arrays: Mapping[str, Array]) -> Case:
    dtype = entry.get("dtype", "float32")
    x = entry.get("x")
    if x is not None:
        x = all_values(dtype) if x.startswith(_ALL) else _unpacked(arrays[x], dtype)

    def stored(names: Mapping[str, str]) -> dict[str, Array]:
        return {name: arrays[key] for name, key in names.items()}

    other = entry.get("other")
    if other is not None:
        other = (other["spec"], tuple(other["shape"]), stored(other["given"]))
    plain = {name: entry[name] for name in _PLAIN if name in entry}
    offset = tuple(entry.get("offset", (0, 0)))
    return Case(
        entry["id"],
        entry["kind"],
        entry["spec"],
        shape=tuple(entry["shape"]),
        x=x,
        other=other,
        offset=offset,
        given=stored(entry.get("given", {})),
        want=stored(entry.get("want", {})),
        **plain,
    )
