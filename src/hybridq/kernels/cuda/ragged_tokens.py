"""Ragged tokens through the CUDA kernels, which read rows of x through offsets and an index."""

from __future__ import annotations

from typing import Any

import torch

from ...formats import PlaneSpec
from ..choice import EncodeRequest, Groups
from ..ragged import is_by_group
from .plane_layout import plane_layout

__all__ = ["encode_ragged"]


def encode_ragged(
    kernels: Any,
    x: torch.Tensor,
    groups: Groups,
    row: PlaneSpec | None,
    col: PlaneSpec | None,
    request: EncodeRequest,
) -> list[torch.Tensor] | None:
    """Return the buffers of both planes, or None if no kernel reads x through the groups.

    Args:
        kernels: the `GpuKernels` to launch.
        x: `[T, C]`, or the matrix that `request.row_index` takes its rows out of.
        groups: of its rows.
        row: spec of the rowwise plane of x, or None.
        col: spec of the columnwise plane of the padded tokens; None: there is an index.
        request: statistics, seed and streams; statistics that are not given are found on the way.
            By group they are `[G, 1]`, and so is the last buffer of a plane that has one of its
            group (`is_by_group`); random bytes are those of one encode, with the first seed.
    """
    count, seed = groups.ends.shape[0], request.seed
    if request.by_group and seed is not None:
        seed = seed[:1]
    index, cols = request.row_index, x.shape[1]
    tokens = x.shape[0] if index is None else index.shape[0]
    buffers: list[torch.Tensor] = []
    planes: list[tuple[Any, ...] | None] = []
    finds: list[bool] = []
    stats: list[torch.Tensor] = []  # alive until the launch
    with kernels.launch(x.device) as stream:
        for is_col, spec, shape, known, random_stream in (
            (False, row, (tokens, cols), request.row_stat, request.row_stream),
            (True, col, (cols, groups.columns), request.col_stat, request.col_stream),
        ):
            if spec is None:
                planes.append(None)
                finds.append(False)
                continue
            layout = plane_layout(spec, *shape)
            own = layout.make(x.device)
            of_groups = count if request.by_group and is_by_group(spec, is_col) else None
            if of_groups is not None:  # what there is one of for a tensor
                own[-1] = own[-1].new_empty(count, *own[-1].shape)
            stat = known if spec.needs_amax else None
            finds.append(spec.needs_amax and known is None)
            if finds[-1]:
                stat = own[2] if len(own) == 3 else own[1].new_empty(count if of_groups else 1)
            if stat is not None:
                stats.append(stat)
            if len(own) == 3 and known is not None:
                own[2].copy_(known.view(own[2].shape))
            planes.append(
                (
                    layout.text,
                    kernels.pointer(own[0], True),
                    kernels.pointer(own[1], True),
                    kernels.statistic(spec, shape[0], stat, finds[-1], x.device, of_groups),
                    kernels.seed(spec, seed, x.device),
                    0,
                    0,
                    random_stream,
                    *layout.scale_strides,
                    layout.form,
                )
            )
            buffers += own
        done = kernels.module.encode_ragged(
            *kernels.matrix("encode_ragged: x", x, x.device),
            tokens,
            cols,
            *x.stride(),
            *planes,
            *finds,
            kernels.given("encode_ragged: ends", groups.ends, torch.int32, count, x.device),
            kernels.given("encode_ragged: begins", groups.padded, torch.int32, count + 1, x.device),
            count,
            groups.columns,
            stream,
            kernels.given("encode_ragged: row_index", index, torch.int64, tokens, x.device),
            x.shape[0],
            request.by_group,
        )
    return buffers if done else None
