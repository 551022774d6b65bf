"""Ragged tokens in the compiled core: the planes of each group, written where they belong."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import PlaneSpec
from ...reference import one_nan
from ..choice import EncodeRequest, Groups, Prologue
from ..inputs import given, made, matrix
from ..ragged import TOKEN_PAD, fill_values, is_by_group, pads_rows, ragged_shapes, row_part
from . import backend
from .results import result

__all__ = ["encode_ragged", "map_encode_ragged"]

_CPU = torch.device("cpu")
_LARGEST = torch.finfo(torch.float32).max
Buffers = list[torch.Tensor]


def encode_ragged(
    x: torch.Tensor,
    groups: Groups,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> Buffers | None:
    """Return the buffers of the planes by group, or None for what the core does not take at once.

    Args:
        x: `[T, C]`, or the matrix that `request.row_index` takes its rows out of.
        groups: of the rows.
        row, col: specs of the planes, or None.
        request: statistics and seeds of each group, streams and the index.
    """
    return _encode(x, groups, row, col, request, None)


def map_encode_ragged(
    x: torch.Tensor,
    prologue: Prologue,
    groups: Groups,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> Buffers | None:
    """Return what `encode_ragged` does of an activation of x, which is made in cache only.

    Args:
        x: `[T, C]`, or `[T, 2 * C]` of a gated activation.
        prologue: which activation.
        groups, row, col, request: as `encode_ragged` takes them; there is no index.
    """
    return _encode(x, groups, row, col, request, prologue)


def _encode(
    x: torch.Tensor,
    groups: Groups,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
    prologue: Prologue | None,
) -> Buffers | None:
    wanted = [(spec, is_col) for spec, is_col in ((row, False), (col, True)) if spec is not None]
    stats = (request.row_stat, request.col_stat)
    if not request.by_group or request.is_decoded() or (x.stride(1) != 1 and x.shape[1] != 1):
        return None
    for spec, is_col in wanted:
        stat = stats[is_col] if spec.needs_amax else None
        if spec.format.is_identity or (stat is not None and not _is_each(stat, spec, groups)):
            return None
    index, count, cols = request.row_index, groups.ends.shape[0], x.shape[1]
    activation = None
    if prologue is not None:
        cols = cols // 2 if prologue.is_gated else cols
        activation = (prologue.core, prologue.is_gated)
    tokens = x.shape[0] if index is None else index.shape[0]
    seeds = _seeds(wanted, request.seed)
    own: list[Buffers] = []
    planes: list[tuple[Any, ...] | None] = [None, None]
    known = []  # alive until the call
    for spec, is_col in wanted:
        buffers = _buffers(spec, tokens, cols, count, is_col)
        stat = stats[is_col] if spec.needs_amax else None
        address = 0
        if stat is not None:
            stat = one_nan(stat.reshape(count, 1).clamp(max=_LARGEST)).contiguous()
            address = given("encode_ragged: statistics", stat, torch.float32, count)
            known.append(stat)
        planes[is_col] = (
            backend.core_spec(spec)[0],
            made(buffers[0]),
            made(buffers[1]),
            address,
            made(buffers[2]) if len(buffers) == 3 else 0,
            0 if seeds is None else given("encode_ragged: seed", seeds, torch.int64, count),
            request.col_stream if is_col else request.row_stream,
        )
        own.append(buffers)
    taken = None
    if index is not None:
        taken = (given("encode_ragged: index", index, torch.int64, tokens), x.shape[0])
    end = backend.core.encode_groups(
        *matrix("encode_ragged: x", x),
        tokens,
        cols,
        x.stride(0),
        taken,
        activation,
        given("encode_ragged: ends", groups.ends, torch.int32, count),
        count,
        TOKEN_PAD,
        *planes,
        torch.get_num_threads(),
    )
    if row is not None and end < tokens and not pads_rows(row):
        _clear_rows(own[0], row, cols, end, tokens)
    return [buffer for buffers in own for buffer in buffers]


def _is_each(stat: torch.Tensor, spec: PlaneSpec, groups: Groups) -> bool:
    """Return whether a statistic is one FP32 value for each group."""
    is_one = stat.dtype == torch.float32 and stat.numel() == groups.ends.shape[0]
    return is_one and not spec.row_scaled


def _seeds(wanted: list[tuple[PlaneSpec, bool]], seed: torch.Tensor | None) -> torch.Tensor | None:
    """Return the seeds where a plane asks for them."""
    if seed is None or not any(spec.stochastic for spec, _ in wanted):
        return None
    return seed.cpu().contiguous()


def _buffers(spec: PlaneSpec, tokens: int, cols: int, groups: int, is_col: bool) -> Buffers:
    """Return the buffers of a plane; where it is not certain that groups cover them, of zeros."""
    made_: Buffers = []
    values = fill_values(spec)
    shapes = ragged_shapes(spec, tokens, cols, groups, is_col, True)
    covered = not is_col and not pads_rows(spec)
    for number, ((shape, dtype), value) in enumerate(zip(shapes, values, strict=True)):
        is_last = number == len(shapes) - 1
        if covered and not (is_last and is_by_group(spec, is_col)):
            made_.append(result(*shape, dtype=dtype))
        else:
            made_.append(torch.full(shape, value, dtype=dtype, device=_CPU))
    return made_


def _clear_rows(buffers: Buffers, spec: PlaneSpec, cols: int, end: int, tokens: int) -> None:
    """Make the rows that belong to no group rows of zeros."""
    parts = row_part(buffers, spec, cols, end, tokens - end, 0)
    values = fill_values(spec)
    for number, (part, value) in enumerate(zip(parts, values, strict=True)):
        if not (number == len(parts) - 1 and is_by_group(spec, False)):
            part.fill_(value)
