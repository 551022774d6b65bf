"""Case: one question to an implementation, with the right answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ..errors import SpecError
from ..formats import Element, Format, PlaneSpec, element, entries

__all__ = ["KINDS", "Array", "Buffers", "Case", "describe", "to_spec"]

Array = np.ndarray[Any, np.dtype[Any]]
Buffers = Mapping[str, Array]

#: What a case asks for.
KINDS = {
    "cast": "values to codes of an element, one per byte",
    "uncast": "codes of an element to values",
    "encode": "a matrix to the buffers of a plane",
    "decode": "the buffers of a plane to values",
    "gemm": "the buffers of two planes to their product",
}
#: Facts that follow from the rest of a description, there for readers of the files.
_DERIVED = ("text", "codes_per_byte")


def describe(spec: PlaneSpec) -> dict[str, Any]:
    """Return `spec` as JSON can hold it: one entry per field of the Format and the PlaneSpec."""
    described: dict[str, Any] = {
        "text": spec.text,
        "codes_per_byte": 1 if spec.format.element is None else spec.format.element.codes_per_byte,
    }
    for record in (spec.format, spec):
        for part in fields(record):
            value = getattr(record, part.name)
            if isinstance(value, Format) or part.name == "scale_layout":  # no matter of values
                continue
            if isinstance(value, Element):
                value = value.name
            described[part.name] = list(value) if isinstance(value, tuple) else value
    return described


def to_spec(described: Mapping[str, Any]) -> PlaneSpec:
    """Return the PlaneSpec that `describe` described.

    Raises:
        SpecError: the description names something that this version does not know.
    """
    own = {part.name for part in fields(PlaneSpec)} - {"format"}
    of_format = {part.name for part in fields(Format)}
    unknown = set(described) - own - of_format - set(_DERIVED)
    if unknown:
        raise SpecError(f"to_spec: unknown fields {', '.join(sorted(unknown))}")
    parts = {name: described[name] for name in of_format if name in described}
    for name in ("element", "scale"):
        parts[name] = None if parts.get(name) is None else element(parts[name])
    if parts.get("block") is not None:
        parts["block"] = tuple(parts["block"])
    parts.setdefault("family", "")
    missing = {"block", "rule"} - set(parts)
    if missing:
        raise SpecError(f"to_spec: missing fields {', '.join(sorted(missing))}")
    fmt = Format(**parts)
    if not fmt.family:
        fmt = _named(fmt)
    return PlaneSpec(fmt, **{name: described[name] for name in own if name in described})


def _named(fmt: Format) -> Format:
    """Return the registered format that equals `fmt` but for the family, or `fmt` itself."""
    values = [getattr(fmt, part.name) for part in fields(Format) if part.name != "family"]
    for entry in entries():
        theirs = [
            getattr(entry.format, part.name) for part in fields(Format) if part.name != "family"
        ]
        if theirs == values:
            return entry.format
    return fmt


@dataclass(frozen=True, eq=False)
class Case:
    """One question to an implementation, and the right answer. NumPy only.

    Args:
        id: unique name, e.g. `"mxfp8/odd/encode"`.
        kind: a key of `KINDS`.
        spec: the plane (of operand a) as `describe` gives it; of a cast: `{"element": name}`.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`: what x holds exactly, and the dtype that a
            source is rounded to. Values are handed over and returned as float32 all the same.
        shape: `(rows, cols)` of the logical matrix X.
        direction: `"rowwise"`, or `"columnwise"`: the plane of X transposed.
        x: float32 input of cast and encode.
        given: buffers that decode, uncast and gemm (operand a) take.
        want: the right answer: buffers of encode and cast (`data`, `scale`, `amax`), `values`
            of decode and uncast, `product` (FP64) and `bound` of gemm.
        seed, stream: of stochastic rounding; seed None where nothing is stochastic.
        offset: `(row0, col0)`: where X lies in the whole tensor.
        source: description of the rowwise plane that X goes through first: encoded, decoded and
            rounded to `dtype`; or None.
        other: of gemm: `(spec, shape, buffers)` of operand b.
        ulp: how many FP32 steps a decoded value may be off.
    """

    id: str
    kind: str
    spec: Mapping[str, Any]
    dtype: str = "float32"
    shape: tuple[int, int] = (0, 0)
    direction: str = "rowwise"
    x: Array | None = None
    given: Buffers = field(default_factory=dict)
    want: Buffers = field(default_factory=dict)
    seed: int | None = None
    stream: int = 0
    offset: tuple[int, int] = (0, 0)
    source: Mapping[str, Any] | None = None
    other: tuple[Mapping[str, Any], tuple[int, int], Buffers] | None = None
    ulp: int = 0

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the plane's own matrix: X, or X transposed for a columnwise plane."""
        rows, cols = self.shape
        return (rows, cols) if self.direction == "rowwise" else (cols, rows)

    @property
    def own(self) -> Array:
        """The plane's own matrix: x, or x transposed; contiguous float32.

        Raises:
            ValueError: the case has no input.
        """
        if self.x is None:
            raise ValueError(f"own: {self.id} has no input")
        return np.ascontiguousarray(self.x if self.direction == "rowwise" else self.x.T)
