"""A calibration in words: every quantizer with its format and amax, and tokens per expert."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._text import Table, html_page
from .calibration import Calibration

__all__ = ["CalibrationSummary"]


@dataclass(frozen=True)
class CalibrationSummary:
    """Tables of a calibration; `save` writes them as text, JSON or HTML.

    Args:
        calibration: of which.

    Example:
        >>> import torch, hybridq
        >>> from hybridq.calibration import CalibrationSummary
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> found = hybridq.calibrate(model, [torch.ones(3, 8)], "nvfp4")
        >>> CalibrationSummary(found).as_dict()["products"][0]["amax"]["input"]
        1.0
    """

    calibration: Calibration

    def tables(self) -> tuple[Table, ...]:
        """Return a table of quantizers, and one of experts where there are some."""
        found = self.calibration
        heads = ("name", "slot", "format", "amax", "tokens")
        how = ", ".join(f"{slot} by {text}" for slot, text in found.observers.items())
        title = f"Calibration of {len(found.tokens)} products, {found.batches} batches: {how}"
        experts = tuple(self._experts())
        made = [Table(title, heads, tuple(self._rows()))]
        if experts:
            columns = ("experts of", "experts", "least tokens", "median", "most", "without any")
            made.append(Table("Tokens per expert", columns, experts))
        return tuple(made)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        found = self.calibration
        for name, slot, amax in found.entries():
            read = "input" if slot == "expert_input" else slot
            tokens = found.tokens.get(name)
            count = "" if tokens is None else f"{int(tokens.sum()):,}"
            yield name, slot, found.formats.get(name, {}).get(read, ""), _range(amax), count

    def _experts(self) -> Iterator[tuple[str, ...]]:
        for name, tokens in sorted(self.calibration.tokens.items()):
            if tokens.dim():
                starved = (tokens == 0).nonzero().flatten().tolist()
                counts = (int(tokens.min()), int(tokens.median()), int(tokens.max()))
                without = f"{len(starved)}: {_some(starved)}" if starved else "0"
                yield name, str(len(tokens)), *(f"{one:,}" for one in counts), without

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it: every amax and every count; None: nothing was seen."""
        found = self.calibration
        names = sorted({*found.amaxes, *found.tokens})
        return {
            "batches": found.batches,
            "observers": dict(found.observers),
            "products": [
                {
                    "name": name,
                    "formats": dict(found.formats.get(name, {})),
                    "amax": {s: _plain(one) for s, one in found.amaxes.get(name, {}).items()},
                    "tokens": found.tokens[name].tolist() if name in found.tokens else None,
                }
                for name in names
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON (`.json`), a page of HTML (`.html`), or else as text.

        Args:
            path: of the file.

        Raises:
            OSError: it cannot be written.
        """
        target = Path(path)
        if target.suffix == ".json":
            text = json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"
        elif target.suffix == ".html":
            text = html_page("Calibration", self.tables())
        else:
            text = f"{self}\n"
        target.write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))


def _range(amax: torch.Tensor) -> str:
    """Return an amax, or the least and the most of several and how many there are."""
    if not amax.dim():
        return f"{float(amax):.6g}"
    seen = amax[~amax.isneginf()]
    if not seen.numel():
        return ""
    return f"{float(seen.min()):.6g} to {float(seen.max()):.6g} ({seen.numel()})"


def _plain(amax: torch.Tensor) -> Any:
    """Return an amax as numbers, None for -inf."""
    if amax.dim():
        return [_plain(one) for one in amax]
    return None if bool(amax.isneginf()) else float(amax)


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
