"""Where the amax of a plane comes from: the tensor itself, or all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch

from .._torch_ranks import functional_all_reduce
from ..direction import COLUMNWISE, ROWWISE, Direction
from ..formats import PlaneText
from ..kernels.choice import DECODED, ORIGINAL, EncodeRequest

__all__ = ["group_amax", "group_name", "one_statistic", "statistics", "with_statistics"]


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

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "amax_reduction_group: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group first"
        )
    return functional_all_reduce(amax.view(torch.int32), "max", name).view(torch.float32)


def one_statistic(
    x: torch.Tensor, plane: PlaneText | None, direction: Direction, group: str
) -> torch.Tensor | None:
    """Return the amax of a plane of x, reduced over `group`; None if it needs none."""
    if plane is None or not plane.needs_amax:
        return None
    return group_amax(torch.ops.hybridq.amax(x, plane.spec, direction), group)


def with_statistics(
    request: EncodeRequest,
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    group: str | None,
) -> EncodeRequest:
    """Return the request with the amax of both planes of x, reduced over `group`.

    A row-scaled plane takes the amax of its own rows and is not reduced: its ranks must hold whole
    rows (see `Quantizer`).

    Args:
        request: with the columnwise source, the seed and the rowwise plane's stream.
        x: `[rows, cols]`.
        row, col: the planes that will be encoded, or None.
        group: name of a process group, or None or empty: the request as it is.
    """
    if not group:
        return request
    row_stat = col_stat = one_statistic(x, row, ROWWISE, group)
    if col is None or not col.needs_amax:
        return request._replace(row_stat=row_stat)
    if request.col_source == DECODED and row is not None and not row.is_plain:
        alone = request._replace(row=row.spec, row_stat=row_stat).row_alone()
        buffers = torch.ops.hybridq.encode(x, *alone.planes(), **alone.options())
        x = torch.ops.hybridq.decode(buffers, row.spec, x.shape[0], x.shape[1], x.dtype)
        col_stat = None
    elif row_stat is None or (row is not None and row.is_transformed) or col.is_transformed:
        col_stat = None
    if col_stat is None:  # else one amax serves both
        col_stat = one_statistic(x, col, COLUMNWISE, group)
    return request._replace(row_stat=row_stat, col_stat=col_stat)


def statistics(
    x: torch.Tensor,
    row: PlaneText | None,
    col: PlaneText | None,
    *,
    group: str | None,
    col_source: str = ORIGINAL,
    seed: torch.Tensor | None = None,
    row_stream: int = 0,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the amax of both planes, reduced over `group`; (None, None) without a group.

    Args:
        x, row, col, group: as `with_statistics` takes them.
        col_source, seed, row_stream: of its request.
    """
    request = EncodeRequest(seed=seed, col_source=col_source, row_stream=row_stream)
    found = with_statistics(request, x, row, col, group)
    return found.row_stat, found.col_stat
