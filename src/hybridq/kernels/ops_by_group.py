"""What is asked of each group of tokens, as operators: statistics, largest value, sum of rows.

`offsets` stays on its device; on a CPU the groups are a loop, which gives the bits of single calls.
"""

from __future__ import annotations

import torch

from ..direction import COLUMNWISE, DIRECTIONS
from ..formats import PlaneSpec
from .checks import check_matrix, spec_of
from .derivatives import refuse
from .group_device import amax_by_group, largest_by_group, sum_by_group
from .group_loop import amax_loop, largest_loop, sum_loop
from .ops import LIBRARY

__all__: list[str] = []

for _schema in (
    "amax_ragged(Tensor x, Tensor offsets, str spec, str direction) -> Tensor",
    "largest_ragged(Tensor x, Tensor offsets) -> Tensor",
    "bias_grad_ragged(Tensor dy, Tensor offsets) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _check(x: torch.Tensor, offsets: torch.Tensor, where: str) -> None:
    check_matrix(x, where)
    if offsets.dtype != torch.int32 or offsets.dim() != 1:
        raise ValueError(
            f"{where}: offsets must be int32 [G], got {offsets.dtype} {tuple(offsets.shape)}"
        )
    if offsets.device != x.device:
        raise ValueError(
            f"{where}: the tokens and offsets must be on one device, got {x.device} and "
            f"{offsets.device}"
        )


def _amax_ragged(x: torch.Tensor, offsets: torch.Tensor, spec: str, direction: str) -> torch.Tensor:
    """Return the statistic of each group `[G, 1]`, or `[G, C]` of the columns of each group."""
    _check(x, offsets, "amax_ragged")
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
    run = amax_loop if x.device.type == "cpu" else amax_by_group
    return run(x, offsets, parsed, direction)


def _amax_ragged_fake(
    x: torch.Tensor, offsets: torch.Tensor, spec: str, direction: str
) -> torch.Tensor:
    width = x.shape[1] if PlaneSpec.parse(spec).row_scaled else 1
    return x.new_empty((offsets.shape[0], width), dtype=torch.float32)


def _largest_ragged(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return max|x| of each group, FP32 `[G, 1]`, as it is recorded: infinity stays what it is."""
    _check(x, offsets, "largest_ragged")
    run = largest_loop if x.device.type == "cpu" else largest_by_group
    return run(x, offsets)


def _largest_ragged_fake(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty((offsets.shape[0], 1), dtype=torch.float32)


def _bias_grad_ragged(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each group, `[G, C]`."""
    _check(dy, offsets, "bias_grad_ragged")
    run = sum_loop if dy.device.type == "cpu" else sum_by_group
    return run(dy, offsets)


def _bias_grad_ragged_fake(dy: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return dy.new_empty((offsets.shape[0], dy.shape[1]))


for _name, _implementation, _fake in (
    ("amax_ragged", _amax_ragged, _amax_ragged_fake),
    ("largest_ragged", _largest_ragged, _largest_ragged_fake),
    ("bias_grad_ragged", _bias_grad_ragged, _bias_grad_ragged_fake),
):
    LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hybridq::{_name}", _fake, lib=LIBRARY)
    torch.library.register_autograd(f"hybridq::{_name}", refuse(f"hybridq::{_name}"), lib=LIBRARY)
