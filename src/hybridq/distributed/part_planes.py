"""Quantized weights that `parallelize_module` deals out: their planes are cut, and not values.

Source: ours.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..nn import Linear, of_part
from ..storage import TensorStorage
from ..tensor import QuantizedTensor, is_quantized

__all__ = ["split_planes"]


def split_planes(style: Any, linear: Linear, mesh: DeviceMesh, dim: int) -> None:
    """Make the quantized weight of a module a DTensor of parts; a plain one stays as it is.

    Every rank gets its part of the planes that the style's `src_data_rank` has, as of any parameter
    in torch; where that is None each rank cuts its own.

    Args:
        style: of tensor parallelism.
        linear: whose weight it is.
        mesh: of one dimension.
        dim: 0: rows of `[out, in]` are dealt out; 1: columns.

    Raises:
        ValueError: a block of a plane would lie on two ranks.
        NotImplementedError: a plane cannot be made of parts.
    """
    weight: Any = linear.weight
    if not is_quantized(weight):
        return
    quantizer = weight.quantizer_for_write(type(style).__name__)
    world, rank, whole = mesh.size(), mesh.get_local_rank(), weight.shape[dim]
    size = -(-whole // world)
    starts = [min(size * number, whole) for number in range(world + 1)]
    pieces = [
        _piece(weight.tensor_storage, dim, starts[number], starts[number + 1])
        for number in range(world)
    ]
    what = "columns" if dim else "rows"
    name = f"{type(style).__name__}: {linear.name or type(linear).__name__}.weight"
    if None in pieces or starts[-2] == whole:
        sizes = [b - a for a, b in itertools.pairwise(starts)]
        raise ValueError(
            f"{name} {list(weight.shape)} is quantized, and its {what} must give each rank whole "
            f"blocks, got {sizes} for {quantizer!r}; take another size or number of ranks, or "
            "quantize after parallelize_module"
        )
    planes = weight.tensor_storage.planes
    if any(plane.spec.stochastic for plane in planes):
        raise NotImplementedError(
            f"{name} is rounded stochastically, and random bits belong to places in the whole "
            f"weight, got {quantizer!r}; make it in high precision"
        )
    if any(plane.spec.row_scaled and plane.own_axis(dim) == 1 for plane in planes):
        raise NotImplementedError(
            f"{name} has an amax for each row, of which ranks would have parts, got {quantizer!r}; "
            "make it in high precision"
        )
    source = getattr(style, "src_data_rank", 0)
    if source is not None:
        for plane in planes:
            for buffer in plane.tensors:
                _send(buffer, mesh, source)
    storage: Any = pieces[rank]
    group = mesh.get_group().group_name
    shape = list(weight.shape)
    shape[dim] = starts[rank + 1] - starts[rank]
    local = QuantizedTensor.make(
        storage.map(lambda buffer: buffer.clone(memory_format=torch.contiguous_format)),
        shape,
        weight.dtype,
        quantizer=of_part(quantizer, group),
    )
    made = DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=weight.shape, stride=weight.stride()
    )
    linear.register_parameter("weight", nn.Parameter(made, weight.requires_grad))


def _piece(storage: TensorStorage, dim: int, start: int, stop: int) -> TensorStorage | None:
    """Return views of a part of the planes; None: a block of one of them is cut."""
    part = storage.part(dim, start, stop)
    return part if part is not None and len(part.planes) == len(storage.planes) else None


def _send(buffer: torch.Tensor, mesh: DeviceMesh, source: int) -> None:
    """Give all ranks what one of them has, in place."""
    flat = buffer if buffer.is_contiguous() else buffer.contiguous()
    dist.broadcast(flat.view(torch.uint8), group=mesh.get_group(), group_src=source)
    if flat is not buffer:
        buffer.copy_(flat)
