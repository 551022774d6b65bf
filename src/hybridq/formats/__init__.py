"""Formats as data: elements, Format records by name, PlaneSpec.

Example:
    >>> import hybridq
    >>> hybridq.formats.format("mxfp8").block
    (1, 32)
    >>> hybridq.formats.format("nvfp4").bits_per_value()
    4.5
"""

from __future__ import annotations

from . import fp8, fp8_block, identity, mxfp4, mxfp6, mxfp8, nvfp4
from .base import BUFFER_NAMES, RULES, BufferSpec, Format, ScaleRule
from .codec import Codec, CodedMatrix, codec_of
from .elements import ELEMENTS, Element, element, register_element
from .registry import Entry, entries, format, names, register_codec, register_format
from .spec import DEFAULT_SIGNS, ERRORS, HADAMARD_SIZE, PlaneSpec, PlaneText

__all__ = [
    "BUFFER_NAMES",
    "DEFAULT_SIGNS",
    "ELEMENTS",
    "ERRORS",
    "HADAMARD_SIZE",
    "RULES",
    "BufferSpec",
    "Codec",
    "CodedMatrix",
    "Element",
    "Entry",
    "Format",
    "PlaneSpec",
    "PlaneText",
    "ScaleRule",
    "codec_of",
    "element",
    "entries",
    "format",
    "fp8",
    "fp8_block",
    "identity",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "names",
    "nvfp4",
    "register_codec",
    "register_element",
    "register_format",
]
