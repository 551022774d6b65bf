"""Tokens sorted by group for tests: formats, splits, and an oracle of their planes.

The oracle pads with a loop over the groups and encodes with the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

import hybridq
import kernel_cases as cases
from hybridq import reference
from hybridq.formats import PlaneSpec
from hybridq.kernels.choice import Groups
from hybridq.kernels.ragged import capacity, group_ends, padded_offsets, pads_rows, row_part
from hybridq.kernels.ragged.group_loop import column_part

SPECS = {**cases.plain_specs(), **cases.option_specs()}
#: Sizes of groups, and how many tokens behind them belong to none.
SIZES = [((3, 0, 130, 128, 7), 5), ((0, 0), 4), ((256,), 0), ((0,), 0), ((), 3), ((1,) * 9, 1)]
PLAIN = {name: PlaneSpec.parse(name) for name in ("bf16", "fp16", "fp32")}
PAIRS = {
    **{name: (spec, spec) for name, spec in {**SPECS, **PLAIN}.items()},
    **cases.pairs(),
    "none | nvfp4": (None, SPECS["nvfp4"]),
    "mxfp8 | none": (SPECS["mxfp8"], None),
    "bf16 | nvfp4 rht sr": (PLAIN["bf16"], SPECS["nvfp4 rht sr"]),
    "mxfp8 sr | fp32": (SPECS["mxfp8 sr"], PLAIN["fp32"]),
    "bf16 | fp16": (PLAIN["bf16"], PLAIN["fp16"]),
}
#: Those that one emulated kernel makes for aligned tokens, reading x through the offsets.
BY_KERNEL = (
    *("mxfp8", "nvfp4", "nvfp4 rht", "nvfp4 mae", "mxfp4", "fp8_1x128"),
    *list(cases.pairs())[:10],
)


def ends(sizes: tuple[int, ...]) -> torch.Tensor:
    """Offsets as the operators take them."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def bounds(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Begin and end of every group of tokens."""
    stops = list(itertools.accumulate(sizes))
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def places(sizes: tuple[int, ...]) -> list[int]:
    """Where each group begins in a padded plane."""
    takes = [max(-(-size // 128), 1) * 128 for size in sizes]
    return [sum(takes[:group]) for group in range(len(sizes))]


class Part(NamedTuple):
    """A buffer of one group's own plane, of the buffers of all groups.

    Attributes:
        group: which.
        is_col: it is of the columnwise plane.
        spec: of the plane.
        number: of the buffer.
        buffer: itself.
    """

    group: int
    is_col: bool
    spec: PlaneSpec
    number: int
    buffer: torch.Tensor


def parts_of(
    buffers: Sequence[torch.Tensor],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    cols: int,
    sizes: tuple[int, ...],
) -> Iterator[Part]:
    """Yield the buffers of each group's planes by group; rows that belong to no group have none."""
    split = len(row.buffers(1, 1)) if row is not None else 0
    for g, ((begin, end), padded_at) in enumerate(zip(bounds(sizes), places(sizes), strict=True)):
        if row is not None:
            at = padded_at if pads_rows(row) else begin
            for i, one in enumerate(row_part(list(buffers[:split]), row, cols, at, end - begin, g)):
                yield Part(g, False, row, i, one)
        if col is not None:
            at = begin if col.format.is_identity else padded_at
            for i, one in enumerate(
                column_part(list(buffers[split:]), col, cols, at, end - begin, g)
            ):
                yield Part(g, True, col, i, one)


def as_groups(offsets: torch.Tensor, tokens: int) -> Groups:
    """Where groups lie, as a backend's operation takes it."""
    ends, begins = group_ends(offsets, tokens), padded_offsets(offsets, tokens)
    return Groups(ends, begins, capacity(tokens, offsets.shape[0]))


def padded(x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """What docs/reference/gemm.md says that the columnwise plane is of."""
    out = x.new_zeros((x.shape[0] // 128 + len(sizes)) * 128, x.shape[1])
    for (begin, end), place in zip(bounds(sizes), places(sizes), strict=True):
        out[place : place + end - begin] = x[begin:end]
    return out


def expected(
    x: torch.Tensor, spec: PlaneSpec | None, stream: int, seed: torch.Tensor, is_column: bool
) -> list[torch.Tensor]:
    """The reference's buffers of one plane of x."""
    if spec is None:
        return []
    if spec.format.is_identity:
        own = x.t() if is_column else x
        return [own.to(spec.format.storage_dtype).contiguous()]
    own = x.t() if is_column else x
    stat = reference.tensor_amax(own, spec) if spec.needs_amax else None
    return reference.encode_plane(
        own, spec, stat=stat, seed=seed, stream=stream, is_columnwise=is_column
    )


def planes_of(
    x: torch.Tensor,
    sizes: tuple[int, ...],
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    seed: torch.Tensor,
    streams: tuple[int, int] = (0, 1),
) -> list[torch.Tensor]:
    """The reference's buffers of both planes of ragged tokens."""
    is_plain = col is not None and col.format.is_identity
    columns = x if is_plain else padded(x, sizes)
    return [
        *expected(x, row, streams[0], seed, False),
        *expected(columns, col, streams[1], seed, True),
    ]


def text(spec: PlaneSpec | None) -> str:
    return "" if spec is None else spec.text


def same(got: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
    """Every bit; of an amax that is NaN, that it is NaN."""
    assert len(got) == len(want), what
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        alike = cases.same_values if w.is_floating_point() else cases.assert_same
        alike(g, w, f"{what}: buffer {i}")


def buffers(ragged: hybridq.RaggedTensor) -> list[torch.Tensor]:
    return [buffer for plane in ragged.planes for buffer in plane.tensors]
