"""Many small weights: all of them by one operation, and by one call each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybridq.formats import PlaneSpec

from .case import Bench, Case
from .casts import encode_nbytes

__all__ = ["many_cases"]

#: What weights are made of: rowwise and columnwise format.
_PAIRS = (
    ("mxfp8", "mxfp8"),
    ("fp8_e4m3", "fp8_e4m3"),
    ("nvfp4_16x16", "nvfp4_16x16"),
    ("fp8_128x128", "fp8_128x128"),
    ("mxfp8", "nvfp4"),
)


def many_cases(bench: Bench) -> Iterator[list[Case]]:
    """Yield two cases for each pair: at once, beside a copy; one by one, beside at once."""
    for row, col in _PAIRS:
        yield list(_cases(bench, row, col))


def _cases(bench: Bench, row: str, col: str) -> Iterator[Case]:
    count, rows, cols = bench.many
    dtype = torch.bfloat16
    specs = [PlaneSpec.parse(name) for name in (row, col)]
    text = [str(spec) for spec in specs]
    nbytes = count * encode_nbytes(*specs, rows, cols, dtype, True)
    pair = f"{row} both" if row == col else f"{row} | {col}"
    note = f"{count} matrices, amax included" if any(s.needs_amax for s in specs) else ""

    def inputs(i: int) -> list[torch.Tensor]:
        return [bench.randn(rows, cols, dtype, i * count + j) for j in range(count)]

    def at_once(i: int) -> Callable[[], Any]:
        xs = inputs(i)
        return lambda: torch.ops.hybridq.encode_many(xs, *text)

    def one_by_one(i: int) -> Callable[[], Any]:
        xs = inputs(i)
        return lambda: [torch.ops.hybridq.encode(x, *text) for x in xs]

    whole = f"encode {count} x {pair}, at once"
    yield Case("cast", whole, (rows, cols), at_once, "copy", nbytes, note=note, is_headline=True)
    single = f"encode {count} x {pair}, one by one"
    yield Case("cast", single, (rows, cols), one_by_one, whole, nbytes, note=note, is_headline=True)
