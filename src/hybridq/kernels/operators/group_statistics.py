"""What is asked of each group of tokens, as operators: statistics, largest value, sum of rows.

`offsets` stays on its device; on a CPU the groups are a loop, which gives the bits of single calls.
With a `row_index` the groups are of the rows `x[row_index]`; each row of x is read once.
"""

from __future__ import annotations

import torch

from ...direction import COLUMNWISE, DIRECTIONS
from ...formats import PlaneSpec
from ..inputs import check_index, check_matrix, is_host, spec_of
from ..ragged import (
    amax_by_group,
    amax_loop,
    largest_by_group,
    largest_loop,
    sum_by_group,
    sum_loop,
)
from .library import operator

__all__: list[str] = []


def _check(
    x: torch.Tensor, offsets: torch.Tensor, where: str, row_index: torch.Tensor | None = None
) -> None:
    check_matrix(x, where)
    check_index(x, row_index, where)
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(
            f"{where}: offsets must be int32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(
            f"{where}: the tokens and offsets must be on one device, got {x.device} and "
            f"{offsets.device}"
        )


def _amax_ragged(
    x: torch.Tensor,
    offsets: torch.Tensor,
    spec: str,
    direction: str,
    row_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the statistic of each group `[G, 1]`, or `[G, C]` of the columns of each group."""
    _check(x, offsets, "amax_ragged", row_index)
    parsed = spec_of(spec, x.dtype)
    if parsed is None or direction not in DIRECTIONS:
        raise ValueError(
            "amax_ragged: takes a spec, and a direction that is rowwise or columnwise, got "
            f"{spec!r} and {direction!r}"
        )
    if parsed.row_scaled and direction != COLUMNWISE:
        raise ValueError(
            f"amax_ragged: the rows of {parsed} have an amax each, whatever their group; use amax"
        )
    if row_index is None and is_host(x.device.type):
        return amax_loop(x, offsets, parsed, direction)
    return amax_by_group(x, offsets, parsed, direction, row_index)


def _amax_ragged_fake(
    x: torch.Tensor,
    offsets: torch.Tensor,
    spec: str,
    direction: str,
    row_index: torch.Tensor | None = None,
) -> torch.Tensor:
    width = x.shape[1] if PlaneSpec.parse(spec).row_scaled else 1
    return x.new_empty((offsets.shape[0], width), dtype=torch.float32)


def _largest_ragged(
    x: torch.Tensor, offsets: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    """Return max|x| of each group, FP32 `[G, 1]`, as it is recorded: infinity stays what it is."""
    _check(x, offsets, "largest_ragged", row_index)
    if row_index is None and is_host(x.device.type):
        return largest_loop(x, offsets)
    return largest_by_group(x, offsets, row_index)


def _largest_ragged_fake(
    x: torch.Tensor, offsets: torch.Tensor, row_index: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty((offsets.shape[0], 1), dtype=torch.float32)


def _bias_grad_ragged(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each group, `[G, C]`."""
    _check(dy, offsets, "bias_grad_ragged")
    run = sum_loop if is_host(dy.device.type) else sum_by_group
    return run(dy, offsets)


def _bias_grad_ragged_fake(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return dy.new_empty((offsets.shape[0], dy.shape[1]))


operator(
    "amax_ragged(Tensor x, Tensor offsets, str spec, str direction, Tensor? row_index=None)"
    " -> Tensor",
    _amax_ragged,
    _amax_ragged_fake,
)
operator(
    "largest_ragged(Tensor x, Tensor offsets, Tensor? row_index=None) -> Tensor",
    _largest_ragged,
    _largest_ragged_fake,
)
operator(
    "bias_grad_ragged(Tensor dy, Tensor offsets) -> Tensor",
    _bias_grad_ragged,
    _bias_grad_ragged_fake,
)
