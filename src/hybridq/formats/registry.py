"""The formats known by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import SpecError, must_be_one_of
from .base import Format
from .codec import PYTHON, Codec, name_codec

__all__ = [
    "Entry",
    "entries",
    "format",
    "name_of",
    "names",
    "register_codec",
    "register_format",
]


@dataclass(frozen=True)
class Entry:
    """A named format with what a reader of the table of formats wants to know.

    Args:
        name: the name that `hybridq.quantize` takes.
        format: the record.
        summary: one line.
        source: specification or paper.
        limits: what the format cannot hold, in one line.
    """

    name: str
    format: Format
    summary: str
    source: str
    limits: str


_entries: dict[str, Entry] = {}
_aliases: dict[str, str] = {}


def register_format(
    name: str, format: Format, *, summary: str = "", source: str = "", limits: str = ""
) -> Format:
    """Make `format` known as `name` everywhere: quantize, tests, docs and benchmarks.

    Args:
        name: a new name: lower-case letters, digits, `_`, `-` and `.`.
        format: the record.
        summary: one line for tables.
        source: where the format is specified.
        limits: what it cannot hold.

    Returns:
        `format` itself.

    Raises:
        SpecError: the name is taken by another format, or is none that strings can hold.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9_.-]+", name):
        raise SpecError(
            f"register_format: name must be lower-case letters, digits, _, - and ., got {name!r}"
        )
    if not isinstance(format, Format):
        raise SpecError(f"register_format: takes a Format, got {type(format).__name__}")
    if name in _aliases or _entries.get(name, Entry(name, format, "", "", "")).format != format:
        raise SpecError(f"register_format: the name {name!r} is taken")
    _entries[name] = Entry(name, format, summary, source, limits)
    return format


def register_codec(
    name: str,
    codec: Codec,
    *,
    summary: str = "",
    source: str = "",
    is_listed: bool = True,
    is_kept: bool = True,
) -> Format:
    """Return the Format whose codes `codec` makes and reads; it is known as `name` everywhere.

    It goes wherever a format does but into groups of tokens and parts of planes. It is the
    reference way: Python runs for each plane, no kernel knows the codes, and a product decodes
    them, unless the codec has a product.

    Args:
        name: a new name, as of `register_format`. A file with such planes, and another process,
            need it registered there, too.
        codec: an instance of a class that derives from Codec.
        summary, source: as of `register_format`.
        is_listed: False: `names` and tables of formats leave it out, and quantizers take the
            Format in the place of a name.
        is_kept: False, of one that is not listed: the name means it as long as somebody holds it,
            or a Format, a quantizer or a plane of it.

    Raises:
        SpecError: the name is taken by another one, or is none that strings can hold.

    Example:
        >>> import torch, hybridq
        >>> class Signs(hybridq.formats.Codec):
        ...     def buffers(self, rows, cols):
        ...         return [((rows, cols), torch.int8), ((rows, 1), torch.float32)]
        ...     def encode(self, matrix):
        ...         mean = matrix.float().abs().mean(1, keepdim=True)
        ...         return [matrix.sign().to(torch.int8), mean]
        ...     def decode(self, buffers, rows, cols):
        ...         return buffers[0].float() * buffers[1]
        >>> signs = hybridq.formats.register_codec("signs_of_this_example", Signs())
        >>> hybridq.quantize(torch.tensor([[1.0, -3.0]]), signs).dequantize()
        tensor([[ 2., -2.]])
    """
    name_codec(name, codec, is_kept or is_listed)
    made = Format(None, None, None, PYTHON, name)
    if not is_listed:
        return made
    return register_format(name, made, summary=summary, source=source, limits="what its codec says")


def register_alias(alias: str, name: str) -> None:
    """Let `alias` mean the format `name`: what the recipe of that format is called, for one."""
    _aliases[alias] = name


def names() -> tuple[str, ...]:
    """Return the names of all formats, without aliases."""
    return tuple(_entries)


def name_of(format: Format) -> str | None:
    """Return the name of a format, without aliases, or None where it has none.

    Args:
        format: any.
    """
    return next((entry.name for entry in _entries.values() if entry.format == format), None)


def entries() -> tuple[Entry, ...]:
    """Return all named formats."""
    return tuple(_entries.values())


def format(which: str | Format) -> Format:
    """Return the format named `which`; a Format is returned as it is.

    Raises:
        SpecError: no format has that name; the message lists all names.
    """
    if isinstance(which, Format):
        return which
    if not isinstance(which, str):
        raise SpecError(f"format: must be a name or a Format, got {type(which).__name__}")
    name = _aliases.get(which.lower(), which.lower())
    if name not in _entries:
        raise SpecError(f"format: {must_be_one_of(_entries, which)}")
    return _entries[name].format
