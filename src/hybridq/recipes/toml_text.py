"""Values as TOML: what a recipe's file is written in, and where a key of it stands.

The standard library reads TOML (from Python 3.11 on) and does not write it. What is written here is
a table of scalars, arrays and inline tables, then tables and arrays of tables of one level.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["line_of", "parse", "write"]

#: Where a key stands: names of tables, and numbers in arrays of them.
Place = tuple[str | int, ...]

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_HEAD: Final = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\"-]+)\s*\]")


def parse(text: str, where: str) -> dict[str, Any]:
    """Return the table that `text` is.

    Args:
        text: of a file.
        where: its name, for errors.

    Raises:
        ValueError: it is no TOML; the message says in which line.
        ModuleNotFoundError: Python 3.10 without the package tomli.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{where}: a TOML file needs Python 3.11 or the package tomli, got Python "
                f"{sys.version.split()[0]} without it; pip install tomli"
            ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: must be TOML, got: {error}") from error


def line_of(text: str, place: Place) -> int | None:
    """Return the number of the line in which a key stands, from 1, or None if it is not seen.

    Args:
        text: of the file.
        place: of the key. Of a key inside of an inline table, the line of the table.
    """
    table: list[str | int] = []
    counts: dict[str, int] = {}
    best, depth = None, 0
    for number, line in enumerate(text.splitlines(), 1):
        head = _HEAD.match(line)
        if head:
            name = head.group(2).strip('"')
            table = [name]
            if head.group(1) == "[[":
                counts[name] = counts.get(name, -1) + 1
                table.append(counts[name])
        key = re.match(r'\s*"?([A-Za-z0-9_-]+)"?\s*[=.]', line)
        path = [*table, key.group(1)] if key and not head else table
        if depth < len(path) <= len(place) and path == list(place[: len(path)]):
            best, depth = number, len(path)
        elif best is None and head and table[: len(place)] == list(place):
            best = number  # the first of an array that is meant as a whole
    return best


def write(table: Mapping[str, Any]) -> str:
    """Return a table as TOML: values first, then tables, then arrays of tables.

    Args:
        table: of strings, bools, numbers, and mappings and sequences of them. A table in it holds
            its own tables inline.
    """
    plain, tables, arrays = [], [], []
    for name, value in table.items():
        if isinstance(value, Mapping) and name in _TABLES:
            tables.append(f"\n[{_key(name)}]\n{_lines(value)}")
        elif name in _ARRAYS:
            arrays += [f"\n[[{_key(name)}]]\n{_lines(one)}" for one in value]
        else:
            plain.append((name, value))
    return "".join((_lines(dict(plain)), *tables, *arrays))


#: Names of what stands under a head of its own.
_TABLES: Final = ("options",)
_ARRAYS: Final = ("rules", "phases")


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(name)} = {_value(value)}\n" for name, value in table.items())


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    """Return a basic string: JSON's, which has the same escapes but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        inside = ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"write: TOML has no value for a {type(value).__name__}, got {value!r}")
