"""What a checkpoint holds: quantizers, formats, amaxes, bytes, errors, and tokens per expert."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .._text import Table, html_page, size_text

__all__ = ["CacheScale", "CheckpointSummary", "WeightSummary"]


@dataclass(frozen=True)
class WeightSummary:
    """What is said of one quantized weight, or one stack of them.

    Args:
        name: of the weight in the checkpoint.
        formats: of its planes by direction.
        scheme: what its layout calls the format; empty in hybridq's own.
        shape: `[rows, cols]`, or `[E, rows, cols]` of a stack.
        nbytes: of codes and scales in the files.
        amax: largest magnitude of its values; None: values were not read.
        input_amax: what its static scale of inputs stands for, or the calibration has; None: there
            is no such.
        error: root of (sum of squared errors / sum of squares) beside the source; None: unknown.
        tokens: of each of its experts, by the calibration; empty without one.
    """

    name: str
    formats: tuple[tuple[str, str], ...]
    scheme: str
    shape: tuple[int, ...]
    nbytes: int
    amax: float | None = None
    input_amax: float | None = None
    error: float | None = None
    tokens: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """How many values there are."""
        return math.prod(self.shape)

    @property
    def text(self) -> str:
        """The formats in words."""
        if len(self.formats) == 1:
            return self.formats[0][1]
        return ", ".join(f"{direction} {spec}" for direction, spec in self.formats)


@dataclass(frozen=True)
class CacheScale:
    """The scale of keys or values of an attention module.

    Args:
        name: of the module.
        slot: `"k"` or `"v"`.
        amax: what the scale stands for.
    """

    name: str
    slot: str
    amax: float


@dataclass(frozen=True, repr=False)
class CheckpointSummary:
    """What `checkpoint_summary` returns: `str` shows tables, a notebook HTML.

    Args:
        path: of the checkpoint.
        layout: name of its layout; None: nothing in it is quantized.
        weights: those that are quantized.
        caches: scales of KV caches.
        plain: of each dtype of all other tensors, how many, elements and bytes.
        missing: weights that the source has under no such name and shape, or with values that
            are not finite.
    """

    path: str
    layout: str | None
    weights: tuple[WeightSummary, ...]
    caches: tuple[CacheScale, ...]
    plain: tuple[tuple[str, int, int, int], ...]
    missing: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.weights) + sum(one[3] for one in self.plain)

    def tables(self) -> tuple[Table, ...]:
        """Return a table by format, and if something is quantized one by name, and of experts."""
        made = [self._by_format()]
        if self.weights:
            made.append(self._by_name())
        if self.caches:
            rows = tuple((one.name, one.slot, f"{one.amax:.6g}") for one in self.caches)
            made.append(Table("KV caches", ("module", "of", "amax"), rows))
        experts = tuple(_experts(self.weights))
        if experts:
            heads = ("experts of", "experts", "least tokens", "most", "without any")
            made.append(Table("Tokens per expert", heads, experts))
        return tuple(made)

    def _by_format(self) -> Table:
        groups: dict[str, list[WeightSummary]] = {}
        for one in self.weights:
            groups.setdefault(one.text, []).append(one)
        rows = [
            _row(text, len(own), sum(w.elements for w in own), sum(w.nbytes for w in own))
            for text, own in groups.items()
        ]
        rows += [_row(f"{dtype}, not quantized", *counts) for dtype, *counts in self.plain]
        what = "nothing is quantized" if self.layout is None else f"layout {self.layout}"
        title = f"{self.path}: {what}, {size_text(self.nbytes)}"
        notes: tuple[str, ...] = ()
        if self.missing:
            more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
            names = ", ".join(self.missing[:3])
            notes = (f"the source has no {names}{more}, or of another shape: errors are not known",)
        heads = ("format", "tensors", "elements", "bytes", "bits each")
        return Table(title, heads, tuple(rows), notes)

    def _by_name(self) -> Table:
        groups: dict[tuple[Any, ...], list[WeightSummary]] = {}
        for one in self.weights:
            groups.setdefault((starred(one.name), one.text, one.shape), []).append(one)
        rows = tuple(
            (
                *(name, text, "x".join(map(str, shape)), str(len(own))),
                size_text(sum(one.nbytes for one in own)),
                *(_range([getattr(one, part) for one in own]) for part in _NUMBERS),
            )
            for (name, text, shape), own in groups.items()
        )
        heads = ("weight", "format", "shape", "times", "bytes", "amax", "input amax", "error")
        return Table("Quantized weights", heads, rows)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it, each weight by itself."""
        heads = ("dtype", "tensors", "elements", "bytes")
        return {
            "path": self.path,
            "layout": self.layout,
            "bytes": self.nbytes,
            "weights": [{**asdict(one), "formats": dict(one.formats)} for one in self.weights],
            "caches": [asdict(one) for one in self.caches],
            "plain": [dict(zip(heads, one, strict=True)) for one in self.plain],
            "missing": list(self.missing),
        }

    def to_json(self) -> str:
        """Return `as_dict` as a text."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return the tables as a page of HTML that needs no other file."""
        return html_page(f"Summary of {os.path.basename(self.path)}", self.tables())

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.to_html()


_NUMBERS = ("amax", "input_amax", "error")


def _row(text: str, count: int, elements: int, nbytes: int) -> tuple[str, ...]:
    bits = f"{8 * nbytes / elements:.4g}" if elements else ""
    return text, f"{count:,}", f"{elements:,}", size_text(nbytes), bits


def _range(values: list[float | None]) -> str:
    """Return the least and the largest of what is known."""
    known = [one for one in values if one is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _experts(weights: tuple[WeightSummary, ...]) -> Iterator[tuple[str, ...]]:
    """Yield a row of each projection of a layer's experts."""
    groups: dict[str, list[int]] = {}
    for one in weights:
        if one.tokens:
            name = re.sub(r"(experts?\.)\d+(?=\.)", r"\1*", one.name)
            groups.setdefault(name, []).extend(one.tokens)
    for name, tokens in groups.items():
        starved = sum(1 for one in tokens if not one)
        yield name, str(len(tokens)), f"{min(tokens):,}", f"{max(tokens):,}", str(starved)


def starred(name: str) -> str:
    """Return a qualified name with stars for the components that are numbers.

    Args:
        name: any.
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
