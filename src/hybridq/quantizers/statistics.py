"""Where the amax of a plane comes from: the tensor itself, or all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch

from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneText

__all__ = ["group_amax", "group_name", "one_statistic", "statistics"]


def group_name(group: Any) -> str | None:
    """Return the name by which a quantizer holds a process group; None for None.

    Args:
        group: a `torch.distributed.ProcessGroup`, its name, or None.
    """
    if group is None or isinstance(group, str):
        return group
    name = getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(
            "amax_reduction_group: must be a torch.distributed.ProcessGroup, got "
            f"{type(group).__name__}"
        )
    return name


def group_amax(amax: torch.Tensor, name: str) -> torch.Tensor:
    """Return the maximum of `amax` over the group, NaN kept. Every rank must call it.

    The bits of non-negative FP32 order like the values, with NaN above inf, so the integer
    maximum keeps a NaN that a floating-point reduction might drop.

    Args:
        amax: FP32 `[1]`, not negative.
        name: of the process group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    import torch.distributed as dist  # not every build of torch has it
    from torch.distributed._functional_collectives import all_reduce

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "amax_reduction_group: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group first"
        )
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore
    return all_reduce(amax.view(torch.int32), "max", group).view(torch.float32)


def one_statistic(
    x: torch.Tensor, plane: PlaneText | None, direction: Direction, group: str
) -> torch.Tensor | None:
    """Return the amax of a plane of x, reduced over `group`; None if it needs none."""
    if plane is None or not plane.needs_amax:
        return None
    return group_amax(torch.ops.hybridq.amax(x, plane.spec, direction), group)


def statistics(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    *,
    group: str | None,
    col_source: str = "original",
    seed: torch.Tensor | None = None,
    row_stream: int = 0,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amax of both planes, reduced over `group`; (None, None) without a group.

    A row-scaled plane takes the amax of its own rows and is not reduced: its ranks must hold whole
    rows (see `Quantizer`).

    Args:
        x: `[rows, cols]`.
        row, col: the planes that will be encoded, or None.
        group: name of a process group, or None or empty: encode takes x's own amax.
        col_source: as in encode; the dequantized rowwise plane has an amax of its own.
        seed, row_stream: as in encode.
    """
    if not group:
        return None, None
    row_stat = one_statistic(x, row, ROWWISE, group)
    if col is None or not col.needs_amax:
        return row_stat, None
    if col_source == "rowwise_dequantized" and row is not None and not row.is_plain:
        buffers = torch.ops.hybridq.encode(
            x, row.spec, "", row_stat, None, seed, row_stream=row_stream
        )
        x = torch.ops.hybridq.decode(buffers, row.spec, x.shape[0], x.shape[1], x.dtype)
    elif row is not None and row_stat is not None and not (row.is_turned or col.is_turned):
        return row_stat, row_stat
    return row_stat, one_statistic(x, col, COLUMNWISE, group)
